//! Families of the outbound side, and their label sets.

use std::net::SocketAddr;

use tulle_core::metrics::{Counter, Family, Labels, Registry};

use crate::{
    metrics::http as http_metrics, net::counts, outbound::profile, policy::endpoint::EndpointSpec,
    tls::status::ClientTls,
};

/// All families that outbound traffic is counted in.
#[derive(Clone)]
pub(crate) struct Families {
    pub(crate) http: http_metrics::Families,
    pub(crate) tcp: counts::Families,
    pub(crate) profiles: profile::Families,
    tcp_errors: Family<Counter>,
    pub(super) retries: Family<Counter>,
}

impl Families {
    pub(crate) fn new(registry: &Registry, http: http_metrics::Families, tcp: counts::Families) -> Self {
        Self {
            http,
            tcp,
            profiles: profile::Families::new(registry),
            tcp_errors: registry.counter("outbound_tcp_errors_total", "Connections that reached no endpoint"),
            retries: registry.counter(
                "tulle_outbound_resent_total",
                "Requests sent to another endpoint, by reason",
            ),
        }
    }

    pub(super) fn tcp_failed(&self, target: SocketAddr, error: &'static str) {
        self.tcp_errors.get(&target_labels(target).with("error", error)).inc();
    }
}

/// Labels of a target address.
pub(super) fn target_labels(target: SocketAddr) -> Labels {
    Labels::new()
        .with("direction", "outbound")
        .with("target_addr", target)
        .with("target_ip", target.ip())
        .with("target_port", target.port())
}

/// Labels of all that goes to one endpoint. `authority` is the logical destination, where it has a name.
pub(super) fn endpoint_labels(authority: Option<&str>, spec: &EndpointSpec, tls: &ClientTls) -> Labels {
    let mut labels = target_labels(spec.addr);
    if let Some(authority) = authority {
        labels = labels.with("authority", authority);
    }
    labels = tls.labels(labels);
    for (name, value) in &spec.labels {
        labels = labels.with(&format!("dst_{name}"), value);
    }
    labels
}
