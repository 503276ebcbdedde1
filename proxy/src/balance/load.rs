//! How busy an endpoint is: peak-EWMA of its latency times its requests in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::balance::balancer::Candidate;
use crate::policy::client::LoadParams;

/// The load of one endpoint, shared by all workers.
///
/// The estimate of the round-trip time rises to a peak at once and then decays towards what is measured.
#[derive(Debug)]
pub(crate) struct Load {
    params: LoadParams,
    start: Instant,
    pending: AtomicU32,
    /// One word, so that value and time never disagree; see [`Estimate`].
    estimate: AtomicU64,
}

/// Seconds as `f32` above, milliseconds since `start` plus one below; time 0 means not measured yet.
#[derive(Clone, Copy)]
struct Estimate {
    rtt: f32,
    at: u32,
}

impl Load {
    pub(crate) fn new(params: LoadParams, now: Instant) -> Self {
        let (LoadParams::PeakEwma { default_rtt, .. } | LoadParams::PenaltyPeakEwma { default_rtt, .. }) = params;
        let estimate = Estimate {
            rtt: default_rtt.as_secs_f32(),
            at: 0,
        };
        Self {
            params,
            start: now,
            pending: AtomicU32::new(0),
            estimate: AtomicU64::new(estimate.pack()),
        }
    }

    /// Expected cost of one more request to this endpoint, in seconds.
    ///
    /// Reading decays to `now` without writing, so an idle endpoint becomes attractive again.
    /// Never NaN, and never below the floor of 1 ms: differences below that are noise, and requests in flight tell more.
    ///
    /// Source: `PeakEwma` in `outbound.proto`; Linkerd sends a default RTT of 30 ms and a decay of 10 s.
    pub(crate) fn cost(&self, now: Instant) -> f64 {
        let (estimate, pending) = (self.estimate(), self.pending());
        if estimate.at == 0 && pending == 0 {
            // Nobody knows, and one request is how to find out. At its default a newcomer would look slower than
            // neighbours that are not, and get nothing for half a minute.
            return 0.0;
        }
        let rtt = self.decayed(estimate, self.at(now));
        f64::from(rtt.max(RTT_FLOOR)) * (f64::from(pending) + 1.0)
    }

    /// Requests in flight.
    pub(crate) fn pending(&self) -> u32 {
        self.pending.load(Ordering::Relaxed)
    }

    /// The estimated round-trip time.
    pub(crate) fn rtt(&self, now: Instant) -> Duration {
        let rtt = self.decayed(self.estimate(), self.at(now));
        Duration::try_from_secs_f32(rtt.max(RTT_FLOOR)).unwrap_or(Duration::MAX)
    }

    /// Takes a measured round-trip time into the estimate.
    pub(crate) fn observe(&self, rtt: Duration, now: Instant) {
        let (rtt, at) = (rtt.as_secs_f32(), self.at(now));
        self.update(|old| {
            let decayed = self.decayed(old, at);
            let rtt = if old.at == 0 || rtt > decayed {
                rtt
            } else {
                decayed + rtt * (1.0 - self.remainder(old, at))
            };
            Estimate { rtt, at }
        });
    }

    /// Lets a failed request count as a slow one, so that an endpoint that fails fast does not attract more of them.
    ///
    /// Without a penalty in the policy, the time it took counts as for any other request.
    pub(crate) fn penalize(&self, took: Duration, retry_after: Option<Duration>, now: Instant) {
        let LoadParams::PenaltyPeakEwma {
            penalty,
            max_retry_after,
            ..
        } = self.params
        else {
            return self.observe(took, now);
        };
        let asked = retry_after.unwrap_or_default().min(max_retry_after);
        self.raise(penalty.max(asked).max(took), now);
    }

    /// Lets the estimate be `rtt` at least.
    fn raise(&self, rtt: Duration, now: Instant) {
        let (rtt, at) = (rtt.as_secs_f32(), self.at(now));
        self.update(|old| Estimate {
            rtt: self.decayed(old, at).max(rtt),
            at,
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
        estimate.rtt * self.remainder(estimate, at)
    }

    /// What is left of the weight of an estimate, from 1 to 0.
    fn remainder(&self, estimate: Estimate, at: u32) -> f32 {
        let (LoadParams::PeakEwma { decay, .. } | LoadParams::PenaltyPeakEwma { decay, .. }) = self.params;
        // A worker whose clock was read earlier sees no time pass. After 49 days of silence the count starts over, which
        // only makes an old estimate look young once more.
        let elapsed = at.wrapping_sub(estimate.at.max(1));
        if elapsed == 0 || elapsed > u32::MAX / 2 {
            return 1.0;
        }
        let decay = decay.as_secs_f32().max(f32::EPSILON);
        (-(elapsed as f32) / 1000.0 / decay).exp()
    }

    fn at(&self, now: Instant) -> u32 {
        // Truncation is the wrapping that `remainder` expects; 0 is taken.
        let elapsed = now.saturating_duration_since(self.start);
        let millis = (elapsed.as_secs() as u32)
            .wrapping_mul(1000)
            .wrapping_add(elapsed.subsec_millis());
        millis.wrapping_add(1).max(1)
    }
}

impl Estimate {
    fn pack(self) -> u64 {
        u64::from(self.rtt.to_bits()) << 32 | u64::from(self.at)
    }

    fn unpack(word: u64) -> Self {
        Self {
            rtt: f32::from_bits((word >> 32) as u32),
            at: word as u32,
        }
    }
}

/// One request in flight to an endpoint; it counts until the endpoint has answered, or this is dropped.
#[derive(Debug)]
pub(crate) struct Pending<E: Candidate> {
    endpoint: Arc<E>,
    sent_at: Instant,
    is_measured: bool,
}

impl<E: Candidate> Pending<E> {
    pub(crate) fn new(endpoint: Arc<E>, now: Instant) -> Self {
        endpoint.load().pending.fetch_add(1, Ordering::Relaxed);
        Self {
            endpoint,
            sent_at: now,
            is_measured: false,
        }
    }

    pub(crate) fn endpoint(&self) -> &Arc<E> {
        &self.endpoint
    }

    /// The endpoint has answered; what comes afterwards counts no more.
    pub(crate) fn answered(&mut self, now: Instant) {
        self.measured(|load, sent_at| load.observe(now.saturating_duration_since(sent_at), now));
    }

    /// The endpoint has failed, or asked us to stay away for a while; what comes afterwards counts no more.
    pub(crate) fn failed(&mut self, retry_after: Option<Duration>, now: Instant) {
        self.measured(|load, sent_at| load.penalize(now.saturating_duration_since(sent_at), retry_after, now));
    }

    fn measured(&mut self, note: impl FnOnce(&Load, Instant)) {
        if !std::mem::replace(&mut self.is_measured, true) {
            let load = self.endpoint.load();
            note(load, self.sent_at);
            load.pending.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl<E: Candidate> Drop for Pending<E> {
    fn drop(&mut self) {
        if !self.is_measured {
            let load = self.endpoint.load();
            load.pending.fetch_sub(1, Ordering::Relaxed);
            // Given up on: the true time is unknown, but no shorter. An endpoint so slow that every client gives up
            // would otherwise never look slow. Rare, so reading the clock here is cheap enough.
            let now = Instant::now();
            let waited = now.saturating_duration_since(self.sent_at);
            if waited > load.rtt(now) {
                load.raise(waited, now);
            }
        }
    }
}

/// In seconds.
const RTT_FLOOR: f32 = 0.001;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::breaker::{Breaker, Fleet};

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

    #[derive(Debug)]
    struct Peer {
        load: Load,
        breaker: Breaker,
    }

    impl Candidate for Peer {
        fn load(&self) -> &Load {
            &self.load
        }

        fn breaker(&self) -> &Breaker {
            &self.breaker
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
    fn the_default_counts_until_there_is_a_measurement() {
        let now = Instant::now();
        let load = Load::new(peak_ewma(), now);
        assert!(load.cost(now) == 0.0, "a first request finds out");
        load.pending.store(1, Ordering::Relaxed);
        assert_near(load.cost(now), 0.060);
        load.observe(2 * MS, now);
        assert_near(load.cost(now), 0.004);
    }

    #[test]
    fn it_rises_at_once_and_falls_slowly() {
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
    fn many_observations_within_a_millisecond_lose_no_time() {
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
        load.pending.store(3, Ordering::Relaxed);
        assert_near(load.cost(now), 0.004);
    }

    #[test]
    fn a_clock_that_was_read_earlier_changes_nothing() {
        let start = Instant::now();
        let load = Load::new(peak_ewma(), start);
        load.observe(20 * MS, start + Duration::from_secs(60));
        assert_near(load.cost(start), 0.020);
    }

    #[test]
    fn failures_count_as_slow_where_the_policy_says_so() {
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

    #[tokio::test(start_paused = true)]
    async fn a_pending_request_counts_until_it_ends() {
        let now = Instant::now();
        let breaker = Breaker::new(None, Fleet::default(), now);
        let peer = Arc::new(Peer {
            load: Load::new(peak_ewma(), now),
            breaker,
        });
        let (mut first, second) = (Pending::new(peer.clone(), now), Pending::new(peer.clone(), now));
        assert_eq!(peer.load.pending(), 2);
        first.answered(now + 4 * MS);
        assert_eq!(peer.load.pending(), 1);
        assert_near(peer.load.cost(now), 0.008);
        tokio::time::advance(500 * MS).await;
        drop(second);
        assert_eq!(peer.load.pending(), 0);
        assert_near(peer.load.cost(Instant::now()), 0.500);
    }
}
