//! Clients of the destination service: their connections and requests, and the endpoints that they receive.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context as _;
use tulle_control::tls::client::{self, Channel};
use tulle_core::addr::Addr;
use tulle_proto::destination::{GetDestination, Update, WeightedAddr, update};

/// Connects in plaintext to a service of the control plane on this machine.
pub(crate) async fn connect(port: u16) -> anyhow::Result<Channel> {
    let addr = Addr::Socket(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    client::connect_plaintext(&addr).await.context("connecting")
}

/// A client pod in the namespace `scale`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientPod<'a> {
    pub(crate) name: &'a str,
    /// Number of the pod's node.
    pub(crate) node: usize,
}

impl ClientPod<'_> {
    /// A request for the endpoints or the profile of port 80 of a Service.
    pub(crate) fn request(self, service: &str) -> GetDestination {
        let Self { name, node } = self;
        GetDestination {
            path: authority(service),
            context_token: format!(r#"{{"ns":"scale","nodeName":"node-{node}","pod":"{name}"}}"#),
            ..GetDestination::default()
        }
    }
}

/// Name and port of a Service in the namespace `scale`, as clients send them.
pub(crate) fn authority(service: &str) -> String {
    format!("{service}.scale.svc.cluster.local:80")
}

/// Applies a message of a `Get` stream to the endpoints that the earlier ones have delivered.
pub(crate) fn apply_update(endpoints: &mut BTreeMap<SocketAddr, WeightedAddr>, update: Update) {
    match update.update {
        Some(update::Update::Add(set)) => {
            for endpoint in set.addrs {
                if let Some(addr) = endpoint.addr.and_then(|addr| SocketAddr::try_from(addr).ok()) {
                    endpoints.insert(addr, endpoint);
                }
            }
        }
        Some(update::Update::Remove(set)) => {
            for addr in set.addrs.into_iter().filter_map(|addr| SocketAddr::try_from(addr).ok()) {
                endpoints.remove(&addr);
            }
        }
        Some(update::Update::NoEndpoints(_)) => endpoints.clear(),
        None => {}
    }
}

/// Number of streams that share a connection.
pub(crate) const STREAMS_PER_CONNECTION: usize = 50;
