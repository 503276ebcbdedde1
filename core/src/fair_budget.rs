//! A budget that clients share, such as bytes of memory. When it is used up and client A asks for more, other clients lose
//! their oldest reservations to A. A client loses one only while it has more than A would have afterwards.
//!
//! If `n` clients each use as much as they can, each has `1 / n` of the budget, and a further one gets `1 / (n + 1)` at once.

use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// The budget. Callers identify a verified client by its address, and any other client by its
/// [`client_network`](crate::connections::client_network).
pub struct FairBudget {
    total: usize,
    state: Mutex<State>,
    /// Wakes waiting clients when a reservation was made or returned.
    changed: Notify,
}

#[derive(Default)]
struct State {
    next_id: u64,
    used: usize,
    by_client: HashMap<IpAddr, Client>,
}

#[derive(Default)]
struct Client {
    used: usize,
    /// By id: the oldest first.
    reservations: BTreeMap<u64, ReservedAmount>,
}

struct ReservedAmount {
    amount: usize,
    revocation: Revocation,
}

/// A part of the budget, which is returned on drop.
pub struct Reservation {
    budget: Arc<FairBudget>,
    client: IpAddr,
    id: u64,
    revocation: Revocation,
}

/// Tells the holder of a reservation that another client gets it.
#[derive(Clone)]
pub struct Revocation(Arc<Notify>);

impl FairBudget {
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self {
            total,
            state: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// The maximum amount of one reservation.
    pub fn max_reservation(&self) -> usize {
        self.total / 2
    }

    /// The sum of all reservations.
    pub fn used(&self) -> usize {
        self.state.lock().used
    }

    /// Reserves an amount. Reservations of other clients may be revoked for it; their holders should stop using them at once.
    ///
    /// Returns `None` if the amount is more than [`max_reservation`](Self::max_reservation), or if too little is free and other
    /// clients cannot lose enough: each loses its oldest reservations only while it has more than this client would have.
    pub fn try_reserve(self: &Arc<Self>, client: IpAddr, amount: usize) -> Option<Reservation> {
        if amount > self.max_reservation() {
            return None;
        }
        let mut state = self.state.lock();
        let missing_amount = (state.used + amount).saturating_sub(self.total);
        let used_afterwards = state.by_client.get(&client).map_or(0, |client| client.used) + amount;
        for (holder, id) in state.select_to_revoke(missing_amount, used_afterwards)? {
            if let Some(reserved) = state.remove(holder, id) {
                reserved.revocation.0.notify_one();
            }
        }
        let id = state.next_id;
        state.next_id += 1;
        state.used += amount;
        let revocation = Revocation(Arc::default());
        let entry = state.by_client.entry(client).or_default();
        entry.used += amount;
        let reserved = ReservedAmount {
            amount,
            revocation: revocation.clone(),
        };
        entry.reservations.insert(id, reserved);
        drop(state);
        // This client has more now, so a waiting client may be able to revoke from it. Or more was revoked than this client has
        // reserved, and a waiting client can use the rest.
        self.changed.notify_waiters();
        Some(Reservation {
            budget: self.clone(),
            client,
            id,
            revocation,
        })
    }

    /// Waits until the amount can be reserved; forever if it exceeds [`max_reservation`](Self::max_reservation).
    ///
    /// Every reservation that is made or returned wakes all waiting clients, so at most a few hundred clients should wait.
    pub async fn reserve(self: &Arc<Self>, client: IpAddr, amount: usize) -> Reservation {
        loop {
            let mut changed = pin!(self.changed.notified());
            // Registers before the attempt, so that no change between them is missed.
            changed.as_mut().enable();
            if let Some(reservation) = self.try_reserve(client, amount) {
                return reservation;
            }
            changed.await;
        }
    }
}

impl State {
    /// Selects reservations of at least `missing_amount` to revoke for a client that will have `used_afterwards`, its new
    /// reservation included. Each step selects the oldest remaining reservation of the client that has the most left. `None` if no
    /// client has more than `used_afterwards` left before the amount is reached.
    fn select_to_revoke(&self, missing_amount: usize, used_afterwards: usize) -> Option<Vec<(IpAddr, u64)>> {
        let mut selected = Vec::new();
        if missing_amount == 0 {
            return Some(selected);
        }
        let mut oldest_reservations: HashMap<_, _> = self
            .by_client
            .iter()
            .filter(|(_, client)| client.used > used_afterwards)
            .map(|(ip, client)| (*ip, client.reservations.iter()))
            .collect();
        let mut by_use: BinaryHeap<(usize, IpAddr)> = oldest_reservations
            .keys()
            .map(|ip| (self.by_client[ip].used, *ip))
            .collect();
        let mut selected_amount = 0;
        while selected_amount < missing_amount {
            let (used, holder) = by_use.pop()?;
            let (id, reserved) = oldest_reservations.get_mut(&holder)?.next()?;
            selected.push((holder, *id));
            selected_amount += reserved.amount;
            if used - reserved.amount > used_afterwards {
                by_use.push((used - reserved.amount, holder));
            }
        }
        Some(selected)
    }

    fn remove(&mut self, client: IpAddr, id: u64) -> Option<ReservedAmount> {
        let entry = self.by_client.get_mut(&client)?;
        let reserved = entry.reservations.remove(&id)?;
        entry.used -= reserved.amount;
        self.used -= reserved.amount;
        if entry.reservations.is_empty() {
            self.by_client.remove(&client);
        }
        Some(reserved)
    }
}

impl Reservation {
    pub fn revocation(&self) -> Revocation {
        self.revocation.clone()
    }
}

impl Revocation {
    /// Waits until the reservation is revoked. Only one call can wait.
    pub async fn wait(&self) {
        self.0.notified().await;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let is_returned = self.budget.state.lock().remove(self.client, self.id).is_some();
        if is_returned {
            self.budget.changed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{Future, ready};
    use std::net::Ipv4Addr;

    use super::*;

    fn ip(n: u32) -> IpAddr {
        Ipv4Addr::from(n).into()
    }

    async fn is_pending<T>(future: impl Future<Output = T>) -> bool {
        tokio::select! {
            biased;
            _ = future => false,
            () = ready(()) => true,
        }
    }

    #[test]
    fn greedy_clients_get_equal_shares_and_a_further_one_gets_the_same() {
        let budget = FairBudget::new(100_000);
        let mut reserved = Vec::new();
        for n in 1..=100 {
            let own = std::iter::from_fn(|| budget.try_reserve(ip(n), 10));
            reserved.extend(own);
            assert_eq!(budget.used(), 100_000);
            let state = budget.state.lock();
            for client in state.by_client.values() {
                let share = 100_000 / n as usize;
                assert!(
                    (share - 20..=share + 20).contains(&client.used),
                    "{} of {share}",
                    client.used
                );
            }
        }
        drop(reserved);
        assert_eq!(budget.used(), 0);
        assert!(budget.state.lock().by_client.is_empty());
    }

    #[tokio::test]
    async fn the_oldest_reservations_of_the_largest_client_are_revoked_if_that_is_enough() {
        let budget = FairBudget::new(100);
        assert!(budget.try_reserve(ip(1), 51).is_none());
        let large = [20, 20, 20].map(|amount| budget.try_reserve(ip(1), amount).unwrap());
        let small = budget.try_reserve(ip(2), 40).unwrap();
        assert!(
            budget.try_reserve(ip(3), 50).is_none(),
            "the first client would have less"
        );
        assert_eq!(budget.used(), 100);
        let new = budget.try_reserve(ip(3), 15).unwrap();
        assert!(!is_pending(large[0].revocation().wait()).await);
        for kept in [&large[1], &large[2], &small, &new] {
            assert!(is_pending(kept.revocation().wait()).await);
        }
        assert_eq!(budget.used(), 95);
        drop(large);
        assert_eq!(budget.used(), 55);
    }

    #[tokio::test]
    async fn a_client_waits_until_others_return_enough() {
        let budget = FairBudget::new(100);
        let held = [50, 50].map(|amount| budget.try_reserve(ip(1), amount).unwrap());
        let other = budget.try_reserve(ip(2), 50).unwrap();
        let mut waiting = pin!(budget.reserve(ip(3), 50));
        assert!(is_pending(waiting.as_mut()).await);
        let [revoked, last] = held;
        drop(revoked);
        assert!(is_pending(waiting.as_mut()).await);
        drop(last);
        let reservation = waiting.await;
        drop((reservation, other));
        assert_eq!(budget.used(), 0);
    }
}
