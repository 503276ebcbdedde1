//! When each request is due, and how many there are; pure arithmetic over the time since the start.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Hands out requests to the workers of a run.
///
/// Open loop: request `n` is due `n / rate` after the start, whatever happened to the ones before.
/// A worker that is late sends at once and its latency counts from the time due, so a stalled server is charged for everything
/// it held up.
/// Closed loop: every request is due when a worker is free.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Requests per second.
    rate: Option<f64>,
    requests: u64,
    next: AtomicU64,
}

/// One request to be sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Ticket {
    /// At once.
    Now,
    /// At this time after the start.
    At(Duration),
}

impl Schedule {
    /// `rate` in requests per second; `None` is a closed loop. The run ends after `duration` or `requests`.
    pub(super) fn new(rate: Option<f64>, requests: Option<u64>, duration: Option<Duration>) -> Self {
        let in_time = match (rate, duration) {
            (Some(rate), Some(duration)) => due_within(rate, duration),
            _ => u64::MAX,
        };
        Self {
            rate,
            requests: requests.unwrap_or(u64::MAX).min(in_time),
            next: AtomicU64::new(0),
        }
    }

    /// The next request, or `None` when all have been handed out.
    pub(super) fn claim(&self) -> Option<Ticket> {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        if n >= self.requests {
            return None;
        }
        Some(match self.rate {
            Some(rate) => Ticket::At(Duration::from_nanos((n as f64 * 1e9 / rate).round() as u64)),
            None => Ticket::Now,
        })
    }

    /// How many requests were due before `elapsed` and have not been handed out to anyone.
    pub(super) fn unclaimed(&self, elapsed: Duration) -> u64 {
        let Some(rate) = self.rate else { return 0 };
        due_within(rate, elapsed)
            .min(self.requests)
            .saturating_sub(self.next.load(Ordering::Relaxed))
    }
}

/// How many requests are due before `elapsed`. The one that is due at the end itself, give or take rounding, is not among them.
fn due_within(rate: f64, elapsed: Duration) -> u64 {
    (rate * elapsed.as_secs_f64() - ROUNDING).ceil().max(0.0) as u64
}

const ROUNDING: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(schedule: &Schedule) -> Vec<Ticket> {
        std::iter::from_fn(|| schedule.claim()).collect()
    }

    #[test]
    fn open_loop_requests_are_due_at_fixed_times() {
        let schedule = Schedule::new(Some(4.0), None, Some(Duration::from_secs(1)));
        let expected = [0, 250, 500, 750].map(|ms| Ticket::At(Duration::from_millis(ms)));
        assert_eq!(claims(&schedule), expected);
    }

    #[test]
    fn rates_that_do_not_divide_a_second_lose_and_add_nothing() {
        for rate in [3.0, 7.0, 300.0, 999.0, 1e6 / 3.0] {
            let schedule = Schedule::new(Some(rate), None, Some(Duration::from_secs(3)));
            assert_eq!(claims(&schedule).len() as u64, (rate * 3.0).round() as u64, "{rate}");
        }
    }

    #[test]
    fn the_request_limit_ends_both_loops() {
        assert_eq!(claims(&Schedule::new(None, Some(3), None)), [Ticket::Now; 3]);
        assert_eq!(
            claims(&Schedule::new(Some(1000.0), Some(2), Some(Duration::from_secs(9)))).len(),
            2
        );
    }

    #[test]
    fn requests_that_were_due_but_never_sent_are_counted() {
        let schedule = Schedule::new(Some(100.0), None, Some(Duration::from_secs(1)));
        for _ in 0..30 {
            schedule.claim();
        }
        assert_eq!(schedule.unclaimed(Duration::from_millis(250)), 0);
        assert_eq!(schedule.unclaimed(Duration::from_millis(500)), 20);
        assert_eq!(schedule.unclaimed(Duration::from_secs(7)), 70);
    }

    #[test]
    fn a_finished_schedule_has_nothing_unclaimed() {
        let schedule = Schedule::new(Some(100.0), Some(10), None);
        claims(&schedule);
        assert_eq!(schedule.unclaimed(Duration::from_secs(60)), 0);
        assert_eq!(
            Schedule::new(None, Some(10), None).unclaimed(Duration::from_secs(60)),
            0
        );
    }
}
