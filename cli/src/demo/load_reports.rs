//! The reports of the load generators: one line of JSON per second, and their totals.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One report of `tulle-bench load`, with the fields that the demo shows.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Report {
    pub(super) kind: ReportKind,
    /// Length of the interval, in seconds.
    pub(super) seconds: f64,
    pub(super) requests: u64,
    pub(super) succeeded: u64,
    /// Payload bytes.
    pub(super) sent_bytes: u64,
    pub(super) received_bytes: u64,
    pub(super) latency_us: Option<LatencyUs>,
    /// Responses by replica.
    pub(super) replicas: BTreeMap<String, u64>,
    /// Failed requests by reason.
    pub(super) errors: BTreeMap<String, u64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum ReportKind {
    #[default]
    Interval,
    Total,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct LatencyUs {
    p50: f64,
    p95: f64,
    p99: f64,
}

/// Latency percentiles in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct LatencyMs {
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) p99: f64,
}

/// The reports of one load generator so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Reports {
    /// The report of the last second.
    pub(super) last: Report,
    /// The report of the whole run; present after the generator was stopped.
    pub(super) total: Option<Report>,
    /// Total of all intervals so far.
    pub(super) requests: u64,
    pub(super) failed: u64,
}

impl Reports {
    /// Adds one line; returns `false` if it is not a report.
    pub(super) fn add_line(&mut self, line: &str) -> bool {
        let Ok(report) = serde_json::from_str::<Report>(line) else {
            return false;
        };
        match report.kind {
            ReportKind::Interval => {
                self.requests += report.requests;
                self.failed += report.failed();
                self.last = report;
            }
            ReportKind::Total => self.total = Some(report),
        }
        true
    }
}

impl Report {
    pub(super) fn failed(&self) -> u64 {
        self.requests.saturating_sub(self.succeeded)
    }

    pub(super) fn latency_ms(&self) -> Option<LatencyMs> {
        self.latency_us.map(|us| LatencyMs {
            p50: us.p50 / 1e3,
            p95: us.p95 / 1e3,
            p99: us.p99 / 1e3,
        })
    }

    pub(super) fn per_second(&self, n: u64) -> f64 {
        if self.seconds > 0.0 {
            n as f64 / self.seconds
        } else {
            0.0
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) const INTERVAL: &str = r#"{"kind":"interval","at":3.0,"seconds":1.0,"requests":200,
        "succeeded":198,"failed":2,"requests_per_second":200.0,"sent_bytes":0,"received_bytes":25600,
        "received_bytes_per_second":25600.0,"latency_us":{"mean":900.0,"p50":800.0,"p90":1200.0,"p95":1500.0,
        "p99":3000.0,"p99_9":3500.0,"max":4000.0},"replicas":{"web-1":100,"web-2":98},
        "outcomes":{"2xx":198,"5xx":2},"errors":{"status 502":2}}"#;

    #[test]
    fn intervals_add_up_and_the_total_is_stored_apart() {
        let mut reports = Reports::default();
        let line = INTERVAL.replace('\n', " ");
        assert!(reports.add_line(&line) && reports.add_line(&line));
        assert_eq!((reports.requests, reports.failed), (400, 4));
        assert_eq!(reports.last.latency_ms().unwrap().p95, 1.5);
        assert!(reports.total.is_none());
        assert!(reports.add_line(&line.replace("interval", "total")));
        assert_eq!(reports.total.as_ref().unwrap().requests, 200);
        assert_eq!(reports.requests, 400);
    }

    #[test]
    fn lines_that_are_not_reports_are_rejected() {
        let mut reports = Reports::default();
        assert!(!reports.add_line("listening"));
        assert!(!reports.add_line("{}"));
        assert_eq!(reports.requests, 0);
    }
}
