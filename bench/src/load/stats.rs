//! Counts and latencies of one interval, and the reports of them.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::outcome::{ExchangeResponse, Failure};

/// Counts and latencies of the requests of one interval.
pub(super) struct IntervalStats {
    /// Latencies in nanoseconds.
    latencies: Histogram<u64>,
    requests: u64,
    succeeded: u64,
    sent_bytes: u64,
    received_bytes: u64,
    replicas: Counts,
    outcomes: Counts,
    errors: Counts,
}

/// The report of an interval or of the whole run, as printed in JSON.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Report {
    pub kind: ReportKind,
    /// Seconds from the start of the run to the end of the interval.
    pub at: f64,
    /// Length of the interval in seconds.
    pub seconds: f64,
    pub requests: u64,
    pub succeeded: u64,
    pub failed: u64,
    pub requests_per_second: f64,
    /// Payload bytes, without headers and framing.
    pub sent_bytes: u64,
    pub received_bytes: u64,
    pub received_bytes_per_second: f64,
    /// Latency in microseconds from the due time to the end of the response, over responses and timeouts. Absent if there were
    /// none.
    pub latency_us: Option<Latency>,
    /// Responses by replica.
    pub replicas: Counts,
    /// All requests by outcome.
    pub outcomes: Counts,
    /// Failed requests by reason.
    pub errors: Counts,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReportKind {
    /// A report of `--report-every`.
    Interval,
    /// The whole run.
    Total,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Latency {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub p99_9: f64,
    pub max: f64,
}

pub type Counts = BTreeMap<String, u64>;

impl IntervalStats {
    pub(super) fn new() -> Self {
        Self {
            latencies: Histogram::new_with_bounds(1, MAX_LATENCY.as_nanos() as u64, 3)
                .expect("the bounds are constants"),
            requests: 0,
            succeeded: 0,
            sent_bytes: 0,
            received_bytes: 0,
            replicas: Counts::new(),
            outcomes: Counts::new(),
            errors: Counts::new(),
        }
    }

    /// Counts one request. `latency` counts from its due time.
    pub(super) fn record(&mut self, latency: Duration, outcome: &Result<ExchangeResponse, Failure>) {
        self.requests += 1;
        let has_latency = match outcome {
            Ok(response) => {
                self.succeeded += u64::from(response.succeeded());
                self.sent_bytes += response.sent;
                self.received_bytes += response.received;
                add_count(&mut self.outcomes, &response.label(), 1);
                if let Some(replica) = &response.replica {
                    add_count(&mut self.replicas, replica, 1);
                }
                if let Some(error) = response.error() {
                    add_count(&mut self.errors, &error, 1);
                }
                true
            }
            Err(failure) => {
                add_count(&mut self.outcomes, failure.label(), 1);
                add_count(&mut self.errors, &failure.to_string(), 1);
                // The duration of a timeout is a lower bound of the latency. A refused connection has no latency.
                *failure == Failure::Timeout
            }
        };
        if has_latency {
            self.latencies
                .saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
        }
    }

    /// Counts requests that were due and never sent because every connection was busy.
    pub(super) fn record_unsent(&mut self, n: u64) {
        if n > 0 {
            self.requests += n;
            add_count(&mut self.outcomes, "not sent", n);
            add_count(&mut self.errors, "not sent: every connection was busy", n);
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.latencies
            .add(&other.latencies)
            .expect("all histograms have the same bounds");
        self.requests += other.requests;
        self.succeeded += other.succeeded;
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        for (into, from) in [
            (&mut self.replicas, &other.replicas),
            (&mut self.outcomes, &other.outcomes),
            (&mut self.errors, &other.errors),
        ] {
            for (name, n) in from {
                add_count(into, name, *n);
            }
        }
    }

    pub(super) fn report(&self, kind: ReportKind, at: Duration, length: Duration) -> Report {
        let seconds = length.as_secs_f64().max(f64::MIN_POSITIVE);
        Report {
            kind,
            at: at.as_secs_f64(),
            seconds: length.as_secs_f64(),
            requests: self.requests,
            succeeded: self.succeeded,
            failed: self.requests - self.succeeded,
            requests_per_second: self.requests as f64 / seconds,
            sent_bytes: self.sent_bytes,
            received_bytes: self.received_bytes,
            received_bytes_per_second: self.received_bytes as f64 / seconds,
            latency_us: self.latency(),
            replicas: self.replicas.clone(),
            outcomes: self.outcomes.clone(),
            errors: self.errors.clone(),
        }
    }

    fn latency(&self) -> Option<Latency> {
        let at = |quantile| self.latencies.value_at_quantile(quantile) as f64 / 1e3;
        (!self.latencies.is_empty()).then(|| Latency {
            mean: self.latencies.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            p99_9: at(0.999),
            max: self.latencies.max() as f64 / 1e3,
        })
    }
}

/// Adds `n` to the count of `name`. Names beyond the limit share one entry, so that a server with many names cannot exhaust memory.
fn add_count(counts: &mut Counts, name: &str, n: u64) {
    if let Some(count) = counts.get_mut(name) {
        *count += n;
    } else {
        let name = if counts.len() < MAX_DISTINCT_NAMES {
            name
        } else {
            "others"
        };
        *counts.entry(name.to_owned()).or_default() += n;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} requests in {:.1} s, {:.0} per second; {} succeeded, {} failed",
            self.requests, self.seconds, self.requests_per_second, self.succeeded, self.failed
        )?;
        writeln!(
            f,
            "payload sent {:.1} MiB, received {:.1} MiB, {:.1} MiB per second",
            mib(self.sent_bytes as f64),
            mib(self.received_bytes as f64),
            mib(self.received_bytes_per_second)
        )?;
        if let Some(l) = &self.latency_us {
            writeln!(f, "latency µs  mean     p50     p90     p95     p99   p99.9      max")?;
            writeln!(
                f,
                "        {:>8.0}{:>8.0}{:>8.0}{:>8.0}{:>8.0}{:>8.0}{:>9.0}",
                l.mean, l.p50, l.p90, l.p95, l.p99, l.p99_9, l.max
            )?;
        }
        for (title, counts) in [
            ("outcomes", &self.outcomes),
            ("replicas", &self.replicas),
            ("errors", &self.errors),
        ] {
            if counts.is_empty() {
                continue;
            }
            writeln!(f, "{title}")?;
            let all: u64 = counts.values().sum();
            for (name, n) in counts {
                writeln!(f, "{n:>12}  {:>5.1} %  {name}", *n as f64 * 100.0 / all as f64)?;
            }
        }
        Ok(())
    }
}

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

const MAX_LATENCY: Duration = Duration::from_secs(600);
const MAX_DISTINCT_NAMES: usize = 64;

#[cfg(test)]
mod tests {
    use super::super::outcome::ResponseStatus;
    use super::*;

    fn response(status: u16, replica: &str) -> Result<ExchangeResponse, Failure> {
        let status = ResponseStatus::Http(status);
        Ok(ExchangeResponse {
            status,
            replica: Some(replica.into()),
            reason: None,
            sent: 10,
            received: 100,
        })
    }

    #[test]
    fn every_request_is_counted_under_one_outcome() {
        let mut stats = IntervalStats::new();
        stats.record(Duration::from_millis(1), &response(200, "a"));
        stats.record(Duration::from_millis(1), &response(200, "b"));
        stats.record(Duration::from_millis(1), &response(503, "b"));
        stats.record(Duration::from_millis(1), &Err(Failure::Connect("refused".into())));
        stats.record(Duration::from_millis(1), &Err(Failure::Timeout));
        stats.record_unsent(5);
        let report = stats.report(ReportKind::Total, Duration::from_secs(2), Duration::from_secs(2));
        assert_eq!((report.requests, report.succeeded, report.failed), (10, 2, 8));
        assert_eq!(report.outcomes.values().sum::<u64>(), report.requests);
        assert_eq!(report.errors.values().sum::<u64>(), report.failed);
        assert_eq!(report.replicas, Counts::from([("a".into(), 1), ("b".into(), 2)]));
        assert_eq!((report.sent_bytes, report.received_bytes), (30, 300));
        assert_eq!(
            (report.requests_per_second, report.received_bytes_per_second),
            (5.0, 150.0)
        );
    }

    #[test]
    fn percentiles_are_computed_from_the_recorded_latencies() {
        let mut stats = IntervalStats::new();
        for ms in 1..=1000 {
            stats.record(Duration::from_millis(ms), &response(200, "a"));
        }
        let latency = stats
            .report(ReportKind::Total, Duration::ZERO, Duration::ZERO)
            .latency_us
            .unwrap();
        for (got, want) in [
            (latency.p50, 500e3),
            (latency.p99, 990e3),
            (latency.p99_9, 999e3),
            (latency.max, 1000e3),
        ] {
            assert!((got - want).abs() / want < 0.002, "{got} is not {want}");
        }
    }

    #[test]
    fn latencies_include_timeouts_but_not_refused_connections() {
        let mut stats = IntervalStats::new();
        stats.record(Duration::from_micros(50), &Err(Failure::Connect("refused".into())));
        assert_eq!(
            stats
                .report(ReportKind::Total, Duration::ZERO, Duration::ZERO)
                .latency_us,
            None
        );
        stats.record(Duration::from_secs(10), &Err(Failure::Timeout));
        let latency = stats
            .report(ReportKind::Total, Duration::ZERO, Duration::ZERO)
            .latency_us
            .unwrap();
        assert!(latency.p50 >= 9.9e6, "{latency:?}");
    }

    #[test]
    fn merged_stats_equal_the_stats_of_all_requests() {
        let (mut one, mut two, mut both) = (IntervalStats::new(), IntervalStats::new(), IntervalStats::new());
        for ms in 1..100 {
            let sample = response(if ms % 7 == 0 { 500 } else { 200 }, if ms % 2 == 0 { "a" } else { "b" });
            if ms % 3 == 0 { &mut one } else { &mut two }.record(Duration::from_millis(ms), &sample);
            both.record(Duration::from_millis(ms), &sample);
        }
        one.merge(&two);
        let report =
            |stats: &IntervalStats| stats.report(ReportKind::Interval, Duration::from_secs(1), Duration::from_secs(1));
        assert_eq!(report(&one), report(&both));
    }

    #[test]
    fn names_beyond_the_limit_share_one_entry() {
        let mut counts = Counts::new();
        for n in 0..1000 {
            add_count(&mut counts, &n.to_string(), 1);
        }
        assert_eq!(
            (counts.len(), counts["others"]),
            (MAX_DISTINCT_NAMES + 1, 1000 - MAX_DISTINCT_NAMES as u64)
        );
    }

    #[test]
    fn a_report_is_unchanged_after_encoding_and_decoding_as_json() {
        let mut stats = IntervalStats::new();
        stats.record(Duration::from_millis(3), &response(200, "a"));
        let report = stats.report(ReportKind::Interval, Duration::from_secs(1), Duration::from_secs(1));
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
    }
}
