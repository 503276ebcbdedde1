//! Connects to one of several addresses of a service, of either family, with concurrent attempts.
//!
//! Like RFC 8305 ("Happy Eyeballs"), but in random order, so that the proxies spread over the replicas.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::sleep;

/// Tries addresses; the next attempt starts when one has failed or has taken [`CONNECTION_ATTEMPT_DELAY`]. Slow attempts
/// continue meanwhile.
///
/// # Errors
/// All attempts failed: the last error. `None` if there is no address.
pub(super) async fn connect_first<T, E, F>(
    addrs: Vec<SocketAddr>,
    attempt: impl Fn(SocketAddr) -> F,
) -> Result<T, Option<E>>
where
    F: Future<Output = Result<T, E>>,
{
    let mut rest = interleave_families(addrs).into_iter();
    let mut pending = FuturesUnordered::new();
    let mut last = None;
    loop {
        match rest.next() {
            Some(addr) => pending.push(attempt(addr)),
            None if pending.is_empty() => return Err(last),
            None => {}
        }
        let has_more = !rest.as_slice().is_empty();
        // Pending attempts are kept.
        tokio::select! {
            Some(result) = pending.next() => match result {
                Ok(value) => return Ok(value),
                Err(error) => last = Some(error),
            },
            () = sleep(CONNECTION_ATTEMPT_DELAY), if has_more => {}
        }
    }
}

/// Puts addresses in random order, alternating between the families: if one family is unreachable, the second attempt uses the
/// other one.
fn interleave_families(mut addrs: Vec<SocketAddr>) -> Vec<SocketAddr> {
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

/// Time after the start of an attempt at which the next one starts; the value that RFC 8305 recommends.
const CONNECTION_ATTEMPT_DELAY: Duration = Duration::from_millis(250);

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
    fn families_alternate_and_every_address_is_tried() {
        let all = addrs(&["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "[fd00::1]:1", "[fd00::2]:1"]);
        let mut begins = BTreeSet::new();
        for _ in 0..200 {
            let ordered = interleave_families(all.clone());
            begins.insert(ordered[0]);
            assert_ne!(ordered[0].is_ipv6(), ordered[1].is_ipv6(), "{ordered:?}");
            assert_ne!(ordered[2].is_ipv6(), ordered[3].is_ipv6(), "{ordered:?}");
            assert_eq!(BTreeSet::from_iter(ordered), BTreeSet::from_iter(all.clone()));
        }
        assert_eq!(begins.len(), all.len(), "each address is the first one in some orders");
    }

    #[tokio::test(start_paused = true)]
    async fn a_family_that_drops_packets_costs_one_attempt_delay() {
        for _ in 0..20 {
            let began = Instant::now();
            let reached = connect_first(addrs(&["10.0.0.1:1", "[fd00::1]:1"]), |addr| async move {
                if addr.is_ipv6() {
                    std::future::pending::<()>().await;
                }
                Ok::<_, ()>(addr)
            });
            assert!(reached.await.unwrap().is_ipv4());
            assert!(began.elapsed() <= CONNECTION_ATTEMPT_DELAY, "{:?}", began.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_attempt_continues_and_a_failure_starts_the_next_at_once() {
        let tried = &Mutex::new(Vec::new());
        let began = Instant::now();
        let slow = connect_first(addrs(&["10.0.0.1:1", "10.0.0.2:1"]), |addr| async move {
            tried.lock().push(addr);
            sleep(Duration::from_millis(400)).await;
            Ok::<_, ()>(addr)
        });
        assert_eq!(slow.await.unwrap(), tried.lock()[0]);
        assert_eq!((began.elapsed(), tried.lock().len()), (Duration::from_millis(400), 2));

        let began = Instant::now();
        let failed = connect_first(addrs(&["10.0.0.1:1", "[fd00::1]:1"]), |addr| async move {
            Err::<(), _>(addr)
        });
        assert!(failed.await.unwrap_err().is_some());
        assert_eq!(began.elapsed(), Duration::ZERO);
        let none = connect_first(Vec::new(), |addr| async move { Err::<(), _>(addr) });
        assert_eq!(none.await, Err(None));
    }
}
