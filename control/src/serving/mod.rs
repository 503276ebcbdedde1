//! Serves gRPC: accepts connections, terminates TLS, speaks HTTP/2, and drains.
//!
//! A connection that starts with a TLS record is served over TLS. Any other connection is served in plaintext if it
//! comes from loopback, and closed otherwise. Connections are limited in total and shared fairly between clients,
//! streams are limited per client, and the memory and the time to receive requests are limited. A connection has a maximum age,
//! so that clients spread over new replicas. The caller supplies the services and the server certificate.

pub mod limits;
pub mod metrics;
mod request_limits;
mod response_end;
mod stream_limiter;

use std::convert::Infallible;
use std::error::Error as StdError;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tonic::body::Body;
use tonic::service::Routes;
use tower::{Layer, Service as _};
use tracing::debug;
use tulle_core::drain::{self, Watch};
use tulle_core::fair_budget::Reservation;
use tulle_core::listener::{AcceptedConnection, ConnectionEnd, Listener};
use tulle_core::metrics::Registry;

use crate::grpc::Caller;
use crate::tls::accept::{self, HandshakeError};
use crate::tls::mesh_credentials::{MeshCredentials, certificate_identities};
use limits::Limits;
use metrics::GrpcMetrics;
use response_end::EndWithConnection;
use stream_limiter::{AdmittedStream, PendingReservation, RequestMemory, StreamLimiter, StreamRefused};

/// A gRPC server on one port: its credentials and its services.
pub struct Server {
    creds: Arc<MeshCredentials>,
    routes: Routes,
    metrics: GrpcMetrics,
    limits: Limits,
    registry: Registry,
    stream_limiter: Arc<StreamLimiter>,
}

#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("plaintext connection from a remote client; use TLS")]
    Plaintext,
    #[error("the server has no certificate yet")]
    NoCertificate,
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("HTTP/2 failed")]
    Http(#[source] hyper::Error),
}

impl Server {
    /// Creates a server of these routes. Its calls are counted in `metrics`; the metrics of its connections go to `registry`.
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
            stream_limiter: StreamLimiter::new(limits),
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

    async fn run_connection(self: Arc<Self>, accepted: AcceptedConnection, drain: Watch) -> ConnectionEnd {
        let client = accepted.client;
        match self.accept_and_serve(accepted, drain).await {
            Ok(()) => ConnectionEnd::Closed,
            Err(err) => {
                let name = self.creds.name();
                debug!(%client, name, error = &err as &dyn StdError, "connection failed");
                ConnectionEnd::Failed
            }
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
        let tls = accept::accept(config, tcp).await?;
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
        let (end_streams, connection_ending) = drain::channel();
        let services = self.routes.clone();
        // `EndWithConnection` is inside of the metrics layer, so that the streams that it ends count as successes.
        let routes = self.metrics.layer(tower::service_fn(move |req| {
            let (response, connection_ending) = (services.clone().call(req), connection_ending.clone());
            async move {
                Ok::<_, Infallible>(
                    response
                        .await?
                        .map(|body| Body::new(EndWithConnection::new(body, connection_ending))),
                )
            }
        }));
        let (streams, max_request_bytes) = (self.stream_limiter.clone(), self.limits.call_kind.max_request_bytes());
        // The services are always ready. Their futures are boxed, because hyper keeps a task for each stream until its end,
        // and the task would contain the future.
        let service = service_fn(move |req: Request<Incoming>| {
            let AdmittedStream { permit, request_memory } = match streams.admit(&caller) {
                Ok(admitted) => admitted,
                Err(refused) => return Box::pin(ready(Ok(refused.response()))) as BoxedResponse,
            };
            let mut req = request_limits::limit_request(req, max_request_bytes);
            req.extensions_mut().insert(caller.clone());
            req.extensions_mut().insert(permit);
            let response = routes.clone().call(req);
            match request_memory {
                RequestMemory::Uncounted => Box::pin(response),
                RequestMemory::Reserved(memory) => Box::pin(respond_while_reserved(response, memory)),
                RequestMemory::ReservedIfIncomplete(pending) => Box::pin(respond_or_reserve(response, pending)),
            }
        });
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(None)
            .max_concurrent_streams(self.limits.call_kind.max_streams_per_connection())
            .max_header_list_size(MAX_HEADER_LIST_BYTES)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .serve_connection(TokioIo::new(io), service);
        let mut connection = std::pin::pin!(connection);
        let limit = tokio::select! {
            served = connection.as_mut() => return served.map_err(ConnectionError::Http),
            () = drain.signaled() => DRAIN_TIMEOUT,
            () = sleep(self.limits.random_connection_age()) => CALL_TIMEOUT,
        };
        connection.as_mut().graceful_shutdown();
        end_streams.drain().await; // returns at once: nothing holds a guard of this drain
        // A client that does not read is disconnected.
        timeout(limit, connection)
            .await
            .unwrap_or(Ok(()))
            .map_err(ConnectionError::Http)
    }
}

/// Returns the response if the request is complete; otherwise reserves memory for the request, and waits.
async fn respond_or_reserve(
    mut response: impl Future<Output = Result<Response<Body>, Infallible>> + Unpin,
    pending: PendingReservation,
) -> Result<Response<Body>, Infallible> {
    if let Some(rsp) = (&mut response).now_or_never() {
        return rsp;
    }
    match pending.reserve() {
        Ok(memory) => respond_while_reserved(response, memory).await,
        Err(refused) => Ok(refused.response()),
    }
}

/// Waits for a response, or until the memory of the request is revoked.
async fn respond_while_reserved(
    response: impl Future<Output = Result<Response<Body>, Infallible>>,
    memory: Reservation,
) -> Result<Response<Body>, Infallible> {
    let revocation = memory.revocation();
    // Cancel-safe: calls change nothing, so a call can be dropped when its memory is revoked.
    tokio::select! {
        rsp = response => rsp,
        () = revocation.wait() => Ok(StreamRefused::Memory.response()),
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

/// Maximum time for the calls in progress on a connection that has reached its maximum age. A token review can take half of
/// this time.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum time for streams to end at the drain. It leaves time for the rest of the process within the drain timeout of 5
/// seconds.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(4);
const MAX_HEADER_LIST_BYTES: u32 = 16 * 1024;
/// Bytes of requests that a client can send before they are read. It is the default of HTTP/2.
const WINDOW_BYTES: u32 = 65_535;

#[cfg(test)]
mod tests;
