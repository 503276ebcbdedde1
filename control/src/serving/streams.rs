//! How many streams each client address has open.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tulle_core::connections::network;

use crate::grpc::Caller;

/// The streams of one port.
pub(super) struct Streams {
    max: usize,
    by_client: Mutex<HashMap<IpAddr, usize>>,
}

/// An open stream, until the last clone is dropped.
#[derive(Clone)]
pub(super) struct Stream {
    _open: Arc<Open>,
}

struct Open {
    streams: Arc<Streams>,
    client: Option<IpAddr>,
}

impl Streams {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            max,
            by_client: Mutex::default(),
        })
    }

    /// Counts a stream, unless its client has too many. Those of this machine are not bounded.
    pub(super) fn open(self: &Arc<Self>, caller: &Caller) -> Option<Stream> {
        let client = match caller {
            Caller::Peer { ip, .. } if ip.is_loopback() => None,
            // Who proves an identity does not make up addresses.
            Caller::Peer { ip, identities } if !identities.is_empty() => Some(*ip),
            Caller::Peer { ip, .. } => Some(network(*ip)),
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
        let open = Open {
            streams: self.clone(),
            client,
        };
        Some(Stream { _open: Arc::new(open) })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let Some(client) = self.client else { return };
        let mut by_client = self.streams.by_client.lock();
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
    fn streams_of_an_address_are_bounded_and_those_of_others_are_not_counted_with_them() {
        let streams = Streams::new(2);
        let peer = |ip: &str| Caller::Peer {
            ip: ip.parse().unwrap(),
            identities: Arc::default(),
        };
        let one = peer("10.0.0.1");
        let mut open: Vec<_> = (0..2).map(|_| streams.open(&one).unwrap()).collect();
        assert!(streams.open(&one).is_none());
        assert!(streams.open(&peer("10.0.0.2")).is_some());
        assert!((0..3).all(|_| streams.open(&Caller::ThisMachine).is_some()));
        open.pop();
        assert!(streams.open(&one).is_some());
        open.clear();
        assert!(streams.by_client.lock().is_empty());
    }
}
