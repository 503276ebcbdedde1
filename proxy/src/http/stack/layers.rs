//! Tower layers around the request services of both directions: steps O5, O12, I7 and I11 of `ARCHITECTURE.md`. They do not
//! depend on routing or policy.
//!
//! From the outside in: [`RequestService`] writes the access log and turns errors into responses, [`CountService`] counts requests,
//! [`AdmissionService`] takes an in-flight slot or sheds the request. The HTTP servers count responses when they send them.

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
        stack::error_response::{self, ConnectionInfo, ErrorDetail, ErrorFormat},
        stack::head_memory::{ClientHeadMemory, ClientKind, HeadMemory},
    },
    metrics::failures::Failures,
};

/// The layers of one direction, shared by its connections.
pub(crate) struct ServiceStack {
    pub(crate) admission: Arc<Admission>,
    pub(crate) head_memory: Arc<HeadMemory>,
    pub(crate) count_layer: CountLayer,
    pub(crate) error_metrics: ErrorMetrics,
    pub(crate) access_log: Option<AccessLog>,
}

impl ServiceStack {
    /// Wraps `serve` in the layers, for one connection.
    pub(crate) fn build<H, F>(
        &self,
        serve: H,
        detail: ErrorDetail,
        info: ConnectionInfo,
        closer: ConnectionCloser,
    ) -> RequestService<CountService<AdmissionService<ServiceFn<H>>>>
    where
        H: FnMut(Request<Body>) -> F,
        F: Future<Output = Result<Response<Body>, Error>>,
    {
        ServiceBuilder::new()
            .layer(RequestLayer::new(detail, info, closer, self))
            .layer(self.count_layer.clone())
            .layer(AdmissionLayer(self.admission.clone()))
            .service_fn(serve)
    }
}

/// Takes an in-flight slot for the request, or sheds the request. The slot is held until the response body is dropped, or
/// until the request fails or is cancelled.
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
    pub(crate) struct AdmissionFuture<F> {
        #[pin]
        inner: Option<F>,
        // `None` after the response.
        slot: Option<Result<InFlightSlot, ShedReason>>,
    }
}

impl<S> Service<Request<Body>> for AdmissionService<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    type Response = Response<Body>;
    type Error = Error;
    type Future = AdmissionFuture<S::Future>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        let slot = self.admission.admit_request();
        AdmissionFuture {
            inner: slot.is_ok().then(|| self.inner.call(req)),
            slot: Some(slot),
        }
    }
}

impl<F: Future<Output = Result<Response<Body>, Error>>> Future for AdmissionFuture<F> {
    type Output = Result<Response<Body>, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let Some(inner) = this.inner.as_pin_mut() else {
            return Poll::Ready(Err(match this.slot {
                Some(Err(ShedReason::MemoryPressure)) => Error::MemoryPressure,
                _ => Error::MaxInFlight,
            }));
        };
        let result = ready!(inner.poll(cx));
        let mut slot = this.slot.take().and_then(Result::ok);
        match result {
            Ok(rsp) => Poll::Ready(Ok(rsp.map(|body| body.with_slot(slot)))),
            Err(error) => {
                if let Some(slot) = &mut slot {
                    slot.is_recorded = true; // RequestService counts the error
                }
                Poll::Ready(Err(error))
            }
        }
    }
}

/// Counts the requests of one direction. These totals are kept; series with more labels are dropped when they are idle.
#[derive(Clone)]
pub(crate) struct CountLayer(Arc<RequestTotals>);

struct RequestTotals {
    requests: Arc<Counter>,
    /// One counter for each first digit of the status, from 1.
    responses: [Arc<Counter>; 5],
    encoded_targets: Arc<Counter>,
}

impl RequestTotals {
    /// The counter of responses with this status.
    fn response_counter(&self, status: StatusCode) -> &Counter {
        let class = usize::from(status.as_u16() / 100).clamp(1, 5);
        &self.responses[class - 1]
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

impl<S> Service<Request<Body>> for CountService<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    type Response = Response<Body>;
    type Error = Error;
    type Future = S::Future;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        self.totals.requests.inc();
        self.inner.call(req)
    }
}

/// Counts the errors of one direction, by error label and by cause.
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

    /// Counts an error by its label.
    fn count_by_label(&self, error: &Error, info: &ConnectionInfo) {
        let labels = match &info.error_labeler {
            Some(labeler) => labeler.labels(error),
            None => Some(Labels::clone(&self.labels)),
        };
        if let Some(labels) = labels {
            self.errors.get(&labels.with("error", error.label())).inc();
        }
    }
}

/// Makes the [`RequestService`] of one client connection.
#[derive(Clone)]
struct RequestLayer(Arc<ConnectionContext>);

/// The state that the requests of one client connection share: memory for heads, counters, access log and error responses.
struct ConnectionContext {
    error_detail: ErrorDetail,
    info: Arc<ConnectionInfo>,
    closer: ConnectionCloser,
    errors: ErrorMetrics,
    totals: Arc<RequestTotals>,
    head_memory: ClientHeadMemory,
    access_log: Option<AccessLog>,
}

impl RequestLayer {
    /// `closer` closes the connection if an error requires it.
    fn new(detail: ErrorDetail, info: ConnectionInfo, closer: ConnectionCloser, stack: &ServiceStack) -> Self {
        let kind = match &info.client_id {
            Some(_) => ClientKind::WithIdentity,
            None => ClientKind::WithoutIdentity,
        };
        Self(Arc::new(ConnectionContext {
            head_memory: ClientHeadMemory::new(stack.head_memory.clone(), info.client_addr, kind),
            error_detail: detail,
            info: Arc::new(info),
            closer,
            errors: stack.error_metrics.clone(),
            totals: stack.count_layer.0.clone(),
            access_log: stack.access_log.clone(),
        }))
    }
}

/// The outermost service of one client connection. Writes the access log, counts errors and turns them into responses, and gives
/// the HTTP server the limits and counters of the connection.
#[derive(Clone)]
pub(crate) struct RequestService<S> {
    inner: S,
    context: Arc<ConnectionContext>,
}

impl<S> Layer<S> for RequestLayer {
    type Service = RequestService<S>;

    fn layer(&self, inner: S) -> RequestService<S> {
        RequestService {
            inner,
            context: self.0.clone(),
        }
    }
}

pin_project! {
    pub(crate) struct RequestFuture<F> {
        #[pin]
        inner: F,
        format: ErrorFormat,
        version: Version,
        context: Arc<ConnectionContext>,
        // `None` without an access log.
        entry: Option<Box<AccessLogEntry>>,
    }
}

impl<S> Service<Request<Body>> for RequestService<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    type Response = Response<Body>;
    type Error = Error;
    type Future = RequestFuture<S::Future>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        let (format, version) = (ErrorFormat::from_request(&req), req.version());
        let log = self.context.access_log.as_ref();
        let entry = log.map(|log| log.entry(&req, &self.context.info));
        RequestFuture {
            inner: self.inner.call(req),
            format,
            version,
            context: self.context.clone(),
            entry,
        }
    }
}

impl<F: Future<Output = Result<Response<Body>, Error>>> Future for RequestFuture<F> {
    type Output = Result<Response<Body>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.entry.is_none() {
            return self.poll_response(cx);
        }
        let started_at = Instant::now();
        let polled = self.as_mut().poll_response(cx);
        let entry = self.project().entry;
        if let Some(entry) = entry {
            entry.add_processing_time(started_at);
        }
        if let Poll::Ready(rsp) = &polled
            && let Some(entry) = entry.take()
        {
            entry.finish(rsp.as_ref().ok());
        }
        polled
    }
}

impl<F: Future<Output = Result<Response<Body>, Error>>> RequestFuture<F> {
    fn poll_response(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Response<Body>, Error>> {
        let this = self.project();
        let error = match ready!(this.inner.poll(cx)) {
            Ok(rsp) => return Poll::Ready(Ok(rsp)),
            Err(error) => error,
        };
        this.context.record_failed_request(&error);
        if *this.version == Version::HTTP_2 && is_stream_error(&error) {
            return Poll::Ready(Err(error)); // the server resets the stream, unless the client has reset it
        }
        if error.status().closes_connection {
            this.context.closer.notify_one();
        }
        Poll::Ready(Ok(this.context.respond(&error, *this.format)))
    }
}

impl<S> RequestService<S> {
    /// Counts a request whose target contained characters that this proxy percent-encoded.
    pub(crate) fn record_encoded_target(&self) {
        self.context.totals.encoded_targets.inc();
    }

    /// Whether error responses to this client contain the reason.
    pub(crate) fn error_detail(&self) -> ErrorDetail {
        self.context.error_detail
    }

    /// The memory for heads of this client.
    pub(in crate::http) fn head_memory(&self) -> &ClientHeadMemory {
        &self.context.head_memory
    }

    /// The counter of responses with this status. The server counts a response when it sends its head.
    pub(crate) fn response_counter(&self, status: StatusCode) -> &Counter {
        self.context.totals.response_counter(status)
    }

    /// Counts a request that is refused before this service gets it, and its error.
    pub(crate) fn record_refused(&self, error: &Error) {
        self.context.record_failed_request(error);
        self.context.totals.requests.inc();
    }

    /// Counts the error of a response whose body failed before the first byte of the response was sent, by its label only. The
    /// request and the cause are already counted.
    pub(crate) fn record_unsent_response(&self, error: &Error) {
        self.context.count_label_and_log(error);
    }

    /// Returns the response to an error, and counts the response. The caller counts the error.
    pub(crate) fn error_response(&self, error: &Error, format: ErrorFormat) -> Response<Body> {
        let rsp = self.context.respond(error, format);
        self.response_counter(rsp.status()).inc();
        rsp
    }
}

impl ConnectionContext {
    fn respond(&self, error: &Error, format: ErrorFormat) -> Response<Body> {
        error_response::error_response(error, format, self.error_detail, &self.info)
    }

    /// Counts a failed request by its error and its cause.
    fn record_failed_request(&self, error: &Error) {
        self.count_label_and_log(error);
        self.errors.failures.count(error.cause());
    }

    /// Counts an error by its label only, and logs it.
    fn count_label_and_log(&self, error: &Error) {
        self.errors.count_by_label(error, &self.info);
        tracing::debug!(error = %ErrorChain(error), cause = error.cause(), side = ?error.side(), "request failed");
    }
}

/// Whether the error concerns a single HTTP/2 stream.
fn is_stream_error(error: &Error) -> bool {
    match error {
        // The client can send the request again.
        error if error.is_refused_stream() => true,
        Error::H2(error) => error.is_reset(),
        Error::ReadRequestBody(source) => source.downcast_ref().is_some_and(h2::Error::is_reset),
        _ => false,
    }
}

#[cfg(test)]
pub(in crate::http) mod tests {
    use tokio::net::{TcpListener, TcpStream};
    use tulle_core::{
        addr::Addr,
        connections::{ConnectionLimiter, SameAddressEviction},
    };

    use super::*;
    use crate::net::{
        io::{Io, Tcp},
        memory::MemoryPressure,
    };

    type EmptyResponses = fn(Request<Body>) -> std::future::Ready<Result<Response<Body>, Error>>;
    pub(in crate::http) type TestService = RequestService<CountService<AdmissionService<ServiceFn<EmptyResponses>>>>;

    /// The layers of the inbound side. They admit one request at a time.
    pub(in crate::http) fn service_stack(registry: &Registry) -> ServiceStack {
        let failures = Failures::new(registry, "inbound");
        let connections = ConnectionLimiter::new("test", 1, SameAddressEviction::Idlest, registry);
        ServiceStack {
            admission: Admission::new(1, connections, MemoryPressure::default(), failures.clone()),
            head_memory: HeadMemory::new(None, MemoryPressure::default()),
            count_layer: CountLayer::new(registry, "inbound"),
            error_metrics: ErrorMetrics::new(
                registry.counter("inbound_http_errors_total", ""),
                failures,
                Labels::new(),
            ),
            access_log: None,
        }
    }

    pub(in crate::http) fn connection_info() -> ConnectionInfo {
        ConnectionInfo {
            direction: "inbound",
            proxy_identity: "web.shop".into(),
            target: Addr::Socket(([10, 0, 0, 1], 80).into()),
            client_addr: ([10, 0, 0, 2], 4321).into(),
            client_id: None,
            error_labeler: None,
        }
    }

    /// Connects a client to a server with these layers, which sends empty responses. `client` is the last byte of the client's
    /// address as the server sees it. Returns the client's connection, the server's connection, and its service.
    pub(in crate::http) async fn connect(stack: &ServiceStack, client: u8) -> (TcpStream, Io, TestService) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connected = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let info = ConnectionInfo {
            client_addr: ([10, 0, 0, client], 4321).into(),
            ..connection_info()
        };
        let respond: EmptyResponses = |_| std::future::ready(Ok(Response::new(Body::empty())));
        let service = stack.build(respond, ErrorDetail::Omit, info, ConnectionCloser::default());
        (connected, Io::tcp(Tcp::new(stream)), service)
    }

    #[test]
    fn a_request_that_is_refused_without_a_response_is_counted() {
        let stack = service_stack(&Registry::new());
        let layer = RequestLayer::new(
            ErrorDetail::Omit,
            connection_info(),
            ConnectionCloser::default(),
            &stack,
        );
        layer.layer(()).record_refused(&Error::HeaderListsTooLarge { limit: 1 });
        assert_eq!(stack.count_layer.0.requests.get(), 1);
    }
}
