//! Families of the outbound side, and their label sets.

pub(crate) mod connections;

use std::sync::Arc;

use http::Request;
use tokio::time::Instant;
use tulle_core::{
    addr::Addr,
    metrics::{Counter, Family, Histogram, Labels, Registry},
};

use crate::{
    http::{body::Body, classify::Ended, headers, upload::Upload},
    metrics::{
        balancers,
        failures::Failures,
        hosts::{Hosts, SaidBy},
        http::{self as http_metrics, Outcome},
        routes::{self, Kind, StatusSeries, Statuses},
    },
    net::counts,
    outbound::{metrics::connections::Protocol, profile, tries::Tally},
    policy::{endpoint::EndpointSpec, meta::Meta},
    tls::status::ClientTls,
};

/// All families that outbound traffic is counted in.
#[derive(Clone)]
pub(crate) struct Families {
    pub(crate) http: http_metrics::Families,
    pub(crate) tcp: counts::Families,
    pub(crate) profiles: profile::Families,
    pub(super) connections: connections::Families,
    http_balancers: balancers::Families,
    tcp_balancers: balancers::Families,
    tls_balancers: balancers::Families,
    http_routes: RouteFamilies,
    grpc_routes: RouteFamilies,
    tcp_errors: Family<Counter>,
    failures: Failures,
    pub(super) retries: Family<Counter>,
}

impl Families {
    /// `by_name` says whether requests and TLS are counted by the host that they are for, and who says it.
    pub(crate) fn new(
        registry: &Registry,
        http: http_metrics::Families,
        tcp: counts::Families,
        by_name: Option<SaidBy>,
    ) -> Self {
        Self {
            http,
            tcp,
            profiles: profile::Families::new(registry),
            connections: connections::Families::new(registry, by_name),
            http_balancers: balancers::Families::new(registry, "http"),
            tcp_balancers: balancers::Families::new(registry, "tcp"),
            tls_balancers: balancers::Families::new(registry, "tls"),
            http_routes: RouteFamilies::new(registry, Kind::Http, by_name),
            grpc_routes: RouteFamilies::new(registry, Kind::Grpc, by_name),
            failures: Failures::new(registry, "outbound"),
            tcp_errors: registry.counter("outbound_tcp_errors_total", "Connections that reached no endpoint"),
            retries: registry.counter(
                "tulle_outbound_resent_total",
                "Requests sent to another endpoint, by reason",
            ),
        }
    }

    /// Counts a connection that reached nobody, by the name that its error has had all along, and by its cause.
    pub(super) fn tcp_failed(&self, target: &Addr, error: &'static str, cause: &'static str) {
        self.tcp_errors.get(&target_labels(target).with("error", error)).inc();
        self.failures.count(cause);
    }
}

/// Families of the routes of one kind.
#[derive(Clone)]
struct RouteFamilies {
    duration: Family<Histogram>,
    statuses: Statuses,
    frames: Family<Histogram>,
    retries: Family<Counter>,
    retry_successes: Family<Counter>,
    retries_exhausted: Family<Counter>,
    retries_refused: Family<Counter>,
    backend_requests: Family<Counter>,
    backend_duration: Family<Histogram>,
    backend_statuses: Statuses,
    backend_frames: Family<Histogram>,
    by_name: Option<SaidBy>,
}

/// The series of one route, or of its requests for one host.
pub(crate) struct RouteSeries {
    families: RouteFamilies,
    /// Of parent and route.
    labels: Labels,
    /// Those for each host, where requests are counted by it.
    hosts: Option<Hosts<Arc<Self>>>,
    duration: Arc<Histogram>,
    statuses: StatusSeries,
    pub(super) frames: Arc<Histogram>,
    retries: Arc<Counter>,
    retry_successes: Arc<Counter>,
    retries_exhausted: Arc<Counter>,
    retries_refused: Arc<Counter>,
}

/// The series of one backend of a route.
pub(crate) struct BackendSeries {
    pub(super) route: Arc<RouteSeries>,
    requests: Arc<Counter>,
    duration: Arc<Histogram>,
    statuses: StatusSeries,
    frames: Arc<Histogram>,
}

impl RouteFamilies {
    fn new(registry: &Registry, kind: Kind, by_name: Option<SaidBy>) -> Self {
        let name = |name: &str| format!("outbound_{}_route_{name}", kind.name());
        let counter = |of, help| registry.counter(&name(of), help);
        let seconds = |of, help, bounds| registry.histogram(&name(of), help, bounds);
        let frames = |of, help| registry.histogram(&name(of), help, routes::FRAMES);
        let label = match kind {
            Kind::Http => "http_status",
            Kind::Grpc => "grpc_status",
        };
        let statuses = |of| Statuses::new(registry, &name(of), kind, label, true);
        Self {
            duration: seconds(
                "request_duration_seconds",
                "Seconds from a request's head to the end of its response, all tries included",
                routes::COARSE,
            ),
            statuses: statuses("request_statuses_total"),
            frames: frames("request_frame_size_bytes", "Sizes of the pieces of request bodies"),
            retries: counter("retry_requests_total", "Tries after the first"),
            retry_successes: counter("retry_successes_total", "Requests that a further try has saved"),
            retries_exhausted: counter(
                "retry_limit_exceeded_total",
                "Requests that failed with as many tries as they may have",
            ),
            retries_refused: counter(
                "retry_overflow_total",
                "Requests that were not tried again, for want of an endpoint or of budget",
            ),
            backend_requests: counter("backend_requests_total", "Requests that the route gave to a backend"),
            backend_duration: seconds(
                "backend_response_duration_seconds",
                "Seconds from the end of a request to the end of its response, for each try",
                routes::FINE,
            ),
            backend_statuses: statuses("backend_response_statuses_total"),
            backend_frames: frames(
                "backend_response_frame_size_bytes",
                "Sizes of the pieces of response bodies",
            ),
            by_name,
        }
    }

    fn series(&self, labels: Labels, host: &str, hosts: Option<Hosts<Arc<RouteSeries>>>) -> RouteSeries {
        let of_requests = labels.clone().with("hostname", host);
        RouteSeries {
            duration: self.duration.get(&of_requests),
            statuses: self.statuses.series(of_requests.clone()),
            frames: self.frames.get(&of_requests),
            retries: self.retries.get(&of_requests),
            retry_successes: self.retry_successes.get(&of_requests),
            retries_exhausted: self.retries_exhausted.get(&of_requests),
            retries_refused: self.retries_refused.get(&of_requests),
            families: self.clone(),
            labels,
            hosts,
        }
    }
}

impl Families {
    /// What is counted of a balancer that `parent` leads to by `backend`; `path` is the service's name.
    pub(super) fn balancer(
        &self,
        protocol: Protocol,
        parent: &Meta,
        backend: &Meta,
        dst: &Addr,
        path: &str,
    ) -> Arc<balancers::Series> {
        let labels = with_place(with_place(Labels::new(), "parent", parent), "backend", backend);
        let (families, labels) = match protocol {
            Protocol::Http1 | Protocol::Http2 | Protocol::Detect => (&self.http_balancers, labels),
            Protocol::Opaque => (&self.tcp_balancers, labels.with("logical", dst).with("concrete", path)),
            Protocol::Tls => (&self.tls_balancers, labels.with("logical", dst).with("concrete", path)),
        };
        families.series(&labels)
    }

    /// What is counted of a route of `parent`.
    pub(super) fn route(&self, kind: Kind, parent: &Meta, route: &Meta) -> Arc<RouteSeries> {
        let families = match kind {
            Kind::Http => &self.http_routes,
            Kind::Grpc => &self.grpc_routes,
        };
        let labels = with_meta(with_place(Labels::new(), "parent", parent), "route", route);
        let hosts = families.by_name.map(|_| Hosts::default());
        Arc::new(families.series(labels, "", hosts))
    }
}

impl RouteSeries {
    /// What is counted of requests for the host of `req`, where hosts are told apart.
    pub(super) fn named(self: &Arc<Self>, req: &Request<Body>) -> Option<Arc<Self>> {
        let (hosts, said_by) = (self.hosts.as_ref()?, self.families.by_name?);
        let authority = headers::authority(req)?;
        hosts.get(authority.host(), said_by, |host| {
            Arc::new(self.families.series(self.labels.clone(), host, None))
        })
    }

    /// What is counted of a backend of this route.
    pub(super) fn backend(self: &Arc<Self>, backend: &Meta) -> Arc<BackendSeries> {
        let (families, labels) = (&self.families, with_place(self.labels.clone(), "backend", backend));
        Arc::new(BackendSeries {
            route: self.clone(),
            requests: families.backend_requests.get(&labels),
            duration: families.backend_duration.get(&labels),
            statuses: families.backend_statuses.series(labels.clone()),
            frames: families.backend_frames.get(&labels),
        })
    }

    /// A request has come to its end.
    pub(super) fn ended(&self, started: Instant, now: Instant, outcome: &Outcome) {
        routes::observe(&self.duration, started, now);
        self.statuses.ended(outcome);
    }
}

impl Tally for RouteSeries {
    fn retried(&self) {
        self.retries.inc();
    }

    fn recovered(&self) {
        self.retry_successes.inc();
    }

    fn exhausted(&self) {
        self.retries_exhausted.inc();
    }

    fn no_budget(&self) {
        self.retries_refused.inc();
    }

    fn no_endpoint(&self) {
        self.retries_refused.inc();
    }
}

impl BackendSeries {
    pub(super) fn request(&self) {
        self.requests.inc();
    }

    pub(super) fn frame(&self, len: usize) {
        self.frames.observe(len as f64);
    }

    /// A response has come to its end, or failed to come.
    pub(super) fn ended(&self, sent_at: Instant, now: Instant, outcome: &Outcome) {
        routes::observe(&self.duration, sent_at, now);
        self.statuses.ended(outcome);
    }
}

/// One request, as its route counts it.
pub(super) struct Passage {
    pub(super) route: Arc<RouteSeries>,
    pub(super) upload: Upload,
}

impl Ended for Passage {
    fn ended(&mut self, outcome: Outcome, now: Instant) {
        self.route.ended(self.upload.started(), now, &outcome);
    }
}

/// Adds `<prefix>_group`, `_kind`, `_namespace` and `_name`.
pub(super) fn with_meta(labels: Labels, prefix: &str, meta: &Meta) -> Labels {
    labels
        .with(&format!("{prefix}_group"), meta.group())
        .with(&format!("{prefix}_kind"), meta.kind())
        .with(&format!("{prefix}_namespace"), meta.namespace())
        .with(&format!("{prefix}_name"), meta.name())
}

/// The same, and port and section.
fn with_place(labels: Labels, prefix: &str, meta: &Meta) -> Labels {
    let port = meta.port().map(|port| port.to_string()).unwrap_or_default();
    with_meta(labels, prefix, meta)
        .with(&format!("{prefix}_port"), port)
        .with(&format!("{prefix}_section_name"), meta.section())
}

/// Labels of a target; a name has no address of its own.
pub(super) fn target_labels(target: &Addr) -> Labels {
    let labels = Labels::new().with("direction", "outbound").with("target_addr", target);
    with_target(labels, target)
}

/// The address and the port of a target.
fn with_target(labels: Labels, target: &Addr) -> Labels {
    let labels = match target {
        Addr::Socket(addr) => labels.with("target_ip", addr.ip()),
        Addr::Name(_) => labels.with("target_ip", ""),
    };
    labels.with("target_port", target.port())
}

/// Labels of all that goes to one endpoint. `authority` is the logical destination, where it has a name.
pub(super) fn endpoint_labels(authority: Option<&str>, spec: &EndpointSpec, tls: &ClientTls) -> Labels {
    let mut labels = target_labels(&Addr::Socket(spec.addr));
    if let Some(authority) = authority {
        labels = labels.with("authority", authority);
    }
    labels = tls.labels(labels);
    for (name, value) in &spec.labels {
        labels = labels.with(&format!("dst_{name}"), value);
    }
    labels
}
