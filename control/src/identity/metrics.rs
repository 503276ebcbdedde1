//! Metrics of the identity service.

use std::fmt::Write;
use std::sync::Arc;

use time::OffsetDateTime;
use tulle_core::metrics::{Counter, Family, Labels, Registry};

use super::authority::Authority;

#[derive(Clone)]
pub(crate) struct Metrics {
    certify: Family<Counter>,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry, authority: Arc<Authority>) -> Self {
        registry.collector(move |out| write_ttl(&authority, out));
        Self {
            certify: registry.counter("certify_requests_total", "Requests for a certificate, by outcome."),
        }
    }

    /// Counts one request. Outcomes are a small fixed set.
    pub(crate) fn certified(&self, outcome: &'static str) {
        self.certify.get(&Labels::new().with("outcome", outcome)).inc();
    }
}

/// Computed at scrape time, because it changes with time.
fn write_ttl(authority: &Authority, out: &mut String) {
    if let Some(issuer) = authority.issuer() {
        let ttl = (issuer.expires_at() - OffsetDateTime::now_utc()).as_seconds_f64();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "# HELP issuer_cert_ttl_seconds Seconds until the first certificate of the issuer's chain expires.\n\
             # TYPE issuer_cert_ttl_seconds gauge\nissuer_cert_ttl_seconds {ttl}"
        );
    }
}
