//! Byte streams to ports of pods, forwarded by the API server.
//!
//! The kubelet connects to loopback inside the pod, so ports that listen only on loopback are reachable too.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

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

use super::{Cluster, REQUEST_TIMEOUT, reason};

/// A stream to a pod's port, and the kubelet's error.
pub(crate) struct ForwardedPort<S> {
    pub(crate) stream: S,
    pub(crate) error: ForwardError,
}

/// A port of a pod.
#[derive(Clone, Copy)]
pub(crate) struct PodPort<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) pod: &'a str,
    pub(crate) port: u16,
}

/// The reason why the kubelet could not connect. The stream ends without an error in this case.
#[derive(Clone, Default)]
pub(crate) struct ForwardError(Arc<OnceLock<String>>);

impl ForwardError {
    /// Adds the kubelet's reason to an error.
    pub(crate) fn add_context<T>(&self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        match self.0.get() {
            Some(message) => result.with_context(|| message.trim().to_owned()),
            None => result,
        }
    }
}

/// Opens a stream to a pod's port.
///
/// # Errors
/// Fails if the pod does not exist, or if the user has no permission to forward ports. A closed port is detected only when the
/// stream ends; [`ForwardError`] then has the reason.
pub(crate) async fn open(
    cluster: &Cluster,
    namespace: &str,
    pod: &str,
    port: u16,
) -> anyhow::Result<ForwardedPort<impl AsyncRead + AsyncWrite + Unpin + Send + use<>>> {
    open_within(cluster, PodPort { namespace, pod, port }, REQUEST_TIMEOUT).await
}

async fn open_within(
    cluster: &Cluster,
    target: PodPort<'_>,
    limit: Duration,
) -> anyhow::Result<ForwardedPort<impl AsyncRead + AsyncWrite + Unpin + Send + use<>>> {
    let PodPort { namespace, pod, port } = target;
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let opening = async {
        let mut forwarder = api
            .portforward(pod, &[port])
            .await
            .map_err(|error| anyhow!("forwarding port {port} of pod {namespace}/{pod}: {}", reason(&error)))?;
        let stream = forwarder
            .take_stream(port)
            .context("the forwarded port has no stream")?;
        let forward_error = ForwardError::default();
        if let Some(error_message) = forwarder.take_error(port) {
            let shared_error = forward_error.clone();
            // The task ends with the connection.
            tokio::spawn(async move {
                if let Some(message) = error_message.await {
                    let _ = shared_error.0.set(message); // only the first message is kept
                    forwarder.abort();
                }
            });
        }
        Ok(ForwardedPort {
            stream,
            error: forward_error,
        })
    };
    timeout(limit, opening)
        .await
        .with_context(|| format!("forwarding port {port} of pod {namespace}/{pod} took longer than {limit:?}"))?
}

/// Fetches a page that a pod serves, such as `/metrics`.
///
/// # Errors
/// Fails if there is no response, or if its status is not 2xx.
pub(crate) async fn get(
    cluster: &Cluster,
    namespace: &str,
    pod: &str,
    port: u16,
    path: &str,
) -> anyhow::Result<String> {
    get_within(cluster, PodPort { namespace, pod, port }, path, REQUEST_TIMEOUT).await
}

/// Like [`get`]. `limit` is the maximum time to open the port, and also the maximum time to get the response.
///
/// # Errors
/// As [`get`].
pub(crate) async fn get_within(
    cluster: &Cluster,
    target: PodPort<'_>,
    path: &str,
    limit: Duration,
) -> anyhow::Result<String> {
    let PodPort { namespace, pod, port } = target;
    let ForwardedPort {
        stream,
        error: forward_error,
    } = open_within(cluster, target, limit).await?;
    let getting = async {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // The task ends when the sender is dropped.
        tokio::spawn(connection);
        let request = Request::get(path)
            .header(header::HOST, format!("{pod}:{port}"))
            .body(Empty::<Bytes>::new())?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        ensure!(status.is_success(), "{path} responded with status {status}");
        let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect();
        let bytes = body.await.map_err(|error| anyhow!(error))?.to_bytes();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let page = timeout(limit, getting)
        .await
        .with_context(|| format!("no response within {limit:?}"))
        .and_then(|page| page);
    forward_error
        .add_context(page)
        .with_context(|| format!("getting {path} from port {port} of pod {namespace}/{pod}"))
}

/// Maximum size of one page in bytes. The metrics of a busy proxy have a few MiB.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
