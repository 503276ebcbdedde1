//! The wrappers around the service of either direction: admit, observe, rescue.
//!
//! They know nothing of routing or policy. From the outside in: [`Rescue`] turns errors into responses, [`Observe`]
//! counts them, [`Admit`] enters the in-flight limit or sheds.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{Request, Response, StatusCode, Version};
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower::{Layer, Service, ServiceBuilder, util::ServiceFn};
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::{Counter, Family, Labels, Registry};

use crate::{
    http::{
        body::Body,
        connection_closer::ConnectionCloser,
        error::Error,
        stack::access_log::{AccessLog, AccessLogEntry},
        stack::admission::{Admission, InFlightSlot, ShedReason},
        stack::error_response::{self, ErrorDetail, ErrorFormat, ResponderInfo},
    },
    metrics::failures::Failures,
};

/// What all connections of one direction are wrapped in.
pub(crate) struct ServiceStack {
    pub(crate) admission: Arc<Admission>,
    pub(crate) count_layer: CountLayer,
    pub(crate) error_metrics: ErrorMetrics,
    /// Where a line is written for each request, if anywhere.
    pub(crate) access_log: Option<AccessLog>,
}

impl ServiceStack {
    /// The service of one connection around `serve`, which answers requests or says why not.
    pub(crate) fn build<H, F>(
        &self,
        serve: H,
        reasons: ErrorDetail,
        place: ResponderInfo,
        closer: ConnectionCloser,
    ) -> ErrorToResponse<CountService<AdmissionService<ServiceFn<H>>>>
    where
        H: FnMut(Request<Body>) -> F,
        F: Future<Output = Result<Response<Body>, Error>>,
    {
        ServiceBuilder::new()
            .layer(ErrorToResponseLayer::new(reasons, place, closer, self))
            .layer(self.count_layer.clone())
            .layer(AdmissionLayer(self.admission.clone()))
            .service_fn(serve)
    }
}

/// Enters the in-flight limit or sheds; the place is held to the end of the response.
#[derive(Clone)]
struct AdmissionLayer(Arc<Admission>);

#[derive(Clone)]
pub(crate) struct AdmissionService<S> {
    inner: S,
    admission: Arc<Admission>,
}

impl<S> Layer<S> for AdmissionLayer {
    type Service = AdmissionService<S>;

    fn layer(&self, inner: S) -> AdmissionService<S> {
        AdmissionService {
            inner,
            admission: self.0.clone(),
        }
    }
}

pin_project! {
    pub(crate) struct AdmitFuture<F> {
        #[pin]
        inner: Option<F>,
        slot: Result<InFlightSlot, ShedReason>,
    }
}

impl<S> Service<Request<Body>> for AdmissionService<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    type Response = Response<Body>;
    type Error = Error;
    type Future = AdmitFuture<S::Future>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        let slot = self.admission.admit_request();
        AdmitFuture {
            inner: slot.is_ok().then(|| self.inner.call(req)),
            slot,
        }
    }
}

impl<F: Future<Output = Result<Response<Body>, Error>>> Future for AdmitFuture<F> {
    type Output = Result<Response<Body>, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let Some(inner) = this.inner.as_pin_mut() else {
            return Poll::Ready(Err(match this.slot {
                Err(ShedReason::MemoryPressure) => Error::MemoryPressure,
                _ => Error::MaxInFlight,
            }));
        };
        let result = ready!(inner.poll(cx));
        let mut slot = std::mem::replace(this.slot, Err(ShedReason::MaxInFlight)).ok();
        match result {
            Ok(rsp) => Poll::Ready(Ok(rsp.map(|body| body.with_slot(slot)))),
            Err(error) => {
                if let Some(slot) = &mut slot {
                    slot.is_recorded = true; // who answers it counts it
                }
                Poll::Ready(Err(error))
            }
        }
    }
}

/// Counts requests and responses of one direction; these totals outlive every series with finer labels.
#[derive(Clone)]
pub(crate) struct CountLayer(Arc<RequestTotals>);

struct RequestTotals {
    requests: Arc<Counter>,
    /// By the first digit of the status, from 1.
    responses: [Arc<Counter>; 5],
    encoded_targets: Arc<Counter>,
}

impl RequestTotals {
    fn record_response(&self, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).clamp(1, 5);
        self.responses[class - 1].inc();
    }
}

impl CountLayer {
    pub(crate) fn new(registry: &Registry, direction: &str) -> Self {
        let labels = Labels::new().with("direction", direction);
        let requests = registry.counter("tulle_http_requests_total", "HTTP requests by direction");
        let responses = registry.counter("tulle_http_responses_total", "HTTP responses by direction and class");
        let encoded_targets = registry.counter(
            "tulle_http_encoded_targets_total",
            "HTTP/1 requests whose target had characters that were percent-encoded, by direction",
        );
        let class = |n| responses.get(&labels.clone().with("status_class", format_args!("{n}xx")));
        Self(Arc::new(RequestTotals {
            requests: requests.get(&labels),
            responses: [1, 2, 3, 4, 5].map(class),
            encoded_targets: encoded_targets.get(&labels),
        }))
    }
}

#[derive(Clone)]
pub(crate) struct CountService<S> {
    inner: S,
    totals: Arc<RequestTotals>,
}

impl<S> Layer<S> for CountLayer {
    type Service = CountService<S>;

    fn layer(&self, inner: S) -> CountService<S> {
        CountService {
            inner,
            totals: self.0.clone(),
        }
    }
}

pin_project! {
    pub(crate) struct ObserveFuture<F> {
        #[pin]
        inner: F,
        totals: Arc<RequestTotals>,
    }
}

impl<S> Service<Request<Body>> for CountService<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    type Response = Response<Body>;
    type Error = Error;
    type Future = ObserveFuture<S::Future>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        self.totals.requests.inc();
        ObserveFuture {
            inner: self.inner.call(req),
            totals: self.totals.clone(),
        }
    }
}

impl<F: Future<Output = Result<Response<Body>, Error>>> Future for ObserveFuture<F> {
    type Output = Result<Response<Body>, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let result = ready!(this.inner.poll(cx));
        if let Ok(rsp) = &result {
            this.totals.record_response(rsp.status());
        }
        Poll::Ready(result)
    }
}

/// Counts the errors of one direction, by their label and by their cause.
#[derive(Clone)]
pub(crate) struct ErrorMetrics {
    errors: Family<Counter>,
    failures: Failures,
    labels: Arc<Labels>,
}

impl ErrorMetrics {
    pub(crate) fn new(errors: Family<Counter>, failures: Failures, labels: Labels) -> Self {
        Self {
            errors,
            failures,
            labels: Arc::new(labels),
        }
    }

    fn record(&self, error: &Error, place: &ResponderInfo) {
        let labels = match &place.error_labeler {
            Some(labelled) => labelled.labels(error),
            None => Some(Labels::clone(&self.labels)),
        };
        if let Some(labels) = labels {
            self.errors.get(&labels.with("error", error.label())).inc();
        }
        self.failures.count(error.cause());
    }
}

/// Turns errors into responses, so that a client always hears why.
#[derive(Clone)]
struct ErrorToResponseLayer(Arc<ErrorResponder>);

struct ErrorResponder {
    error_detail: ErrorDetail,
    responder: Arc<ResponderInfo>,
    closer: ConnectionCloser,
    errors: ErrorMetrics,
    totals: Arc<RequestTotals>,
    access_log: Option<AccessLog>,
}

impl ErrorToResponseLayer {
    /// `closer` ends the connection where an error asks for that.
    fn new(reasons: ErrorDetail, place: ResponderInfo, closer: ConnectionCloser, wrappers: &ServiceStack) -> Self {
        Self(Arc::new(ErrorResponder {
            error_detail: reasons,
            responder: Arc::new(place),
            closer,
            errors: wrappers.error_metrics.clone(),
            totals: wrappers.count_layer.0.clone(),
            access_log: wrappers.access_log.clone(),
        }))
    }
}

#[derive(Clone)]
pub(crate) struct ErrorToResponse<S> {
    inner: S,
    responder: Arc<ErrorResponder>,
}

impl<S> Layer<S> for ErrorToResponseLayer {
    type Service = ErrorToResponse<S>;

    fn layer(&self, inner: S) -> ErrorToResponse<S> {
        ErrorToResponse {
            inner,
            responder: self.0.clone(),
        }
    }
}

pin_project! {
    pub(crate) struct RescueFuture<F> {
        #[pin]
        inner: F,
        asker: ErrorFormat,
        version: Version,
        rescuer: Arc<ErrorResponder>,
        // Of the access log, where there is one.
        entry: Option<Box<AccessLogEntry>>,
    }
}

impl<S> Service<Request<Body>> for ErrorToResponse<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    type Response = Response<Body>;
    type Error = Error;
    type Future = RescueFuture<S::Future>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        let (asker, version) = (ErrorFormat::of_request(&req), req.version());
        let log = self.responder.access_log.as_ref();
        let entry = log.map(|log| log.entry(&req, &self.responder.responder));
        RescueFuture {
            inner: self.inner.call(req),
            asker,
            version,
            rescuer: self.responder.clone(),
            entry,
        }
    }
}

impl<F: Future<Output = Result<Response<Body>, Error>>> Future for RescueFuture<F> {
    type Output = Result<Response<Body>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.entry.is_none() {
            return self.poll_response(cx);
        }
        let since = Instant::now();
        let rescued = self.as_mut().poll_response(cx);
        let entry = self.project().entry;
        if let Some(entry) = entry {
            entry.add_processing_time(since);
        }
        if let (Poll::Ready(rsp), Some(entry)) = (&rescued, entry.take_if(|_| rescued.is_ready())) {
            entry.run_writer(rsp.as_ref().ok());
        }
        rescued
    }
}

impl<F: Future<Output = Result<Response<Body>, Error>>> RescueFuture<F> {
    fn poll_response(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Response<Body>, Error>> {
        let this = self.project();
        let error = match ready!(this.inner.poll(cx)) {
            Ok(rsp) => return Poll::Ready(Ok(rsp)),
            Err(error) => error,
        };
        this.rescuer.record(&error);
        if *this.version == Version::HTTP_2 && is_stream_error(&error) {
            return Poll::Ready(Err(error)); // the client sees the stream's reset as it was, or has reset it
        }
        if error.status().closes_connection {
            this.rescuer.closer.notify_one();
        }
        Poll::Ready(Ok(this.rescuer.respond(&error, *this.asker)))
    }
}

impl<S> ErrorToResponse<S> {
    /// Counts a request whose target had to be percent-encoded.
    pub(crate) fn record_encoded_target(&self) {
        self.responder.totals.encoded_targets.inc();
    }

    /// Counts a request that is refused without a response.
    pub(crate) fn record_error(&self, error: &Error) {
        self.responder.record(error);
    }

    /// The response to a request that could not be read, or is not to be.
    pub(crate) fn error_response(&self, error: &Error, asker: ErrorFormat) -> Response<Body> {
        self.responder.record(error);
        self.responder.totals.requests.inc();
        self.responder.respond(error, asker)
    }
}

impl ErrorResponder {
    fn respond(&self, error: &Error, asker: ErrorFormat) -> Response<Body> {
        let rsp = error_response::error_response(error, asker, self.error_detail, &self.responder);
        self.totals.record_response(rsp.status());
        rsp
    }

    fn record(&self, error: &Error) {
        self.errors.record(error, &self.responder);
        tracing::debug!(error = %ErrorChain(error), cause = error.cause(), side = ?error.side(), "request failed");
    }
}

/// Whether it concerns one stream of HTTP/2 and nothing else.
fn is_stream_error(error: &Error) -> bool {
    match error {
        // Its client may send it once more.
        error if error.is_unprocessed() => true,
        Error::H2(error) => error.is_reset(),
        Error::ReadRequestBody(source) => source.downcast_ref().is_some_and(h2::Error::is_reset),
        _ => false,
    }
}
