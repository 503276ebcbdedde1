//! The Servers of each namespace by a label that their selector requires, so that a workload is compared only with Servers that may
//! select it.

use std::sync::Arc;

use ahash::AHashMap;

use crate::resources::interning::intern;
use crate::resources::labels::Labels;
use crate::resources::meta::NamespacedName;
use crate::resources::policy::server::Server;
use crate::resources::string_map::Entry;

#[derive(Default)]
pub(super) struct ServerIndex {
    namespaces: AHashMap<Arc<str>, Servers>,
}

/// Names of the Servers of a namespace. Each is in one list.
#[derive(Default)]
struct Servers {
    by_label: AHashMap<Entry, Vec<Arc<str>>>,
    /// Servers without a required label.
    others: Vec<Arc<str>>,
}

impl ServerIndex {
    pub(super) fn insert(&mut self, server: &Server) {
        let servers = self.namespaces.entry(server.meta.namespace().clone()).or_default();
        let names = match required_label(server) {
            Some(label) => servers.by_label.entry(label).or_default(),
            None => &mut servers.others,
        };
        names.push(server.meta.name.name.clone());
    }

    pub(super) fn remove(&mut self, server: &Server) {
        let namespace = server.meta.namespace();
        let Some(servers) = self.namespaces.get_mut(namespace) else {
            return;
        };
        let is_other = |name: &Arc<str>| *name != server.meta.name.name;
        match required_label(server) {
            Some(label) => {
                if let Some(names) = servers.by_label.get_mut(&label) {
                    names.retain(is_other);
                    if names.is_empty() {
                        servers.by_label.remove(&label);
                    }
                }
            }
            None => servers.others.retain(is_other),
        }
        if servers.by_label.is_empty() && servers.others.is_empty() {
            self.namespaces.remove(namespace);
        }
    }

    /// Returns all Servers that select a workload with these labels, and possibly others.
    pub(super) fn candidates(&self, namespace: &Arc<str>, labels: &Labels) -> impl Iterator<Item = NamespacedName> {
        let servers = self.namespaces.get(namespace);
        let with_label = move |label| servers.and_then(|servers| servers.by_label.get(label));
        let by_label = labels.entries().iter().filter_map(with_label).flatten();
        let others = servers.into_iter().flat_map(|servers| &servers.others);
        by_label
            .chain(others)
            .map(|name| NamespacedName::new(namespace.clone(), name.clone()))
    }
}

fn required_label(server: &Server) -> Option<Entry> {
    let (key, value) = server.workloads.required_label()?;
    Some((intern(key), intern(value)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::resources::{Kind, Object, decode};

    const SELECTORS: [&str; 6] = [
        r#"{"podSelector":{}}"#,
        r#"{"podSelector":{"matchLabels":{"app":"web"}}}"#,
        r#"{"podSelector":{"matchLabels":{"app":"web","tier":"front"}}}"#,
        r#"{"podSelector":{"matchExpressions":[{"key":"app","operator":"In","values":["web","api"]}]}}"#,
        r#"{"podSelector":{"matchExpressions":[{"key":"tier","operator":"Exists"}]}}"#,
        r#"{"externalWorkloadSelector":{"matchLabels":{"tier":"front"}}}"#,
    ];

    fn server(name: usize, selector: usize) -> Arc<Server> {
        let mut spec: Value = serde_json::from_str(SELECTORS[selector]).unwrap();
        spec["port"] = json!(80);
        let object = json!({"metadata": {"name": format!("s{name}"), "namespace": "shop"}, "spec": spec}).to_string();
        match decode(Kind::Server, &mut serde_json::Deserializer::from_str(&object)).unwrap() {
            Object::Server(server) => server,
            other => panic!("{other:?}"),
        }
    }

    fn selects(server: &Server, labels: &Labels) -> bool {
        server.workloads.selects_pod(labels) || server.workloads.selects_external_workload(labels)
    }

    proptest! {
        #[test]
        fn the_candidates_contain_each_server_that_selects_the_workload_once(
            steps in prop::collection::vec((0..4usize, 0..SELECTORS.len(), any::<bool>()), 1..30),
            app in prop::option::of(prop::sample::select(vec!["web", "api", "db"])),
            tier in prop::option::of(prop::sample::select(vec!["front", "back"])),
        ) {
            let (mut index, mut held) = (ServerIndex::default(), AHashMap::<usize, Arc<Server>>::new());
            for (name, selector, is_applied) in steps {
                if let Some(before) = held.remove(&name) {
                    index.remove(&before);
                }
                if is_applied {
                    let server = server(name, selector);
                    index.insert(&server);
                    held.insert(name, server);
                }
            }
            let pairs = [("app", app), ("tier", tier)];
            let labels: Labels = pairs.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
            let mut candidates: Vec<_> = index.candidates(&"shop".into(), &labels).collect();
            candidates.sort();
            for server in held.values().filter(|server| selects(server, &labels)) {
                prop_assert!(candidates.contains(&server.meta.name), "{:?}", server.workloads);
            }
            let n_candidates = candidates.len();
            candidates.dedup();
            prop_assert_eq!(candidates.len(), n_candidates);
            for server in held.into_values() {
                index.remove(&server);
            }
            prop_assert!(index.namespaces.is_empty());
        }
    }
}
