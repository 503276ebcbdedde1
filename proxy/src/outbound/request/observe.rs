//! Records requests and their attempts in the metrics of routes.
//!
//! A [`RouteAttemptGuard`] records each attempt in the series of its backend.
//!
//! A request is recorded once in the series of its route:
//!
//! - if it fails or is cancelled: by [`RouteRequestGuard`];
//! - if it gets a response: at the end of the response, by the [`RouteAttemptGuard`] or the
//!   [`RouteResponseObserver`](crate::outbound::metrics::RouteResponseObserver); [`ResponseRecorder`] says which.

use std::{collections::BTreeMap, sync::Arc};

use http::{HeaderMap, Request, Response, StatusCode};
use tokio::time::Instant;
use tulle_core::metrics::Labels;

use crate::{
    http::{body::Body, error::Error, lifecycle::classify, lifecycle::request_timing::RequestTiming},
    metrics::http::{ResponseEnd, ResponseOutcome},
    outbound::metrics::{BackendSeries, RouteSeries, labels},
    policy::{
        matches::RequestAttributes,
        meta::Meta,
        profile::{self, ProfileRoute},
    },
};

/// Records, in the series of its route, a request that fails or is cancelled.
pub(super) struct RouteRequestGuard<'a> {
    route: &'a Arc<RouteSeries>,
    /// Series of the request's host, if requests are counted by host.
    host_series: Option<Arc<RouteSeries>>,
    pub(super) timing: RequestTiming,
    is_recorded: bool,
}

impl<'a> RouteRequestGuard<'a> {
    pub(super) fn begin(route: &'a Arc<RouteSeries>, req: &mut Request<Body>) -> Self {
        let host_series = route.host_series(req);
        let frames = &host_series.as_ref().unwrap_or(route).frames;
        Self {
            timing: RequestTiming::observe(req, Instant::now(), frames),
            route,
            host_series,
            is_recorded: false,
        }
    }

    /// Responds to a preflight request with these headers, and records it.
    pub(super) fn respond(mut self, headers: HeaderMap) -> Response<Body> {
        let mut rsp = Response::new(Body::empty());
        (*rsp.status_mut(), *rsp.headers_mut()) = (StatusCode::NO_CONTENT, headers);
        self.is_recorded = true;
        let outcome = ResponseOutcome {
            status: rsp.status(),
            grpc: None,
            success: true,
            end: ResponseEnd::Complete,
        };
        self.series().record(self.timing.started_at(), Instant::now(), &outcome);
        rsp
    }

    pub(super) fn series(&self) -> &Arc<RouteSeries> {
        self.host_series.as_ref().unwrap_or(self.route)
    }

    pub(super) fn start_attempt(
        &self,
        backend: Arc<BackendSeries>,
        recorder: ResponseRecorder,
        started_at: Instant,
    ) -> RouteAttemptGuard {
        let (timing, host_series) = (self.timing.clone(), self.host_series.clone());
        RouteAttemptGuard::begin(timing, backend, host_series, recorder, started_at)
    }

    /// Records the request if it failed. Otherwise it is recorded at the end of its response, by its [`ResponseRecorder`].
    pub(super) fn record_if_failed(&mut self, result: &Result<Response<Body>, Error>) {
        self.is_recorded = true;
        if let Err(error) = result {
            let now = Instant::now();
            self.series()
                .record(self.timing.started_at(), now, &classify::failed_outcome(error));
        }
    }
}

/// Records that the client cancelled the request, if no result was recorded.
impl Drop for RouteRequestGuard<'_> {
    fn drop(&mut self) {
        if !self.is_recorded {
            self.record_if_failed(&Err(Error::ClientClosed));
        }
    }
}

/// Records one attempt in the series of its backend, and its request in the series of the route if it is the request's
/// [`ResponseRecorder`].
pub(super) struct RouteAttemptGuard {
    timing: RequestTiming,
    pub(super) backend_series: Arc<BackendSeries>,
    /// The route's series for the request's host, if requests are counted by host.
    host_series: Option<Arc<RouteSeries>>,
    recorder: ResponseRecorder,
    started_at: Instant,
    is_recorded: bool,
}

impl RouteAttemptGuard {
    pub(super) fn begin(
        timing: RequestTiming,
        backend_series: Arc<BackendSeries>,
        host_series: Option<Arc<RouteSeries>>,
        recorder: ResponseRecorder,
        started_at: Instant,
    ) -> Self {
        backend_series.record_request();
        Self {
            timing,
            backend_series,
            host_series,
            recorder,
            started_at,
            is_recorded: false,
        }
    }

    /// The time at which the request was sent completely. The body of a retry was received before the retry, so this is at least
    /// the start of the retry.
    fn sent_at(&self) -> Instant {
        self.timing.body_ended_at().max(self.started_at)
    }

    /// Records an attempt without a response.
    pub(super) fn record_error(&mut self, error: &Error) {
        self.is_recorded = true;
        self.backend_series
            .record_response(self.sent_at(), Instant::now(), &classify::failed_outcome(error));
    }

    pub(super) fn record_response(&mut self, now: Instant, outcome: &ResponseOutcome) {
        self.is_recorded = true;
        self.backend_series.record_response(self.sent_at(), now, outcome);
        if self.recorder == ResponseRecorder::AttemptGuard {
            let route = self.host_series.as_ref().unwrap_or(&self.backend_series.route);
            route.record(self.timing.started_at(), now, outcome);
        }
    }
}

/// Records that the client cancelled the request, if no result was recorded.
impl Drop for RouteAttemptGuard {
    fn drop(&mut self) {
        if !self.is_recorded {
            self.record_error(&Error::ClientClosed);
        }
    }
}

/// The object that records a request with a response in the series of its route.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ResponseRecorder {
    /// The [`RouteAttemptGuard`] of the request's only attempt: its rule has no timeouts and no retries, and requests cannot
    /// override them.
    AttemptGuard,
    /// A [`RouteResponseObserver`](crate::outbound::metrics::RouteResponseObserver) of the response that the client gets: the
    /// request may have several attempts, and its timeouts may end the response.
    ResponseObserver,
}

/// The route of a request, or the routes of its ServiceProfile.
#[derive(Clone, Copy)]
pub(super) enum RouteSource<'a> {
    Route(&'a Meta),
    Profile(&'a [ProfileRoute]),
}

impl RouteSource<'_> {
    /// Labels of the request's route for taps.
    pub(super) fn route_labels(self, req: &Request<Body>) -> BTreeMap<String, String> {
        match self {
            Self::Route(meta) => {
                let labels = labels::with_meta(Labels::new(), "route", meta);
                labels.pairs().into_iter().collect()
            }
            Self::Profile(routes) => {
                let index =
                    profile::find_route(routes, &RequestAttributes::new(req.method(), req.uri(), req.headers()));
                index.map(|index| routes[index].labels.clone()).unwrap_or_default()
            }
        }
    }
}
