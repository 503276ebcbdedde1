//! The wrappers around the service of either direction: admit, observe, rescue.
//!
//! They know nothing of routing or policy. From the outside in: [`Rescue`] turns errors into responses, [`Observe`]
//! counts them, [`Admit`] enters the in-flight limit or sheds.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};

use http::{Request, Response, StatusCode, Version};
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower::{Layer, Service, ServiceBuilder, util::ServiceFn};
use tulle_core::{
    addr::ClientAddr,
    connections::{self, ConnectionLimiter},
    metrics::{Counter, Family, Labels, Registry},
};

use crate::{
    http::{
        access_log::{AccessLog, Entry},
        body::Body,
        error::Error,
        respond::{self, Asker, Place, Reasons},
        server::Closer,
    },
    metrics::failures::Failures,
    net::{io::Tcp, memory::Shortage},
};

/// What all connections of one direction are wrapped in.
pub(crate) struct Wrappers {
    pub(crate) admission: Arc<Admission>,
    pub(crate) observe: Observe,
    pub(crate) errors: Errors,
    /// Where a line is written for each request, if anywhere.
    pub(crate) access_log: Option<AccessLog>,
}

impl Wrappers {
    /// The service of one connection around `serve`, which answers requests or says why not.
    pub(crate) fn around<H, F>(
        &self,
        serve: H,
        reasons: Reasons,
        place: Place,
        closer: Closer,
    ) -> Rescued<Observed<Admitted<ServiceFn<H>>>>
    where
        H: FnMut(Request<Body>) -> F,
        F: Future<Output = Result<Response<Body>, Error>>,
    {
        ServiceBuilder::new()
            .layer(Rescue::new(reasons, place, closer, self))
            .layer(self.observe.clone())
            .layer(Admit(self.admission.clone()))
            .service_fn(serve)
    }
}

/// Requests in flight in one direction, to the end of their responses, and connections that clients have open.
pub(crate) struct Admission {
    in_flight: AtomicUsize,
    max_in_flight: usize,
    connections: Arc<ConnectionLimiter>,
    shortage: Shortage,
    failures: Failures,
}

/// A place among the requests in flight.
pub(crate) struct Slot {
    admission: Arc<Admission>,
    /// Whether it is known what has become of the request; otherwise its client has left.
    is_over: bool,
}

impl Admission {
    pub(crate) fn new(
        max_in_flight: usize,
        connections: Arc<ConnectionLimiter>,
        shortage: Shortage,
        failures: Failures,
    ) -> Arc<Self> {
        Arc::new(Self {
            in_flight: AtomicUsize::new(0),
            max_in_flight,
            connections,
            shortage,
            failures,
        })
    }

    /// A place for a connection, for which another one may be closed; where there is none, [`Self::refusal`] says so.
    pub(crate) fn accept(&self, client: ClientAddr) -> Option<connections::Place> {
        self.connections.admit(client.0.ip())
    }

    /// Why a connection that has just been accepted is turned away, if it is.
    pub(crate) fn refusal(&self, accepted: &Tcp) -> Option<Error> {
        if self.shortage.is_there() {
            return Some(Error::MemoryShort);
        }
        let limit = self.connections.max();
        (!accepted.has_place()).then_some(Error::TooManyConnections { limit })
    }

    fn enter(self: &Arc<Self>) -> Result<Slot, Full> {
        if self.shortage.is_there() {
            return Err(Full::Memory);
        }
        let mut slot = Slot {
            admission: self.clone(),
            is_over: false,
        };
        if self.in_flight.fetch_add(1, Ordering::Relaxed) >= self.max_in_flight {
            slot.is_over = true;
            Err(Full::Places)
        } else {
            Ok(slot)
        }
    }
}

impl Slot {
    /// The response is complete, or failed after its head, which nobody else counts.
    pub(crate) fn ended(&mut self, result: Result<(), &Error>) {
        if let (Err(error), false) = (result, std::mem::replace(&mut self.is_over, true)) {
            self.admission.failures.count(error.cause());
        }
    }
}

/// Of what there is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Full {
    Places,
    Memory,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.admission.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !self.is_over {
            self.admission.failures.count(Error::Left.cause());
        }
    }
}

/// Enters the in-flight limit or sheds; the place is held to the end of the response.
#[derive(Clone)]
struct Admit(Arc<Admission>);

#[derive(Clone)]
pub(crate) struct Admitted<S> {
    inner: S,
    admission: Arc<Admission>,
}

impl<S> Layer<S> for Admit {
    type Service = Admitted<S>;

    fn layer(&self, inner: S) -> Admitted<S> {
        Admitted {
            inner,
            admission: self.0.clone(),
        }
    }
}

pin_project! {
    pub(crate) struct AdmitFuture<F> {
        #[pin]
        inner: Option<F>,
        slot: Result<Slot, Full>,
    }
}

impl<S> Service<Request<Body>> for Admitted<S>
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
        let slot = self.admission.enter();
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
                Err(Full::Memory) => Error::MemoryShort,
                _ => Error::Shed,
            }));
        };
        let result = ready!(inner.poll(cx));
        let mut slot = std::mem::replace(this.slot, Err(Full::Places)).ok();
        match result {
            Ok(rsp) => Poll::Ready(Ok(rsp.map(|body| body.holding(slot)))),
            Err(error) => {
                if let Some(slot) = &mut slot {
                    slot.is_over = true; // who answers it counts it
                }
                Poll::Ready(Err(error))
            }
        }
    }
}

/// Counts requests and responses of one direction; these totals outlive every series with finer labels.
#[derive(Clone)]
pub(crate) struct Observe(Arc<Totals>);

struct Totals {
    requests: Arc<Counter>,
    /// By the first digit of the status, from 1.
    responses: [Arc<Counter>; 5],
    encoded_targets: Arc<Counter>,
}

impl Totals {
    fn response(&self, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).clamp(1, 5);
        self.responses[class - 1].inc();
    }
}

impl Observe {
    pub(crate) fn new(registry: &Registry, direction: &str) -> Self {
        let labels = Labels::new().with("direction", direction);
        let requests = registry.counter("tulle_http_requests_total", "HTTP requests by direction");
        let responses = registry.counter("tulle_http_responses_total", "HTTP responses by direction and class");
        let encoded_targets = registry.counter(
            "tulle_http_encoded_targets_total",
            "HTTP/1 requests whose target had characters that were percent-encoded, by direction",
        );
        let class = |n| responses.get(&labels.clone().with("status_class", format_args!("{n}xx")));
        Self(Arc::new(Totals {
            requests: requests.get(&labels),
            responses: [1, 2, 3, 4, 5].map(class),
            encoded_targets: encoded_targets.get(&labels),
        }))
    }
}

#[derive(Clone)]
pub(crate) struct Observed<S> {
    inner: S,
    totals: Arc<Totals>,
}

impl<S> Layer<S> for Observe {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Observed<S> {
        Observed {
            inner,
            totals: self.0.clone(),
        }
    }
}

pin_project! {
    pub(crate) struct ObserveFuture<F> {
        #[pin]
        inner: F,
        totals: Arc<Totals>,
    }
}

impl<S> Service<Request<Body>> for Observed<S>
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
            this.totals.response(rsp.status());
        }
        Poll::Ready(result)
    }
}

/// Counts the errors of one direction, by their label and by their cause.
#[derive(Clone)]
pub(crate) struct Errors {
    errors: Family<Counter>,
    failures: Failures,
    labels: Arc<Labels>,
}

impl Errors {
    pub(crate) fn new(errors: Family<Counter>, failures: Failures, labels: Labels) -> Self {
        Self {
            errors,
            failures,
            labels: Arc::new(labels),
        }
    }

    fn count(&self, error: &Error, place: &Place) {
        let labels = match &place.labelled {
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
struct Rescue(Arc<Rescuer>);

struct Rescuer {
    reasons: Reasons,
    place: Arc<Place>,
    closer: Closer,
    errors: Errors,
    totals: Arc<Totals>,
    access_log: Option<AccessLog>,
}

impl Rescue {
    /// `closer` ends the connection where an error asks for that.
    fn new(reasons: Reasons, place: Place, closer: Closer, wrappers: &Wrappers) -> Self {
        Self(Arc::new(Rescuer {
            reasons,
            place: Arc::new(place),
            closer,
            errors: wrappers.errors.clone(),
            totals: wrappers.observe.0.clone(),
            access_log: wrappers.access_log.clone(),
        }))
    }
}

#[derive(Clone)]
pub(crate) struct Rescued<S> {
    inner: S,
    rescuer: Arc<Rescuer>,
}

impl<S> Layer<S> for Rescue {
    type Service = Rescued<S>;

    fn layer(&self, inner: S) -> Rescued<S> {
        Rescued {
            inner,
            rescuer: self.0.clone(),
        }
    }
}

pin_project! {
    pub(crate) struct RescueFuture<F> {
        #[pin]
        inner: F,
        asker: Asker,
        version: Version,
        rescuer: Arc<Rescuer>,
        // Of the access log, where there is one.
        entry: Option<Box<Entry>>,
    }
}

impl<S> Service<Request<Body>> for Rescued<S>
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
        let (asker, version) = (Asker::of(&req), req.version());
        let log = self.rescuer.access_log.as_ref();
        let entry = log.map(|log| log.entry(&req, &self.rescuer.place));
        RescueFuture {
            inner: self.inner.call(req),
            asker,
            version,
            rescuer: self.rescuer.clone(),
            entry,
        }
    }
}

impl<F: Future<Output = Result<Response<Body>, Error>>> Future for RescueFuture<F> {
    type Output = Result<Response<Body>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.entry.is_none() {
            return self.rescued(cx);
        }
        let since = Instant::now();
        let rescued = self.as_mut().rescued(cx);
        let entry = self.project().entry;
        if let Some(entry) = entry {
            entry.worked(since);
        }
        if let (Poll::Ready(rsp), Some(entry)) = (&rescued, entry.take_if(|_| rescued.is_ready())) {
            entry.answered(rsp.as_ref().ok());
        }
        rescued
    }
}

impl<F: Future<Output = Result<Response<Body>, Error>>> RescueFuture<F> {
    fn rescued(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Response<Body>, Error>> {
        let this = self.project();
        let error = match ready!(this.inner.poll(cx)) {
            Ok(rsp) => return Poll::Ready(Ok(rsp)),
            Err(error) => error,
        };
        this.rescuer.count(&error);
        if *this.version == Version::HTTP_2 && is_of_stream(&error) {
            return Poll::Ready(Err(error)); // the client sees the stream's reset as it was, or has reset it
        }
        if error.answer().close {
            this.rescuer.closer.notify_one();
        }
        Poll::Ready(Ok(this.rescuer.answer(&error, *this.asker)))
    }
}

impl<S> Rescued<S> {
    /// Counts a request whose target had to be percent-encoded.
    pub(crate) fn encoded_target(&self) {
        self.rescuer.totals.encoded_targets.inc();
    }

    /// Counts a request that is refused without a response.
    pub(crate) fn refused(&self, error: &Error) {
        self.rescuer.count(error);
    }

    /// The response to a request that could not be read, or is not to be.
    pub(crate) fn refuse(&self, error: &Error, asker: Asker) -> Response<Body> {
        self.rescuer.count(error);
        self.rescuer.totals.requests.inc();
        self.rescuer.answer(error, asker)
    }
}

impl Rescuer {
    fn answer(&self, error: &Error, asker: Asker) -> Response<Body> {
        let rsp = respond::error(error, asker, self.reasons, &self.place);
        self.totals.response(rsp.status());
        rsp
    }

    fn count(&self, error: &Error) {
        self.errors.count(error, &self.place);
        tracing::debug!(error = %Chain(error), cause = error.cause(), side = ?error.side(), "request failed");
    }
}

/// Whether it concerns one stream of HTTP/2 and nothing else.
fn is_of_stream(error: &Error) -> bool {
    match error {
        // Its client may send it once more.
        error if error.is_unprocessed() => true,
        Error::H2(error) => error.is_reset(),
        Error::RequestBody(source) => source.downcast_ref().is_some_and(h2::Error::is_reset),
        _ => false,
    }
}

/// An error with its causes, for logs.
struct Chain<'a>(&'a Error);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = std::error::Error::source(self.0);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
