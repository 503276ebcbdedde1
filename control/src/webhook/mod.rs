//! Serves admission webhooks: HTTPS for the API server, whose reviews a handler from above answers.
//!
//! The certificate comes from files ([`mounted`]), or the process makes it and tells the API server to trust it
//! ([`keeper`]).
//! A handler gets a [`review::Request`] and returns a [`review::Answer`]; what objects mean is not known here.
//! The API server speaks HTTP/1.1 to webhooks, and sends no certificate of its own.

pub mod creds;
pub mod https;
pub mod keeper;
pub mod metrics;
pub mod mounted;
pub mod review;

mod certificate;
pub mod rotation;

use std::error::Error as StdError;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request as HttpRequest, Response, StatusCode};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tracing::warn;
use tulle_core::drain::Watch;
use tulle_core::metrics::Registry;

use creds::Creds;
use https::{Port, Respond, Transport};
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
    registry: Registry,
    /// Objects grow when they are decoded; few at a time keep the memory of a flood bounded.
    decoding: Semaphore,
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
    pub fn new(name: &'static str, creds: Arc<Creds>, handler: H, metrics: HttpMetrics, registry: &Registry) -> Self {
        metrics::certificate(name, creds.clone(), registry);
        Self {
            name,
            creds,
            handler,
            metrics,
            registry: registry.clone(),
            decoding: Semaphore::new(MAX_DECODING),
        }
    }

    /// Serves as [`Port::serve`] does.
    pub async fn serve(self, listener: TcpListener, drain: Watch) {
        let port = Port {
            name: self.name,
            transport: Transport::Tls(self.creds.clone()),
            registry: self.registry.clone(),
            respond: self,
        };
        port.serve(listener, drain).await;
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

impl<H: Handler> Respond for Server<H> {
    type Body = Full<Bytes>;

    async fn respond(&self, req: HttpRequest<Incoming>) -> Response<Self::Body> {
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
pub(crate) fn with_causes(err: &dyn StdError) -> String {
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
const BODY_LIMIT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
