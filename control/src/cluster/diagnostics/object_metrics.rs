//! Metrics of stored objects: their number, and their unserved or unreadable parts.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use ahash::{AHashMap, AHashSet};
use tulle_core::metrics::{Gauge, Labels};

use crate::cluster::config::Config;
use crate::cluster::metrics::{GaugeGuard, Metrics};
use crate::cluster::store::objects::{CountChange, LookupKey, Store};
use crate::resources::event::Event;
use crate::resources::meta::NamespacedName;
use crate::resources::route::ParentKind;
use crate::resources::unreadable::Unreadable;
use crate::resources::unserved::{self, UnservedPart};
use crate::resources::{Kind, Object};

/// Counts stored objects by kind, some kinds also by namespace, and the addresses of Services and the Services with routes.
#[derive(Default)]
pub(in crate::cluster) struct ObjectMetrics {
    by_kind: AHashMap<Kind, CountGauge>,
    by_namespace: AHashMap<(Kind, Arc<str>), Arc<Gauge>>,
    /// Lookup keys of the addresses of Services.
    addresses: AHashSet<LookupKey>,
    /// Lookup keys of the Services with routes.
    routes: AHashMap<LookupKey, GaugeGuard>,
    /// Unserved parts by object.
    unserved: AHashMap<(Kind, NamespacedName), Vec<(UnservedPart, GaugeGuard)>>,
    /// For each Server, the parts of its routes and rate limits that it does not support.
    unsupported_by_server: AHashMap<NamespacedName, Vec<PartUnsupportedByServer>>,
    /// Unreadable objects, with the reason.
    unreadable: AHashMap<(Kind, NamespacedName), (String, GaugeGuard)>,
}

/// A gauge, and the part of its value that this `Cluster` has added. While another connection to a linked cluster replaces the
/// old one, two `Cluster`s with its name add to one gauge, so each subtracts its part when it is dropped.
struct CountGauge {
    gauge: Arc<Gauge>,
    count: i64,
}

impl CountGauge {
    fn add(&mut self, change: i64) {
        self.count += change;
        self.gauge.add(change);
    }
}

impl Drop for CountGauge {
    fn drop(&mut self) {
        self.gauge.add(-self.count);
    }
}

/// A part of an object that its Server does not support.
struct PartUnsupportedByServer {
    part: (Kind, NamespacedName, UnservedPart),
    _gauge_guard: GaugeGuard,
}

impl ObjectMetrics {
    pub(in crate::cluster) fn apply_count_change(&mut self, metrics: &Metrics, change: &CountChange) {
        match change {
            CountChange::Added(kind, namespace) => self.add_to_counts(metrics, *kind, namespace, 1),
            CountChange::Removed(kind, namespace) => self.add_to_counts(metrics, *kind, namespace, -1),
            CountChange::None => {}
        }
    }

    /// Updates the metric of unreadable objects. Returns whether the object became unreadable or its reason changed.
    pub(in crate::cluster) fn update_unreadable(&mut self, metrics: &Metrics, event: &Event) -> bool {
        match event {
            Event::Unreadable(unreadable) => {
                let Unreadable { kind, name, reason, .. } = &**unreadable;
                let labels = Labels::new()
                    .with("kind", kind.info().name)
                    .with("namespace", &name.namespace)
                    .with("name", &name.name);
                let counted = (reason.clone(), GaugeGuard::new(metrics.unreadable.get(&labels)));
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

    /// Updates the metric of unserved parts of an object. Returns the parts that were not reported before.
    pub(in crate::cluster) fn update_unserved_parts(
        &mut self,
        metrics: &Metrics,
        config: &Config,
        event: &Event,
    ) -> Vec<(Kind, NamespacedName, UnservedPart)> {
        let (id, found) = match event {
            Event::Applied(object) => {
                let mut found = unserved::unserved_parts(object);
                if let Object::Service(service) = object {
                    let opaque = &config.default_opaque_ports;
                    found.extend(unserved::overridden_app_protocols(service, opaque));
                }
                ((object.kind(), object.meta().name.clone()), found)
            }
            Event::Deleted(kind, name) => ((*kind, name.clone()), Vec::new()),
            // The last readable version stays in effect, with its unserved parts.
            Event::Unreadable(_) | Event::Synced => return Vec::new(),
        };
        let before = self.unserved.remove(&id).unwrap_or_default();
        let is_new = |part: &&UnservedPart| !before.iter().any(|(old, _)| old == *part);
        let new = found
            .iter()
            .filter(is_new)
            .map(|part| (id.0, id.1.clone(), part.clone()))
            .collect();
        if !found.is_empty() {
            let counted = found.into_iter().map(|part| {
                let guard = metrics.unserved_guard(id.0, &id.1, part.field);
                (part, guard)
            });
            let counted = counted.collect();
            self.unserved.insert(id, counted);
        }
        new
    }

    /// Updates the metric of parts of routes and rate limits that their Server does not support. Returns the parts that were
    /// not reported before.
    pub(in crate::cluster) fn update_parts_unsupported_by_servers(
        &mut self,
        metrics: &Metrics,
        store: &Store,
        changed_keys: &AHashSet<LookupKey>,
    ) -> Vec<(Kind, NamespacedName, UnservedPart)> {
        let mut servers: AHashSet<NamespacedName> = AHashSet::new();
        for key in changed_keys {
            match key {
                LookupKey::Routes(ParentKind::Server, name) | LookupKey::Object(Kind::Server, name) => {
                    servers.insert(name.clone());
                }
                LookupKey::Namespace(Kind::RateLimitPolicy, namespace) => {
                    let all = LookupKey::Namespace(Kind::Server, namespace.clone());
                    servers.extend(store.find(&all).map(|server| server.meta().name.clone()));
                }
                _ => {}
            }
        }
        let mut new = Vec::new();
        for name in servers {
            let before = self.unsupported_by_server.remove(&name).unwrap_or_default();
            let Some(Object::Server(server)) = store.object(Kind::Server, &name) else {
                continue;
            };
            let routes = LookupKey::Routes(ParentKind::Server, name.clone());
            let limits = LookupKey::Namespace(Kind::RateLimitPolicy, name.namespace.clone());
            let found = unserved::unsupported_by_server(server, store.find(&routes).chain(store.find(&limits)));
            let is_new = |part: &&(Kind, NamespacedName, UnservedPart)| !before.iter().any(|old| old.part == **part);
            new.extend(found.iter().filter(is_new).cloned());
            if !found.is_empty() {
                let counted = found.into_iter().map(|part| PartUnsupportedByServer {
                    _gauge_guard: metrics.unserved_guard(part.0, &part.1, part.2.field),
                    part,
                });
                self.unsupported_by_server.insert(name, counted.collect());
            }
        }
        new
    }

    /// Updates the metrics of Service addresses and of Services with routes.
    pub(in crate::cluster) fn update_service_metrics(
        &mut self,
        metrics: &Metrics,
        store: &Store,
        changed_keys: &AHashSet<LookupKey>,
    ) {
        for key in changed_keys {
            match key {
                LookupKey::Ip(_) => {
                    if store.find(key).any(|object| matches!(object, Object::Service(_))) {
                        self.addresses.insert(key.clone());
                    } else {
                        self.addresses.remove(key);
                    }
                }
                LookupKey::Routes(ParentKind::Service, service) => {
                    if store.find(key).next().is_none() {
                        self.routes.remove(key);
                    } else {
                        self.routes.entry(key.clone()).or_insert_with(|| {
                            let labels = Labels::new().with("namespace", &service.namespace);
                            GaugeGuard::new(metrics.routed_services.get(&labels))
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

    fn add_to_counts(&mut self, metrics: &Metrics, kind: Kind, namespace: &Arc<str>, change: i64) {
        let by_kind = self.by_kind.entry(kind).or_insert_with(|| CountGauge {
            gauge: kind.cache_size_gauge(&metrics.registry, &metrics.cluster),
            count: 0,
        });
        by_kind.add(change);
        if kind == Kind::Service {
            metrics.services.add(change);
        }
        let by_namespace = match self.by_namespace.entry((kind, namespace.clone())) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let Some(gauge) = metrics.policy_objects(kind, namespace) else {
                    return;
                };
                entry.insert(gauge)
            }
        };
        by_namespace.add(change);
    }
}
