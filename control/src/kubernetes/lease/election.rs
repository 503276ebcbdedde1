//! Who may hold a lease and when: the rules of leader election as a state machine without I/O.
//!
//! Clocks of machines are never compared. A candidate counts from when it saw the lease change, on its own clock; the
//! holder counts from when it sent its last successful renewal, on its own. The timestamps in the lease are for people.

use std::time::Duration;

use tokio::time::Instant;

use crate::kubernetes::lease::Timing;

/// One candidate's view of one lease.
pub(super) struct Election {
    holder: String,
    timing: Timing,
    /// The lease as it was seen last.
    seen: Option<Seen>,
    /// When the last successful look or write was sent.
    asked_at: Option<Instant>,
    /// When the renewal that leadership rests on was sent; none while another leads.
    renewed_at: Option<Instant>,
}

/// What matters of a lease that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Empty when it was released.
    pub(super) holder: String,
    /// Changes with every renewal.
    pub(super) version: String,
    /// How long its holder asks others to wait.
    pub(super) duration: Duration,
}

struct Seen {
    record: Record,
    /// A time at which it had not been renewed since.
    unchanged_since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The lease is free, expired, or ours already.
    Take,
    /// Another holds it.
    Wait,
}

impl Election {
    pub(super) fn new(holder: String, timing: Timing) -> Self {
        Self {
            holder,
            timing,
            seen: None,
            asked_at: None,
            renewed_at: None,
        }
    }

    /// Takes note of the lease that was asked for at `asked_at`; none if there is none.
    pub(super) fn observe(&mut self, record: Option<Record>, asked_at: Instant) -> Verdict {
        let before = self.asked_at.replace(asked_at);
        let Some(record) = record else {
            self.seen = None;
            self.renewed_at = None;
            return Verdict::Take;
        };
        if record.holder != self.holder {
            self.renewed_at = None;
        }
        if self.seen.as_ref().is_none_or(|seen| seen.record != record) {
            // It changed after the look before this one. Counting from there, and not from now, makes up for the time
            // between two looks; it is bounded, because after a long silence it would say nothing about the holder.
            let earliest = asked_at - self.timing.retry_interval.mul_f64(1.0 + JITTER);
            self.seen = Some(Seen {
                record,
                unchanged_since: before.unwrap_or(asked_at).max(earliest),
            });
        }
        match self.free_at() {
            Some(free_at) if asked_at < free_at => Verdict::Wait,
            _ => Verdict::Take,
        }
    }

    /// Takes note of a write of ours, sent at `sent_at`, that made the lease what it is now.
    pub(super) fn wrote(&mut self, record: Record, sent_at: Instant) {
        self.renewed_at = (record.holder == self.holder).then_some(sent_at);
        self.asked_at = Some(sent_at);
        self.seen = Some(Seen {
            record,
            unchanged_since: sent_at,
        });
    }

    pub(super) fn is_leading(&self, now: Instant) -> bool {
        self.leads_until().is_some_and(|end| now < end)
    }

    /// When leadership ends unless it is renewed before.
    pub(super) fn leads_until(&self) -> Option<Instant> {
        Some(self.renewed_at? + self.timing.renew_deadline)
    }

    /// When to ask or to renew next, after an attempt at `tried_at`; `spread`, from 0 to 1, keeps candidates apart.
    pub(super) fn next_at(&self, tried_at: Instant, spread: f64) -> Instant {
        if let Some(renewed_at) = self.renewed_at {
            // After a failure there is no point in waiting for the next regular turn.
            let regular = renewed_at + self.timing.renew_interval;
            return if regular > tried_at {
                regular
            } else {
                tried_at + self.timing.retry_interval
            };
        }
        let next = tried_at + self.timing.retry_interval.mul_f64(1.0 + JITTER * spread);
        match self.free_at() {
            Some(free_at) if free_at > tried_at => next.min(free_at),
            _ => next,
        }
    }

    /// When a candidate that is not the holder may take the lease; none if it may at once.
    fn free_at(&self) -> Option<Instant> {
        let seen = self.seen.as_ref()?;
        if seen.record.holder.is_empty() || seen.record.holder == self.holder {
            return None;
        }
        Some(seen.unchanged_since + seen.record.duration.saturating_sub(HASTE))
    }
}

/// How much of the retry interval candidates are spread over.
pub(super) const JITTER: f64 = 0.2;

/// Asking and writing take time too, and a lease is to be in new hands when its duration is over. A holder that could not
/// renew has stopped long before.
const HASTE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY: Duration = Duration::from_secs(2);

    fn election(holder: &str) -> Election {
        Election::new(holder.to_owned(), Timing::FREQUENT)
    }

    fn record(holder: &str, version: u32) -> Option<Record> {
        Some(Record {
            holder: holder.to_owned(),
            version: version.to_string(),
            duration: Duration::from_secs(30),
        })
    }

    #[test]
    fn a_lease_that_is_absent_released_or_ours_is_taken_at_once() {
        let now = Instant::now();
        assert_eq!(election("a").observe(None, now), Verdict::Take);
        assert_eq!(election("a").observe(record("", 1), now), Verdict::Take);
        assert_eq!(election("a").observe(record("a", 1), now), Verdict::Take);
        assert_eq!(election("a").observe(record("b", 1), now), Verdict::Wait);
    }

    #[test]
    fn a_lease_that_is_renewed_is_never_taken() {
        let mut election = election("a");
        let mut now = Instant::now();
        for version in 0..100 {
            assert_eq!(election.observe(record("b", version), now), Verdict::Wait, "{version}");
            now = election.next_at(now, 0.5);
        }
    }

    #[test]
    fn a_lease_is_taken_within_its_duration_after_the_last_renewal() {
        for offset in 0..24 {
            let mut election = election("a");
            let start = Instant::now();
            // The holder renews at this time, somewhere between two looks, and dies.
            let renewed_at = start + Duration::from_millis(4800 + 100 * offset);
            let mut now = start;
            let taken_at = loop {
                let version = u32::from(now >= renewed_at);
                if election.observe(record("b", version), now) == Verdict::Take {
                    break now;
                }
                now = election.next_at(now, 1.0);
            };
            let waited = taken_at - renewed_at;
            assert!(waited <= Duration::from_secs(30), "{waited:?}");
            // The dead holder's own deadline, and time to spare for what it had under way.
            assert!(waited >= Duration::from_secs(25), "{waited:?}");
        }
    }

    #[test]
    fn a_change_after_a_long_silence_counts_from_when_it_was_seen() {
        let mut election = election("a");
        let now = Instant::now();
        election.observe(record("b", 1), now);
        let later = now + Duration::from_secs(29);
        assert_eq!(election.observe(record("b", 2), later), Verdict::Wait);
        assert_eq!(
            election.observe(record("b", 2), later + Duration::from_secs(26)),
            Verdict::Wait
        );
    }

    #[test]
    fn a_holder_that_cannot_renew_stops_long_before_others_take_the_lease() {
        let mut election = election("a");
        let sent_at = Instant::now();
        election.observe(None, sent_at);
        election.wrote(record("a", 1).unwrap(), sent_at);
        assert!(election.is_leading(sent_at + Duration::from_millis(9_999)));
        assert!(!election.is_leading(sent_at + Duration::from_secs(10)));
        assert_eq!(election.next_at(sent_at, 1.0), sent_at + RETRY);
        // A renewal that failed is tried again after the retry interval.
        assert_eq!(
            election.next_at(sent_at + Duration::from_secs(3), 1.0),
            sent_at + Duration::from_secs(5)
        );
    }

    #[test]
    fn a_holder_that_sees_another_in_its_place_stops_at_once() {
        let mut election = election("a");
        let now = Instant::now();
        election.wrote(record("a", 1).unwrap(), now);
        assert_eq!(election.observe(record("b", 2), now + RETRY), Verdict::Wait);
        assert!(!election.is_leading(now + RETRY));
        let gone = now + RETRY;
        election.wrote(record("a", 3).unwrap(), gone);
        assert_eq!(election.observe(None, gone), Verdict::Take, "somebody deleted it");
        assert!(!election.is_leading(gone));
    }
}
