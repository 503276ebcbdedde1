use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use tokio::time::advance;
use tulle_core::backoff::Backoff;
use tulle_core::metrics::{Labels, Registry};

use super::*;
use crate::balance::breaker::{Breaker, RequestOutcome};
use crate::balance::candidate::InFlightGuard;
use crate::balance::load::Load;
use crate::metrics::balancers::Families;
use crate::policy::client::{AccrualKind, BackoffPolicy, FailureAccrual, LoadParams};

const MS: Duration = Duration::from_millis(1);
const FAILFAST: Duration = Duration::from_secs(3);

#[derive(Debug)]
struct Peer {
    number: usize,
    /// Number of checks; `None` if the peer cannot be checked.
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

/// Creates peers, and publishes them as the endpoints of `balancer`.
fn publish_peers(balancer: &Balancer<Peer>, count: usize) -> Vec<Arc<Peer>> {
    publish_peers_with(balancer, count, |_, peer| peer)
}

fn publish_peers_with(balancer: &Balancer<Peer>, count: usize, change: impl Fn(usize, Peer) -> Peer) -> Vec<Arc<Peer>> {
    let peers = new_peers(balancer, count, change);
    balancer.publish(DiscoveryState::with_endpoints(&peers, &[]));
    peers
}

fn new_peers(balancer: &Balancer<Peer>, count: usize, change: impl Fn(usize, Peer) -> Peer) -> Vec<Arc<Peer>> {
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
    (0..count)
        .map(|number| Arc::new(change(number, peer(number))))
        .collect()
}

/// The share of requests that each peer gets at a fixed request rate, in virtual time. `millis` are the latencies of the peers.
fn shares(strategy: Strategy, millis: &[u32], requests_per_second: u32) -> Vec<f64> {
    let balancer = balancer(strategy);
    publish_peers(&balancer, millis.len());
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

/// Sends one request every 2 ms for 8 s to four peers, of which the first two do not respond. Returns how long after its first
/// request, in ms, each of these two got its other requests.
fn lost_request_times(strategy: Strategy, can_be_checked: bool) -> [Vec<u32>; 2] {
    let balancer = balancer(strategy);
    let all = publish_peers_with(&balancer, 4, |_, peer| Peer {
        n_checks: can_be_checked.then(AtomicUsize::default),
        ..peer
    });
    let start = Instant::now();
    for peer in &all {
        InFlightGuard::new(peer.clone(), start).record_response(start + MS);
    }
    let mut lost = [const { Vec::new() }; 2];
    for ms in (2..8000).step_by(2) {
        let now = start + ms * MS;
        let peer = balancer.try_pick(now, &[]).unwrap();
        let number = peer.number;
        let mut in_flight = InFlightGuard::new(peer, now);
        match number {
            number @ (0 | 1) => lost[number].push((ms, in_flight)),
            _ => in_flight.record_response(now + MS),
        }
    }
    let checks = all
        .iter()
        .map(|peer| peer.n_checks.as_ref().map(|n| n.load(Ordering::Relaxed)));
    let expected = can_be_checked.then_some(1);
    assert!(checks.take(2).all(|n| n == expected), "each is checked once");
    // If no peer responds, requests go to all of them.
    let now = start + Duration::from_secs(20);
    let pending: Vec<_> = all.iter().map(|peer| InFlightGuard::new(peer.clone(), now)).collect();
    let later = now + Duration::from_secs(1);
    for _ in 0..8 {
        assert!(balancer.try_pick(later, &[]).is_some());
    }
    assert!(!can_be_checked || balancer.pick_where(later + 500 * MS, |_| true).is_none());
    drop(pending);
    lost.map(|lost| lost[1..].iter().map(|(ms, _)| ms - lost[0].0).collect())
}

#[test]
fn endpoints_that_stop_responding_get_few_requests_while_others_respond() {
    for strategy in [Strategy::PeakEwma, Strategy::RoundRobin] {
        // A peer is late 20 ms after its first request. A pick that considers it then checks it, and 20 ms later the answer is
        // late too. Picks are random: in the 60 ms that are left, each of 30 picks considers it with a probability of 1/2.
        for lost in lost_request_times(strategy, true) {
            assert!(lost.iter().all(|ms| *ms <= 100), "{strategy:?}: {lost:?}");
        }
        // A peer that cannot be checked gets at most one request at 40, 80, 160, … ms.
        for lost in lost_request_times(strategy, false) {
            let n_trials = lost.iter().filter(|ms| **ms > 20).count();
            assert!((1..=8).contains(&n_trials), "{strategy:?}: {lost:?}");
        }
    }
}

#[test]
fn a_peer_with_one_slow_request_keeps_its_share() {
    for strategy in [Strategy::PeakEwma, Strategy::RoundRobin] {
        let balancer = balancer(strategy);
        let all = publish_peers_with(&balancer, 2, |_, peer| Peer {
            n_checks: Some(AtomicUsize::default()),
            ..peer
        });
        let start = Instant::now();
        for (peer, latency) in all.iter().zip([MS, 50 * MS]) {
            InFlightGuard::new(peer.clone(), start).record_response(start + latency);
        }
        let _slow = InFlightGuard::new(all[0].clone(), start + MS);
        let mut n = 0;
        for request in 1..=100 {
            // The peer answers checks at once. The time between two requests exceeds the limit.
            let now = start + 100 * MS * request;
            let peer = balancer.try_pick(now, &[]).unwrap();
            n += usize::from(peer.number == 0);
            let latency = if peer.number == 0 { MS } else { 50 * MS };
            InFlightGuard::new(peer, now).record_response(now + latency);
            all[0].load.record_response(now + MS);
        }
        // The peer with the slow request in flight costs 2 ms, and the other one 50 ms.
        let expected = if strategy == Strategy::RoundRobin { 50 } else { 100 };
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
        let peers = publish_peers(&balancer, 4);
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

/// The numbers of peers that cannot be reached, that are late to respond, and that the request has tried, and of those that are
/// picked. The peers 0 and 1 are preferred, 2 and 3 are fallback endpoints.
type PreferenceRow = (&'static [usize], &'static [usize], &'static [usize], &'static [usize]);

const PREFERENCE_ROWS: &[PreferenceRow] = &[
    // Preferred endpoints that respond and were not tried.
    (&[], &[], &[], &[0, 1]),
    (&[0], &[], &[], &[1]),
    (&[], &[0], &[], &[1]),
    (&[], &[], &[0], &[1]),
    // Fallback endpoints that respond and were not tried.
    (&[0, 1], &[], &[], &[2, 3]),
    (&[], &[0, 1], &[], &[2, 3]),
    (&[], &[], &[0, 1], &[2, 3]),
    (&[0], &[1], &[], &[2, 3]),
    (&[0, 2], &[], &[1], &[3]),
    // Preferred endpoints that respond, although they were tried.
    (&[2, 3], &[], &[0, 1], &[0, 1]),
    (&[0], &[2, 3], &[1], &[1]),
    (&[], &[], &[0, 1, 2, 3], &[0, 1]),
    // Fallback endpoints that respond, although they were tried.
    (&[0, 1, 2], &[], &[3], &[3]),
    (&[], &[0, 1, 2], &[3], &[3]),
    // No endpoint responds: all that can be reached, and of these the ones that were not tried.
    (&[0, 2], &[1, 3], &[], &[1, 3]),
    (&[0, 2], &[1, 3], &[1], &[3]),
    (&[0, 2], &[1, 3], &[1, 3], &[1, 3]),
];

#[test]
fn fallback_endpoints_are_picked_only_while_no_preferred_one_can_take_the_request() {
    for strategy in [Strategy::PeakEwma, Strategy::RoundRobin] {
        for (unreachable, late, tried, expected) in PREFERENCE_ROWS {
            let case = format!("{strategy:?}, unreachable {unreachable:?}, late {late:?}, tried {tried:?}");
            let balancer = balancer(strategy);
            let peers = new_peers(&balancer, 4, |_, peer| peer);
            balancer.publish(DiscoveryState::with_endpoints(&peers[..2], &peers[2..]));
            let start = Instant::now();
            let in_flight = |number: &usize| InFlightGuard::new(peers[*number].clone(), start);
            let _late: Vec<_> = late.iter().map(in_flight).collect();
            // Later than the limit of 30 ms, and before a trial request is due.
            let now = start + 40 * MS;
            for number in *unreachable {
                peers[*number].breaker.record_dial_failure("connect-refused", now);
            }
            let tried_peers: Vec<_> = tried.iter().map(|number| peers[*number].clone()).collect();
            let picked = (0..100).map(|_| balancer.try_pick(now, &tried_peers).unwrap().number);
            let picked: BTreeSet<_> = picked.collect();
            assert_eq!(picked.into_iter().collect::<Vec<_>>(), *expected, "{case}");

            let is_last_resort = |number: &usize| tried.contains(number) || late.contains(number);
            let are_alternatives = !expected.iter().any(is_last_resort);
            let alternative = balancer.pick_where(now, |peer| !tried.contains(&peer.number));
            assert_eq!(alternative.is_some(), are_alternatives, "{case}");
            assert!(alternative.is_none_or(|peer| expected.contains(&peer.number)), "{case}");
        }
    }
}

#[test]
fn the_last_preferred_endpoint_is_ejected_if_the_minimum_of_ready_endpoints_is_met_by_fallback_endpoints() {
    let accrual = FailureAccrual {
        kind: AccrualKind::Consecutive { max_failures: 1 },
        backoff: BackoffPolicy {
            delays: Backoff {
                min: Duration::from_secs(1),
                max: Duration::from_secs(1),
                jitter: 0.0,
            },
            honors_retry_after: false,
        },
        min_ready_endpoints: 1,
    };
    let balancer = balancer(Strategy::PeakEwma);
    let now = Instant::now();
    let peers = new_peers(&balancer, 2, |_, peer| Peer {
        breaker: Breaker::new(Some(accrual), balancer.breaker_group(), now),
        ..peer
    });
    balancer.publish(DiscoveryState::with_endpoints(&peers[..1], &peers[1..]));
    assert_eq!(balancer.try_pick(now, &[]).unwrap().number, 0);
    peers[0].breaker.record_outcome(RequestOutcome::Failure, None, now);
    assert_eq!(balancer.try_pick(now, &[]).unwrap().number, 1);
    // The probe is the only request to the ejected endpoint, and its success ends the use of the fallback endpoint.
    let later = now + Duration::from_secs(1);
    let numbers = [(); 3].map(|()| balancer.try_pick(later, &[]).unwrap().number);
    assert_eq!(numbers, [0, 1, 1]);
    peers[0].breaker.record_outcome(RequestOutcome::Success, None, later);
    assert_eq!(balancer.try_pick(later, &[]).unwrap().number, 0);
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_discovery() {
    let balancer = balancer(Strategy::PeakEwma);
    let waiter = tokio::spawn({
        let balancer = balancer.clone();
        async move { balancer.pick(&[], &series()).await.map(|peer| peer.number) }
    });
    advance(1000 * MS).await;
    publish_peers(&balancer, 1);
    assert_eq!(waiter.await.unwrap(), Ok(0));
    assert_eq!(balancer.n_queued.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_ends_the_wait_of_all_queued_requests() {
    let balancer = balancer(Strategy::PeakEwma);
    balancer.publish(DiscoveryState::with_endpoints(&[], &[]));
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
    balancer.publish(DiscoveryState::with_endpoints(&[], &[]));
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
    let peers = publish_peers(&balancer, 1);
    assert_eq!(balancer.pick(&[], &series()).await.unwrap().number, 0);
    peers[0].breaker.record_dial_failure("connect-refused", Instant::now());
    assert_eq!(balancer.pick(&[], &series()).await.unwrap().number, 0, "waits again");
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_the_backoff_and_one_of_them_is_the_probe() {
    let balancer = balancer(Strategy::PeakEwma);
    let peers = publish_peers(&balancer, 1);
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
        "the second request waits for the next probe: {waited:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_successful_probe_releases_queued_requests() {
    let balancer = balancer(Strategy::PeakEwma);
    let peers = publish_peers(&balancer, 1);
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
    balancer.publish(DiscoveryState::with_endpoints(&[], &[]));
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
async fn a_request_gets_an_endpoint_although_the_queue_is_full_of_woken_requests() {
    let balancer = balancer(Strategy::PeakEwma);
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let balancer = balancer.clone();
            tokio::spawn(async move { balancer.pick(&[], &series()).await.map(|_| ()) })
        })
        .collect();
    tokio::task::yield_now().await;
    assert_eq!(balancer.n_queued.load(Ordering::Relaxed), 3);
    publish_peers(&balancer, 1);
    // A `pick` that found no endpoint before the update continues here.
    assert!(balancer.wait_for_endpoint(&[], &series()).await.is_ok());
    for waiter in waiters {
        assert_eq!(waiter.await.unwrap(), Ok(()));
    }
}

#[test]
fn the_future_of_a_pick_is_small_because_the_wait_is_boxed() {
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
    let peers = publish_peers(&balancer, 2);
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
    balancer.publish(DiscoveryState::with_endpoints(&[], &[]));
    balancer.pick(&[], &one).await.unwrap_err();
    assert_metrics(&[
        r#"queue_requests_total{parent="one"} 1"#,
        r#"queue_length{parent="one"} 0"#,
        r#"queue_latency_seconds_sum{parent="one"} 3"#,
        r#"queue_requests_total{parent="other"} 0"#,
        r#"queue_gate_shut_total{parent="other"} 1"#,
        r#"queue_gate_open_time_seconds{parent="other"} 0"#,
    ]);
    publish_peers(&balancer, 1);
    balancer.pick(&[], &one).await.unwrap();
    assert_metrics(&[
        r#"queue_gate_open_total{parent="other"} 2"#,
        r#"queue_gate_shut_time_seconds{parent="one"} 0"#,
    ]);
}
