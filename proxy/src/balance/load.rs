//! Load of an endpoint: peak-EWMA of its latency times its requests in flight, and whether it has stopped responding.

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
    /// When the endpoint last responded, or got a request while it had none: since then it owes a response. Milliseconds since
    /// `start` plus one, as all times here.
    owes_since: AtomicU32,
    /// When an endpoint that does not respond may get the next request; only valid if later than `owes_since`.
    next_attempt_at: AtomicU32,
    /// Packed into one word, so that value and time are always consistent; see [`Estimate`].
    estimate: AtomicU64,
}

/// Packed as seconds (`f32`) in the upper half, and as milliseconds since `start` plus one in the lower half. Time 0 means not
/// measured yet.
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
            owes_since: AtomicU32::new(0),
            next_attempt_at: AtomicU32::new(0),
            estimate: AtomicU64::new(estimate.pack()),
        }
    }

    /// Expected cost of one more request to this endpoint, in seconds.
    ///
    /// The estimate counts as decayed until `now`, so an idle endpoint becomes attractive again.
    /// Never NaN. The round-trip time counts as at least 1 ms: smaller differences are noise, and the number of
    /// requests in flight is more significant.
    ///
    /// Source: `PeakEwma` in `outbound.proto`; Linkerd sends a default RTT of 30 ms and a decay of 10 s.
    pub(crate) fn cost(&self, now: Instant) -> f64 {
        let (estimate, in_flight) = (self.estimate(), self.in_flight());
        if estimate.updated_at_ms == 0 && in_flight == 0 {
            // Not measured yet: cost 0, so that one request measures it. At the default RTT, a new endpoint would look slower
            // than the others and get no request for half a minute.
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

    /// Counts a failed request as a slow one, so that an endpoint does not attract more requests because it fails quickly.
    ///
    /// Without a penalty in the policy, the measured time counts, as for any other request.
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
        self.raise_to(penalty.max(retry_after).max(took), now);
    }

    /// Whether the endpoint owes a response, and has not responded for longer than usual.
    ///
    /// An endpoint behind a broken network accepts requests and never responds; the keep-alive of its connections notices that only
    /// after seconds.
    pub(crate) fn is_silent(&self, now: Instant) -> bool {
        if self.in_flight() == 0 {
            return false;
        }
        let now = self.millis_at(now);
        elapsed_ms(self.owes_since.load(Ordering::Relaxed), now) >= self.silence_limit(now)
    }

    /// Whether a silent endpoint should get one request, because it may be only slow: after twice the limit, and then each time that
    /// the silence has doubled.
    pub(crate) fn is_attempt_due(&self, now: Instant) -> bool {
        let (now, owes_since) = (self.millis_at(now), self.owes_since.load(Ordering::Relaxed));
        let planned = self.next_attempt_at.load(Ordering::Relaxed);
        let wait = match elapsed_ms(owes_since, planned) {
            0 => 2 * self.silence_limit(now), // not planned in this silence
            wait => wait,
        };
        elapsed_ms(owes_since, now) >= wait
    }

    /// Plans the next attempt, if the endpoint does not respond.
    pub(super) fn plan_next_attempt(&self, now: Instant) {
        if self.in_flight() == 0 {
            return;
        }
        let now = self.millis_at(now);
        let silence = elapsed_ms(self.owes_since.load(Ordering::Relaxed), now);
        if silence >= self.silence_limit(now) {
            self.next_attempt_at.store(now.wrapping_add(silence), Ordering::Relaxed);
        }
    }

    /// The time without a response after which the endpoint counts as not responding: its latency, a recent peak, or more.
    fn silence_limit(&self, now: u32) -> u32 {
        let rtt = self.decayed(self.estimate(), now);
        ((rtt * 1000.0) as u32).max(MIN_SILENCE_MS)
    }

    /// Counts a request that is sent.
    pub(super) fn begin(&self, now: Instant) {
        if self.in_flight.fetch_add(1, Ordering::Relaxed) == 0 {
            self.record_response(now);
        }
    }

    /// Records that the endpoint has responded.
    pub(crate) fn record_response(&self, now: Instant) {
        self.owes_since.store(self.millis_at(now), Ordering::Relaxed);
    }

    /// Removes a request from the count.
    pub(super) fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Raises the estimate to `rtt` if the estimate is lower.
    pub(super) fn raise_to(&self, rtt: Duration, now: Instant) {
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
        // If another worker has updated the estimate after this one read its clock, no time has passed. The milliseconds wrap
        // after 49 days, which only makes an old estimate look new once.
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

/// The milliseconds from one time to another; 0 if the second is earlier, as when another worker has read its clock later.
fn elapsed_ms(from: u32, to: u32) -> u32 {
    match to.wrapping_sub(from) {
        elapsed if elapsed > u32::MAX / 2 => 0,
        elapsed => elapsed,
    }
}

const MIN_RTT_SECONDS: f32 = 0.001;
/// Shorter pauses of a process are normal.
const MIN_SILENCE_MS: u32 = 20;

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

    #[test]
    fn an_endpoint_that_owes_a_response_gets_requests_at_growing_intervals() {
        let start = Instant::now();
        let load = Load::new(peak_ewma(), start);
        let at = |ms: u32| start + ms * MS;
        load.begin(at(0));
        load.observe(MS, at(1));
        load.record_response(at(1));
        load.begin(at(1));
        let gets_requests = |from: u32, to: u32| {
            (from..to)
                .filter(|ms| !load.is_silent(at(*ms)) || load.is_attempt_due(at(*ms)))
                .collect::<Vec<_>>()
        };
        let before_and_from =
            |before: std::ops::Range<u32>, from: std::ops::Range<u32>| before.chain(from).collect::<Vec<_>>();
        assert_eq!(gets_requests(1, 90), before_and_from(1..21, 41..90));
        load.plan_next_attempt(at(41));
        assert_eq!(gets_requests(41, 90), before_and_from(81..90, 0..0));
        load.plan_next_attempt(at(81));
        assert_eq!(gets_requests(81, 170), before_and_from(161..170, 0..0));
        load.record_response(at(170));
        assert_eq!(gets_requests(170, 220), before_and_from(170..190, 210..220));
        load.end();
        load.end();
        assert!(!load.is_silent(at(10_000)), "without requests, no response is owed");
        load.begin(at(20_000));
        assert!(!load.is_silent(at(20_000)));
    }

    #[test]
    fn a_slow_endpoint_may_be_silent_for_longer() {
        let start = Instant::now();
        let load = Load::new(peak_ewma(), start);
        load.observe(100 * MS, start);
        load.begin(start);
        assert!(!load.is_silent(start + 95 * MS));
        assert!(load.is_silent(start + 105 * MS));
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
