//! Gauges and counters of objects held and answers asked for.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use tulle_core::metrics::{Counter, Family, Gauge, Labels, Registry};

use crate::cluster::Follower;
use crate::cluster::store::{Change, Fact, Store};
use crate::resources::event::Event;
use crate::resources::meta::Name;
use crate::resources::route::ParentKind;
use crate::resources::unreadable::Unreadable;
use crate::resources::unserved::{self, Unserved};
use crate::resources::{Kind, Object};

pub(super) struct Metrics {
    registry: Registry,
    endpoints_subscribers: Family<Gauge>,
    endpoints_updates: Family<Counter>,
    endpoints_pods: Family<Gauge>,
    endpoints_exists: Family<Gauge>,
    workload_subscribers: Family<Gauge>,
    workload_updates: Family<Counter>,
    profile_subscribers: Family<Gauge>,
    profile_updates: Family<Counter>,
    service_subscribers: Family<Gauge>,
    policy_subscribers: Family<Gauge>,
    policy_updates: Family<Counter>,
    unserved: Family<Gauge>,
    unreadable: Family<Gauge>,
    overridden: Family<Gauge>,
    service_addresses: Arc<Gauge>,
    services: Arc<Gauge>,
    routed_services: Family<Gauge>,
    followed_service_ports: Family<Gauge>,
}

impl Metrics {
    /// Counts one part of an object that is not served.
    pub(super) fn count_unserved(&self, kind: Kind, name: &Name, field: &str) -> Follower {
        let labels = Labels::new()
            .with("kind", kind.info().name)
            .with("namespace", &name.namespace)
            .with("name", &name.name)
            .with("field", field);
        Follower::new(self.unserved.get(&labels))
    }

    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            endpoints_subscribers: registry.gauge(
                "endpoints_subscribers",
                "Streams that follow the endpoints of a service port.",
            ),
            endpoints_updates: registry.counter("endpoints_updates", "Changes of the endpoints of a service port."),
            endpoints_pods: registry.gauge("endpoints_pods", "Endpoints of a service port."),
            endpoints_exists: registry.gauge("endpoints_exists", "1 if the service exists."),
            workload_subscribers: registry
                .gauge("workload_subscribers", "Streams that follow the profile of an address."),
            workload_updates: registry.counter("workload_updates", "Changes of the profile of an address."),
            profile_subscribers: registry.gauge("profile_subscribers", "Streams that follow the profile of a service."),
            profile_updates: registry.counter("profile_updates", "Changes of the profile of a service."),
            service_subscribers: registry.gauge(
                "service_subscribers",
                "Streams that follow the opaque ports of a service.",
            ),
            policy_subscribers: registry.gauge("policy_subscribers", "Streams that follow policies, by direction."),
            policy_updates: registry.counter(
                "policy_updates",
                "Changes of policies that streams follow, by direction.",
            ),
            unserved: registry.gauge(
                "unserved_configuration",
                "Parts of an object that cannot be read, or that no proxy does: annotations by their key, and rules of routes.",
            ),
            unreadable: registry.gauge(
                "tulle_unreadable_objects",
                "1 for each object that cannot be read: its last readable form holds, or else what permits nobody.",
            ),
            overridden: registry.gauge(
                "tulle_overridden_servers",
                "Ports that proxies ask about and that a Server selects in vain, because the one that is named is older.",
            ),
            service_addresses: registry
                .gauge("outbound_index_service_index_size", "Addresses of Services.")
                .get(&Labels::new()),
            services: registry
                .gauge("outbound_index_service_info_index_size", "Services that are known.")
                .get(&Labels::new()),
            routed_services: registry.gauge(
                "outbound_index_service_route_index_size",
                "Services that have routes, by their namespace.",
            ),
            followed_service_ports: registry.gauge(
                "outbound_index_service_port_route_index_size",
                "Policies of Services' ports that streams follow, by the Services' namespace.",
            ),
            registry: registry.clone(),
        }
    }

    pub(super) fn endpoints(&self, service: &Name, port: u16, hostname: Option<&str>) -> SlotMetrics {
        let labels = Labels::new()
            .with("cluster", "local")
            .with("namespace", &service.namespace)
            .with("service", &service.name)
            .with("port", port)
            .with("hostname", hostname.unwrap_or_default())
            // Clients of all nodes share an answer.
            .with("nodename", "");
        SlotMetrics {
            subscribers: self.endpoints_subscribers.get(&labels),
            updates: self.endpoints_updates.get(&labels),
            size: Some((self.endpoints_pods.get(&labels), self.endpoints_exists.get(&labels))),
            _service_port: None,
            overridden: None,
        }
    }

    pub(super) fn workload(&self, addr: std::net::SocketAddr) -> SlotMetrics {
        let labels = Labels::new().with("ip", addr.ip()).with("port", addr.port());
        SlotMetrics {
            subscribers: self.workload_subscribers.get(&labels),
            updates: self.workload_updates.get(&labels),
            size: None,
            _service_port: None,
            overridden: None,
        }
    }

    pub(super) fn profile(&self, namespace: &str, profile: &str) -> SlotMetrics {
        let labels = Labels::new().with("namespace", namespace).with("profile", profile);
        SlotMetrics {
            subscribers: self.profile_subscribers.get(&labels),
            updates: self.profile_updates.get(&labels),
            size: None,
            _service_port: None,
            overridden: None,
        }
    }

    pub(super) fn service(&self, namespace: &str, name: &str) -> Arc<Gauge> {
        let labels = Labels::new().with("namespace", namespace).with("name", name);
        self.service_subscribers.get(&labels)
    }

    /// `namespace` is that of the workload, and so of its Servers.
    pub(super) fn inbound(&self, namespace: &Arc<str>) -> SlotMetrics {
        SlotMetrics {
            overridden: Some(Overridden {
                family: self.overridden.clone(),
                namespace: namespace.clone(),
                counted: Mutex::default(),
            }),
            ..self.policy("inbound", None)
        }
    }

    /// `service_namespace` is that of the service that the policy is about.
    pub(super) fn outbound(&self, service_namespace: Option<&str>) -> SlotMetrics {
        let counted = service_namespace.map(|namespace| {
            let labels = Labels::new().with("namespace", namespace);
            Follower::new(self.followed_service_ports.get(&labels))
        });
        self.policy("outbound", counted)
    }

    fn policy(&self, direction: &str, service_port: Option<Follower>) -> SlotMetrics {
        let labels = Labels::new().with("direction", direction);
        SlotMetrics {
            subscribers: self.policy_subscribers.get(&labels),
            updates: self.policy_updates.get(&labels),
            size: None,
            _service_port: service_port,
            overridden: None,
        }
    }
}

/// The series of one key; they vanish from the page after it has gone.
pub(super) struct SlotMetrics {
    subscribers: Arc<Gauge>,
    updates: Arc<Counter>,
    /// Endpoints, and whether their service exists.
    size: Option<(Arc<Gauge>, Arc<Gauge>)>,
    /// Counts the policy of a service's port.
    _service_port: Option<Follower>,
    /// Of the policy of a workload's port.
    overridden: Option<Overridden>,
}

/// Servers that select a port in vain.
struct Overridden {
    family: Family<Gauge>,
    namespace: Arc<str>,
    counted: Mutex<Vec<Follower>>,
}

impl SlotMetrics {
    pub(super) fn joined(&self) {
        self.subscribers.add(1);
    }

    pub(super) fn left(&self) {
        self.subscribers.add(-1);
    }

    pub(super) fn updated(&self) {
        self.updates.inc();
    }

    /// These Servers select the port as well as the one that decides.
    pub(super) fn overrode(&self, servers: &[Arc<str>], by: &str) {
        let Some(overridden) = &self.overridden else { return };
        let counted = servers.iter().map(|name| {
            let labels = Labels::new()
                .with("namespace", &overridden.namespace)
                .with("name", name)
                .with("by", by);
            Follower::new(overridden.family.get(&labels))
        });
        *overridden.counted.lock() = counted.collect();
    }

    pub(super) fn sized(&self, n_endpoints: usize, exists: bool) {
        if let Some((pods, existence)) = &self.size {
            pods.set(i64::try_from(n_endpoints).unwrap_or(i64::MAX));
            existence.set(i64::from(exists));
        }
    }
}

/// Counts the objects held, by kind, policy objects by namespace too, and what leads to services.
#[derive(Default)]
pub(super) struct Census {
    by_kind: HashMap<Kind, Arc<Gauge>>,
    by_namespace: HashMap<(Kind, Arc<str>), Arc<Gauge>>,
    /// Addresses of services.
    addresses: HashSet<Fact>,
    /// Routes of services.
    routes: HashMap<Fact, Follower>,
    /// What objects ask for in vain, each counted.
    unserved: HashMap<(Kind, Name), Vec<(Unserved, Follower)>>,
    /// The same because of the Server that the objects name.
    unserved_of_servers: HashMap<Name, Vec<UnservedOfServer>>,
    /// Objects that cannot be read, and why, each counted.
    unreadable: HashMap<(Kind, Name), (String, Follower)>,
}

/// A part of an object that is not served because of its Server, counted.
struct UnservedOfServer {
    what: (Kind, Name, Unserved),
    _follower: Follower,
}

impl Census {
    pub(super) fn record(&mut self, metrics: &Metrics, change: &Change) {
        match change {
            Change::Added(kind, namespace) => self.count(metrics, *kind, namespace, 1),
            Change::Removed(kind, namespace) => self.count(metrics, *kind, namespace, -1),
            Change::None => {}
        }
    }

    /// Counts an object that cannot be read until it can, and says whether that is new.
    pub(super) fn note_unreadable(&mut self, metrics: &Metrics, event: &Event) -> bool {
        match event {
            Event::Unreadable(unreadable) => {
                let Unreadable { kind, name, reason, .. } = &**unreadable;
                let labels = Labels::new()
                    .with("kind", kind.info().name)
                    .with("namespace", &name.namespace)
                    .with("name", &name.name);
                let counted = (reason.clone(), Follower::new(metrics.unreadable.get(&labels)));
                let before = self.unreadable.insert((*kind, name.clone()), counted);
                before.is_none_or(|(before, _)| before != *reason)
            }
            Event::Applied(object) if !self.unreadable.is_empty() => {
                self.unreadable.remove(&(object.kind(), object.meta().name.clone()));
                false
            }
            Event::Deleted(kind, name) => {
                self.unreadable.remove(&(*kind, name.clone()));
                false
            }
            Event::Applied(_) | Event::Synced => false,
        }
    }

    /// Counts what an object asks for in vain, and returns what of it is new.
    pub(super) fn judge(&mut self, metrics: &Metrics, event: &Event) -> Vec<(Kind, Name, Unserved)> {
        let (id, found) = match event {
            Event::Applied(object) => ((object.kind(), object.meta().name.clone()), unserved::of(object)),
            Event::Deleted(kind, name) => ((*kind, name.clone()), Vec::new()),
            // What it asked for in its last readable form stays as it was.
            Event::Unreadable(_) | Event::Synced => return Vec::new(),
        };
        let before = self.unserved.remove(&id).unwrap_or_default();
        let is_new = |one: &&Unserved| !before.iter().any(|(old, _)| old == *one);
        let new = found
            .iter()
            .filter(is_new)
            .map(|one| (id.0, id.1.clone(), one.clone()))
            .collect();
        if !found.is_empty() {
            let counted = found.into_iter().map(|one| {
                let follower = metrics.count_unserved(id.0, &id.1, one.field);
                (one, follower)
            });
            let counted = counted.collect();
            self.unserved.insert(id, counted);
        }
        new
    }

    /// Counts what routes and rate limits ask for in vain because of the Server that they name, and returns what of it is
    /// new.
    pub(super) fn judge_servers(
        &mut self,
        metrics: &Metrics,
        store: &Store,
        touched: &HashSet<Fact>,
    ) -> Vec<(Kind, Name, Unserved)> {
        let mut servers: HashSet<Name> = HashSet::new();
        for fact in touched {
            match fact {
                Fact::RoutesOf(ParentKind::Server, name) | Fact::Object(Kind::Server, name) => {
                    servers.insert(name.clone());
                }
                Fact::In(Kind::RateLimitPolicy, namespace) => {
                    let all = Fact::In(Kind::Server, namespace.clone());
                    servers.extend(store.under(&all).map(|server| server.meta().name.clone()));
                }
                _ => {}
            }
        }
        let mut new = Vec::new();
        for name in servers {
            let before = self.unserved_of_servers.remove(&name).unwrap_or_default();
            let Some(Object::Server(server)) = store.object(Kind::Server, &name) else {
                continue;
            };
            let routes = Fact::RoutesOf(ParentKind::Server, name.clone());
            let limits = Fact::In(Kind::RateLimitPolicy, name.namespace.clone());
            let found = unserved::of_server(server, store.under(&routes).chain(store.under(&limits)));
            let is_new = |one: &&(Kind, Name, Unserved)| !before.iter().any(|old| old.what == **one);
            new.extend(found.iter().filter(is_new).cloned());
            if !found.is_empty() {
                let counted = found.into_iter().map(|what| UnservedOfServer {
                    _follower: metrics.count_unserved(what.0, &what.1, what.2.field),
                    what,
                });
                self.unserved_of_servers.insert(name, counted.collect());
            }
        }
        new
    }

    /// Looks again at what leads to services.
    pub(super) fn look(&mut self, metrics: &Metrics, store: &Store, touched: &HashSet<Fact>) {
        for fact in touched {
            match fact {
                Fact::At(_) => {
                    if store.under(fact).any(|object| matches!(object, Object::Service(_))) {
                        self.addresses.insert(fact.clone());
                    } else {
                        self.addresses.remove(fact);
                    }
                }
                Fact::RoutesOf(ParentKind::Service, service) => {
                    if store.under(fact).next().is_none() {
                        self.routes.remove(fact);
                    } else {
                        self.routes.entry(fact.clone()).or_insert_with(|| {
                            let labels = Labels::new().with("namespace", &service.namespace);
                            Follower::new(metrics.routed_services.get(&labels))
                        });
                    }
                }
                _ => {}
            }
        }
        metrics
            .service_addresses
            .set(i64::try_from(self.addresses.len()).unwrap_or(i64::MAX));
    }

    fn count(&mut self, metrics: &Metrics, kind: Kind, namespace: &Arc<str>, change: i64) {
        let by_kind = self
            .by_kind
            .entry(kind)
            .or_insert_with(|| kind.cache_size(&metrics.registry));
        by_kind.add(change);
        if kind == Kind::Service {
            metrics.services.add(change);
        }
        let Some(index) = policy_index(kind) else { return };
        let by_namespace = self.by_namespace.entry((kind, namespace.clone())).or_insert_with(|| {
            metrics
                .registry
                .gauge(index, "Policy objects of this kind that are known.")
                .get(&Labels::new().with("namespace", namespace))
        });
        by_namespace.add(change);
    }
}

fn policy_index(kind: Kind) -> Option<&'static str> {
    Some(match kind {
        Kind::MeshTlsAuthentication => "inbound_index_meshtls_authentication_index_size",
        Kind::NetworkAuthentication => "inbound_index_network_authentication_index_size",
        Kind::Pod => "inbound_index_pod_index_size",
        Kind::ExternalWorkload => "inbound_index_external_workload_index_size",
        Kind::Server => "inbound_index_server_index_size",
        Kind::ServerAuthorization => "inbound_index_server_authorization_index_size",
        Kind::AuthorizationPolicy => "inbound_index_authorization_policy_index_size",
        Kind::PolicyHttpRoute => "inbound_index_http_route_index_size",
        _ => return None,
    })
}
