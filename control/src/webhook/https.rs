//! HTTP/1.1 as an API server speaks it: connections, TLS, and their end. What is answered is given from above.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::future::Future;
use std::io;
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
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tracing::debug;
use tulle_core::descriptors;
use tulle_core::drain::Watch;
use tulle_core::listener::{Accepted, Listener};
use tulle_core::metrics::Registry;

use super::creds::Creds;

/// Answers requests.
pub trait Respond: Send + Sync + 'static {
    type Body: Body<Data = Bytes, Error = Infallible> + Send + 'static;

    fn respond(&self, req: Request<Incoming>) -> impl Future<Output = Response<Self::Body>> + Send;
}

/// How clients are spoken with.
pub enum Transport {
    /// By TLS, with what these credentials show and whom they believe.
    Tls(Arc<Creds>),
    /// In the clear, from this machine only.
    Loopback,
}

/// One port.
pub struct Port<R> {
    /// For logs.
    pub name: &'static str,
    pub transport: Transport,
    pub respond: R,
    /// Where its connections are counted.
    pub registry: Registry,
}

#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("there is no certificate yet")]
    NoCertificate,
    #[error("plaintext is for this machine only")]
    Plaintext,
    #[error("the TLS handshake failed")]
    Handshake(#[source] io::Error),
    #[error("the TLS handshake took longer than {0:?}")]
    HandshakeTimeout(Duration),
    #[error("HTTP/1.1 failed")]
    Http(#[source] hyper::Error),
}

impl<R: Respond> Port<R> {
    /// Serves until the drain and, for a cluster, 2 seconds more, then lets requests end, at most 2 seconds, and cuts the rest.
    ///
    /// The cluster learns that we end when we do, and sends requests until it has; one that finds no server is lost.
    pub async fn serve(self, listener: TcpListener, drain: Watch) {
        let _guard = drain.guard();
        let max = MAX_CONNECTIONS.min(descriptors::limit() / 20);
        let listener = Listener::new(self.name, listener, max, &self.registry).drain_within(DRAIN_LIMIT);
        let port = Arc::new(self);
        let end = port.transport.end_of_service(&drain);
        let (port, watch) = (port.clone(), drain.clone());
        let serve = move |accepted| port.clone().connection(accepted, watch.clone());
        listener.run(end, serve).await;
    }

    async fn connection(self: Arc<Self>, accepted: Accepted, drain: Watch) {
        let (name, client) = (self.name, accepted.client);
        if let Err(err) = self.handle(accepted, drain).await {
            debug!(%client, port = name, error = &err as &dyn StdError, "a connection failed");
        }
    }

    async fn handle(self: Arc<Self>, accepted: Accepted, drain: Watch) -> Result<(), ConnectionError> {
        let Accepted {
            stream: tcp,
            client,
            place,
            ..
        } = accepted;
        // A socket that refuses the option works as well.
        let _ = tcp.set_nodelay(true);
        let tcp = place.watch(tcp);
        match &self.transport {
            Transport::Tls(creds) => {
                let config = creds.current().ok_or(ConnectionError::NoCertificate)?;
                let tls = timeout(HANDSHAKE_LIMIT, TlsAcceptor::from(config).accept(tcp))
                    .await
                    .map_err(|_| ConnectionError::HandshakeTimeout(HANDSHAKE_LIMIT))?
                    .map_err(ConnectionError::Handshake)?;
                if tls.get_ref().1.peer_certificates().is_some() {
                    place.verified(API_SERVER);
                }
                self.http1(tls, drain).await
            }
            Transport::Loopback if client.ip().is_loopback() => self.http1(tcp, drain).await,
            Transport::Loopback => Err(ConnectionError::Plaintext),
        }
    }

    async fn http1(
        self: Arc<Self>,
        io: impl AsyncRead + AsyncWrite + Unpin + Send,
        drain: Watch,
    ) -> Result<(), ConnectionError> {
        let (port, watch) = (self.clone(), drain.clone());
        let service = service_fn(move |req| {
            let (port, drain) = (port.clone(), watch.clone());
            async move {
                let mut rsp = port.respond.respond(req).await;
                if drain.is_signaled() {
                    rsp.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(rsp)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_LIMIT)
            .serve_connection(TokioIo::new(io), service);
        let mut connection = pin!(connection);
        tokio::select! {
            served = connection.as_mut() => return served.map_err(ConnectionError::Http),
            () = self.transport.end_of_service(&drain) => connection.as_mut().graceful_shutdown(),
        }
        connection.await.map_err(ConnectionError::Http)
    }
}

impl Transport {
    /// When no more requests are expected.
    async fn end_of_service(&self, drain: &Watch) {
        drain.signaled().await;
        match self {
            Self::Tls(_) => sleep(FAREWELL).await,
            Self::Loopback => {}
        }
    }
}

/// The identity of clients who have shown a certificate: only the API server's are believed.
const API_SERVER: &str = "API server";
/// Less where the process may have few files.
const MAX_CONNECTIONS: usize = 1000;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// The API server closes idle connections after 90 seconds; were we first, a request could get lost on the way.
const IDLE_LIMIT: Duration = Duration::from_secs(120);
/// How long a cluster may take to send its requests elsewhere.
const FAREWELL: Duration = Duration::from_secs(2);
/// Leaves time for the rest of the process within the 5 seconds of a drain.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);
