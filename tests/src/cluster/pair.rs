//! Two clusters whose networks are connected.

use anyhow::Context as _;
use tokio::task::JoinSet;

use super::addresses::ClusterAddresses;
use super::cluster::{Cluster, ClusterOptions};
use super::load_balancers;
use super::router::{Connection, Cut, Router};
use super::slot;

/// Two clusters, `west` and `east`, with a network between them. Dropping it stops both.
pub struct ClusterPair {
    pub network: PairNetwork,
    pub west: Cluster,
    pub east: Cluster,
}

/// The router between the networks of two clusters, and their load balancers.
pub struct PairNetwork {
    router: Router,
    _load_balancers: JoinSet<()>,
}

impl ClusterPair {
    /// Starts two clusters with this number of nodes each, IPv4 and IPv6 addresses, and the images of
    /// [`crate::images::Image::DEFAULT`]. No other cluster runs beside them.
    ///
    /// # Errors
    /// As [`Cluster::start`], or a detached cluster is running.
    pub async fn start(connection: Connection, nodes: u8) -> anyhow::Result<Self> {
        let options = |addresses: ClusterAddresses| ClusterOptions {
            nodes,
            addresses: addresses.with_ipv6(),
            ..ClusterOptions::default()
        };
        options(ClusterAddresses::FIRST).check()?;
        let mut locks = slot::lock_all_slots().await?.into_iter();
        let mut start = |addresses| {
            let lock = locks.next();
            async move { Cluster::start_in(lock.context("a slot for a cluster")?, options(addresses)).await }
        };
        let (west, east) = (start(ClusterAddresses::FIRST), start(ClusterAddresses::SECOND));
        let (west, east) = tokio::join!(west, east);
        let (mut west, mut east) = (west.context("the first cluster")?, east.context("the second cluster")?);
        let router = Router::start(connection, &mut west, &mut east)?;
        let mut balancers = JoinSet::new();
        for cluster in [&west, &east] {
            balancers.spawn(load_balancers::assign_addresses(cluster.client(), cluster.addresses()));
        }
        let network = PairNetwork {
            router,
            _load_balancers: balancers,
        };
        Ok(Self { network, west, east })
    }
}

impl PairNetwork {
    /// Changes how new connections between the clusters are forwarded.
    ///
    /// # Errors
    /// Fails if the kernel refuses a rule.
    pub fn set_connection(&self, connection: Connection) -> anyhow::Result<()> {
        self.router.set_connection(connection)
    }

    /// Drops packets between the clusters, those of established connections too, until [`PairNetwork::restore`].
    ///
    /// # Errors
    /// Fails if the kernel refuses the rule.
    pub fn cut(&self, cut: Cut) -> anyhow::Result<()> {
        self.router.cut(cut)
    }

    /// Ends a cut.
    ///
    /// # Errors
    /// Fails if there was none.
    pub fn restore(&self) -> anyhow::Result<()> {
        self.router.restore()
    }
}
