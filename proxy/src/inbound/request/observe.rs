//! Records requests in the metrics of their route and authorization.

use std::sync::Arc;

use http::Request;
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::Instant;
use tulle_core::metrics::Counter;

use crate::{
    http::{
        body::Body,
        error::Error,
        lifecycle::classify::{self, ResponseObserver},
        lifecycle::request_timing::RequestTiming,
    },
    inbound::{metrics::RouteSeries, policy::ActivePolicy},
    metrics::http::{ResponseOutcome, Series},
    policy::{meta::Meta, profile::Class},
};

/// Records one request in the metrics of its route. If it is dropped without a result, it records that the client disconnected.
pub(super) struct RouteRequestGuard {
    pub(super) metrics: RequestMetrics,
    pub(super) timing: RequestTiming,
    /// The response class from the ServiceProfile; it overrides the default classification.
    pub(super) profile_class: Option<Class>,
    pub(super) is_recorded: bool,
}

impl RouteRequestGuard {
    /// Counts a permitted request that arrived at `started_at`.
    pub(super) fn begin(request_metrics: RequestMetrics, req: &mut Request<Body>, started_at: Instant) -> Self {
        let route_series = &request_metrics.route_metrics.route_series;
        route_series.record_request();
        let timing = RequestTiming::observe(req, started_at, &route_series.request_frame_bytes);
        Self {
            metrics: request_metrics,
            timing,
            profile_class: None,
            is_recorded: false,
        }
    }

    /// Records that there is no response.
    pub(super) fn record_error(&mut self, error: &Error) {
        let outcome = classify::failed_outcome(error);
        self.metrics.series().record_response(outcome);
        self.response_ended(outcome, Instant::now());
    }
}

/// Records that the client disconnected, if no result was recorded.
impl Drop for RouteRequestGuard {
    fn drop(&mut self) {
        if !self.is_recorded {
            self.record_error(&Error::ClientClosed);
        }
    }
}

impl ResponseObserver for RouteRequestGuard {
    fn series(&self) -> Option<&Series> {
        Some(self.metrics.series())
    }

    fn data(&mut self, len: usize) {
        self.metrics.route_metrics.route_series.record_response_frame(len);
    }

    fn counts_as_success(&self, outcome: &ResponseOutcome) -> bool {
        classify::is_success_for_class(self.profile_class, outcome)
    }

    fn response_ended(&mut self, outcome: ResponseOutcome, now: Instant) {
        self.is_recorded = true;
        self.metrics
            .route_metrics
            .route_series
            .record_response(&self.timing, &outcome, now);
    }
}

/// The routes and authorizations by which requests of a connection were permitted. They have two purposes. The metrics of each are
/// looked up only once. If the policy changes, [`AuthorizedRoute::is_in_progress`] finds the requests in progress that it may deny.
pub(in crate::inbound) type AuthorizedRoutes = SmallVec<[AuthorizedRoute; 1]>;

/// The kind of a request. It decides what ends if a changed policy denies the request while it is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::inbound) enum RequestKind {
    /// No tunnel. The connection ends.
    Plain,
    /// CONNECT over HTTP/2, whose body carries the bytes of the tunnel. The connection ends, also when the rules no longer permit
    /// CONNECT.
    Connect,
    /// Any other tunnel. Only the tunnel ends.
    Tunnel,
}

impl RequestKind {
    pub(super) fn new(asks_for_tunnel: bool, is_connect: bool) -> Self {
        match (asks_for_tunnel, is_connect) {
            (true, _) => Self::Tunnel,
            (false, true) => Self::Connect,
            (false, false) => Self::Plain,
        }
    }
}

/// A route, and the authorization that permitted requests on it.
pub(in crate::inbound) struct AuthorizedRoute {
    /// The policy that owns the route and the authorization: while it is held, their addresses in memory identify them.
    pub(super) policy: Arc<ActivePolicy>,
    pub(super) route_ptr: usize,
    pub(super) authorization_ptr: usize,
    pub(super) kind: RequestKind,
    pub(super) metrics: Arc<AuthorizedRouteMetrics>,
}

impl AuthorizedRoute {
    /// Whether a request or tunnel on this route is in progress. Each of them holds a reference to the metrics.
    pub(super) fn is_in_progress(&self) -> bool {
        Arc::strong_count(&self.metrics) > 1
    }
}

/// Returns the metrics for a request without a tunnel (`Plain`) that was permitted by the same route and authorization as the
/// request with `metrics`.
pub(super) fn metrics_without_tunnel(
    routes: &mut AuthorizedRoutes,
    metrics: &Arc<AuthorizedRouteMetrics>,
) -> Arc<AuthorizedRouteMetrics> {
    let Some(tunnel_route) = routes.iter().find(|route| Arc::ptr_eq(&route.metrics, metrics)) else {
        return metrics.clone();
    };
    let known = routes.iter().find(|route| {
        route.kind == RequestKind::Plain
            && Arc::ptr_eq(&route.policy, &tunnel_route.policy)
            && route.route_ptr == tunnel_route.route_ptr
            && route.authorization_ptr == tunnel_route.authorization_ptr
    });
    if let Some(known) = known {
        return known.metrics.clone();
    }
    let plain = AuthorizedRoute {
        policy: tunnel_route.policy.clone(),
        route_ptr: tunnel_route.route_ptr,
        authorization_ptr: tunnel_route.authorization_ptr,
        kind: RequestKind::Plain,
        metrics: Arc::new(AuthorizedRouteMetrics {
            route_meta: metrics.route_meta.clone(),
            authorization_meta: metrics.authorization_meta.clone(),
            allowed: metrics.allowed.clone(),
            series: metrics.series.clone(),
            route_series: metrics.route_series.clone(),
            last_authority_series: Mutex::default(),
        }),
    };
    let plain_metrics = plain.metrics.clone();
    routes.push(plain);
    plain_metrics
}

/// Metrics of the requests that an authorization permits on a route. Every request and tunnel in progress holds a reference.
pub(in crate::inbound) struct AuthorizedRouteMetrics {
    pub(super) route_meta: Arc<Meta>,
    pub(super) authorization_meta: Arc<Meta>,
    pub(super) allowed: Arc<Counter>,
    pub(super) series: Arc<Series>,
    pub(super) route_series: Arc<RouteSeries>,
    /// The series of the last authority, if requests are counted by authority.
    pub(super) last_authority_series: Mutex<Option<(Arc<str>, Arc<Series>)>>,
}

/// The metrics of one permitted request.
pub(super) struct RequestMetrics {
    pub(super) route_metrics: Arc<AuthorizedRouteMetrics>,
    /// The series of the request's authority, if requests are counted by authority.
    pub(super) authority_series: Option<Arc<Series>>,
}

impl RequestMetrics {
    pub(super) fn series(&self) -> &Arc<Series> {
        self.authority_series.as_ref().unwrap_or(&self.route_metrics.series)
    }
}
