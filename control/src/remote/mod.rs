//! Watches other clusters for the endpoints of Services that refer to them.
//!
//! A cluster is watched while a Service of this cluster refers to it, with the credentials in the Secret
//! `cluster-credentials-<name>` in the namespace of the control plane. A cluster that cannot be read keeps its last endpoints.
//!
//! RBAC in this cluster: `list` and `watch` on the Secrets of the linked clusters, each by its name. In the other
//! cluster: `list` and `watch` on `services`, `endpointslices` (or `endpoints`) and `pods`; and, if this is permitted,
//! also on `replicasets`, `jobs`, `servers` and `externalworkloads`.

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

use crate::cluster::remote_clusters::{AllClusters, RemoteCluster};
use crate::remote::cluster_watch::{Gauges, RemoteClusterWatch};
use crate::remote::references::ReferencedClusters;

/// Watches the clusters to which Services refer, and keeps what this cluster knows about them up to date.
pub struct RemoteWatches {
    client: Client,
    clusters: AllClusters,
    registry: Registry,
    n_listed: Arc<Gauge>,
    up_to_date: Family<Gauge>,
    unlink_delay: Duration,
    drain: Watch,
}

/// A cluster that is watched, with its task.
struct WatchedCluster {
    task: JoinSet<Infallible>,
    /// `None` while a Service refers to the cluster.
    unreferenced_since: Option<Instant>,
}

impl RemoteWatches {
    /// Creates the watches. `client` is that of the local API server.
    pub fn new(client: Client, clusters: AllClusters, registry: Registry, drain: Watch) -> Self {
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

    /// Watches the clusters that Services refer to, until the drain.
    pub async fn run(self, mut references: ReferencedClusters) {
        let mut watched = HashMap::<Arc<str>, WatchedCluster>::new();
        let mut rejected = HashSet::<Arc<str>>::new();
        loop {
            let wanted = references.current();
            for (name, cluster) in &mut watched {
                if wanted.contains(name) {
                    cluster.unreferenced_since = None;
                } else {
                    cluster.unreferenced_since.get_or_insert_with(Instant::now);
                }
            }
            let is_due = |cluster: &WatchedCluster| cluster.expires_at().is_some_and(|at| at <= Instant::now());
            let expired: Vec<_> = watched.extract_if(|_, cluster| is_due(cluster)).collect();
            for (name, mut cluster) in expired {
                cluster.task.shutdown().await;
                self.clusters.remote.remove(&name);
            }
            for name in rejected.extract_if(|name| !wanted.contains(name)) {
                self.clusters.remote.remove(&name);
            }
            for name in &wanted {
                if watched.contains_key(name) {
                    continue;
                }
                if watched.len() < MAX_WATCHED_CLUSTERS {
                    rejected.remove(name);
                    watched.insert(name.clone(), self.start_watch(name));
                } else if rejected.insert(name.clone()) {
                    warn!(cluster = %name, "Services refer to more than {MAX_WATCHED_CLUSTERS} clusters; the endpoints of this cluster are not served");
                    self.clusters.remote.set(name, RemoteCluster::Unlinked);
                }
            }
            let next_expiry = watched.values().filter_map(WatchedCluster::expires_at).min();
            tokio::select! {
                () = references.changed() => {}
                () = sleep_until(next_expiry.unwrap_or_else(Instant::now)), if next_expiry.is_some() => {}
                () = self.drain.signaled() => return,
            }
        }
    }

    fn start_watch(&self, name: &Arc<str>) -> WatchedCluster {
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
        WatchedCluster {
            task,
            unreferenced_since: None,
        }
    }
}

impl WatchedCluster {
    fn expires_at(&self) -> Option<Instant> {
        self.unreferenced_since.map(|since| since + UNREFERENCED_GRACE_PERIOD)
    }
}

/// Time that a cluster is still watched after the last reference to it was removed.
const UNREFERENCED_GRACE_PERIOD: Duration = Duration::from_secs(600);
/// Time after the deletion of the Secret of a cluster until its endpoints are removed. The mirrors of a Link stay as
/// long.
const UNLINK_DELAY: Duration = Duration::from_secs(60);
/// Maximum number of clusters that are watched. More clusters would need too many requests to the local API server, and
/// can only be a mistake or an attack.
const MAX_WATCHED_CLUSTERS: usize = 200;

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;
    use tokio::time::sleep;
    use tulle_core::drain;

    use super::*;
    use crate::cluster::{Cluster, Config};
    use crate::resources::event::{Event, EventSink};
    use crate::resources::{Kind, decode};

    /// Returns a client whose requests get no response. Each open request has a clone of `open`.
    fn silent_client(open: Arc<()>) -> Client {
        let service = tower::service_fn(move |_: Request<Body>| {
            let open = open.clone();
            async move {
                let _open = open;
                std::future::pending::<Result<Response<Body>, Infallible>>().await
            }
        });
        Client::new(service, "default")
    }

    /// A federated Service with these members.
    fn service(members: &str) -> Event {
        let annotations = json!({"multicluster.linkerd.io/remote-discovery": members});
        let metadata = json!({"name": "web-federated", "namespace": "shop", "annotations": annotations});
        Event::Applied(decode(Kind::Service, &json!({"metadata": metadata, "spec": {}})).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn a_cluster_is_watched_until_ten_minutes_after_its_last_reference() {
        let registry = Registry::new();
        let (_signal, drain) = drain::channel();
        let clusters = AllClusters::from(Cluster::new(Config::default(), &registry));
        let (sink, references) = ReferencedClusters::from_events(EventSink::new(|_| {}));
        let open = Arc::new(());
        let client = silent_client(open.clone());
        let n_clones = Arc::strong_count(&open);
        let watches = RemoteWatches::new(client, clusters, registry, drain);
        let _running = tokio::spawn(watches.run(references));
        // The clock is paused, so these are not waits: all tasks run until nothing is left to do before the time passes.
        let n_requests_after = async |seconds: u64| {
            sleep(Duration::from_secs(seconds)).await;
            Arc::strong_count(&open) - n_clones
        };
        assert_eq!(n_requests_after(1).await, 0, "no Service refers to a cluster");
        sink.apply(vec![service("web@east")]);
        assert_eq!(n_requests_after(1).await, 1);
        sink.apply(vec![service("")]);
        assert_eq!(n_requests_after(598).await, 1);
        // A new reference ends the period.
        sink.apply(vec![service("web@east")]);
        assert_eq!(n_requests_after(598).await, 1);
        sink.apply(vec![service("")]);
        assert_eq!(n_requests_after(598).await, 1);
        assert_eq!(n_requests_after(3).await, 0);
        sink.apply(vec![service("web@east")]);
        assert_eq!(n_requests_after(1).await, 1, "it is watched again");
    }
}
