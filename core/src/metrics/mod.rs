//! Metrics as plain atomics, printed as Prometheus text.
//!
//! A room registers its families once, takes a handle for each label set where its route or endpoint is built,
//! and only adds to that handle per request.
//! Series vanish with their owner: [`Registry::retire`] drops those whose handle nobody else holds.
//! It is our own registry because no other has both.

mod labels;
mod process;
mod values;

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::time::Instant;

pub use labels::Labels;
pub use values::{Counter, Gauge, Histogram};
use values::{Kind, Metric};

/// All metrics of a process; clones share them.
#[derive(Clone, Default)]
pub struct Registry {
    shared: Arc<Shared>,
}

/// All series of one name; clones share them.
pub struct Family<M> {
    shared: Arc<FamilyShared<M>>,
}

/// Registers `process_*`: time, memory, descriptors, threads and network bytes of this process.
///
/// What `/proc` does not tell is left out.
pub fn process_metrics(registry: &Registry) {
    registry.collector(process::write);
}

type Collector = Box<dyn Fn(&mut String) + Send + Sync>;

#[derive(Default)]
struct Shared {
    families: RwLock<BTreeMap<String, Arc<dyn AnyFamily>>>,
    collectors: Mutex<Vec<Collector>>,
}

struct FamilyShared<M> {
    help: String,
    kind: Kind,
    series: RwLock<HashMap<Labels, Series<M>>>,
    /// Where everything goes once the family is full.
    overflow: Arc<M>,
    n_overflows: AtomicU64,
}

struct Series<M> {
    value: Arc<M>,
    /// What the value was when it was last looked at, and when it was last held or had changed.
    seen: u64,
    touched_at: Instant,
}

/// What the registry does with a family without knowing its type.
trait AnyFamily: Send + Sync {
    fn render(&self, name: &str, out: &mut String);
    fn retire(&self, now: Instant, idle: Duration);
    fn n_overflows(&self) -> u64;
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

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

    /// A family of histograms; `buckets` are the upper bounds, ascending, without the infinite one.
    pub fn histogram(&self, name: &str, help: &str, buckets: &'static [f64]) -> Family<Histogram> {
        self.family(name, help, Kind::Histogram(buckets))
    }

    /// Adds something that writes its own text, at every [`render`](Self::render).
    pub fn collector(&self, collect: impl Fn(&mut String) + Send + Sync + 'static) {
        self.shared.collectors.lock().push(Box::new(collect));
    }

    /// All metrics in the Prometheus text format, by name; families without series are left out.
    pub fn render(&self) -> String {
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
            .or_insert_with(|| Arc::new(FamilyShared::<M>::new(help, kind)));
        let shared = family
            .clone()
            .as_any()
            .downcast()
            .expect("a metric's name stands for one type");
        Family { shared }
    }
}

impl<M: Metric> Family<M> {
    /// The series of these labels, made on first use.
    ///
    /// A family has at most 10 000 series; further label sets share one that is marked `overflow="true"`.
    pub fn get(&self, labels: &Labels) -> Arc<M> {
        if let Some(series) = self.shared.series.read().get(labels) {
            return series.value.clone();
        }
        let mut all = self.shared.series.write();
        if let Some(series) = all.get(labels) {
            return series.value.clone();
        }
        if all.len() >= MAX_SERIES {
            self.shared.n_overflows.fetch_add(1, Ordering::Relaxed);
            return self.shared.overflow.clone();
        }
        let value = Arc::new(M::new(self.shared.kind));
        all.insert(
            labels.clone(),
            Series {
                seen: value.fingerprint(),
                value: value.clone(),
                touched_at: Instant::now(),
            },
        );
        value
    }
}

impl<M> Clone for Family<M> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
        }
    }
}

impl<M: Metric> FamilyShared<M> {
    fn new(help: &str, kind: Kind) -> Self {
        Self {
            help: help.to_owned(),
            kind,
            series: RwLock::default(),
            overflow: Arc::new(M::new(kind)),
            n_overflows: AtomicU64::new(0),
        }
    }
}

impl<M: Metric> AnyFamily for FamilyShared<M> {
    fn render(&self, name: &str, out: &mut String) {
        let mut all: Vec<(Labels, Arc<M>)> = self
            .series
            .read()
            .iter()
            .map(|(labels, series)| (labels.clone(), series.value.clone()))
            .collect();
        if all.is_empty() {
            return;
        }
        // The same order every time, so that two scrapes can be compared by eye.
        all.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        head(out, name, &self.help, self.kind.as_str());
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
            if Arc::strong_count(&series.value) > 1 || fingerprint != series.seen {
                series.seen = fingerprint;
                series.touched_at = now;
            }
            now.saturating_duration_since(series.touched_at) < idle || series.touched_at == now
        });
    }

    fn n_overflows(&self) -> u64 {
        self.n_overflows.load(Ordering::Relaxed)
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// Writes the lines that stand before a family's series.
fn head(out: &mut String, name: &str, help: &str, kind: &str) {
    let help = help.replace('\\', "\\\\").replace('\n', "\\n");
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn render_overflows(families: &[(String, Arc<dyn AnyFamily>)], out: &mut String) {
    let full: Vec<_> = families.iter().filter(|(_, family)| family.n_overflows() > 0).collect();
    if full.is_empty() {
        return;
    }
    let name = "tulle_metrics_series_overflow_total";
    head(
        out,
        name,
        "Label sets that found their metric family full.",
        Kind::Counter.as_str(),
    );
    for (family_name, family) in full {
        let _ = writeln!(out, "{name}{{family=\"{family_name}\"}} {}", family.n_overflows());
    }
}

/// More series of one name would cost more than they tell: labels may come from peers.
const MAX_SERIES: usize = 10_000;

#[cfg(test)]
mod tests;
