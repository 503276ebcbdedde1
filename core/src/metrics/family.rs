//! A metric family: its series are created on first use, bounded in number, and dropped when idle.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::time::Instant;

use super::labels::Labels;
use super::text;
use super::values::{Kind, Metric};

/// The operations of the registry on a family of any value type.
pub(super) trait AnyFamily: Send + Sync {
    fn render(&self, name: &str, out: &mut String);
    /// Writes the `HELP` and `TYPE` lines.
    fn describe(&self, name: &str, out: &mut String);
    fn retire(&self, now: Instant, idle: Duration);
    fn remove_series(&self, key: &str, value: &str);
    fn n_overflows(&self) -> u64;
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

pub(super) struct FamilyStore<M> {
    help: String,
    kind: Kind,
    series: RwLock<HashMap<Labels, Series<M>>>,
    max_series: AtomicUsize,
    /// Shared by all further label sets once the family is full.
    overflow: Arc<M>,
    /// Number of lookups that returned `overflow`.
    n_overflows: AtomicU64,
}

struct Series<M> {
    value: Arc<M>,
    /// The value's fingerprint at the last check.
    last_fingerprint: u64,
    /// The time of the last check that found a handle of the series, or a change of its value.
    touched_at: Instant,
}

impl<M: Metric> FamilyStore<M> {
    pub(super) fn new(help: &str, kind: Kind) -> Self {
        Self {
            help: help.to_owned(),
            kind,
            series: RwLock::default(),
            max_series: AtomicUsize::new(MAX_SERIES),
            overflow: Arc::new(M::new(kind)),
            n_overflows: AtomicU64::new(0),
        }
    }

    pub(super) fn get(&self, labels: &Labels) -> Arc<M> {
        if let Some(series) = self.series.read().get(labels) {
            return series.value.clone();
        }
        let mut all = self.series.write();
        if let Some(series) = all.get(labels) {
            return series.value.clone();
        }
        if all.len() >= self.max_series.load(Ordering::Relaxed) {
            self.n_overflows.fetch_add(1, Ordering::Relaxed);
            return self.overflow.clone();
        }
        let value = Arc::new(M::new(self.kind));
        let series = Series {
            last_fingerprint: value.fingerprint(),
            value: value.clone(),
            touched_at: Instant::now(),
        };
        all.insert(labels.clone(), series);
        value
    }
}

impl<M> FamilyStore<M> {
    pub(super) fn limit_series(&self, max: usize) {
        self.max_series.store(max.min(MAX_SERIES), Ordering::Relaxed);
    }

    /// All series, sorted by their labels.
    pub(super) fn all(&self) -> Vec<(Labels, Arc<M>)> {
        let series = self.series.read();
        let mut all: Vec<_> = series
            .iter()
            .map(|(labels, series)| (labels.clone(), series.value.clone()))
            .collect();
        drop(series);
        // Sorted, so that two scrapes can be compared line by line.
        all.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        all
    }
}

impl<M: Metric> AnyFamily for FamilyStore<M> {
    fn render(&self, name: &str, out: &mut String) {
        let all = self.all();
        if all.is_empty() && self.n_overflows() == 0 {
            return;
        }
        self.describe(name, out);
        for (labels, value) in &all {
            value.render(name, labels, out);
        }
        if self.n_overflows() > 0 {
            self.overflow.render(name, &Labels::new().with("overflow", true), out);
        }
    }

    fn describe(&self, name: &str, out: &mut String) {
        text::write_header(out, name, &self.help, self.kind.as_str());
    }

    fn retire(&self, now: Instant, idle: Duration) {
        // New handles need this lock, so a strong count of one cannot grow here. A scrape that runs meanwhile also holds
        // references to the values; that only keeps a series longer.
        self.series.write().retain(|_, series| {
            let fingerprint = series.value.fingerprint();
            let is_in_use = Arc::strong_count(&series.value) > 1 || fingerprint != series.last_fingerprint;
            if is_in_use {
                series.last_fingerprint = fingerprint;
                series.touched_at = now;
            }
            is_in_use || now.saturating_duration_since(series.touched_at) < idle
        });
    }

    fn remove_series(&self, key: &str, value: &str) {
        self.series.write().retain(|labels, _| !labels.has(key, value));
    }

    fn n_overflows(&self) -> u64 {
        self.n_overflows.load(Ordering::Relaxed)
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// Maximum number of series in a family, unless it has a lower limit. Peers can influence label values, so the number must be bounded.
pub(super) const MAX_SERIES: usize = 10_000;
