//! The Service through which the gateway of a Link is probed, if no chart creates it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Service, ServicePort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use tulle_core::dns_names::is_dns_label;
use tulle_core::names::multicluster::PROBE_PORT;
use tulle_core::names::{label, port};

use super::link::Link;
use super::plan::objects::new_service;
use crate::resources::meta::NamespacedName;

/// The Service as the chart creates it, with the Link as its owner: Kubernetes deletes it with the Link. `None` if it cannot have this
/// name, or if the Link is not stored.
pub(super) fn new_probe_service(link: &DynamicObject, name: &NamespacedName) -> Option<Service> {
    if !is_dns_label(&name.name) {
        return None;
    }
    let resource = Link::resource();
    let owner = OwnerReference {
        api_version: resource.api_version,
        kind: resource.kind,
        name: link.name_any(),
        uid: link.uid()?,
        ..OwnerReference::default()
    };
    let labels = [
        (label::EXTENSION, "multicluster".to_owned()),
        (label::MIRRORED_GATEWAY, "true".to_owned()),
        (label::MIRRORED_CLUSTER, Link::metrics_cluster(link)),
    ];
    let labels = labels.map(|(name, value)| (name.to_owned(), value));
    // The number is that of the chart. The endpoints map it to the port of the gateway.
    let port = ServicePort {
        name: Some(PROBE_PORT.to_owned()),
        port: port::ADMIN.into(),
        protocol: Some("TCP".to_owned()),
        ..ServicePort::default()
    };
    let mut service = new_service(name, BTreeMap::from(labels), BTreeMap::new(), vec![port]);
    service.metadata.owner_references = Some(vec![owner]);
    Some(service)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_service_belongs_to_its_link() {
        let link = json!({
            "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
            "metadata": {"name": "to-east", "namespace": "multicluster", "uid": "7"},
            "spec": {"targetClusterName": "east"},
        });
        let link: DynamicObject = serde_json::from_value(link).unwrap();
        let created = |name: &str| new_probe_service(&link, &NamespacedName::new("multicluster", name));
        let service = serde_json::to_value(created("mirror-probe-to-east").unwrap()).unwrap();
        let labels = json!({
            "linkerd.io/extension": "multicluster", "mirror.linkerd.io/cluster-name": "east",
            "mirror.linkerd.io/mirrored-gateway": "true",
        });
        let owner = json!({
            "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link", "name": "to-east", "uid": "7",
        });
        assert_eq!(service["metadata"]["labels"], labels);
        assert_eq!(service["metadata"]["ownerReferences"], json!([owner]));
        assert_eq!(
            service["spec"]["ports"],
            json!([{"name": "mc-probe", "port": 4191, "protocol": "TCP"}])
        );
        assert!(created("mirror-probe-to.east").is_none());
    }
}
