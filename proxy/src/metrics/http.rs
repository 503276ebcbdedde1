//! `request_total`, `response_total` and `response_latency_ms`, the families that dashboards read.

use std::{
    fmt::Display,
    sync::{Arc, OnceLock},
    time::Duration,
};

use http::StatusCode;
use tulle_core::metrics::{Counter, Family, Histogram, Labels, Registry};

use crate::metrics::append_map::AppendOnlyMap;

/// Bucket upper bounds, in milliseconds; the last bucket, `+Inf`, is implied.
const LATENCY_MS_BUCKETS: &[f64] = &[
    1., 2., 3., 4., 5., 10., 20., 30., 40., 50., 100., 200., 300., 400., 500., 1_000., 2_000., 3_000., 4_000., 5_000.,
    10_000., 20_000., 30_000., 40_000., 50_000.,
];

/// The families. Those without a prefix are shared by both directions.
#[derive(Clone)]
pub(crate) struct Families {
    requests: Family<Counter>,
    responses: Family<Counter>,
    latency: Family<Histogram>,
}

/// The series of requests with the same labels.
pub(crate) struct Series {
    families: Families,
    labels: Labels,
    /// Created by the first request, so that unused series are not exported.
    requests: OnceLock<Arc<Counter>>,
    latencies: AppendOnlyMap<StatusCode, Arc<Histogram>>,
    responses: AppendOnlyMap<ResponseOutcome, Arc<Counter>>,
}

/// The result of a response, as labels show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ResponseOutcome {
    pub(crate) status: StatusCode,
    pub(crate) grpc: Option<i32>,
    pub(crate) success: bool,
    pub(crate) end: ResponseEnd,
}

/// How a response ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResponseEnd {
    Complete,
    EndedEarly(ErrorLabels),
    /// No response was received.
    NoResponse(ErrorLabels),
    /// The receiver cancelled the response, so the sender may not be at fault.
    Cancelled,
}

/// The label values of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ErrorLabels {
    /// The cause code, as in `l5d-proxy-cause`.
    pub(crate) cause: &'static str,
    /// The value in the metrics of routes.
    pub(crate) route_error: &'static str,
}

impl ResponseEnd {
    /// Value of the label `error`.
    fn label(self) -> Option<&'static str> {
        match self {
            Self::Complete => None,
            Self::EndedEarly(labels) | Self::NoResponse(labels) => Some(labels.cause),
            Self::Cancelled => Some("client-left"),
        }
    }
}

impl Families {
    /// The families without a prefix: inbound requests by server, and outbound attempts by endpoint.
    pub(crate) fn new(registry: &Registry) -> Self {
        let detail = ", by server (inbound), or by endpoint with each attempt counted (outbound)";
        Self::with_prefix(registry, "", detail)
    }

    /// The families, with `prefix` before their names, and `detail` after their help texts.
    pub(crate) fn with_prefix(registry: &Registry, prefix: &str, detail: &str) -> Self {
        let name = |name| format!("{prefix}{name}");
        let help = |help| format!("{help}{detail}");
        Self {
            requests: registry.counter(&name("request_total"), &help("HTTP requests")),
            responses: registry.counter(&name("response_total"), &help("HTTP responses, by how they ended")),
            latency: registry.histogram(
                &name("response_latency_ms"),
                &help("Milliseconds from a request's head to the first data of its response"),
                LATENCY_MS_BUCKETS,
            ),
        }
    }

    pub(crate) fn series(&self, labels: Labels) -> Arc<Series> {
        Arc::new(Series {
            families: self.clone(),
            requests: OnceLock::new(),
            labels,
            latencies: AppendOnlyMap::default(),
            responses: AppendOnlyMap::default(),
        })
    }
}

impl Series {
    /// The series with the same labels and one more.
    pub(crate) fn with_label(&self, label: &str, value: impl Display) -> Arc<Self> {
        self.families.series(self.labels.clone().with(label, value))
    }

    pub(crate) fn record_request(&self) {
        let counter = || self.families.requests.get(&self.labels);
        self.requests.get_or_init(counter).inc();
    }

    pub(crate) fn record_latency(&self, status: StatusCode, elapsed: Duration) {
        let histogram = || {
            let labels = self.labels.clone().with("status_code", status.as_u16());
            self.families.latency.get(&labels)
        };
        // Whole milliseconds, as in Linkerd.
        let observe = |histogram: &Arc<Histogram>| histogram.observe(elapsed.as_millis() as f64);
        self.latencies.with_or_insert(status, histogram, observe);
    }

    pub(crate) fn record_response(&self, outcome: ResponseOutcome) {
        let counter = || {
            let mut labels = self
                .labels
                .clone()
                .with("status_code", outcome.status.as_u16())
                .with("classification", if outcome.success { "success" } else { "failure" });
            if let Some(code) = outcome.grpc {
                labels = labels.with("grpc_status", code);
            }
            if let Some(error) = outcome.end.label() {
                labels = labels.with("error", error);
            }
            self.families.responses.get(&labels)
        };
        self.responses.with_or_insert(outcome, counter, |counter| counter.inc());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_without_requests_are_not_exported() {
        let registry = Registry::new();
        let series = Families::new(&registry).series(Labels::new().with("direction", "outbound"));
        assert_eq!(registry.render(), "");
        series.record_request();
        series.record_request();
        let expected = "request_total{direction=\"outbound\"} 2";
        assert!(registry.render().contains(expected), "{}", registry.render());
    }
}
