//! The other clusters whose endpoints are served, by the name that mirrors have for them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::cluster::Cluster;

/// A cluster, and the others whose endpoints it can serve.
#[derive(Clone)]
pub struct LinkedClusters {
    pub local: Cluster,
    pub remote: RemoteClusters,
}

/// A cluster without links.
impl From<Cluster> for LinkedClusters {
    fn from(local: Cluster) -> Self {
        Self {
            local,
            remote: RemoteClusters::default(),
        }
    }
}

/// Clones share the clusters.
#[derive(Clone)]
pub struct RemoteClusters(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changes: watch::Sender<()>,
}

struct State {
    clusters: HashMap<Arc<str>, RemoteCluster>,
    /// The state of all other clusters.
    others: RemoteCluster,
    /// The pairs of clusters that have an address in common, as far as this was reported.
    reported_overlaps: HashSet<(Arc<str>, Arc<str>)>,
}

#[derive(Clone)]
pub enum RemoteCluster {
    /// It is not known yet whether the cluster is linked, or its objects are not listed yet.
    Pending { since: Instant },
    /// There are no credentials for it.
    Unlinked,
    /// Its objects are listed. They stay while it cannot be read.
    Listed(Cluster),
}

/// All clusters are unlinked.
impl Default for RemoteClusters {
    fn default() -> Self {
        Self(Arc::new(Shared {
            state: Mutex::new(State {
                clusters: HashMap::new(),
                others: RemoteCluster::Unlinked,
                reported_overlaps: HashSet::new(),
            }),
            changes: watch::Sender::new(()),
        }))
    }
}

impl RemoteClusters {
    /// Credentials are looked for from now on, so that clusters are pending until there are none for them.
    pub fn expect_links(&self) {
        self.0.state.lock().others = RemoteCluster::Pending { since: Instant::now() };
    }

    pub fn set(&self, name: &str, cluster: RemoteCluster) {
        self.0.state.lock().clusters.insert(name.into(), cluster);
        self.0.changes.send_replace(());
    }

    /// Forgets a cluster, because nothing refers to it any more.
    pub fn remove(&self, name: &str) {
        self.0.state.lock().clusters.remove(name);
        self.0.changes.send_replace(());
    }

    pub fn get(&self, name: &str) -> RemoteCluster {
        let state = self.0.state.lock();
        state.clusters.get(name).unwrap_or(&state.others).clone()
    }

    /// Notifies of every change of a cluster's state.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.0.changes.subscribe()
    }

    /// Returns whether this is the first call for this pair of clusters.
    pub(super) fn is_new_overlap(&self, cluster: &str, other: &str) -> bool {
        let mut state = self.0.state.lock();
        state.reported_overlaps.insert((cluster.into(), other.into()))
    }
}
