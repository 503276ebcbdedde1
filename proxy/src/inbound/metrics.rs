//! Metric families of the inbound side, and their label sets.

use std::{net::SocketAddr, sync::Arc};

use tokio::time::Instant;
use tulle_core::metrics::{Counter, Family, Histogram, Labels, Registry};

use crate::{
    http::lifecycle::request_timing::RequestTiming,
    inbound::port_labels::PortLabels,
    metrics::{
        failures::Failures,
        http::{self as http_metrics, ResponseOutcome},
        routes::{self, StatusKind, StatusSeries, Statuses},
    },
    net::{
        detect_metrics,
        tcp_metrics::{self, ConnectionMetrics},
    },
    policy::{authz::Denied, meta::Meta, rate_limit::RateLimited},
    tls::{handshake_failure::HandshakeFailure, status::ServerTls},
};

#[derive(Clone)]
pub(crate) struct Families {
    pub(crate) http: http_metrics::Families,
    pub(crate) tcp: tcp_metrics::Families,
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
    transport_header: Family<Counter>,
    detected: detect_metrics::Families,
    http_routes: RouteFamilies,
    grpc_routes: RouteFamilies,
    port_labels: Arc<PortLabels>,
}

/// Families of HTTP routes or of gRPC routes.
#[derive(Clone)]
struct RouteFamilies {
    requests: Family<Counter>,
    statuses: Statuses,
    request_duration: Family<Histogram>,
    response_duration: Family<Histogram>,
    request_frame_bytes: Family<Histogram>,
    response_frame_bytes: Family<Histogram>,
}

pub(super) struct RouteSeries {
    requests: Arc<Counter>,
    statuses: StatusSeries,
    request_duration: Arc<Histogram>,
    response_duration: Arc<Histogram>,
    pub(super) request_frame_bytes: Arc<Histogram>,
    response_frame_bytes: Arc<Histogram>,
}

impl RouteFamilies {
    fn new(registry: &Registry, kind: StatusKind) -> Self {
        let name = |name: &str| format!("inbound_{}_{name}", kind.name());
        let histogram = |suffix, help, bounds| registry.histogram(&name(suffix), help, bounds);
        Self {
            requests: registry.counter(&name("requests_total"), "Requests permitted, by route"),
            statuses: Statuses::new(registry, &name("statuses_total"), kind, "status", false),
            request_duration: histogram(
                "request_duration_seconds",
                "Seconds from a request's head to the end of its response",
                routes::SECONDS_BUCKETS_FINE,
            ),
            response_duration: histogram(
                "response_duration_seconds",
                "Seconds from the end of a request to the end of its response",
                routes::SECONDS_BUCKETS_COARSE,
            ),
            request_frame_bytes: histogram(
                "request_frame_size_bytes",
                "Bytes per frame of request bodies",
                routes::FRAME_BYTES_BUCKETS,
            ),
            response_frame_bytes: histogram(
                "response_frame_size_bytes",
                "Bytes per frame of response bodies",
                routes::FRAME_BYTES_BUCKETS,
            ),
        }
    }
}

impl RouteSeries {
    pub(super) fn record_request(&self) {
        self.requests.inc();
    }

    pub(super) fn record_response_frame(&self, len: usize) {
        self.response_frame_bytes.observe(len as f64);
    }

    /// Records the end of a response, or a request without a response.
    pub(super) fn record_response(&self, timing: &RequestTiming, outcome: &ResponseOutcome, now: Instant) {
        routes::observe(&self.request_duration, timing.started_at(), now);
        routes::observe(&self.response_duration, timing.body_ended_at(), now);
        self.statuses.record(outcome);
    }
}

impl Families {
    pub(crate) fn new(
        registry: &Registry,
        http: http_metrics::Families,
        tcp: tcp_metrics::Families,
        port_labels: PortLabels,
    ) -> Self {
        let counter = |name, help| registry.counter(name, help);
        Self {
            port_labels: Arc::new(port_labels),
            detected: detect_metrics::Families::new(registry, "inbound"),
            http_routes: RouteFamilies::new(registry, StatusKind::Http),
            grpc_routes: RouteFamilies::new(registry, StatusKind::Grpc),
            http,
            tcp,
            http_allow: counter(
                "inbound_http_authz_allow_total",
                "HTTP requests permitted, by authorization",
            ),
            http_deny: counter("inbound_http_authz_deny_total", "HTTP requests refused"),
            route_not_found: counter(
                "inbound_http_route_not_found_total",
                "HTTP requests that no route matched",
            ),
            rate_limited: counter("inbound_http_local_ratelimit_total", "HTTP requests over a rate limit"),
            tcp_allow: counter(
                "inbound_tcp_authz_allow_total",
                "Connections permitted, by authorization",
            ),
            tcp_deny: counter("inbound_tcp_authz_deny_total", "Connections refused"),
            tcp_terminate: counter(
                "inbound_tcp_authz_terminate_total",
                "Connections closed because a changed policy denies them",
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
                "Requests and connections denied, by reason",
            ),
            transport_header: counter(
                "inbound_tcp_transport_header_connections_total",
                "Direct connections, by the fields of their transport header",
            ),
        }
    }

    /// The series of a route of the server at `target`.
    pub(super) fn route_series(
        &self,
        kind: StatusKind,
        server: &Meta,
        target: SocketAddr,
        route: &Meta,
    ) -> Arc<RouteSeries> {
        let families = match kind {
            StatusKind::Http => &self.http_routes,
            StatusKind::Grpc => &self.grpc_routes,
        };
        let labels = with_meta(Labels::new(), "parent", server).with("parent_port", self.port_labels.label(target));
        let labels = with_meta(labels, "route", route);
        Arc::new(RouteSeries {
            requests: families.requests.get(&labels),
            request_duration: families.request_duration.get(&labels),
            response_duration: families.response_duration.get(&labels),
            request_frame_bytes: families.request_frame_bytes.get(&labels),
            response_frame_bytes: families.response_frame_bytes.get(&labels),
            statuses: families.statuses.series(labels),
        })
    }

    /// The series of protocol detection on the port of `target`, under the policy of `server`.
    pub(super) fn detect_series(&self, server: &Meta, target: SocketAddr) -> detect_metrics::Series {
        let labels = with_server(Labels::new(), server, self.port_labels.label(target));
        self.detected.series(labels)
    }

    pub(super) fn record_handshake_failure(&self, target: SocketAddr, failure: HandshakeFailure) {
        let target = self.label_target(target);
        let labels = Labels::new().with("target_addr", target).with("reason", failure);
        self.handshake_failures.get(&labels).inc();
        self.failures.count(failure.cause());
    }

    /// Counts a connection that failed before it was served, by Linkerd's `error` label and by cause.
    pub(super) fn record_tcp_error(&self, target: SocketAddr, error: &'static str, cause: &'static str) {
        let labels = target_labels(self.label_target(target)).with("error", error);
        self.tcp_errors.get(&labels).inc();
        self.failures.count(cause);
    }

    /// Counts a connection that is not HTTP on a port whose policy requires HTTP.
    pub(super) fn record_not_http(&self, target: SocketAddr) {
        self.record_tcp_error(target, "not http", "not-http");
    }

    /// Counts a denied request.
    pub(super) fn record_http_denied(&self, labels: &Labels, denied: Denied) {
        self.http_deny.get(labels).inc();
        self.record_denial_reason(labels, denied);
    }

    /// Counts a denied request to the admin server.
    pub(super) fn record_admin_denied(&self, cause: &'static str) {
        self.failures.count(cause);
    }

    /// Counts a connection to an address that is not this workload's.
    pub(super) fn record_foreign_target(&self) {
        self.failures.count("target-forbidden");
    }

    /// Counts a denied connection.
    pub(super) fn record_tcp_denied(&self, labels: &Labels, denied: Denied) {
        self.tcp_deny.get(labels).inc();
        self.failures.count("policy-denied");
        self.record_denial_reason(labels, denied);
    }

    pub(super) fn record_tcp_terminated(&self, labels: &Labels, denied: Denied) {
        self.tcp_terminate.get(labels).inc();
        self.failures.count(denied.cause());
        self.record_denial_reason(labels, denied);
    }

    fn record_denial_reason(&self, labels: &Labels, denied: Denied) {
        self.denied.get(&labels.clone().with("reason", denied.name())).inc();
    }

    pub(super) fn record_route_not_found(&self, labels: &Labels) {
        self.route_not_found.get(labels).inc();
    }

    /// Counts a request that exceeded `limit`.
    pub(super) fn record_rate_limited(&self, labels: Labels, limit: &Meta, exceeded: RateLimited) {
        let scope = match exceeded {
            RateLimited::Total => "total",
            RateLimited::Identity | RateLimited::Override => "identity",
        };
        let labels = with_meta(labels, "ratelimit", limit).with("ratelimit_scope", scope);
        self.rate_limited.get(&labels).inc();
    }

    /// Labels of a target address, and of the server whose policy applies to it.
    pub(super) fn server_labels(&self, target: SocketAddr, server: &Meta) -> Labels {
        let target = self.label_target(target);
        with_server(target_labels(target), server, target.port())
    }

    /// Labels of a connection and of its requests, under the policy of `server`.
    pub(super) fn connection_labels(&self, target: SocketAddr, tls: &ServerTls, server: &Meta) -> Labels {
        let target = self.label_target(target);
        with_server(tls.metric_labels(target_labels(target)), server, target.port())
    }

    /// The metrics of connections to the application at `target`.
    pub(super) fn app_connection_metrics(&self, target: SocketAddr) -> Arc<ConnectionMetrics> {
        let labels = target_labels(self.label_target(target)).with("peer", "dst");
        let labels = labels.with("tls", "no_identity").with("no_tls_reason", "loopback");
        self.tcp.series(labels)
    }

    /// The target for labels: its port is 0 if it has no label of its own.
    fn label_target(&self, mut target: SocketAddr) -> SocketAddr {
        target.set_port(self.port_labels.label(target));
        target
    }

    /// Counts a direct connection by the fields of its transport header.
    pub(super) fn record_transport_header(&self, protocol: &str, target: SocketAddr, name: &str, tls: &ServerTls) {
        let labels = Labels::new()
            .with("session_protocol", protocol)
            .with("target_port", self.port_labels.label(target))
            .with("target_name", name)
            .with("client_id", tls.client_id().map_or("", |id| id.as_str()));
        self.transport_header.get(&labels).inc();
    }
}

/// Labels of a target address, as [`Families::label_target`] returns it.
fn target_labels(target: SocketAddr) -> Labels {
    Labels::new()
        .with("direction", "inbound")
        .with("target_addr", target)
        .with("target_ip", target.ip())
        .with("target_port", target.port())
}

/// Adds the server whose policy applies to `port`.
fn with_server(labels: Labels, server: &Meta, port: u16) -> Labels {
    with_meta(labels, "srv", server).with("srv_port", port)
}

/// The labels `<prefix>_group`, `<prefix>_kind` and `<prefix>_name` of a resource.
pub(super) fn meta_labels<'a>(prefix: &str, meta: &'a Meta) -> [(String, &'a str); 3] {
    [
        (format!("{prefix}_group"), meta.group()),
        (format!("{prefix}_kind"), meta.kind()),
        (format!("{prefix}_name"), meta.name()),
    ]
}

/// Adds the labels `<prefix>_group`, `<prefix>_kind` and `<prefix>_name` of a resource.
pub(super) fn with_meta(labels: Labels, prefix: &str, meta: &Meta) -> Labels {
    let pairs = meta_labels(prefix, meta);
    pairs
        .into_iter()
        .fold(labels, |labels, (key, value)| labels.with(&key, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::status::NoServerTls;

    #[test]
    fn clients_that_scan_ports_do_not_use_up_the_series_of_other_clients() {
        let registry = Registry::new();
        let (http, tcp) = (
            http_metrics::Families::new(&registry),
            tcp_metrics::Families::new(&registry),
        );
        let port_labels = PortLabels::new("8080".parse().unwrap(), |target| target.port() == 30_000);
        let families = Families::new(&registry, http, tcp.clone(), port_labels);
        let (server, route) = (Meta::default_named("server"), Meta::default_named("route"));
        let tls = ServerTls::Plain(NoServerTls::NoTlsFromRemote);
        // More ports than a family has series.
        for port in 1..=20_000 {
            let target = SocketAddr::from(([10, 0, 0, 1], port));
            let labels = families.connection_labels(target, &tls, &server);
            drop(families.tcp.series(labels.clone().with("peer", "src")));
            families.http_allow.get(&labels).inc();
            families.record_tcp_denied(&labels, Denied::NoTls);
            families.record_tcp_error(target, "i/o", "client-left");
            families.record_handshake_failure(target, HandshakeFailure::Closed);
            families.record_transport_header("", target, "", &tls);
            drop(families.route_series(StatusKind::Http, &server, target, &route));
            drop(families.detect_series(&server, target));
        }
        drop(families.app_connection_metrics(([10, 0, 0, 1], 30_000).into()));
        drop(tcp.series(Labels::new().with("direction", "outbound")));
        let page = registry.render();
        assert!(!page.contains("overflow="), "no family is full");
        for expected in [
            r#"tcp_open_total{direction="inbound",target_addr="10.0.0.1:8080","#,
            r#"tcp_open_total{direction="inbound",target_addr="10.0.0.1:30000","#,
            r#"inbound_tcp_authz_deny_total{direction="inbound",target_addr="10.0.0.1:0","#,
            r#"srv_port="0""#,
        ] {
            assert!(page.contains(expected), "{expected}");
        }
        let n_series = page.lines().filter(|line| line.starts_with("tcp_open_total{")).count();
        assert!(n_series < 100, "{n_series}");
    }
}
