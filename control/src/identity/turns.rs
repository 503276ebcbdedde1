//! A fair queue by client address, so that one client's tokens do not delay the reviews of others'.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tulle_core::connections::network;

/// A queue in which each address has one place; its further requests wait for that.
pub(super) struct Turns {
    all: Semaphore,
    by_client: Mutex<HashMap<IpAddr, OfClient>>,
}

/// The requests of one address.
struct OfClient {
    n: usize,
    next: Arc<Semaphore>,
}

/// An address has too many requests waiting.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Busy;

impl Turns {
    /// A queue that serves so many addresses at a time.
    pub(super) fn new(at_once: usize) -> Self {
        Self {
            all: Semaphore::new(at_once),
            by_client: Mutex::default(),
        }
    }

    /// Runs `work` when it is this address's turn.
    ///
    /// # Errors
    /// The address has too many requests waiting already.
    pub(super) async fn run<T>(&self, client: IpAddr, work: impl Future<Output = T>) -> Result<T, Busy> {
        let waiting = self.enter(network(client)).ok_or(Busy)?;
        // Neither semaphore is ever closed, and both serve in the order of arrival.
        let _next = waiting.next.acquire().await;
        let _turn = self.all.acquire().await;
        Ok(work.await)
    }

    fn enter(&self, client: IpAddr) -> Option<Waiting<'_>> {
        let mut by_client = self.by_client.lock();
        let of_client = by_client.entry(client).or_insert_with(|| OfClient {
            n: 0,
            next: Arc::new(Semaphore::new(1)),
        });
        if of_client.n == MAX_WAITING {
            return None;
        }
        of_client.n += 1;
        Some(Waiting {
            turns: self,
            client,
            next: of_client.next.clone(),
        })
    }
}

/// A request that waits or is served; an address is forgotten with its last one.
struct Waiting<'a> {
    turns: &'a Turns,
    client: IpAddr,
    next: Arc<Semaphore>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut by_client = self.turns.by_client.lock();
        if let Some(of_client) = by_client.get_mut(&self.client) {
            of_client.n -= 1;
            if of_client.n == 0 {
                by_client.remove(&self.client);
            }
        }
    }
}

/// Requests of one address that may wait, or be served.
const MAX_WAITING: usize = 64;

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
    async fn who_asks_once_does_not_wait_for_all_that_others_ask() {
        let turns = Turns::new(2);
        let review = async || sleep(Duration::from_secs(1)).await;
        let flood = (0..60).flat_map(|_| [1, 2, 3].map(|last| turns.run(ip(last), review())));
        let began_at = Instant::now();
        let good = async {
            turns.run(ip(9), review()).await.unwrap();
            began_at.elapsed()
        };
        // The flood is polled first, and is in the queue before.
        tokio::select! {
            biased;
            _ = join_all(flood) => panic!("the flood was served first"),
            took = good => assert!(took <= Duration::from_secs(3), "{took:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_for_an_address_is_bounded_and_forgotten() {
        let turns = Turns::new(1);
        let waiting: Vec<_> = (0..MAX_WAITING).map(|_| turns.run(ip(1), pending::<()>())).collect();
        let waiting = join_all(waiting);
        let mut waiting = Box::pin(timeout(Duration::from_secs(1), waiting));
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("nothing of it ends"),
            refused = turns.run(ip(1), async {}) => assert_eq!(refused, Err(Busy)),
        }
        waiting.as_mut().await.unwrap_err();
        drop(waiting);
        let turns_left = turns.by_client.lock().len();
        assert_eq!(turns_left, 0);
    }
}
