//! Limits concurrent work fairly by client network (an IPv4 address or an IPv6 prefix), so that one client does not delay the
//! work for others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::connections::client_network;

/// Limits concurrent requests. Each client network may have a few requests in the global queue; its other requests wait outside of
/// the queue.
pub struct PerClientLimiter {
    limits: Limits,
    /// The global queue: one permit for each unit of weight that may run.
    global_queue: Semaphore,
    by_network: Mutex<HashMap<IpAddr, ClientQueue>>,
}

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum weight of the requests that run at a time, over all clients.
    pub total_weight: usize,
    /// Maximum number of requests of a network that are in the global queue, or run.
    pub queued_or_running_per_network: usize,
    /// Maximum number of requests of a network that wait for the global queue, are in it, or run.
    pub requests_per_network: usize,
}

struct ClientQueue {
    /// Number of requests that wait or run.
    n_requests: usize,
    /// One permit for each request that may be in the global queue or run.
    global_queue_permits: Arc<Semaphore>,
}

/// The client network has reached its maximum number of requests.
#[derive(Debug, PartialEq, Eq)]
pub struct QueueFull;

impl PerClientLimiter {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            global_queue: Semaphore::new(limits.total_weight),
            by_network: Mutex::default(),
        }
    }

    /// The maximum weight of one request.
    pub fn max_weight(&self) -> usize {
        self.limits.total_weight
    }

    /// Runs `work` after two waits, each in the order of arrival: until fewer than [`Limits::queued_or_running_per_network`] other
    /// requests of this client's network are in the global queue or run, and then until the global limit permits the weight.
    ///
    /// The caller ensures that the weight is at most [`max_weight`](Self::max_weight); a larger one waits forever.
    ///
    /// # Errors
    /// Fails if the network has [`Limits::requests_per_network`] already.
    pub async fn run<T>(&self, client: IpAddr, weight: u32, work: impl Future<Output = T>) -> Result<T, QueueFull> {
        let request = self.enter(client_network(client)).ok_or(QueueFull)?;
        // The semaphores are never closed, and give permits in FIFO order.
        let _may_queue = request.global_queue_permits.acquire().await;
        let _may_run = self.global_queue.acquire_many(weight).await;
        Ok(work.await)
    }

    fn enter(&self, network: IpAddr) -> Option<CountedRequest<'_>> {
        let mut by_network = self.by_network.lock();
        let queue = by_network.entry(network).or_insert_with(|| ClientQueue {
            n_requests: 0,
            global_queue_permits: Arc::new(Semaphore::new(self.limits.queued_or_running_per_network)),
        });
        if queue.n_requests == self.limits.requests_per_network {
            return None;
        }
        queue.n_requests += 1;
        Some(CountedRequest {
            limiter: self,
            network,
            global_queue_permits: queue.global_queue_permits.clone(),
        })
    }
}

/// A request that waits or runs. Dropping the last one of a network removes the network.
struct CountedRequest<'a> {
    limiter: &'a PerClientLimiter,
    network: IpAddr,
    global_queue_permits: Arc<Semaphore>,
}

impl Drop for CountedRequest<'_> {
    fn drop(&mut self) {
        let mut by_network = self.limiter.by_network.lock();
        if let Some(queue) = by_network.get_mut(&self.network) {
            queue.n_requests -= 1;
            if queue.n_requests == 0 {
                by_network.remove(&self.network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::task::JoinSet;
    use tokio::time::{Duration, Instant, sleep};

    use super::*;

    const LIMITS: Limits = Limits {
        total_weight: 2,
        queued_or_running_per_network: 1,
        requests_per_network: 64,
    };

    fn ip(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    /// Starts requests of these clients. Returns when all of them wait or run.
    async fn start(
        limiter: &Arc<PerClientLimiter>,
        clients: impl IntoIterator<Item = u8>,
        work_time: Duration,
    ) -> JoinSet<Result<(), QueueFull>> {
        let mut requests = JoinSet::new();
        for last in clients {
            let limiter = limiter.clone();
            requests.spawn(async move { limiter.run(ip(last), 1, sleep(work_time)).await });
        }
        let n_entered = || {
            limiter
                .by_network
                .lock()
                .values()
                .map(|queue| queue.n_requests)
                .sum::<usize>()
        };
        while n_entered() < requests.len() {
            tokio::task::yield_now().await;
        }
        requests
    }

    #[tokio::test(start_paused = true)]
    async fn one_request_does_not_wait_for_a_flood_from_other_clients() {
        let limiter = Arc::new(PerClientLimiter::new(LIMITS));
        let work_time = Duration::from_secs(1);
        let _flood = start(&limiter, (0..60).flat_map(|_| [1, 2, 3]), work_time).await;
        let began_at = Instant::now();
        limiter.run(ip(9), 1, sleep(work_time)).await.unwrap();
        let took = began_at.elapsed();
        assert!(took <= 3 * work_time, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_weight_of_running_requests_is_bounded() {
        let limiter = Arc::new(PerClientLimiter::new(LIMITS));
        let work_time = Duration::from_secs(1);
        let _light = start(&limiter, [1], work_time).await;
        let began_at = Instant::now();
        let heavy = limiter.run(ip(2), 2, async { began_at.elapsed() });
        let waited = heavy.await.unwrap();
        assert!(waited >= work_time, "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_of_an_address_is_bounded_and_removed_when_empty() {
        let limiter = Arc::new(PerClientLimiter::new(LIMITS));
        let mut waiting = start(&limiter, vec![1; LIMITS.requests_per_network], Duration::MAX).await;
        let refused = limiter.run(ip(1), 1, async {}).await;
        assert_eq!(refused, Err(QueueFull));
        waiting.shutdown().await;
        assert_eq!(limiter.by_network.lock().len(), 0);
    }
}
