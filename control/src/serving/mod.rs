//! Serves gRPC: accepts connections, terminates TLS, speaks HTTP/2, and drains.
//!
//! A connection that starts with a TLS record is served over TLS. Any other connection is served in plaintext if it
//! comes from loopback, and closed otherwise. Connections are limited in total and shared fairly between clients,
//! streams are limited per client, and the time to receive a request is limited. A connection has a maximum age, so that
//! clients spread over new replicas. The caller supplies the services and the server certificate.

pub mod metrics;
mod request_limits;
mod response_end;
mod stream_limiter;

use std::convert::Infallible;
use std::error::Error as StdError;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tonic::Status;
use tonic::body::Body;
use tonic::service::Routes;
use tower::{Layer, Service as _};
use tracing::debug;
use tulle_core::drain::{self, Watch};
use tulle_core::listener::{AcceptedConnection, Listener};
use tulle_core::metrics::Registry;

use crate::grpc::Caller;
use crate::tls::mesh_credentials::{MeshCredentials, certificate_identities};
use metrics::GrpcMetrics;
use response_end::EndWithConnection;
use stream_limiter::StreamLimiter;

/// A gRPC server on one port: its credentials and its services.
pub struct Server {
    creds: Arc<MeshCredentials>,
    routes: Routes,
    metrics: GrpcMetrics,
    limits: Limits,
    registry: Registry,
    stream_limiter: Arc<StreamLimiter>,
}

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of connections, over all clients.
    pub connections: usize,
    /// Maximum number of concurrent streams per client, over all its connections: by address for clients with a certificate,
    /// by network for all others.
    pub streams_per_client: usize,
    /// Age at which a connection is closed gracefully, plus or minus a fifth, so that connections that began together do not end
    /// together.
    pub connection_age: Duration,
}

impl Limits {
    /// Returns the limits of one port for a process that may open `files` files and use `memory` bytes.
    pub fn from_resources(files: usize, memory: Option<u64>) -> Self {
        // Half of the memory is for connections, the other half for the requests on them.
        let max_by_memory = memory.map(|memory| memory / 2 / MAX_GRPC_PORTS / BYTES_PER_CONNECTION);
        let max_by_memory = max_by_memory.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
        Self {
            // The remaining file descriptors are for webhooks, the admin server and outgoing connections.
            connections: (files / 5).min(max_by_memory).max(1),
            streams_per_client: MAX_STREAMS_PER_CLIENT,
            connection_age: CONNECTION_AGE,
        }
    }

    fn random_connection_age(&self) -> Duration {
        self.connection_age
            .mul_f64(1.0 + CONNECTION_AGE_JITTER * (2.0 * fastrand::f64() - 1.0))
    }
}

#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("plaintext connection from a remote client; use TLS")]
    Plaintext,
    #[error("the server has no certificate yet")]
    NoCertificate,
    #[error("the TLS handshake failed")]
    Handshake(#[source] io::Error),
    #[error("the TLS handshake took longer than {0:?}")]
    HandshakeTimeout(Duration),
    #[error("HTTP/2 failed")]
    Http(#[source] hyper::Error),
}

impl Server {
    /// Creates a server of these routes. The metrics of its connections and calls go to `registry`.
    pub fn new(
        creds: Arc<MeshCredentials>,
        routes: Routes,
        metrics: GrpcMetrics,
        limits: Limits,
        registry: &Registry,
    ) -> Self {
        Self {
            creds,
            routes: routes.prepare(),
            metrics,
            limits,
            registry: registry.clone(),
            stream_limiter: StreamLimiter::new(limits.streams_per_client),
        }
    }

    /// Serves until the drain, then waits up to 4 seconds for streams to end, and closes the remaining connections.
    /// `name` is the listener's name in logs and metrics.
    pub async fn serve(self, name: &'static str, listener: TcpListener, drain: Watch) {
        let _guard = drain.guard();
        let listener =
            Listener::new(name, listener, self.limits.connections, &self.registry).with_drain_timeout(DRAIN_TIMEOUT);
        let (server, watch) = (Arc::new(self), drain.clone());
        let serve = move |accepted| server.clone().run_connection(accepted, watch.clone());
        listener.run(drain.signaled(), serve).await;
    }

    async fn run_connection(self: Arc<Self>, accepted: AcceptedConnection, drain: Watch) {
        let client = accepted.client;
        if let Err(err) = self.accept_and_serve(accepted, drain).await {
            let name = self.creds.name();
            debug!(%client, name, error = &err as &dyn StdError, "connection failed");
        }
    }

    async fn accept_and_serve(&self, accepted: AcceptedConnection, drain: Watch) -> Result<(), ConnectionError> {
        let is_tls = accepted.is_tls();
        let AcceptedConnection {
            stream: tcp,
            client,
            permit,
            ..
        } = accepted;
        // The connection also works without these options.
        let _ = tcp.set_nodelay(true);
        let _ = SockRef::from(&tcp).set_tcp_keepalive(&keepalive());
        let tcp = permit.track(tcp);
        if !is_tls {
            return match client.ip().is_loopback() {
                true => self.serve_http2(tcp, Caller::ThisMachine, drain).await,
                false => Err(ConnectionError::Plaintext),
            };
        }
        let config = self.creds.server_config().ok_or(ConnectionError::NoCertificate)?;
        let tls = timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(tcp))
            .await
            .map_err(|_| ConnectionError::HandshakeTimeout(HANDSHAKE_TIMEOUT))?
            .map_err(ConnectionError::Handshake)?;
        let leaf = tls.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let identities = leaf.map(certificate_identities).unwrap_or_default();
        if let Some(identity) = identities.first() {
            permit.set_identity(identity.as_str());
        }
        let caller = Caller::Peer {
            ip: client.ip(),
            identities: identities.into(),
        };
        self.serve_http2(tls, caller, drain).await
    }

    /// Serves HTTP/2 with prior knowledge. At the drain, and at the maximum age of the connection, it sends GOAWAY and ends all
    /// streams.
    async fn serve_http2<I>(&self, io: I, caller: Caller, drain: Watch) -> Result<(), ConnectionError>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (end_streams, ending) = drain::channel();
        let services = self.routes.clone();
        // `EndWithConnection` is inside of the metrics layer, so that the streams that it ends count as successes.
        let routes = self.metrics.layer(tower::service_fn(move |req| {
            let (responding, ending) = (services.clone().call(req), ending.clone());
            async move {
                Ok::<_, Infallible>(
                    responding
                        .await?
                        .map(|body| Body::new(EndWithConnection::new(body, ending))),
                )
            }
        }));
        let streams = self.stream_limiter.clone();
        // The services are always ready. Their futures are boxed, because hyper keeps a task for each stream until its end,
        // and the task would contain the future.
        let service = service_fn(move |req: Request<Incoming>| {
            let Some(stream_permit) = streams.acquire(&caller) else {
                let rsp = Status::resource_exhausted("too many open streams from this client").into_http();
                return Box::pin(std::future::ready(Ok(rsp))) as _;
            };
            let mut req = request_limits::limit_request(req);
            req.extensions_mut().insert(caller.clone());
            req.extensions_mut().insert(stream_permit);
            Box::pin(routes.clone().call(req)) as BoxedResponse
        });
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(None)
            .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
            .max_header_list_size(MAX_HEADER_LIST_BYTES)
            .serve_connection(TokioIo::new(io), service);
        let mut connection = std::pin::pin!(connection);
        let limit = tokio::select! {
            served = connection.as_mut() => return served.map_err(ConnectionError::Http),
            () = drain.signaled() => DRAIN_TIMEOUT,
            () = sleep(self.limits.random_connection_age()) => CALL_TIMEOUT,
        };
        connection.as_mut().graceful_shutdown();
        end_streams.drain().await; // nothing delays it
        // A client that does not read is disconnected.
        timeout(limit, connection)
            .await
            .unwrap_or(Ok(()))
            .map_err(ConnectionError::Http)
    }
}

type BoxedResponse = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// TCP keep-alive closes connections of hosts that have failed. The server sends no HTTP/2 pings; clients do if
/// configured.
fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(10))
        .with_retries(6)
}

const MAX_GRPC_PORTS: u64 = 3;
/// Memory of a TLS connection without streams. Measured: 31 KiB, with 2000 connections.
const BYTES_PER_CONNECTION: u64 = 32 << 10;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Half an hour: a new replica has its share of the clients soon, and a proxy seldom starts its streams again.
const CONNECTION_AGE: Duration = Duration::from_secs(30 * 60);
const CONNECTION_AGE_JITTER: f64 = 0.2;
/// Time for calls in progress on a connection that ends at its age. A token review may take half of it.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Leaves time for the rest of the process within the drain timeout of 5 seconds.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(4);
const MAX_HEADER_LIST_BYTES: u32 = 16 * 1024;
/// SETTINGS_MAX_CONCURRENT_STREAMS of a connection. It is above the limit per client address, so that the server
/// refuses an excess stream with RESOURCE_EXHAUSTED and a message.
const MAX_CONCURRENT_STREAMS: u32 = 100_000;
/// A proxy opens three streams for each address that its application connects to.
pub const MAX_STREAMS_PER_CLIENT: usize = 32_768;

#[cfg(test)]
mod tests;
