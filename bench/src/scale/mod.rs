//! What the scale tests share: requests to an API server, the program that is measured, its clients and probes, and units.

pub(crate) mod control_plane;
pub(crate) mod destination;
pub(crate) mod liveness;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use futures_util::{AsyncBufReadExt as _, Stream, StreamExt as _};
use http::{Method, Request};
use kube::Client;
use serde_json::Value;
use tulle_control::kubernetes::{self, request_layer::RequestRate};
use tulle_core::metrics::Registry;

/// A client of an API server, without a limit on its request rate.
#[derive(Clone)]
pub(crate) struct ApiClient(Client);

impl ApiClient {
    pub(crate) async fn connect(kubeconfig: &Path) -> anyhow::Result<Self> {
        let config = kubernetes::Config {
            kubeconfig: Some(kubeconfig.to_owned()),
            request_rate: RequestRate { qps: 1e5, burst: 1000 },
        };
        Ok(Self(kubernetes::client(&config, &Registry::new()).await?))
    }

    pub(crate) async fn send(&self, method: Method, path: &str, body: &Value) -> anyhow::Result<()> {
        let action = format!("{method} {path}");
        let content_type = match method {
            Method::PATCH => "application/merge-patch+json",
            _ => "application/json",
        };
        let req = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", content_type);
        self.request(req, body, action).await
    }

    /// Creates or replaces an object by server-side apply.
    pub(crate) async fn apply(&self, path: &str, object: &Value) -> anyhow::Result<()> {
        let path = format!("{path}?fieldManager=bench&force=true");
        let action = format!("applying {path}");
        let req = Request::patch(path).header("content-type", "application/apply-patch+yaml");
        self.request(req, object, action).await
    }

    async fn request(&self, req: http::request::Builder, body: &Value, action: String) -> anyhow::Result<()> {
        let req = req.body(body.to_string().into_bytes()).context("making a request")?;
        self.0.request_text(req).await.map(drop).context(action)
    }

    /// Watches the objects of a kind. Each item is one line of JSON: first the existing objects, then changes.
    pub(crate) async fn watch(
        &self,
        path: &str,
    ) -> anyhow::Result<impl Stream<Item = io::Result<String>> + Send + use<>> {
        let req = Request::get(format!("{path}?watch=1&resourceVersion=0"))
            .body(Vec::new())
            .context("making a request")?;
        let lines = self.0.request_stream(req).await;
        Ok(lines.with_context(|| format!("watching {path}"))?.lines())
    }
}

/// Sends requests, up to 32 at a time.
pub(crate) async fn run_concurrently(
    requests: impl Stream<Item = impl Future<Output = anyhow::Result<()>>>,
) -> anyhow::Result<()> {
    let mut responses = std::pin::pin!(requests.buffer_unordered(32));
    while let Some(response) = responses.next().await {
        response?;
    }
    Ok(())
}

/// The tulle-control binary: the given one, or the one beside this program.
pub(crate) fn control_program(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    match given {
        Some(path) => Ok(path.to_owned()),
        None => Ok(std::env::current_exe()
            .context("finding this program")?
            .with_file_name("tulle-control")),
    }
}

pub(crate) fn megabytes(kib: u64) -> f64 {
    kib as f64 / 1000.0 * 1.024
}

pub(crate) fn millis(micros: u64) -> f64 {
    micros as f64 / 1000.0
}

/// Wait before memory is read, so that work after the first results has finished.
pub(crate) const MEMORY_SETTLE_DELAY: Duration = Duration::from_secs(2);
