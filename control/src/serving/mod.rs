//! Serves gRPC: accepts connections, terminates TLS, speaks HTTP/2, and drains.
//!
//! A connection that starts with a TLS record gets TLS.
//! One that does not is served in plaintext if it comes from this machine, and closed otherwise.
//! Connections and streams of a client address are bounded, and so is the time that a request may take to come.
//! What the services answer, and whose certificates are shown, is given from above.

pub mod metrics;
mod request;
mod streams;

use std::error::Error as StdError;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tonic::Status;
use tonic::service::Routes;
use tower::{Layer, Service as _};
use tracing::debug;
use tulle_core::drain::Watch;
use tulle_core::listener::{Accepted, Listener};
use tulle_core::metrics::Registry;

use crate::grpc::Caller;
use crate::tls::creds::{ServerCreds, identities};
use metrics::GrpcMetrics;
use streams::Streams;

/// One port: whose name it has, and what it serves.
pub struct Server {
    creds: Arc<ServerCreds>,
    routes: Routes,
    metrics: GrpcMetrics,
    limits: Limits,
    registry: Registry,
    streams: Arc<Streams>,
}

/// How much a port takes on.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections of all clients.
    pub connections: usize,
    /// Streams that are open at a time for one client address, on all its connections.
    pub streams_per_client: usize,
}

impl Limits {
    /// Those of one port, where the process may have so many files open and so many bytes of memory.
    pub fn within(files: usize, memory: Option<u64>) -> Self {
        // Half of it is for connections, and the other half for what is served on them.
        let held = memory.map(|memory| memory / 2 / PORTS / BYTES_PER_CONNECTION);
        let held = held.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
        Self {
            // The rest of the files is for webhooks, admin and our own connections.
            connections: (files / 5).min(held).max(1),
            streams_per_client: STREAMS_PER_CLIENT,
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("plaintext from another machine; expected TLS")]
    Plaintext,
    #[error("there is no certificate yet")]
    NoCertificate,
    #[error("the TLS handshake failed")]
    Handshake(#[source] io::Error),
    #[error("the TLS handshake took longer than {0:?}")]
    HandshakeTimeout(Duration),
    #[error("HTTP/2 failed")]
    Http(#[source] hyper::Error),
}

impl Server {
    /// A server of these routes, with the families of its connections and calls in `registry`.
    pub fn new(
        creds: Arc<ServerCreds>,
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
            streams: Streams::new(limits.streams_per_client),
        }
    }

    /// Serves until the drain, then lets streams end, at most 4 seconds, and cuts the rest. `name` is for logs and metrics.
    pub async fn serve(self, name: &'static str, listener: TcpListener, drain: Watch) {
        let _guard = drain.guard();
        let listener = Listener::new(name, listener, self.limits.connections, &self.registry).drain_within(DRAIN_LIMIT);
        let (server, watch) = (Arc::new(self), drain.clone());
        let serve = move |accepted| server.clone().connection(accepted, watch.clone());
        listener.run(drain.signaled(), serve).await;
    }

    async fn connection(self: Arc<Self>, accepted: Accepted, drain: Watch) {
        let client = accepted.client;
        if let Err(err) = self.handle(accepted, drain).await {
            let name = self.creds.name();
            debug!(%client, name, error = &err as &dyn StdError, "a connection failed");
        }
    }

    async fn handle(&self, accepted: Accepted, drain: Watch) -> Result<(), ConnectionError> {
        let is_tls = accepted.is_tls();
        let Accepted {
            stream: tcp,
            client,
            place,
            ..
        } = accepted;
        // A socket that refuses an option works as well.
        let _ = tcp.set_nodelay(true);
        let _ = SockRef::from(&tcp).set_tcp_keepalive(&keepalive());
        let tcp = place.watch(tcp);
        if !is_tls {
            return match client.ip().is_loopback() {
                true => self.http2(tcp, Caller::ThisMachine, drain).await,
                false => Err(ConnectionError::Plaintext),
            };
        }
        let config = self.creds.current().ok_or(ConnectionError::NoCertificate)?;
        let tls = timeout(HANDSHAKE_LIMIT, TlsAcceptor::from(config).accept(tcp))
            .await
            .map_err(|_| ConnectionError::HandshakeTimeout(HANDSHAKE_LIMIT))?
            .map_err(ConnectionError::Handshake)?;
        let leaf = tls.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let identities = leaf.map(identities).unwrap_or_default();
        if let Some(identity) = identities.first() {
            place.verified(identity.as_str());
        }
        let caller = Caller::Peer {
            ip: client.ip(),
            identities: identities.into(),
        };
        self.http2(tls, caller, drain).await
    }

    /// Serves HTTP/2 by prior knowledge; on drain the client is told to go elsewhere (GOAWAY).
    async fn http2<I>(&self, io: I, caller: Caller, drain: Watch) -> Result<(), ConnectionError>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let routes = self.metrics.layer(self.routes.clone());
        let streams = self.streams.clone();
        // The services are always ready. What they return is boxed, and goes when a call is answered: the task that
        // hyper keeps for each stream stays small.
        let service = service_fn(move |req: Request<Incoming>| {
            let Some(slot) = streams.open(&caller) else {
                let refusal = Status::resource_exhausted("this client address has too many streams open").into_http();
                return Box::pin(std::future::ready(Ok(refusal))) as _;
            };
            let mut req = request::bounded(req);
            req.extensions_mut().insert(caller.clone());
            req.extensions_mut().insert(slot);
            routes.clone().call(req)
        });
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(None)
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEADERS)
            .serve_connection(TokioIo::new(io), service);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            served = connection.as_mut() => return served.map_err(ConnectionError::Http),
            () = drain.signaled() => connection.as_mut().graceful_shutdown(),
        }
        connection.await.map_err(ConnectionError::Http)
    }
}

/// A proxy that lost its power says nothing, and its streams would be kept for ever; pings are the client's choice.
fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(10))
        .with_retries(6)
}

/// Ports of gRPC that a process has at most.
const PORTS: u64 = 3;
/// What a connection of TLS holds without a stream; 31 KiB were measured with 2000 of them.
const BYTES_PER_CONNECTION: u64 = 32 << 10;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Leaves time for the rest of the process within the 5 seconds of a drain.
const DRAIN_LIMIT: Duration = Duration::from_secs(4);
/// Most bytes of a request's head.
const MAX_HEADERS: u32 = 16 * 1024;
/// Streams of a connection; more than a client may have in all, so that the one too many is told why it is refused.
const MAX_STREAMS: u32 = 100_000;
/// A proxy keeps three streams for each address that its application talks to.
pub const STREAMS_PER_CLIENT: usize = 32_768;

#[cfg(test)]
mod tests;
