//! The endpoints of Services that have members in other clusters, merged once for all subscribers.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::select_all;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use crate::cluster::publish::published_value::PublishedValue;
use crate::cluster::remote_clusters::{AllClusters, RemoteCluster, RemoteClusters};
use crate::cluster::views::endpoints::Key;
use crate::cluster::{Cluster, Subscription};
use crate::model::endpoints::Endpoints;
use crate::model::remote_discovery::{MemberPreference, RemoteDiscovery, RemoteService};
use crate::resources::meta::NamespacedName;

/// The endpoints of all members of a Service. No two members have the same address.
#[derive(Debug, Default, PartialEq)]
pub struct UnionEndpoints {
    /// The member in this cluster comes first. The others follow in the order of [`RemoteDiscovery::remote_services`].
    pub members: Vec<MemberEndpoints>,
    pub preference: MemberPreference,
    /// Whether no endpoints are known yet, because the objects of the cluster of a member are not listed.
    pub is_pending: bool,
}

impl UnionEndpoints {
    fn is_empty(&self) -> bool {
        self.members.iter().all(|member| member.endpoints.endpoints.is_empty())
    }
}

#[derive(Debug, PartialEq)]
pub struct MemberEndpoints {
    pub service: NamespacedName,
    /// `None` for this cluster.
    pub cluster: Option<Arc<str>>,
    pub endpoints: Arc<PublishedValue<Endpoints>>,
    /// Whether the client uses these endpoints only while no other endpoint can take the request.
    pub is_fallback: bool,
}

/// Whether a client can be told that it should use an endpoint only while no other can take the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FallbackSupport {
    /// The client has endpoints of all members, and decides for each request.
    Supported,
    /// The client has only those endpoints that it may use at any time.
    Unsupported,
}

/// A subscription to the endpoints of all members.
pub struct UnionSubscription {
    receiver: UnionReceiver,
    /// Whether a value was returned.
    has_first: bool,
    _union: Arc<Union>,
}

type UnionReceiver = watch::Receiver<Option<Arc<PublishedValue<UnionEndpoints>>>>;

impl UnionSubscription {
    /// Waits for a value that has not been seen and returns the latest. The first value waits for the objects of other clusters if
    /// no endpoints are known without them: a client replaces its endpoints by those of the first message.
    pub async fn changed(&mut self) -> Arc<PublishedValue<UnionEndpoints>> {
        loop {
            // An error would mean that the sender was dropped, but the task of the union keeps it while there are subscriptions.
            if self.receiver.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            let value = self.receiver.borrow_and_update().clone();
            if let Some(value) = value.filter(|value| self.has_first || !value.is_pending) {
                self.has_first = true;
                return value;
            }
        }
    }
}

/// All unions with subscriptions.
pub struct Unions {
    clusters: AllClusters,
    by_key: Mutex<HashMap<(Key, FallbackSupport), Weak<Union>>>,
}

struct Union {
    receiver: UnionReceiver,
    /// The task that sends the merged endpoints. It is aborted when the last subscription is dropped.
    _task: JoinSet<Infallible>,
}

impl Unions {
    pub fn new(clusters: AllClusters) -> Self {
        Self {
            clusters,
            by_key: Mutex::default(),
        }
    }

    /// Subscribes to the endpoints of a Service port, including those of its members in other clusters.
    pub fn subscribe(&self, key: &Key, fallback: FallbackSupport) -> UnionSubscription {
        let mut unions = self.by_key.lock();
        let union_key = (key.clone(), fallback);
        let known = unions.get(&union_key).and_then(Weak::upgrade);
        let union = known.unwrap_or_else(|| {
            unions.retain(|_, union| union.strong_count() > 0);
            let (sender, receiver) = watch::channel(None);
            let mut task = JoinSet::new();
            task.spawn(Merger::new(&self.clusters, key.clone(), fallback).run(sender));
            let union = Arc::new(Union { receiver, _task: task });
            unions.insert(union_key, Arc::downgrade(&union));
            union
        });
        let mut receiver = union.receiver.clone();
        receiver.mark_changed();
        UnionSubscription {
            receiver,
            has_first: false,
            _union: union,
        }
    }
}

/// Merges the endpoints of the members of one Service port.
struct Merger {
    key: Key,
    fallback: FallbackSupport,
    local: Subscription<Endpoints>,
    clusters: AllClusters,
    members: Vec<RemoteMember>,
}

struct RemoteMember {
    service: RemoteService,
    /// `None` until the objects of the member's cluster are listed, and after the cluster was unlinked.
    subscription: Option<(Cluster, Subscription<Endpoints>)>,
    pending_since: Option<Instant>,
}

impl Merger {
    fn new(clusters: &AllClusters, key: Key, fallback: FallbackSupport) -> Self {
        Self {
            local: clusters.local.endpoints(key.clone()),
            key,
            fallback,
            clusters: clusters.clone(),
            members: Vec::new(),
        }
    }

    async fn run(mut self, sender: watch::Sender<Option<Arc<PublishedValue<UnionEndpoints>>>>) -> Infallible {
        let mut cluster_changes = self.clusters.remote.changes();
        loop {
            cluster_changes.borrow_and_update();
            let own = self.local.current();
            self.update_members(own.remote.as_deref());
            let merged = self.merge(&own);
            // No client waits for fallback endpoints while local endpoints serve all clients.
            let must_have_remote_members = requires_remote_members(merged.preference, &own);
            let deadline = must_have_remote_members.then(|| self.wait_deadline()).flatten();
            let is_first = sender.borrow().is_none();
            // After a reconnect, a client replaces its endpoints by those of the first message, so the first message must not omit
            // the endpoints of pending members too early.
            let must_wait = is_first && (deadline.is_some() || merged.is_pending);
            if !must_wait {
                sender.send_if_modified(|sent| {
                    let is_changed = sent.as_deref().is_none_or(|sent| **sent != merged);
                    if is_changed {
                        *sent = Some(Arc::new(PublishedValue::new(merged)));
                    }
                    is_changed
                });
            }
            // All branches are cancel-safe: a watch receiver keeps an unseen change.
            tokio::select! {
                _ = self.local.changed() => {}
                _ = cluster_changes.changed() => {}
                () = any_member_changed(&mut self.members) => {}
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {}
            }
        }
    }

    /// Whether clients get the endpoints of the members in other clusters.
    fn includes_remote_members(&self, preference: MemberPreference, own: &Endpoints) -> bool {
        self.fallback == FallbackSupport::Supported || requires_remote_members(preference, own)
    }

    /// The time until which the first message waits for pending members. `None` if no member is pending, or if this time is over.
    fn wait_deadline(&self) -> Option<Instant> {
        let pending = self.members.iter().filter_map(|member| member.pending_since);
        // Requests are refused until the local cluster is synced, so the wait cannot begin earlier.
        let served_since = self.clusters.local.synced_at().unwrap_or_else(Instant::now);
        let latest = pending
            .map(|since| since.max(served_since) + MAX_WAIT_FOR_MEMBERS)
            .max();
        latest.filter(|until| *until > Instant::now())
    }

    fn has_pending_member(&self) -> bool {
        self.members.iter().any(|member| member.pending_since.is_some())
    }

    /// Subscribes to the member Services in other clusters. Keeps the subscriptions of unchanged members.
    fn update_members(&mut self, discovery: Option<&RemoteDiscovery>) {
        let before = std::mem::take(&mut self.members);
        let mut before: HashMap<_, _> = before
            .into_iter()
            .map(|member| (member.service.clone(), member))
            .collect();
        let mut seen = HashSet::new();
        for service in discovery.map_or(&[][..], RemoteDiscovery::remote_services) {
            if !seen.insert(service) {
                continue;
            }
            let mut member = before.remove(service).unwrap_or_else(|| RemoteMember {
                service: service.clone(),
                subscription: None,
                pending_since: None,
            });
            match self.clusters.remote.get(&service.cluster) {
                RemoteCluster::Pending { since } => {
                    member.pending_since = member.subscription.is_none().then_some(since);
                }
                RemoteCluster::Unlinked => {
                    member.subscription = None;
                    member.pending_since = None;
                }
                RemoteCluster::Listed(cluster) => {
                    let is_current = |(subscribed, _): &(Cluster, _)| subscribed.is_same(&cluster);
                    if !member.subscription.as_ref().is_some_and(is_current) {
                        let key = Key {
                            service: NamespacedName::new(self.key.service.namespace.clone(), service.name.clone()),
                            ..self.key.clone()
                        };
                        let subscription = cluster.endpoints(key);
                        member.subscription = Some((cluster, subscription));
                    }
                    member.pending_since = None;
                }
            }
            self.members.push(member);
        }
    }

    fn merge(&mut self, own: &Arc<PublishedValue<Endpoints>>) -> UnionEndpoints {
        let namespace = self.key.service.namespace.clone();
        let (local, preference) = match own.remote.as_deref() {
            None => (Some(self.key.service.clone()), MemberPreference::All),
            Some(RemoteDiscovery::Federated(members)) => {
                let local = members.local.clone();
                (
                    local.map(|name| NamespacedName::new(namespace.clone(), name)),
                    members.preference,
                )
            }
            Some(RemoteDiscovery::Mirror(_) | RemoteDiscovery::Unnamed) => (None, MemberPreference::All),
        };
        let is_federated = matches!(own.remote.as_deref(), Some(RemoteDiscovery::Federated(_)));
        let is_port_of_federated_service = is_federated && own.is_port_listed;
        let mut union = DeduplicatedMembers::new(&self.clusters.remote);
        if let Some(service) = local {
            union.add(service, None, own.clone());
        }
        // While the local endpoints are terminating, they are not better than those of the other members.
        union.are_remote_members_fallback = self.fallback == FallbackSupport::Supported
            && preference == MemberPreference::Local
            && !own.are_terminating;
        if self.includes_remote_members(preference, own) {
            for member in &mut self.members {
                let Some((_, subscription)) = &mut member.subscription else {
                    continue;
                };
                let RemoteService { cluster, name } = &member.service;
                let service = NamespacedName::new(namespace.clone(), name.clone());
                let mut endpoints = subscription.current();
                if is_port_of_federated_service && !endpoints.is_port_listed {
                    endpoints = Arc::new(PublishedValue::new(endpoints.without_port()));
                }
                union.add(service, Some(cluster.clone()), endpoints);
            }
        }
        let mut merged = UnionEndpoints {
            members: union.members,
            preference,
            is_pending: false,
        };
        merged.is_pending = merged.is_empty() && self.has_pending_member();
        merged
    }
}

/// Members without the addresses that an earlier member also has. Members have common addresses if the networks of their clusters
/// overlap.
struct DeduplicatedMembers<'a> {
    members: Vec<MemberEndpoints>,
    addrs: HashSet<SocketAddr>,
    /// Whether the members in other clusters are fallback endpoints.
    are_remote_members_fallback: bool,
    remote_clusters: &'a RemoteClusters,
}

impl<'a> DeduplicatedMembers<'a> {
    fn new(remote_clusters: &'a RemoteClusters) -> Self {
        Self {
            members: Vec::new(),
            addrs: HashSet::new(),
            are_remote_members_fallback: false,
            remote_clusters,
        }
    }

    fn add(
        &mut self,
        service: NamespacedName,
        cluster: Option<Arc<str>>,
        mut endpoints: Arc<PublishedValue<Endpoints>>,
    ) {
        let duplicate = endpoints
            .endpoints
            .iter()
            .find(|endpoint| self.addrs.contains(&endpoint.addr));
        if let Some(duplicate) = duplicate.map(|endpoint| endpoint.addr) {
            self.report_overlap(cluster.as_deref(), duplicate);
            let new = endpoints.endpoints.iter();
            let new = new.filter(|endpoint| !self.addrs.contains(&endpoint.addr)).cloned();
            endpoints = Arc::new(PublishedValue::new(Endpoints {
                endpoints: new.collect(),
                ..(**endpoints).clone()
            }));
        }
        self.addrs
            .extend(endpoints.endpoints.iter().map(|endpoint| endpoint.addr));
        self.members.push(MemberEndpoints {
            service,
            is_fallback: self.are_remote_members_fallback && cluster.is_some(),
            cluster,
            endpoints,
        });
    }

    /// Logs a warning, once for each pair of clusters with a common address.
    fn report_overlap(&self, cluster: Option<&str>, addr: SocketAddr) {
        let has_addr = |member: &&MemberEndpoints| member.endpoints.get(addr).is_some();
        let Some(other) = self.members.iter().find(has_addr) else {
            return;
        };
        let (cluster, other_cluster) = (cluster.unwrap_or("local"), other.cluster.as_deref().unwrap_or("local"));
        if self.remote_clusters.record_overlap(cluster, other_cluster) {
            warn!(
                service = %other.service, %addr, cluster, other_cluster,
                "two clusters have pods with the same address, so only the pod of `other_cluster` is used; give the clusters \
                 networks that do not overlap, or link them by their gateways"
            );
        }
    }
}

/// Whether clients need the endpoints of the members in other clusters, because the local member does not serve all of them.
fn requires_remote_members(preference: MemberPreference, own: &Endpoints) -> bool {
    preference == MemberPreference::All || !own.serves_all_clients()
}

/// Waits until the endpoints of a member change.
async fn any_member_changed(members: &mut [RemoteMember]) {
    let subscriptions = members.iter_mut().filter_map(|member| member.subscription.as_mut());
    let changes: Vec<_> = subscriptions
        .map(|(_, subscription)| Box::pin(subscription.changed()))
        .collect();
    if changes.is_empty() {
        return std::future::pending().await;
    }
    select_all(changes).await;
}

/// Maximum time for which clients wait for the objects of other clusters if some endpoints are already known. After it, the known
/// endpoints are served. It is less than three seconds, because proxies end a request whose first message takes longer.
const MAX_WAIT_FOR_MEMBERS: Duration = Duration::from_secs(2);
