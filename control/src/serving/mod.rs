//! Serves gRPC: accepts connections, terminates TLS, speaks HTTP/2, and drains.
//!
//! A connection that starts with a TLS record gets TLS.
//! One that does not is served in plaintext if it comes from this machine, and closed otherwise.
//! What the services answer, and whose certificates are shown, is given from above.

pub mod metrics;

use std::error::Error as StdError;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use http_body_util::Limited;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tonic::body::Body;
use tonic::service::Routes;
use tower::{Layer, Service as _};
use tracing::{debug, warn};
use tulle_core::addr::canonical;
use tulle_core::drain::Watch;

use crate::tls::creds::ServerCreds;
use metrics::GrpcMetrics;

/// One port: whose name it has, and what it serves.
pub struct Server {
    pub creds: Arc<ServerCreds>,
    pub routes: Routes,
    pub metrics: GrpcMetrics,
}

#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("the client said nothing for {0:?}")]
    Silent(Duration),
    #[error("plaintext from another machine; expected TLS")]
    Plaintext,
    #[error("there is no certificate yet")]
    NoCertificate,
    #[error("the TLS handshake failed")]
    Handshake(#[source] io::Error),
    #[error("the TLS handshake took longer than {0:?}")]
    HandshakeTimeout(Duration),
    #[error("reading the first byte")]
    Read(#[source] io::Error),
    #[error("HTTP/2 failed")]
    Http(#[source] hyper::Error),
}

/// How a connection starts.
enum First {
    Tls,
    Plaintext,
}

impl Server {
    /// Serves until the drain, then lets streams end, at most 4 seconds, and cuts the rest.
    pub async fn serve(self, listener: TcpListener, drain: Watch) {
        let _guard = drain.guard();
        let server = Arc::new(self);
        let mut connections = JoinSet::new();
        loop {
            // All branches only wait; an accepted connection is never lost, because `accept` is cancel-safe.
            tokio::select! {
                biased;
                () = drain.signaled() => break,
                Some(_) = connections.join_next() => {}
                accepted = listener.accept() => match accepted {
                    Ok((tcp, client)) => {
                        connections.spawn(server.clone().connection(tcp, canonical(client), drain.clone()));
                    }
                    Err(err) => {
                        warn!(%err, "accepting a connection failed");
                        // Out of descriptors, most likely: trying again at once would only burn the CPU.
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        drop(listener);
        let ended = timeout(DRAIN_LIMIT, async { while connections.join_next().await.is_some() {} }).await;
        if ended.is_err() {
            warn!(
                n_connections = connections.len(),
                "cutting connections that did not end"
            );
        }
    }

    async fn connection(self: Arc<Self>, tcp: TcpStream, client: SocketAddr, drain: Watch) {
        if let Err(err) = self.handle(tcp, client, drain).await {
            let name = self.creds.name();
            debug!(%client, name, error = &err as &dyn StdError, "a connection failed");
        }
    }

    async fn handle(&self, tcp: TcpStream, client: SocketAddr, drain: Watch) -> Result<(), ConnectionError> {
        // A socket that refuses an option works as well.
        let _ = tcp.set_nodelay(true);
        let _ = SockRef::from(&tcp).set_tcp_keepalive(&keepalive());
        match first(&tcp).await? {
            First::Tls => {
                let config = self.creds.current().ok_or(ConnectionError::NoCertificate)?;
                let tls = timeout(HANDSHAKE_LIMIT, TlsAcceptor::from(config).accept(tcp))
                    .await
                    .map_err(|_| ConnectionError::HandshakeTimeout(HANDSHAKE_LIMIT))?
                    .map_err(ConnectionError::Handshake)?;
                self.http2(tls, drain).await
            }
            First::Plaintext if client.ip().is_loopback() => self.http2(tcp, drain).await,
            First::Plaintext => Err(ConnectionError::Plaintext),
        }
    }

    /// Serves HTTP/2 by prior knowledge; on drain the client is told to go elsewhere (GOAWAY).
    async fn http2<I>(&self, io: I, drain: Watch) -> Result<(), ConnectionError>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let routes = self.metrics.layer(self.routes.clone());
        // The services are always ready. What they return is boxed, and goes when a call is answered: the task that
        // hyper keeps for each stream stays small.
        let service = service_fn(move |req: Request<Incoming>| {
            let req = req.map(|body| Body::new(Limited::new(body, MAX_REQUEST)));
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

/// Looks at the first byte, and leaves it there; no HTTP/2 connection begins like a TLS record.
async fn first(tcp: &TcpStream) -> Result<First, ConnectionError> {
    let mut byte = [0];
    let n = timeout(HANDSHAKE_LIMIT, tcp.peek(&mut byte))
        .await
        .map_err(|_| ConnectionError::Silent(HANDSHAKE_LIMIT))?
        .map_err(ConnectionError::Read)?;
    Ok(match (n, byte) {
        (1, [TLS_HANDSHAKE]) => First::Tls,
        _ => First::Plaintext,
    })
}

/// The type of the first TLS record.
const TLS_HANDSHAKE: u8 = 0x16;
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Leaves time for the rest of the process within the 5 seconds of a drain.
const DRAIN_LIMIT: Duration = Duration::from_secs(4);
/// Requests of all services fit many times over.
const MAX_REQUEST: usize = 256 * 1024;
const MAX_HEADERS: u32 = 16 * 1024;
/// A proxy keeps three streams for each address that its application talks to, all on one connection.
const MAX_STREAMS: u32 = 100_000;

#[cfg(test)]
mod tests;
