//! Mirrors of headless Services whose pods have host names: a headless Service, and a Service for each of these pods.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset, Service};
use tulle_core::names::label;

use super::inputs::LocalCluster;
use super::objects::{has_label, is_mirror_of};
use crate::resources::meta::NamespacedName;

pub(super) fn is_headless(service: &Service) -> bool {
    let spec = service.spec.as_ref();
    spec.is_some_and(|spec| spec.cluster_ip.as_deref() == Some("None"))
}

/// The name of the mirror of a pod.
pub(super) fn pod_mirror(host_name: &str, cluster: &str, mirror: &NamespacedName) -> NamespacedName {
    NamespacedName::new(&*mirror.namespace, format!("{host_name}-{cluster}"))
}

/// Whether a Service is the mirror of a pod of this headless mirror.
pub(super) fn is_pod_mirror_of(service: &Service, cluster: &str, mirror: &NamespacedName) -> bool {
    is_mirror_of(&service.metadata, cluster) && has_label(&service.metadata, label::HEADLESS_MIRROR, &mirror.name)
}

/// The endpoints of a headless mirror: the host names of the pods, with the cluster IPs of the pods' mirrors. A pod whose mirror has
/// no cluster IP yet is left out. The endpoints are always ready: if the gateway is not alive, the endpoints of the pods' mirrors
/// are not ready.
pub(super) fn headless_subsets(
    host_names: &BTreeSet<String>,
    ports: Vec<EndpointPort>,
    cluster: &str,
    mirror: &NamespacedName,
    local: &LocalCluster,
) -> Vec<EndpointSubset> {
    let address = |host_name: &String| {
        let service = local.services.get(&pod_mirror(host_name, cluster, mirror))?;
        let ip = service.spec.as_ref()?.cluster_ip.clone()?;
        let is_assigned = is_pod_mirror_of(service, cluster, mirror) && !ip.is_empty();
        is_assigned.then(|| EndpointAddress {
            ip,
            hostname: Some(host_name.clone()),
            ..EndpointAddress::default()
        })
    };
    let addresses: Vec<_> = host_names.iter().filter_map(address).collect();
    match addresses.is_empty() {
        true => Vec::new(),
        false => vec![EndpointSubset {
            addresses: Some(addresses),
            not_ready_addresses: None,
            ports: Some(ports),
        }],
    }
}
