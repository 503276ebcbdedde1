//! Several addresses of one service, of either family: the first that answers is taken, and none is waited for alone.
//!
//! As RFC 8305 ("Happy Eyeballs") has it, but in an order of chance, so that a fleet spreads over the replicas.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::sleep;

/// Tries addresses, the next one when one has failed or has taken [`HEAD_START`]; what is slow goes on meanwhile.
///
/// # Errors
/// The last failure, where all have failed; none if there is no address.
pub(super) async fn first<T, E, F>(addrs: Vec<SocketAddr>, attempt: impl Fn(SocketAddr) -> F) -> Result<T, Option<E>>
where
    F: Future<Output = Result<T, E>>,
{
    let mut rest = in_turns(addrs).into_iter();
    let mut under_way = FuturesUnordered::new();
    let mut last = None;
    loop {
        match rest.next() {
            Some(addr) => under_way.push(attempt(addr)),
            None if under_way.is_empty() => return Err(last),
            None => {}
        }
        let more = !rest.as_slice().is_empty();
        // Attempts that are not over stay where they are.
        tokio::select! {
            Some(result) = under_way.next() => match result {
                Ok(value) => return Ok(value),
                Err(error) => last = Some(error),
            },
            () = sleep(HEAD_START), if more => {}
        }
    }
}

/// In an order of chance, the families by turns: where one is unreachable, the second attempt is of the other.
fn in_turns(mut addrs: Vec<SocketAddr>) -> Vec<SocketAddr> {
    fastrand::shuffle(&mut addrs);
    let begins_with_v6 = addrs.first().is_some_and(SocketAddr::is_ipv6);
    let (one, other): (Vec<_>, Vec<_>) = addrs.into_iter().partition(|addr| addr.is_ipv6() == begins_with_v6);
    let mut ordered = Vec::with_capacity(one.len() + other.len());
    let mut other = other.into_iter();
    for addr in one {
        ordered.push(addr);
        ordered.extend(other.next());
    }
    ordered.extend(other);
    ordered
}

/// How long an attempt is alone; the delay that RFC 8305 recommends.
const HEAD_START: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use parking_lot::Mutex;
    use tokio::time::Instant;

    use super::*;

    fn addrs(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn families_take_turns_and_every_address_has_one() {
        let all = addrs(&["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "[fd00::1]:1", "[fd00::2]:1"]);
        let mut begins = BTreeSet::new();
        for _ in 0..200 {
            let ordered = in_turns(all.clone());
            begins.insert(ordered[0]);
            assert_ne!(ordered[0].is_ipv6(), ordered[1].is_ipv6(), "{ordered:?}");
            assert_ne!(ordered[2].is_ipv6(), ordered[3].is_ipv6(), "{ordered:?}");
            assert_eq!(BTreeSet::from_iter(ordered), BTreeSet::from_iter(all.clone()));
        }
        assert_eq!(begins.len(), all.len(), "each begins at times");
    }

    #[tokio::test(start_paused = true)]
    async fn a_family_that_swallows_packets_costs_a_head_start_and_no_more() {
        for _ in 0..20 {
            let began = Instant::now();
            let reached = first(addrs(&["10.0.0.1:1", "[fd00::1]:1"]), |addr| async move {
                if addr.is_ipv6() {
                    std::future::pending::<()>().await;
                }
                Ok::<_, ()>(addr)
            });
            assert!(reached.await.unwrap().is_ipv4());
            assert!(began.elapsed() <= HEAD_START, "{:?}", began.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_answer_counts_if_nobody_is_quicker_and_a_failure_is_followed_at_once() {
        let tried = &Mutex::new(Vec::new());
        let began = Instant::now();
        let slow = first(addrs(&["10.0.0.1:1", "10.0.0.2:1"]), |addr| async move {
            tried.lock().push(addr);
            sleep(Duration::from_millis(400)).await;
            Ok::<_, ()>(addr)
        });
        assert_eq!(slow.await.unwrap(), tried.lock()[0]);
        assert_eq!((began.elapsed(), tried.lock().len()), (Duration::from_millis(400), 2));

        let began = Instant::now();
        let failed = first(addrs(&["10.0.0.1:1", "[fd00::1]:1"]), |addr| async move {
            Err::<(), _>(addr)
        });
        assert!(failed.await.unwrap_err().is_some());
        assert_eq!(began.elapsed(), Duration::ZERO);
        let none = first(Vec::new(), |addr| async move { Err::<(), _>(addr) });
        assert_eq!(none.await, Err(None));
    }
}
