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

use super::limits::{Calls, Limits};
use crate::grpc::Caller;

/// The open streams of one port.
pub(super) struct StreamLimiter {
    calls: Calls,
    by_client: Mutex<HashMap<IpAddr, usize>>,
    request_memory: Arc<FairBudget>,
}

/// A stream that may begin.
pub(super) struct AdmittedStream {
    pub(super) permit: StreamPermit,
    /// Memory of the request, until the response begins; `None` for requests that are not counted.
    pub(super) request_memory: Option<Reservation>,
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
        Arc::new(Self {
            calls: limits.calls,
            by_client: Mutex::default(),
            request_memory: FairBudget::new(limits.request_memory),
        })
    }

    /// Counts a stream and reserves the memory of its request. Loopback clients have no limit.
    ///
    /// # Errors
    /// Fails if the client has reached the limit of streams, or has its share of the memory. If it has not, and no memory is free,
    /// the reservation of another client is revoked.
    pub(super) fn admit(self: &Arc<Self>, caller: &Caller) -> Result<AdmittedStream, StreamRefused> {
        let (client, is_verified) = match caller {
            Caller::ThisMachine => (None, true),
            Caller::Peer { ip, .. } if ip.is_loopback() => (None, true),
            Caller::Peer { ip, identities } if !identities.is_empty() => (Some(*ip), true),
            // They can use many addresses of their network.
            Caller::Peer { ip, .. } => (Some(client_network(*ip)), false),
        };
        let permit = self.count(client)?;
        let is_counted = self.calls == Calls::Unary || !is_verified;
        let request_memory = match client.filter(|_| is_counted) {
            Some(client) => {
                let reserved = self.request_memory.try_reserve(client, self.calls.bytes_per_request());
                Some(reserved.ok_or(StreamRefused::Memory)?)
            }
            None => None,
        };
        Ok(AdmittedStream { permit, request_memory })
    }

    fn count(self: &Arc<Self>, client: Option<IpAddr>) -> Result<StreamPermit, StreamRefused> {
        if let Some(client) = client {
            let mut by_client = self.by_client.lock();
            let n = by_client.entry(client).or_default();
            if *n >= self.calls.max_streams_per_client() {
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

    fn limiter(calls: Calls, n_requests: usize) -> Arc<StreamLimiter> {
        StreamLimiter::new(Limits {
            request_memory: n_requests * calls.bytes_per_request(),
            ..Limits::from_resources(1024, None, calls)
        })
    }

    fn stranger(ip: &str) -> Caller {
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
        let streams = limiter(Calls::Unary, 1_000_000);
        let one = stranger("10.0.0.1");
        let max = Calls::Unary.max_streams_per_client();
        let mut open: Vec<_> = (0..max).map(|_| streams.admit(&one).unwrap()).collect();
        assert_eq!(streams.admit(&one).err(), Some(StreamRefused::Streams));
        assert!(streams.admit(&stranger("10.0.0.2")).is_ok());
        assert!((0..=max).all(|_| streams.admit(&Caller::ThisMachine).is_ok()));
        open.pop();
        assert!(streams.admit(&one).is_ok());
        open.clear();
        assert!(streams.by_client.lock().is_empty());
        assert_eq!(streams.request_memory.used(), 0);
    }

    #[test]
    fn requests_for_certificates_leave_memory_for_those_of_others() {
        let streams = limiter(Calls::Unary, 12);
        let admit_all = |caller: Caller| -> Vec<_> { std::iter::from_fn(|| streams.admit(&caller).ok()).collect() };
        let first = admit_all(stranger("10.0.0.1"));
        assert_eq!(first.len(), 12);
        assert_eq!(streams.admit(&stranger("10.0.0.1")).err(), Some(StreamRefused::Memory));
        let second = admit_all(workload("10.0.0.2"));
        assert_eq!(second.len(), 6);
        let _third = streams.admit(&stranger("10.0.0.3")).unwrap();
        assert_eq!(streams.request_memory.used(), 12 * Calls::Unary.bytes_per_request());
    }

    #[test]
    fn only_requests_of_strangers_are_counted_on_a_port_for_verified_clients() {
        let streams = limiter(Calls::Streaming, 2);
        let [first, _second] = [(); 2].map(|()| streams.admit(&stranger("10.0.0.1")).unwrap());
        assert_eq!(streams.admit(&stranger("10.0.0.1")).err(), Some(StreamRefused::Memory));
        drop(first.request_memory);
        assert!(streams.admit(&stranger("10.0.0.1")).is_ok());
        let open: Vec<_> = (0..100)
            .map(|_| streams.admit(&workload("10.0.0.2")).unwrap())
            .collect();
        assert!(open.iter().all(|stream| stream.request_memory.is_none()));
    }
}
