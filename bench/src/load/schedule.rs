//! The schedule of requests: when each one is due, and how many there are. Pure arithmetic on the time since the start.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::ensure;

use super::args::Arrivals;

/// Hands out requests to the workers of a run.
///
/// Open loop: each request is due at its time after the start, independent of earlier requests. A late worker sends
/// immediately. The latency counts from the due time, so it includes the delay that a stalled server causes.
/// Closed loop: a request is due as soon as a worker is free.
#[derive(Debug)]
pub(super) struct Schedule {
    /// `None` in a closed loop.
    due_times: Option<DueTimes>,
    requests: u64,
    next: AtomicU64,
}

/// The due times of an open loop.
#[derive(Debug)]
enum DueTimes {
    /// In groups of this size, at this rate of requests per second.
    Regular { rate: f64, group: u64 },
    /// In nanoseconds, ascending.
    Random(Vec<u64>),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ScheduledRequest {
    Now,
    /// Due at this time after the start.
    At(Duration),
}

impl Schedule {
    /// `rate` is in requests per second; `None` is a closed loop. The run ends after `duration` or `requests`.
    ///
    /// # Errors
    /// If more than [`MAX_RANDOM_REQUESTS`] would be due at random times.
    pub(super) fn new(
        rate: Option<(f64, Arrivals)>,
        requests: Option<u64>,
        duration: Option<Duration>,
    ) -> anyhow::Result<Self> {
        let limit = requests.unwrap_or(u64::MAX);
        let due_times = rate.map(|(rate, arrivals)| match arrivals {
            Arrivals::Fixed => Ok(DueTimes::Regular { rate, group: 1 }),
            Arrivals::Bursts => Ok(DueTimes::Regular {
                rate,
                group: BURST_SIZE,
            }),
            Arrivals::Poisson => DueTimes::random(rate, limit, duration),
        });
        let due_times = due_times.transpose()?;
        let n_due_in_run = match (&due_times, duration) {
            (Some(due_times), Some(duration)) => due_times.n_due_before(duration),
            _ => u64::MAX,
        };
        Ok(Self {
            due_times,
            requests: limit.min(n_due_in_run),
            next: AtomicU64::new(0),
        })
    }

    /// The next request, or `None` if all have been handed out.
    pub(super) fn next_request(&self) -> Option<ScheduledRequest> {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        if n >= self.requests {
            return None;
        }
        match &self.due_times {
            Some(due_times) => Some(ScheduledRequest::At(due_times.due_time(n)?)),
            None => Some(ScheduledRequest::Now),
        }
    }

    /// Number of requests that were due before `elapsed` and have not been handed out.
    pub(super) fn n_unsent(&self, elapsed: Duration) -> u64 {
        let Some(due_times) = &self.due_times else { return 0 };
        due_times
            .n_due_before(elapsed)
            .min(self.requests)
            .saturating_sub(self.next.load(Ordering::Relaxed))
    }
}

impl DueTimes {
    /// Due times with exponentially distributed intervals. The seed is fixed, so runs with the same rate have the same due times.
    /// All are computed in advance, until `limit` or `duration` is reached.
    fn random(rate: f64, limit: u64, duration: Option<Duration>) -> anyhow::Result<Self> {
        let end = duration.map_or(f64::INFINITY, |duration| duration.as_secs_f64());
        let expected = (rate * end).min(limit as f64);
        ensure!(
            expected <= MAX_RANDOM_REQUESTS,
            "--arrivals poisson computes the times of all {expected:.0} requests before the run, and at most \
             {MAX_RANDOM_REQUESTS} are possible; give a smaller --rate, --duration or --requests"
        );
        let mut random = fastrand::Rng::with_seed(1);
        let mut at = 0.0;
        let mut due = Vec::new();
        while at < end && (due.len() as u64) < limit {
            due.push((at * 1e9).round() as u64);
            at += exponential(&mut random) / rate;
        }
        Ok(Self::Random(due))
    }

    /// The due time of request `n`; `None` after the end of a random schedule.
    fn due_time(&self, n: u64) -> Option<Duration> {
        let nanos = match self {
            Self::Regular { rate, group } => ((n - n % group) as f64 * 1e9 / rate).round() as u64,
            Self::Random(due) => *due.get(usize::try_from(n).ok()?)?,
        };
        Some(Duration::from_nanos(nanos))
    }

    /// Number of requests due before `elapsed`, without a request that is due exactly at `elapsed` (within rounding).
    fn n_due_before(&self, elapsed: Duration) -> u64 {
        match self {
            Self::Regular { rate, group } => {
                let groups = (rate * elapsed.as_secs_f64() / *group as f64 - ROUNDING_TOLERANCE)
                    .ceil()
                    .max(0.0) as u64;
                groups * group
            }
            Self::Random(due) => due.partition_point(|at| u128::from(*at) < elapsed.as_nanos()) as u64,
        }
    }
}

/// A random number of the exponential distribution with mean 1.
pub(super) fn exponential(random: &mut fastrand::Rng) -> f64 {
    -(1.0 - random.f64()).ln()
}

/// Number of requests that [`Arrivals::Bursts`] sends at once.
const BURST_SIZE: u64 = 50;
/// Maximum expected number of requests at random times. Each needs 8 bytes.
const MAX_RANDOM_REQUESTS: f64 = 1e7;
const ROUNDING_TOLERANCE: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use super::*;

    fn open_loop(rate: f64, arrivals: Arrivals, seconds: u64) -> Schedule {
        Schedule::new(Some((rate, arrivals)), None, Some(Duration::from_secs(seconds))).unwrap()
    }

    fn all_requests(schedule: &Schedule) -> Vec<ScheduledRequest> {
        std::iter::from_fn(|| schedule.next_request()).collect()
    }

    #[test]
    fn open_loop_requests_are_due_at_fixed_times() {
        let schedule = open_loop(4.0, Arrivals::Fixed, 1);
        let expected = [0, 250, 500, 750].map(|ms| ScheduledRequest::At(Duration::from_millis(ms)));
        assert_eq!(all_requests(&schedule), expected);
    }

    #[test]
    fn a_rate_whose_interval_is_not_a_whole_number_gives_the_expected_number_of_requests() {
        for rate in [3.0, 7.0, 300.0, 999.0, 1e6 / 3.0] {
            let schedule = open_loop(rate, Arrivals::Fixed, 3);
            assert_eq!(
                all_requests(&schedule).len() as u64,
                (rate * 3.0).round() as u64,
                "{rate}"
            );
        }
    }

    #[test]
    fn bursts_are_due_at_once_and_keep_the_rate() {
        let schedule = open_loop(100.0, Arrivals::Bursts, 2);
        let due = all_requests(&schedule);
        assert_eq!(due.len(), 200);
        assert_eq!(due[49], ScheduledRequest::At(Duration::ZERO));
        assert_eq!(due[50], ScheduledRequest::At(Duration::from_millis(500)));
        assert_eq!(due[199], ScheduledRequest::At(Duration::from_millis(1500)));
    }

    #[test]
    fn random_arrivals_keep_the_rate_and_are_the_same_in_each_run() {
        let schedule = || open_loop(1000.0, Arrivals::Poisson, 20);
        let due = all_requests(&schedule());
        assert!((19_000..21_000).contains(&due.len()), "{}", due.len());
        assert_eq!(due, all_requests(&schedule()));
        assert_eq!(schedule().n_unsent(Duration::from_secs(20)), due.len() as u64);
    }

    #[test]
    fn the_request_limit_applies_to_open_and_closed_loops() {
        assert_eq!(
            all_requests(&Schedule::new(None, Some(3), None).unwrap()),
            [ScheduledRequest::Now; 3]
        );
        for arrivals in [Arrivals::Fixed, Arrivals::Poisson] {
            let schedule = Schedule::new(Some((1000.0, arrivals)), Some(2), Some(Duration::from_secs(9)));
            assert_eq!(all_requests(&schedule.unwrap()).len(), 2, "{arrivals:?}");
        }
    }

    #[test]
    fn a_random_schedule_that_is_too_long_is_refused() {
        let schedule = |requests, seconds: Option<u64>| {
            Schedule::new(
                Some((1e6, Arrivals::Poisson)),
                requests,
                seconds.map(Duration::from_secs),
            )
        };
        for (requests, seconds) in [(None, Some(60)), (Some(20_000_000), None), (None, None)] {
            let error = schedule(requests, seconds).unwrap_err().to_string();
            assert!(error.contains("at most 10000000"), "{error}");
        }
        assert_eq!(all_requests(&schedule(Some(3), Some(60)).unwrap()).len(), 3);
    }

    #[test]
    fn requests_that_were_due_but_never_sent_are_counted() {
        let schedule = open_loop(100.0, Arrivals::Fixed, 1);
        for _ in 0..30 {
            schedule.next_request();
        }
        assert_eq!(schedule.n_unsent(Duration::from_millis(250)), 0);
        assert_eq!(schedule.n_unsent(Duration::from_millis(500)), 20);
        assert_eq!(schedule.n_unsent(Duration::from_secs(7)), 70);
    }

    #[test]
    fn a_finished_schedule_has_no_unsent_requests() {
        let schedule = Schedule::new(Some((100.0, Arrivals::Fixed)), Some(10), None).unwrap();
        all_requests(&schedule);
        assert_eq!(schedule.n_unsent(Duration::from_secs(60)), 0);
        let schedule = Schedule::new(None, Some(10), None).unwrap();
        assert_eq!(schedule.n_unsent(Duration::from_secs(60)), 0);
    }
}
