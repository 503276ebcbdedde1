//! The other clusters whose endpoints are served, by the cluster name in mirrors and federated Services.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::cluster::Cluster;

/// The cluster of this control plane, and the other clusters whose endpoints it serves.
#[derive(Clone)]
pub struct AllClusters {
    pub local: Cluster,
    pub remote: RemoteClusters,
}

/// The local cluster, without remote clusters.
impl From<Cluster> for AllClusters {
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
    /// The state of each cluster that is not in `clusters`.
    default: RemoteCluster,
    /// The pairs of clusters for which a common address was reported.
    reported_overlaps: HashSet<(Arc<str>, Arc<str>)>,
}

#[derive(Clone)]
pub enum RemoteCluster {
    /// It is not known yet whether the cluster is linked, or its objects are not listed yet.
    Pending { since: Instant },
    /// There are no credentials for the cluster.
    Unlinked,
    /// The objects of the cluster are listed. The last known objects stay while the cluster cannot be read.
    Listed(Cluster),
}

/// All clusters are unlinked.
impl Default for RemoteClusters {
    fn default() -> Self {
        Self(Arc::new(Shared {
            state: Mutex::new(State {
                clusters: HashMap::new(),
                default: RemoteCluster::Unlinked,
                reported_overlaps: HashSet::new(),
            }),
            changes: watch::Sender::new(()),
        }))
    }
}

impl RemoteClusters {
    /// Makes all unknown clusters pending, because the search for credentials of linked clusters begins. A cluster for which none
    /// are found is set to `Unlinked` later.
    pub fn expect_links(&self) {
        self.0.state.lock().default = RemoteCluster::Pending { since: Instant::now() };
    }

    pub fn set(&self, name: &str, cluster: RemoteCluster) {
        let is_unlinked = matches!(cluster, RemoteCluster::Unlinked);
        let previous = self.0.state.lock().clusters.insert(name.into(), cluster);
        // The Secrets of names that are no clusters can be looked for again and again.
        if !(is_unlinked && matches!(previous, Some(RemoteCluster::Unlinked))) {
            self.0.changes.send_replace(());
        }
    }

    /// Removes a cluster that no object refers to any more.
    pub fn remove(&self, name: &str) {
        self.0.state.lock().clusters.remove(name);
        self.0.changes.send_replace(());
    }

    pub fn get(&self, name: &str) -> RemoteCluster {
        let state = self.0.state.lock();
        state.clusters.get(name).unwrap_or(&state.default).clone()
    }

    /// Notifies of every change of a cluster's state.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.0.changes.subscribe()
    }

    /// Records that two clusters have a common address. Returns whether this was not recorded before.
    pub(super) fn record_overlap(&self, cluster: &str, other: &str) -> bool {
        let mut state = self.0.state.lock();
        state.reported_overlaps.insert((cluster.into(), other.into()))
    }
}
