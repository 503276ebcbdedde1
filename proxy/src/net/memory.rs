//! Monitors the memory of the process against its limit, so that the proxy sheds requests before the kernel kills it.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::sleep;
use tulle_core::{
    memory::{MemoryCgroup, parse_field},
    metrics::{Gauge, Labels, Registry},
};

/// Whether memory is about to run out. All code that admits requests or connections shares it.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryPressure(Arc<AtomicBool>);

impl MemoryPressure {
    pub(crate) fn is_active(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

pub(crate) struct MemoryMonitor {
    usage: Usage,
    /// The memory limit, in bytes.
    limit: u64,
    pressure: MemoryPressure,
    pressure_gauge: Arc<Gauge>,
    /// Held so that the gauge stays in the metrics.
    _limit_gauge: Arc<Gauge>,
}

/// Where the memory usage is read from.
#[derive(Debug, PartialEq)]
enum Usage {
    /// Resident memory of this process.
    Process,
    /// Memory that the kernel counts towards the limit of the proxy's cgroup.
    Group(MemoryCgroup),
}

impl MemoryMonitor {
    /// Monitors usage against `limit` in bytes, or else against the limit of the cgroup; `None` if there is neither.
    pub(crate) fn new(limit: Option<u64>, pressure: MemoryPressure, registry: &Registry) -> Option<Self> {
        let (usage, limit) = match limit {
            Some(limit) => (Usage::Process, limit),
            None => {
                let group = MemoryCgroup::current()?;
                let limit = group.limit_bytes;
                (Usage::Group(group), limit)
            }
        };
        let limits = registry.gauge("tulle_memory_limit_bytes", "Memory that this process may use");
        let limit_gauge = limits.get(&Labels::new());
        limit_gauge.set(i64::try_from(limit).unwrap_or(i64::MAX));
        let pressure_gauges = registry.gauge(
            "tulle_memory_short",
            "1 under memory pressure: while requests and connections are refused because memory is about to run out",
        );
        Some(Self {
            usage,
            limit,
            pressure,
            pressure_gauge: pressure_gauges.get(&Labels::new()),
            _limit_gauge: limit_gauge,
        })
    }

    /// The memory limit, in bytes.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(crate) async fn run(self) {
        loop {
            let used = self.check();
            let is_below_half = used.is_none_or(|used| used < self.limit / 2);
            sleep(if is_below_half {
                RELAXED_POLL_INTERVAL
            } else {
                FREQUENT_POLL_INTERVAL
            })
            .await;
        }
    }

    /// Checks the usage once and returns it.
    fn check(&self) -> Option<u64> {
        let was_active = self.pressure.is_active();
        let mut used = self.usage.read()?;
        // The heap is also trimmed at each check during pressure. Otherwise the allocator would keep the memory that finished
        // requests have freed, and the pressure would never end.
        if is_pressure(used, self.limit, was_active) {
            trim_heap();
            used = self.usage.read()?;
        }
        let is_active = is_pressure(used, self.limit, was_active);
        if is_active != was_active {
            let limit = self.limit;
            match is_active {
                true => tracing::warn!(
                    used,
                    limit,
                    "memory is about to run out: requests and connections are refused"
                ),
                false => tracing::info!(used, limit, "memory is available again"),
            }
            self.pressure.0.store(is_active, Ordering::Relaxed);
            self.pressure_gauge.set(i64::from(is_active));
        }
        Some(used)
    }
}

/// Pressure begins when the usage reaches 90 % of the limit, and ends when the usage is below 85 %.
fn is_pressure(used: u64, limit: u64, was_active: bool) -> bool {
    let reaches = |percent| u128::from(limit) * percent <= u128::from(used) * 100;
    reaches(90) || (was_active && reaches(85))
}

impl Usage {
    fn read(&self) -> Option<u64> {
        match self {
            Self::Process => {
                let status = fs::read_to_string("/proc/self/status").ok()?;
                Some(parse_field(&status, "VmRSS:")? * 1024)
            }
            Self::Group(group) => group.usage_bytes(),
        }
    }
}

/// Returns freed memory from the allocator to the kernel.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
fn trim_heap() {
    // SAFETY: `malloc_trim` takes only a number and may be called by any thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(not(target_env = "gnu"))]
fn trim_heap() {}

/// Poll interval while the usage is below half of the limit.
const RELAXED_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Poll interval while the usage is at least half of the limit.
const FREQUENT_POLL_INTERVAL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_short_from_90_percent_until_usage_is_below_85_percent() {
        for (used, was_active, expected) in [
            (0, false, false),
            (899, false, false),
            (900, false, true),
            (2000, false, true),
            (850, true, true),
            (849, true, false),
        ] {
            assert_eq!(is_pressure(used, 1000, was_active), expected, "{used} {was_active}");
        }
    }

    #[cfg(target_env = "gnu")]
    #[test]
    fn memory_freed_under_pressure_ends_it() {
        const TOTAL_BYTES: usize = 256 << 20;
        const PIECE_BYTES: usize = 64 << 10; // too small for malloc to map it separately
        let used = Usage::Process.read().unwrap();
        let limit = used + TOTAL_BYTES as u64;
        let (registry, pressure) = (Registry::new(), MemoryPressure::default());
        let monitor = MemoryMonitor::new(Some(limit), pressure.clone(), &registry).unwrap();
        let mut pieces: Vec<Vec<u8>> = (0..TOTAL_BYTES / PIECE_BYTES).map(|_| vec![1; PIECE_BYTES]).collect();
        monitor.check();
        assert!(pressure.is_active());
        let last = pieces.pop(); // keeps the heap from shrinking by itself
        drop(pieces);
        monitor.check();
        assert!(!pressure.is_active(), "{:?} of {limit}", Usage::Process.read());
        drop(last);
    }

    #[tokio::test(start_paused = true)]
    async fn the_memory_limit_stays_in_the_metrics() {
        let registry = Registry::new();
        let _monitor = MemoryMonitor::new(Some(1000), MemoryPressure::default(), &registry).unwrap();
        let idle = Duration::from_secs(600);
        for _ in 0..3 {
            registry.retire(idle);
            tokio::time::advance(idle).await;
        }
        assert!(registry.render().contains("tulle_memory_limit_bytes 1000"));
    }

    #[tokio::test]
    async fn the_process_is_measured_against_a_configured_limit() {
        for (limit, expected) in [(1, true), (u64::MAX, false)] {
            let registry = Registry::new();
            let pressure = MemoryPressure::default();
            let monitor = MemoryMonitor::new(Some(limit), pressure.clone(), &registry).unwrap();
            assert!(monitor.check().unwrap() > 1_000_000);
            assert_eq!(pressure.is_active(), expected);
            let shown = format!("tulle_memory_short {}", i64::from(expected));
            assert!(registry.render().contains(&shown), "{}", registry.render());
        }
    }
}
