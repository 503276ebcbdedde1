//! The memory of requests to webhooks, whose clients are not verified: bodies and decoded objects.
//!
//! Bodies have a budget of bytes, of which each client network has a share. Decoding multiplies the memory of an object, so only as
//! many objects are reviewed at a time as fit into memory when decoded; the networks take turns.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use tokio::time::{Instant, timeout_at};
use tulle_core::connections::client_network;
use tulle_core::fair_budget::{FairBudget, Reservation};
use tulle_core::per_client_limiter::{Limits, PerClientLimiter};
use tulle_core::request_body::{self, ReadError};

/// The memory for the requests to all webhooks of a process.
pub(super) struct WebhookMemory {
    bodies: Arc<FairBudget>,
    /// Limits the objects that are decoded at a time. The weight of a request is the size of its object in kibibytes.
    decoded: PerClientLimiter,
}

/// A body, and its part of the budget.
pub(super) struct ReceivedBody {
    pub(super) bytes: Bytes,
    pub(super) reservation: Reservation,
}

/// Reason why a body is not received.
#[derive(Debug, thiserror::Error)]
pub(super) enum BodyError {
    #[error("the body is larger than {max_bytes} bytes")]
    TooLarge { max_bytes: usize },
    #[error("other requests use all of the memory for bodies; retry later")]
    Busy,
    #[error("the body was not received within {BODY_READ_TIMEOUT:?}")]
    Timeout,
    #[error("reading the body")]
    Read(#[source] hyper::Error),
}

/// Memory of a decoded object. It is at most the memory for all objects together.
#[derive(Clone, Copy)]
pub(super) struct ObjectSize {
    kibibytes: u32,
}

impl ObjectSize {
    /// An object that is not decoded.
    pub(super) const UNDECODED: Self = Self { kibibytes: 0 };
}

/// The decoded object would need more memory than there is for all objects together.
#[derive(Debug, thiserror::Error)]
#[error(
    "decoding it needs up to {needed} KiB of memory, but the memory limit of this process permits {max} KiB; raise the limit, or \
     divide the object"
)]
pub(super) struct ObjectTooLarge {
    needed: usize,
    max: usize,
}

impl WebhookMemory {
    /// Returns the memory for a process that may use `limit` bytes: an eighth for bodies, and an eighth for decoded objects.
    pub(super) fn from_limit(limit: Option<u64>) -> Self {
        let part = limit.map_or(usize::MAX, |limit| usize::try_from(limit / 8).unwrap_or(usize::MAX));
        Self {
            bodies: FairBudget::new(part),
            decoded: PerClientLimiter::new(Limits {
                total_weight: (part / 1024).min(u32::MAX as usize),
                queued_or_running_per_network: MAX_CONCURRENT_REVIEWS_PER_NETWORK,
                requests_per_network: usize::MAX,
            }),
        }
    }

    /// Receives a body as soon as there is memory for it.
    pub(super) async fn receive<B>(&self, client: IpAddr, body: B) -> Result<ReceivedBody, BodyError>
    where
        B: Body<Error = hyper::Error> + Unpin,
    {
        let deadline = Instant::now() + BODY_READ_TIMEOUT;
        let max_bytes = MAX_BODY_BYTES.min(self.bodies.max_reservation());
        let length = match body.size_hint().exact() {
            Some(length) => usize::try_from(length).unwrap_or(usize::MAX),
            None => max_bytes,
        };
        // A body that is too long is received without being stored.
        let stored_length = if length > max_bytes { 0 } else { length };
        let reserving = self.bodies.reserve(client_network(client), stored_length);
        let reservation = timeout_at(deadline, reserving).await.map_err(|_| BodyError::Busy)?;
        let revocation = reservation.revocation();
        tokio::select! {
            read = timeout_at(deadline, request_body::read(body, max_bytes)) => match read {
                Ok(Ok(bytes)) => Ok(ReceivedBody { bytes, reservation }),
                Ok(Err(ReadError::TooLong { max_bytes })) => Err(BodyError::TooLarge { max_bytes }),
                Ok(Err(ReadError::Body(err))) => Err(BodyError::Read(err)),
                Err(_) => Err(BodyError::Timeout),
            },
            () = revocation.wait() => Err(BodyError::Busy),
        }
    }

    /// Returns the size of an object that needs up to `n_bytes` of memory.
    ///
    /// # Errors
    /// Fails if it is too large for this process.
    pub(super) fn object_size(&self, n_bytes: usize) -> Result<ObjectSize, ObjectTooLarge> {
        let (needed, max) = (n_bytes.div_ceil(1024), self.decoded.max_weight());
        match u32::try_from(needed) {
            Ok(kibibytes) if needed <= max => Ok(ObjectSize { kibibytes }),
            _ => Err(ObjectTooLarge { needed, max }),
        }
    }

    /// Runs a review when there is memory for its decoded object.
    pub(super) async fn review<T>(&self, client: IpAddr, size: ObjectSize, review: impl Future<Output = T>) -> T {
        let reviewed = self.decoded.run(client, size.kibibytes, review).await;
        reviewed.expect("no request is refused, because `requests_per_network` is unlimited")
    }

    /// Bytes that are reserved for bodies.
    #[cfg(test)]
    pub(super) fn body_bytes(&self) -> usize {
        self.bodies.used()
    }
}

/// Maximum size of a body in bytes. Linkerd's webhooks read 10 MiB. The API server accepts no objects above 3 MiB.
pub(super) const MAX_BODY_BYTES: usize = 10 * 1024 * 1024;
const BODY_READ_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_CONCURRENT_REVIEWS_PER_NETWORK: usize = 8;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use http_body::{Frame, SizeHint};
    use tokio::join;

    use super::*;

    const OTHER_CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const API_SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

    /// A body of which the first bytes are received.
    struct PartialBody {
        n_remaining: u64,
        received: Option<Bytes>,
    }

    impl PartialBody {
        fn new(n_announced: usize, n_received: usize) -> Self {
            Self {
                n_remaining: n_announced as u64,
                received: Some(vec![b' '; n_received].into()),
            }
        }
    }

    impl Body for PartialBody {
        type Data = Bytes;
        type Error = hyper::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
            match self.received.take() {
                Some(bytes) => {
                    self.n_remaining -= bytes.len() as u64;
                    Poll::Ready(Some(Ok(Frame::data(bytes))))
                }
                None if self.n_remaining == 0 => Poll::Ready(None),
                None => Poll::Pending,
            }
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(self.n_remaining)
        }
    }

    /// Creates a memory of one mebibyte for all bodies together.
    fn memory() -> WebhookMemory {
        WebhookMemory::from_limit(Some(8 << 20))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_ends_early_if_others_need_its_memory() {
        let memory = memory();
        let began_at = Instant::now();
        let slow = memory.receive(OTHER_CLIENT, PartialBody::new(500_000, 1)).await;
        assert!(matches!(slow, Err(BodyError::Timeout)));
        assert_eq!(began_at.elapsed(), BODY_READ_TIMEOUT);
        let slow = || memory.receive(OTHER_CLIENT, PartialBody::new(500_000, 499_999));
        let (oldest, newer, good) = join!(
            slow(),
            slow(),
            memory.receive(API_SERVER, PartialBody::new(500_000, 500_000)),
        );
        assert!(matches!(oldest, Err(BodyError::Busy)));
        assert!(matches!(newer, Err(BodyError::Timeout)));
        assert_eq!(good.unwrap().bytes.len(), 500_000);
        assert_eq!(memory.body_bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_has_memory_is_refused_without_being_stored() {
        let memory = memory();
        let length = (1 << 19) + 1;
        let refused = memory.receive(API_SERVER, PartialBody::new(length, length)).await;
        assert!(matches!(refused, Err(BodyError::TooLarge { max_bytes: 0x8_0000 })));
        let receive = |client| memory.receive(client, PartialBody::new(400_000, 400_000));
        let held = [receive(OTHER_CLIENT).await.unwrap(), receive(API_SERVER).await.unwrap()];
        assert!(matches!(receive(API_SERVER).await, Err(BodyError::Busy)));
        drop(held);
        assert!(receive(API_SERVER).await.is_ok());
    }
}
