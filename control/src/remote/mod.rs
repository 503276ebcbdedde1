//! Watches other clusters for the endpoints of Services that refer to them.
//!
//! A cluster is watched while a Service of this cluster refers to it, with the credentials in the Secret
//! `cluster-credentials-<name>` in the namespace of the control plane. A cluster that cannot be read keeps its last endpoints.
//!
//! RBAC here: `list` and `watch` on the Secrets of the linked clusters, each by its name. In the other cluster: `list` and `watch`
//! on `services`, `endpointslices` (or `endpoints`) and `pods`; if they are permitted also on `replicasets`, `jobs`, `servers` and
//! `externalworkloads`.

mod follower;
pub mod references;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tulle_core::drain::Watch;
use tulle_core::metrics::{Gauge, Labels, Registry};

use crate::cluster::remote_clusters::LinkedClusters;
use crate::remote::follower::Follower;
use crate::remote::references::References;

/// Keeps the remote clusters of a cluster up to date.
pub struct RemoteWatches {
    client: Client,
    clusters: LinkedClusters,
    registry: Registry,
    n_listed: Arc<Gauge>,
    drain: Watch,
}

/// The task of one cluster.
struct Followed {
    _task: JoinSet<Infallible>,
    /// `None` while a Service refers to the cluster.
    unreferenced_since: Option<Instant>,
}

impl RemoteWatches {
    /// `client` is that of the local API server.
    pub fn new(client: Client, clusters: LinkedClusters, registry: Registry, drain: Watch) -> Self {
        clusters.remote.expect_links();
        let help = "Other clusters whose endpoints are served, or none: 0.";
        let n_listed = registry.gauge("cluster_store_size", help).get(&Labels::new());
        Self {
            client,
            clusters,
            registry,
            n_listed,
            drain,
        }
    }

    /// Follows the clusters that Services refer to, until the drain.
    pub async fn run(self, mut references: References) {
        let mut followed = HashMap::<Arc<str>, Followed>::new();
        loop {
            let wanted = references.current();
            for name in &wanted {
                let followed = followed.entry(name.clone()).or_insert_with(|| self.follow(name));
                followed.unreferenced_since = None;
            }
            let unreferenced = followed.iter_mut().filter(|(name, _)| !wanted.contains(*name));
            for (_, followed) in unreferenced {
                followed.unreferenced_since.get_or_insert_with(Instant::now);
            }
            let is_due = |followed: &Followed| followed.expires_at().is_some_and(|at| at <= Instant::now());
            for (name, _) in followed.extract_if(|_, followed| is_due(followed)) {
                self.clusters.remote.remove(&name);
            }
            let next_expiry = followed.values().filter_map(Followed::expires_at).min();
            tokio::select! {
                () = references.changed() => {}
                () = sleep_until(next_expiry.unwrap_or_else(Instant::now)), if next_expiry.is_some() => {}
                () = self.drain.signaled() => return,
            }
        }
    }

    fn follow(&self, name: &Arc<str>) -> Followed {
        let follower = Follower {
            name: name.clone(),
            clusters: self.clusters.clone(),
            client: self.client.clone(),
            registry: self.registry.clone(),
            n_listed: self.n_listed.clone(),
            drain: self.drain.clone(),
        };
        let mut task = JoinSet::new();
        task.spawn(follower.run());
        Followed {
            _task: task,
            unreferenced_since: None,
        }
    }
}

impl Followed {
    fn expires_at(&self) -> Option<Instant> {
        self.unreferenced_since.map(|since| since + GRACE_PERIOD)
    }
}

/// How long a cluster is watched after the last reference to it is gone.
const GRACE_PERIOD: Duration = Duration::from_secs(600);
