//! Limits concurrent token reviews fairly by client network (an IPv4 address or an IPv6 prefix), so that one client does not
//! delay the reviews of others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tulle_core::connections::client_network;

/// Each client network has at most one request in the global queue; its other requests wait behind that one.
pub(super) struct PerClientLimiter {
    global: Semaphore,
    by_network: Mutex<HashMap<IpAddr, ClientQueue>>,
}

struct ClientQueue {
    /// Requests that wait or run.
    n_requests: usize,
    /// One permit: the request that has it is in the global queue, or runs.
    first_place: Arc<Semaphore>,
}

/// The client network has [`MAX_REQUESTS_PER_NETWORK`] requests already.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct QueueFull;

impl PerClientLimiter {
    /// `max_concurrent` is the number of requests that run at a time, over all clients.
    pub(super) fn new(max_concurrent: usize) -> Self {
        Self {
            global: Semaphore::new(max_concurrent),
            by_network: Mutex::default(),
        }
    }

    /// Runs `work` after the earlier requests of this client's network, and within the global limit.
    ///
    /// # Errors
    /// Fails if the network has [`MAX_REQUESTS_PER_NETWORK`] requests already.
    pub(super) async fn run<T>(&self, client: IpAddr, work: impl Future<Output = T>) -> Result<T, QueueFull> {
        let request = self.enter(client_network(client)).ok_or(QueueFull)?;
        // The semaphores are never closed, and give permits in FIFO order.
        let _first_place = request.first_place.acquire().await;
        let _global = self.global.acquire().await;
        Ok(work.await)
    }

    fn enter(&self, network: IpAddr) -> Option<CountedRequest<'_>> {
        let mut by_network = self.by_network.lock();
        let queue = by_network.entry(network).or_insert_with(|| ClientQueue {
            n_requests: 0,
            first_place: Arc::new(Semaphore::new(1)),
        });
        if queue.n_requests == MAX_REQUESTS_PER_NETWORK {
            return None;
        }
        queue.n_requests += 1;
        Some(CountedRequest {
            limiter: self,
            network,
            first_place: queue.first_place.clone(),
        })
    }
}

/// A request that waits or runs. Dropping the last one of a network removes the network.
struct CountedRequest<'a> {
    limiter: &'a PerClientLimiter,
    network: IpAddr,
    first_place: Arc<Semaphore>,
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

/// Maximum requests per client network, waiting or running.
const MAX_REQUESTS_PER_NETWORK: usize = 64;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use futures_util::future::{join_all, pending};
    use tokio::time::{Duration, Instant, sleep, timeout};

    use super::*;

    fn ip(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    #[tokio::test(start_paused = true)]
    async fn one_request_does_not_wait_for_a_flood_from_other_clients() {
        let limiter = PerClientLimiter::new(2);
        let review = async || sleep(Duration::from_secs(1)).await;
        let flood = (0..60).flat_map(|_| [1, 2, 3].map(|last| limiter.run(ip(last), review())));
        let began_at = Instant::now();
        let good = async {
            limiter.run(ip(9), review()).await.unwrap();
            began_at.elapsed()
        };
        // The flood is polled first, so it enters the queue first.
        tokio::select! {
            biased;
            _ = join_all(flood) => panic!("the flood was served first"),
            took = good => assert!(took <= Duration::from_secs(3), "{took:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_of_an_address_is_bounded_and_removed_when_empty() {
        let limiter = PerClientLimiter::new(1);
        let waiting: Vec<_> = (0..MAX_REQUESTS_PER_NETWORK)
            .map(|_| limiter.run(ip(1), pending::<()>()))
            .collect();
        let waiting = join_all(waiting);
        let mut waiting = Box::pin(timeout(Duration::from_secs(1), waiting));
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("pending work cannot end"),
            refused = limiter.run(ip(1), async {}) => assert_eq!(refused, Err(QueueFull)),
        }
        waiting.as_mut().await.unwrap_err();
        drop(waiting);
        let networks_left = limiter.by_network.lock().len();
        assert_eq!(networks_left, 0);
    }
}
