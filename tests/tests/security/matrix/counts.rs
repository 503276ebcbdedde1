//! Compares the failures that a sidecar counts with the expected failures of the tried cells.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use tokio::time::Instant;
use tulle_core::netns::Namespace;

use super::testbed::{self, Testbed};

/// The expected values of the counters of one direction.
///
/// The sum over all causes is a counter too: it shows failures of causes that no cell expects.
pub(super) struct ExpectedCounts {
    direction: &'static str,
    expected: BTreeMap<Counter, CountRange>,
}

/// A metric family, and the labels that select its series.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Counter {
    family: &'static str,
    labels: Vec<String>,
}

/// The range of values that a counter may have.
#[derive(Clone, Copy, Debug, Default)]
struct CountRange {
    min: u64,
    /// By how much it may exceed `min`.
    excess: u64,
}

impl ExpectedCounts {
    /// Expects no failure, of these causes or of any other.
    pub(super) fn none(direction: &'static str, causes: &[&'static str]) -> Self {
        let mut counts = Self {
            direction,
            expected: BTreeMap::new(),
        };
        for cause in causes {
            let counter = counts.failures(Some(cause));
            counts.expected.insert(counter, CountRange::default());
        }
        let all = counts.failures(None);
        counts.expected.insert(all, CountRange::default());
        counts
    }

    /// Expects `n` failures of one cause.
    pub(super) fn add(&mut self, cause: &'static str, n: u64) {
        self.count(self.failures(Some(cause))).min += n;
        self.count(self.failures(None)).min += n;
    }

    /// Expects `n` failures, each of one of the causes.
    pub(super) fn add_one_of(&mut self, causes: &[&'static str], n: u64) {
        for cause in causes {
            self.count(self.failures(Some(cause))).excess += n;
        }
        self.count(self.failures(None)).min += n;
    }

    /// Permits `n` failures of one cause.
    pub(super) fn permit(&mut self, cause: &'static str, n: u64) {
        self.count(self.failures(Some(cause))).excess += n;
        self.count(self.failures(None)).excess += n;
    }

    /// Expects that the policy of a port denies `n` clients or requests for this reason.
    pub(super) fn add_denials(&mut self, port: u16, reason: &str, n: u64) {
        self.count(denials(port, reason)).min += n;
    }

    /// Permits that the policy of a port denies `n` clients or requests for this reason.
    pub(super) fn permit_denials(&mut self, port: u16, reason: &str, n: u64) {
        self.count(denials(port, reason)).excess += n;
    }

    /// The counters with other values, after a time in which the sidecar counts the last connections: a client may see the end of
    /// its connection earlier.
    pub(super) fn mismatches(&self, host: &Namespace) -> Vec<String> {
        let deadline = Instant::now() + COUNT_TIMEOUT;
        loop {
            let metrics = Testbed::metrics(host);
            let counted = |counter: &Counter| {
                let labels: Vec<&str> = counter.labels.iter().map(String::as_str).collect();
                testbed::sum(&metrics, counter.family, &labels)
            };
            let values = self
                .expected
                .iter()
                .map(|(counter, count)| (counter, count, counted(counter)));
            let wrong: Vec<_> = values
                .filter(|(_, count, value)| !count.range().contains(value))
                .collect();
            if wrong.is_empty() || Instant::now() > deadline {
                let describe =
                    |(Counter { family, labels }, CountRange { min, excess }, value): &(&Counter, &CountRange, u64)| {
                        let (labels, max) = (labels.join(","), min + excess);
                        format!("{family}{{{labels}}} is {value}, expected {min} to {max}")
                    };
                return wrong.iter().map(describe).collect();
            }
            std::thread::sleep(COUNT_POLL_INTERVAL);
        }
    }

    fn count(&mut self, counter: Counter) -> &mut CountRange {
        self.expected.entry(counter).or_default()
    }

    /// The failures of one cause, or of all causes.
    fn failures(&self, cause: Option<&str>) -> Counter {
        let direction = format!("direction=\"{}\"", self.direction);
        let cause = cause.map(|cause| format!("cause=\"{cause}\""));
        Counter {
            family: "tulle_failures_total",
            labels: [direction].into_iter().chain(cause).collect(),
        }
    }
}

impl CountRange {
    fn range(self) -> RangeInclusive<u64> {
        self.min..=self.min + self.excess
    }
}

fn denials(port: u16, reason: &str) -> Counter {
    Counter {
        family: "tulle_inbound_denied_total",
        labels: vec![format!("target_port=\"{port}\""), format!("reason=\"{reason}\"")],
    }
}

const COUNT_TIMEOUT: Duration = Duration::from_secs(10);
const COUNT_POLL_INTERVAL: Duration = Duration::from_millis(50);
