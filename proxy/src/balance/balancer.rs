//! Picks an endpoint: immediately, or after a bounded wait in the queue. After a wait has timed out, requests fail fast.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use crate::balance::breaker::BreakerGroup;
use crate::balance::candidate::Candidate;
use crate::balance::endpoint_set::DiscoveryState;
use crate::balance::p2c;
use crate::metrics::balancers::{BalancerSeries, QueueMode, UpdateOp};
use crate::policy::client::Queue;

/// How an endpoint is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Strategy {
    /// The one with the lower load of two drawn at random.
    #[default]
    PeakEwma,
    /// Each in turn.
    RoundRobin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PickError {
    #[error("the service has no endpoints")]
    NoEndpoints,
    /// With the time that this request has waited. As in Linkerd, the first timeout ends the wait of all queued requests.
    #[error("no endpoint became available within {0:?}")]
    QueueTimeout(Duration, UnavailableReason),
    /// An earlier request has timed out in the queue, so this one has not waited.
    #[error("no endpoint is available")]
    FailingFast(UnavailableReason),
    #[error("the queue is full: {0} requests already wait for an endpoint")]
    QueueFull(usize),
}

/// Why endpoints are not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnavailableReason {
    /// They cannot be reached, with the cause of one of their failed dials. `None` if no dial has failed, for example because no
    /// endpoint is known.
    Unreachable(Option<&'static str>),
    /// At least one was ejected by its breaker.
    Ejected,
}

/// The endpoints of one service, shared by all workers.
#[derive(Debug)]
pub(crate) struct Balancer<E> {
    strategy: Strategy,
    queue: Queue,
    discovery_state: ArcSwap<DiscoveryState<E>>,
    breaker_group: BreakerGroup,
    round_robin_next: AtomicUsize,
    n_queued: AtomicUsize,
    /// Set when a request times out in the queue; cleared when an endpoint is picked.
    is_failing_fast: AtomicBool,
    /// Series of all routes that use this balancer.
    series: Mutex<Vec<Weak<BalancerSeries>>>,
}

impl<E: Candidate> Balancer<E> {
    pub(crate) fn new(strategy: Strategy, queue: Queue) -> Self {
        Self {
            strategy,
            queue,
            discovery_state: ArcSwap::from_pointee(DiscoveryState::Unknown),
            breaker_group: BreakerGroup::default(),
            round_robin_next: AtomicUsize::new(0),
            n_queued: AtomicUsize::new(0),
            is_failing_fast: AtomicBool::new(false),
            series: Mutex::default(),
        }
    }

    /// Adds metric series to record in. The balancer does not keep them alive.
    pub(crate) fn register_series(&self, series: &Arc<BalancerSeries>) {
        series.set_queue_timeout(self.queue.failfast_timeout.as_secs_f64());
        let mut all = self.series.lock();
        all.retain(|other| other.strong_count() > 0);
        // An existing series with the same labels has recorded the mode already.
        if !all
            .iter()
            .filter_map(Weak::upgrade)
            .any(|other| other.has_same_labels(series))
        {
            series.record_queue_mode(match self.is_failing_fast.load(Ordering::Relaxed) {
                true => QueueMode::FailingFast,
                false => QueueMode::Waiting,
            });
        }
        all.push(Arc::downgrade(series));
    }

    pub(crate) fn record_update(&self, op: UpdateOp) {
        self.for_each_series(|series| series.record_update(op));
    }

    pub(crate) fn update_gauges(&self, now: Instant) {
        let (ready, known) = match &**self.discovery_state.load() {
            DiscoveryState::Endpoints(endpoints) => {
                let ready = endpoints
                    .iter()
                    .filter(|endpoint| endpoint.breaker().can_be_picked(now));
                (ready.count(), endpoints.len())
            }
            DiscoveryState::Unknown | DiscoveryState::NoEndpoints => (0, 0),
        };
        self.for_each_series(|series| series.set_endpoints(ready, known - ready));
    }

    /// Calls `record` once for each series: several routes may share one.
    fn for_each_series(&self, record: impl Fn(&BalancerSeries)) {
        let all: Vec<_> = self.series.lock().iter().filter_map(Weak::upgrade).collect();
        for (index, series) in all.iter().enumerate() {
            if !all[..index].iter().any(|other| other.has_same_labels(series)) {
                record(series);
            }
        }
    }

    /// The discovery state, and whether requests fail fast.
    pub(crate) fn status(&self) -> (Arc<DiscoveryState<E>>, bool) {
        (
            self.discovery_state.load_full(),
            self.is_failing_fast.load(Ordering::Relaxed),
        )
    }

    /// Sets whether requests wait in the queue or fail fast.
    #[cold]
    fn set_queue_mode(&self, mode: QueueMode) {
        let is_failing_fast = mode == QueueMode::FailingFast;
        if self.is_failing_fast.swap(is_failing_fast, Ordering::Relaxed) != is_failing_fast {
            self.for_each_series(|series| series.record_queue_mode(mode));
        }
    }

    /// The group for the breakers of this balancer's endpoints. It wakes waiting requests when an endpoint becomes
    /// available.
    pub(crate) fn breaker_group(&self) -> BreakerGroup {
        self.breaker_group.clone()
    }

    pub(crate) fn publish(&self, discovered: DiscoveryState<E>) {
        self.breaker_group.set_n_endpoints(discovered.endpoints().len());
        let discovered = Arc::new(discovered);
        let previous = self.discovery_state.swap(discovered.clone());
        let kept: HashSet<_> = discovered.endpoints().iter().map(Arc::as_ptr).collect();
        for gone in previous.endpoints() {
            if !kept.contains(&Arc::as_ptr(gone)) {
                gone.breaker().retire();
            }
        }
        self.breaker_group.notify();
    }

    /// Whether one of the endpoints can be picked.
    pub(crate) fn can_pick(&self, now: Instant) -> bool {
        match &**self.discovery_state.load() {
            DiscoveryState::Endpoints(endpoints) => {
                endpoints.iter().any(|endpoint| endpoint.breaker().can_be_picked(now))
            }
            DiscoveryState::Unknown | DiscoveryState::NoEndpoints => false,
        }
    }

    /// Picks an endpoint if one can be picked now, preferably one whose response is not late, and that is not in `tried`. Success ends
    /// the fail-fast state.
    pub(crate) fn try_pick(&self, now: Instant, tried: &[Arc<E>]) -> Option<Arc<E>> {
        let state = self.discovery_state.load();
        let DiscoveryState::Endpoints(endpoints) = &**state else {
            return None;
        };
        let is_untried = |endpoint: &Arc<E>| !tried.iter().any(|tried| Arc::ptr_eq(tried, endpoint));
        let picked = self
            .pick_responding(endpoints, now, is_untried)
            .or_else(|| match tried.is_empty() {
                true => None,
                false => self.pick_responding(endpoints, now, |_| true),
            })
            .or_else(|| self.pick_and_admit(endpoints, now, is_untried))
            .or_else(|| match tried.is_empty() {
                true => None,
                false => self.pick_and_admit(endpoints, now, |_| true),
            });
        if picked.is_some() && self.is_failing_fast.load(Ordering::Relaxed) {
            self.set_queue_mode(QueueMode::Waiting);
        }
        picked
    }

    /// Picks an endpoint that `is_allowed` accepts, if one can be picked now and its response is not late. Does not end the fail-fast
    /// state.
    pub(crate) fn pick_where(&self, now: Instant, is_allowed: impl Fn(&Arc<E>) -> bool) -> Option<Arc<E>> {
        match &**self.discovery_state.load() {
            DiscoveryState::Endpoints(endpoints) => self.pick_responding(endpoints, now, is_allowed),
            DiscoveryState::Unknown | DiscoveryState::NoEndpoints => None,
        }
    }

    /// Picks an endpoint, or waits in the queue for one; `series` records the wait.
    ///
    /// # Errors
    /// The service has no endpoints, none became available in time, requests fail fast after such a timeout, or the queue is
    /// full.
    pub(crate) async fn pick(&self, tried: &[Arc<E>], series: &BalancerSeries) -> Result<Arc<E>, PickError> {
        match self.try_pick(Instant::now(), tried) {
            Some(endpoint) => Ok(endpoint),
            // Boxed because it is rare and its timer is large.
            None => Box::pin(self.wait_for_endpoint(tried, series)).await,
        }
    }

    async fn wait_for_endpoint(&self, tried: &[Arc<E>], series: &BalancerSeries) -> Result<Arc<E>, PickError> {
        self.fail_if_no_endpoints()?;
        if self.is_failing_fast.load(Ordering::Relaxed) {
            return Err(PickError::FailingFast(self.unavailable_reason()));
        }
        // The queue is unlimited until discovery has answered: all requests wait for the same answer.
        let capacity = match &**self.discovery_state.load() {
            DiscoveryState::Unknown => usize::MAX,
            DiscoveryState::Endpoints(_) | DiscoveryState::NoEndpoints => self.queue.capacity,
        };
        let _permit = match QueuePermit::try_acquire(&self.n_queued, capacity) {
            Ok(permit) => permit,
            // The queue may be full of requests that a discovery update has just woken. Try once more before failing.
            Err(full) => return self.try_pick(Instant::now(), tried).ok_or(full),
        };
        let _queue_guard = series.enter_queue();
        let queued_at = Instant::now();
        let deadline = queued_at + self.queue.failfast_timeout;
        loop {
            // Registered before the check, so that no notification between the two is missed.
            let mut woken = std::pin::pin!(self.breaker_group.changed());
            woken.as_mut().enable();
            let now = Instant::now();
            if let Some(endpoint) = self.try_pick(now, tried) {
                return Ok(endpoint);
            }
            self.fail_if_no_endpoints()?;
            if now >= deadline {
                self.set_queue_mode(QueueMode::FailingFast);
                self.breaker_group.notify(); // wakes the other waiting requests, which fail too
            }
            if self.is_failing_fast.load(Ordering::Relaxed) {
                let waited = (now - queued_at).min(self.queue.failfast_timeout);
                return Err(PickError::QueueTimeout(waited, self.unavailable_reason()));
            }
            let next = self.next_probe_at().map_or(deadline, |at| at.min(deadline));
            tokio::select! {
                // Both branches are cancel-safe: a notification and a timer.
                () = woken => {}
                () = sleep_until(next) => {}
            }
        }
    }

    /// As [`Self::pick_and_admit`], without the endpoints whose response is late.
    fn pick_responding(
        &self,
        endpoints: &[Arc<E>],
        now: Instant,
        is_allowed: impl Fn(&Arc<E>) -> bool,
    ) -> Option<Arc<E>> {
        self.pick_and_admit(endpoints, now, |endpoint| {
            is_allowed(endpoint) && may_respond(&**endpoint, now)
        })
    }

    /// Picks an endpoint and admits the request to it.
    fn pick_and_admit(
        &self,
        endpoints: &[Arc<E>],
        now: Instant,
        is_allowed: impl Fn(&Arc<E>) -> bool,
    ) -> Option<Arc<E>> {
        // Another worker may take the one probe or attempt for which an endpoint was picked; then pick again.
        for _ in 0..MAX_PICK_ATTEMPTS {
            let can_be_picked = |endpoint: &Arc<E>| endpoint.breaker().can_be_picked(now) && is_allowed(endpoint);
            let endpoint = &endpoints[self.choose(endpoints, now, can_be_picked)?];
            let load = endpoint.load();
            let attempt = load.delay(now).filter(|_| !endpoint.can_be_checked());
            let is_taken = attempt.is_some_and(|delay| delay.is_attempt_due() && !load.try_record_attempt(delay, now));
            if !is_taken && endpoint.breaker().admit(now) {
                return Some(endpoint.clone());
            }
        }
        None
    }

    fn choose(&self, endpoints: &[Arc<E>], now: Instant, can_be_picked: impl Fn(&Arc<E>) -> bool) -> Option<usize> {
        match self.strategy {
            Strategy::PeakEwma => p2c::choose(
                endpoints.len(),
                |below| fastrand::usize(..below),
                |index| {
                    let endpoint = &endpoints[index];
                    can_be_picked(endpoint).then(|| endpoint.load().cost(now))
                },
            ),
            Strategy::RoundRobin => {
                let start = self.round_robin_next.fetch_add(1, Ordering::Relaxed);
                (0..endpoints.len())
                    .map(|step| start.wrapping_add(step) % endpoints.len())
                    .find(|index| can_be_picked(&endpoints[*index]))
            }
        }
    }

    /// # Errors
    /// The control plane has reported that the service has no endpoints. An empty list is no error.
    fn fail_if_no_endpoints(&self) -> Result<(), PickError> {
        match &**self.discovery_state.load() {
            DiscoveryState::NoEndpoints => Err(PickError::NoEndpoints),
            DiscoveryState::Unknown | DiscoveryState::Endpoints(_) => Ok(()),
        }
    }

    fn unavailable_reason(&self) -> UnavailableReason {
        match &**self.discovery_state.load() {
            DiscoveryState::Endpoints(endpoints)
                if endpoints.iter().any(|endpoint| endpoint.breaker().is_ejected()) =>
            {
                UnavailableReason::Ejected
            }
            DiscoveryState::Endpoints(endpoints) => UnavailableReason::Unreachable(
                endpoints
                    .iter()
                    .find_map(|endpoint| endpoint.breaker().dial_failure_cause()),
            ),
            DiscoveryState::Unknown | DiscoveryState::NoEndpoints => UnavailableReason::Unreachable(None),
        }
    }

    /// The earliest time at which a probe of an endpoint is due; `None` if no endpoint is unavailable.
    fn next_probe_at(&self) -> Option<Instant> {
        match &**self.discovery_state.load() {
            DiscoveryState::Endpoints(endpoints) => endpoints
                .iter()
                .filter_map(|endpoint| endpoint.breaker().next_probe_at())
                .min(),
            DiscoveryState::Unknown | DiscoveryState::NoEndpoints => None,
        }
    }
}

/// Whether the endpoint may get a request: its response is not late, it is being checked, or an attempt is due. Begins the check.
fn may_respond(endpoint: &impl Candidate, now: Instant) -> bool {
    let load = endpoint.load();
    let Some(delay) = load.delay(now) else { return true };
    if !endpoint.can_be_checked() {
        return delay.is_attempt_due();
    }
    if delay.is_unchecked() && load.try_record_attempt(delay, now) {
        endpoint.check();
    }
    !delay.is_check_late()
}

/// A place in the queue, which is freed when this is dropped.
struct QueuePermit<'a>(&'a AtomicUsize);

impl<'a> QueuePermit<'a> {
    fn try_acquire(n_queued: &'a AtomicUsize, capacity: usize) -> Result<Self, PickError> {
        let taken = n_queued.fetch_add(1, Ordering::Relaxed);
        let permit = Self(n_queued);
        if taken < capacity {
            Ok(permit)
        } else {
            Err(PickError::QueueFull(taken))
        }
    }
}

impl Drop for QueuePermit<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Maximum number of picks if other workers take the probe of each picked endpoint first. Then the request waits in the queue.
const MAX_PICK_ATTEMPTS: usize = 3;

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    use tokio::time::advance;
    use tulle_core::metrics::{Labels, Registry};

    use super::*;
    use crate::balance::breaker::Breaker;
    use crate::balance::candidate::InFlightGuard;
    use crate::balance::load::Load;
    use crate::metrics::balancers::Families;
    use crate::policy::client::LoadParams;

    const MS: Duration = Duration::from_millis(1);
    const FAILFAST: Duration = Duration::from_secs(3);

    #[derive(Debug)]
    struct Peer {
        number: usize,
        /// Counts checks; `None` if the peer cannot be checked.
        n_checks: Option<AtomicUsize>,
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
            self.n_checks.is_some()
        }

        fn check(&self) {
            self.n_checks.as_ref().unwrap().fetch_add(1, Ordering::Relaxed);
        }
    }

    fn series() -> Arc<BalancerSeries> {
        Families::new(&Registry::new(), "http").series(&Labels::new())
    }

    fn balancer(strategy: Strategy) -> Arc<Balancer<Peer>> {
        Arc::new(Balancer::new(
            strategy,
            Queue {
                capacity: 2,
                failfast_timeout: FAILFAST,
            },
        ))
    }

    fn peers(balancer: &Balancer<Peer>, count: usize) -> Vec<Arc<Peer>> {
        peers_with(balancer, count, |_, peer| peer)
    }

    fn peers_with(balancer: &Balancer<Peer>, count: usize, change: impl Fn(usize, Peer) -> Peer) -> Vec<Arc<Peer>> {
        let now = Instant::now();
        let params = LoadParams::PeakEwma {
            default_rtt: 30 * MS,
            decay: Duration::from_secs(10),
        };
        let peer = |number| Peer {
            number,
            n_checks: None,
            load: Load::new(params, now),
            breaker: Breaker::new(None, balancer.breaker_group(), now),
        };
        let peers: Vec<_> = (0..count)
            .map(|number| Arc::new(change(number, peer(number))))
            .collect();
        balancer.publish(DiscoveryState::Endpoints(peers.iter().cloned().collect()));
        peers
    }

    /// Shares of the requests that peers with these latencies get at a fixed request rate, in virtual time.
    fn shares(strategy: Strategy, millis: &[u32], requests_per_second: u32) -> Vec<f64> {
        let balancer = balancer(strategy);
        peers(&balancer, millis.len());
        let (start, seconds) = (Instant::now(), 30);
        let mut hits = vec![0_u32; millis.len()];
        let mut due = BinaryHeap::new();
        let mut in_flight: Vec<Option<InFlightGuard<Peer>>> = Vec::new();
        for request in 0..requests_per_second * seconds {
            let now = start + Duration::from_secs(1) * request / requests_per_second;
            while due.peek().is_some_and(|Reverse((at, _))| *at <= now) {
                let Reverse((at, flight)): Reverse<(Instant, usize)> = due.pop().unwrap();
                in_flight[flight].take().unwrap().record_response(at);
            }
            let peer = balancer.try_pick(now, &[]).unwrap();
            hits[peer.number] += 1;
            due.push(Reverse((now + MS * millis[peer.number], in_flight.len())));
            in_flight.push(Some(InFlightGuard::new(peer, now)));
        }
        hits.into_iter()
            .map(|hits| f64::from(hits) / f64::from(requests_per_second * seconds))
            .collect()
    }

    #[test]
    fn a_slow_endpoint_gets_few_requests() {
        for requests_per_second in [20, 100, 500, 3000] {
            let shares = shares(Strategy::PeakEwma, &[1, 1, 51], requests_per_second);
            assert!(shares[2] < 0.15, "{requests_per_second} requests a second: {shares:?}");
            assert!(
                shares[0] > 0.3 && shares[1] > 0.3,
                "{requests_per_second} requests a second: {shares:?}"
            );
        }
    }

    /// Requests for 8 s, one each 2 ms, to four peers, of which two do not respond. Returns when they got requests, in ms.
    fn lost_requests(strategy: Strategy, can_be_checked: bool) -> Vec<u32> {
        let balancer = balancer(strategy);
        let all = peers_with(&balancer, 4, |_, peer| Peer {
            n_checks: can_be_checked.then(AtomicUsize::default),
            ..peer
        });
        let start = Instant::now();
        for peer in &all {
            InFlightGuard::new(peer.clone(), start).record_response(start + MS);
        }
        let mut lost = Vec::new();
        for ms in (2..8000).step_by(2) {
            let now = start + ms * MS;
            let peer = balancer.try_pick(now, &[]).unwrap();
            let number = peer.number;
            let mut in_flight = InFlightGuard::new(peer, now);
            match number {
                0 | 1 => lost.push((ms, in_flight)),
                _ => in_flight.record_response(now + MS),
            }
        }
        let checks = all
            .iter()
            .map(|peer| peer.n_checks.as_ref().map(|n| n.load(Ordering::Relaxed)));
        let expected = can_be_checked.then_some(1);
        assert!(checks.take(2).all(|n| n == expected), "each is checked once");
        // If none responds, all get requests.
        let now = start + Duration::from_secs(20);
        let pending: Vec<_> = all.iter().map(|peer| InFlightGuard::new(peer.clone(), now)).collect();
        let later = now + Duration::from_secs(1);
        for _ in 0..8 {
            assert!(balancer.try_pick(later, &[]).is_some());
        }
        assert!(!can_be_checked || balancer.pick_where(later + 500 * MS, |_| true).is_none());
        drop(pending);
        lost.into_iter().map(|(ms, _)| ms).collect()
    }

    #[test]
    fn endpoints_that_stop_responding_get_few_requests_while_others_respond() {
        for strategy in [Strategy::PeakEwma, Strategy::RoundRobin] {
            // An answer to the check is late after 40 ms.
            let lost = lost_requests(strategy, true);
            assert!(lost.iter().all(|ms| *ms <= 44), "{strategy:?}: {lost:?}");
            // A peer that cannot be checked gets at most one request at 40, 80, 160, … ms.
            let lost = lost_requests(strategy, false);
            let attempts = lost.iter().filter(|ms| **ms > 24).count();
            assert!((2..=20).contains(&attempts), "{strategy:?}: {lost:?}");
        }
    }

    #[test]
    fn a_peer_with_one_slow_request_keeps_its_share() {
        for strategy in [Strategy::PeakEwma, Strategy::RoundRobin] {
            let balancer = balancer(strategy);
            let all = peers_with(&balancer, 2, |_, peer| Peer {
                n_checks: Some(AtomicUsize::default()),
                ..peer
            });
            let start = Instant::now();
            for peer in &all {
                InFlightGuard::new(peer.clone(), start).record_response(start + MS);
            }
            let _slow = InFlightGuard::new(all[0].clone(), start + MS);
            let mut n = 0;
            for request in 1..=100 {
                // The peer answers checks at once. Requests are further apart than the limit.
                let now = start + 100 * MS * request;
                let peer = balancer.try_pick(now, &[]).unwrap();
                n += usize::from(peer.number == 0);
                InFlightGuard::new(peer, now).record_response(now + MS);
                all[0].load.record_response(now + MS);
            }
            // Its request in flight makes it cost twice as much as the other.
            let expected = if strategy == Strategy::RoundRobin { 50 } else { 0 };
            assert_eq!(n, expected, "{strategy:?}");
        }
    }

    #[test]
    fn round_robin_ignores_latency() {
        for share in shares(Strategy::RoundRobin, &[1, 1, 51], 500) {
            assert!((share - 1.0 / 3.0).abs() < 0.01, "{share}");
        }
    }

    #[test]
    fn endpoints_of_equal_latency_get_equal_shares() {
        for share in shares(Strategy::PeakEwma, &[2, 2, 2, 2], 500) {
            assert!((share - 0.25).abs() < 0.05, "{share}");
        }
    }

    #[test]
    fn unavailable_endpoints_are_skipped_and_untried_ones_preferred() {
        for strategy in [Strategy::PeakEwma, Strategy::RoundRobin] {
            let balancer = balancer(strategy);
            let peers = peers(&balancer, 4);
            let now = Instant::now();
            peers[0].breaker.record_dial_failure("connect-refused", now);
            for _ in 0..100 {
                let number = balancer.try_pick(now, &peers[1..3]).unwrap().number;
                assert_eq!(number, 3);
                let number = balancer.try_pick(now, &peers[1..]).unwrap().number;
                assert_ne!(number, 0, "a tried endpoint is better than none");
            }
            for peer in &peers[1..] {
                peer.breaker.record_dial_failure("connect-refused", now);
            }
            assert!(balancer.try_pick(now, &[]).is_none());
            assert!(!balancer.can_pick(now));
            assert!(balancer.can_pick(now + 200 * MS));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wait_for_discovery() {
        let balancer = balancer(Strategy::PeakEwma);
        let waiter = tokio::spawn({
            let balancer = balancer.clone();
            async move { balancer.pick(&[], &series()).await.map(|peer| peer.number) }
        });
        advance(1000 * MS).await;
        peers(&balancer, 1);
        assert_eq!(waiter.await.unwrap(), Ok(0));
        assert_eq!(balancer.n_queued.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_timeout_ends_the_wait_of_all_queued_requests() {
        let balancer = balancer(Strategy::PeakEwma);
        balancer.publish(DiscoveryState::Endpoints(Box::new([])));
        let first_series = series();
        let (first, second) = tokio::join!(balancer.pick(&[], &first_series), async {
            advance(FAILFAST / 3).await;
            balancer.pick(&[], &series()).await
        });
        for (result, waited) in [(first, FAILFAST), (second, FAILFAST * 2 / 3)] {
            let expected = PickError::QueueTimeout(waited, UnavailableReason::Unreachable(None));
            assert_eq!(result.unwrap_err(), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_without_endpoints_fails_at_once() {
        let balancer = balancer(Strategy::PeakEwma);
        let waiter = tokio::spawn({
            let balancer = balancer.clone();
            async move { balancer.pick(&[], &series()).await.map(|peer| peer.number) }
        });
        tokio::task::yield_now().await;
        let start = Instant::now();
        balancer.publish(DiscoveryState::NoEndpoints);
        assert_eq!(waiter.await.unwrap(), Err(PickError::NoEndpoints));
        assert_eq!(balancer.pick(&[], &series()).await.unwrap_err(), PickError::NoEndpoints);
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn after_one_timeout_requests_fail_fast_until_an_endpoint_is_available() {
        let balancer = balancer(Strategy::PeakEwma);
        balancer.publish(DiscoveryState::Endpoints(Box::new([])));
        let start = Instant::now();
        assert_eq!(
            balancer.pick(&[], &series()).await.unwrap_err(),
            PickError::QueueTimeout(FAILFAST, UnavailableReason::Unreachable(None))
        );
        assert_eq!(start.elapsed(), FAILFAST);
        assert_eq!(
            balancer.pick(&[], &series()).await.unwrap_err(),
            PickError::FailingFast(UnavailableReason::Unreachable(None))
        );
        assert_eq!(start.elapsed(), FAILFAST);
        let peers = peers(&balancer, 1);
        assert_eq!(balancer.pick(&[], &series()).await.unwrap().number, 0);
        peers[0].breaker.record_dial_failure("connect-refused", Instant::now());
        assert_eq!(balancer.pick(&[], &series()).await.unwrap().number, 0, "waits again");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wait_for_a_backoff_and_one_of_them_probes() {
        let balancer = balancer(Strategy::PeakEwma);
        let peers = peers(&balancer, 1);
        let start = Instant::now();
        peers[0].breaker.record_dial_failure("connect-refused", start);
        let series = series();
        let (first, second) = tokio::join!(balancer.pick(&[], &series), async {
            tokio::task::yield_now().await;
            let second = balancer.pick(&[], &series).await;
            (second, start.elapsed())
        });
        assert!(first.is_ok());
        let (second, waited) = second;
        assert!(second.is_ok());
        assert!(
            (200 * MS..250 * MS).contains(&waited),
            "only the probe passes until then: {waited:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_successful_probe_releases_queued_requests() {
        let balancer = balancer(Strategy::PeakEwma);
        let peers = peers(&balancer, 1);
        let start = Instant::now();
        peers[0].breaker.record_dial_failure("connect-refused", start);
        balancer.pick(&[], &series()).await.unwrap();
        let waiter = tokio::spawn({
            let balancer = balancer.clone();
            async move { balancer.pick(&[], &series()).await.map(|_| start.elapsed()) }
        });
        tokio::task::yield_now().await;
        let connected = start.elapsed();
        peers[0].breaker.record_connected();
        assert_eq!(waiter.await.unwrap(), Ok(connected));
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_is_bounded() {
        let balancer = balancer(Strategy::PeakEwma);
        balancer.publish(DiscoveryState::Endpoints(Box::new([])));
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let balancer = balancer.clone();
                tokio::spawn(async move { balancer.pick(&[], &series()).await.map(|_| ()) })
            })
            .collect();
        tokio::task::yield_now().await;
        assert_eq!(
            balancer.pick(&[], &series()).await.unwrap_err(),
            PickError::QueueFull(2)
        );
        waiters[0].abort();
        for waiter in waiters {
            let _ = waiter.await;
        }
        assert_eq!(balancer.n_queued.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_woken_by_the_first_endpoints_do_not_fill_the_queue() {
        let balancer = balancer(Strategy::PeakEwma);
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let balancer = balancer.clone();
                tokio::spawn(async move { balancer.pick(&[], &series()).await.map(|_| ()) })
            })
            .collect();
        tokio::task::yield_now().await;
        assert_eq!(balancer.n_queued.load(Ordering::Relaxed), 3);
        peers(&balancer, 1);
        // As a `pick` whose first attempt was before there were endpoints.
        assert!(balancer.wait_for_endpoint(&[], &series()).await.is_ok());
        for waiter in waiters {
            assert_eq!(waiter.await.unwrap(), Ok(()));
        }
    }

    #[test]
    fn waiting_is_boxed_so_that_picking_stays_small() {
        let balancer = balancer(Strategy::PeakEwma);
        assert!(size_of_val(&balancer.pick(&[], &series())) <= 64);
    }

    #[tokio::test(start_paused = true)]
    async fn metrics_of_endpoints_queue_and_queue_mode_are_recorded() {
        let registry = Registry::new();
        let series_of_parent = |parent| Families::new(&registry, "http").series(&Labels::new().with("parent", parent));
        let (one, other) = (series_of_parent("one"), series_of_parent("other"));
        let balancer = balancer(Strategy::PeakEwma);
        balancer.register_series(&one);
        let same_as_one = series_of_parent("one");
        balancer.register_series(&same_as_one);
        let peers = peers(&balancer, 2);
        balancer.record_update(UpdateOp::Reset);
        balancer.register_series(&other);
        let assert_metrics = |expected: &[&str]| {
            balancer.update_gauges(Instant::now());
            let page = registry.render();
            for line in expected {
                let line = format!("outbound_http_balancer_{line}\n");
                assert!(page.contains(&line), "{line}{page}");
            }
        };
        peers[1].breaker.record_dial_failure("connect-refused", Instant::now());
        assert_metrics(&[
            r#"endpoints{parent="one",endpoint_state="ready"} 1"#,
            r#"endpoints{parent="other",endpoint_state="pending"} 1"#,
            r#"p2c_endpoints{parent="other"} 2"#,
            r#"p2c_updates_total{parent="one",op="Reset"} 1"#,
            r#"p2c_updates_total{parent="other",op="Reset"} 0"#,
            r#"queue_gate_timeout_seconds{parent="one"} 3"#,
        ]);
        balancer.publish(DiscoveryState::Endpoints(Box::new([])));
        balancer.pick(&[], &one).await.unwrap_err();
        assert_metrics(&[
            r#"queue_requests_total{parent="one"} 1"#,
            r#"queue_length{parent="one"} 0"#,
            r#"queue_latency_seconds_sum{parent="one"} 3"#,
            r#"queue_requests_total{parent="other"} 0"#,
            r#"queue_gate_shut_total{parent="other"} 1"#,
            r#"queue_gate_open_time_seconds{parent="other"} 0"#,
        ]);
        self::peers(&balancer, 1);
        balancer.pick(&[], &one).await.unwrap();
        assert_metrics(&[
            r#"queue_gate_open_total{parent="other"} 2"#,
            r#"queue_gate_shut_time_seconds{parent="one"} 0"#,
        ]);
    }
}
