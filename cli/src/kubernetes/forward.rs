//! Byte streams to ports of pods, forwarded by the API server.
//!
//! The kubelet dials loopback inside the pod, so even ports that serve their own machine only are reached.

use std::sync::{Arc, OnceLock};

use anyhow::{Context as _, anyhow, ensure};
use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use super::{Cluster, PATIENCE, reason};

/// A stream to a pod's port, and what the kubelet says of it.
pub(crate) struct Forwarded<S> {
    pub(crate) stream: S,
    pub(crate) trouble: Trouble,
}

/// Why the kubelet could not connect; the stream only ends.
#[derive(Clone, Default)]
pub(crate) struct Trouble(Arc<OnceLock<String>>);

impl Trouble {
    /// Puts the kubelet's reason beside what came of it.
    pub(crate) fn explain<T>(&self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        match self.0.get() {
            Some(said) => result.with_context(|| said.trim().to_owned()),
            None => result,
        }
    }
}

/// Opens a stream to a pod's port.
///
/// # Errors
/// A pod that is not there, and a user who may not forward ports. A port where nobody listens shows only later, as a
/// stream that ends, and [`Trouble`] explains it.
pub(crate) async fn open(
    cluster: &Cluster,
    namespace: &str,
    pod: &str,
    port: u16,
) -> anyhow::Result<Forwarded<impl AsyncRead + AsyncWrite + Unpin + Send + use<>>> {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let opening = async {
        let mut forwarder = api
            .portforward(pod, &[port])
            .await
            .map_err(|error| anyhow!("forwarding port {port} of pod {namespace}/{pod}: {}", reason(&error)))?;
        let stream = forwarder
            .take_stream(port)
            .context("the forwarded port has no stream")?;
        let trouble = Trouble::default();
        if let Some(said) = forwarder.take_error(port) {
            let told = trouble.clone();
            // Ends with the connection.
            tokio::spawn(async move {
                if let Some(said) = said.await {
                    let _first = told.0.set(said);
                    forwarder.abort();
                }
            });
        }
        Ok(Forwarded { stream, trouble })
    };
    timeout(PATIENCE, opening)
        .await
        .with_context(|| format!("forwarding port {port} of pod {namespace}/{pod} took longer than {PATIENCE:?}"))?
}

/// Gets a page that a pod serves, such as `/metrics`.
///
/// # Errors
/// No answer, or another than 200.
pub(crate) async fn get(
    cluster: &Cluster,
    namespace: &str,
    pod: &str,
    port: u16,
    path: &str,
) -> anyhow::Result<String> {
    let Forwarded { stream, trouble } = open(cluster, namespace, pod, port).await?;
    let getting = async {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // Ends with the sender.
        tokio::spawn(connection);
        let request = Request::get(path)
            .header(header::HOST, format!("{pod}:{port}"))
            .body(Empty::<Bytes>::new())?;
        let answer = sender.send_request(request).await?;
        ensure!(answer.status().is_success(), "{path} answered {}", answer.status());
        let body = Limited::new(answer.into_body(), MAX_PAGE).collect();
        let bytes = body.await.map_err(|error| anyhow!(error))?.to_bytes();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let page = timeout(PATIENCE, getting)
        .await
        .with_context(|| format!("nothing came within {PATIENCE:?}"))
        .and_then(|page| page);
    trouble
        .explain(page)
        .with_context(|| format!("getting {path} from port {port} of pod {namespace}/{pod}"))
}

/// Bytes of one page; a busy proxy's metrics have a few MiB.
const MAX_PAGE: usize = 64 << 20;
