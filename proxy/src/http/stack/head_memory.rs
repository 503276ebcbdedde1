//! Memory for large incomplete request heads. All connections of the process share it, and clients have equal shares: if it
//! is used up, the client with the most memory loses its oldest reservation to a client with less.
//!
//! A usual request reserves nothing. Each connection has [`UNRESERVED_HEAD_BYTES`] for a head. A larger head reserves memory
//! while the proxy waits for the rest of it.

use std::{
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tulle_core::{
    connections::client_network,
    fair_budget::{FairBudget, Reservation},
};

use crate::{http::error::Error, net::memory::MemoryPressure};

/// The memory for large incomplete heads of all connections of the process.
pub(crate) struct HeadMemory {
    budget: Arc<FairBudget>,
    /// The size of the budget, in bytes.
    limit: usize,
    pressure: MemoryPressure,
}

/// Reserves memory for the heads of one client.
pub(in crate::http) struct ClientHeadMemory {
    memory: Arc<HeadMemory>,
    client: IpAddr,
}

/// Whether a client has an identity. All clients without an identity in one [`client_network`] share one part of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::http) enum ClientKind {
    WithIdentity,
    WithoutIdentity,
}

/// The memory that is reserved for one head; none by default. It is released on drop.
#[derive(Default)]
pub(in crate::http) struct HeadReservation(Option<Box<LargeHead>>);

/// The memory of a head that is larger than [`UNRESERVED_HEAD_BYTES`].
struct LargeHead {
    n_bytes: usize,
    /// Ready when another client gets the memory.
    revoked: Pin<Box<dyn Future<Output = ()> + Send>>,
    _reservation: Reservation,
}

impl HeadMemory {
    /// `memory` is the memory limit of the process in bytes, if it has one.
    pub(crate) fn new(memory: Option<u64>, pressure: MemoryPressure) -> Arc<Self> {
        let limit = memory.map_or(DEFAULT_HEAD_MEMORY_BYTES, |memory| memory / MEMORY_DIVISOR);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).max(MIN_HEAD_MEMORY_BYTES);
        Arc::new(Self {
            budget: FairBudget::new(limit),
            limit,
            pressure,
        })
    }
}

impl ClientHeadMemory {
    pub(in crate::http) fn new(memory: Arc<HeadMemory>, addr: SocketAddr, kind: ClientKind) -> Self {
        let client = match kind {
            ClientKind::WithIdentity => addr.ip().to_canonical(),
            ClientKind::WithoutIdentity => client_network(addr.ip()),
        };
        Self { memory, client }
    }

    fn try_reserve(&self, n_bytes: usize) -> Option<LargeHead> {
        let budget = &self.memory.budget;
        let rounded = n_bytes.max(MIN_RESERVATION_BYTES).checked_next_power_of_two()?;
        let n_bytes = n_bytes.max(rounded.min(budget.max_reservation()));
        let reservation = budget.try_reserve(self.client, n_bytes)?;
        let revocation = reservation.revocation();
        Some(LargeHead {
            n_bytes,
            revoked: Box::pin(async move { revocation.wait().await }),
            _reservation: reservation,
        })
    }

    /// Maximum size of a reservation, in bytes.
    pub(in crate::http) fn max_reservation(&self) -> usize {
        self.memory.budget.max_reservation()
    }
}

/// Maximum part of a head that a connection may hold without a reservation. `BYTES_PER_CONNECTION` in `app/mod.rs` includes
/// this size.
pub(in crate::http) const UNRESERVED_HEAD_BYTES: usize = 8 << 10;

/// Minimum size of a reservation: the default limit of an HTTP/1 head. Large heads usually grow to it, and even a shorter part
/// of a head keeps the 60 KiB buffer of its read allocated.
const MIN_RESERVATION_BYTES: usize = 64 << 10;

/// The memory limit of the process divided by this number is for heads. Half of the limit is for connections, so three
/// eighths remain for the process and for complete requests. Of 250 MiB, heads get 31 MiB: 500 heads of HTTP/1, or 31 of
/// HTTP/2.
const MEMORY_DIVISOR: u64 = 8;
/// Size of the budget if the process has no memory limit: 1024 heads of HTTP/1, or 64 of HTTP/2.
const DEFAULT_HEAD_MEMORY_BYTES: u64 = 64 << 20;
/// Minimum size of the budget: 16 heads of HTTP/1, or 2 heads of HTTP/2, each of which reserves at most half of it.
const MIN_HEAD_MEMORY_BYTES: usize = 1 << 20;

impl HeadReservation {
    /// Reserves memory for the `n_bytes` of a head that the proxy holds, or can hold soon. Called when the proxy waits for
    /// more of the head. The task is woken when another client gets the memory.
    ///
    /// # Errors
    /// The memory is used up, another client has got it, or the process is under memory pressure. The connection must then
    /// drop the head.
    pub(in crate::http) fn update(
        &mut self,
        cx: &mut Context<'_>,
        memory: &ClientHeadMemory,
        n_bytes: usize,
    ) -> Result<(), Error> {
        if n_bytes <= UNRESERVED_HEAD_BYTES {
            self.0 = None;
            return Ok(());
        }
        self.update_large(cx, memory, n_bytes)
    }

    #[cold]
    fn update_large(&mut self, cx: &mut Context<'_>, memory: &ClientHeadMemory, n_bytes: usize) -> Result<(), Error> {
        let HeadMemory { limit, pressure, .. } = &*memory.memory;
        if pressure.is_active() {
            return Err(Error::MemoryPressure);
        }
        let used_up = || Error::HeadMemoryUsedUp { limit: *limit };
        let mut large = match self.0.take() {
            Some(large) if large.n_bytes >= n_bytes => large,
            // A smaller reservation is returned first, so that the head does not count twice.
            smaller => {
                drop(smaller);
                Box::new(memory.try_reserve(n_bytes).ok_or_else(used_up)?)
            }
        };
        match large.revoked.as_mut().poll(cx) {
            Poll::Ready(()) => Err(used_up()),
            Poll::Pending => {
                self.0 = Some(large);
                Ok(())
            }
        }
    }

    #[cfg(test)]
    pub(in crate::http) fn is_empty(&self) -> bool {
        self.0.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    fn client_memory(memory: &Arc<HeadMemory>, client: u8) -> ClientHeadMemory {
        ClientHeadMemory::new(
            memory.clone(),
            ([10, 0, 0, client], 80).into(),
            ClientKind::WithoutIdentity,
        )
    }

    #[test]
    fn only_large_heads_reserve_memory_and_it_follows_the_limit_of_the_process() {
        for (limit, n_heads) in [(None, 1024), (Some(250 << 20), 500), (Some(0), 16)] {
            let memory = HeadMemory::new(limit, MemoryPressure::default());
            let client = client_memory(&memory, 1);
            let cx = &mut Context::from_waker(Waker::noop());
            let mut reserve = |n_bytes| {
                let mut reserved = HeadReservation::default();
                reserved.update(cx, &client, n_bytes).map(|()| reserved)
            };
            assert!(reserve(UNRESERVED_HEAD_BYTES).unwrap().is_empty());
            assert_eq!(memory.budget.used(), 0);
            let large: Vec<_> = (0..n_heads).map_while(|_| reserve(60_000).ok()).collect();
            assert_eq!(large.len(), n_heads, "{limit:?}");
            let error = reserve(60_000).err().unwrap();
            assert_eq!(error.cause(), "overload");
            drop(large);
            assert_eq!(memory.budget.used(), 0);
        }
    }

    #[test]
    fn a_head_that_grows_counts_once_and_loses_its_memory_to_a_client_that_has_less() {
        let memory = HeadMemory::new(Some(8 << 20), MemoryPressure::default());
        let (first, second) = (client_memory(&memory, 1), client_memory(&memory, 2));
        let cx = &mut Context::from_waker(Waker::noop());
        let new = HeadReservation::default;
        let (mut grown, mut small, mut other) = (new(), new(), new());
        for (n_bytes, used) in [
            (10_000, 64 << 10),
            (65_536, 64 << 10),
            (65_537, 128 << 10),
            (300_000, 512 << 10),
        ] {
            grown.update(cx, &first, n_bytes).unwrap();
            assert_eq!(memory.budget.used(), used, "{n_bytes}");
        }
        small.update(cx, &first, 300_000).unwrap();
        assert!(
            new().update(cx, &first, 10_000).is_err(),
            "its own memory is not revoked"
        );
        other.update(cx, &second, 10_000).unwrap();
        assert!(grown.update(cx, &first, 300_001).is_err(), "the oldest is revoked");
        assert!(grown.is_empty());
        small.update(cx, &first, 300_001).unwrap();
        other.update(cx, &second, 10_001).unwrap();
        small.update(cx, &first, 0).unwrap();
        assert_eq!(memory.budget.used(), 64 << 10);
    }
}
