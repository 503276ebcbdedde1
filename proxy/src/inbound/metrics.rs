//! Families of the inbound side, and their label sets.

use std::{net::SocketAddr, sync::Arc};

use tokio::time::Instant;
use tulle_core::metrics::{Counter, Family, Histogram, Labels, Registry};

use crate::{
    http::upload::Upload,
    metrics::{
        failures::Failures,
        http::{self as http_metrics, Outcome},
        routes::{self, Kind, StatusSeries, Statuses},
    },
    net::{counts, detected},
    policy::{authz::Denied, meta::Meta, rate_limit::RateLimited},
    tls::{status::ServerTls, verify::HandshakeFailure},
};

/// All families that inbound traffic is counted in.
#[derive(Clone)]
pub(crate) struct Families {
    pub(crate) http: http_metrics::Families,
    pub(crate) tcp: counts::Families,
    pub(super) http_allow: Family<Counter>,
    http_deny: Family<Counter>,
    route_not_found: Family<Counter>,
    rate_limited: Family<Counter>,
    pub(super) tcp_allow: Family<Counter>,
    tcp_deny: Family<Counter>,
    tcp_terminate: Family<Counter>,
    tcp_errors: Family<Counter>,
    handshake_failures: Family<Counter>,
    failures: Failures,
    denied: Family<Counter>,
    pub(super) transport_header: Family<Counter>,
    detected: detected::Families,
    http_routes: RouteFamilies,
    grpc_routes: RouteFamilies,
}

/// Families of the routes of one kind.
#[derive(Clone)]
struct RouteFamilies {
    requests: Family<Counter>,
    statuses: Statuses,
    request_duration: Family<Histogram>,
    response_duration: Family<Histogram>,
    request_frames: Family<Histogram>,
    response_frames: Family<Histogram>,
}

/// The series of one route.
pub(super) struct RouteSeries {
    requests: Arc<Counter>,
    statuses: StatusSeries,
    request_duration: Arc<Histogram>,
    response_duration: Arc<Histogram>,
    pub(super) request_frames: Arc<Histogram>,
    response_frames: Arc<Histogram>,
}

impl RouteFamilies {
    fn new(registry: &Registry, kind: Kind) -> Self {
        let name = |name: &str| format!("inbound_{}_{name}", kind.name());
        let histogram = |of, help, bounds| registry.histogram(&name(of), help, bounds);
        Self {
            requests: registry.counter(&name("requests_total"), "Requests permitted, by their route"),
            statuses: Statuses::new(registry, &name("statuses_total"), kind, "status", false),
            request_duration: histogram(
                "request_duration_seconds",
                "Seconds from a request's head to the end of its response",
                routes::FINE,
            ),
            response_duration: histogram(
                "response_duration_seconds",
                "Seconds from the end of a request to the end of its response",
                routes::COARSE,
            ),
            request_frames: histogram(
                "request_frame_size_bytes",
                "Sizes of the pieces of request bodies",
                routes::FRAMES,
            ),
            response_frames: histogram(
                "response_frame_size_bytes",
                "Sizes of the pieces of response bodies",
                routes::FRAMES,
            ),
        }
    }
}

impl RouteSeries {
    pub(super) fn request(&self) {
        self.requests.inc();
    }

    pub(super) fn frame(&self, len: usize) {
        self.response_frames.observe(len as f64);
    }

    /// A response has come to its end, or failed to come.
    pub(super) fn ended(&self, upload: &Upload, outcome: &Outcome, now: Instant) {
        routes::observe(&self.request_duration, upload.started(), now);
        routes::observe(&self.response_duration, upload.ended(), now);
        self.statuses.ended(outcome);
    }
}

impl Families {
    pub(crate) fn new(registry: &Registry, http: http_metrics::Families, tcp: counts::Families) -> Self {
        let counter = |name, help| registry.counter(name, help);
        Self {
            detected: detected::Families::new(registry, "inbound"),
            http_routes: RouteFamilies::new(registry, Kind::Http),
            grpc_routes: RouteFamilies::new(registry, Kind::Grpc),
            http,
            tcp,
            http_allow: counter(
                "inbound_http_authz_allow_total",
                "HTTP requests permitted, by what permitted them",
            ),
            http_deny: counter("inbound_http_authz_deny_total", "HTTP requests refused"),
            route_not_found: counter(
                "inbound_http_route_not_found_total",
                "HTTP requests that no route matched",
            ),
            rate_limited: counter("inbound_http_local_ratelimit_total", "HTTP requests over a rate limit"),
            tcp_allow: counter(
                "inbound_tcp_authz_allow_total",
                "Connections permitted, by what permitted them",
            ),
            tcp_deny: counter("inbound_tcp_authz_deny_total", "Connections refused"),
            tcp_terminate: counter(
                "inbound_tcp_authz_terminate_total",
                "Connections ended because a changed policy refuses them",
            ),
            failures: Failures::new(registry, "inbound"),
            tcp_errors: counter(
                "inbound_tcp_errors_total",
                "Connections that failed before they were served",
            ),
            handshake_failures: counter(
                "tulle_inbound_tls_failures_total",
                "TLS handshakes with clients that failed, by reason",
            ),
            denied: counter(
                "tulle_inbound_denied_total",
                "Requests and connections refused, by what was missing",
            ),
            transport_header: counter(
                "inbound_tcp_transport_header_connections_total",
                "Direct connections, by what their transport header says",
            ),
        }
    }

    /// What is counted of a route of the server at `port`.
    pub(super) fn route(&self, kind: Kind, server: &Meta, port: u16, route: &Meta) -> Arc<RouteSeries> {
        let families = match kind {
            Kind::Http => &self.http_routes,
            Kind::Grpc => &self.grpc_routes,
        };
        let labels = with_meta(Labels::new(), "parent", server).with("parent_port", port);
        let labels = with_meta(labels, "route", route);
        Arc::new(RouteSeries {
            requests: families.requests.get(&labels),
            request_duration: families.request_duration.get(&labels),
            response_duration: families.response_duration.get(&labels),
            request_frames: families.request_frames.get(&labels),
            response_frames: families.response_frames.get(&labels),
            statuses: families.statuses.series(labels),
        })
    }

    /// Connections to `port` under the policy of `server`, by what they turn out to be.
    pub(super) fn detected(&self, server: &Meta, port: u16) -> detected::Series {
        self.detected.series(with_server(Labels::new(), server, port))
    }

    /// Counts a handshake that failed.
    pub(super) fn handshake_failed(&self, target: SocketAddr, failure: HandshakeFailure) {
        let labels = Labels::new().with("target_addr", target).with("reason", failure);
        self.handshake_failures.get(&labels).inc();
        self.failures.count(failure.cause());
    }

    /// Counts a connection that ended before it was served, by the name that its error has had all along, and by its cause.
    pub(super) fn tcp_failed(&self, target: SocketAddr, error: &'static str, cause: &'static str) {
        self.tcp_errors.get(&target_labels(target).with("error", error)).inc();
        self.failures.count(cause);
    }

    /// Counts a connection that is not the HTTP that its port demands.
    pub(super) fn not_http(&self, target: SocketAddr) {
        self.tcp_failed(target, "not http", "not-http");
    }

    /// Counts a refused request.
    pub(super) fn http_denied(&self, labels: &Labels, denied: Denied) {
        self.http_deny.get(labels).inc();
        self.count_reason(labels, denied);
    }

    /// Counts a request to the admin server that was refused.
    pub(super) fn admin_refused(&self, cause: &'static str) {
        self.failures.count(cause);
    }

    /// Counts a connection to an address that is not this workload's.
    pub(super) fn foreign_address(&self) {
        self.failures.count("target-forbidden");
    }

    /// Counts a refused connection.
    pub(super) fn tcp_denied(&self, labels: &Labels, denied: Denied) {
        self.tcp_deny.get(labels).inc();
        self.failures.count("policy-denied");
        self.count_reason(labels, denied);
    }

    pub(super) fn tcp_terminated(&self, labels: &Labels, denied: Denied) {
        self.tcp_terminate.get(labels).inc();
        self.failures.count("policy-denied");
        self.count_reason(labels, denied);
    }

    fn count_reason(&self, labels: &Labels, denied: Denied) {
        self.denied.get(&labels.clone().with("reason", denied.name())).inc();
    }

    pub(super) fn no_route(&self, labels: &Labels) {
        self.route_not_found.get(labels).inc();
    }

    /// Counts a request that went over a limit of `limit`.
    pub(super) fn over_limit(&self, labels: Labels, limit: &Meta, which: RateLimited) {
        let scope = match which {
            RateLimited::Total => "total",
            RateLimited::Identity | RateLimited::Override => "identity",
        };
        let labels = with_meta(labels, "ratelimit", limit).with("ratelimit_scope", scope);
        self.rate_limited.get(&labels).inc();
    }
}

/// Labels of a target address.
pub(super) fn target_labels(target: SocketAddr) -> Labels {
    Labels::new()
        .with("direction", "inbound")
        .with("target_addr", target)
        .with("target_ip", target.ip())
        .with("target_port", target.port())
}

/// Labels of all that happens on one connection under one policy.
pub(super) fn connection_labels(target: SocketAddr, tls: &ServerTls, server: &Arc<Meta>) -> Labels {
    with_server(tls.labels(target_labels(target)), server, target.port())
}

/// Adds the server whose policy holds at `port`.
pub(super) fn with_server(labels: Labels, server: &Meta, port: u16) -> Labels {
    with_meta(labels, "srv", server).with("srv_port", port)
}

/// `<prefix>_group`, `_kind` and `_name`.
pub(super) fn pairs_of<'a>(prefix: &str, meta: &'a Meta) -> [(String, &'a str); 3] {
    [
        (format!("{prefix}_group"), meta.group()),
        (format!("{prefix}_kind"), meta.kind()),
        (format!("{prefix}_name"), meta.name()),
    ]
}

/// Adds what there is of a resource.
pub(super) fn with_meta(labels: Labels, prefix: &str, meta: &Meta) -> Labels {
    let pairs = pairs_of(prefix, meta);
    pairs
        .into_iter()
        .fold(labels, |labels, (key, value)| labels.with(&key, value))
}
