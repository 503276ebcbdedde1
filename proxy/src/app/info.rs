//! `proxy_build_info` and `rustls_info`: what this proxy is, as labels.

use std::sync::Arc;

use tulle_core::metrics::{Gauge, Labels, Registry};

use crate::tls::creds;

/// Series live as long as who holds them.
pub(super) fn register(registry: &Registry) -> [Arc<Gauge>; 2] {
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    let build = Labels::new()
        .with("version", env!("CARGO_PKG_VERSION"))
        .with("vendor", "tulle")
        .with("profile", profile)
        // They would make every build another.
        .with("git_sha", "")
        .with("date", "");
    let is = registry.gauge("proxy_build_info", "What this proxy was built of");

    let (suites, groups) = creds::algorithms();
    let tls = Labels::new()
        .with("tls_suites", suites)
        .with("tls_kx_groups", groups)
        .with("tls_rand", "aws-lc-rs")
        .with("tls_key_provider", "aws-lc-rs")
        .with("tls_fips", false);
    let with = registry.gauge("rustls_info", "What this proxy encrypts with");
    let info = [is.get(&build), with.get(&tls)];
    for gauge in &info {
        gauge.set(1);
    }
    info
}
