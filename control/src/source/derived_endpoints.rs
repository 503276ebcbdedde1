//! Derives endpoints for a directory of manifests. A Service with Endpoints but no EndpointSlices gets slices derived from the
//! Endpoints. A Service with neither gets both, derived from the workloads that its selector matches. With an API server, the
//! controllers of Kubernetes do the same for pods, and write-back writes the slices of ExternalWorkloads.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ahash::AHashMap;
use tulle_core::names::label;

use crate::resources::Object;
use crate::resources::interning::intern;
use crate::resources::labels::Selector;
use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::service::{
    Address, AddressTarget, EndpointReadiness, EndpointSlice, Endpoints, IpFamily, NotReadyAddresses, PortRef, Service,
    ServiceKind, Subset, SubsetPort,
};
use crate::resources::workload::{ExternalWorkload, Pod, PodPhase};

/// The objects from which endpoints are derived.
#[derive(Default)]
struct ObjectIndex<'a> {
    services: Vec<&'a Service>,
    services_with_slices: BTreeSet<&'a NamespacedName>,
    endpoints: AHashMap<&'a NamespacedName, &'a Endpoints>,
    pods: AHashMap<&'a str, Vec<&'a Pod>>,
    workloads: AHashMap<&'a str, Vec<&'a ExternalWorkload>>,
    zones: AHashMap<&'a str, &'a Arc<str>>,
}

/// Returns the derived objects that `objects` does not contain.
pub(super) fn derive_endpoints<'a>(objects: impl Iterator<Item = &'a Object>) -> Vec<Object> {
    let mut index = ObjectIndex::default();
    objects.for_each(|object| index.add(object));
    let mut derived = Vec::new();
    for service in &index.services {
        let name = &service.meta.name;
        let existing = index.endpoints.get(name);
        if service.kind == ServiceKind::ExternalName || index.services_with_slices.contains(name) {
            continue;
        }
        let subsets = existing.map_or_else(|| index.select_subsets(service), |endpoints| endpoints.subsets.clone());
        if existing.is_none() {
            derived.push(Object::Endpoints(Arc::new(build_endpoints(service, &subsets))));
        }
        let slices = subsets
            .into_iter()
            .enumerate()
            .map(|(index, subset)| build_slice(service, existing.map(|endpoints| &endpoints.meta), index, subset));
        derived.extend(slices.map(|slice| Object::EndpointSlice(Arc::new(slice))));
    }
    derived
}

/// Builds the Endpoints of a Service. They contain only ready addresses.
fn build_endpoints(service: &Service, subsets: &[Subset]) -> Endpoints {
    let ready = |subset: &Subset| Subset {
        ports: subset.ports.clone(),
        addresses: subset
            .addresses
            .iter()
            .filter(|address| address.ready == EndpointReadiness::Ready)
            .cloned()
            .collect(),
    };
    let meta = Meta {
        name: service.meta.name.clone(),
        ..Meta::default()
    };
    Endpoints {
        meta,
        subsets: subsets.iter().map(ready).collect(),
    }
}

/// Builds a slice. As in Kubernetes, it has the labels and annotations of the Endpoints from which it is derived: those of a mirror
/// name the Service in the other cluster and the identity of the gateway.
fn build_slice(service: &Service, endpoints: Option<&Meta>, index: usize, subset: Subset) -> EndpointSlice {
    let name = &service.meta.name;
    let labels = endpoints.into_iter().flat_map(|meta| meta.labels.iter());
    let meta = Meta {
        name: NamespacedName::new(name.namespace.clone(), format!("{}-derived-{index}", name.name)),
        labels: labels.chain([(label::SERVICE_NAME, &*name.name)]).collect(),
        annotations: endpoints.map(|meta| meta.annotations.clone()).unwrap_or_default(),
        ..Meta::default()
    };
    EndpointSlice {
        meta,
        managed_object: None,
        service: Some(name.clone()),
        subset,
        has_fqdn_addresses: false,
    }
}

impl<'a> ObjectIndex<'a> {
    fn add(&mut self, object: &'a Object) {
        match object {
            Object::Service(service) => self.services.push(service),
            Object::EndpointSlice(slice) => self.services_with_slices.extend(&slice.service),
            Object::Endpoints(endpoints) => {
                self.endpoints.insert(&endpoints.meta.name, endpoints);
            }
            Object::Pod(pod) => self.pods.entry(&**pod.meta.namespace()).or_default().push(pod),
            Object::ExternalWorkload(workload) => {
                self.workloads
                    .entry(&**workload.meta.namespace())
                    .or_default()
                    .push(workload);
            }
            Object::Node(node) => {
                if let Some(zone) = &node.zone {
                    self.zones.insert(&node.meta.name.name, zone);
                }
            }
            _ => {}
        }
    }

    /// Returns the addresses of the selected workloads, grouped by IP family and resolved ports.
    fn select_subsets(&self, service: &Service) -> Vec<Subset> {
        if service.selector.is_empty() {
            return Vec::new();
        }
        let selector = Selector::from_match_labels(&service.selector);
        let namespace = &**service.meta.namespace();
        let mut groups: BTreeMap<(IpFamily, Vec<SubsetPort>), Vec<Address>> = BTreeMap::new();
        for pod in self.pods.get(namespace).into_iter().flatten() {
            if pod.phase != Some(PodPhase::Terminated) && selector.matches(&pod.meta.labels) {
                let ports = resolve_ports(service, |target| pod.target_port(target));
                for ip in ips_in_families(service, &pod.ips) {
                    let address = self.pod_address(service, pod, ip);
                    groups
                        .entry((IpFamily::from_ip(&ip), ports.clone()))
                        .or_default()
                        .push(address);
                }
            }
        }
        for workload in self.workloads.get(namespace).into_iter().flatten() {
            if selector.matches(&workload.meta.labels) {
                let ports = resolve_ports(service, |target| workload.target_port(target));
                for ip in ips_in_families(service, &workload.ips) {
                    let address = workload_address(service, workload, ip);
                    groups
                        .entry((IpFamily::from_ip(&ip), ports.clone()))
                        .or_default()
                        .push(address);
                }
            }
        }
        groups
            .into_iter()
            .map(|((_, ports), addresses)| Subset {
                ports,
                addresses: addresses.into(),
            })
            .collect()
    }

    fn pod_address(&self, service: &Service, pod: &Pod, ip: IpAddr) -> Address {
        let ready = service.not_ready_addresses == NotReadyAddresses::Published
            || (pod.ready == Some(EndpointReadiness::Ready) && pod.is_serving());
        let is_in_subdomain = pod.subdomain.as_deref() == Some(&*service.meta.name.name);
        let zone = pod.node.as_deref().and_then(|node| self.zones.get(node));
        Address {
            ip,
            ready: EndpointReadiness::from_ready(ready),
            hostname: pod.hostname.clone().filter(|_| is_in_subdomain),
            node: pod.node.clone(),
            zone: zone.map(|zone| (*zone).clone()),
            hint_zones: Arc::default(),
            hint_nodes: Arc::default(),
            target: AddressTarget::Pod(pod.meta.name.clone()),
        }
    }
}

fn workload_address(service: &Service, workload: &ExternalWorkload, ip: IpAddr) -> Address {
    let headless = service.kind == ServiceKind::Headless;
    Address {
        ip,
        ready: match service.not_ready_addresses {
            NotReadyAddresses::Published => EndpointReadiness::Ready,
            NotReadyAddresses::Omitted => workload.ready.unwrap_or(EndpointReadiness::NotReady),
        },
        hostname: headless.then(|| (*workload.meta.name.name).into()),
        node: None,
        zone: workload.meta.label(label::ZONE).map(intern),
        hint_zones: Arc::default(),
        hint_nodes: Arc::default(),
        target: AddressTarget::ExternalWorkload(workload.meta.name.clone()),
    }
}

/// Returns the addresses of the IP families of the Service.
fn ips_in_families(service: &Service, ips: &[IpAddr]) -> Vec<IpAddr> {
    let serves = |ip: &&IpAddr| service.families.is_empty() || service.families.contains(&IpFamily::from_ip(ip));
    ips.iter().filter(serves).copied().collect()
}

/// Resolves the Service's ports to port numbers of one workload. Ports that the workload does not have are omitted.
fn resolve_ports(service: &Service, port: impl Fn(&PortRef) -> Option<u16>) -> Vec<SubsetPort> {
    let ports = service.ports.iter();
    ports
        .filter_map(|listed| {
            Some(SubsetPort {
                name: listed.name.clone(),
                port: port(&listed.target)?,
            })
        })
        .collect()
}
