//! Label sets of outbound metrics.

use tulle_core::{addr::Addr, metrics::Labels};

use crate::{
    policy::{endpoint::EndpointSpec, meta::Meta},
    tls::status::ClientTls,
};

/// Adds `<prefix>_group`, `<prefix>_kind`, `<prefix>_namespace` and `<prefix>_name`.
pub(in crate::outbound) fn with_meta(labels: Labels, prefix: &str, meta: &Meta) -> Labels {
    labels
        .with(&format!("{prefix}_group"), meta.group())
        .with(&format!("{prefix}_kind"), meta.kind())
        .with(&format!("{prefix}_namespace"), meta.namespace())
        .with(&format!("{prefix}_name"), meta.name())
}

/// Adds the labels of [`with_meta`], and `<prefix>_port` and `<prefix>_section_name`.
pub(super) fn with_meta_and_port(labels: Labels, prefix: &str, meta: &Meta) -> Labels {
    let port = meta.port().map(|port| port.to_string()).unwrap_or_default();
    with_meta(labels, prefix, meta)
        .with(&format!("{prefix}_port"), port)
        .with(&format!("{prefix}_section_name"), meta.section())
}

pub(in crate::outbound) fn target_labels(target: &Addr) -> Labels {
    let labels = Labels::new().with("direction", "outbound").with("target_addr", target);
    with_target(labels, target)
}

/// Adds `target_ip`, which is empty for a name, and `target_port`.
pub(super) fn with_target(labels: Labels, target: &Addr) -> Labels {
    let labels = match target {
        Addr::Socket(addr) => labels.with("target_ip", addr.ip()),
        Addr::Name(_) => labels.with("target_ip", ""),
    };
    labels.with("target_port", target.port())
}

/// Labels of the traffic to one endpoint. `authority` is the logical destination, if it has a name.
pub(in crate::outbound) fn endpoint_labels(authority: Option<&str>, spec: &EndpointSpec, tls: &ClientTls) -> Labels {
    let mut labels = target_labels(&Addr::Socket(spec.addr));
    if let Some(authority) = authority {
        labels = labels.with("authority", authority);
    }
    labels = tls.metric_labels(labels);
    for (name, value) in &spec.labels {
        labels = labels.with(&format!("dst_{name}"), value);
    }
    labels
}
