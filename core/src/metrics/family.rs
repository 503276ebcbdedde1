//! The series of one name: made on first use, bounded in number, dropped when idle.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::time::Instant;

use super::{Counter, Gauge, Histogram, Labels, Seconds, text};

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram(&'static [f64]),
}

/// What a family needs of its values. Nobody outside can name it, so nobody can add a kind.
pub trait Metric: Send + Sync + 'static {
    fn new(kind: Kind) -> Self;
    fn render(&self, name: &str, labels: &Labels, out: &mut String);
    /// A number that differs after a change.
    fn fingerprint(&self) -> u64;
}

/// What the registry does with a family without knowing its type.
pub(super) trait AnyFamily: Send + Sync {
    fn render(&self, name: &str, out: &mut String);
    fn retire(&self, now: Instant, idle: Duration);
    fn n_overflows(&self) -> u64;
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

pub(super) struct Store<M> {
    help: String,
    kind: Kind,
    series: RwLock<HashMap<Labels, Series<M>>>,
    /// Where everything goes once the family is full.
    overflow: Arc<M>,
    n_overflows: AtomicU64,
}

struct Series<M> {
    value: Arc<M>,
    /// The value's fingerprint when it was last looked at.
    seen: u64,
    /// When the series was last seen held or changed.
    touched_at: Instant,
}

impl<M: Metric> Store<M> {
    pub(super) fn new(help: &str, kind: Kind) -> Self {
        Self {
            help: help.to_owned(),
            kind,
            series: RwLock::default(),
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
        if all.len() >= MAX_SERIES {
            self.n_overflows.fetch_add(1, Ordering::Relaxed);
            return self.overflow.clone();
        }
        let value = Arc::new(M::new(self.kind));
        let series = Series {
            seen: value.fingerprint(),
            value: value.clone(),
            touched_at: Instant::now(),
        };
        all.insert(labels.clone(), series);
        value
    }
}

impl<M> Store<M> {
    /// All series in the order in which they are printed.
    pub(super) fn all(&self) -> Vec<(Labels, Arc<M>)> {
        let series = self.series.read();
        let mut all: Vec<_> = series
            .iter()
            .map(|(labels, series)| (labels.clone(), series.value.clone()))
            .collect();
        drop(series);
        // The same order every time, so that two scrapes can be compared by eye.
        all.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        all
    }
}

impl<M: Metric> AnyFamily for Store<M> {
    fn render(&self, name: &str, out: &mut String) {
        let all = self.all();
        if all.is_empty() {
            return;
        }
        text::head(out, name, &self.help, self.kind.as_str());
        for (labels, value) in &all {
            value.render(name, labels, out);
        }
        if self.n_overflows() > 0 {
            self.overflow.render(name, &Labels::new().with("overflow", true), out);
        }
    }

    fn retire(&self, now: Instant, idle: Duration) {
        // Nobody can take a handle while this lock is held, so a count of one stays one.
        self.series.write().retain(|_, series| {
            let fingerprint = series.value.fingerprint();
            let is_in_use = Arc::strong_count(&series.value) > 1 || fingerprint != series.seen;
            if is_in_use {
                series.seen = fingerprint;
                series.touched_at = now;
            }
            is_in_use || now.saturating_duration_since(series.touched_at) < idle
        });
    }

    fn n_overflows(&self) -> u64 {
        self.n_overflows.load(Ordering::Relaxed)
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Kind {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram(_) => "histogram",
        }
    }
}

impl Metric for Counter {
    fn new(_: Kind) -> Self {
        Self::default()
    }

    fn render(&self, name: &str, labels: &Labels, out: &mut String) {
        text::sample(out, name, labels, self.get());
    }

    fn fingerprint(&self) -> u64 {
        self.get()
    }
}

impl Metric for Gauge {
    fn new(_: Kind) -> Self {
        Self::default()
    }

    fn render(&self, name: &str, labels: &Labels, out: &mut String) {
        text::sample(out, name, labels, self.get());
    }

    fn fingerprint(&self) -> u64 {
        self.get().cast_unsigned()
    }
}

impl Metric for Seconds {
    fn new(_: Kind) -> Self {
        Self::default()
    }

    fn render(&self, name: &str, labels: &Labels, out: &mut String) {
        text::sample(out, name, labels, self.get());
    }

    fn fingerprint(&self) -> u64 {
        self.get().to_bits()
    }
}

impl Metric for Histogram {
    fn new(kind: Kind) -> Self {
        let bounds = match kind {
            Kind::Histogram(bounds) => bounds,
            Kind::Counter | Kind::Gauge => &[],
        };
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self {
            bounds,
            counts,
            sum: AtomicU64::new(0f64.to_bits()),
        }
    }

    fn render(&self, name: &str, labels: &Labels, out: &mut String) {
        let mut total = 0;
        let bucket = format!("{name}_bucket");
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        for (bound, count) in bounds.zip(&self.counts) {
            total += count.load(Ordering::Relaxed);
            let le = if bound.is_infinite() {
                "+Inf".to_owned()
            } else {
                bound.to_string()
            };
            text::sample(out, &bucket, &labels.clone().with("le", le), total);
        }
        text::sample(
            out,
            &format!("{name}_sum"),
            labels,
            f64::from_bits(self.sum.load(Ordering::Relaxed)),
        );
        // The buckets' total, not a second reading: the two must agree within a scrape.
        text::sample(out, &format!("{name}_count"), labels, total);
    }

    fn fingerprint(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// More series of one name would cost more than they tell: labels may come from peers.
pub(super) const MAX_SERIES: usize = 10_000;
