//! A queue of names to work on: each at most once, failures again and again with growing pauses.
//!
//! Pure: it is given the time. One worker takes a name, works, and says how it ended.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use ahash::{AHashMap, AHashSet};
use tokio::time::Instant;

use crate::resources::meta::Name;

#[derive(Default)]
pub(super) struct Queue {
    /// Names that can be taken, with the time at which they were added.
    waiting: VecDeque<(Name, Instant)>,
    queued: AHashSet<Name>,
    /// Names that wait for their pause to end.
    delayed: BTreeMap<Instant, BTreeSet<Name>>,
    failures: AHashMap<Name, u32>,
    bucket: Bucket,
}

/// What becomes of a name whose work failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failed {
    /// It is tried again after a pause, for the nth time.
    Again(u32),
    /// It has failed too often, and waits for the next change.
    Dropped,
}

/// Retries of all names together: a burst, and then so many a second.
#[derive(Default)]
struct Bucket {
    /// When the next retry would be free of any wait if there were no burst.
    next_at: Option<Instant>,
}

impl Queue {
    /// Adds a name, and tells whether it was not there already.
    pub(super) fn add(&mut self, name: Name, now: Instant) -> bool {
        if !self.queued.insert(name.clone()) {
            return false;
        }
        self.waiting.push_back((name, now));
        true
    }

    /// The next name, and how long it has waited. What is added while it is worked on is taken again later.
    pub(super) fn take(&mut self, now: Instant) -> Option<(Name, Duration)> {
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

    /// When a pause ends next.
    pub(super) fn next_at(&self) -> Option<Instant> {
        self.delayed.keys().next().copied()
    }

    pub(super) fn succeeded(&mut self, name: &Name) {
        self.failures.remove(name);
    }

    pub(super) fn failed(&mut self, name: Name, now: Instant) -> Failed {
        let failures = self.failures.entry(name.clone()).or_default();
        if *failures >= MAX_RETRIES {
            self.failures.remove(&name);
            return Failed::Dropped;
        }
        let pause = MIN_PAUSE.saturating_mul(1 << *failures).min(MAX_PAUSE);
        *failures += 1;
        let n = *failures;
        let at = (now + pause).max(self.bucket.take(now));
        self.delayed.entry(at).or_default().insert(name);
        Failed::Again(n)
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

impl Bucket {
    /// When a retry that is asked for now may run.
    fn take(&mut self, now: Instant) -> Instant {
        let full_since = now.checked_sub(RETRY_INTERVAL * RETRY_BURST).unwrap_or(now);
        let next_at = self.next_at.unwrap_or(full_since).max(full_since);
        self.next_at = Some(next_at + RETRY_INTERVAL);
        next_at.max(now)
    }
}

/// The limits of controllers in Kubernetes: pauses of 5 ms to 1000 s, 10 retries a second after a burst of 100.
const MIN_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_secs(1000);
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
const RETRY_BURST: u32 = 100;

/// The last pause is 82 s, so that a name is given up after three minutes.
pub(super) const MAX_RETRIES: u32 = 15;

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> Name {
        Name::new("ns", name)
    }

    #[test]
    fn a_name_is_queued_once_and_taken_in_order() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        assert!(queue.add(name("a"), now));
        assert!(queue.add(name("b"), now));
        assert!(!queue.add(name("a"), now));
        let later = now + Duration::from_secs(1);
        assert_eq!(queue.take(later), Some((name("a"), Duration::from_secs(1))));
        assert!(queue.add(name("a"), later), "while it is worked on");
        assert_eq!(queue.take(later).unwrap().0, name("b"));
        assert_eq!(queue.take(later), Some((name("a"), Duration::ZERO)));
        assert_eq!(queue.take(later), None);
    }

    #[test]
    fn failures_pause_longer_each_time_and_are_dropped_after_fifteen_retries() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        let mut pauses = Vec::new();
        for retry in 1..=MAX_RETRIES {
            assert_eq!(queue.failed(name("a"), now), Failed::Again(retry));
            let at = queue.next_at().unwrap();
            pauses.push((at - now).as_millis());
            assert_eq!(queue.take(at - Duration::from_millis(1)), None);
            assert_eq!(queue.take(at).unwrap().0, name("a"));
            now = at;
        }
        assert_eq!(pauses[..4], [5, 10, 20, 40]);
        assert_eq!(pauses[14], 81_920);
        assert_eq!(queue.failed(name("a"), now), Failed::Dropped);
        assert_eq!(queue.next_at(), None);
        assert_eq!(
            queue.failed(name("a"), now),
            Failed::Again(1),
            "a new change starts over"
        );
        queue.succeeded(&name("a"));
        assert_eq!(queue.failed(name("a"), now), Failed::Again(1));
    }

    #[test]
    fn retries_of_many_names_are_spread() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for n in 0..150 {
            queue.failed(name(&n.to_string()), now);
        }
        let soon = now + Duration::from_millis(6);
        let mut n_soon = 0;
        while queue.take(soon).is_some() {
            n_soon += 1;
        }
        assert!((100..=102).contains(&n_soon), "{n_soon}");
        let mut at = soon;
        while let Some(next) = queue.next_at() {
            at = next;
            while queue.take(at).is_some() {}
        }
        let last = at - now;
        assert!((4..=6).contains(&last.as_secs()), "{last:?}");
    }
}
