//! Families of the inbound side, and their label sets.

use std::{net::SocketAddr, sync::Arc};

use tulle_core::metrics::{Counter, Family, Labels, Registry};

use crate::{
    http::error::Error,
    metrics::http as http_metrics,
    net::counts,
    policy::{authz::Denied, meta::Meta},
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
    denied: Family<Counter>,
    pub(super) transport_header: Family<Counter>,
}

impl Families {
    pub(crate) fn new(registry: &Registry, http: http_metrics::Families, tcp: counts::Families) -> Self {
        let counter = |name, help| registry.counter(name, help);
        Self {
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

    /// Counts a handshake that failed.
    pub(super) fn handshake_failed(&self, target: SocketAddr, failure: HandshakeFailure) {
        let labels = Labels::new().with("target_addr", target).with("reason", failure);
        self.handshake_failures.get(&labels).inc();
    }

    /// Counts a connection that ended before it was served.
    pub(super) fn tcp_failed(&self, target: SocketAddr, error: &'static str) {
        self.tcp_errors.get(&target_labels(target).with("error", error)).inc();
    }

    /// Counts a refused request.
    pub(super) fn http_denied(&self, labels: &Labels, denied: Denied) {
        self.http_deny.get(labels).inc();
        self.count_reason(labels, denied);
    }

    /// Counts a refused connection.
    pub(super) fn tcp_denied(&self, labels: &Labels, denied: Denied) {
        self.tcp_deny.get(labels).inc();
        self.count_reason(labels, denied);
    }

    pub(super) fn tcp_terminated(&self, labels: &Labels, denied: Denied) {
        self.tcp_terminate.get(labels).inc();
        self.count_reason(labels, denied);
    }

    fn count_reason(&self, labels: &Labels, denied: Denied) {
        let reason = match denied {
            Denied::Network => "network",
            Denied::NoTls => "no-tls",
            Denied::NoIdentity => "no-identity",
            Denied::Identity => "identity",
        };
        self.denied.get(&labels.clone().with("reason", reason)).inc();
    }

    /// Counts what stopped a request besides authorization.
    pub(super) fn http_refused(&self, labels: &Labels, error: &Error) {
        match error {
            Error::RouteNotFound => self.route_not_found.get(labels).inc(),
            Error::RateLimited => self.rate_limited.get(labels).inc(),
            _ => {}
        }
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
    let labels = tls.labels(target_labels(target));
    with_meta(labels, "srv", server).with("srv_port", target.port())
}

/// Adds `<prefix>_group`, `_kind` and `_name`.
pub(super) fn with_meta(labels: Labels, prefix: &str, meta: &Meta) -> Labels {
    labels
        .with(&format!("{prefix}_group"), meta.group())
        .with(&format!("{prefix}_kind"), meta.kind())
        .with(&format!("{prefix}_name"), meta.name())
}
