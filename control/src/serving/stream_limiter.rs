//! Limits the number of open streams per client: by address for clients with a certificate, by network for all others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tulle_core::connections::client_network;

use crate::grpc::Caller;

/// The open streams of one port.
pub(super) struct StreamLimiter {
    max: usize,
    by_client: Mutex<HashMap<IpAddr, usize>>,
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

impl StreamLimiter {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            max,
            by_client: Mutex::default(),
        })
    }

    /// Counts a stream. Returns `None` if its client has reached the limit. Loopback clients have no limit.
    pub(super) fn acquire(self: &Arc<Self>, caller: &Caller) -> Option<StreamPermit> {
        let client = match caller {
            Caller::Peer { ip, .. } if ip.is_loopback() => None,
            // Authenticated clients are counted per address, unauthenticated ones per network, because they can use
            // many addresses of it.
            Caller::Peer { ip, identities } if !identities.is_empty() => Some(*ip),
            Caller::Peer { ip, .. } => Some(client_network(*ip)),
            Caller::ThisMachine => None,
        };
        if let Some(client) = client {
            let mut by_client = self.by_client.lock();
            let n = by_client.entry(client).or_default();
            if *n >= self.max {
                return None;
            }
            *n += 1;
        }
        let open = StreamCount {
            limiter: self.clone(),
            client,
        };
        Some(StreamPermit { _count: Arc::new(open) })
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
    use super::*;

    #[test]
    fn streams_are_limited_per_client_address() {
        let streams = StreamLimiter::new(2);
        let peer = |ip: &str| Caller::Peer {
            ip: ip.parse().unwrap(),
            identities: Arc::default(),
        };
        let one = peer("10.0.0.1");
        let mut open: Vec<_> = (0..2).map(|_| streams.acquire(&one).unwrap()).collect();
        assert!(streams.acquire(&one).is_none());
        assert!(streams.acquire(&peer("10.0.0.2")).is_some());
        assert!((0..3).all(|_| streams.acquire(&Caller::ThisMachine).is_some()));
        open.pop();
        assert!(streams.acquire(&one).is_some());
        open.clear();
        assert!(streams.by_client.lock().is_empty());
    }
}
