//! What mirrors need to know of the endpoints of an exported Service. It is read from EndpointSlices, or from Endpoints if the
//! account may not read EndpointSlices.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{EndpointAddress, Endpoints};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::api::ObjectMeta;
use tulle_core::names::label;

use crate::resources::meta::NamespacedName;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ExportedEndpoints {
    pub(super) has_ready_address: bool,
    pub(super) pods: Pods,
    /// The resource version of the Endpoints, or of the EndpointSlice that was written last.
    pub(super) resource_version: Option<String>,
}

/// The pods of an exported Service.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Pods {
    /// Pods with host names. The set has the host names of ready pods, and is empty if no such pod is ready.
    WithHostNames(BTreeSet<String>),
    WithoutHostNames,
    /// There is no pod, so it is unknown whether pods have host names.
    #[default]
    None,
}

/// An address, which belongs to a pod.
struct Address<'a> {
    is_ready: bool,
    host_name: Option<&'a String>,
}

/// The endpoints of each Service. A pod can be in several slices of its Service, also twice while a slice is split.
pub(super) fn endpoints_by_service(
    slices: impl IntoIterator<Item = Arc<EndpointSlice>>,
) -> HashMap<NamespacedName, ExportedEndpoints> {
    let mut services: HashMap<NamespacedName, ExportedEndpoints> = HashMap::new();
    for slice in slices {
        let labels = slice.metadata.labels.as_ref();
        let service = labels.and_then(|labels| labels.get(label::SERVICE_NAME));
        // Addresses of pods are never domain names.
        let Some(service) = service.filter(|_| slice.address_type != "FQDN") else {
            continue;
        };
        let namespace = slice.metadata.namespace.as_deref().unwrap_or_default();
        let exported = services.entry(NamespacedName::new(namespace, &**service)).or_default();
        exported.update_version(&slice.metadata);
        for endpoint in &slice.endpoints {
            exported.add(Address {
                is_ready: is_ready(endpoint),
                host_name: endpoint.hostname.as_ref(),
            });
        }
    }
    services
}

/// Whether an endpoint gets traffic. An endpoint that terminates is not ready.
fn is_ready(endpoint: &Endpoint) -> bool {
    let conditions = endpoint.conditions.as_ref();
    conditions.and_then(|conditions| conditions.ready) != Some(false)
}

impl From<&Endpoints> for ExportedEndpoints {
    fn from(endpoints: &Endpoints) -> Self {
        let mut exported = Self::default();
        exported.update_version(&endpoints.metadata);
        for subset in endpoints.subsets.iter().flatten() {
            for (addresses, is_ready) in [(&subset.addresses, true), (&subset.not_ready_addresses, false)] {
                for address in addresses.iter().flatten() {
                    exported.add(Address {
                        is_ready,
                        host_name: address.hostname.as_ref(),
                    });
                }
            }
        }
        exported
    }
}

impl ExportedEndpoints {
    fn update_version(&mut self, metadata: &ObjectMeta) {
        let number = |version: &Option<String>| version.as_ref().and_then(|version| version.parse::<u64>().ok());
        if number(&metadata.resource_version) >= number(&self.resource_version) {
            self.resource_version.clone_from(&metadata.resource_version);
        }
    }

    fn add(&mut self, address: Address<'_>) {
        self.has_ready_address |= address.is_ready;
        let Some(host_name) = address.host_name else {
            if self.pods == Pods::None {
                self.pods = Pods::WithoutHostNames;
            }
            return;
        };
        let mut ready = match mem::take(&mut self.pods) {
            Pods::WithHostNames(ready) => ready,
            Pods::WithoutHostNames | Pods::None => BTreeSet::new(),
        };
        if address.is_ready {
            ready.insert(host_name.clone());
        }
        self.pods = Pods::WithHostNames(ready);
    }
}

/// Removes all data of an EndpointSlice except its Service, its host names, and whether an endpoint is ready.
pub(super) fn prune_slice(slice: &mut EndpointSlice) {
    let mut labels = slice.metadata.labels.take().unwrap_or_default();
    let service = labels.remove_entry(label::SERVICE_NAME);
    prune_metadata(&mut slice.metadata);
    slice.metadata.labels = Some(BTreeMap::from_iter(service));
    slice.ports = None;
    // Without a host name, one ready endpoint and one that is not ready say as much as all.
    let (mut has_ready, mut has_not_ready) = (false, false);
    slice.endpoints.retain(|endpoint| {
        let is_known = match is_ready(endpoint) {
            true => mem::replace(&mut has_ready, true),
            false => mem::replace(&mut has_not_ready, true),
        };
        endpoint.hostname.is_some() || !is_known
    });
    slice.endpoints.shrink_to_fit();
    for endpoint in &mut slice.endpoints {
        *endpoint = Endpoint {
            hostname: endpoint.hostname.take(),
            conditions: endpoint.conditions.take(),
            ..Endpoint::default()
        };
    }
}

/// Removes all data of Endpoints except their host names, and whether an address is ready.
pub(super) fn prune_endpoints(endpoints: &mut Endpoints) {
    prune_metadata(&mut endpoints.metadata);
    for subset in endpoints.subsets.iter_mut().flatten() {
        subset.ports = None;
        prune_addresses(&mut subset.addresses);
        prune_addresses(&mut subset.not_ready_addresses);
    }
}

fn prune_metadata(metadata: &mut ObjectMeta) {
    *metadata = ObjectMeta {
        name: metadata.name.take(),
        namespace: metadata.namespace.take(),
        resource_version: metadata.resource_version.take(),
        uid: metadata.uid.take(),
        ..ObjectMeta::default()
    };
}

/// Keeps the first address without a host name, and all addresses with a host name.
fn prune_addresses(addresses: &mut Option<Vec<EndpointAddress>>) {
    let Some(addresses) = addresses else { return };
    let mut is_first = true;
    addresses.retain(|address| address.hostname.is_some() || mem::take(&mut is_first));
    addresses.shrink_to_fit();
    for address in addresses {
        address.target_ref = None;
        address.node_name = None;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A slice of the Service `shop/web`. Each endpoint is a state, and can have a host name.
    fn slice(version: &str, endpoints: &[&str]) -> Value {
        let endpoints: Vec<_> = endpoints.iter().map(|endpoint| parse_endpoint(endpoint)).collect();
        json!({
            "metadata": {
                "namespace": "shop", "resourceVersion": version,
                "labels": {"kubernetes.io/service-name": "web", "other": "x"},
            },
            "addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 8080}],
        })
    }

    fn parse_endpoint(text: &str) -> Value {
        let mut words = text.split(' ');
        let conditions = match words.next().unwrap() {
            "ready" => json!({"ready": true, "serving": true, "terminating": false}),
            "unready" => json!({"ready": false}),
            "terminating" => json!({"ready": false, "serving": true, "terminating": true}),
            "unknown" => json!({}),
            other => panic!("{other}"),
        };
        json!({"addresses": ["10.1.0.1"], "conditions": conditions, "hostname": words.next(), "nodeName": "a"})
    }

    /// The endpoints of `shop/web` in these slices. Checks that those of pruned slices are the same.
    fn exported(slices: &[Value]) -> Option<ExportedEndpoints> {
        let slices = slices
            .iter()
            .map(|slice| serde_json::from_value::<EndpointSlice>(slice.clone()).unwrap());
        let mut slices: Vec<_> = slices.collect();
        let name = NamespacedName::new("shop", "web");
        let found = endpoints_by_service(slices.iter().cloned().map(Arc::new)).remove(&name);
        slices.iter_mut().for_each(prune_slice);
        let pruned = endpoints_by_service(slices.into_iter().map(Arc::new)).remove(&name);
        assert_eq!(pruned, found);
        found
    }

    #[test]
    fn the_slices_of_a_service_are_joined() {
        let with_host_names = |ready: &[&str]| Pods::WithHostNames(ready.iter().map(ToString::to_string).collect());
        for (slices, has_ready_address, pods) in [
            (vec![slice("1", &[])], false, Pods::None),
            (vec![slice("1", &["unknown"])], true, Pods::WithoutHostNames),
            (vec![slice("1", &["terminating"])], false, Pods::WithoutHostNames),
            (vec![slice("1", &["terminating db-0"])], false, with_host_names(&[])),
            (
                vec![
                    slice("1", &["unready", "unready"]),
                    slice("2", &["unready", "ready", "ready"]),
                ],
                true,
                Pods::WithoutHostNames,
            ),
            // While a slice is split, a pod can be in both parts, and one of them can be outdated.
            (
                vec![
                    slice("1", &["ready", "unready db-0", "ready db-1"]),
                    slice("2", &["ready db-0", "ready db-1", "unready db-2", "unready"]),
                ],
                true,
                with_host_names(&["db-0", "db-1"]),
            ),
        ] {
            let found = exported(&slices).unwrap();
            assert_eq!(found.has_ready_address, has_ready_address, "{slices:?}");
            assert_eq!(found.pods, pods, "{slices:?}");
        }
    }

    #[test]
    fn the_version_is_that_of_the_slice_that_was_written_last() {
        let slices = ["9", "10", "8"].map(|version| slice(version, &["ready"]));
        let found = exported(&slices).unwrap();
        assert_eq!(found.resource_version.as_deref(), Some("10"));
    }

    #[test]
    fn slices_of_other_services_and_those_with_domain_names_are_left_out() {
        let all = slice("1", &["ready"]);
        assert!(exported(std::slice::from_ref(&all)).is_some());
        for (path, value) in [
            ("/addressType", "FQDN"),
            ("/metadata/namespace", "bank"),
            ("/metadata/labels/kubernetes.io~1service-name", "api"),
        ] {
            let mut other = all.clone();
            *other.pointer_mut(path).unwrap() = value.into();
            assert_eq!(exported(&[other]), None, "{path}");
        }
        let mut unlabelled = all;
        unlabelled["metadata"]["labels"] = Value::Null;
        assert_eq!(exported(&[unlabelled]), None);
    }
}
