//! Metrics of the proxy's certificates, from the identity service or from a Workload API.

use std::sync::Arc;
use std::time::SystemTime;

use tulle_core::metrics::{Counter, Gauge, Labels, Registry};

pub(super) struct Metrics {
    expires_at: Arc<Gauge>,
    refreshed_at: Arc<Gauge>,
    succeeded: Arc<Counter>,
    failed: Arc<Counter>,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let none = Labels::new();
        let gauge = |name, help| registry.gauge(name, help).get(&none);
        let refreshes = registry.counter(
            "control_identity_cert_refreshes_total",
            "Certificate requests, by result.",
        );
        Self {
            expires_at: gauge(
                "control_identity_cert_expiration_timestamp_seconds",
                "Time at which the certificate expires, in seconds since 1970.",
            ),
            refreshed_at: gauge(
                "control_identity_cert_refresh_timestamp_seconds",
                "Time at which the proxy installed the certificate, in seconds since 1970.",
            ),
            succeeded: refreshes.get(&none.clone().with("result", "ok")),
            failed: refreshes.get(&none.with("result", "error")),
        }
    }

    pub(super) fn refreshed(&self, at: SystemTime, expires_at: SystemTime) {
        self.succeeded.inc();
        self.refreshed_at.set(timestamp(at));
        self.expires_at.set(timestamp(expires_at));
    }

    pub(super) fn failed(&self) {
        self.failed.inc();
    }
}

fn timestamp(time: SystemTime) -> i64 {
    let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX)
}
