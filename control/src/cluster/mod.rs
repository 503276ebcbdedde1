//! The state of the cluster and the answers computed from it.
//!
//! One writer applies batches of events; what they touch, and somebody asks for, is computed again and published. Views are
//! pure and synchronous: they read the store through a `Reader` that notes what they looked at. Servers
//! subscribe by key and have the current answer at once; a slow one skips to the latest. What they make of an answer they
//! keep with it, for all who follow it. Nothing here does I/O, knows the time, or knows protobuf.

pub mod answer;
pub mod endpoints;
pub mod inbound;
mod lookup;
pub mod members;
mod metrics;
mod named_ports;
pub mod outbound;
pub mod profiles;
mod routes;
mod store;
mod table;
mod workload;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ipnet::IpNet;
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{debug, error, warn};
use tulle_core::identity::service_account;
use tulle_core::metrics::{Gauge, Registry};
use tulle_core::ports::PortSet;

use crate::cluster::answer::{Answer, Encoder};
use crate::cluster::endpoints::EndpointsView;
use crate::cluster::inbound::InboundView;
use crate::cluster::metrics::{Census, Metrics};
use crate::cluster::named_ports::NamedPorts;
use crate::cluster::outbound::OutboundView;
use crate::cluster::profiles::ProfileView;
use crate::cluster::store::{Fact, Store};
use crate::cluster::table::{Table, View};
use crate::model::endpoints::Endpoints;
use crate::model::inbound::Server;
use crate::model::outbound::Outbound;
use crate::model::profile::Profile;
use crate::resources::event::{Event, Writer};
use crate::resources::meta::Name;
use crate::resources::policy::server::DefaultPolicy;
use crate::resources::unreadable::Unreadable;
use crate::resources::unserved::Unserved;
use crate::resources::{Kind, Object};

/// What views must know beside the objects.
#[derive(Clone, Debug)]
pub struct Config {
    /// Namespace of the control plane. Default `linkerd`.
    pub controller_namespace: String,
    /// Domain of identities. Default: the cluster domain.
    pub trust_domain: String,
    /// Domain of service names. Default `cluster.local`.
    pub cluster_domain: String,
    /// Networks of the cluster. Default 10/8, 100.64/10, 172.16/12, 192.168/16.
    pub cluster_networks: Vec<IpNet>,
    /// Networks that health probes come from. Default none.
    pub probe_networks: Vec<IpNet>,
    /// Policy of ports that no Server selects. Default `all-unauthenticated`.
    pub default_policy: DefaultPolicy,
    /// Ports that are opaque where no annotation says otherwise. Default none.
    pub default_opaque_ports: PortSet,
    /// Namespace of the EgressNetworks that hold for namespaces without their own. Default `linkerd-egress`.
    pub global_egress_namespace: String,
    /// Where endpoints are read from. Default slices.
    pub endpoints_from: EndpointsFrom,
    /// Whether IPv6 endpoints are served. Default no.
    pub ipv6: Ipv6,
    /// Whether meshed endpoints are offered HTTP/2. Default yes.
    pub h2_upgrade: H2Upgrade,
    /// When clients use a transport header. Default for opaque ports only.
    pub transport: TransportMode,
    /// The address of destination, as log lines show it. Default `:8086`.
    pub addr: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointsFrom {
    Slices,
    Endpoints,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ipv6 {
    /// A pod with both families is reached over IPv6.
    Serve,
    Drop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum H2Upgrade {
    Offer,
    Omit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportMode {
    /// A transport header for opaque ports.
    Transparent,
    /// A transport header for every port of a meshed endpoint.
    TransportHeader,
}

impl Default for Config {
    fn default() -> Self {
        let networks = ["10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16"];
        let networks = networks
            .iter()
            .map(|net| net.parse().expect("the literals are networks"))
            .collect();
        Self {
            controller_namespace: "linkerd".to_owned(),
            trust_domain: "cluster.local".to_owned(),
            cluster_domain: "cluster.local".to_owned(),
            cluster_networks: networks,
            probe_networks: Vec::new(),
            default_policy: "all-unauthenticated".parse().expect("the literal is a policy"),
            default_opaque_ports: PortSet::default(),
            global_egress_namespace: "linkerd-egress".to_owned(),
            endpoints_from: EndpointsFrom::Slices,
            ipv6: Ipv6::Drop,
            h2_upgrade: H2Upgrade::Offer,
            transport: TransportMode::Transparent,
            addr: ":8086".to_owned(),
        }
    }
}

/// A handle on the cluster; clones share it.
#[derive(Clone)]
pub struct Cluster(Arc<Shared>);

struct Shared {
    config: Config,
    metrics: Metrics,
    state: Mutex<State>,
    synced: watch::Sender<bool>,
    nodes_changed: watch::Sender<()>,
    n_encoders: AtomicUsize,
}

#[derive(Default)]
struct State {
    store: Store,
    census: Census,
    named_ports: NamedPorts,
    endpoints: Table<EndpointsView>,
    profiles: Table<ProfileView>,
    inbound: Table<InboundView>,
    outbound: Table<OutboundView>,
}

impl Cluster {
    pub fn new(config: Config, registry: &Registry) -> Self {
        Self(Arc::new(Shared {
            config,
            metrics: Metrics::new(registry),
            state: Mutex::default(),
            synced: watch::Sender::new(false),
            nodes_changed: watch::Sender::new(()),
            n_encoders: AtomicUsize::new(0),
        }))
    }

    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// What a source writes into.
    pub fn writer(&self) -> Writer {
        let shared = self.0.clone();
        Writer::new(move |events| shared.apply(events))
    }

    /// Waits until the source has reported everything there was when it started.
    pub async fn synced(&self) {
        // An error means that the sender is gone, and it lives in this handle.
        let _ = self.0.synced.subscribe().wait_for(|synced| *synced).await;
    }

    pub fn is_synced(&self) -> bool {
        *self.0.synced.borrow()
    }

    pub fn endpoints(&self, key: endpoints::Key) -> Subscription<Endpoints> {
        self.subscribe::<EndpointsView>(key)
    }

    pub fn profile(&self, key: profiles::Key) -> Subscription<Profile> {
        self.subscribe::<ProfileView>(key)
    }

    /// The policy of a workload's port; nothing while there is no such workload.
    pub fn inbound(&self, key: inbound::Key) -> Subscription<Option<Server>> {
        self.subscribe::<InboundView>(key)
    }

    pub fn outbound(&self, key: outbound::Key) -> Subscription<Outbound> {
        self.subscribe::<OutboundView>(key)
    }

    /// Counts somebody who follows the annotations of a service, until it is dropped.
    pub fn follow_service(&self, namespace: &str, name: &str) -> Follower {
        Follower::new(self.0.metrics.service(namespace, name))
    }

    /// An encoder that no other service has.
    pub fn encoder(&self) -> Encoder {
        Encoder(self.0.n_encoders.fetch_add(1, Ordering::Relaxed))
    }

    /// Who a workload's certificate says that it is; nothing where there is no such workload.
    pub fn identity(&self, workload: &inbound::Workload) -> Option<String> {
        let state = self.0.state.lock();
        let reader = lookup::Reader::new(&state.store);
        let config = &self.0.config;
        match workload {
            inbound::Workload::Pod(name) => {
                let (pod, ns) = (reader.pod(name)?, &config.controller_namespace);
                let account = &pod.service_account;
                Some(service_account(account, &name.namespace, ns, &config.trust_domain))
            }
            inbound::Workload::External(name) => Some(reader.external_workload(name)?.identity.clone()),
        }
    }

    /// The zone of a node as it is now.
    pub fn node_zone(&self, node: &str) -> Option<Arc<str>> {
        let state = self.0.state.lock();
        lookup::Reader::new(&state.store)
            .node(&Name::new("", node))
            .and_then(|node| node.zone.clone())
    }

    /// Tells when the zone of some node may be another. Nodes come and go rarely, and those who follow them are many, so
    /// that they share one watch and look again.
    pub fn node_changes(&self) -> watch::Receiver<()> {
        self.0.nodes_changed.subscribe()
    }

    /// The pods and external workloads of a namespace, or of all, as they are now.
    ///
    /// It takes milliseconds where there are thousands; what everybody else waits for is only that they are copied.
    pub fn members(&self, namespace: Option<&str>) -> Vec<members::Member> {
        let objects = members::objects(&self.0.state.lock().store, namespace);
        members::members(&Store::of(objects), &self.0.config, namespace)
    }

    fn subscribe<V: View>(&self, key: V::Key) -> Subscription<V::Value> {
        let receiver = {
            let state = &mut *self.0.state.lock();
            // The table is taken out while it is filled, because it reads the store beside it.
            let mut table = std::mem::take(V::table(state));
            let receiver = table.subscribe(&state.store, &self.0.config, &self.0.metrics, &key);
            *V::table(state) = table;
            receiver
        };
        let shared = self.0.clone();
        let release = Release(Some(Box::new(move || V::table(&mut shared.state.lock()).release(&key))));
        Subscription {
            receiver,
            _release: release,
        }
    }
}

impl Shared {
    fn apply(&self, events: Vec<Event>) {
        let mut synced = false;
        let mut unserved = Vec::new();
        let mut unreadable = Vec::new();
        {
            let state = &mut *self.state.lock();
            let mut touched = HashSet::new();
            for event in events {
                synced |= matches!(event, Event::Synced);
                log(&self.config.addr, &state.store, &event);
                unserved.extend(state.census.judge(&self.metrics, &event));
                if state.census.note_unreadable(&self.metrics, &event)
                    && let Event::Unreadable(found) = &event
                {
                    let in_force = in_force(&state.store, found);
                    unreadable.push((found.clone(), in_force));
                }
                let change = state.store.apply(event, &mut touched);
                state.census.record(&self.metrics, &change);
            }
            unserved.extend(state.census.judge_servers(&self.metrics, &state.store, &touched));
            unserved.extend(state.named_ports.judge(&self.metrics, &state.store, &touched));
            state.census.look(&self.metrics, &state.store, &touched);
            state.endpoints.refresh(&state.store, &self.config, &touched);
            state.profiles.refresh(&state.store, &self.config, &touched);
            state.inbound.refresh(&state.store, &self.config, &touched);
            state.outbound.refresh(&state.store, &self.config, &touched);
            let is_node = |fact: &Fact| matches!(fact, Fact::Object(Kind::Node, _));
            if touched.iter().any(is_node) {
                self.nodes_changed.send_replace(());
            }
        }
        for (kind, name, Unserved { field, reason }) in unserved {
            warn!(kind = kind.info().name, object = %name, field, reason, "a part of the object is not served");
        }
        for (found, in_force) in unreadable {
            let Unreadable { kind, name, reason, .. } = &*found;
            warn!(kind = kind.info().name, object = %name, reason, in_force, "an object cannot be read");
        }
        if synced {
            self.synced.send_replace(true);
        }
    }
}

/// What holds in place of an object that cannot be read.
fn in_force(store: &Store, unreadable: &Unreadable) -> &'static str {
    match &unreadable.stand_in {
        _ if store.is_readable(unreadable.kind, &unreadable.name) => "its last form that could be read",
        Some(_) => "refusal of what it is for",
        None => "nothing",
    }
}

/// Logs what changes endpoints, in the words that operators search for.
fn log(addr: &str, store: &Store, event: &Event) {
    let component = "service-publisher";
    if let Event::Applied(Object::EndpointSlice(slice)) = event
        && slice.service.is_none()
    {
        let name = &slice.meta.name;
        error!(addr, component, slice = %name, "an EndpointSlice names no service: it has neither the label nor an owner");
    }
    if !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    match event {
        Event::Applied(Object::EndpointSlice(slice)) => {
            let name = &slice.meta.name;
            let verb = if store.object(Kind::EndpointSlice, name).is_some() {
                "Updating"
            } else {
                "Adding"
            };
            let svc = slice.service.as_ref().map_or("", |service| &*service.name);
            debug!(addr, component, ns = %name.namespace, svc, "{verb} ES {name}");
        }
        Event::Applied(Object::Service(service)) => {
            let name = &service.meta.name;
            debug!(addr, component, ns = %name.namespace, svc = %name.name, "Updating service for {name}");
        }
        Event::Deleted(Kind::EndpointSlice, name) => {
            let svc = match store.object(Kind::EndpointSlice, name) {
                Some(Object::EndpointSlice(slice)) => slice.service.as_ref().map_or("", |service| &*service.name),
                _ => "",
            };
            debug!(addr, component, ns = %name.namespace, svc, "Deleting ES {name}");
        }
        Event::Applied(_) | Event::Deleted(..) | Event::Unreadable(_) | Event::Synced => {}
    }
}

/// Somebody who is counted.
pub struct Follower(Arc<Gauge>);

impl Follower {
    fn new(gauge: Arc<Gauge>) -> Self {
        gauge.add(1);
        Self(gauge)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

/// One follower of one answer; the last to go takes the answer out of the table.
pub struct Subscription<T> {
    // Declared before the release, so that the receiver has gone when the table counts.
    receiver: watch::Receiver<Arc<Answer<T>>>,
    _release: Release,
}

struct Release(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Drop for Release {
    fn drop(&mut self) {
        if let Some(release) = self.0.take() {
            release();
        }
    }
}

impl<T> Subscription<T> {
    /// The answer as it is now, which counts as seen.
    pub fn current(&mut self) -> Arc<Answer<T>> {
        self.receiver.borrow_and_update().clone()
    }

    /// Waits for an answer that has not been seen and returns the latest.
    pub async fn changed(&mut self) -> Arc<Answer<T>> {
        // The sender lives in the table while this subscription does; were it gone, there would be nothing to wait for.
        if self.receiver.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.current()
    }
}

#[cfg(test)]
mod tests;
