//! The state of the cluster and the values that views compute from it.
//!
//! One writer applies batches of events. A view is a pure, synchronous function that computes a value from the store. It reads
//! the store through a `Reader`, which records the lookup keys that the view uses: the value depends on them. A value that has
//! subscribers is computed again when one of these lookup keys changes, and is published if it differs. A subscription returns
//! the current value immediately; a slow subscriber skips to the latest value. Encoded responses are cached with the value. No
//! view does I/O or reads the clock, and this module does not depend on protobuf.

pub mod client_namespace;
mod config;
mod diagnostics;
mod endpoint_log;
mod metrics;
pub mod publish;
pub mod remote_clusters;
mod store;
pub mod union;
pub mod views;

use std::convert::Infallible;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ahash::AHashSet;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::warn;
use tulle_core::identity::service_account_identity;
use tulle_core::metrics::Registry;

pub use self::config::{Config, H2Upgrade, Ipv6, TransportMode};
pub use self::metrics::GaugeGuard;
use crate::cluster::diagnostics::ineffective_references::IneffectiveReferences;
use crate::cluster::diagnostics::object_metrics::ObjectMetrics;
use crate::cluster::diagnostics::server_port_names::ServerPortNames;
use crate::cluster::metrics::Metrics;
use crate::cluster::publish::published_value::{EncoderId, PublishedValue, ValuesWithEncodings};
use crate::cluster::publish::table::{ValueReceiver, ViewTable};
use crate::cluster::store::objects::{LookupKey, Store};
use crate::cluster::store::reader::Reader;
use crate::cluster::views::endpoints::EndpointsView;
use crate::cluster::views::inbound::InboundView;
use crate::cluster::views::outbound::OutboundView;
use crate::cluster::views::profiles::ProfileView;
use crate::cluster::views::view::View;
use crate::cluster::views::{endpoints, inbound, outbound, profiles, workload_list};
use crate::model::endpoints::Endpoints;
use crate::model::inbound::InboundPolicy;
use crate::model::outbound::Outbound;
use crate::model::profile::Profile;
use crate::resources::Kind;
use crate::resources::event::{Event, EventSink};
use crate::resources::meta::NamespacedName;
use crate::resources::unreadable::Unreadable;
use crate::resources::unserved::UnservedPart;

/// A handle to the cluster state; clones share it.
#[derive(Clone)]
pub struct Cluster(Arc<Shared>);

struct Shared {
    config: Config,
    metrics: Metrics,
    state: Mutex<State>,
    /// The time at which the initial list of objects was complete.
    synced_at: watch::Sender<Option<Instant>>,
    nodes_changed: watch::Sender<()>,
    next_encoder_id: AtomicUsize,
    values_with_encodings: Arc<ValuesWithEncodings>,
}

#[derive(Default)]
struct State {
    store: Store,
    object_metrics: ObjectMetrics,
    server_port_names: ServerPortNames,
    ineffective_references: IneffectiveReferences,
    endpoints: ViewTable<EndpointsView>,
    profiles: ViewTable<ProfileView>,
    inbound: ViewTable<InboundView>,
    outbound: ViewTable<OutboundView>,
}

/// The locked state. When it is dropped, a metric records how long it was locked.
struct StateGuard<'a> {
    state: MutexGuard<'a, State>,
    metrics: &'a Metrics,
    locked_at: Instant,
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        self.metrics
            .lock_seconds
            .observe(self.locked_at.elapsed().as_secs_f64());
    }
}

/// Gives access to the table of a view.
trait HasTable<V: View> {
    fn table(&mut self) -> &mut ViewTable<V>;
}

impl HasTable<EndpointsView> for State {
    fn table(&mut self) -> &mut ViewTable<EndpointsView> {
        &mut self.endpoints
    }
}

impl HasTable<ProfileView> for State {
    fn table(&mut self) -> &mut ViewTable<ProfileView> {
        &mut self.profiles
    }
}

impl HasTable<InboundView> for State {
    fn table(&mut self) -> &mut ViewTable<InboundView> {
        &mut self.inbound
    }
}

impl HasTable<OutboundView> for State {
    fn table(&mut self) -> &mut ViewTable<OutboundView> {
        &mut self.outbound
    }
}

impl Cluster {
    pub fn new(config: Config, registry: &Registry) -> Self {
        let metrics = match &config.remote_name {
            None => Metrics::new(registry),
            Some(name) => Metrics::for_remote_cluster(registry, name.clone()),
        };
        Self(Arc::new(Shared {
            config,
            metrics,
            state: Mutex::default(),
            synced_at: watch::Sender::new(None),
            nodes_changed: watch::Sender::new(()),
            next_encoder_id: AtomicUsize::new(0),
            values_with_encodings: Arc::default(),
        }))
    }

    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// Whether both handles belong to the same cluster.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The sink to which the source sends its events.
    pub fn sink(&self) -> EventSink {
        let shared = self.0.clone();
        EventSink::new(move |events| shared.apply(events))
    }

    /// Waits until the source has reported its initial list of objects.
    pub async fn synced(&self) {
        // An error would mean that the sender was dropped, but this handle keeps the sender alive.
        let _ = self.0.synced_at.subscribe().wait_for(Option::is_some).await;
    }

    /// The time at which the source had reported its initial list of objects. `None` before that time.
    pub(crate) fn synced_at(&self) -> Option<Instant> {
        *self.0.synced_at.borrow()
    }

    pub fn is_synced(&self) -> bool {
        self.synced_at().is_some()
    }

    pub fn endpoints(&self, key: endpoints::Key) -> Subscription<Endpoints> {
        self.endpoints_with_key(&key).1
    }

    /// Same as [`endpoints`](Self::endpoints), and also returns the copy of the key that all subscribers share.
    pub fn endpoints_with_key(&self, key: &endpoints::Key) -> (Arc<endpoints::Key>, Subscription<Endpoints>) {
        self.subscribe::<EndpointsView>(key)
    }

    pub fn profile(&self, key: profiles::Key) -> Subscription<Profile> {
        self.subscribe::<ProfileView>(&key).1
    }

    /// The policy of a workload's port; `None` while the workload does not exist.
    pub fn inbound(&self, key: inbound::Key) -> Subscription<Option<InboundPolicy>> {
        self.subscribe::<InboundView>(&key).1
    }

    pub fn outbound(&self, key: outbound::Key) -> Subscription<Outbound> {
        self.subscribe::<OutboundView>(&key).1
    }

    /// Adds a subscriber to the metric `service_subscribers` until the guard is dropped.
    pub fn count_service_subscriber(&self, namespace: &str, name: &str) -> GaugeGuard {
        GaugeGuard::new(self.0.metrics.service_subscribers(namespace, name))
    }

    /// Counts a request with an invalid context token in the metric `tulle_invalid_context_tokens_total`.
    pub fn count_invalid_context_token(&self) {
        self.0.metrics.invalid_context_tokens.inc();
    }

    /// Counts a part of an object in the metric `unserved_configuration` until the guard is dropped.
    pub fn count_unserved_part(&self, kind: Kind, name: &NamespacedName, field: &str) -> GaugeGuard {
        self.0.metrics.unserved_guard(kind, name, field)
    }

    /// Returns an id that no other gRPC service of this process uses.
    pub fn new_encoder_id(&self) -> EncoderId {
        let id = self.0.next_encoder_id.fetch_add(1, Ordering::Relaxed);
        EncoderId::new(id, self.0.values_with_encodings.clone())
    }

    /// Removes encodings that have not been used for `MIN_ENCODING_LIFETIME`. Never returns.
    pub async fn remove_unused_encodings(&self) -> Infallible {
        loop {
            sleep(MIN_ENCODING_LIFETIME).await;
            self.0.values_with_encodings.remove_unused().await;
        }
    }

    /// The identity in a workload's certificate; `None` if the workload does not exist.
    pub fn workload_identity(&self, workload: &inbound::WorkloadId) -> Option<String> {
        let state = self.0.state.lock();
        let reader = Reader::new(&state.store);
        let config = &self.0.config;
        match workload {
            inbound::WorkloadId::Pod(name) => {
                let (pod, ns) = (reader.pod(name)?, &config.controller_namespace);
                let account = &pod.service_account;
                Some(service_account_identity(
                    account,
                    &name.namespace,
                    ns,
                    &config.trust_domain,
                ))
            }
            inbound::WorkloadId::External(name) => Some(reader.external_workload(name)?.identity.clone()),
        }
    }

    /// The current zone of a node.
    pub fn node_zone(&self, node: &str) -> Option<Arc<str>> {
        let state = self.0.state.lock();
        Reader::new(&state.store)
            .node(&NamespacedName::new("", node))
            .and_then(|node| node.zone.clone())
    }

    /// Notifies of each change of a Node: its zone may have changed. Nodes change rarely and have many subscribers, so all
    /// subscribers share one watch, and each reads its zone again.
    pub fn node_changes(&self) -> watch::Receiver<()> {
        self.0.nodes_changed.subscribe()
    }

    /// The current pods and external workloads of a namespace, or of all namespaces.
    ///
    /// Takes milliseconds for thousands of workloads. The lock is held only while the objects are copied.
    pub fn workloads(&self, namespace: Option<&str>) -> Vec<workload_list::Workload> {
        let objects = workload_list::input_objects(&self.0.state.lock().store, namespace);
        workload_list::list(&Store::from_objects(objects), &self.0.config, namespace)
    }

    fn subscribe<V: View>(&self, key: &V::Key) -> (Arc<V::Key>, Subscription<V::Value>)
    where
        State: HasTable<V>,
    {
        let (key, receiver) = {
            let state = &mut *self.0.lock();
            // The table is moved out of the state, because `subscribe` also borrows the store.
            let mut table = std::mem::take(<State as HasTable<V>>::table(state));
            let subscribed = table.subscribe(&state.store, &self.0.config, &self.0.metrics, key);
            *<State as HasTable<V>>::table(state) = table;
            subscribed
        };
        let shared = self.0.clone();
        let released = key.clone();
        let release = SubscriptionGuard(Some(Box::new(move || {
            <State as HasTable<V>>::table(&mut shared.lock()).release(&released);
        })));
        let subscription = Subscription {
            receiver,
            _release: release,
        };
        (key, subscription)
    }
}

impl Shared {
    /// Locks the state, and records the time for which it is locked. Used for each batch of events, and for each stream that
    /// begins or ends. Short reads lock `state` without recording the time.
    fn lock(&self) -> StateGuard<'_> {
        let state = self.state.lock();
        StateGuard {
            state,
            metrics: &self.metrics,
            locked_at: Instant::now(),
        }
    }

    fn apply(&self, events: Vec<Event>) {
        // The control plane of another cluster reports the objects of that cluster.
        let is_local = self.config.remote_name.is_none();
        let mut synced = false;
        let mut unserved = Vec::new();
        let mut unreadable = Vec::new();
        let mut endpoint_log = Vec::new();
        {
            let state = &mut *self.lock();
            let mut changed_keys = AHashSet::new();
            for event in events {
                synced |= matches!(event, Event::Synced);
                if is_local {
                    endpoint_log::collect(&state.store, &event, &mut endpoint_log);
                    let object_metrics = &mut state.object_metrics;
                    unserved.extend(object_metrics.update_unserved_parts(&self.metrics, &self.config, &event));
                }
                if state.object_metrics.update_unreadable(&self.metrics, &event)
                    && let Event::Unreadable(found) = &event
                {
                    let fallback = fallback_description(&state.store, found);
                    unreadable.push((found.clone(), fallback));
                }
                let change = state.store.apply(event, &mut changed_keys);
                state.object_metrics.apply_count_change(&self.metrics, &change);
            }
            if is_local {
                unserved.extend(state.object_metrics.update_parts_unsupported_by_servers(
                    &self.metrics,
                    &state.store,
                    &changed_keys,
                ));
                unserved.extend(
                    state
                        .server_port_names
                        .update(&self.metrics, &state.store, &changed_keys),
                );
                let is_synced = synced || self.synced_at.borrow().is_some();
                unserved.extend(state.ineffective_references.update(
                    &self.metrics,
                    (&state.store, &self.config),
                    &changed_keys,
                    is_synced,
                ));
            }
            state
                .object_metrics
                .update_service_metrics(&self.metrics, &state.store, &changed_keys);
            state.endpoints.refresh(&state.store, &self.config, &changed_keys);
            state.profiles.refresh(&state.store, &self.config, &changed_keys);
            state.inbound.refresh(&state.store, &self.config, &changed_keys);
            state.outbound.refresh(&state.store, &self.config, &changed_keys);
            let is_node = |key: &LookupKey| matches!(key, LookupKey::Object(Kind::Node, _));
            if changed_keys.iter().any(is_node) {
                self.nodes_changed.send_replace(());
            }
        }
        for line in endpoint_log {
            line.write(&self.config.log_addr);
        }
        for (kind, name, UnservedPart { field, reason }) in unserved {
            warn!(kind = kind.info().name, object = %name, field, reason, "the mesh does not apply a part of the object");
        }
        for (found, fallback) in unreadable {
            let Unreadable { kind, name, reason, .. } = &*found;
            let cluster = self.config.remote_name.as_deref().unwrap_or("local");
            warn!(kind = kind.info().name, object = %name, cluster, reason, fallback, "an object cannot be read");
        }
        if synced {
            self.synced_at.send_modify(|at| *at = at.or(Some(Instant::now())));
        }
    }
}

/// Describes the version that is used instead of an unreadable object.
fn fallback_description(store: &Store, unreadable: &Unreadable) -> &'static str {
    match &unreadable.placeholder {
        _ if store.is_readable(unreadable.kind, &unreadable.name) => "the last readable version",
        Some(_) => "a placeholder that denies",
        None => "nothing",
    }
}

/// A subscription to one value. Dropping the last subscription removes the value from the table.
pub struct Subscription<T> {
    // Fields are dropped in order. The receiver must be dropped before the guard, which counts the remaining receivers.
    receiver: ValueReceiver<T>,
    _release: SubscriptionGuard,
}

struct SubscriptionGuard(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Drop for SubscriptionGuard {
    fn drop(&mut self) {
        if let Some(release) = self.0.take() {
            release();
        }
    }
}

impl<T> Subscription<T> {
    /// Returns the current value and marks it as seen.
    pub fn current(&mut self) -> Arc<PublishedValue<T>> {
        self.receiver.borrow_and_update().clone()
    }

    /// Waits for a value that has not been seen and returns the latest.
    pub async fn changed(&mut self) -> Arc<PublishedValue<T>> {
        // An error would mean that the sender was dropped, but the table keeps it while this subscription exists.
        if self.receiver.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.current()
    }
}

/// Minimum time for which an unused encoding is kept. When a replica of the control plane ends, the streams of its proxies begin
/// here within this time and share the encodings.
const MIN_ENCODING_LIFETIME: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
