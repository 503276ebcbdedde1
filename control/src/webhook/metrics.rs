//! The `http_server_*` metrics of webhooks, and whether the API server verifies their certificates.

use std::sync::Arc;
use std::time::Duration;

use http::{Method, StatusCode};
use tulle_core::metrics::{Counter, Family, Histogram, Labels, Registry};

use super::server_credentials::ServerCredentials;

/// Request metrics. Clones share the same families.
#[derive(Clone)]
pub struct HttpMetrics {
    requests: Family<Counter>,
    latency: Family<Histogram>,
    size: Family<Histogram>,
}

struct Series {
    requests: Arc<Counter>,
    latency: Arc<Histogram>,
    size: Arc<Histogram>,
}

impl HttpMetrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            requests: registry.counter("http_server_requests_total", "Requests to webhooks."),
            latency: registry.histogram(
                "http_server_request_latency_seconds",
                "Seconds from the head of a request to its answer.",
                LATENCY_SECONDS,
            ),
            size: registry.histogram(
                "http_server_response_size_bytes",
                "Bytes in the bodies of answers.",
                SIZE_BYTES,
            ),
        }
    }

    pub(super) fn observe(&self, method: &Method, code: StatusCode, latency: Duration, n_bytes: usize) {
        let series = self.series(method, code);
        series.requests.inc();
        series.latency.observe(latency.as_secs_f64());
        series.size.observe(n_bytes as f64);
    }

    /// Returns the series of a method and a status. Methods that are not in [`KNOWN_METHODS`] share one label value.
    fn series(&self, method: &Method, code: StatusCode) -> Series {
        let method = match KNOWN_METHODS.contains(method) {
            true => method.as_str().to_ascii_lowercase(),
            false => "unknown".to_owned(),
        };
        let labels = Labels::new().with("code", code.as_u16()).with("method", method);
        Series {
            requests: self.requests.get(&labels),
            latency: self.latency.get(&labels),
            size: self.size.get(&labels),
        }
    }
}

/// Registers a gauge that is 1 while the API server cannot verify the certificate of the webhook. The code calls such a certificate
/// untrusted; the metric is named `webhook_certificate_refused`.
pub(super) fn register_untrusted_certificate_gauge(webhook: &str, creds: Arc<ServerCredentials>, registry: &Registry) {
    let family = registry.gauge(
        "webhook_certificate_refused",
        "1 while the API server cannot call a webhook, because no CA bundle verifies the certificate of the webhook.",
    );
    let untrusted = family.get(&Labels::new().with("webhook", webhook));
    registry.before_render(move || untrusted.set(i64::from(creds.is_untrusted())));
}

const KNOWN_METHODS: [Method; 7] = [
    Method::GET,
    Method::HEAD,
    Method::POST,
    Method::PUT,
    Method::PATCH,
    Method::DELETE,
    Method::OPTIONS,
];
/// Source: Linkerd's webhooks.
const LATENCY_SECONDS: &[f64] = &[
    0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0,
];
/// From a response without a patch to the patch of a large pod.
const SIZE_BYTES: &[f64] = &[100.0, 300.0, 1000.0, 3000.0, 10_000.0, 30_000.0, 100_000.0, 1_000_000.0];
