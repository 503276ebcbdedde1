//! The router between the networks of two clusters.

use std::io::Write as _;
use std::process::Stdio;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use tulle_core::netns::Namespace;

use super::addresses::ClusterAddresses;
use super::cluster::Cluster;
use super::kubernetes_components::API_PORT;
use super::node;

/// How the networks of two clusters are connected.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Connection {
    /// Pods of each cluster reach pods of the other by their addresses.
    Flat,
    /// Pods of each cluster reach nodes and load balancers of the other, and appear there with the address of the router. Their own
    /// addresses are not reachable.
    Translated,
}

/// Which connections between the clusters are cut.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Cut {
    /// Those to the API servers.
    ApiServers,
    All,
}

/// A network namespace with a link into the network of each cluster.
pub(super) struct Router {
    namespace: Arc<Namespace>,
}

impl Router {
    /// Connects the networks of two clusters.
    ///
    /// # Errors
    /// Fails if a link cannot be created, or the kernel refuses a rule.
    pub(super) fn start(connection: Connection, west: &mut Cluster, east: &mut Cluster) -> anyhow::Result<Self> {
        let namespace = west.network()?.add_isolated("router")?;
        node::forward_packets(&namespace)?;
        for (cluster, link) in [(west, "west"), (east, "east")] {
            let addresses = cluster.addresses();
            let own_addrs = addresses.interface_of_node(ClusterAddresses::ROUTER);
            let own_addrs: Vec<&str> = own_addrs.iter().map(String::as_str).collect();
            cluster.network()?.connect(&namespace, link, &own_addrs)?;
            let numbers = 1..=u8::try_from(cluster.nodes().len())?;
            let to_pods = numbers.map(|number| node::route_to_pods(addresses, number));
            let to_load_balancers = node::routes(&addresses.load_balancers(), &addresses.all_of_node(1));
            namespace.ip(&to_pods.chain([to_load_balancers]).collect::<String>())?;
        }
        let router = Self { namespace };
        router.set_connection(connection)?;
        Ok(router)
    }

    /// Changes how new connections between the clusters are forwarded.
    pub(super) fn set_connection(&self, connection: Connection) -> anyhow::Result<()> {
        let rules = match connection {
            Connection::Flat => "",
            Connection::Translated => TRANSLATE,
        };
        self.apply_rules(&format!("{CHAINS}{rules}"))
    }

    /// Drops packets between the clusters, those of established connections too, until [`Router::restore`].
    pub(super) fn cut(&self, cut: Cut) -> anyhow::Result<()> {
        let matching = match cut {
            Cut::ApiServers => format!("tcp sport {API_PORT} drop; tcp dport {API_PORT} drop;"),
            Cut::All => "drop;".to_owned(),
        };
        self.apply_rules(&format!(
            "table inet cut {{ chain forward {{ type filter hook forward priority -10; {matching} }}\n}}\n"
        ))
    }

    /// Ends a cut.
    pub(super) fn restore(&self) -> anyhow::Result<()> {
        self.apply_rules("delete table inet cut")
    }

    fn apply_rules(&self, rules: &str) -> anyhow::Result<()> {
        let mut nft = self.namespace.command("nft");
        let nft = nft.args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut nft = nft.spawn().context("starting nft (package nftables)")?;
        let mut input = nft.stdin.take().context("the input of nft")?;
        input.write_all(rules.as_bytes()).context("writing rules to nft")?;
        drop(input);
        let output = nft.wait_with_output().context("waiting for nft")?;
        ensure!(
            output.status.success(),
            "nft refused {rules:?}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }
}

/// The rules in `postrouting` match nothing, because their addresses are reserved for documentation. Without any rule, the kernel
/// would also stop translating packets of established connections.
const CHAINS: &str = "
table inet translate {
  chain forward { type filter hook forward priority 0; }
  chain postrouting { type nat hook postrouting priority 100; }
}
flush table inet translate
add rule inet translate postrouting ip saddr 192.0.2.1 masquerade
add rule inet translate postrouting ip6 saddr 2001:db8::1 masquerade
";
/// The networks of pods of both clusters are in these two.
const TRANSLATE: &str = "
add rule inet translate forward ct state new ip daddr 10.0.0.0/8 reject with icmp net-unreachable
add rule inet translate forward ct state new ip6 daddr fd23::/16 reject with icmpv6 no-route
add rule inet translate postrouting ip saddr 10.0.0.0/8 masquerade
add rule inet translate postrouting ip6 saddr fd23::/16 masquerade
";
