//! `proxy_build_info`, `rustls_info` and `tulle_unsupported_variable`: build and configuration facts, as labels.

use std::sync::Arc;

use tulle_core::metrics::{Gauge, Labels, Registry};

use crate::tls::credentials;

/// Registers the metrics. Their series exist as long as the returned gauges. `unsupported` are the names of variables that are set
/// and have no effect.
pub(super) fn register(registry: &Registry, unsupported: &[String]) -> Vec<Arc<Gauge>> {
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    let build = Labels::new()
        .with("version", env!("CARGO_PKG_VERSION"))
        .with("vendor", "tulle")
        .with("profile", profile)
        // Commit and date are empty, so that builds are reproducible.
        .with("git_sha", "")
        .with("date", "");
    let build_info = registry.gauge("proxy_build_info", "Build information of this proxy");

    let (suites, groups) = credentials::algorithms();
    let tls = Labels::new()
        .with("tls_suites", suites)
        .with("tls_kx_groups", groups)
        .with("tls_rand", "aws-lc-rs")
        .with("tls_key_provider", "aws-lc-rs")
        .with("tls_fips", false);
    let rustls_info = registry.gauge("rustls_info", "Cipher suites and key exchanges of this proxy");
    let unsupported_variable = registry.gauge(
        "tulle_unsupported_variable",
        "Variables that are set and have no effect",
    );
    let unsupported = unsupported
        .iter()
        .map(|name| unsupported_variable.get(&Labels::new().with("name", name)));
    let gauges: Vec<_> = [build_info.get(&build), rustls_info.get(&tls)]
        .into_iter()
        .chain(unsupported)
        .collect();
    for gauge in &gauges {
        gauge.set(1);
    }
    gauges
}
