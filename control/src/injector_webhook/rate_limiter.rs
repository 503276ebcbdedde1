//! Limits the rate at which each client network can cause an action, because the clients of a webhook are not verified.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tulle_core::connections::client_network;

/// The rate at which a client network can cause an action.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    /// Maximum number of actions at once.
    pub(super) burst: u32,
    /// Time after which one more action is permitted.
    pub(super) interval: Duration,
}

/// A token bucket for each client network.
pub(super) struct RateLimiter {
    rate: Rate,
    /// The time at which the bucket of a network is full again. A network with a full bucket can be absent.
    full_at: Mutex<HashMap<IpAddr, Instant>>,
}

impl RateLimiter {
    pub(super) fn new(rate: Rate) -> Self {
        Self {
            rate,
            full_at: Mutex::default(),
        }
    }

    /// Takes a token of the client's network. Returns whether there was one.
    pub(super) fn try_take(&self, client: IpAddr) -> bool {
        let Rate { burst, interval } = self.rate;
        let (network, now) = (client_network(client), Instant::now());
        let mut full_at = self.full_at.lock();
        let next_full_at = full_at.get(&network).map_or(now, |at| now.max(*at)) + interval;
        if next_full_at > now + interval * burst {
            return false;
        }
        if full_at.len() >= MAX_NETWORKS && !full_at.contains_key(&network) {
            remove_fullest(&mut full_at, now);
        }
        full_at.insert(network, next_full_at);
        true
    }

    /// Puts back a token that was taken.
    pub(super) fn put_back(&self, client: IpAddr) {
        let mut full_at = self.full_at.lock();
        if let Some(at) = full_at.get_mut(&client_network(client)) {
            *at -= self.rate.interval;
        }
    }
}

/// Removes the networks whose buckets are full. If there are none, removes the network whose bucket will be full first.
fn remove_fullest(full_at: &mut HashMap<IpAddr, Instant>, now: Instant) {
    full_at.retain(|_, at| *at > now);
    if full_at.len() >= MAX_NETWORKS
        && let Some((&network, _)) = full_at.iter().min_by_key(|(_, at)| **at)
    {
        full_at.remove(&network);
    }
}

/// Maximum number of networks in the map, to limit its memory. A webhook has at most 1000 connections.
const MAX_NETWORKS: usize = 4096;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::time::advance;

    use super::*;

    const RATE: Rate = Rate {
        burst: 3,
        interval: Duration::from_secs(1),
    };

    fn ip(n: u32) -> IpAddr {
        Ipv4Addr::from(n).into()
    }

    /// Takes all available tokens, and returns their number.
    fn take_all(limiter: &RateLimiter, client: IpAddr) -> usize {
        std::iter::repeat_with(|| limiter.try_take(client))
            .take_while(|taken| *taken)
            .count()
    }

    #[tokio::test(start_paused = true)]
    async fn a_network_has_a_burst_and_then_one_more_in_each_interval() {
        let limiter = RateLimiter::new(RATE);
        assert_eq!(
            [ip(1), ip(2), ip(1)].map(|client| take_all(&limiter, client)),
            [3, 3, 0]
        );
        advance(RATE.interval).await;
        assert_eq!(take_all(&limiter, ip(1)), 1);
        limiter.put_back(ip(1));
        assert_eq!(take_all(&limiter, ip(1)), 1);
        advance(RATE.interval * 100).await;
        limiter.put_back(ip(1));
        assert_eq!(take_all(&limiter, ip(1)), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_networks_is_limited_and_networks_without_tokens_stay() {
        let limiter = RateLimiter::new(RATE);
        assert_eq!(take_all(&limiter, ip(0)), 3);
        for n in 1..=5_000 {
            assert!(limiter.try_take(ip(n)));
        }
        assert_eq!(limiter.full_at.lock().len(), MAX_NETWORKS);
        assert_eq!(take_all(&limiter, ip(0)), 0);
    }
}
