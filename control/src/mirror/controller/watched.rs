//! The watched objects of both clusters.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Endpoints, Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::Store;
use parking_lot::Mutex;
use tokio::sync::watch;
use tulle_core::names::multicluster::PROBE_PORT;

use crate::kubernetes::event_recorder::EventRecorder;
use crate::kubernetes::watches::{Watches, is_listed};
use crate::mirror::exported_endpoints::{ExportedEndpoints, endpoints_by_service};
use crate::mirror::gateway::{ProbeService, ProbeTarget};
use crate::mirror::link::Link;
use crate::mirror::plan::inputs::{ExportingCluster, LinkAge, LocalCluster};
use crate::mirror::plan::objects::object_name;
use crate::resources::meta::NamespacedName;

/// The watched objects of this cluster.
pub(super) struct LocalObjects {
    pub(super) watches: Watches,
    pub(super) services: Store<Service>,
    /// The Endpoints that the mirror controllers wrote. `None` without a Link, because federated Services have no Endpoints.
    pub(super) endpoints: Option<Store<Endpoints>>,
    pub(super) namespaces: Store<PartialObjectMeta<Namespace>>,
    /// The Links of all namespaces.
    pub(super) links: Store<DynamicObject>,
    /// The Links of `namespace`. Watched instead of `links` if the account may not read the Links of other namespaces.
    pub(super) own_links: Store<DynamicObject>,
    /// The namespace of the Link that is mirrored.
    pub(super) namespace: String,
    /// The last result of [`cluster`](Self::cluster), with the number of the last change that it contains. The controllers of this
    /// process share it, so that it is computed only once after each change.
    pub(super) snapshot: Mutex<Option<(u64, Arc<LocalCluster>)>>,
}

/// The watched objects of the linked cluster.
pub(super) struct RemoteObjects {
    pub(super) watches: Watches,
    pub(super) services: Store<Service>,
    pub(super) slices: Store<EndpointSlice>,
    /// Watched instead of `slices` if the account may not read EndpointSlices.
    pub(super) endpoints: Store<Endpoints>,
    pub(super) events: EventRecorder,
}

impl LocalObjects {
    pub(super) fn is_listed(&self) -> bool {
        is_listed(&self.services)
            && self.endpoints.as_ref().is_none_or(is_listed)
            && is_listed(&self.namespaces)
            && self.are_links_listed()
    }

    pub(super) fn are_links_listed(&self) -> bool {
        is_listed(&self.links) || is_listed(&self.own_links)
    }

    /// The known Links, which are those of all namespaces if the account may read them.
    fn known_links(&self) -> Vec<Arc<DynamicObject>> {
        match is_listed(&self.links) {
            true => self.links.state(),
            false => self.own_links.state(),
        }
    }

    pub(super) fn link_object(&self, name: &str) -> Option<Arc<DynamicObject>> {
        let is_own = |link: &Arc<DynamicObject>| {
            link.metadata.namespace.as_ref() == Some(&self.namespace) && link.name_any() == name
        };
        self.known_links().into_iter().find(is_own)
    }

    /// The Link with this name, or the cause why its cluster is not mirrored. `None` if there is no such Link.
    pub(super) fn link(&self, name: &str) -> Option<Result<Link, String>> {
        let object = self.link_object(name)?;
        let link = Link::parse(&object).map_err(|err| err.to_string());
        Some(link.and_then(|link| match self.older_link(&object) {
            Some(older) => Err(format!("the older Link {older} names the same cluster")),
            None => Ok(link),
        }))
    }

    /// The oldest Link of this namespace that names the same cluster, if it is not this one. Only the oldest Link is mirrored;
    /// otherwise both Links would write the same mirrors. Links of other namespaces do not count: whoever may create one there must
    /// not be able to stop this one.
    fn older_link(&self, link: &DynamicObject) -> Option<NamespacedName> {
        let own = link_age(link)?;
        let links = self.known_links();
        let ages = links.iter().filter_map(|link| link_age(link));
        let same_cluster = ages.filter(|other| other.cluster == own.cluster && other.namespace == own.namespace);
        let oldest = same_cluster.min()?;
        (oldest < own).then(|| NamespacedName::new(&*oldest.namespace, &*oldest.name))
    }

    /// The name of the cluster in metrics. If the Link names no cluster, or that of an older Link, it is `namespace/name` of the
    /// Link, which is not the name of a cluster.
    pub(super) fn metrics_cluster(&self, link: &DynamicObject) -> String {
        match self.older_link(link) {
            Some(_) => object_name(&link.metadata).to_string(),
            None => Link::metrics_cluster(link),
        }
    }

    /// Waits until the Link differs from `before`. Changes of its status are ignored.
    pub(super) async fn wait_until_changed(&self, name: &str, before: &Option<Result<Link, String>>) {
        let mut changes = self.watches.changes();
        while self.link(name) == *before {
            wait_for_change(&mut changes).await;
        }
    }

    pub(super) fn cluster(&self) -> Arc<LocalCluster> {
        let mut snapshot = self.snapshot.lock();
        // Read before the objects, so that no later change is missed.
        let change = *self.watches.changes().borrow();
        match &*snapshot {
            Some((known, cluster)) if *known == change => cluster.clone(),
            _ => {
                let cluster = Arc::new(self.new_snapshot());
                *snapshot = Some((change, cluster.clone()));
                cluster
            }
        }
    }

    fn new_snapshot(&self) -> LocalCluster {
        let is_active = |namespace: &Arc<PartialObjectMeta<Namespace>>| namespace.metadata.deletion_timestamp.is_none();
        let namespaces = self.namespaces.state().into_iter().filter(is_active);
        LocalCluster {
            services: by_name(self.services.state()).collect(),
            endpoints: by_name(self.endpoints.as_ref().map_or_else(Vec::new, Store::state)).collect(),
            namespaces: namespaces.map(|namespace| namespace.name_any()).collect(),
            links: self.known_links().iter().filter_map(|link| link_age(link)).collect(),
        }
    }
}

impl RemoteObjects {
    pub(super) fn is_listed(&self) -> bool {
        is_listed(&self.services) && (is_listed(&self.slices) || is_listed(&self.endpoints))
    }

    pub(super) fn cluster(&self) -> ExportingCluster {
        let exported = |(name, endpoints): (_, Arc<Endpoints>)| (name, ExportedEndpoints::from(&*endpoints));
        ExportingCluster {
            services: by_name(self.services.state()).collect(),
            endpoints: match is_listed(&self.slices) {
                true => endpoints_by_service(self.slices.state()),
                false => by_name(self.endpoints.state()).map(exported).collect(),
            },
        }
    }
}

/// The Service through which the gateway is probed. Probes are sent to its cluster IP, so no name has to be resolved.
pub(super) fn probe_service(service: Option<&Arc<Service>>) -> ProbeService {
    let target = service.and_then(|service| probe_target(service));
    target.map_or(ProbeService::Absent, ProbeService::Present)
}

fn probe_target(service: &Service) -> Option<ProbeTarget> {
    let spec = service.spec.as_ref()?;
    let mut ports = spec.ports.iter().flatten();
    let port = ports.find(|port| port.name.as_deref() == Some(PROBE_PORT))?;
    let name = object_name(&service.metadata);
    Some(ProbeTarget {
        host: format!("{}.{}", name.name, name.namespace),
        ip: spec.cluster_ip.as_ref()?.parse().ok()?,
        port: u16::try_from(port.port).ok()?,
    })
}

/// The age of a Link that names a cluster. Other fields may be invalid, because the mirrors of an invalid Link stay.
fn link_age(object: &DynamicObject) -> Option<LinkAge> {
    Some(LinkAge {
        cluster: Link::cluster_name(object)?.to_owned(),
        created_at: object.creation_timestamp(),
        name: object.name_any(),
        namespace: object.namespace().unwrap_or_default(),
    })
}

pub(super) fn by_name<K: kube::Resource>(objects: Vec<Arc<K>>) -> impl Iterator<Item = (NamespacedName, Arc<K>)> {
    objects.into_iter().map(|object| (object_name(object.meta()), object))
}

/// Waits for a change. Never returns after the sender was dropped.
pub(super) async fn wait_for_change<T>(changes: &mut watch::Receiver<T>) {
    if changes.changed().await.is_err() {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::reflector::store::Writer;
    use kube::runtime::watcher::Event;
    use serde_json::json;

    use super::*;

    /// The objects of a cluster with these Links, each one as `namespace/name cluster`, from the oldest to the youngest.
    fn local(links: [&str; 2]) -> LocalObjects {
        let mut writer = Writer::<DynamicObject>::new(Link::resource());
        writer.apply_watcher_event(&Event::Init);
        for (second, link) in links.into_iter().enumerate() {
            let (name, cluster) = link.split_once(' ').unwrap();
            let (namespace, name) = name.split_once('/').unwrap();
            let object = json!({
                "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
                "metadata": {
                    "name": name, "namespace": namespace, "creationTimestamp": format!("2026-01-01T00:00:0{second}Z"),
                },
                "spec": {
                    "targetClusterName": cluster, "targetClusterDomain": "test", "clusterCredentialsSecret": "cred",
                },
            });
            writer.apply_watcher_event(&Event::InitApply(serde_json::from_value(object).unwrap()));
        }
        writer.apply_watcher_event(&Event::InitDone);
        LocalObjects {
            watches: Watches::new("local"),
            services: Writer::new(()).as_reader(),
            endpoints: None,
            namespaces: Writer::new(()).as_reader(),
            links: writer.as_reader(),
            own_links: Writer::new(Link::resource()).as_reader(),
            namespace: "mesh".to_owned(),
            snapshot: Mutex::default(),
        }
    }

    #[test]
    fn links_of_other_namespaces_count_as_links_of_their_cluster() {
        let local = local(["other/to-west west", "mesh/to-east east"]);
        let cluster = local.cluster();
        let mut linked: Vec<_> = cluster.links.iter().map(|link| &*link.cluster).collect();
        linked.sort_unstable();
        assert_eq!(linked, ["east", "west"]);
        assert_eq!(local.link("to-east").unwrap().unwrap().cluster, "east");
        // It is mirrored by the service mirror of its namespace.
        assert_eq!(local.link("to-west"), None);
    }

    #[test]
    fn of_two_links_to_a_cluster_in_one_namespace_the_older_is_mirrored() {
        let younger = local(["mesh/first east", "mesh/to-east east"]);
        let cause = "the older Link mesh/first names the same cluster".to_owned();
        assert_eq!(younger.link("to-east"), Some(Err(cause)));
        // Its metrics are not those of the older Link.
        let metrics_cluster = |local: &LocalObjects| local.metrics_cluster(&local.link_object("to-east").unwrap());
        assert_eq!(metrics_cluster(&younger), "mesh/to-east");
        // An older Link of another namespace does not stop it.
        for links in [
            ["mesh/to-east east", "mesh/second east"],
            ["other/first east", "mesh/to-east east"],
        ] {
            let mirrored = local(links);
            assert!(mirrored.link("to-east").unwrap().is_ok(), "{links:?}");
            assert_eq!(metrics_cluster(&mirrored), "east", "{links:?}");
        }
    }

    #[test]
    fn probes_are_sent_to_the_port_of_the_probe_service_and_not_to_that_of_the_gateway() {
        let target = |ports: serde_json::Value| {
            let service = json!({
                "metadata": {"name": "probe-east", "namespace": "multicluster"},
                "spec": {"clusterIP": "10.9.0.7", "ports": ports},
            });
            let service: Service = serde_json::from_value(service).unwrap();
            match probe_service(Some(&Arc::new(service))) {
                ProbeService::Present(target) => Some((target.host, target.ip.to_string(), target.port)),
                ProbeService::Absent => None,
                ProbeService::Unknown => panic!("the Service is known"),
            }
        };
        let ports = json!([{"name": "other", "port": 4143}, {"name": "mc-probe", "port": 4191}]);
        let expected = ("probe-east.multicluster".to_owned(), "10.9.0.7".to_owned(), 4191);
        assert_eq!(target(ports), Some(expected));
        assert_eq!(target(json!([{"name": "other", "port": 4143}])), None);
    }
}
