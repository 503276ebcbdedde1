//! Metrics of the identity service.

use std::fmt::Write;
use std::sync::Arc;

use time::OffsetDateTime;
use tulle_core::metrics::{Counter, Family, Labels, Registry};

use super::issuer_store::IssuerStore;

#[derive(Clone)]
pub(crate) struct Metrics {
    certify: Family<Counter>,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry, issuer_store: Arc<IssuerStore>) -> Self {
        registry.add_collector(move |out| write_ttl(&issuer_store, out));
        Self {
            certify: registry.counter("certify_requests_total", "Requests for a certificate, by outcome."),
        }
    }

    /// Counts a request for a certificate. `outcome` also names the reason of a rejection. It has few values, so there are few
    /// series.
    pub(crate) fn count_request(&self, outcome: &'static str) {
        self.certify.get(&Labels::new().with("outcome", outcome)).inc();
    }
}

/// Writes the seconds until the issuer expires. They are computed for each scrape.
fn write_ttl(issuer_store: &IssuerStore, out: &mut String) {
    if let Some(issuer) = issuer_store.issuer() {
        let ttl = (issuer.expires_at() - OffsetDateTime::now_utc()).as_seconds_f64();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "# HELP issuer_cert_ttl_seconds Seconds until the earliest expiry in the issuer's chain of certificates.\n\
             # TYPE issuer_cert_ttl_seconds gauge\nissuer_cert_ttl_seconds {ttl}"
        );
    }
}
