//! How much memory there is for us, and whether it is about to run out, so that we refuse work before the kernel ends us.

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
    memory::{Group, named},
    metrics::{Gauge, Labels, Registry},
};

/// Whether memory is about to run out; shared with all who admit work.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shortage(Arc<AtomicBool>);

impl Shortage {
    pub(crate) fn is_there(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Looks after the memory of this process.
pub(crate) struct Watch {
    usage: Usage,
    /// In bytes.
    limit: u64,
    shortage: Shortage,
    shown: Arc<Gauge>,
    /// Held so that it stays on the page of metrics.
    _shown_limit: Arc<Gauge>,
}

/// Where it stands how much is used.
#[derive(Debug, PartialEq)]
enum Usage {
    /// What of this process is resident.
    Process,
    /// What the kernel counts towards the limit of our control group.
    Group(Group),
}

impl Watch {
    /// Watches against `limit` in bytes, or against that of our control group; nothing where there is none.
    pub(crate) fn new(limit: Option<u64>, shortage: Shortage, registry: &Registry) -> Option<Self> {
        let (usage, limit) = match limit {
            Some(limit) => (Usage::Process, limit),
            None => {
                let group = Group::own()?;
                let limit = group.limit;
                (Usage::Group(group), limit)
            }
        };
        let limits = registry.gauge("tulle_memory_limit_bytes", "Memory that this process may use");
        let shown_limit = limits.get(&Labels::new());
        shown_limit.set(i64::try_from(limit).unwrap_or(i64::MAX));
        let short = registry.gauge(
            "tulle_memory_short",
            "1 while requests and connections are refused because memory is about to run out",
        );
        Some(Self {
            usage,
            limit,
            shortage,
            shown: short.get(&Labels::new()),
            _shown_limit: shown_limit,
        })
    }

    pub(crate) async fn run(self) {
        loop {
            let used = self.look();
            let is_quiet = used.is_none_or(|used| used < self.limit / 2);
            sleep(if is_quiet { SELDOM } else { OFTEN }).await;
        }
    }

    /// Looks once; returns what is used.
    fn look(&self) -> Option<u64> {
        let was_short = self.shortage.is_there();
        let mut used = self.usage.read()?;
        // While it is short, too: what the requests in flight free stays with the allocator otherwise, and it would be short for
        // ever. Nothing else is to be done then.
        if is_short(used, self.limit, was_short) {
            give_back();
            used = self.usage.read()?;
        }
        let is_short = is_short(used, self.limit, was_short);
        if is_short != was_short {
            let limit = self.limit;
            match is_short {
                true => tracing::warn!(
                    used,
                    limit,
                    "memory is about to run out: requests and connections are refused"
                ),
                false => tracing::info!(used, limit, "there is memory again"),
            }
            self.shortage.0.store(is_short, Ordering::Relaxed);
            self.shown.set(i64::from(is_short));
        }
        Some(used)
    }
}

/// From nine tenths of the limit on; and once it was so, until a twentieth of it is free again.
fn is_short(used: u64, limit: u64, was_short: bool) -> bool {
    let of_limit = |percent| u128::from(limit) * percent <= u128::from(used) * 100;
    of_limit(90) || (was_short && of_limit(85))
}

impl Usage {
    fn read(&self) -> Option<u64> {
        match self {
            Self::Process => {
                let status = fs::read_to_string("/proc/self/status").ok()?;
                Some(named(&status, "VmRSS:")? * 1024)
            }
            Self::Group(group) => group.used(),
        }
    }
}

/// Returns to the kernel what was freed and is kept for later.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
fn give_back() {
    // SAFETY: it takes a number alone, and may be called by any thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(not(target_env = "gnu"))]
fn give_back() {}

/// Between two looks, where more than half of the limit is free.
const SELDOM: Duration = Duration::from_secs(1);
/// The same, where less is.
const OFTEN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_short_from_nine_tenths_on_until_a_twentieth_is_free_again() {
        for (used, was_short, expected) in [
            (0, false, false),
            (899, false, false),
            (900, false, true),
            (2000, false, true),
            (850, true, true),
            (849, true, false),
        ] {
            assert_eq!(is_short(used, 1000, was_short), expected, "{used} {was_short}");
        }
    }

    #[cfg(target_env = "gnu")]
    #[test]
    fn what_is_freed_while_memory_is_short_ends_the_shortage() {
        const MUCH: usize = 256 << 20;
        const PIECE: usize = 64 << 10; // too small to be mapped, and unmapped, by itself
        let used = Usage::Process.read().unwrap();
        let limit = used + MUCH as u64;
        let (registry, shortage) = (Registry::new(), Shortage::default());
        let watch = Watch::new(Some(limit), shortage.clone(), &registry).unwrap();
        let mut pieces: Vec<Vec<u8>> = (0..MUCH / PIECE).map(|_| vec![1; PIECE]).collect();
        watch.look();
        assert!(shortage.is_there());
        let last = pieces.pop(); // keeps the heap from shrinking by itself
        drop(pieces);
        watch.look();
        assert!(!shortage.is_there(), "{:?} of {limit}", Usage::Process.read());
        drop(last);
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_stays_on_the_page_of_metrics() {
        let registry = Registry::new();
        let _watch = Watch::new(Some(1000), Shortage::default(), &registry).unwrap();
        let idle = Duration::from_secs(600);
        for _ in 0..3 {
            registry.retire(idle);
            tokio::time::advance(idle).await;
        }
        assert!(registry.render().contains("tulle_memory_limit_bytes 1000"));
    }

    #[tokio::test]
    async fn the_process_is_measured_against_a_limit_that_is_given() {
        for (limit, expected) in [(1, true), (u64::MAX, false)] {
            let registry = Registry::new();
            let shortage = Shortage::default();
            let watch = Watch::new(Some(limit), shortage.clone(), &registry).unwrap();
            assert!(watch.look().unwrap() > 1_000_000);
            assert_eq!(shortage.is_there(), expected);
            let shown = format!("tulle_memory_short {}", i64::from(expected));
            assert!(registry.render().contains(&shown), "{}", registry.render());
        }
    }
}
