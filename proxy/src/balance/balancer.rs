//! Picking an endpoint: now, or after a bounded wait, or failing fast.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use crate::balance::breaker::{Breaker, Fleet};
use crate::balance::load::Load;
use crate::balance::p2c;
use crate::metrics::balancers::{Gate, Op, Series};
use crate::policy::client::Queue;

/// What a balancer has to know of an endpoint.
pub(crate) trait Candidate {
    fn load(&self) -> &Load;
    fn breaker(&self) -> &Breaker;
}

/// How an endpoint is chosen among the available ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Strategy {
    /// Two at random, the one with the lower load.
    #[default]
    PeakEwma,
    /// One after the other.
    RoundRobin,
}

/// What discovery knows of a service.
#[derive(Debug)]
pub(crate) enum Discovered<E> {
    /// Nothing yet: requests wait.
    Unknown,
    /// Perhaps an empty list, when the last endpoint has just gone: requests wait.
    Endpoints(Box<[Arc<E>]>),
    /// Nobody is there and nobody is expected: requests fail at once.
    NoEndpoints,
}

impl<E> Discovered<E> {
    fn endpoints(&self) -> &[Arc<E>] {
        match self {
            Self::Endpoints(endpoints) => endpoints,
            Self::Unknown | Self::NoEndpoints => &[],
        }
    }
}

/// Why there is no endpoint for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PickError {
    #[error("the service has no endpoints")]
    NoEndpoints,
    #[error("no endpoint became available within {0:?}")]
    FailFast(Duration, Missing),
    #[error("no endpoint is available")]
    Unavailable(Missing),
    #[error("{0} requests wait for an endpoint already")]
    QueueFull(usize),
}

/// Where endpoints are that are not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// They cannot be reached, one of them for this cause; or nobody knows of any yet.
    Unready(Option<&'static str>),
    /// One at least was taken out for failing.
    Ejected,
}

/// The endpoints of one service, shared by all workers.
#[derive(Debug)]
pub(crate) struct Balancer<E> {
    strategy: Strategy,
    queue: Queue,
    snapshot: ArcSwap<Discovered<E>>,
    fleet: Fleet,
    /// Where round robin goes on.
    cursor: AtomicUsize,
    waiting: AtomicUsize,
    /// Set when a request has waited in vain, until an endpoint is available again.
    is_failing_fast: AtomicBool,
    /// What those who use it count of it.
    series: Mutex<Vec<Weak<Series>>>,
}

impl<E: Candidate> Balancer<E> {
    pub(crate) fn new(strategy: Strategy, queue: Queue) -> Self {
        Self {
            strategy,
            queue,
            snapshot: ArcSwap::from_pointee(Discovered::Unknown),
            fleet: Fleet::default(),
            cursor: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            is_failing_fast: AtomicBool::new(false),
            series: Mutex::default(),
        }
    }

    /// Counts in these series too, for as long as somebody else holds them.
    pub(crate) fn counted(&self, series: &Arc<Series>) {
        series.waits_for(self.queue.failfast_timeout.as_secs_f64());
        let mut all = self.series.lock();
        all.retain(|other| other.strong_count() > 0);
        if !all.iter().filter_map(Weak::upgrade).any(|other| other.is(series)) {
            series.turned(match self.is_failing_fast.load(Ordering::Relaxed) {
                true => Gate::Shut,
                false => Gate::Open,
            });
        }
        all.push(Arc::downgrade(series));
    }

    /// Counts what discovery told.
    pub(crate) fn told(&self, op: Op) {
        self.each_series(|series| series.told(op));
    }

    /// Counts the endpoints, as they are now.
    pub(crate) fn measure(&self, now: Instant) {
        let (ready, known) = match &**self.snapshot.load() {
            Discovered::Endpoints(endpoints) => {
                let ready = endpoints.iter().filter(|endpoint| endpoint.breaker().available(now));
                (ready.count(), endpoints.len())
            }
            Discovered::Unknown | Discovered::NoEndpoints => (0, 0),
        };
        self.each_series(|series| series.endpoints(ready, known - ready));
    }

    /// Tells each series once: several routes may count in the same.
    fn each_series(&self, tell: impl Fn(&Series)) {
        let all: Vec<_> = self.series.lock().iter().filter_map(Weak::upgrade).collect();
        for (index, series) in all.iter().enumerate() {
            if !all[..index].iter().any(|other| other.is(series)) {
                tell(series);
            }
        }
    }

    /// What discovery knows, and whether requests fail at once.
    pub(crate) fn shown(&self) -> (Arc<Discovered<E>>, bool) {
        (self.snapshot.load_full(), self.is_failing_fast.load(Ordering::Relaxed))
    }

    /// Lets requests wait, or fail at once.
    #[cold]
    fn turn(&self, gate: Gate) {
        let was_shut = self.is_failing_fast.swap(gate == Gate::Shut, Ordering::Relaxed);
        if was_shut != (gate == Gate::Shut) {
            self.each_series(|series| series.turned(gate));
        }
    }

    /// For the breakers of this balancer's endpoints: one that opens is noticed by those who wait.
    pub(crate) fn fleet(&self) -> Fleet {
        self.fleet.clone()
    }

    /// Publishes what discovery has learnt.
    pub(crate) fn update(&self, discovered: Discovered<E>) {
        self.fleet.resize(discovered.endpoints().len());
        let discovered = Arc::new(discovered);
        let before = self.snapshot.swap(discovered.clone());
        let kept: HashSet<_> = discovered.endpoints().iter().map(Arc::as_ptr).collect();
        for gone in before.endpoints() {
            if !kept.contains(&Arc::as_ptr(gone)) {
                gone.breaker().retire();
            }
        }
        self.fleet.wake();
    }

    /// Whether a request would get an endpoint at once.
    pub(crate) fn is_available(&self, now: Instant) -> bool {
        match &**self.snapshot.load() {
            Discovered::Endpoints(endpoints) => endpoints.iter().any(|endpoint| endpoint.breaker().available(now)),
            Discovered::Unknown | Discovered::NoEndpoints => false,
        }
    }

    /// An available endpoint, rather one that this request has not tried.
    pub(crate) fn pick_now(&self, now: Instant, tried: &[Arc<E>]) -> Option<Arc<E>> {
        let snapshot = self.snapshot.load();
        let Discovered::Endpoints(endpoints) = &**snapshot else {
            return None;
        };
        let picked = self.admit(endpoints, now, |endpoint| {
            !tried.iter().any(|tried| Arc::ptr_eq(tried, endpoint))
        });
        let picked = match picked {
            None if !tried.is_empty() => self.admit(endpoints, now, |_| true),
            picked => picked,
        };
        if picked.is_some() && self.is_failing_fast.load(Ordering::Relaxed) {
            self.turn(Gate::Open);
        }
        picked
    }

    /// An available endpoint of which this holds.
    pub(crate) fn pick_where(&self, now: Instant, may: impl Fn(&Arc<E>) -> bool) -> Option<Arc<E>> {
        match &**self.snapshot.load() {
            Discovered::Endpoints(endpoints) => self.admit(endpoints, now, may),
            Discovered::Unknown | Discovered::NoEndpoints => None,
        }
    }

    /// An available endpoint, as soon as there is one; a wait is counted in `series`.
    ///
    /// # Errors
    /// There are none, none became available in time, nobody waits any more because of that, or too many do.
    pub(crate) async fn pick(&self, tried: &[Arc<E>], series: &Series) -> Result<Arc<E>, PickError> {
        match self.pick_now(Instant::now(), tried) {
            Some(endpoint) => Ok(endpoint),
            // Rare, and its timer is large.
            None => Box::pin(self.wait(tried, series)).await,
        }
    }

    async fn wait(&self, tried: &[Arc<E>], series: &Series) -> Result<Arc<E>, PickError> {
        self.refuse_if_empty()?;
        if self.is_failing_fast.load(Ordering::Relaxed) {
            return Err(PickError::Unavailable(self.missing()));
        }
        // Before discovery has answered, all who come wait for the same answer.
        let capacity = match &**self.snapshot.load() {
            Discovered::Unknown => usize::MAX,
            Discovered::Endpoints(_) | Discovered::NoEndpoints => self.queue.capacity,
        };
        let _place = match Place::take(&self.waiting, capacity) {
            Ok(place) => place,
            // The places may be of those whom the same answer of discovery, this very moment, wakes.
            Err(full) => return self.pick_now(Instant::now(), tried).ok_or(full),
        };
        let _waiting = series.wait();
        let deadline = Instant::now() + self.queue.failfast_timeout;
        loop {
            // Listening starts before looking, so that nothing that happens between the two is missed.
            let mut woken = std::pin::pin!(self.fleet.woken());
            woken.as_mut().enable();
            let now = Instant::now();
            if let Some(endpoint) = self.pick_now(now, tried) {
                return Ok(endpoint);
            }
            self.refuse_if_empty()?;
            if now >= deadline {
                self.turn(Gate::Shut);
                self.fleet.wake(); // who came later would wait in vain as well
            }
            if self.is_failing_fast.load(Ordering::Relaxed) {
                return Err(PickError::FailFast(self.queue.failfast_timeout, self.missing()));
            }
            let next = self.available_at().map_or(deadline, |at| at.min(deadline));
            tokio::select! {
                // Both may be dropped at any time: one only listens, the other only sleeps.
                () = woken => {}
                () = sleep_until(next) => {}
            }
        }
    }

    fn admit(&self, endpoints: &[Arc<E>], now: Instant, may: impl Fn(&Arc<E>) -> bool) -> Option<Arc<E>> {
        // Another worker may take the one probe that made an endpoint look available; then there is a next draw.
        for _ in 0..ADMISSIONS {
            let is_available = |endpoint: &Arc<E>| may(endpoint) && endpoint.breaker().available(now);
            let index = match self.strategy {
                Strategy::PeakEwma => p2c::choose(
                    endpoints.len(),
                    |below| fastrand::usize(..below),
                    |index| {
                        let endpoint = &endpoints[index];
                        is_available(endpoint).then(|| endpoint.load().cost(now))
                    },
                ),
                Strategy::RoundRobin => {
                    let start = self.cursor.fetch_add(1, Ordering::Relaxed);
                    (0..endpoints.len())
                        .map(|step| start.wrapping_add(step) % endpoints.len())
                        .find(|index| is_available(&endpoints[*index]))
                }
            };
            let endpoint = &endpoints[index?];
            if endpoint.breaker().admit(now) {
                return Some(endpoint.clone());
            }
        }
        None
    }

    fn refuse_if_empty(&self) -> Result<(), PickError> {
        match &**self.snapshot.load() {
            Discovered::NoEndpoints => Err(PickError::NoEndpoints),
            Discovered::Unknown | Discovered::Endpoints(_) => Ok(()),
        }
    }

    fn missing(&self) -> Missing {
        match &**self.snapshot.load() {
            Discovered::Endpoints(endpoints) if endpoints.iter().any(|endpoint| endpoint.breaker().is_ejected()) => {
                Missing::Ejected
            }
            Discovered::Endpoints(endpoints) => {
                Missing::Unready(endpoints.iter().find_map(|endpoint| endpoint.breaker().unreached()))
            }
            Discovered::Unknown | Discovered::NoEndpoints => Missing::Unready(None),
        }
    }

    /// When the first of the unavailable endpoints may be tried again.
    fn available_at(&self) -> Option<Instant> {
        match &**self.snapshot.load() {
            Discovered::Endpoints(endpoints) => endpoints
                .iter()
                .filter_map(|endpoint| endpoint.breaker().available_at())
                .min(),
            Discovered::Unknown | Discovered::NoEndpoints => None,
        }
    }
}

/// A place among those who wait; it is free again when this is dropped.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(waiting: &'a AtomicUsize, capacity: usize) -> Result<Self, PickError> {
        let taken = waiting.fetch_add(1, Ordering::Relaxed);
        let place = Self(waiting);
        if taken < capacity {
            Ok(place)
        } else {
            Err(PickError::QueueFull(taken))
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Draws before a request that lost every race for a probe has to wait.
const ADMISSIONS: usize = 3;

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    use tokio::time::advance;
    use tulle_core::metrics::{Labels, Registry};

    use super::*;
    use crate::balance::load::Pending;
    use crate::metrics::balancers::Families;
    use crate::policy::client::LoadParams;

    const MS: Duration = Duration::from_millis(1);
    const FAILFAST: Duration = Duration::from_secs(3);

    #[derive(Debug)]
    struct Peer {
        number: usize,
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

    fn series() -> Arc<Series> {
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
        let now = Instant::now();
        let params = LoadParams::PeakEwma {
            default_rtt: 30 * MS,
            decay: Duration::from_secs(10),
        };
        let peer = |number| Peer {
            number,
            load: Load::new(params, now),
            breaker: Breaker::new(None, balancer.fleet(), now),
        };
        let peers: Vec<_> = (0..count).map(|number| Arc::new(peer(number))).collect();
        balancer.update(Discovered::Endpoints(peers.iter().cloned().collect()));
        peers
    }

    /// Shares of peers that answer after so many milliseconds, at a fixed rate of requests, in virtual time.
    fn shares(strategy: Strategy, millis: &[u32], requests_per_second: u32) -> Vec<f64> {
        let balancer = balancer(strategy);
        peers(&balancer, millis.len());
        let (start, seconds) = (Instant::now(), 30);
        let mut hits = vec![0_u32; millis.len()];
        let mut due = BinaryHeap::new();
        let mut flights: Vec<Option<Pending<Peer>>> = Vec::new();
        for request in 0..requests_per_second * seconds {
            let now = start + Duration::from_secs(1) * request / requests_per_second;
            while due.peek().is_some_and(|Reverse((at, _))| *at <= now) {
                let Reverse((at, flight)): Reverse<(Instant, usize)> = due.pop().unwrap();
                flights[flight].take().unwrap().answered(at);
            }
            let peer = balancer.pick_now(now, &[]).unwrap();
            hits[peer.number] += 1;
            due.push(Reverse((now + MS * millis[peer.number], flights.len())));
            flights.push(Some(Pending::new(peer, now)));
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

    #[test]
    fn round_robin_does_not_care() {
        for share in shares(Strategy::RoundRobin, &[1, 1, 51], 500) {
            assert!((share - 1.0 / 3.0).abs() < 0.01, "{share}");
        }
    }

    #[test]
    fn equals_get_equal_shares() {
        for share in shares(Strategy::PeakEwma, &[2, 2, 2, 2], 500) {
            assert!((share - 0.25).abs() < 0.05, "{share}");
        }
    }

    #[test]
    fn the_unavailable_are_passed_over_and_the_untried_preferred() {
        for strategy in [Strategy::PeakEwma, Strategy::RoundRobin] {
            let balancer = balancer(strategy);
            let peers = peers(&balancer, 4);
            let now = Instant::now();
            peers[0].breaker.connect_failed("connect-refused", now);
            for _ in 0..100 {
                let number = balancer.pick_now(now, &peers[1..3]).unwrap().number;
                assert_eq!(number, 3);
                let number = balancer.pick_now(now, &peers[1..]).unwrap().number;
                assert_ne!(number, 0, "better one more time than not at all");
            }
            for peer in &peers[1..] {
                peer.breaker.connect_failed("connect-refused", now);
            }
            assert!(balancer.pick_now(now, &[]).is_none());
            assert!(!balancer.is_available(now));
            assert!(balancer.is_available(now + 200 * MS));
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
        assert_eq!(balancer.waiting.load(Ordering::Relaxed), 0);
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
        balancer.update(Discovered::NoEndpoints);
        assert_eq!(waiter.await.unwrap(), Err(PickError::NoEndpoints));
        assert_eq!(balancer.pick(&[], &series()).await.unwrap_err(), PickError::NoEndpoints);
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn after_one_wait_in_vain_requests_are_shed_until_somebody_is_there() {
        let balancer = balancer(Strategy::PeakEwma);
        balancer.update(Discovered::Endpoints(Box::new([])));
        let start = Instant::now();
        assert_eq!(
            balancer.pick(&[], &series()).await.unwrap_err(),
            PickError::FailFast(FAILFAST, Missing::Unready(None))
        );
        assert_eq!(start.elapsed(), FAILFAST);
        assert_eq!(
            balancer.pick(&[], &series()).await.unwrap_err(),
            PickError::Unavailable(Missing::Unready(None))
        );
        assert_eq!(start.elapsed(), FAILFAST);
        let peers = peers(&balancer, 1);
        assert_eq!(balancer.pick(&[], &series()).await.unwrap().number, 0);
        peers[0].breaker.connect_failed("connect-refused", Instant::now());
        assert_eq!(balancer.pick(&[], &series()).await.unwrap().number, 0, "waits again");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wait_for_a_backoff_and_one_of_them_probes() {
        let balancer = balancer(Strategy::PeakEwma);
        let peers = peers(&balancer, 1);
        let start = Instant::now();
        peers[0].breaker.connect_failed("connect-refused", start);
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
            "the probe had its time alone: {waited:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_succeeds_lets_the_others_go() {
        let balancer = balancer(Strategy::PeakEwma);
        let peers = peers(&balancer, 1);
        let start = Instant::now();
        peers[0].breaker.connect_failed("connect-refused", start);
        balancer.pick(&[], &series()).await.unwrap();
        let waiter = tokio::spawn({
            let balancer = balancer.clone();
            async move { balancer.pick(&[], &series()).await.map(|_| start.elapsed()) }
        });
        tokio::task::yield_now().await;
        let connected = start.elapsed();
        peers[0].breaker.connected();
        assert_eq!(waiter.await.unwrap(), Ok(connected));
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_is_bounded() {
        let balancer = balancer(Strategy::PeakEwma);
        balancer.update(Discovered::Endpoints(Box::new([])));
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
        assert_eq!(balancer.waiting.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_refused_for_those_whom_the_first_endpoints_wake() {
        let balancer = balancer(Strategy::PeakEwma);
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let balancer = balancer.clone();
                tokio::spawn(async move { balancer.pick(&[], &series()).await.map(|_| ()) })
            })
            .collect();
        tokio::task::yield_now().await;
        assert_eq!(balancer.waiting.load(Ordering::Relaxed), 3);
        peers(&balancer, 1);
        // Its first look was before there were endpoints, its second is after.
        assert!(balancer.wait(&[], &series()).await.is_ok());
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
    async fn endpoints_waits_and_their_end_are_counted() {
        let registry = Registry::new();
        let of = |parent| Families::new(&registry, "http").series(&Labels::new().with("parent", parent));
        let (one, other) = (of("one"), of("other"));
        let balancer = balancer(Strategy::PeakEwma);
        balancer.counted(&one);
        let again = of("one");
        balancer.counted(&again);
        let peers = peers(&balancer, 2);
        balancer.told(Op::Reset);
        balancer.counted(&other);
        let says = |expected: &[&str]| {
            balancer.measure(Instant::now());
            let page = registry.render();
            for line in expected {
                let line = format!("outbound_http_balancer_{line}\n");
                assert!(page.contains(&line), "{line}{page}");
            }
        };
        peers[1].breaker.connect_failed("connect-refused", Instant::now());
        says(&[
            r#"endpoints{parent="one",endpoint_state="ready"} 1"#,
            r#"endpoints{parent="other",endpoint_state="pending"} 1"#,
            r#"p2c_endpoints{parent="other"} 2"#,
            r#"p2c_updates_total{parent="one",op="Reset"} 1"#,
            r#"p2c_updates_total{parent="other",op="Reset"} 0"#,
            r#"queue_gate_timeout_seconds{parent="one"} 3"#,
        ]);
        balancer.update(Discovered::Endpoints(Box::new([])));
        balancer.pick(&[], &one).await.unwrap_err();
        says(&[
            r#"queue_requests_total{parent="one"} 1"#,
            r#"queue_length{parent="one"} 0"#,
            r#"queue_latency_seconds_sum{parent="one"} 3"#,
            r#"queue_requests_total{parent="other"} 0"#,
            r#"queue_gate_shut_total{parent="other"} 1"#,
            r#"queue_gate_open_time_seconds{parent="other"} 0"#,
        ]);
        self::peers(&balancer, 1);
        balancer.pick(&[], &one).await.unwrap();
        says(&[
            r#"queue_gate_open_total{parent="other"} 2"#,
            r#"queue_gate_shut_time_seconds{parent="one"} 0"#,
        ]);
    }
}
