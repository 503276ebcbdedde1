//! Metric families of the outbound side, and their labels.

pub(crate) mod attempts;
pub(crate) mod connections;
pub(crate) mod labels;
pub(crate) mod profiles;

use std::sync::Arc;

use http::Request;
use tokio::time::Instant;
use tulle_core::{
    addr::Addr,
    metrics::{Counter, Family, Histogram, Labels, Registry},
};

use crate::{
    http::{body::Body, headers, lifecycle::classify::ResponseObserver, lifecycle::request_timing::RequestTiming},
    metrics::{
        balancers,
        failures::Failures,
        hosts::{HostMap, HostSource},
        http::{self as http_metrics, ResponseOutcome},
        routes::{self, StatusKind, StatusSeries, Statuses},
    },
    net::tcp_metrics,
    outbound::metrics::{
        attempts::AttemptMetrics,
        connections::DestinationProtocol,
        labels::{target_labels, with_meta, with_meta_and_port},
    },
    policy::meta::Meta,
};

/// All metric families of outbound traffic.
#[derive(Clone)]
pub(crate) struct Families {
    pub(crate) http: http_metrics::Families,
    pub(crate) tcp: tcp_metrics::Families,
    pub(crate) profiles: profiles::Families,
    pub(in crate::outbound) connections: connections::Families,
    http_balancers: balancers::Families,
    tcp_balancers: balancers::Families,
    tls_balancers: balancers::Families,
    http_routes: RouteFamilies,
    grpc_routes: RouteFamilies,
    tcp_errors: Family<Counter>,
    failures: Failures,
    pub(in crate::outbound) resends: Family<Counter>,
    mirrored: Family<Counter>,
}

impl Families {
    /// `host_source` says whether the source of host names is trusted; `None` if requests and TLS connections are not counted by
    /// host.
    pub(crate) fn new(
        registry: &Registry,
        http: http_metrics::Families,
        tcp: tcp_metrics::Families,
        host_source: Option<HostSource>,
    ) -> Self {
        Self {
            http,
            tcp,
            profiles: profiles::Families::new(registry),
            connections: connections::Families::new(registry, host_source),
            http_balancers: balancers::Families::new(registry, "http"),
            tcp_balancers: balancers::Families::new(registry, "tcp"),
            tls_balancers: balancers::Families::new(registry, "tls"),
            http_routes: RouteFamilies::new(registry, StatusKind::Http, host_source),
            grpc_routes: RouteFamilies::new(registry, StatusKind::Grpc, host_source),
            failures: Failures::new(registry, "outbound"),
            tcp_errors: registry.counter("outbound_tcp_errors_total", "Connections that reached no endpoint"),
            resends: registry.counter(
                "tulle_outbound_resent_total",
                "Requests sent again or given to another endpoint, by cause",
            ),
            mirrored: registry.counter(
                "tulle_outbound_mirrored_requests_total",
                "Copies of requests for mirrors, by result; `dropped`: too many copies were in flight, or more of the body waited for the mirror than the proxy buffers",
            ),
        }
    }

    /// Counts a failed connection: by its `error` label in `outbound_tcp_errors_total`, and by its cause.
    pub(in crate::outbound) fn record_tcp_error(&self, target: &Addr, error: &'static str, cause: &'static str) {
        self.tcp_errors.get(&target_labels(target).with("error", error)).inc();
        self.failures.count(cause);
    }
}

/// The counters of one mirror, by the result of a copy.
pub(in crate::outbound) struct MirrorSeries {
    pub(in crate::outbound) succeeded: Arc<Counter>,
    pub(in crate::outbound) failed: Arc<Counter>,
    pub(in crate::outbound) dropped: Arc<Counter>,
}

/// The use of a balancer, for the labels of its metrics.
pub(in crate::outbound) struct MetricScope<'a> {
    pub(in crate::outbound) protocol: DestinationProtocol,
    pub(in crate::outbound) parent: &'a Meta,
    /// Address that applications dial, or name that they request.
    pub(in crate::outbound) dst: &'a Addr,
}

/// Metric families of the routes of one kind: `outbound_http_route_*` or `outbound_grpc_route_*`.
#[derive(Clone)]
struct RouteFamilies {
    duration: Family<Histogram>,
    statuses: Statuses,
    frames: Family<Histogram>,
    retries: Family<Counter>,
    retry_successes: Family<Counter>,
    retry_limit_exceeded: Family<Counter>,
    retry_overflow: Family<Counter>,
    backend_requests: Family<Counter>,
    backend_duration: Family<Histogram>,
    backend_statuses: Statuses,
    backend_frames: Family<Histogram>,
    host_source: Option<HostSource>,
}

/// The series of one route, or of its requests to one host.
pub(crate) struct RouteSeries {
    families: RouteFamilies,
    /// Labels of the parent and the route.
    labels: Labels,
    /// Series of each host, if requests are counted by host.
    by_host: Option<HostMap<Arc<Self>>>,
    duration: Arc<Histogram>,
    statuses: StatusSeries,
    pub(in crate::outbound) frames: Arc<Histogram>,
    retries: Arc<Counter>,
    retry_successes: Arc<Counter>,
    retry_limit_exceeded: Arc<Counter>,
    retry_overflow: Arc<Counter>,
}

/// The series of one backend of a route.
pub(crate) struct BackendSeries {
    pub(in crate::outbound) route: Arc<RouteSeries>,
    requests: Arc<Counter>,
    duration: Arc<Histogram>,
    statuses: StatusSeries,
    frames: Arc<Histogram>,
}

impl RouteFamilies {
    fn new(registry: &Registry, kind: StatusKind, host_source: Option<HostSource>) -> Self {
        let name = |name: &str| format!("outbound_{}_route_{name}", kind.name());
        let counter = |suffix, help| registry.counter(&name(suffix), help);
        let seconds = |suffix, help, bounds| registry.histogram(&name(suffix), help, bounds);
        let frames = |suffix, help| registry.histogram(&name(suffix), help, routes::FRAME_BYTES_BUCKETS);
        let label = match kind {
            StatusKind::Http => "http_status",
            StatusKind::Grpc => "grpc_status",
        };
        let statuses = |suffix| Statuses::new(registry, &name(suffix), kind, label, true);
        Self {
            duration: seconds(
                "request_duration_seconds",
                "Seconds from a request's head to the end of its response, retries included",
                routes::SECONDS_BUCKETS_COARSE,
            ),
            statuses: statuses("request_statuses_total"),
            frames: frames("request_frame_size_bytes", "Sizes of the data frames of request bodies"),
            retries: counter("retry_requests_total", "Retries sent"),
            retry_successes: counter("retry_successes_total", "Requests that succeeded after a retry"),
            retry_limit_exceeded: counter("retry_limit_exceeded_total", "Requests that failed at the retry limit"),
            retry_overflow: counter(
                "retry_overflow_total",
                "Requests not retried because no endpoint was available or the retry budget was empty",
            ),
            backend_requests: counter("backend_requests_total", "Requests that the route sent to a backend"),
            backend_duration: seconds(
                "backend_response_duration_seconds",
                "Seconds from the end of a request to the end of its response, for each attempt",
                routes::SECONDS_BUCKETS_FINE,
            ),
            backend_statuses: statuses("backend_response_statuses_total"),
            backend_frames: frames(
                "backend_response_frame_size_bytes",
                "Sizes of the data frames of response bodies",
            ),
            host_source,
        }
    }

    fn series(&self, labels: Labels, host: &str, hosts: Option<HostMap<Arc<RouteSeries>>>) -> RouteSeries {
        let request_labels = labels.clone().with("hostname", host);
        RouteSeries {
            duration: self.duration.get(&request_labels),
            statuses: self.statuses.series(request_labels.clone()),
            frames: self.frames.get(&request_labels),
            retries: self.retries.get(&request_labels),
            retry_successes: self.retry_successes.get(&request_labels),
            retry_limit_exceeded: self.retry_limit_exceeded.get(&request_labels),
            retry_overflow: self.retry_overflow.get(&request_labels),
            families: self.clone(),
            labels,
            by_host: hosts,
        }
    }
}

impl Families {
    /// The series of a balancer for a `backend`; `authority` is the service's name and port.
    pub(in crate::outbound) fn balancer(
        &self,
        scope: &MetricScope<'_>,
        backend: &Meta,
        authority: &str,
    ) -> Arc<balancers::BalancerSeries> {
        let MetricScope { protocol, parent, dst } = *scope;
        let labels = with_meta_and_port(with_meta_and_port(Labels::new(), "parent", parent), "backend", backend);
        let (families, labels) = match protocol {
            DestinationProtocol::Http1 | DestinationProtocol::Http2 | DestinationProtocol::Detect => {
                (&self.http_balancers, labels)
            }
            DestinationProtocol::Opaque => (
                &self.tcp_balancers,
                labels.with("logical", dst).with("concrete", authority),
            ),
            DestinationProtocol::Tls => (
                &self.tls_balancers,
                labels.with("logical", dst).with("concrete", authority),
            ),
        };
        families.series(&labels)
    }

    pub(in crate::outbound) fn mirror(&self, parent: &Meta, route: &Meta, backend: &Meta) -> MirrorSeries {
        let labels = with_meta(with_meta_and_port(Labels::new(), "parent", parent), "route", route);
        let labels = with_meta_and_port(labels, "backend", backend);
        let counter = |result| self.mirrored.get(&labels.clone().with("result", result));
        MirrorSeries {
            succeeded: counter("success"),
            failed: counter("failure"),
            dropped: counter("dropped"),
        }
    }

    pub(in crate::outbound) fn route(&self, kind: StatusKind, parent: &Meta, route: &Meta) -> Arc<RouteSeries> {
        let families = match kind {
            StatusKind::Http => &self.http_routes,
            StatusKind::Grpc => &self.grpc_routes,
        };
        let labels = with_meta(with_meta_and_port(Labels::new(), "parent", parent), "route", route);
        let hosts = families.host_source.map(|_| HostMap::default());
        Arc::new(families.series(labels, "", hosts))
    }
}

impl RouteSeries {
    /// The series for the host of `req`, if requests are counted by host.
    pub(in crate::outbound) fn host_series(self: &Arc<Self>, req: &Request<Body>) -> Option<Arc<Self>> {
        let (hosts, source) = (self.by_host.as_ref()?, self.families.host_source?);
        let authority = headers::authority(req)?;
        hosts.get(authority.host(), source, |host| {
            Arc::new(self.families.series(self.labels.clone(), host, None))
        })
    }

    pub(in crate::outbound) fn backend(self: &Arc<Self>, backend: &Meta) -> Arc<BackendSeries> {
        let (families, labels) = (
            &self.families,
            with_meta_and_port(self.labels.clone(), "backend", backend),
        );
        Arc::new(BackendSeries {
            route: self.clone(),
            requests: families.backend_requests.get(&labels),
            duration: families.backend_duration.get(&labels),
            statuses: families.backend_statuses.series(labels.clone()),
            frames: families.backend_frames.get(&labels),
        })
    }

    /// Records the end of a request.
    pub(in crate::outbound) fn record(&self, started: Instant, now: Instant, outcome: &ResponseOutcome) {
        routes::observe(&self.duration, started, now);
        self.statuses.record(outcome);
    }
}

impl AttemptMetrics for RouteSeries {
    fn retry_started(&self) {
        self.retries.inc();
    }

    fn retry_succeeded(&self) {
        self.retry_successes.inc();
    }

    fn retry_limit_exceeded(&self) {
        self.retry_limit_exceeded.inc();
    }

    fn budget_exhausted(&self) {
        self.retry_overflow.inc();
    }

    fn endpoints_exhausted(&self) {
        self.retry_overflow.inc();
    }
}

impl BackendSeries {
    pub(in crate::outbound) fn record_request(&self) {
        self.requests.inc();
    }

    pub(in crate::outbound) fn record_frame(&self, len: usize) {
        self.frames.observe(len as f64);
    }

    /// Records the end of a response, or an attempt without a response.
    pub(in crate::outbound) fn record_response(&self, sent_at: Instant, now: Instant, outcome: &ResponseOutcome) {
        routes::observe(&self.duration, sent_at, now);
        self.statuses.record(outcome);
    }
}

/// Records the end of a response in the series of its route.
pub(in crate::outbound) struct RouteResponseObserver {
    pub(in crate::outbound) route: Arc<RouteSeries>,
    pub(in crate::outbound) timing: RequestTiming,
}

impl ResponseObserver for RouteResponseObserver {
    fn response_ended(&mut self, outcome: ResponseOutcome, now: Instant) {
        self.route.record(self.timing.started_at(), now, &outcome);
    }
}
