//! What is counted of the requests of one route, or of one backend behind it: how long they took, how they ended, and the pieces
//! in which they came.

use std::{fmt::Display, sync::Arc};

use tokio::time::Instant;
use tulle_core::metrics::{Counter, Family, Histogram, Labels, Registry};

use crate::metrics::{
    http::{End, Outcome},
    known::Known,
};

/// Upper bounds of frame sizes in bytes.
pub(crate) const FRAMES: &[f64] = &[128., 1_024., 10_240.];
/// Upper bounds of durations in seconds, in detail.
pub(crate) const FINE: &[f64] = &[0.025, 0.05, 0.1, 0.25, 0.5, 1., 10.];
/// The same, roughly.
pub(crate) const COARSE: &[f64] = &[0.05, 0.5, 1., 10.];

/// Whose statuses count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Http,
    Grpc,
}

impl Kind {
    /// As it stands in the names of families.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }
}

/// How exchanges ended, by status and error.
#[derive(Clone)]
pub(crate) struct Statuses {
    family: Family<Counter>,
    kind: Kind,
    /// The name of the label.
    status: &'static str,
    /// Whether the error that ended an exchange is a label.
    tells_errors: bool,
}

/// Status and error, as far as there are any.
type Ending = (Option<u16>, Option<&'static str>);

/// [`Statuses`] of exchanges that share their labels.
pub(crate) struct StatusSeries {
    statuses: Statuses,
    labels: Labels,
    known: Known<Ending, Arc<Counter>>,
}

impl Statuses {
    pub(crate) fn new(registry: &Registry, name: &str, kind: Kind, status: &'static str, tells_errors: bool) -> Self {
        Self {
            family: registry.counter(name, "Completed exchanges, by how they ended"),
            kind,
            status,
            tells_errors,
        }
    }

    pub(crate) fn series(&self, labels: Labels) -> StatusSeries {
        StatusSeries {
            statuses: self.clone(),
            labels,
            known: Known::default(),
        }
    }

    fn of(&self, outcome: &Outcome) -> Option<u16> {
        match self.kind {
            Kind::Http if matches!(outcome.end, End::Failed(_)) => None,
            Kind::Http => Some(outcome.status.as_u16()),
            Kind::Grpc => outcome.grpc.and_then(|code| u16::try_from(code).ok()),
        }
    }

    fn text(&self, status: Option<u16>) -> impl Display {
        match (self.kind, status) {
            (Kind::Http, None) => String::new(),
            (Kind::Http, Some(status)) => status.to_string(),
            (Kind::Grpc, code) => code_name(code).to_owned(),
        }
    }
}

impl StatusSeries {
    pub(crate) fn ended(&self, outcome: &Outcome) {
        let error = match outcome.end {
            _ if !self.statuses.tells_errors => None,
            End::Complete => None,
            End::Broken(fault) | End::Failed(fault) => Some(fault.stream),
            End::Abandoned => Some("CANCEL"),
        };
        let status = self.statuses.of(outcome);
        let counter = || {
            let (name, text) = (self.statuses.status, self.statuses.text(status));
            let mut labels = self.labels.clone().with(name, text);
            if self.statuses.tells_errors {
                labels = labels.with("error", error.unwrap_or_default());
            }
            self.statuses.family.get(&labels)
        };
        self.known.with((status, error), counter, |counter| counter.inc());
    }
}

/// The name of a code of gRPC; one that there is not stands for what nobody knows.
pub(crate) fn code_name(code: Option<u16>) -> &'static str {
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

/// Notes in seconds what took from one moment to another.
pub(crate) fn observe(histogram: &Histogram, from: Instant, to: Instant) {
    histogram.observe(to.saturating_duration_since(from).as_secs_f64());
}
