//! Metric values: counters, gauges and histograms that any thread can change without a lock.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use super::labels::Labels;
use super::text;

#[derive(Debug, Default)]
pub struct Counter {
    value: AtomicU64,
}

/// A gauge with integer values.
#[derive(Debug, Default)]
pub struct Gauge {
    value: AtomicI64,
}

/// A gauge with fractions, such as a duration or a timestamp in seconds.
#[derive(Debug, Default)]
pub struct FloatGauge {
    /// The bits of an `f64`.
    bits: AtomicU64,
}

/// A histogram: counts by bucket, and the sum of the observations.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One count per bound, and one for values above the last bound. Not cumulative, so that an observation changes one
    /// count only.
    counts: Box<[AtomicU64]>,
    /// The bits of an `f64`.
    sum: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram(&'static [f64]),
}

/// A value of a metric family. The trait is not reachable outside this module, so other crates cannot implement it.
pub trait Metric: Send + Sync + 'static {
    fn new(kind: Kind) -> Self;
    fn render(&self, name: &str, labels: &Labels, out: &mut String);
    /// A number that changes when the value changes.
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

    /// Adds `n`, which may be negative.
    pub fn add(&self, n: i64) {
        self.value.fetch_add(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> i64 {
        self.value.load(Ordering::Relaxed)
    }
}

impl FloatGauge {
    pub fn set(&self, value: f64) {
        self.bits.store(value.to_bits(), Ordering::Relaxed);
    }

    pub fn get(&self) -> f64 {
        f64::from_bits(self.bits.load(Ordering::Relaxed))
    }
}

impl Histogram {
    pub fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        // `fetch_update` cannot fail, because the closure always returns `Some`.
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bits| {
            Some((f64::from_bits(bits) + value).to_bits())
        });
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
        text::write_sample(out, name, labels, self.get());
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
        text::write_sample(out, name, labels, self.get());
    }

    fn fingerprint(&self) -> u64 {
        self.get().cast_unsigned()
    }
}

impl Metric for FloatGauge {
    fn new(_: Kind) -> Self {
        Self::default()
    }

    fn render(&self, name: &str, labels: &Labels, out: &mut String) {
        text::write_sample(out, name, labels, self.get());
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
            text::write_sample(out, &bucket, &labels.clone().with("le", le), total);
        }
        text::write_sample(
            out,
            &format!("{name}_sum"),
            labels,
            f64::from_bits(self.sum.load(Ordering::Relaxed)),
        );
        // The sum of the buckets, not a second counter: both must agree within a scrape.
        text::write_sample(out, &format!("{name}_count"), labels, total);
    }

    fn fingerprint(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}
