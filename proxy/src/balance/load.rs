//! Load of an endpoint: peak-EWMA of its latency times its requests in flight, and whether it is late to respond.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::policy::client::LoadParams;

/// The load of one endpoint, shared by all workers.
///
/// The estimate of the round-trip time rises to a peak immediately, and then decays towards the measured values.
#[derive(Debug)]
pub(crate) struct Load {
    params: LoadParams,
    start: Instant,
    in_flight: AtomicU32,
    /// While requests are in flight: when the endpoint last responded, or when the first of these requests was sent,
    /// whichever is later. All times here are milliseconds since `start`, plus one.
    waiting_since: AtomicU32,
    /// When the endpoint was last checked or got a trial request, because it was late to respond.
    last_check_or_trial_at: AtomicU32,
    /// An [`Estimate`], packed into one word so that its value and time are always consistent.
    estimate: AtomicU64,
}

/// The estimated round-trip time in seconds, and the time of its last update; 0 if it was never measured. [`Load`] packs them
/// into the upper and the lower half of a word.
#[derive(Clone, Copy)]
struct Estimate {
    rtt: f32,
    updated_at_ms: u32,
}

impl Load {
    pub(crate) fn new(params: LoadParams, now: Instant) -> Self {
        let (LoadParams::PeakEwma { default_rtt, .. } | LoadParams::PenaltyPeakEwma { default_rtt, .. }) = params;
        let estimate = Estimate {
            rtt: default_rtt.as_secs_f32(),
            updated_at_ms: 0,
        };
        Self {
            params,
            start: now,
            in_flight: AtomicU32::new(0),
            waiting_since: AtomicU32::new(0),
            last_check_or_trial_at: AtomicU32::new(0),
            estimate: AtomicU64::new(estimate.pack()),
        }
    }

    /// Expected cost of one more request to this endpoint, in seconds.
    ///
    /// The estimate decays until `now`, so that an idle endpoint is picked again some time later. Never NaN. A round-trip
    /// time below 1 ms counts as 1 ms: smaller differences are noise, and the number of requests in flight is more
    /// significant.
    ///
    /// Source: `PeakEwma` in `outbound.proto`; Linkerd sends a default RTT of 30 ms and a decay of 10 s.
    pub(crate) fn cost(&self, now: Instant) -> f64 {
        let (estimate, in_flight) = (self.estimate(), self.in_flight());
        if estimate.updated_at_ms == 0 && in_flight == 0 {
            // Not measured yet: cost 0, so that the endpoint gets a request that measures it. With the default RTT, a new
            // endpoint would look slower than the others and get no request for half a minute.
            return 0.0;
        }
        let rtt = self.decayed(estimate, self.millis_at(now));
        f64::from(rtt.max(MIN_RTT_SECONDS)) * (f64::from(in_flight) + 1.0)
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(crate) fn rtt(&self, now: Instant) -> Duration {
        let rtt = self.decayed(self.estimate(), self.millis_at(now));
        Duration::try_from_secs_f32(rtt.max(MIN_RTT_SECONDS)).unwrap_or(Duration::MAX)
    }

    /// Updates the estimate with a measured round-trip time.
    pub(crate) fn observe(&self, rtt: Duration, now: Instant) {
        let (rtt, at) = (rtt.as_secs_f32(), self.millis_at(now));
        self.update(|old| {
            let decayed = self.decayed(old, at);
            let rtt = if old.updated_at_ms == 0 || rtt > decayed {
                rtt
            } else {
                decayed + rtt * (1.0 - self.decay_factor(old, at))
            };
            Estimate { rtt, updated_at_ms: at }
        });
    }

    /// Counts a failed request as a slow one, so that an endpoint that fails quickly does not get more requests.
    ///
    /// If the policy has no penalty, the measured time counts, as for other requests.
    pub(crate) fn penalize(&self, took: Duration, retry_after: Option<Duration>, now: Instant) {
        let LoadParams::PenaltyPeakEwma {
            penalty,
            max_retry_after,
            ..
        } = self.params
        else {
            return self.observe(took, now);
        };
        let retry_after = retry_after.unwrap_or_default().min(max_retry_after);
        self.raise_estimate_to(penalty.max(retry_after).max(took), now);
    }

    /// Whether the endpoint is late to respond: requests are in flight, and it has answered none of them for longer than the
    /// limit.
    ///
    /// An endpoint behind a broken network accepts requests and never responds. The keep-alive of its connections takes
    /// seconds to detect this.
    pub(crate) fn late_response(&self, now: Instant) -> Option<LateResponse> {
        if self.in_flight() == 0 {
            return None;
        }
        let now = self.millis_at(now);
        let waited_ms = elapsed_ms(self.waiting_since.load(Ordering::Relaxed), now);
        if waited_ms < MIN_LATE_MS {
            return None;
        }
        let rtt = self.decayed(self.estimate(), now);
        let limit_ms = ((rtt * 1000.0) as u32).clamp(MIN_LATE_MS, MAX_LATE_LIMIT_MS);
        if waited_ms < limit_ms {
            return None;
        }
        let last_check_or_trial_at = self.last_check_or_trial_at.load(Ordering::Relaxed);
        // A check or trial request before the last response belongs to an earlier time at which the endpoint was late.
        let since_check_or_trial_ms =
            Some(now.wrapping_sub(last_check_or_trial_at)).filter(|elapsed| *elapsed < waited_ms);
        Some(LateResponse {
            waited_ms,
            limit_ms,
            since_check_or_trial_ms,
            last_check_or_trial_at,
        })
    }

    /// Records a check or a trial request. Returns false if another worker has recorded one since `late` was computed.
    pub(super) fn try_record_check_or_trial(&self, late: LateResponse, now: Instant) -> bool {
        let (last, now) = (late.last_check_or_trial_at, self.millis_at(now));
        self.last_check_or_trial_at
            .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// Counts a request that is sent.
    pub(super) fn begin_request(&self, now: Instant) {
        if self.in_flight() == 0 {
            self.restart_wait(now);
        }
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that the endpoint has responded.
    pub(crate) fn record_response(&self, now: Instant) {
        self.restart_wait(now);
    }

    fn restart_wait(&self, now: Instant) {
        self.waiting_since.store(self.millis_at(now), Ordering::Relaxed);
    }

    /// Stops counting a request.
    pub(super) fn end_request(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Raises the estimate to `rtt` if the estimate is lower.
    pub(super) fn raise_estimate_to(&self, rtt: Duration, now: Instant) {
        let (rtt, at) = (rtt.as_secs_f32(), self.millis_at(now));
        self.update(|old| Estimate {
            rtt: self.decayed(old, at).max(rtt),
            updated_at_ms: at,
        });
    }

    fn estimate(&self) -> Estimate {
        Estimate::unpack(self.estimate.load(Ordering::Relaxed))
    }

    fn update(&self, change: impl Fn(Estimate) -> Estimate) {
        // `Err` is impossible: the closure always has a next value.
        let _ = self.estimate.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
            Some(change(Estimate::unpack(old)).pack())
        });
    }

    fn decayed(&self, estimate: Estimate, at: u32) -> f32 {
        estimate.rtt * self.decay_factor(estimate, at)
    }

    /// Remaining weight of an estimate, from 1 to 0.
    fn decay_factor(&self, estimate: Estimate, at: u32) -> f32 {
        let (LoadParams::PeakEwma { decay, .. } | LoadParams::PenaltyPeakEwma { decay, .. }) = self.params;
        // If another worker has updated the estimate after this worker read its clock, no time has passed. The milliseconds
        // wrap after 49 days; an old estimate may then count as new once.
        let elapsed = elapsed_ms(estimate.updated_at_ms.max(1), at);
        if elapsed == 0 {
            return 1.0;
        }
        let decay = decay.as_secs_f32().max(f32::EPSILON);
        (-(elapsed as f32) / 1000.0 / decay).exp()
    }

    fn millis_at(&self, now: Instant) -> u32 {
        // Wraps after 49 days, as `decay_factor` expects. 0 is reserved for "not measured yet".
        let elapsed = now.saturating_duration_since(self.start);
        let millis = (elapsed.as_secs() as u32)
            .wrapping_mul(1000)
            .wrapping_add(elapsed.subsec_millis());
        millis.wrapping_add(1).max(1)
    }
}

/// An endpoint has requests in flight, and has not responded for longer than the limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LateResponse {
    waited_ms: u32,
    /// Time after which the endpoint is late: its estimated latency, within bounds.
    limit_ms: u32,
    /// Time since the last check or trial request; `None` if there was none since the last response.
    since_check_or_trial_ms: Option<u32>,
    last_check_or_trial_at: u32,
}

impl LateResponse {
    /// Whether the endpoint was not checked since its last response.
    pub(super) fn is_unchecked(self) -> bool {
        self.since_check_or_trial_ms.is_none()
    }

    /// Whether the answer to the last check is also late.
    pub(super) fn is_check_late(self) -> bool {
        self.since_check_or_trial_ms
            .is_some_and(|elapsed| elapsed >= self.limit_ms)
    }

    /// Whether the endpoint should get one trial request, because it may only be slow: after twice the limit, and then each
    /// time the waiting time has doubled.
    pub(super) fn is_trial_due(self) -> bool {
        let waited_at_trial = self.since_check_or_trial_ms.map(|elapsed| self.waited_ms - elapsed);
        self.waited_ms >= 2 * waited_at_trial.unwrap_or(self.limit_ms)
    }
}

impl Estimate {
    fn pack(self) -> u64 {
        u64::from(self.rtt.to_bits()) << 32 | u64::from(self.updated_at_ms)
    }

    fn unpack(word: u64) -> Self {
        Self {
            rtt: f32::from_bits((word >> 32) as u32),
            updated_at_ms: word as u32,
        }
    }
}

/// Milliseconds from one time to another; 0 if the second time is earlier, because another worker has read its clock later.
fn elapsed_ms(from: u32, to: u32) -> u32 {
    match to.wrapping_sub(from) {
        elapsed if elapsed > u32::MAX / 2 => 0,
        elapsed => elapsed,
    }
}

const MIN_RTT_SECONDS: f32 = 0.001;
/// An endpoint is not late before this time: shorter pauses of a process are normal.
const MIN_LATE_MS: u32 = 20;
/// Maximum of [`LateResponse::limit_ms`]. Requests that are cancelled after a timeout raise the estimated latency without
/// bound.
const MAX_LATE_LIMIT_MS: u32 = 200;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn peak_ewma() -> LoadParams {
        LoadParams::PeakEwma {
            default_rtt: 30 * MS,
            decay: Duration::from_secs(10),
        }
    }

    fn penalty() -> LoadParams {
        LoadParams::PenaltyPeakEwma {
            default_rtt: 30 * MS,
            decay: Duration::from_secs(10),
            penalty: Duration::from_secs(5),
            max_retry_after: Duration::from_secs(300),
        }
    }

    #[track_caller]
    fn assert_near(cost: f64, expected: f64) {
        assert!(
            (cost - expected).abs() <= expected * 0.01,
            "{cost} is not about {expected}"
        );
    }

    #[test]
    fn an_unmeasured_endpoint_costs_nothing_when_idle_and_the_default_rtt_otherwise() {
        let now = Instant::now();
        let load = Load::new(peak_ewma(), now);
        assert!(load.cost(now) == 0.0, "the first request measures it");
        load.in_flight.store(1, Ordering::Relaxed);
        assert_near(load.cost(now), 0.060);
        load.observe(2 * MS, now);
        assert_near(load.cost(now), 0.004);
    }

    #[test]
    fn the_estimate_rises_to_a_peak_at_once_and_decays_slowly() {
        let start = Instant::now();
        let load = Load::new(peak_ewma(), start);
        load.observe(10 * MS, start);
        load.observe(100 * MS, start);
        assert_near(load.cost(start), 0.100);
        let later = start + Duration::from_secs(10);
        assert_near(load.cost(later), 0.100 / std::f64::consts::E);
        load.observe(10 * MS, later);
        assert_near(load.cost(later), 0.010 + 0.090 / std::f64::consts::E);
    }

    #[test]
    fn observations_within_one_millisecond_do_not_slow_the_decay() {
        let start = Instant::now();
        let load = Load::new(peak_ewma(), start);
        load.observe(100 * MS, start);
        for step in 1..=100_000_u32 {
            load.observe(10 * MS, start + Duration::from_micros(100) * step);
        }
        assert_near(
            load.cost(start + Duration::from_secs(10)),
            0.010 + 0.090 / std::f64::consts::E,
        );
    }

    #[test]
    fn cost_has_a_floor_and_counts_requests_in_flight() {
        let now = Instant::now();
        let load = Load::new(peak_ewma(), now);
        load.observe(Duration::ZERO, now);
        load.in_flight.store(3, Ordering::Relaxed);
        assert_near(load.cost(now), 0.004);
    }

    #[test]
    fn an_earlier_clock_reading_does_not_decay_the_estimate() {
        let start = Instant::now();
        let load = Load::new(peak_ewma(), start);
        load.observe(20 * MS, start + Duration::from_secs(60));
        assert_near(load.cost(start), 0.020);
    }

    /// The times between `from` and `to`, in ms, at which the endpoint may get a request: it is not late to respond, or a trial
    /// request is due.
    fn times_open_to_requests(load: &Load, start: Instant, from: u32, to: u32) -> Vec<u32> {
        let is_open = |ms: &u32| {
            let late = load.late_response(start + *ms * MS);
            late.is_none_or(LateResponse::is_trial_due)
        };
        (from..to).filter(is_open).collect()
    }

    #[test]
    fn an_endpoint_whose_response_is_late_gets_trial_requests_at_growing_intervals() {
        let start = Instant::now();
        let load = Load::new(peak_ewma(), start);
        let at = |ms: u32| start + ms * MS;
        load.begin_request(at(0));
        load.observe(MS, at(1));
        load.record_response(at(1));
        load.begin_request(at(1));
        let record_trial =
            |ms: u32| assert!(load.try_record_check_or_trial(load.late_response(at(ms)).unwrap(), at(ms)));
        let accepts = |from: u32, to: u32| times_open_to_requests(&load, start, from, to);
        let ranges =
            |first: std::ops::Range<u32>, second: std::ops::Range<u32>| first.chain(second).collect::<Vec<_>>();
        assert_eq!(accepts(1, 90), ranges(1..21, 41..90));
        record_trial(41);
        assert_eq!(accepts(41, 90), ranges(81..90, 0..0));
        record_trial(81);
        assert_eq!(accepts(81, 170), ranges(161..170, 0..0));
        // After a response, earlier trial requests do not count.
        load.record_response(at(100));
        assert_eq!(accepts(100, 170), ranges(100..120, 140..170));
        load.end_request();
        load.end_request();
        assert!(load.late_response(at(10_000)).is_none(), "no request is in flight");
        load.begin_request(at(20_000));
        assert!(load.late_response(at(20_000)).is_none());
        let late = load.late_response(at(20_050)).unwrap();
        assert!(load.try_record_check_or_trial(late, at(20_050)) && !load.try_record_check_or_trial(late, at(20_050)));
    }

    #[test]
    fn trial_requests_are_due_at_any_age_of_the_endpoint() {
        let start = Instant::now();
        let load = Load::new(peak_ewma(), start);
        for days in [0, 24, 26, 40, 49, 50, 60, 80] {
            let begun = start + Duration::from_secs(days * 86_400 + 1);
            load.observe(MS, begun);
            load.begin_request(begun);
            assert!(load.late_response(begun + 15 * MS).is_none(), "after {days} days");
            let late = load.late_response(begun + 35 * MS).unwrap();
            assert!(
                late.is_unchecked() && !late.is_trial_due(),
                "after {days} days: {late:?}"
            );
            let due = load.late_response(begun + 45 * MS).unwrap();
            assert!(due.is_trial_due(), "after {days} days: {due:?}");
            load.end_request();
        }
    }

    #[test]
    fn a_response_is_late_after_the_latency_of_its_endpoint() {
        let start = Instant::now();
        let load = Load::new(peak_ewma(), start);
        for (rtt, limit) in [(100, 100), (5000, 200)] {
            load.observe(rtt * MS, start);
            load.begin_request(start);
            assert!(load.late_response(start + (limit - 5) * MS).is_none());
            assert!(load.late_response(start + (limit + 5) * MS).is_some());
            load.end_request();
        }
    }

    #[test]
    fn failures_count_as_slow_if_the_policy_has_a_penalty() {
        let now = Instant::now();
        for (params, retry_after, expected) in [
            (peak_ewma(), None, 0.001),
            (penalty(), None, 5.0),
            (penalty(), Some(Duration::from_secs(60)), 60.0),
            (penalty(), Some(Duration::from_secs(3600)), 300.0),
        ] {
            let load = Load::new(params, now);
            load.penalize(MS, retry_after, now);
            assert_near(load.cost(now), expected);
        }
    }
}
