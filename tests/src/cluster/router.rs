//! The router between the networks of two clusters.

use std::fs;
use std::io::Write as _;
use std::process::Stdio;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use tulle_core::netns::Namespace;

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
        namespace.run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1"))??;
        for (cluster, link) in [(west, "west"), (east, "east")] {
            let addresses = cluster.addresses();
            let own_addr = format!("{}/24", addresses.router());
            cluster.network()?.connect(&namespace, link, &[&own_addr])?;
            let numbers = 1..=u8::try_from(cluster.nodes().len())?;
            let to_pods = numbers.map(|number| node::route_to_pods(addresses, number));
            let first = addresses.node(1);
            let to_load_balancers = format!("route add {} via {first}\n", addresses.load_balancers());
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
            "table ip cut {{ chain forward {{ type filter hook forward priority -10; {matching} }}\n}}\n"
        ))
    }

    /// Ends a cut.
    pub(super) fn restore(&self) -> anyhow::Result<()> {
        self.apply_rules("delete table ip cut")
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

/// The rule in `postrouting` matches nothing, because 192.0.2.1 is reserved for documentation. Without any rule, the kernel would
/// also stop translating packets of established connections.
const CHAINS: &str = "
table ip translate {
  chain forward { type filter hook forward priority 0; }
  chain postrouting { type nat hook postrouting priority 100; }
}
flush table ip translate
add rule ip translate postrouting ip saddr 192.0.2.1 masquerade
";
/// Both networks of pods are in 10.0.0.0/8.
const TRANSLATE: &str = "
add rule ip translate forward ct state new ip daddr 10.0.0.0/8 reject with icmp net-unreachable
add rule ip translate postrouting ip saddr 10.0.0.0/8 masquerade
";
