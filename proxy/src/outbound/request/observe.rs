//! Records requests and their attempts in the metrics of routes.

use std::{collections::BTreeMap, sync::Arc};

use http::{Request, Response};
use tokio::time::Instant;
use tulle_core::metrics::Labels;

use crate::{
    http::{body::Body, error::Error, lifecycle::classify, lifecycle::request_timing::RequestTiming},
    metrics::http::ResponseOutcome,
    outbound::metrics::{BackendSeries, RouteSeries, labels},
    policy::{
        matches::RequestAttributes,
        meta::Meta,
        profile::{self, ProfileRoute},
    },
};

/// Records a request that fails or is cancelled in the series of its route.
pub(super) struct RouteRequestGuard<'a> {
    route: &'a Arc<RouteSeries>,
    /// Series of the request's host, if requests are counted by host.
    host_series: Option<Arc<RouteSeries>>,
    pub(super) upload: RequestTiming,
    is_recorded: bool,
}

impl<'a> RouteRequestGuard<'a> {
    pub(super) fn begin(route: &'a Arc<RouteSeries>, req: &mut Request<Body>) -> Self {
        let host_series = route.for_host(req);
        let frames = &host_series.as_ref().unwrap_or(route).frames;
        Self {
            upload: RequestTiming::observe(req, Instant::now(), frames),
            route,
            host_series,
            is_recorded: false,
        }
    }

    pub(super) fn series(&self) -> &Arc<RouteSeries> {
        self.host_series.as_ref().unwrap_or(self.route)
    }

    pub(super) fn start_attempt(
        &self,
        backend: Arc<BackendSeries>,
        kind: AttemptKind,
        began_at: Instant,
    ) -> RouteAttemptGuard {
        let (upload, host_series) = (self.upload.clone(), self.host_series.clone());
        RouteAttemptGuard::begin(upload, backend, host_series, kind, began_at)
    }

    /// Records a failed request. Other requests are recorded at the end of their response.
    pub(super) fn record_result(&mut self, sent: &Result<Response<Body>, Error>) {
        self.is_recorded = true;
        if let Err(error) = sent {
            let now = Instant::now();
            self.series()
                .record(self.upload.started(), now, &classify::failed_outcome(error));
        }
    }
}

/// Dropped without a result: the client has cancelled the request.
impl Drop for RouteRequestGuard<'_> {
    fn drop(&mut self) {
        if !self.is_recorded {
            self.record_result(&Err(Error::ClientClosed));
        }
    }
}

/// Records one attempt in the series of its route.
pub(super) struct RouteAttemptGuard {
    timing: RequestTiming,
    pub(super) backend_series: Arc<BackendSeries>,
    /// The route's series for the request's host, if requests are counted by host.
    host_series: Option<Arc<RouteSeries>>,
    kind: AttemptKind,
    began_at: Instant,
    is_recorded: bool,
}

impl RouteAttemptGuard {
    pub(super) fn begin(
        timing: RequestTiming,
        backend_series: Arc<BackendSeries>,
        host_series: Option<Arc<RouteSeries>>,
        kind: AttemptKind,
        began_at: Instant,
    ) -> Self {
        backend_series.record_request();
        Self {
            timing,
            backend_series,
            host_series,
            kind,
            began_at,
            is_recorded: false,
        }
    }

    /// When the request was sent completely. A retry starts after the upload has ended; then this is the start of the retry.
    fn sent_at(&self) -> Instant {
        self.timing.ended().max(self.began_at)
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
        if self.kind == AttemptKind::Final {
            let route = self.host_series.as_ref().unwrap_or(&self.backend_series.route);
            route.record(self.timing.started(), now, outcome);
        }
    }
}

/// Dropped without a result: the client has cancelled the request.
impl Drop for RouteAttemptGuard {
    fn drop(&mut self) {
        if !self.is_recorded {
            self.record_error(&Error::ClientClosed);
        }
    }
}

/// Whether a retry may follow an attempt. The response of a final attempt ends the request in the route's series.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AttemptKind {
    Final,
    Retryable,
}

/// The route of a request, or the routes of its ServiceProfile.
#[derive(Clone, Copy)]
pub(super) enum RouteSource<'a> {
    Route(&'a Meta),
    Profile(&'a [ProfileRoute]),
}

impl RouteSource<'_> {
    /// Labels of the request's route for tap observers.
    pub(super) fn route_labels(self, req: &Request<Body>) -> BTreeMap<String, String> {
        match self {
            Self::Route(meta) => {
                let labels = labels::with_meta(Labels::new(), "route", meta);
                labels.pairs().into_iter().collect()
            }
            Self::Profile(routes) => {
                let index = profile::find(routes, &RequestAttributes::of(req.method(), req.uri(), req.headers()));
                index.map(|index| routes[index].labels.clone()).unwrap_or_default()
            }
        }
    }
}
