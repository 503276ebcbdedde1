//! An endpoint that can be picked, and the requests in flight to it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::balance::breaker::Breaker;
use crate::balance::load::Load;

/// An endpoint that a balancer can pick.
pub(crate) trait Candidate {
    fn load(&self) -> &Load;
    fn breaker(&self) -> &Breaker;

    /// Whether [`Self::check`] has an effect.
    fn can_be_checked(&self) -> bool;

    /// Starts a check of the endpoint without a request, such as a ping. The answer counts as a response.
    fn check(&self);
}

/// Counts one request in flight to an endpoint, until the endpoint has responded or this is dropped.
#[derive(Debug)]
pub(crate) struct InFlightGuard<E: Candidate> {
    endpoint: Arc<E>,
    sent_at: Instant,
    is_recorded: bool,
}

impl<E: Candidate> InFlightGuard<E> {
    pub(crate) fn new(endpoint: Arc<E>, now: Instant) -> Self {
        endpoint.load().begin_request(now);
        Self {
            endpoint,
            sent_at: now,
            is_recorded: false,
        }
    }

    pub(crate) fn endpoint(&self) -> &Arc<E> {
        &self.endpoint
    }

    /// Records a response. Only the first call of this or [`Self::record_failure`] counts.
    pub(crate) fn record_response(&mut self, now: Instant) {
        self.finish_once(|load, sent_at| {
            load.record_response(now);
            load.observe(now.saturating_duration_since(sent_at), now);
        });
    }

    /// Records a failure and its `Retry-After`. Only the first call of this or [`Self::record_response`] counts.
    pub(crate) fn record_failure(&mut self, retry_after: Option<Duration>, now: Instant) {
        self.finish_once(|load, sent_at| load.penalize(now.saturating_duration_since(sent_at), retry_after, now));
    }

    fn finish_once(&mut self, record: impl FnOnce(&Load, Instant)) {
        if !std::mem::replace(&mut self.is_recorded, true) {
            let load = self.endpoint.load();
            record(load, self.sent_at);
            load.end_request();
        }
    }
}

impl<E: Candidate> Drop for InFlightGuard<E> {
    fn drop(&mut self) {
        if !self.is_recorded {
            let load = self.endpoint.load();
            load.end_request();
            // The request was cancelled. Its latency is at least the time waited, and counts as this time. Otherwise an
            // endpoint would not look slow if all clients cancel. Cancellations are rare, so reading the clock is cheap
            // enough.
            let now = Instant::now();
            let waited = now.saturating_duration_since(self.sent_at);
            if waited > load.rtt(now) {
                load.raise_estimate_to(waited, now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::breaker::BreakerGroup;
    use crate::policy::client::LoadParams;

    const MS: Duration = Duration::from_millis(1);

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

        fn can_be_checked(&self) -> bool {
            false
        }

        fn check(&self) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_pending_request_counts_until_it_ends() {
        let now = Instant::now();
        let breaker = Breaker::new(None, BreakerGroup::default(), now);
        let peer = Arc::new(Peer {
            load: Load::new(PEAK_EWMA, now),
            breaker,
        });
        let (mut first, second) = (
            InFlightGuard::new(peer.clone(), now),
            InFlightGuard::new(peer.clone(), now),
        );
        assert_eq!(peer.load.in_flight(), 2);
        first.record_response(now + 4 * MS);
        assert_eq!(peer.load.in_flight(), 1);
        assert_near(peer.load.cost(now), 0.008);
        tokio::time::advance(500 * MS).await;
        drop(second);
        assert_eq!(peer.load.in_flight(), 0);
        assert_near(peer.load.cost(Instant::now()), 0.500);
    }

    const PEAK_EWMA: LoadParams = LoadParams::PeakEwma {
        default_rtt: Duration::from_millis(30),
        decay: Duration::from_secs(10),
    };

    #[track_caller]
    fn assert_near(cost: f64, expected: f64) {
        assert!(
            (cost - expected).abs() <= expected * 0.01,
            "{cost} is not about {expected}"
        );
    }
}
