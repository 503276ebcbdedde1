//! Limits the number of open streams per client, and the memory of requests. Clients with a certificate are told apart by
//! address, all others by network.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use http::Response;
use parking_lot::Mutex;
use tonic::Status;
use tonic::body::Body;
use tulle_core::connections::client_network;
use tulle_core::fair_budget::{FairBudget, Reservation};

use super::limits::{CallKind, Limits};
use crate::grpc::Caller;

/// The open streams of one port.
pub(super) struct StreamLimiter {
    limits: Limits,
    by_client: Mutex<HashMap<IpAddr, usize>>,
    /// Memory for requests of clients without a certificate; on a port with [`CallKind::Unary`], of all clients.
    unverified_budget: Arc<FairBudget>,
    /// Memory for those requests of clients with a certificate that are incomplete when they arrive; zero on a port with
    /// [`CallKind::Unary`].
    verified_budget: Arc<FairBudget>,
}

/// A stream that may begin.
pub(super) struct AdmittedStream {
    pub(super) permit: StreamPermit,
    pub(super) request_memory: RequestMemory,
}

/// The memory of a request, until the response begins.
pub(super) enum RequestMemory {
    /// The request is not counted.
    Uncounted,
    Reserved(Reservation),
    /// Memory is reserved only if the request is not complete when it arrives, which is rare. If thousands of requests arrive
    /// together, some can be incomplete. Clients retry those of them that are refused.
    ReservedIfIncomplete(PendingReservation),
}

/// The reservation for one request of a client, which is not made yet.
pub(super) struct PendingReservation {
    budget: Arc<FairBudget>,
    client: IpAddr,
    n_bytes: usize,
}

/// A slot for an open stream, released when the last clone is dropped.
#[derive(Clone)]
pub(super) struct StreamPermit {
    _count: Arc<StreamCount>,
}

struct StreamCount {
    limiter: Arc<StreamLimiter>,
    client: Option<IpAddr>,
}

/// Why a stream is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StreamRefused {
    #[error("too many open streams from this client")]
    Streams,
    #[error("too many concurrent requests; retry later")]
    Memory,
}

impl StreamRefused {
    pub(super) fn response(self) -> Response<Body> {
        Status::resource_exhausted(self.to_string()).into_http()
    }
}

impl StreamLimiter {
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        let (unverified, verified) = match limits.call_kind {
            CallKind::Unary => (limits.request_memory, 0),
            CallKind::Streaming => (limits.request_memory / 2, limits.request_memory / 2),
        };
        Arc::new(Self {
            limits,
            by_client: Mutex::default(),
            unverified_budget: FairBudget::new(unverified),
            verified_budget: FairBudget::new(verified),
        })
    }

    /// Counts a stream. Reserves the memory of its request, unless only incomplete requests take memory. Loopback clients have no
    /// limit.
    ///
    /// # Errors
    /// Fails if the client has reached the limit of streams, or already uses its share of the memory. If no memory is free and
    /// the client uses less than its share, the reservation of another client is revoked.
    pub(super) fn admit(self: &Arc<Self>, caller: &Caller) -> Result<AdmittedStream, StreamRefused> {
        let (client, is_verified) = match caller {
            Caller::ThisMachine => (None, true),
            Caller::Peer { ip, .. } if ip.is_loopback() => (None, true),
            Caller::Peer { ip, identities } if !identities.is_empty() => (Some(*ip), true),
            // Such a client can use many addresses of its network.
            Caller::Peer { ip, .. } => (Some(client_network(*ip)), false),
        };
        let permit = self.acquire_permit(client)?;
        let pending = |budget: &Arc<FairBudget>, client| PendingReservation {
            budget: budget.clone(),
            client,
            n_bytes: self.limits.call_kind.bytes_per_request(),
        };
        let request_memory = match (client, self.limits.call_kind) {
            (None, _) => RequestMemory::Uncounted,
            (Some(client), CallKind::Streaming) if is_verified => {
                RequestMemory::ReservedIfIncomplete(pending(&self.verified_budget, client))
            }
            (Some(client), _) => RequestMemory::Reserved(pending(&self.unverified_budget, client).reserve()?),
        };
        Ok(AdmittedStream { permit, request_memory })
    }

    fn acquire_permit(self: &Arc<Self>, client: Option<IpAddr>) -> Result<StreamPermit, StreamRefused> {
        if let Some(client) = client {
            let mut by_client = self.by_client.lock();
            let n = by_client.entry(client).or_default();
            if *n >= self.limits.streams_per_client {
                return Err(StreamRefused::Streams);
            }
            *n += 1;
        }
        let open = StreamCount {
            limiter: self.clone(),
            client,
        };
        Ok(StreamPermit { _count: Arc::new(open) })
    }
}

impl PendingReservation {
    /// # Errors
    /// Fails if the client already uses its share of the memory, as for [`StreamLimiter::admit`].
    pub(super) fn reserve(&self) -> Result<Reservation, StreamRefused> {
        let reserved = self.budget.try_reserve(self.client, self.n_bytes);
        reserved.ok_or(StreamRefused::Memory)
    }
}

impl Drop for StreamCount {
    fn drop(&mut self) {
        let Some(client) = self.client else { return };
        let mut by_client = self.limiter.by_client.lock();
        if let Some(n) = by_client.get_mut(&client) {
            *n -= 1;
            if *n == 0 {
                by_client.remove(&client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tulle_core::identity::Identity;

    use super::*;

    fn limiter(call_kind: CallKind, n_requests: usize) -> Arc<StreamLimiter> {
        StreamLimiter::new(Limits {
            request_memory: n_requests * call_kind.bytes_per_request(),
            ..Limits::from_resources(1024, None, call_kind)
        })
    }

    fn unverified(ip: &str) -> Caller {
        Caller::Peer {
            ip: ip.parse().unwrap(),
            identities: Arc::default(),
        }
    }

    fn workload(ip: &str) -> Caller {
        let identity: Identity = "web.shop.serviceaccount.identity.linkerd.cluster.local"
            .parse()
            .unwrap();
        Caller::Peer {
            ip: ip.parse().unwrap(),
            identities: Arc::new([identity]),
        }
    }

    #[test]
    fn streams_are_limited_per_client_address() {
        let streams = limiter(CallKind::Unary, 1_000_000);
        let one = unverified("10.0.0.1");
        let max = CallKind::Unary.max_streams_per_client(None);
        let mut open: Vec<_> = (0..max).map(|_| streams.admit(&one).unwrap()).collect();
        assert_eq!(streams.admit(&one).err(), Some(StreamRefused::Streams));
        assert!(streams.admit(&unverified("10.0.0.2")).is_ok());
        assert!((0..=max).all(|_| streams.admit(&Caller::ThisMachine).is_ok()));
        open.pop();
        assert!(streams.admit(&one).is_ok());
        open.clear();
        assert!(streams.by_client.lock().is_empty());
        assert_eq!(streams.unverified_budget.used(), 0);
    }

    #[test]
    fn certificate_requests_of_one_client_leave_memory_for_those_of_other_clients() {
        let streams = limiter(CallKind::Unary, 12);
        let admit_all = |caller: Caller| -> Vec<_> { std::iter::from_fn(|| streams.admit(&caller).ok()).collect() };
        let first = admit_all(unverified("10.0.0.1"));
        assert_eq!(first.len(), 12);
        assert_eq!(
            streams.admit(&unverified("10.0.0.1")).err(),
            Some(StreamRefused::Memory)
        );
        let second = admit_all(workload("10.0.0.2"));
        assert_eq!(second.len(), 6);
        let _third = streams.admit(&unverified("10.0.0.3")).unwrap();
        assert_eq!(
            streams.unverified_budget.used(),
            12 * CallKind::Unary.bytes_per_request()
        );
    }

    #[test]
    fn unverified_and_verified_clients_have_separate_memory_on_a_port_with_streams() {
        let streams = limiter(CallKind::Streaming, 4);
        let [first, _second] = [(); 2].map(|()| streams.admit(&unverified("10.0.0.1")).unwrap());
        assert_eq!(
            streams.admit(&unverified("10.0.0.1")).err(),
            Some(StreamRefused::Memory)
        );
        drop(first.request_memory);
        assert!(streams.admit(&unverified("10.0.0.1")).is_ok());
        let pending = |ip| match streams.admit(&workload(ip)).unwrap().request_memory {
            RequestMemory::ReservedIfIncomplete(pending) => pending,
            _ => panic!("the memory is reserved at once, or never"),
        };
        // Complete requests need no memory.
        let pending_of_client = [(); 100].map(|()| pending("10.0.0.2"));
        let _incomplete = [0, 1].map(|n: usize| pending_of_client[n].reserve().unwrap());
        assert_eq!(pending_of_client[2].reserve().err(), Some(StreamRefused::Memory));
        assert!(pending("10.0.0.3").reserve().is_ok());
    }
}
