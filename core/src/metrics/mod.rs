//! Metrics registry: atomic values, rendered in the Prometheus text format.
//!
//! A module registers its families once, takes a handle for each label set when a route or endpoint is built, and only adds
//! to that handle during a request. [`Registry::retire`] drops series whose handles are dropped, after an idle time, and
//! [`Registry::remove_series`] those of an object that has ended.

mod family;
mod labels;
mod process;
mod runtimes;
pub mod samples;
mod text;
mod values;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::runtime::RuntimeMetrics;
use tokio::time::Instant;

use self::family::{AnyFamily, FamilyStore};
pub use self::labels::Labels;
pub use self::text::Description;
pub use self::values::{Counter, FloatGauge, Gauge, Histogram};
use self::values::{Kind, Metric};

/// All metrics of a process; clones share them.
#[derive(Clone, Default)]
pub struct Registry {
    shared: Arc<Shared>,
}

/// All series of one metric name; clones share them.
pub struct Family<M> {
    store: Arc<FamilyStore<M>>,
}

/// Registers `process_*`: CPU time, memory, descriptors, and threads of this process, and network bytes of its
/// network namespace.
///
/// Values that `/proc` does not provide are omitted.
pub fn register_process_metrics(registry: &Registry) {
    registry.add_collector(process::write);
}

/// Registers `tokio_rt_*`: the totals of these runtimes.
pub fn register_runtime_metrics(registry: &Registry, runtimes: Vec<RuntimeMetrics>) {
    registry.add_collector(move |out| runtimes::write(&runtimes, out));
}

#[derive(Default)]
struct Shared {
    families: RwLock<BTreeMap<String, Arc<dyn AnyFamily>>>,
    collectors: Mutex<Vec<Collector>>,
    render_hooks: Mutex<Vec<RenderHook>>,
}

type Collector = Box<dyn Fn(&mut String) + Send + Sync>;
type RenderHook = Box<dyn Fn() + Send + Sync>;

impl Registry {
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the family of counters with this name; later calls return the same family.
    ///
    /// # Panics
    /// If a family of another type has the name. The same holds for [`gauge`](Self::gauge), [`float_gauge`](Self::float_gauge) and
    /// [`histogram`](Self::histogram).
    pub fn counter(&self, name: &str, help: &str) -> Family<Counter> {
        self.family(name, help, Kind::Counter)
    }

    /// A family of gauges with integer values.
    pub fn gauge(&self, name: &str, help: &str) -> Family<Gauge> {
        self.family(name, help, Kind::Gauge)
    }

    /// A family of gauges with fractions, such as seconds.
    pub fn float_gauge(&self, name: &str, help: &str) -> Family<FloatGauge> {
        self.family(name, help, Kind::Gauge)
    }

    /// A family of histograms. `buckets` are the upper bounds in ascending order, without infinity.
    pub fn histogram(&self, name: &str, help: &str, buckets: &'static [f64]) -> Family<Histogram> {
        self.family(name, help, Kind::Histogram(buckets))
    }

    /// Adds a function that appends its own text at every [`render`](Self::render).
    pub fn add_collector(&self, collect: impl Fn(&mut String) + Send + Sync + 'static) {
        self.shared.collectors.lock().push(Box::new(collect));
    }

    /// Adds a function that runs before every [`render`](Self::render), to set gauges only when they are read.
    pub fn before_render(&self, measure: impl Fn() + Send + Sync + 'static) {
        self.shared.render_hooks.lock().push(Box::new(measure));
    }

    /// Describes each metric that [`render`](Self::render) can print, also those that have no series yet.
    pub fn descriptions(&self) -> Vec<Description> {
        let mut out = String::new();
        write_overflow_header(&mut out);
        for (name, family) in self.shared.families.read().iter() {
            family.describe(name, &mut out);
        }
        for collect in self.shared.collectors.lock().iter() {
            collect(&mut out);
        }
        text::parse_headers(&out)
    }

    /// All metrics in the Prometheus text format: the families, sorted by name, then the counter of overflows, then the text
    /// of the collectors. Families without series are omitted, unless they have overflowed.
    pub fn render(&self) -> String {
        for measure in self.shared.render_hooks.lock().iter() {
            measure();
        }
        let mut out = String::new();
        // Rendering takes time, so the lock is held only to copy the list.
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

    /// Drops series without handles that have not changed for `idle`.
    ///
    /// Changes are detected by a comparison of the values at two calls, so that requests need not read the clock. A series may
    /// therefore live longer by the interval between two calls.
    pub fn retire(&self, idle: Duration) {
        let now = Instant::now();
        for family in self.shared.families.read().values() {
            family.retire(now, idle);
        }
    }

    /// Drops all series with this label, also those with handles; what is added to such a handle later is lost.
    pub fn remove_series(&self, key: &str, value: &str) {
        for family in self.shared.families.read().values() {
            family.remove_series(key, value);
        }
    }

    fn family<M: Metric>(&self, name: &str, help: &str, kind: Kind) -> Family<M> {
        let mut families = self.shared.families.write();
        let family = families
            .entry(name.to_owned())
            .or_insert_with(|| Arc::new(FamilyStore::<M>::new(help, kind)));
        let store = family.clone().as_any().downcast().expect("a metric name has one type");
        Family { store }
    }
}

impl<M: Metric> Family<M> {
    /// The series with these labels, created on first use.
    ///
    /// A family has at most 10,000 series; further label sets share one series with the label `overflow="true"`.
    pub fn get(&self, labels: &Labels) -> Arc<M> {
        self.store.get(labels)
    }

    /// Drops the series with this label, as [`Registry::remove_series`] does for all families.
    pub fn remove_series(&self, key: &str, value: &str) {
        self.store.remove_series(key, value);
    }
}

impl<M> Family<M> {
    /// Limits the number of series of a family whose labels are long.
    #[must_use]
    pub fn limit_series(self, max: usize) -> Self {
        self.store.limit_series(max);
        self
    }

    /// All series, sorted by their labels.
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

fn render_overflows(families: &[(String, Arc<dyn AnyFamily>)], out: &mut String) {
    let full: Vec<_> = families.iter().filter(|(_, family)| family.n_overflows() > 0).collect();
    if full.is_empty() {
        return;
    }
    write_overflow_header(out);
    for (family_name, family) in full {
        let labels = Labels::new().with("family", family_name);
        text::write_sample(out, OVERFLOW_METRIC, &labels, family.n_overflows());
    }
}

fn write_overflow_header(out: &mut String) {
    let help = "Lookups of label sets that were counted in the overflow series, because their metric family is full.";
    text::write_header(out, OVERFLOW_METRIC, help, Kind::Counter.as_str());
}

const OVERFLOW_METRIC: &str = "tulle_metrics_series_overflow_total";

#[cfg(test)]
mod tests;
