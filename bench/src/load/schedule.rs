//! The schedule of requests: when each one is due, and how many there are. Pure arithmetic on the time since the start.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Hands out requests to the workers of a run.
///
/// Open loop: request `n` is due `n / rate` seconds after the start, independent of earlier requests. A late worker sends
/// immediately, and the latency counts from the due time, so the delay of a stalled server is part of every affected request.
/// Closed loop: a request is due as soon as a worker is free.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Requests per second; `None` in a closed loop.
    rate: Option<f64>,
    requests: u64,
    next: AtomicU64,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ScheduledRequest {
    Now,
    /// Due at this time after the start.
    At(Duration),
}

impl Schedule {
    /// `rate` is in requests per second; `None` is a closed loop. The run ends after `duration` or `requests`.
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

    /// The next request, or `None` if all have been handed out.
    pub(super) fn next_request(&self) -> Option<ScheduledRequest> {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        if n >= self.requests {
            return None;
        }
        Some(match self.rate {
            Some(rate) => ScheduledRequest::At(Duration::from_nanos((n as f64 * 1e9 / rate).round() as u64)),
            None => ScheduledRequest::Now,
        })
    }

    /// Number of requests that were due before `elapsed` and have not been handed out.
    pub(super) fn n_unsent(&self, elapsed: Duration) -> u64 {
        let Some(rate) = self.rate else { return 0 };
        due_within(rate, elapsed)
            .min(self.requests)
            .saturating_sub(self.next.load(Ordering::Relaxed))
    }
}

/// Number of requests due before `elapsed`. A request that is due at `elapsed` itself, within rounding, is not counted.
fn due_within(rate: f64, elapsed: Duration) -> u64 {
    (rate * elapsed.as_secs_f64() - ROUNDING).ceil().max(0.0) as u64
}

const ROUNDING: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(schedule: &Schedule) -> Vec<ScheduledRequest> {
        std::iter::from_fn(|| schedule.next_request()).collect()
    }

    #[test]
    fn open_loop_requests_are_due_at_fixed_times() {
        let schedule = Schedule::new(Some(4.0), None, Some(Duration::from_secs(1)));
        let expected = [0, 250, 500, 750].map(|ms| ScheduledRequest::At(Duration::from_millis(ms)));
        assert_eq!(claims(&schedule), expected);
    }

    #[test]
    fn rates_that_do_not_divide_a_second_keep_the_number_of_requests() {
        for rate in [3.0, 7.0, 300.0, 999.0, 1e6 / 3.0] {
            let schedule = Schedule::new(Some(rate), None, Some(Duration::from_secs(3)));
            assert_eq!(claims(&schedule).len() as u64, (rate * 3.0).round() as u64, "{rate}");
        }
    }

    #[test]
    fn the_request_limit_ends_both_loops() {
        assert_eq!(claims(&Schedule::new(None, Some(3), None)), [ScheduledRequest::Now; 3]);
        assert_eq!(
            claims(&Schedule::new(Some(1000.0), Some(2), Some(Duration::from_secs(9)))).len(),
            2
        );
    }

    #[test]
    fn requests_that_were_due_but_never_sent_are_counted() {
        let schedule = Schedule::new(Some(100.0), None, Some(Duration::from_secs(1)));
        for _ in 0..30 {
            schedule.next_request();
        }
        assert_eq!(schedule.n_unsent(Duration::from_millis(250)), 0);
        assert_eq!(schedule.n_unsent(Duration::from_millis(500)), 20);
        assert_eq!(schedule.n_unsent(Duration::from_secs(7)), 70);
    }

    #[test]
    fn a_finished_schedule_has_no_unsent_requests() {
        let schedule = Schedule::new(Some(100.0), Some(10), None);
        claims(&schedule);
        assert_eq!(schedule.n_unsent(Duration::from_secs(60)), 0);
        assert_eq!(Schedule::new(None, Some(10), None).n_unsent(Duration::from_secs(60)), 0);
    }
}
