//! A queue of names for one worker. Each name is queued at most once, and failures are retried with backoff.
//!
//! It has no clock: callers pass the time. The worker takes a name, processes it and records the result.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use ahash::{AHashMap, AHashSet};
use tokio::time::Instant;

use crate::resources::meta::NamespacedName;

#[derive(Default)]
pub(super) struct WorkQueue {
    /// Names that are ready, with the time when they were added.
    waiting: VecDeque<(NamespacedName, Instant)>,
    queued: AHashSet<NamespacedName>,
    /// Names in backoff, by the end of their delay.
    delayed: BTreeMap<Instant, BTreeSet<NamespacedName>>,
    failures: AHashMap<NamespacedName, u32>,
    limiter: RetryLimiter,
}

/// What happens to a name whose reconciliation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureOutcome {
    /// It is retried after a delay. The value is the number of the retry.
    Retry(u32),
    /// It has failed too often and is queued again only by the next change or resync.
    Dropped,
}

/// Limits the rate of the retries of all names, by the generic cell rate algorithm: a token bucket that stores one time.
#[derive(Default)]
struct RetryLimiter {
    /// The earliest time of the next retry at the steady rate. It can lie in the past; `reserve` counts at most one burst of unused
    /// retries.
    next_slot_at: Option<Instant>,
}

impl WorkQueue {
    /// Adds a name. Returns false if it is already queued.
    pub(super) fn add(&mut self, name: NamespacedName, now: Instant) -> bool {
        if !self.queued.insert(name.clone()) {
            return false;
        }
        self.waiting.push_back((name, now));
        true
    }

    /// Takes the next name. Also returns how long it has waited. A name that is added during its processing is queued
    /// again.
    pub(super) fn pop(&mut self, now: Instant) -> Option<(NamespacedName, Duration)> {
        while let Some(entry) = self.delayed.first_entry()
            && *entry.key() <= now
        {
            for name in entry.remove() {
                self.add(name, now);
            }
        }
        let (name, added_at) = self.waiting.pop_front()?;
        self.queued.remove(&name);
        Some((name, now.saturating_duration_since(added_at)))
    }

    /// Returns when the next delay ends.
    pub(super) fn next_retry_at(&self) -> Option<Instant> {
        self.delayed.keys().next().copied()
    }

    pub(super) fn record_success(&mut self, name: &NamespacedName) {
        self.failures.remove(name);
    }

    pub(super) fn record_failure(&mut self, name: NamespacedName, now: Instant) -> FailureOutcome {
        let failures = self.failures.entry(name.clone()).or_default();
        if *failures >= MAX_RETRIES {
            self.failures.remove(&name);
            return FailureOutcome::Dropped;
        }
        let delay = MIN_RETRY_DELAY.saturating_mul(1 << *failures).min(MAX_RETRY_DELAY);
        *failures += 1;
        let n = *failures;
        let retry_at = (now + delay).max(self.limiter.reserve(now));
        self.delayed.entry(retry_at).or_default().insert(name);
        FailureOutcome::Retry(n)
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

impl RetryLimiter {
    /// Reserves a retry. Returns when it can run.
    fn reserve(&mut self, now: Instant) -> Instant {
        // Unused retries are saved up to one burst.
        let earliest = now.checked_sub(RETRY_INTERVAL * RETRY_BURST).unwrap_or(now);
        let slot_at = self.next_slot_at.unwrap_or(earliest).max(earliest);
        self.next_slot_at = Some(slot_at + RETRY_INTERVAL);
        slot_at.max(now)
    }
}

/// The limits of Kubernetes controllers: backoff from 5 ms to 1000 s, 10 retries per second after a burst of 100.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(5);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1000);
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
const RETRY_BURST: u32 = 100;

/// Maximum number of retries of a name. The last delay is 82 s, less than `MAX_RETRY_DELAY`, so a name is dropped after about
/// three minutes.
pub(super) const MAX_RETRIES: u32 = 15;

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> NamespacedName {
        NamespacedName::new("ns", name)
    }

    #[test]
    fn a_name_is_queued_once_and_taken_in_order() {
        let (mut queue, now) = (WorkQueue::default(), Instant::now());
        assert!(queue.add(name("a"), now));
        assert!(queue.add(name("b"), now));
        assert!(!queue.add(name("a"), now));
        let later = now + Duration::from_secs(1);
        assert_eq!(queue.pop(later), Some((name("a"), Duration::from_secs(1))));
        assert!(queue.add(name("a"), later), "during its processing");
        assert_eq!(queue.pop(later).unwrap().0, name("b"));
        assert_eq!(queue.pop(later), Some((name("a"), Duration::ZERO)));
        assert_eq!(queue.pop(later), None);
    }

    #[test]
    fn failures_back_off_exponentially_and_are_dropped_after_fifteen_retries() {
        let (mut queue, mut now) = (WorkQueue::default(), Instant::now());
        let mut delays = Vec::new();
        for retry in 1..=MAX_RETRIES {
            assert_eq!(queue.record_failure(name("a"), now), FailureOutcome::Retry(retry));
            let retry_at = queue.next_retry_at().unwrap();
            delays.push((retry_at - now).as_millis());
            assert_eq!(queue.pop(retry_at - Duration::from_millis(1)), None);
            assert_eq!(queue.pop(retry_at).unwrap().0, name("a"));
            now = retry_at;
        }
        assert_eq!(delays[..4], [5, 10, 20, 40]);
        assert_eq!(delays[14], 81_920);
        assert_eq!(queue.record_failure(name("a"), now), FailureOutcome::Dropped);
        assert_eq!(queue.next_retry_at(), None);
        assert_eq!(
            queue.record_failure(name("a"), now),
            FailureOutcome::Retry(1),
            "a new change starts over"
        );
        queue.record_success(&name("a"));
        assert_eq!(queue.record_failure(name("a"), now), FailureOutcome::Retry(1));
    }

    #[test]
    fn retries_of_many_names_are_spread() {
        let (mut queue, now) = (WorkQueue::default(), Instant::now());
        for n in 0..150 {
            queue.record_failure(name(&n.to_string()), now);
        }
        let soon = now + Duration::from_millis(6);
        let mut n_due = 0;
        while queue.pop(soon).is_some() {
            n_due += 1;
        }
        assert!((100..=102).contains(&n_due), "{n_due}");
        let mut last_retry_at = soon;
        while let Some(retry_at) = queue.next_retry_at() {
            last_retry_at = retry_at;
            while queue.pop(retry_at).is_some() {}
        }
        let longest_delay = last_retry_at - now;
        assert!((4..=6).contains(&longest_delay.as_secs()), "{longest_delay:?}");
    }
}
