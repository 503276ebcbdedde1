//! The three kinds of values, all relaxed atomics.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use super::labels::Labels;

/// Only grows.
#[derive(Debug, Default)]
pub struct Counter {
    value: AtomicU64,
}

/// Goes up and down.
#[derive(Debug, Default)]
pub struct Gauge {
    value: AtomicI64,
}

/// Counts observations by size, and adds them up.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One per bound and one for what is above the last; not cumulative, so that an observation adds to one only.
    counts: Box<[AtomicU64]>,
    /// An `f64` as its bits.
    sum: AtomicU64,
}

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

impl Counter {
    pub fn inc(&self) {
        self.add(1);
    }

    pub fn add(&self, n: u64) {
        self.value.fetch_add(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.value.load(Ordering::Relaxed)
    }
}

impl Gauge {
    pub fn set(&self, value: i64) {
        self.value.store(value, Ordering::Relaxed);
    }

    /// Adds, or takes away what is negative.
    pub fn add(&self, n: i64) {
        self.value.fetch_add(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> i64 {
        self.value.load(Ordering::Relaxed)
    }
}

impl Histogram {
    pub fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        // Adding always succeeds in the end; the result is the former value, which nobody needs.
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bits| {
            Some((f64::from_bits(bits) + value).to_bits())
        });
    }

    fn count(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
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
        sample(out, name, labels, self.get());
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
        sample(out, name, labels, self.get());
    }

    fn fingerprint(&self) -> u64 {
        self.get().cast_unsigned()
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
            sample(out, &bucket, &labels.clone().with("le", le), total);
        }
        sample(
            out,
            &format!("{name}_sum"),
            labels,
            f64::from_bits(self.sum.load(Ordering::Relaxed)),
        );
        // The buckets' total, not a second reading: the two must agree within a scrape.
        sample(out, &format!("{name}_count"), labels, total);
    }

    fn fingerprint(&self) -> u64 {
        self.count()
    }
}

pub(super) fn sample(out: &mut String, name: &str, labels: &Labels, value: impl std::fmt::Display) {
    // Writing to a string cannot fail.
    let _ = match labels.as_str() {
        "" => writeln!(out, "{name} {value}"),
        labels => writeln!(out, "{name}{{{labels}}} {value}"),
    };
}
