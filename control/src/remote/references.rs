//! The clusters to which Services of this cluster refer.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::mem;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::resources::event::{Event, EventSink};
use crate::resources::meta::NamespacedName;
use crate::resources::service::Service;
use crate::resources::{Kind, Object, remote_discovery};

/// The names of the clusters to which Services refer, current as of the last event.
pub struct ReferencedClusters {
    references: Arc<Mutex<References>>,
    changes: watch::Receiver<()>,
}

impl ReferencedClusters {
    /// Returns a sink that forwards events to `sink`, and the clusters to which the Services in these events refer.
    pub fn from_events(sink: EventSink) -> (EventSink, Self) {
        let (sender, changes) = watch::channel(());
        let references = Arc::new(Mutex::new(References::default()));
        let recorded = references.clone();
        let recorder = EventSink::new(move |events| {
            let mut references = recorded.lock();
            for event in events {
                references.apply(&event);
            }
            if mem::take(&mut references.is_changed) {
                sender.send_replace(());
            }
        });
        let is_service = |event: &Event| event.kind() == Some(Kind::Service);
        (sink.tee(is_service, recorder), Self { references, changes })
    }

    /// The clusters, in the order of [`References::in_fair_order`].
    pub(super) fn current(&mut self) -> Vec<Arc<str>> {
        self.changes.borrow_and_update();
        self.references.lock().in_fair_order()
    }

    pub(super) async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            // The source has ended, so the process is about to end.
            std::future::pending::<()>().await;
        }
    }
}

#[derive(Default)]
struct References {
    /// The clusters that a Service refers to. Services without a reference are not listed.
    by_service: HashMap<NamespacedName, BTreeSet<Arc<str>>>,
    /// The number of Services that refer to each cluster.
    by_cluster: HashMap<Arc<str>, usize>,
    /// Whether a cluster was added or removed since the last notification.
    is_changed: bool,
}

impl References {
    fn apply(&mut self, event: &Event) {
        match event {
            Event::Applied(Object::Service(service)) => {
                self.set_clusters(&service.meta.name, referenced_clusters(service))
            }
            Event::Deleted(_, name) => self.set_clusters(name, BTreeSet::new()),
            _ => {}
        }
    }

    fn set_clusters(&mut self, service: &NamespacedName, clusters: BTreeSet<Arc<str>>) {
        for cluster in &clusters {
            let count = self.by_cluster.entry(cluster.clone()).or_default();
            self.is_changed |= *count == 0;
            *count += 1;
        }
        let previous = if clusters.is_empty() {
            self.by_service.remove(service)
        } else {
            self.by_service.insert(service.clone(), clusters)
        };
        for cluster in previous.into_iter().flatten() {
            if let Some(count) = self.by_cluster.get_mut(&cluster) {
                *count -= 1;
                if *count == 0 {
                    self.by_cluster.remove(&cluster);
                    self.is_changed = true;
                }
            }
        }
    }

    /// The clusters in the order in which they are watched: those of namespaces that refer to few clusters come first, so that a
    /// namespace that refers to many delays no other.
    fn in_fair_order(&self) -> Vec<Arc<str>> {
        let mut by_namespace = HashMap::<&str, HashSet<&Arc<str>>>::new();
        for (service, clusters) in &self.by_service {
            by_namespace.entry(&service.namespace).or_default().extend(clusters);
        }
        // For each cluster, the smallest number of clusters to which a namespace with a reference to it refers.
        let mut ranks = BTreeMap::<&Arc<str>, usize>::new();
        for clusters in by_namespace.values() {
            for &cluster in clusters {
                let rank = ranks.entry(cluster).or_insert(usize::MAX);
                *rank = clusters.len().min(*rank);
            }
        }
        let mut ordered: Vec<_> = ranks.into_iter().map(|(cluster, rank)| (rank, cluster)).collect();
        ordered.sort_unstable();
        ordered.into_iter().map(|(_, cluster)| cluster.clone()).collect()
    }
}

fn referenced_clusters(service: &Service) -> BTreeSet<Arc<str>> {
    let discovery = remote_discovery::discovery(service);
    let services = discovery.iter().flat_map(|discovery| discovery.remote_services());
    services.map(|service| service.cluster.clone()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources::decode;

    fn service(name: &str, members: &str) -> Event {
        service_in("shop", name, members)
    }

    fn service_in(namespace: &str, name: &str, members: &str) -> Event {
        let annotations = json!({"multicluster.linkerd.io/remote-discovery": members});
        let metadata = json!({"name": name, "namespace": namespace, "annotations": annotations});
        Event::Applied(decode(Kind::Service, &json!({"metadata": metadata, "spec": {}})).unwrap())
    }

    fn deleted(name: &str) -> Event {
        Event::Deleted(Kind::Service, NamespacedName::new("shop", name))
    }

    #[test]
    fn a_cluster_is_referenced_while_a_service_names_it() {
        let (sink, mut references) = ReferencedClusters::from_events(EventSink::new(|_| {}));
        for (event, expected) in [
            (service("web", "web@east,web@north"), &["east", "north"][..]),
            (service("api", "api@east"), &["east", "north"]),
            (service("web", "web@north"), &["east", "north"]),
            (deleted("api"), &["north"]),
            (service("web", ""), &[]),
            (deleted("web"), &[]),
        ] {
            sink.apply(vec![event]);
            let current: Vec<_> = references.current().into_iter().collect();
            assert!(
                current.iter().map(|name| &**name).eq(expected.iter().copied()),
                "{current:?}"
            );
        }
    }

    #[test]
    fn clusters_of_namespaces_with_few_references_come_first() {
        let (sink, mut references) = ReferencedClusters::from_events(EventSink::new(|_| {}));
        sink.apply(vec![
            service_in("attacker", "one", "x@a,x@b"),
            service_in("attacker", "two", "x@c,x@north"),
            service_in("shop", "web", "web@east,web@north"),
            service_in("shop", "api", "api@north"),
            service_in("bank", "web", "web@west"),
        ]);
        let names: Vec<_> = references.current().iter().map(ToString::to_string).collect();
        assert_eq!(names, ["west", "east", "north", "a", "b", "c"]);
    }
}
