//! Finds Servers whose port name no selected workload declares. Such a Server applies to no port.

use std::sync::Arc;

use ahash::{AHashMap, AHashSet};

use crate::cluster::metrics::{GaugeGuard, Metrics};
use crate::cluster::store::objects::{LookupKey, Store};
use crate::resources::meta::NamespacedName;
use crate::resources::policy::server::Server;
use crate::resources::unsupported::{self, PortNameMatch, UnsupportedPart};
use crate::resources::{Kind, Object};

/// The Servers that select their port by name. Updated incrementally from changed pods, external workloads and Servers.
#[derive(Default)]
pub(in crate::cluster) struct UndeclaredPortNames {
    servers: AHashMap<NamespacedName, SelectedWorkloads>,
}

/// The workloads that a Server selects.
#[derive(Default)]
struct SelectedWorkloads {
    /// Whether each workload declares the Server's port.
    workloads: AHashMap<(Kind, NamespacedName), bool>,
    gauge_guard: Option<GaugeGuard>,
}

impl UndeclaredPortNames {
    /// Evaluates the changed objects, counts Servers that apply to no port, and returns those not reported before.
    pub(in crate::cluster) fn update(
        &mut self,
        metrics: &Metrics,
        store: &Store,
        changed_keys: &AHashSet<LookupKey>,
    ) -> Vec<(Kind, NamespacedName, UnsupportedPart)> {
        let mut affected_servers = self.remove_changed_servers(changed_keys);
        self.match_workloads(store, &affected_servers);
        for key in changed_keys {
            let LookupKey::Object(kind @ (Kind::Pod | Kind::ExternalWorkload), name) = key else {
                continue;
            };
            let workload = store.object(*kind, name);
            for server in servers_with_port_names(store, &name.namespace) {
                let port_match = workload.map_or(PortNameMatch::NotSelected, |workload| {
                    unsupported::match_port_name(server, workload)
                });
                self.update_workload(server, (*kind, name.clone()), port_match);
                affected_servers.insert(server.meta.name.clone());
            }
        }
        let affected_servers = affected_servers.iter().filter_map(|name| {
            let Some(Object::Server(server)) = store.object(Kind::Server, name) else {
                return None;
            };
            let found = self.update_metric(metrics, server)?;
            Some((Kind::Server, name.clone(), found))
        });
        affected_servers.collect()
    }

    /// Removes the state of changed Servers, which is built again, and returns their names.
    fn remove_changed_servers(&mut self, changed_keys: &AHashSet<LookupKey>) -> AHashSet<NamespacedName> {
        let mut servers = AHashSet::new();
        for key in changed_keys {
            if let LookupKey::Object(Kind::Server, name) = key {
                self.servers.remove(name);
                servers.insert(name.clone());
            }
        }
        servers
    }

    /// Finds the workloads of the Servers that select their port by name.
    fn match_workloads(&mut self, store: &Store, servers: &AHashSet<NamespacedName>) {
        for name in servers {
            let Some(Object::Server(server)) = store.object(Kind::Server, name) else {
                continue;
            };
            if server.port_name().is_none() {
                continue;
            }
            for workload in store.workloads(&name.namespace) {
                let port_match = unsupported::match_port_name(server, workload);
                if port_match != PortNameMatch::NotSelected {
                    self.update_workload(server, (workload.kind(), workload.meta().name.clone()), port_match);
                }
            }
        }
    }

    fn update_workload(&mut self, server: &Server, workload: (Kind, NamespacedName), port_match: PortNameMatch) {
        let name = &server.meta.name;
        if port_match != PortNameMatch::NotSelected {
            let selected = self.servers.entry(name.clone()).or_default();
            let declares_port = port_match == PortNameMatch::Declared;
            selected.workloads.insert(workload, declares_port);
            return;
        }
        if let Some(selected) = self.servers.get_mut(name) {
            selected.workloads.remove(&workload);
            if selected.workloads.is_empty() {
                self.servers.remove(name);
            }
        }
    }

    /// Counts a Server that applies to no port. Returns the reason if it was not counted before.
    fn update_metric(&mut self, metrics: &Metrics, server: &Server) -> Option<UnsupportedPart> {
        let selected = self.servers.get_mut(&server.meta.name)?;
        if selected.workloads.values().any(|declares_port| *declares_port) {
            selected.gauge_guard = None;
            return None;
        }
        if selected.gauge_guard.is_some() {
            return None;
        }
        let found = unsupported::undeclared_port_name(server.port_name()?);
        selected.gauge_guard = Some(metrics.unsupported_guard(Kind::Server, &server.meta.name, found.field));
        Some(found)
    }
}

/// Servers of a namespace that select their port by name.
fn servers_with_port_names<'a>(store: &'a Store, namespace: &Arc<str>) -> Vec<&'a Arc<Server>> {
    let all = LookupKey::Namespace(Kind::Server, namespace.clone());
    let servers = store.find(&all).filter_map(|object| match object {
        Object::Server(server) => Some(server),
        _ => None,
    });
    servers.filter(|server| server.port_name().is_some()).collect()
}
