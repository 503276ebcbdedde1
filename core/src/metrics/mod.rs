//! Metrics as plain atomics, printed as Prometheus text.
//!
//! A room registers its families once, takes a handle for each label set where its route or endpoint is built,
//! and only adds to that handle per request.
//! Series vanish with their owner: [`Registry::retire`] drops those whose handle nobody else holds.
//! It is our own registry because no other has both.

mod family;
mod process;
mod runtimes;
pub mod samples;
mod text;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::runtime::RuntimeMetrics;
use tokio::time::Instant;

use self::family::{AnyFamily, Kind, Metric, Store};

/// All metrics of a process; clones share them.
#[derive(Clone, Default)]
pub struct Registry {
    shared: Arc<Shared>,
}

/// All series of one name; clones share them.
pub struct Family<M> {
    store: Arc<Store<M>>,
}

/// A label set in the order in which it was built; equal when it prints equally.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Labels {
    /// As it will be printed, without the braces.
    text: String,
}

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

/// A duration or a moment in seconds, fractions included.
#[derive(Debug, Default)]
pub struct Seconds {
    /// An `f64` as its bits.
    bits: AtomicU64,
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

/// Registers `process_*`: time, memory, descriptors, threads and network bytes of this process.
///
/// What `/proc` does not tell is left out.
pub fn process_metrics(registry: &Registry) {
    registry.collector(process::write);
}

/// Registers `tokio_rt_*`: how busy these runtimes are, together.
pub fn runtime_metrics(registry: &Registry, runtimes: Vec<RuntimeMetrics>) {
    registry.collector(move |out| runtimes::write(&runtimes, out));
}

#[derive(Default)]
struct Shared {
    families: RwLock<BTreeMap<String, Arc<dyn AnyFamily>>>,
    collectors: Mutex<Vec<Collector>>,
    measures: Mutex<Vec<Measure>>,
}

type Collector = Box<dyn Fn(&mut String) + Send + Sync>;
type Measure = Box<dyn Fn() + Send + Sync>;

impl Registry {
    pub fn new() -> Self {
        Self::default()
    }

    /// The family of counters with exactly this name; the same one when it is asked for again.
    ///
    /// # Panics
    /// Here and in [`gauge`](Self::gauge) and [`histogram`](Self::histogram): when the name has another type already.
    pub fn counter(&self, name: &str, help: &str) -> Family<Counter> {
        self.family(name, help, Kind::Counter)
    }

    pub fn gauge(&self, name: &str, help: &str) -> Family<Gauge> {
        self.family(name, help, Kind::Gauge)
    }

    pub fn seconds(&self, name: &str, help: &str) -> Family<Seconds> {
        self.family(name, help, Kind::Gauge)
    }

    /// A family of histograms; `buckets` are the upper bounds, ascending, without the infinite one.
    pub fn histogram(&self, name: &str, help: &str, buckets: &'static [f64]) -> Family<Histogram> {
        self.family(name, help, Kind::Histogram(buckets))
    }

    /// Adds something that writes its own text, at every [`render`](Self::render).
    pub fn collector(&self, collect: impl Fn(&mut String) + Send + Sync + 'static) {
        self.shared.collectors.lock().push(Box::new(collect));
    }

    /// Adds something that sets gauges, before every [`render`](Self::render): what is only looked at then costs nothing
    /// until then.
    pub fn measured(&self, measure: impl Fn() + Send + Sync + 'static) {
        self.shared.measures.lock().push(Box::new(measure));
    }

    /// All metrics in the Prometheus text format, by name; families without series are left out.
    pub fn render(&self) -> String {
        for measure in self.shared.measures.lock().iter() {
            measure();
        }
        let mut out = String::new();
        // Rendering can take a while: the lock is held only to copy the list.
        let families: Vec<_> = self
            .shared
            .families
            .read()
            .iter()
            .map(|(name, family)| (name.clone(), family.clone()))
            .collect();
        for (name, family) in &families {
            family.render(name, &mut out);
        }
        render_overflows(&families, &mut out);
        for collect in self.shared.collectors.lock().iter() {
            collect(&mut out);
        }
        out
    }

    /// Drops the series that nobody held and nothing changed for `idle`, as far as calls of this function saw.
    ///
    /// A request costs no clock reading this way; a series may live longer by the time between two calls.
    pub fn retire(&self, idle: Duration) {
        let now = Instant::now();
        for family in self.shared.families.read().values() {
            family.retire(now, idle);
        }
    }

    fn family<M: Metric>(&self, name: &str, help: &str, kind: Kind) -> Family<M> {
        let mut families = self.shared.families.write();
        let family = families
            .entry(name.to_owned())
            .or_insert_with(|| Arc::new(Store::<M>::new(help, kind)));
        let store = family
            .clone()
            .as_any()
            .downcast()
            .expect("a metric's name stands for one type");
        Family { store }
    }
}

impl<M: Metric> Family<M> {
    /// The series of these labels, made on first use.
    ///
    /// A family has at most 10 000 series; further label sets share one that is marked `overflow="true"`.
    pub fn get(&self, labels: &Labels) -> Arc<M> {
        self.store.get(labels)
    }
}

impl<M> Family<M> {
    /// All series, by their labels.
    pub fn all(&self) -> Vec<(Labels, Arc<M>)> {
        self.store.all()
    }
}

impl<M> Clone for Family<M> {
    fn clone(&self) -> Self {
        Self {
            store: self.store.clone(),
        }
    }
}

impl Labels {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a label; the value may hold anything.
    pub fn with(mut self, key: &str, value: impl Display) -> Self {
        self.comma();
        text::label(&mut self.text, key, value);
        self
    }

    /// Adds all labels of another set.
    pub fn extend(mut self, other: &Self) -> Self {
        if !other.text.is_empty() {
            self.comma();
            self.text.push_str(&other.text);
        }
        self
    }

    /// `a="1",b="2"`, without braces.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Names and values, in order.
    pub fn pairs(&self) -> Vec<(String, String)> {
        text::pairs(&self.text)
    }

    fn comma(&mut self) {
        if !self.text.is_empty() {
            self.text.push(',');
        }
    }
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

impl Seconds {
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
        // Adding always succeeds in the end; the result is the former value, which nobody needs.
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bits| {
            Some((f64::from_bits(bits) + value).to_bits())
        });
    }
}

fn render_overflows(families: &[(String, Arc<dyn AnyFamily>)], out: &mut String) {
    let full: Vec<_> = families.iter().filter(|(_, family)| family.n_overflows() > 0).collect();
    if full.is_empty() {
        return;
    }
    let name = "tulle_metrics_series_overflow_total";
    text::head(
        out,
        name,
        "Label sets that found their metric family full.",
        Kind::Counter.as_str(),
    );
    for (family_name, family) in full {
        text::sample(
            out,
            name,
            &Labels::new().with("family", family_name),
            family.n_overflows(),
        );
    }
}

#[cfg(test)]
mod tests;
