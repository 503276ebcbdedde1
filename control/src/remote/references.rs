//! The clusters to which Services of this cluster refer.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::resources::event::{Event, EventSink};
use crate::resources::meta::NamespacedName;
use crate::resources::service::Service;
use crate::resources::{Kind, Object, remote_discovery};

/// The names of the clusters to which Services refer, current as of the last event.
pub struct ReferencedClusters(watch::Receiver<BTreeSet<Arc<str>>>);

impl ReferencedClusters {
    /// Returns a sink that forwards events to `sink`, and the clusters to which the Services in these events refer.
    pub fn from_events(sink: EventSink) -> (EventSink, Self) {
        let (sender, receiver) = watch::channel(BTreeSet::new());
        let counts = Mutex::new(Counts::default());
        let recorder = EventSink::new(move |events| {
            let mut counts = counts.lock();
            for event in events {
                counts.apply(&event);
            }
            sender.send_if_modified(|sent| {
                let is_changed = !counts.by_cluster.keys().eq(sent.iter());
                if is_changed {
                    *sent = counts.by_cluster.keys().cloned().collect();
                }
                is_changed
            });
        });
        let is_service = |event: &Event| event.kind() == Some(Kind::Service);
        (sink.tee(is_service, recorder), Self(receiver))
    }

    pub(super) fn current(&mut self) -> BTreeSet<Arc<str>> {
        self.0.borrow_and_update().clone()
    }

    pub(super) async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            // The source has ended, so the process is about to end.
            std::future::pending::<()>().await;
        }
    }
}

#[derive(Default)]
struct Counts {
    /// The clusters that a Service refers to. Services without a reference are not listed.
    by_service: HashMap<NamespacedName, BTreeSet<Arc<str>>>,
    /// The number of Services that refer to each cluster.
    by_cluster: BTreeMap<Arc<str>, usize>,
}

impl Counts {
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
            *self.by_cluster.entry(cluster.clone()).or_default() += 1;
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
                }
            }
        }
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
        let annotations = json!({"multicluster.linkerd.io/remote-discovery": members});
        let metadata = json!({"name": name, "namespace": "shop", "annotations": annotations});
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
}
