//! Finds Servers whose port name no selected workload declares. Such a Server applies to no port.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use ahash::{AHashMap, AHashSet};

use crate::cluster::metrics::{GaugeGuard, Metrics};
use crate::cluster::store::objects::{LookupKey, Store, server_keys};
use crate::resources::meta::NamespacedName;
use crate::resources::policy::server::Server;
use crate::resources::unserved::{self, PortNameMatch, UnservedPart};
use crate::resources::{Kind, Object};

/// The Servers that select their port by name. Updated incrementally from changed pods, external workloads and Servers.
#[derive(Default)]
pub(in crate::cluster) struct ServerPortNames {
    /// For each Server, the workloads that it selects, and whether the workload declares the port of the Server.
    servers: AHashMap<NamespacedName, AHashMap<WorkloadId, bool>>,
    /// The Servers that select a workload.
    servers_of_workload: AHashMap<WorkloadId, AHashSet<NamespacedName>>,
    /// The Servers that apply to no port, each with the unserved part that is counted.
    counted: AHashMap<NamespacedName, (UnservedPart, GaugeGuard)>,
}

type WorkloadId = (Kind, NamespacedName);

impl ServerPortNames {
    /// Evaluates the changed objects, counts Servers that apply to no port, and returns the parts that were not reported before.
    pub(in crate::cluster) fn update(
        &mut self,
        metrics: &Metrics,
        store: &Store,
        changed_keys: &AHashSet<LookupKey>,
    ) -> Vec<(Kind, NamespacedName, UnservedPart)> {
        let mut affected_servers = self.remove_changed_servers(changed_keys);
        self.match_workloads(store, &affected_servers);
        for key in changed_keys {
            let LookupKey::Object(kind @ (Kind::Pod | Kind::ExternalWorkload), name) = key else {
                continue;
            };
            affected_servers.extend(self.remove_workload(&(*kind, name.clone())));
            let Some(workload) = store.object(*kind, name) else {
                continue;
            };
            for server in servers_with_port_names(store, workload) {
                self.match_workload(server, workload);
                affected_servers.insert(server.meta.name.clone());
            }
        }
        let new_parts = affected_servers.into_iter().filter_map(|name| {
            let found = self.undeclared_port_name(store, &name);
            let new = self.update_metric(metrics, &name, found)?;
            Some((Kind::Server, name, new))
        });
        new_parts.collect()
    }

    /// Removes the selected workloads of changed Servers, and returns the names of these Servers. The caller matches their
    /// workloads again.
    fn remove_changed_servers(&mut self, changed_keys: &AHashSet<LookupKey>) -> AHashSet<NamespacedName> {
        let mut servers = AHashSet::new();
        for key in changed_keys {
            if let LookupKey::Object(Kind::Server, name) = key {
                for workload in self.servers.remove(name).unwrap_or_default().into_keys() {
                    if let Entry::Occupied(mut selecting) = self.servers_of_workload.entry(workload) {
                        selecting.get_mut().remove(name);
                        if selecting.get().is_empty() {
                            selecting.remove();
                        }
                    }
                }
                servers.insert(name.clone());
            }
        }
        servers
    }

    /// Removes a workload from the Servers that select it, and returns them.
    fn remove_workload(&mut self, workload: &WorkloadId) -> AHashSet<NamespacedName> {
        let servers = self.servers_of_workload.remove(workload).unwrap_or_default();
        for server in &servers {
            if let Entry::Occupied(mut selected) = self.servers.entry(server.clone()) {
                selected.get_mut().remove(workload);
                if selected.get().is_empty() {
                    selected.remove();
                }
            }
        }
        servers
    }

    /// Adds to each Server that selects its port by name the workloads that it selects.
    fn match_workloads(&mut self, store: &Store, servers: &AHashSet<NamespacedName>) {
        for name in servers {
            let Some(Object::Server(server)) = store.object(Kind::Server, name) else {
                continue;
            };
            if server.port_name().is_some() {
                for workload in store.workloads(&name.namespace) {
                    self.match_workload(server, workload);
                }
            }
        }
    }

    /// Adds the workload to the Server if the Server selects it.
    fn match_workload(&mut self, server: &Server, workload: &Object) {
        let port_match = unserved::match_port_name(server, workload);
        if port_match == PortNameMatch::NotSelected {
            return;
        }
        let name = &server.meta.name;
        let id = (workload.kind(), workload.meta().name.clone());
        let selecting = self.servers_of_workload.entry(id.clone()).or_default();
        selecting.insert(name.clone());
        let selected = self.servers.entry(name.clone()).or_default();
        selected.insert(id, port_match == PortNameMatch::Declared);
    }

    /// Returns the unserved part of a Server that selects workloads, none of which declares its port name. Otherwise, or if the
    /// Server does not exist, returns `None`.
    fn undeclared_port_name(&self, store: &Store, name: &NamespacedName) -> Option<UnservedPart> {
        let Some(Object::Server(server)) = store.object(Kind::Server, name) else {
            return None;
        };
        let is_declared = self.servers.get(name)?.values().any(|declares_port| *declares_port);
        match is_declared {
            true => None,
            false => Some(unserved::undeclared_port_name(server.port_name()?)),
        }
    }

    /// Counts a Server that applies to no port. Returns the unserved part if the same part was not counted before.
    fn update_metric(
        &mut self,
        metrics: &Metrics,
        name: &NamespacedName,
        found: Option<UnservedPart>,
    ) -> Option<UnservedPart> {
        let Some(found) = found else {
            self.counted.remove(name);
            return None;
        };
        if self.counted.get(name).is_some_and(|(counted, _)| *counted == found) {
            return None;
        }
        let guard = metrics.unserved_guard(Kind::Server, name, found.field);
        self.counted.insert(name.clone(), (found.clone(), guard));
        Some(found)
    }
}

/// The Servers that select their port by name and may select this workload.
fn servers_with_port_names<'a>(store: &'a Store, workload: &'a Object) -> impl Iterator<Item = &'a Arc<Server>> {
    let meta = workload.meta();
    let candidates = server_keys(meta.namespace(), &meta.labels).flat_map(|key| store.find(&key));
    let servers = candidates.filter_map(|object| match object {
        Object::Server(server) => Some(server),
        _ => None,
    });
    servers.filter(|server| server.port_name().is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tulle_core::metrics::Registry;

    use super::*;
    use crate::resources::decode;
    use crate::resources::event::Event;

    #[test]
    fn a_server_that_applies_to_no_port_is_reported_again_only_if_its_port_changes() {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry);
        let (mut store, mut undeclared) = (Store::default(), ServerPortNames::default());
        let mut update = |event: Event| {
            let mut changed_keys = AHashSet::new();
            store.apply(event, &mut changed_keys);
            let reported = undeclared.update(&metrics, &store, &changed_keys);
            let is_counted = registry.render().contains("field=\"spec.port\"} 1");
            (
                reported.into_iter().map(|(.., part)| part.reason).collect::<Vec<_>>(),
                is_counted,
            )
        };
        let object = |kind: Kind, name: &str, spec: Value| {
            let metadata = json!({"name": name, "namespace": "shop"});
            Event::Applied(decode(kind, &json!({"metadata": metadata, "spec": spec})).unwrap())
        };
        let server = |port: &str, policy: &str| {
            let spec = json!({"podSelector": {}, "port": port, "accessPolicy": policy});
            object(Kind::Server, "web", spec)
        };
        let reason = |port: &str| unserved::undeclared_port_name(port).reason;
        let none = Vec::<String>::new;
        let ports = |name: &str| json!({"containers": [{"name": "a", "ports": [{"name": name, "containerPort": 80}]}]});
        assert_eq!(update(object(Kind::Pod, "web-0", ports("http"))), (none(), false));
        assert_eq!(update(server("absent", "deny")), (vec![reason("absent")], true));
        assert_eq!(update(server("absent", "audit")), (none(), true));
        assert_eq!(update(server("later", "audit")), (vec![reason("later")], true));
        assert_eq!(update(object(Kind::Pod, "web-1", ports("later"))), (none(), false));
        assert_eq!(update(server("absent", "audit")), (vec![reason("absent")], true));
        let name = NamespacedName::new("shop", "web");
        assert_eq!(update(Event::Deleted(Kind::Server, name)), (none(), false));
        assert_eq!(update(server("absent", "audit")), (vec![reason("absent")], true));
    }
}
