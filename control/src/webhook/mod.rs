//! Serves admission webhooks: HTTPS for the API server, whose reviews a handler from above answers.
//!
//! The certificate comes from files ([`mounted`]), or the process makes it and tells the API server to trust it
//! ([`keeper`]).
//! A handler gets a [`review::Request`] and returns a [`review::Answer`]; what objects mean is not known here.
//! The API server speaks HTTP/1.1 to webhooks, and sends no certificate of its own.

pub mod creds;
pub mod keeper;
pub mod metrics;
pub mod mounted;
pub mod review;

mod certificate;
pub mod rotation;

use std::convert::Infallible;
use std::error::Error as StdError;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request as HttpRequest, Response, StatusCode};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};
use tulle_core::addr::canonical;
use tulle_core::drain::Watch;

use creds::Creds;
use metrics::HttpMetrics;
use review::{Answer, Id, Request, Review, ReviewError};

/// Decides about objects.
pub trait Handler: Send + Sync + 'static {
    /// An error refuses the object, with its text.
    fn review(&self, req: Request) -> impl Future<Output = Result<Answer, Failure>> + Send;
}

/// Why a handler could not decide.
pub type Failure = Box<dyn StdError + Send + Sync>;

/// One port: whose certificate it shows, and who answers.
pub struct Server<H> {
    /// For logs.
    name: &'static str,
    creds: Arc<Creds>,
    handler: H,
    metrics: HttpMetrics,
    /// Objects grow when they are decoded; few at a time keep the memory of a flood bounded.
    decoding: Semaphore,
}

#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("there is no certificate yet")]
    NoCertificate,
    #[error("the TLS handshake failed")]
    Handshake(#[source] io::Error),
    #[error("the TLS handshake took longer than {0:?}")]
    HandshakeTimeout(Duration),
    #[error("HTTP/1.1 failed")]
    Http(#[source] hyper::Error),
}

/// Why a request gets no review for an answer.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("there is nothing at this path and method; reviews go to POST /")]
    NotFound,
    #[error("the body is larger than {MAX_BODY} bytes")]
    TooLarge,
    #[error("the body did not come within {0:?}")]
    Slow(Duration),
    #[error("reading the body")]
    Read(#[source] Failure),
    #[error(transparent)]
    Review(ReviewError),
    #[error("writing the answer")]
    Write(#[source] serde_json::Error),
}

impl<H: Handler> Server<H> {
    pub fn new(name: &'static str, creds: Arc<Creds>, handler: H, metrics: HttpMetrics) -> Self {
        Self {
            name,
            creds,
            handler,
            metrics,
            decoding: Semaphore::new(MAX_DECODING),
        }
    }

    /// Serves until the drain and 2 seconds more, then lets requests end, at most 2 seconds, and cuts the rest.
    ///
    /// The cluster learns that we end when we do, and sends reviews until it has; one that finds no server is lost.
    pub async fn serve(self, listener: TcpListener, drain: Watch) {
        let _guard = drain.guard();
        let server = Arc::new(self);
        let mut connections = JoinSet::new();
        let mut ended = pin!(end_of_service(&drain));
        loop {
            // All branches only wait; an accepted connection is never lost, because `accept` is cancel-safe.
            tokio::select! {
                biased;
                () = &mut ended => break,
                Some(_) = connections.join_next() => {}
                accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                    Ok((tcp, client)) => {
                        connections.spawn(server.clone().connection(tcp, canonical(client), drain.clone()));
                    }
                    Err(err) => {
                        warn!(%err, webhook = server.name, "accepting a connection failed");
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
                webhook = server.name,
                n_connections = connections.len(),
                "cutting connections that did not end"
            );
        }
    }

    async fn connection(self: Arc<Self>, tcp: TcpStream, client: SocketAddr, drain: Watch) {
        let name = self.name;
        if let Err(err) = self.handle(tcp, drain).await {
            debug!(%client, webhook = name, error = &err as &dyn StdError, "a connection failed");
        }
    }

    async fn handle(self: Arc<Self>, tcp: TcpStream, drain: Watch) -> Result<(), ConnectionError> {
        // A socket that refuses the option works as well.
        let _ = tcp.set_nodelay(true);
        let config = self.creds.current().ok_or(ConnectionError::NoCertificate)?;
        let tls = timeout(HANDSHAKE_LIMIT, TlsAcceptor::from(config).accept(tcp))
            .await
            .map_err(|_| ConnectionError::HandshakeTimeout(HANDSHAKE_LIMIT))?
            .map_err(ConnectionError::Handshake)?;
        let watch = drain.clone();
        let service = service_fn(move |req| {
            let (server, drain) = (self.clone(), watch.clone());
            async move {
                let mut rsp = server.respond(req).await;
                if drain.is_signaled() {
                    rsp.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(rsp)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_LIMIT)
            .serve_connection(TokioIo::new(tls), service);
        let mut connection = pin!(connection);
        tokio::select! {
            served = connection.as_mut() => return served.map_err(ConnectionError::Http),
            () = end_of_service(&drain) => connection.as_mut().graceful_shutdown(),
        }
        connection.await.map_err(ConnectionError::Http)
    }

    async fn respond(&self, req: HttpRequest<Incoming>) -> Response<Full<Bytes>> {
        let started_at = Instant::now();
        let method = req.method().clone();
        let (status, body) = match self.answer(req).await {
            Ok(body) => (StatusCode::OK, body),
            Err(err) => {
                warn!(
                    webhook = self.name,
                    error = &err as &dyn StdError,
                    "a request was not answered"
                );
                (err.status(), format!("{}\n", with_causes(&err)).into())
            }
        };
        self.metrics.observe(&method, status, started_at.elapsed(), body.len());
        let mut rsp = Response::new(Full::new(body));
        *rsp.status_mut() = status;
        let content_type = match status {
            StatusCode::OK => HeaderValue::from_static("application/json"),
            _ => HeaderValue::from_static("text/plain; charset=utf-8"),
        };
        rsp.headers_mut().insert(CONTENT_TYPE, content_type);
        rsp
    }

    async fn answer(&self, req: HttpRequest<Incoming>) -> Result<Bytes, Refusal> {
        if req.uri().path() != "/" || req.method() != Method::POST {
            return Err(Refusal::NotFound);
        }
        let body = Limited::new(req.into_body(), MAX_BODY).collect();
        let body = timeout(BODY_LIMIT, body)
            .await
            .map_err(|_| Refusal::Slow(BODY_LIMIT))?
            .map_err(|err| match err.is::<LengthLimitError>() {
                true => Refusal::TooLarge,
                false => Refusal::Read(err),
            })?
            .to_bytes();
        if body.is_empty() {
            return Ok(body);
        }
        // It is never closed.
        let _permit = self.decoding.acquire().await;
        let Review { id, request } = Review::parse(&body).map_err(Refusal::Review)?;
        drop(body);
        let answer = match request {
            Ok(request) => self.decide(&id, *request).await,
            Err(err) => Answer::deny(format!("the object cannot be read: {err}")),
        };
        answer.to_json(&id).map(Bytes::from).map_err(Refusal::Write)
    }

    async fn decide(&self, id: &Id, request: Request) -> Answer {
        match self.handler.review(request).await {
            Ok(answer) => answer,
            Err(err) => {
                let text = with_causes(&*err);
                warn!(webhook = self.name, ?id, error = text, "a review failed");
                Answer::deny(text)
            }
        }
    }
}

/// When no more reviews are expected.
async fn end_of_service(drain: &Watch) {
    drain.signaled().await;
    sleep(FAREWELL).await;
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Slow(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Read(_) | Self::Review(_) => StatusCode::BAD_REQUEST,
            Self::Write(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// An error and its causes in one line, for those who do not see our logs.
fn with_causes(err: &dyn StdError) -> String {
    let mut text = err.to_string();
    let mut source = err.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Source: Linkerd's webhooks read 10 MiB; the API server takes no objects above 3 MiB.
const MAX_BODY: usize = 10 * 1024 * 1024;
const MAX_DECODING: usize = 8;
const MAX_CONNECTIONS: usize = 1000;
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
const BODY_LIMIT: Duration = Duration::from_secs(10);
/// The API server closes idle connections after 90 seconds; were we first, a review could get lost on the way.
const IDLE_LIMIT: Duration = Duration::from_secs(120);
/// How long a cluster may take to send its reviews elsewhere.
const FAREWELL: Duration = Duration::from_secs(2);
/// Leaves time for the rest of the process within the 5 seconds of a drain.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
