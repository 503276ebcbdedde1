//! Watches other clusters for the endpoints of Services that refer to them.
//!
//! A cluster is watched while a Service of this cluster refers to it, with the credentials in the Secret
//! `cluster-credentials-<name>` in the namespace of the control plane. A cluster that cannot be read keeps its last endpoints.
//!
//! RBAC here: `list` and `watch` on the Secrets of the linked clusters, each by its name. In the other cluster: `list` and `watch`
//! on `services`, `endpointslices` (or `endpoints`) and `pods`; if they are permitted also on `replicasets`, `jobs`, `servers` and
//! `externalworkloads`.

mod cluster_watch;
pub mod references;

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tracing::warn;
use tulle_core::drain::Watch;
use tulle_core::metrics::{Family, Gauge, Labels, Registry};

use crate::cluster::remote_clusters::{LinkedClusters, RemoteCluster};
use crate::remote::cluster_watch::{Gauges, RemoteClusterWatch};
use crate::remote::references::References;

/// Keeps the remote clusters of a cluster up to date.
pub struct RemoteWatches {
    client: Client,
    clusters: LinkedClusters,
    registry: Registry,
    n_listed: Arc<Gauge>,
    up_to_date: Family<Gauge>,
    unlink_delay: Duration,
    drain: Watch,
}

/// The task of one cluster.
struct Followed {
    task: JoinSet<Infallible>,
    /// `None` while a Service refers to the cluster.
    unreferenced_since: Option<Instant>,
}

impl RemoteWatches {
    /// `client` is that of the local API server.
    pub fn new(client: Client, clusters: LinkedClusters, registry: Registry, drain: Watch) -> Self {
        clusters.remote.expect_links();
        let help = "Other clusters whose endpoints are served.";
        let n_listed = registry.gauge("cluster_store_size", help).get(&Labels::new());
        let up_to_date = registry.gauge(
            "tulle_remote_cluster_up_to_date",
            "1 while the endpoints in another cluster to which Services refer are known and up to date, 0 while they are not known, or the last known ones are served.",
        );
        Self {
            client,
            clusters,
            registry,
            n_listed,
            up_to_date,
            unlink_delay: UNLINK_DELAY,
            drain,
        }
    }

    /// Sets how long the endpoints of a cluster stay after its Secret was deleted. Default: a minute.
    #[must_use]
    pub fn with_unlink_delay(self, unlink_delay: Duration) -> Self {
        Self { unlink_delay, ..self }
    }

    /// Follows the clusters that Services refer to, until the drain.
    pub async fn run(self, mut references: References) {
        let mut followed = HashMap::<Arc<str>, Followed>::new();
        let mut rejected = HashSet::<Arc<str>>::new();
        loop {
            let wanted = references.current();
            for (name, followed) in &mut followed {
                if wanted.contains(name) {
                    followed.unreferenced_since = None;
                } else {
                    followed.unreferenced_since.get_or_insert_with(Instant::now);
                }
            }
            let is_due = |followed: &Followed| followed.expires_at().is_some_and(|at| at <= Instant::now());
            let expired: Vec<_> = followed.extract_if(|_, followed| is_due(followed)).collect();
            for (name, mut followed) in expired {
                followed.task.shutdown().await;
                self.clusters.remote.remove(&name);
            }
            for name in rejected.extract_if(|name| !wanted.contains(name)) {
                self.clusters.remote.remove(&name);
            }
            for name in &wanted {
                if followed.contains_key(name) {
                    continue;
                }
                if followed.len() < MAX_CLUSTERS {
                    rejected.remove(name);
                    followed.insert(name.clone(), self.follow(name));
                } else if rejected.insert(name.clone()) {
                    warn!(cluster = %name, "more than {MAX_CLUSTERS} clusters are referred to; the endpoints of this one are not served");
                    self.clusters.remote.set(name, RemoteCluster::Unlinked);
                }
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
        let watch = RemoteClusterWatch {
            name: name.clone(),
            clusters: self.clusters.clone(),
            client: self.client.clone(),
            registry: self.registry.clone(),
            gauges: Gauges {
                n_listed: self.n_listed.clone(),
                is_up_to_date: self.up_to_date.get(&Labels::new().with("cluster", name)),
            },
            unlink_delay: self.unlink_delay,
            drain: self.drain.clone(),
        };
        let mut task = JoinSet::new();
        task.spawn(watch.run());
        Followed {
            task,
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
/// How long the endpoints of a cluster stay after its Secret was deleted, as the mirrors of a Link.
const UNLINK_DELAY: Duration = Duration::from_secs(60);
/// More would need too many requests to the API server, and can only be a mistake or an attack.
const MAX_CLUSTERS: usize = 200;
