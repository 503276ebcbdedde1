//! Limits how often ports on which no application listens get a new watch or poll, because each one opens a stream at the control
//! plane.
//!
//! Every client network has a token bucket. Its clients then wait in a fair queue for the tokens that all networks share, so that
//! a network that scans ports does not delay others.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until, timeout_at};
use tulle_core::{
    connections::client_network,
    per_client_limiter::{Limits, PerClientLimiter},
};

/// A token bucket for each client network, and one that all networks share. A new watch or poll takes one token from the bucket of
/// its network, then one from the shared bucket.
pub(super) struct WatchLimiter {
    rates: Rates,
    shared: Mutex<Bucket>,
    by_network: Mutex<HashMap<IpAddr, Bucket>>,
    /// The queue for tokens of the shared bucket. Each network has one place in it.
    queue: PerClientLimiter,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    pub(super) per_network: Rate,
    pub(super) shared: Rate,
}

/// The size of a token bucket, and the time in which it gets a token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    pub(super) burst: u32,
    pub(super) interval: Duration,
}

/// A token bucket that starts full (GCRA, the generic cell rate algorithm).
struct Bucket {
    /// The time at which the bucket is full if no further token is taken.
    full_at: Instant,
}

impl WatchLimiter {
    pub(super) fn new(rates: Rates) -> Self {
        Self {
            rates,
            shared: Mutex::new(Bucket {
                full_at: Instant::now(),
            }),
            by_network: Mutex::default(),
            queue: PerClientLimiter::new(Limits {
                total_weight: 1,
                queued_or_running_per_network: 1,
                requests_per_network: MAX_WAITING_PER_NETWORK,
            }),
        }
    }

    /// Waits until the client may cause a new watch or poll. Returns false if that takes longer than `max_wait`. If the next token
    /// of the client's network comes later than that, returns false immediately.
    pub(super) async fn wait_for_turn(&self, client: IpAddr, max_wait: Duration) -> bool {
        let deadline = Instant::now() + max_wait;
        let Some(turn_at) = self.take_network_token(client_network(client), deadline) else {
            return false;
        };
        wait_until(turn_at).await;
        // Only the head of the queue takes a token, so a network with many waiting clients does not overtake others.
        let take_shared_token = async {
            let taken = self
                .shared
                .lock()
                .take_token(self.rates.shared, Instant::now(), deadline);
            match taken {
                Some(turn_at) => {
                    wait_until(turn_at).await;
                    true
                }
                None => false,
            }
        };
        let queued = self.queue.run(client, 1, take_shared_token);
        matches!(timeout_at(deadline, queued).await, Ok(Ok(true)))
    }

    fn take_network_token(&self, network: IpAddr, deadline: Instant) -> Option<Instant> {
        let now = Instant::now();
        let mut buckets = self.by_network.lock();
        if buckets.len() >= MAX_NETWORKS && !buckets.contains_key(&network) {
            // Removing a full bucket changes no limit, because a new bucket starts full.
            buckets.retain(|_, bucket| bucket.full_at > now);
            if buckets.len() >= MAX_NETWORKS {
                return None;
            }
        }
        let bucket = buckets.entry(network).or_insert(Bucket { full_at: now });
        bucket.take_token(self.rates.per_network, now, deadline)
    }
}

impl Bucket {
    /// Takes the next token, and returns the time at which it becomes available. Takes none and returns `None` if that time is after
    /// `deadline`.
    fn take_token(&mut self, rate: Rate, now: Instant, deadline: Instant) -> Option<Instant> {
        let full_at = self.full_at.max(now) + rate.interval;
        let turn_at = full_at
            .checked_sub(rate.interval.saturating_mul(rate.burst))
            .map_or(now, |turn_at| turn_at.max(now));
        if turn_at > deadline {
            return None;
        }
        self.full_at = full_at;
        Some(turn_at)
    }
}

async fn wait_until(at: Instant) {
    if at > Instant::now() {
        sleep_until(at).await;
    }
}

/// Maximum number of clients of a network that wait for a shared token. One of them is in the queue; the others wait for its
/// place. The tokens of the network are a second limit.
const MAX_WAITING_PER_NETWORK: usize = 64;

/// Maximum number of networks with a bucket that is not full; clients of further networks are refused. An entry takes about 50
/// bytes.
const MAX_NETWORKS: usize = 4_096;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use futures_util::future::join_all;

    use super::*;

    const RATES: Rates = Rates {
        per_network: Rate {
            burst: 4,
            interval: Duration::from_secs(1),
        },
        shared: Rate {
            burst: 8,
            interval: Duration::from_millis(100),
        },
    };
    const MAX_WAIT: Duration = Duration::from_millis(3500);

    fn ip(n: u32) -> IpAddr {
        Ipv4Addr::from(0x0a00_0000 + n).into()
    }

    /// Clients with these addresses wait for their turns at the same time. Returns whether each may cause a watch, and how long it
    /// waited.
    async fn ask(limiter: &WatchLimiter, clients: impl IntoIterator<Item = u32>) -> Vec<(bool, Duration)> {
        let asked_at = Instant::now();
        let turns = clients.into_iter().map(|n| async move {
            let is_permitted = limiter.wait_for_turn(ip(n), MAX_WAIT).await;
            (is_permitted, asked_at.elapsed())
        });
        join_all(turns).await
    }

    fn n_permitted(turns: &[(bool, Duration)]) -> usize {
        turns.iter().filter(|(is_permitted, _)| *is_permitted).count()
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_has_a_burst_then_waits_for_its_rate_and_is_refused_beyond_it() {
        let limiter = WatchLimiter::new(RATES);
        let turns = ask(&limiter, [1; 100]).await;
        let n_at_once = |is_permitted: bool| {
            turns
                .iter()
                .filter(|turn| **turn == (is_permitted, Duration::ZERO))
                .count()
        };
        assert_eq!((n_at_once(true), n_at_once(false)), (4, 93), "{turns:?}");
        let mut waited: Vec<_> = turns.iter().filter(|(_, waited)| !waited.is_zero()).collect();
        waited.sort_unstable();
        for (n, (is_permitted, waited)) in (1..).zip(waited) {
            assert!(*is_permitted, "{turns:?}");
            assert_eq!(waited.as_millis() / 100, 10 * n, "{turns:?}");
        }
        // The refused clients have taken no token.
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(n_permitted(&ask(&limiter, [1]).await), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_scans_ports_does_not_delay_others() {
        let limiter = WatchLimiter::new(RATES);
        let (_, first_connection) = tokio::join!(ask(&limiter, [1; 1000]), ask(&limiter, [2]));
        assert_eq!(first_connection, [(true, Duration::ZERO)]);
    }

    #[tokio::test(start_paused = true)]
    async fn each_client_that_scans_ports_delays_another_client_by_at_most_one_turn() {
        let limiter = WatchLimiter::new(RATES);
        let scans = ask(&limiter, (0..200).map(|n| 1 + n % 20));
        let (scanned, first_connection) = tokio::join!(scans, ask(&limiter, [99]));
        let (is_permitted, waited) = first_connection[0];
        assert!(is_permitted && waited <= 21 * RATES.shared.interval, "{waited:?}");
        let in_total = 8 + usize::try_from(MAX_WAIT.as_millis() / 100).unwrap() + 1;
        assert!(n_permitted(&scanned) <= in_total, "{}", n_permitted(&scanned));
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_buckets_is_limited_and_full_ones_are_removed() {
        let limiter = WatchLimiter::new(RATES);
        let deadline = Instant::now() + MAX_WAIT;
        let has_token = |n| limiter.take_network_token(ip(n), deadline).is_some();
        let max = u32::try_from(MAX_NETWORKS).unwrap();
        assert_eq!((0..max + 100).filter(|n| has_token(*n)).count(), MAX_NETWORKS);
        assert!(has_token(0), "a known network");
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(has_token(max));
        assert_eq!(limiter.by_network.lock().len(), 1);
    }
}
