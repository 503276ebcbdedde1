//! Serves admission webhooks over HTTPS. The caller supplies the handler of AdmissionReviews.
//!
//! The certificate comes from files ([`mounted_certificate`]), or the process generates it and publishes it in the webhook
//! configuration ([`certificate_controller`]). A handler receives a [`review::Request`] and returns a
//! [`review::AdmissionResponse`]. The API server sends HTTP/1.1 to webhooks, without a client certificate.

pub mod certificate_controller;
pub mod https;
pub mod metrics;
pub mod mounted_certificate;
pub mod review;
pub mod server_credentials;

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
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::Registry;

use https::{HttpServer, RequestHandler, Transport};
use metrics::HttpMetrics;
use review::{AdmissionResponse, InvalidReview, ParsedReview, Request, ReviewId};
use server_credentials::ServerCredentials;

/// Reviews objects. A request passes `WebhookServer::respond` (HTTP), `handle_review` (the AdmissionReview) and `review` of the
/// handler (the decision).
pub trait ReviewHandler: Send + Sync + 'static {
    /// An error denies the object; its text is the reason.
    fn review(&self, req: Request) -> impl Future<Output = Result<AdmissionResponse, Failure>> + Send;
}

/// Why a handler failed.
pub type Failure = Box<dyn StdError + Send + Sync>;

/// The webhook server of one port.
pub struct WebhookServer<H> {
    name: &'static str,
    creds: Arc<ServerCredentials>,
    handler: H,
    metrics: HttpMetrics,
    registry: Registry,
    /// Decoding multiplies the memory of an object, so few objects are reviewed at a time.
    review_permits: Semaphore,
}

/// Why a request is answered without an AdmissionReview.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error("not found; expected POST /")]
    NotFound,
    #[error("the body is larger than {MAX_BODY_BYTES} bytes")]
    TooLarge,
    #[error("the body was not received within {0:?}")]
    BodyTimeout(Duration),
    #[error("reading the body")]
    Read(#[source] Failure),
    #[error(transparent)]
    InvalidReview(InvalidReview),
    #[error("encoding the response")]
    Write(#[source] serde_json::Error),
}

impl<H: ReviewHandler> WebhookServer<H> {
    pub fn new(
        name: &'static str,
        creds: Arc<ServerCredentials>,
        handler: H,
        metrics: HttpMetrics,
        registry: &Registry,
    ) -> Self {
        metrics::register_untrusted_certificate_gauge(name, creds.clone(), registry);
        Self {
            name,
            creds,
            handler,
            metrics,
            registry: registry.clone(),
            review_permits: Semaphore::new(MAX_CONCURRENT_REVIEWS),
        }
    }

    /// Serves until the drain; see [`HttpServer::serve`].
    pub async fn serve(self, listener: TcpListener, drain: Watch) {
        let server = HttpServer {
            name: self.name,
            transport: Transport::Tls(self.creds.clone()),
            registry: self.registry.clone(),
            handler: self,
        };
        server.serve(listener, drain).await;
    }

    async fn handle_review(&self, req: HttpRequest<Incoming>) -> Result<Bytes, RequestError> {
        if req.uri().path() != "/" || req.method() != Method::POST {
            return Err(RequestError::NotFound);
        }
        let body = Limited::new(req.into_body(), MAX_BODY_BYTES).collect();
        let body = timeout(BODY_READ_TIMEOUT, body)
            .await
            .map_err(|_| RequestError::BodyTimeout(BODY_READ_TIMEOUT))?
            .map_err(|err| match err.is::<LengthLimitError>() {
                true => RequestError::TooLarge,
                false => RequestError::Read(err),
            })?
            .to_bytes();
        if body.is_empty() {
            // As Linkerd's webhooks do.
            return Ok(body);
        }
        // The semaphore is never closed.
        let _permit = self.review_permits.acquire().await;
        let ParsedReview { id, request } = ParsedReview::parse(&body).map_err(RequestError::InvalidReview)?;
        drop(body);
        let response = match request {
            Ok(request) => self.run_handler(&id, *request).await,
            Err(err) => AdmissionResponse::deny(format!("the object cannot be read: {err}")),
        };
        response.to_json(&id).map(Bytes::from).map_err(RequestError::Write)
    }

    /// An error of the handler denies the object.
    async fn run_handler(&self, id: &ReviewId, request: Request) -> AdmissionResponse {
        match self.handler.review(request).await {
            Ok(response) => response,
            Err(err) => {
                let text = ErrorChain(&*err).to_string();
                warn!(webhook = self.name, ?id, error = text, "a review failed");
                AdmissionResponse::deny(text)
            }
        }
    }
}

impl<H: ReviewHandler> RequestHandler for WebhookServer<H> {
    type Body = Full<Bytes>;

    async fn respond(&self, req: HttpRequest<Incoming>) -> Response<Self::Body> {
        let started_at = Instant::now();
        let method = req.method().clone();
        let (status, body) = match self.handle_review(req).await {
            Ok(body) => (StatusCode::OK, body),
            Err(err) => {
                warn!(
                    webhook = self.name,
                    error = &err as &dyn StdError,
                    "a request was answered without a review"
                );
                (err.status(), format!("{}\n", ErrorChain(&err)).into())
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

impl RequestError {
    fn status(&self) -> StatusCode {
        match self {
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Read(_) | Self::InvalidReview(_) => StatusCode::BAD_REQUEST,
            Self::Write(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// In bytes. Linkerd's webhooks read 10 MiB; the API server accepts no objects above 3 MiB.
const MAX_BODY_BYTES: usize = 10 * 1024 * 1024;
const MAX_CONCURRENT_REVIEWS: usize = 8;
const BODY_READ_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
