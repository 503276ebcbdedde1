//! Servers that name a port which none of the workloads that they select declares: they hold for nothing.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::cluster::Follower;
use crate::cluster::metrics::Metrics;
use crate::cluster::store::{Fact, Store};
use crate::resources::meta::Name;
use crate::resources::policy::server::Server;
use crate::resources::unserved::{self, Unserved};
use crate::resources::{Kind, Object};

/// Follows pods, external workloads and Servers.
#[derive(Default)]
pub(super) struct NamedPorts {
    servers: HashMap<Name, Selected>,
}

/// The workloads that a Server selects.
#[derive(Default)]
struct Selected {
    /// Each with whether it declares the Server's port.
    workloads: HashMap<(Kind, Name), bool>,
    counted: Option<Follower>,
}

impl NamedPorts {
    /// Looks again at what was touched, counts Servers that hold for nothing, and returns those that are new.
    pub(super) fn judge(
        &mut self,
        metrics: &Metrics,
        store: &Store,
        touched: &HashSet<Fact>,
    ) -> Vec<(Kind, Name, Unserved)> {
        let mut concerned = self.forget_servers(touched);
        self.select(store, &concerned);
        for fact in touched {
            let Fact::Object(kind @ (Kind::Pod | Kind::ExternalWorkload), name) = fact else {
                continue;
            };
            let workload = store.object(*kind, name);
            for server in named(store, &name.namespace) {
                let declares = workload.and_then(|workload| unserved::declares_port_of(server, workload));
                self.note(server, (*kind, name.clone()), declares);
                concerned.insert(server.meta.name.clone());
            }
        }
        let concerned = concerned.iter().filter_map(|name| {
            let Some(Object::Server(server)) = store.object(Kind::Server, name) else {
                return None;
            };
            let found = self.count(metrics, server)?;
            Some((Kind::Server, name.clone(), found))
        });
        concerned.collect()
    }

    /// What is known of Servers that were touched is made anew.
    fn forget_servers(&mut self, touched: &HashSet<Fact>) -> HashSet<Name> {
        let mut servers = HashSet::new();
        for fact in touched {
            if let Fact::Object(Kind::Server, name) = fact {
                self.servers.remove(name);
                servers.insert(name.clone());
            }
        }
        servers
    }

    /// One pass over all objects, however many Servers there are.
    fn select(&mut self, store: &Store, servers: &HashSet<Name>) {
        let mut by_namespace: HashMap<&Arc<str>, Vec<&Arc<Server>>> = HashMap::new();
        for name in servers {
            if let Some(Object::Server(server)) = store.object(Kind::Server, name) {
                by_namespace.entry(&name.namespace).or_default().push(server);
            }
        }
        if by_namespace.is_empty() {
            return;
        }
        for object in store.all() {
            let Some(servers) = by_namespace.get(&object.meta().name.namespace) else {
                continue;
            };
            for server in servers {
                let declares = unserved::declares_port_of(server, object);
                if declares.is_some() {
                    self.note(server, (object.kind(), object.meta().name.clone()), declares);
                }
            }
        }
    }

    fn note(&mut self, server: &Server, workload: (Kind, Name), declares: Option<bool>) {
        let name = &server.meta.name;
        match (declares, self.servers.get_mut(name)) {
            (Some(declares), Some(selected)) => {
                selected.workloads.insert(workload, declares);
            }
            (Some(declares), None) => {
                let selected = self.servers.entry(name.clone()).or_default();
                selected.workloads.insert(workload, declares);
            }
            (None, Some(selected)) => {
                selected.workloads.remove(&workload);
                if selected.workloads.is_empty() {
                    self.servers.remove(name);
                }
            }
            (None, None) => {}
        }
    }

    /// Counts a Server that holds for nothing, and says why if it was not counted before.
    fn count(&mut self, metrics: &Metrics, server: &Server) -> Option<Unserved> {
        let selected = self.servers.get_mut(&server.meta.name)?;
        if selected.workloads.values().any(|declares| *declares) {
            selected.counted = None;
            return None;
        }
        if selected.counted.is_some() {
            return None;
        }
        let found = unserved::undeclared_port(server)?;
        selected.counted = Some(metrics.count_unserved(Kind::Server, &server.meta.name, found.field));
        Some(found)
    }
}

/// Servers of a namespace that name their port.
fn named<'a>(store: &'a Store, namespace: &Arc<str>) -> Vec<&'a Arc<Server>> {
    let all = Fact::In(Kind::Server, namespace.clone());
    let servers = store.under(&all).filter_map(|object| match object {
        Object::Server(server) => Some(server),
        _ => None,
    });
    servers
        .filter(|server| unserved::undeclared_port(server).is_some())
        .collect()
}
