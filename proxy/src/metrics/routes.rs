//! Building blocks of the metrics of routes and their backends: durations, results and frame sizes. The families are in
//! `outbound/metrics/` and `inbound/metrics.rs`.

use std::{fmt::Display, sync::Arc};

use tokio::time::Instant;
use tulle_core::metrics::{Counter, Family, Histogram, Labels, Registry};

use crate::metrics::{
    append_map::AppendOnlyMap,
    http::{ResponseEnd, ResponseOutcome},
};

/// Bucket upper bounds of frame sizes, in bytes.
pub(crate) const FRAME_BYTES_BUCKETS: &[f64] = &[128., 1_024., 10_240.];
/// Bucket upper bounds of durations, in seconds, in fine steps.
pub(crate) const SECONDS_BUCKETS_FINE: &[f64] = &[0.025, 0.05, 0.1, 0.25, 0.5, 1., 10.];
/// Bucket upper bounds of durations, in seconds, in coarse steps.
pub(crate) const SECONDS_BUCKETS_COARSE: &[f64] = &[0.05, 0.5, 1., 10.];

/// The protocol whose statuses are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatusKind {
    Http,
    Grpc,
}

impl StatusKind {
    /// As used in the names of families.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }
}

/// The metric family that counts exchanges by status and error. An exchange is a request of a route, or an attempt at a
/// backend, with its response.
#[derive(Clone)]
pub(crate) struct Statuses {
    family: Family<Counter>,
    kind: StatusKind,
    /// Name of the label that contains the status.
    status_label: &'static str,
    /// Whether the error that ended an exchange is a label.
    has_error_label: bool,
}

type StatusAndError = (Option<u16>, Option<&'static str>);

/// The [`Statuses`] of exchanges with the same labels.
pub(crate) struct StatusSeries {
    statuses: Statuses,
    labels: Labels,
    counters: AppendOnlyMap<StatusAndError, Arc<Counter>>,
}

impl Statuses {
    pub(crate) fn new(
        registry: &Registry,
        name: &str,
        kind: StatusKind,
        status_label: &'static str,
        has_error_label: bool,
    ) -> Self {
        Self {
            family: registry.counter(name, "Completed requests, or attempts at a backend, by result"),
            kind,
            status_label,
            has_error_label,
        }
    }

    pub(crate) fn series(&self, labels: Labels) -> StatusSeries {
        StatusSeries {
            statuses: self.clone(),
            labels,
            counters: AppendOnlyMap::default(),
        }
    }

    fn status(&self, outcome: &ResponseOutcome) -> Option<u16> {
        match self.kind {
            StatusKind::Http if matches!(outcome.end, ResponseEnd::NoResponse(_)) => None,
            StatusKind::Http => Some(outcome.status.as_u16()),
            StatusKind::Grpc => outcome.grpc.and_then(|code| u16::try_from(code).ok()),
        }
    }

    /// The value of the status label.
    fn label_value(&self, status: Option<u16>) -> impl Display {
        match (self.kind, status) {
            (StatusKind::Http, None) => String::new(),
            (StatusKind::Http, Some(status)) => status.to_string(),
            (StatusKind::Grpc, code) => grpc_code_name(code).to_owned(),
        }
    }
}

impl StatusSeries {
    pub(crate) fn record(&self, outcome: &ResponseOutcome) {
        let error = match outcome.end {
            _ if !self.statuses.has_error_label => None,
            ResponseEnd::Complete => None,
            ResponseEnd::EndedEarly(labels) | ResponseEnd::NoResponse(labels) => Some(labels.route_error),
            ResponseEnd::Cancelled => Some("CANCEL"),
        };
        let status = self.statuses.status(outcome);
        let counter = || {
            let (name, value) = (self.statuses.status_label, self.statuses.label_value(status));
            let mut labels = self.labels.clone().with(name, value);
            if self.statuses.has_error_label {
                labels = labels.with("error", error.unwrap_or_default());
            }
            self.statuses.family.get(&labels)
        };
        self.counters
            .with_or_insert((status, error), counter, |counter| counter.inc());
    }
}

/// The name of a gRPC code; `UNKNOWN` for an invalid or missing code.
pub(crate) fn grpc_code_name(code: Option<u16>) -> &'static str {
    const NAMES: [&str; 17] = [
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    ];
    code.and_then(|code| NAMES.get(usize::from(code))).unwrap_or(&"UNKNOWN")
}

/// Observes the time between two instants, in seconds.
pub(crate) fn observe(histogram: &Histogram, from: Instant, to: Instant) {
    histogram.observe(to.saturating_duration_since(from).as_secs_f64());
}
