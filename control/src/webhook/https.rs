//! An HTTP/1.1 server for the API server, or for clients on this machine: connections, TLS, and drain. The caller
//! supplies the request handler.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::future::Future;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONNECTION;
use http::{HeaderValue, Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::time::sleep;
use tracing::debug;
use tulle_core::descriptors;
use tulle_core::drain::Watch;
use tulle_core::listener::{AcceptedConnection, ConnectionEnd, Listener};
use tulle_core::memory;
use tulle_core::metrics::Registry;

use super::server_credentials::ServerCredentials;
use crate::tls::accept::{self, HandshakeError};

pub trait RequestHandler: Send + Sync + 'static {
    type Body: Body<Data = Bytes, Error: StdError + Send + Sync + 'static> + Send + 'static;

    fn respond(&self, client: IpAddr, req: Request<Incoming>) -> impl Future<Output = Response<Self::Body>> + Send;
}

/// The transport of a server.
pub enum Transport {
    /// TLS with this server certificate and client verifier.
    Tls(Arc<ServerCredentials>),
    /// Plaintext, for clients on this machine only.
    Loopback,
}

/// An HTTP server.
pub struct HttpServer<R> {
    /// Name in logs and metrics.
    pub name: &'static str,
    pub transport: Transport,
    pub handler: R,
    /// Registry of the connection metrics.
    pub registry: Registry,
}

#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("no server certificate, or no CA to verify clients, is installed")]
    NoCredentials,
    #[error("plaintext is only for clients on this machine")]
    Plaintext,
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("HTTP/1.1 failed")]
    Http(#[source] hyper::Error),
}

impl<R: RequestHandler> HttpServer<R> {
    /// Serves until the drain. With TLS it serves 2 seconds longer, because the API server sends requests until it has seen
    /// that the endpoint is removed; without this delay such requests would fail. Open requests then have 2 seconds to end before
    /// their connections are closed.
    pub async fn serve(self, listener: TcpListener, drain: Watch) {
        let _guard = drain.guard();
        let max = max_connections(descriptors::raise_limit(), memory::limit());
        let listener = Listener::new(self.name, listener, max, &self.registry).with_drain_timeout(DRAIN_TIMEOUT);
        let server = Arc::new(self);
        let end = server.transport.wait_for_end_of_service(&drain);
        let (server, watch) = (server.clone(), drain.clone());
        let serve = move |accepted| server.clone().run_connection(accepted, watch.clone());
        listener.run(end, serve).await;
    }

    async fn run_connection(self: Arc<Self>, accepted: AcceptedConnection, drain: Watch) -> ConnectionEnd {
        let (name, client) = (self.name, accepted.client);
        match self.accept_and_serve(accepted, drain).await {
            Ok(()) => ConnectionEnd::Closed,
            // The timeout of a request head also ends idle connections.
            Err(ConnectionError::Http(err)) if err.is_timeout() => ConnectionEnd::Closed,
            Err(err) => {
                debug!(%client, port = name, error = &err as &dyn StdError, "a connection failed");
                ConnectionEnd::Failed
            }
        }
    }

    async fn accept_and_serve(
        self: Arc<Self>,
        accepted: AcceptedConnection,
        drain: Watch,
    ) -> Result<(), ConnectionError> {
        let AcceptedConnection {
            stream: tcp,
            client,
            permit,
            ..
        } = accepted;
        // TCP_NODELAY is optional.
        let _ = tcp.set_nodelay(true);
        let tcp = permit.track(tcp);
        match &self.transport {
            Transport::Tls(creds) => {
                let config = creds.server_config().ok_or(ConnectionError::NoCredentials)?;
                let tls = accept::accept(config, tcp).await?;
                if tls.get_ref().1.peer_certificates().is_some() {
                    permit.set_identity(API_SERVER);
                }
                self.serve_http1(client.ip(), tls, drain).await
            }
            Transport::Loopback if client.ip().is_loopback() => self.serve_http1(client.ip(), tcp, drain).await,
            Transport::Loopback => Err(ConnectionError::Plaintext),
        }
    }

    async fn serve_http1(
        self: Arc<Self>,
        client: IpAddr,
        io: impl AsyncRead + AsyncWrite + Unpin + Send,
        drain: Watch,
    ) -> Result<(), ConnectionError> {
        let (server, watch) = (self.clone(), drain.clone());
        let service = service_fn(move |req| {
            let (server, drain) = (server.clone(), watch.clone());
            async move {
                let mut rsp = server.handler.respond(client, req).await;
                if drain.is_signaled() {
                    rsp.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(rsp)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_TIMEOUT)
            .max_buf_size(MAX_BUFFER_BYTES)
            .serve_connection(TokioIo::new(io), service);
        let mut connection = pin!(connection);
        tokio::select! {
            served = connection.as_mut() => return served.map_err(ConnectionError::Http),
            () = self.transport.wait_for_end_of_service(&drain) => connection.as_mut().graceful_shutdown(),
        }
        connection.await.map_err(ConnectionError::Http)
    }
}

impl Transport {
    /// Waits until the drain, and then until no further requests are expected.
    async fn wait_for_end_of_service(&self, drain: &Watch) {
        drain.signaled().await;
        match self {
            Self::Tls(_) => sleep(SHUTDOWN_DELAY).await,
            Self::Loopback => {}
        }
    }
}

/// Returns the maximum number of connections for a process that may open `files` files and use `memory` bytes.
fn max_connections(files: usize, memory: Option<u64>) -> usize {
    let by_memory = memory.map_or(u64::MAX, |memory| memory / 8 / BYTES_PER_CONNECTION);
    let by_memory = usize::try_from(by_memory).unwrap_or(usize::MAX);
    MAX_CONNECTIONS.min(files / 20).min(by_memory.max(MIN_CONNECTIONS))
}

/// Identity of clients with a verified certificate. Only the API server's certificate is accepted.
const API_SERVER: &str = "API server";
/// Maximum number of connections. It is lower if the limit of open files or of memory is low.
const MAX_CONNECTIONS: usize = 1000;
/// A low memory limit does not lower the maximum number of connections below this; a low limit of open files does. An API server
/// needs a connection for each concurrent review, and admits 200 concurrent changes by default.
const MIN_CONNECTIONS: usize = 256;
/// Memory of a connection without a request body: of TLS, of the head of a request, and of a part of a response.
const BYTES_PER_CONNECTION: u64 = 64 * 1024;
/// Maximum number of bytes of a request head, and of a response, that are buffered.
const MAX_BUFFER_BYTES: usize = 16 * 1024;
/// Time after which an idle connection is closed. It is more than the 90 seconds after which the API server does so. If this
/// side closed first, a request could be lost.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Time for the API server to send its requests to another replica.
const SHUTDOWN_DELAY: Duration = Duration::from_secs(2);
/// Maximum time for open requests to end at the drain. It leaves time for the rest of the process within the drain timeout of 5
/// seconds.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_bounded_by_files_and_by_memory() {
        assert_eq!(max_connections(1_048_576, Some(250 << 20)), 500);
        assert_eq!(max_connections(1024, Some(250 << 20)), 51);
        assert_eq!(max_connections(1_048_576, Some(16 << 20)), MIN_CONNECTIONS);
        assert_eq!(max_connections(1_048_576, None), MAX_CONNECTIONS);
    }
}
