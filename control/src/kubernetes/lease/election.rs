//! Leader election as a state machine without I/O.
//!
//! Clocks of different machines are never compared. A candidate measures the time since it saw the lease change. The
//! holder measures the time since it sent its last successful renewal. The timestamps in the lease are only
//! informative.

use std::time::Duration;

use tokio::time::Instant;

use crate::kubernetes::lease::timing::LeaseTiming;

/// The knowledge of one candidate about one lease.
pub(super) struct Election {
    own_identity: String,
    timing: LeaseTiming,
    /// The last known state of the lease.
    observed: Option<ObservedRecord>,
    /// The time at which the last successful read or write was sent.
    requested_at: Option<Instant>,
    /// The time at which the last successful renewal was sent. `None` while this candidate is not the holder.
    renewed_at: Option<Instant>,
}

/// The relevant fields of an existing lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Empty after a release.
    pub(super) holder: String,
    /// The resource version, which changes with every renewal.
    pub(super) version: String,
    /// Time after a renewal until other candidates can acquire the lease.
    pub(super) duration: Duration,
}

struct ObservedRecord {
    record: Record,
    /// The time from which the record's `duration` is counted.
    counted_from: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseDecision {
    /// The lease is free, expired, or held by this candidate.
    Acquire,
    /// Another candidate holds the lease.
    Wait,
}

impl Election {
    pub(super) fn new(own_identity: String, timing: LeaseTiming) -> Self {
        Self {
            own_identity,
            timing,
            observed: None,
            requested_at: None,
            renewed_at: None,
        }
    }

    /// Records the result of a read that was sent at `sent_at`; `record` is `None` if the lease does not exist.
    pub(super) fn observe(&mut self, record: Option<Record>, sent_at: Instant) -> LeaseDecision {
        let before = self.requested_at.replace(sent_at);
        let Some(record) = record else {
            self.observed = None;
            self.renewed_at = None;
            return LeaseDecision::Acquire;
        };
        if record.holder != self.own_identity {
            self.renewed_at = None;
        }
        if self.observed.as_ref().is_none_or(|seen| seen.record != record) {
            // The holder renewed between the previous request and this read. `duration` is counted from the previous request, but
            // from no earlier than one retry interval (with jitter) before this read. So a candidate can acquire the lease before
            // `duration` after the renewal has passed: earlier by this interval and `TAKEOVER_LEAD_TIME` at most. The holder has
            // stopped by then: it stops leading `renew_deadline` after the renewal.
            let earliest = sent_at - self.timing.retry_interval.mul_f64(1.0 + JITTER);
            self.observed = Some(ObservedRecord {
                record,
                counted_from: before.unwrap_or(sent_at).max(earliest),
            });
        }
        match self.takeover_at() {
            Some(free_at) if sent_at < free_at => LeaseDecision::Wait,
            _ => LeaseDecision::Acquire,
        }
    }

    /// Records a successful write that was sent at `sent_at`.
    pub(super) fn record_write(&mut self, record: Record, sent_at: Instant) {
        self.renewed_at = (record.holder == self.own_identity).then_some(sent_at);
        self.requested_at = Some(sent_at);
        self.observed = Some(ObservedRecord {
            record,
            counted_from: sent_at,
        });
    }

    pub(super) fn is_leading(&self, now: Instant) -> bool {
        self.leadership_ends_at().is_some_and(|end| now < end)
    }

    /// Returns the time at which leadership ends unless the lease is renewed.
    pub(super) fn leadership_ends_at(&self) -> Option<Instant> {
        Some(self.renewed_at? + self.timing.renew_deadline)
    }

    /// Returns the time of the next read or renewal, after an attempt at `tried_at`. `spread` is a random number from 0
    /// to 1, so that candidates do not send requests at the same time.
    pub(super) fn next_attempt_at(&self, tried_at: Instant, spread: f64) -> Instant {
        if let Some(renewed_at) = self.renewed_at {
            // A failed renewal is retried after the retry interval, which is at most the renew interval.
            let regular = renewed_at + self.timing.renew_interval;
            return if regular > tried_at {
                regular
            } else {
                tried_at + self.timing.retry_interval
            };
        }
        let next = tried_at + self.timing.retry_interval.mul_f64(1.0 + JITTER * spread);
        match self.takeover_at() {
            Some(free_at) if free_at > tried_at => next.min(free_at),
            _ => next,
        }
    }

    /// Returns the time from which this candidate may take over a lease that another candidate holds. `None` if the lease is free or
    /// held by this candidate.
    fn takeover_at(&self) -> Option<Instant> {
        let seen = self.observed.as_ref()?;
        if seen.record.holder.is_empty() || seen.record.holder == self.own_identity {
            return None;
        }
        Some(seen.counted_from + seen.record.duration.saturating_sub(TAKEOVER_LEAD_TIME))
    }
}

/// Maximum share of the retry interval that is added to it at random.
pub(super) const JITTER: f64 = 0.2;

/// Time before the expiry of the lease at which a candidate starts to acquire it, because its requests take time. A holder that
/// could not renew the lease has already stopped.
const TAKEOVER_LEAD_TIME: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY: Duration = Duration::from_secs(2);

    fn election(holder: &str) -> Election {
        Election::new(holder.to_owned(), LeaseTiming::FREQUENT)
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
        assert_eq!(election("a").observe(None, now), LeaseDecision::Acquire);
        assert_eq!(election("a").observe(record("", 1), now), LeaseDecision::Acquire);
        assert_eq!(election("a").observe(record("a", 1), now), LeaseDecision::Acquire);
        assert_eq!(election("a").observe(record("b", 1), now), LeaseDecision::Wait);
    }

    #[test]
    fn a_lease_that_is_renewed_is_never_taken() {
        let mut election = election("a");
        let mut now = Instant::now();
        for version in 0..100 {
            assert_eq!(
                election.observe(record("b", version), now),
                LeaseDecision::Wait,
                "{version}"
            );
            now = election.next_attempt_at(now, 0.5);
        }
    }

    #[test]
    fn a_lease_is_taken_within_its_duration_after_the_last_renewal() {
        for offset in 0..24 {
            let mut election = election("a");
            let start = Instant::now();
            // The holder renews at this time, between two reads of the candidate, and then fails.
            let renewed_at = start + Duration::from_millis(4800 + 100 * offset);
            let mut now = start;
            let taken_at = loop {
                let version = u32::from(now >= renewed_at);
                if election.observe(record("b", version), now) == LeaseDecision::Acquire {
                    break now;
                }
                now = election.next_attempt_at(now, 1.0);
            };
            let waited = taken_at - renewed_at;
            assert!(waited <= Duration::from_secs(30), "{waited:?}");
            // Long after the holder's renew deadline of 10 s, and after its requests in flight.
            assert!(waited >= Duration::from_secs(25), "{waited:?}");
        }
    }

    #[test]
    fn a_change_after_a_long_silence_counts_from_one_retry_interval_before_it_was_seen() {
        let mut election = election("a");
        let now = Instant::now();
        election.observe(record("b", 1), now);
        let later = now + Duration::from_secs(29);
        assert_eq!(election.observe(record("b", 2), later), LeaseDecision::Wait);
        assert_eq!(
            election.observe(record("b", 2), later + Duration::from_secs(26)),
            LeaseDecision::Wait
        );
    }

    #[test]
    fn a_holder_that_cannot_renew_stops_long_before_others_take_the_lease() {
        let mut election = election("a");
        let sent_at = Instant::now();
        election.observe(None, sent_at);
        election.record_write(record("a", 1).unwrap(), sent_at);
        assert!(election.is_leading(sent_at + Duration::from_millis(9_999)));
        assert!(!election.is_leading(sent_at + Duration::from_secs(10)));
        assert_eq!(election.next_attempt_at(sent_at, 1.0), sent_at + RETRY);
        // A failed renewal is retried after the retry interval.
        assert_eq!(
            election.next_attempt_at(sent_at + Duration::from_secs(3), 1.0),
            sent_at + Duration::from_secs(5)
        );
    }

    #[test]
    fn a_holder_that_sees_another_holder_stops_immediately() {
        let mut election = election("a");
        let now = Instant::now();
        election.record_write(record("a", 1).unwrap(), now);
        assert_eq!(election.observe(record("b", 2), now + RETRY), LeaseDecision::Wait);
        assert!(!election.is_leading(now + RETRY));
        let gone = now + RETRY;
        election.record_write(record("a", 3).unwrap(), gone);
        assert_eq!(
            election.observe(None, gone),
            LeaseDecision::Acquire,
            "another client deleted the lease"
        );
        assert!(!election.is_leading(gone));
    }
}
