//! Watches other clusters for the endpoints of Services that refer to them.
//!
//! A cluster is watched while a Service of this cluster refers to it, with the credentials in the Secret
//! `cluster-credentials-<name>` in the namespace of the control plane. A cluster that cannot be read keeps its last endpoints.
//! If there are many clusters without a Secret, they are watched in rotation. This never ends the watch of a cluster with a Secret.
//!
//! RBAC in this cluster: `list` and `watch` on the Secrets of the linked clusters, each by its name. In the other
//! cluster: `list` and `watch` on `services`, `endpointslices` (or `endpoints`) and `pods`; and, if this is permitted,
//! also on `replicasets`, `jobs`, `servers` and `externalworkloads`.

mod cluster_watch;
pub mod references;

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tracing::warn;
use tulle_core::drain::Watch;
use tulle_core::metrics::{Family, Gauge, Labels, Registry};

use crate::cluster::remote_clusters::{AllClusters, RemoteCluster};
use crate::remote::cluster_watch::{Gauges, RemoteClusterWatch, SecretPresence};
use crate::remote::references::ReferencedClusters;

/// Watches the clusters to which Services refer, and keeps what this cluster knows about them up to date.
pub struct RemoteWatches {
    client: Client,
    clusters: AllClusters,
    registry: Registry,
    n_listed: Arc<Gauge>,
    up_to_date: Family<Gauge>,
    credentials_expiry: Family<Gauge>,
    unlink_delay: Duration,
    drain: Watch,
}

/// A cluster that is watched, with its task.
struct WatchedCluster {
    task: JoinSet<Infallible>,
    secret_presence: watch::Receiver<SecretPresence>,
    /// `None` while a Service refers to the cluster.
    unreferenced_since: Option<Instant>,
}

/// The watches, and the clusters that wait for one.
#[derive(Default)]
struct WatchTable {
    watched: HashMap<Arc<str>, WatchedCluster>,
    /// For each cluster whose watch was ended for another cluster, the number of the rotation that ended it.
    last_rotations: HashMap<Arc<str>, u64>,
    n_rotations: u64,
    /// The time at which the watches of clusters without a Secret are ended for others. `None` while no cluster waits.
    next_rotation_at: Option<Instant>,
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
        let credentials_expiry = registry.gauge(
            "tulle_remote_cluster_credentials_expiry_seconds",
            "Seconds until the credentials with which the endpoints in another cluster are read expire, updated every minute.",
        );
        Self {
            client,
            clusters,
            registry,
            n_listed,
            up_to_date,
            credentials_expiry,
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
        let mut watches = WatchTable::default();
        loop {
            let wanted = references.current();
            for name in watches.end_unreferenced(&wanted).await {
                self.clusters.remote.remove(&name);
            }
            self.start_watches(&mut watches, &wanted).await;
            let next_expiry = watches.watched.values().filter_map(WatchedCluster::expires_at).min();
            let next_step = next_expiry.into_iter().chain(watches.next_rotation_at).min();
            tokio::select! {
                () = references.changed() => {}
                () = sleep_until(next_step.unwrap_or_else(Instant::now)), if next_step.is_some() => {}
                () = self.drain.signaled() => return,
            }
        }
    }

    /// Watches the wanted clusters. If too many of them have no Secret, these are watched in rotation.
    async fn start_watches(&self, watches: &mut WatchTable, wanted: &[Arc<str>]) {
        let waiting = watches.waiting(wanted);
        let mut n_free = MAX_WATCHES_WITHOUT_SECRET.saturating_sub(watches.n_without_secret());
        if waiting.len() > n_free {
            match watches.next_rotation_at {
                None => {
                    let n = waiting.len() + watches.n_without_secret();
                    warn!(
                        "Services refer to {n} clusters without a known Secret, so {MAX_WATCHES_WITHOUT_SECRET} at a time are watched; \
                         the Secrets of the others are noticed late"
                    );
                }
                Some(at) if at <= Instant::now() => {
                    let n_waiting = waiting.len() - n_free;
                    n_free += watches.rotate_watches_without_secret(wanted, n_waiting).await;
                }
                Some(_) => {}
            }
            let is_later = |at: &Instant| *at > Instant::now();
            let next_rotation_at = watches.next_rotation_at.filter(is_later);
            watches.next_rotation_at = Some(next_rotation_at.unwrap_or_else(|| Instant::now() + ROTATION_INTERVAL));
        } else {
            watches.next_rotation_at = None;
        }
        for name in waiting.into_iter().take(n_free) {
            // A cluster that was watched before keeps its state until its Secret is found.
            if !watches.last_rotations.contains_key(&name) {
                self.clusters
                    .remote
                    .set(&name, RemoteCluster::Pending { since: Instant::now() });
            }
            let watched = self.start_watch(&name);
            watches.watched.insert(name, watched);
        }
    }

    fn start_watch(&self, name: &Arc<str>) -> WatchedCluster {
        let (secret, secret_presence) = watch::channel(SecretPresence::Unknown);
        let watch = RemoteClusterWatch {
            name: name.clone(),
            secret,
            clusters: self.clusters.clone(),
            client: self.client.clone(),
            registry: self.registry.clone(),
            gauges: Gauges {
                n_listed: self.n_listed.clone(),
                is_up_to_date: self.up_to_date.get(&Labels::new().with("cluster", name)),
                credentials_expiry: self.credentials_expiry.clone(),
            },
            unlink_delay: self.unlink_delay,
            drain: self.drain.clone(),
        };
        let mut task = JoinSet::new();
        task.spawn(watch.run());
        WatchedCluster {
            task,
            secret_presence,
            unreferenced_since: None,
        }
    }
}

impl WatchTable {
    /// Ends the watches of clusters to which no Service has referred for some time. Returns the clusters whose state is not needed any
    /// more.
    async fn end_unreferenced(&mut self, wanted: &[Arc<str>]) -> Vec<Arc<str>> {
        let wanted: HashSet<_> = wanted.iter().collect();
        for (name, cluster) in &mut self.watched {
            if wanted.contains(name) {
                cluster.unreferenced_since = None;
            } else {
                cluster.unreferenced_since.get_or_insert_with(Instant::now);
            }
        }
        let is_due = |cluster: &WatchedCluster| cluster.expires_at().is_some_and(|at| at <= Instant::now());
        let expired: Vec<_> = self.watched.extract_if(|_, cluster| is_due(cluster)).collect();
        let mut ended = Vec::new();
        for (name, mut cluster) in expired {
            cluster.task.shutdown().await;
            ended.push(name);
        }
        let forgotten = self.last_rotations.extract_if(|name, _| !wanted.contains(name));
        ended.extend(
            forgotten
                .map(|(name, _)| name)
                .filter(|name| !self.watched.contains_key(name)),
        );
        ended
    }

    /// The wanted clusters that are not watched: first those that were never watched, then the others in the order in which their
    /// watches were ended.
    fn waiting(&self, wanted: &[Arc<str>]) -> Vec<Arc<str>> {
        let waiting = wanted.iter().filter(|name| !self.watched.contains_key(*name));
        let mut waiting: Vec<_> = waiting.cloned().collect();
        waiting.sort_by_key(|name| self.last_rotations.get(name).copied());
        waiting
    }

    /// The number of watched clusters for which no Secret is known.
    fn n_without_secret(&self) -> usize {
        let without = |cluster: &&WatchedCluster| *cluster.secret_presence.borrow() != SecretPresence::Present;
        self.watched.values().filter(without).count()
    }

    /// Ends the watches of at most `max` clusters that have no Secret, the last ones in the order of `wanted`. Returns their number.
    async fn rotate_watches_without_secret(&mut self, wanted: &[Arc<str>], max: usize) -> usize {
        let ranks: HashMap<_, _> = wanted.iter().enumerate().map(|(rank, name)| (name, rank)).collect();
        let can_end = |cluster: &WatchedCluster| *cluster.secret_presence.borrow() == SecretPresence::Absent;
        let ending = self.watched.iter().filter(|(_, cluster)| can_end(cluster));
        let mut ending: Vec<_> = ending.map(|(name, _)| name.clone()).collect();
        ending.sort_by_key(|name| Reverse(ranks.get(name).copied().unwrap_or(usize::MAX)));
        ending.truncate(max.min(MAX_WATCHES_ROTATED));
        self.n_rotations += 1;
        let n_ended = ending.len();
        for name in ending {
            if let Some(mut cluster) = self.watched.remove(&name) {
                cluster.task.shutdown().await;
            }
            self.last_rotations.insert(name, self.n_rotations);
        }
        n_ended
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
/// Maximum number of watched clusters for which no Secret is known. Everyone who may edit a Service can refer to a cluster, and each
/// watch takes requests to the local API server. Clusters with a Secret are not limited, because an administrator has linked them.
const MAX_WATCHES_WITHOUT_SECRET: usize = 200;
/// Interval at which some watches of clusters without a Secret are ended for others, if not all of these clusters can be watched.
/// It is longer than the time after which a Secret counts as unreadable.
const ROTATION_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of watches that one rotation ends for others. The clusters of namespaces that refer to few clusters stay watched,
/// so that their Secrets are noticed at once.
const MAX_WATCHES_ROTATED: usize = 20;

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use parking_lot::Mutex;
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
        named_service("web-federated", members)
    }

    fn named_service(name: &str, members: &str) -> Event {
        let annotations = json!({"multicluster.linkerd.io/remote-discovery": members});
        let metadata = json!({"name": name, "namespace": "shop", "annotations": annotations});
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

    /// The Secrets of which lists were requested, and the number of open watches of each.
    type SecretRequests = Arc<Mutex<(Vec<String>, HashMap<String, usize>)>>;

    /// Counts an open watch of a Secret until it is dropped.
    struct OpenWatch {
        secret: String,
        requests: SecretRequests,
    }

    impl OpenWatch {
        fn new(secret: String, requests: SecretRequests) -> Self {
            *requests.lock().1.entry(secret.clone()).or_default() += 1;
            Self { secret, requests }
        }
    }

    impl Drop for OpenWatch {
        fn drop(&mut self) {
            if let Some(n) = self.requests.lock().1.get_mut(&self.secret) {
                *n -= 1;
            }
        }
    }

    /// A client of an API server that has only the Secret of the cluster `east`.
    fn client_with_one_secret(requests: SecretRequests) -> Client {
        let service = tower::service_fn(move |req: Request<Body>| {
            let requests = requests.clone();
            async move {
                let query = req.uri().query().unwrap_or_default();
                let (_, rest) = query.split_once("cluster-credentials-").expect("a field selector");
                let name = rest.split('&').next().unwrap_or_default().to_owned();
                if query.contains("watch=true") {
                    let _open = OpenWatch::new(name, requests);
                    return std::future::pending::<Result<Response<Body>, Infallible>>().await;
                }
                let secret = json!({"metadata": {"name": "cluster-credentials-east", "namespace": "linkerd"}});
                let items = if name == "east" { vec![secret] } else { Vec::new() };
                requests.lock().0.push(name);
                let list = json!({
                    "apiVersion": "v1", "kind": "SecretList", "metadata": {"resourceVersion": "1"}, "items": items,
                });
                Ok(Response::new(Body::from(list.to_string().into_bytes())))
            }
        });
        Client::new(service, "default")
    }

    /// Names without a Secret, which everyone who may edit a Service can write, do not take the place of a cluster with a Secret.
    #[tokio::test(start_paused = true)]
    async fn clusters_without_a_secret_are_watched_in_rotation_and_one_with_a_secret_stays_watched() {
        let registry = Registry::new();
        let (_signal, drain) = drain::channel();
        let clusters = AllClusters::from(Cluster::new(Config::default(), &registry));
        let (sink, references) = ReferencedClusters::from_events(EventSink::new(|_| {}));
        let requests = SecretRequests::default();
        let client = client_with_one_secret(requests.clone());
        let watches = RemoteWatches::new(client, clusters.clone(), registry, drain);
        let _running = tokio::spawn(watches.run(references));
        let names: Vec<String> = (0..300).map(|n| format!("a{n}")).collect();
        let mut events = vec![service("web@east")];
        for (n, members) in names.chunks(100).enumerate() {
            let members: Vec<_> = members.iter().map(|name| format!("x@{name}")).collect();
            events.push(named_service(&format!("x{n}"), &members.join(",")));
        }
        sink.apply(events);
        let n_open = |name: &str| requests.lock().1.get(name).copied().unwrap_or_default();
        let n_lists = |name: &str| requests.lock().0.iter().filter(|listed| *listed == name).count();

        // The names come before `east`, so they are watched first.
        sleep(Duration::from_secs(5)).await;
        assert_eq!(
            (n_lists("east"), requests.lock().0.len()),
            (0, MAX_WATCHES_WITHOUT_SECRET)
        );
        assert!(matches!(clusters.remote.get("east"), RemoteCluster::Pending { .. }));

        sleep(Duration::from_secs(200)).await;
        for name in &names {
            assert!(n_lists(name) > 0, "{name} was not watched");
            assert!(matches!(clusters.remote.get(name), RemoteCluster::Unlinked), "{name}");
        }
        let n_open_in_total: usize = requests.lock().1.values().sum();
        assert_eq!(n_open_in_total, MAX_WATCHES_WITHOUT_SECRET + 1);
        assert_eq!((n_lists("east"), n_open("east")), (1, 1), "its watch was never ended");
        assert!(matches!(clusters.remote.get("east"), RemoteCluster::Pending { .. }));

        // The names are gone, and with them what is known of them.
        sink.apply((0..3).map(|n| named_service(&format!("x{n}"), "")).collect());
        sleep(UNREFERENCED_GRACE_PERIOD + Duration::from_secs(1)).await;
        let n_open_in_total: usize = requests.lock().1.values().sum();
        assert_eq!((n_open_in_total, n_open("east")), (1, 1));
        assert!(
            matches!(clusters.remote.get("a0"), RemoteCluster::Pending { .. }),
            "the default"
        );
    }
}
