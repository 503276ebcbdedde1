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
mod memory;
pub mod rotation;

use std::error::Error as StdError;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request as HttpRequest, Response, StatusCode};
use hyper::body::Incoming;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tulle_core::drain::Watch;
use tulle_core::error_chain::ErrorChain;
use tulle_core::log_limit::LogLimiter;
use tulle_core::metrics::Registry;
use tulle_core::open_responses::{OpenResponses, ResponseBody};
use tulle_core::{info_limited, warn_limited};

use https::{HttpServer, RequestHandler, Transport};
use memory::{BodyError, ObjectSize, ReceivedBody, WebhookMemory};
use metrics::HttpMetrics;
use review::{AdmissionResponse, InvalidReview, Request, RequestHead, ReviewId, ReviewOutline};
use server_credentials::ServerCredentials;

/// Reviews objects. A request passes `WebhookServer::respond` (HTTP), `handle_review` (the AdmissionReview) and `review` of the
/// handler (the decision).
pub trait ReviewHandler: Send + Sync + 'static {
    /// Maximum memory in bytes that the handler needs for each JSON object in `spec`, in addition to that for `DynamicObject`. 0 if
    /// its types are small: then `BYTES_PER_JSON_OBJECT` in `review.rs` is enough for its types and for `DynamicObject`.
    const TYPED_BYTES_PER_JSON_OBJECT: usize = 0;

    /// Decides about an object. An error denies the object; its text is the reason.
    fn review(&self, req: Request) -> impl Future<Output = Result<AdmissionResponse, Failure>> + Send;

    /// Decides about an object that cannot be decoded for this reason, for example because it needs too much memory.
    fn review_undecoded(&self, _head: RequestHead, reason: String) -> impl Future<Output = AdmissionResponse> + Send {
        std::future::ready(AdmissionResponse::deny(reason))
    }
}

/// Why a handler failed.
pub type Failure = Box<dyn StdError + Send + Sync>;

/// The webhook server of one port.
pub struct WebhookServer<H> {
    name: &'static str,
    creds: Arc<ServerCredentials>,
    handler: H,
    shared: SharedResources,
}

/// The metrics and the limits that all webhooks of a process share. Clones share their state.
#[derive(Clone)]
pub struct SharedResources {
    metrics: HttpMetrics,
    memory: Arc<WebhookMemory>,
    open_responses: Arc<OpenResponses>,
    log_limiter: Arc<LogLimiter>,
    registry: Registry,
}

/// Reason why a request is answered without an AdmissionReview.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error("not found; expected POST /")]
    NotFound,
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error(transparent)]
    InvalidReview(#[from] InvalidReview),
    #[error("encoding the response")]
    Write(#[source] serde_json::Error),
}

impl SharedResources {
    /// Creates the resources. `memory` is the number of bytes that the process may use.
    pub fn new(memory: Option<u64>, registry: &Registry) -> Self {
        let max_response_bytes = memory.map_or(u64::MAX, |memory| memory / 16);
        Self {
            metrics: HttpMetrics::new(registry),
            memory: Arc::new(WebhookMemory::from_limit(memory)),
            open_responses: OpenResponses::new(usize::try_from(max_response_bytes).unwrap_or(usize::MAX)),
            log_limiter: Arc::default(),
            registry: registry.clone(),
        }
    }
}

impl<H: ReviewHandler> WebhookServer<H> {
    pub fn new(name: &'static str, creds: Arc<ServerCredentials>, handler: H, shared: SharedResources) -> Self {
        metrics::register_untrusted_certificate_gauge(name, creds.clone(), &shared.registry);
        Self {
            name,
            creds,
            handler,
            shared,
        }
    }

    /// Serves until the drain; see [`HttpServer::serve`].
    pub async fn serve(self, listener: TcpListener, drain: Watch) {
        let server = HttpServer {
            name: self.name,
            transport: Transport::Tls(self.creds.clone()),
            registry: self.shared.registry.clone(),
            handler: self,
        };
        server.serve(listener, drain).await;
    }

    async fn handle_review(&self, client: IpAddr, req: HttpRequest<Incoming>) -> Result<Bytes, RequestError> {
        if req.uri().path() != "/" || req.method() != Method::POST {
            return Err(RequestError::NotFound);
        }
        let ReceivedBody { bytes, reservation } = self.shared.memory.receive(client, req.into_body()).await?;
        if bytes.is_empty() {
            // As Linkerd's webhooks do.
            return Ok(bytes);
        }
        let outline = ReviewOutline::parse(bytes)?;
        let id = outline.id.clone();
        let n_bytes = outline.decoded_bytes(H::TYPED_BYTES_PER_JSON_OBJECT);
        // An object above the limit is not decoded: it would never have enough memory, so waiting would not help.
        let (size, too_large) = match self.shared.memory.object_size(n_bytes) {
            Ok(size) => (size, None),
            Err(err) => (ObjectSize::UNDECODED, Some(err)),
        };
        let revocation = reservation.revocation();
        let reviewing = async {
            let decoded = match too_large {
                None => outline.decode().map_err(|err| err.to_string()),
                Some(err) => Err(err.to_string()),
            };
            let decoded = decoded.map_err(|reason| (outline.decode_head(), reason));
            drop((outline, reservation));
            match decoded {
                Ok(request) => self.run_handler(client, &id, *request).await,
                Err((head, reason)) => {
                    let reason = format!("the object cannot be read: {reason}");
                    match head {
                        Ok(mut head) => {
                            head.client = Some(client);
                            self.handler.review_undecoded(head, reason).await
                        }
                        Err(_) => AdmissionResponse::deny(reason),
                    }
                }
            }
        };
        let response = tokio::select! {
            response = self.shared.memory.review(client, size, reviewing) => response,
            // The reservation can be revoked only while the review waits for its turn. At its turn, the body is decoded, and freed
            // together with the reservation.
            () = revocation.wait() => return Err(BodyError::Busy.into()),
        };
        response.to_json(&id).map(Bytes::from).map_err(RequestError::Write)
    }

    /// Calls the handler. An error of the handler denies the object.
    async fn run_handler(&self, client: IpAddr, id: &ReviewId, mut request: Request) -> AdmissionResponse {
        request.client = Some(client);
        let log = &self.shared.log_limiter;
        let [kind, namespace] = [
            request.kind.kind.as_str(),
            request.namespace.as_deref().unwrap_or_default(),
        ]
        .map(truncate);
        match self.handler.review(request).await {
            Ok(response) => {
                if let Some(reason) = response.denial_reason().map(truncate) {
                    info_limited!(
                        log,
                        client,
                        "an object is denied",
                        webhook = self.name,
                        kind,
                        namespace,
                        reason
                    );
                }
                response
            }
            Err(err) => {
                let (id, error) = (truncate(&format!("{id:?}")), truncate(&ErrorChain(&*err).to_string()));
                warn_limited!(log, client, "a review failed", webhook = self.name, id, error);
                AdmissionResponse::deny(error)
            }
        }
    }
}

impl<H: ReviewHandler> RequestHandler for WebhookServer<H> {
    type Body = ResponseBody;

    async fn respond(&self, client: IpAddr, req: HttpRequest<Incoming>) -> Response<Self::Body> {
        let started_at = Instant::now();
        let method = req.method().clone();
        let (status, body) = match self.handle_review(client, req).await {
            Ok(body) => (StatusCode::OK, body),
            Err(err) => {
                let (log, error) = (&self.shared.log_limiter, truncate(&ErrorChain(&err).to_string()));
                warn_limited!(log, client, "a request was answered without a review", webhook = self.name, %client, error);
                (err.status(), format!("{error}\n").into())
            }
        };
        let metrics = &self.shared.metrics;
        metrics.observe(&method, status, started_at.elapsed(), body.len());
        let mut rsp = Response::new(self.shared.open_responses.add(client, body));
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
            Self::Body(BodyError::TooLarge { .. }) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Body(BodyError::Busy) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Body(BodyError::Timeout) => StatusCode::REQUEST_TIMEOUT,
            Self::Body(BodyError::Read(_)) | Self::InvalidReview(_) => StatusCode::BAD_REQUEST,
            Self::Write(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// Returns the start of a text that can contain content of the request, for logs and responses.
fn truncate(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT_BYTES)].to_owned()
}

const MAX_TEXT_BYTES: usize = 1024;

#[cfg(test)]
mod tests;
