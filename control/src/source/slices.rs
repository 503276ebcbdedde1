//! EndpointSlices and Endpoints of services that a directory gives none for: from one another, or from the workloads
//! that their selector matches, as the controllers of a cluster would write them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ahash::AHashMap;
use tulle_core::names::label;

use crate::resources::Object;
use crate::resources::labels::Selector;
use crate::resources::meta::{Meta, Name};
use crate::resources::service::{
    Address, EndpointSlice, Endpoints, Family, PortRef, Readiness, Service, ServiceKind, Subset, SubsetPort, Target,
    Unready,
};
use crate::resources::text::shared;
use crate::resources::workload::{ExternalWorkload, Phase, Pod};

/// All objects of a directory, as far as endpoints follow from them.
#[derive(Default)]
struct Inventory<'a> {
    services: Vec<&'a Service>,
    sliced: BTreeSet<&'a Name>,
    endpoints: AHashMap<&'a Name, &'a Endpoints>,
    pods: AHashMap<&'a str, Vec<&'a Pod>>,
    workloads: AHashMap<&'a str, Vec<&'a ExternalWorkload>>,
    zones: AHashMap<&'a str, &'a Arc<str>>,
}

/// The objects that are missing.
pub(super) fn derive<'a>(objects: impl Iterator<Item = &'a Object>) -> Vec<Object> {
    let mut inventory = Inventory::default();
    objects.for_each(|object| inventory.add(object));
    let mut derived = Vec::new();
    for service in &inventory.services {
        let name = &service.meta.name;
        let given = inventory.endpoints.get(name);
        if service.kind == ServiceKind::ExternalName || inventory.sliced.contains(name) {
            continue;
        }
        let subsets = given.map_or_else(|| inventory.select(service), |endpoints| endpoints.subsets.clone());
        if given.is_none() {
            derived.push(Object::Endpoints(Arc::new(endpoints(service, &subsets))));
        }
        let slices = subsets
            .into_iter()
            .enumerate()
            .map(|(index, subset)| slice(service, index, subset));
        derived.extend(slices.map(|slice| Object::EndpointSlice(Arc::new(slice))));
    }
    derived
}

/// Endpoints list only what is ready.
fn endpoints(service: &Service, subsets: &[Subset]) -> Endpoints {
    let ready = |subset: &Subset| Subset {
        ports: subset.ports.clone(),
        addresses: subset
            .addresses
            .iter()
            .filter(|address| address.ready == Readiness::Ready)
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

fn slice(service: &Service, index: usize, subset: Subset) -> EndpointSlice {
    let name = &service.meta.name;
    let meta = Meta {
        name: Name::new(name.namespace.clone(), format!("{}-derived-{index}", name.name)),
        labels: [(label::SERVICE_NAME, &name.name)].into_iter().collect(),
        ..Meta::default()
    };
    EndpointSlice {
        meta,
        managed: None,
        service: Some(name.clone()),
        subset,
        has_names: false,
    }
}

impl<'a> Inventory<'a> {
    fn add(&mut self, object: &'a Object) {
        match object {
            Object::Service(service) => self.services.push(service),
            Object::EndpointSlice(slice) => self.sliced.extend(&slice.service),
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

    /// Addresses of the selected workloads, grouped by family and by the ports that they resolve the service's to.
    fn select(&self, service: &Service) -> Vec<Subset> {
        if service.selector.is_empty() {
            return Vec::new();
        }
        let selector = Selector::exact(&service.selector);
        let namespace = &**service.meta.namespace();
        let mut groups: BTreeMap<(Family, Vec<SubsetPort>), Vec<Address>> = BTreeMap::new();
        for pod in self.pods.get(namespace).into_iter().flatten() {
            if pod.phase != Some(Phase::Over) && selector.matches(&pod.meta.labels) {
                let ports = resolve(service, |target| pod.target_port(target));
                for ip in wanted(service, &pod.ips) {
                    let address = self.pod_address(service, pod, ip);
                    groups
                        .entry((Family::of(&ip), ports.clone()))
                        .or_default()
                        .push(address);
                }
            }
        }
        for workload in self.workloads.get(namespace).into_iter().flatten() {
            if selector.matches(&workload.meta.labels) {
                let ports = resolve(service, |target| workload.target_port(target));
                for ip in wanted(service, &workload.ips) {
                    let address = workload_address(service, workload, ip);
                    groups
                        .entry((Family::of(&ip), ports.clone()))
                        .or_default()
                        .push(address);
                }
            }
        }
        groups
            .into_iter()
            .map(|((_, ports), addresses)| Subset { ports, addresses })
            .collect()
    }

    fn pod_address(&self, service: &Service, pod: &Pod, ip: IpAddr) -> Address {
        let ready = service.unready == Unready::Published || (pod.ready == Some(Readiness::Ready) && pod.is_serving());
        let below_service = pod.subdomain.as_deref() == Some(&*service.meta.name.name);
        let zone = pod.node.as_deref().and_then(|node| self.zones.get(node));
        Address {
            ip,
            ready: if ready { Readiness::Ready } else { Readiness::NotReady },
            hostname: pod.hostname.clone().filter(|_| below_service),
            node: pod.node.clone(),
            zone: zone.map(|zone| (*zone).clone()),
            hint_zones: Vec::new(),
            hint_nodes: Vec::new(),
            target: Target::Pod(pod.meta.name.clone()),
        }
    }
}

fn workload_address(service: &Service, workload: &ExternalWorkload, ip: IpAddr) -> Address {
    let headless = service.kind == ServiceKind::Headless;
    Address {
        ip,
        ready: match service.unready {
            Unready::Published => Readiness::Ready,
            Unready::Withheld => workload.ready.unwrap_or(Readiness::NotReady),
        },
        hostname: headless.then(|| workload.meta.name.name.to_string()),
        node: None,
        zone: workload.meta.label(label::ZONE).map(shared),
        hint_zones: Vec::new(),
        hint_nodes: Vec::new(),
        target: Target::ExternalWorkload(workload.meta.name.clone()),
    }
}

/// Addresses of the families that the service has.
fn wanted(service: &Service, ips: &[IpAddr]) -> Vec<IpAddr> {
    let serves = |ip: &&IpAddr| service.families.is_empty() || service.families.contains(&Family::of(ip));
    ips.iter().filter(serves).copied().collect()
}

/// The service's ports as numbers in one workload; what it does not have is left out.
fn resolve(service: &Service, port: impl Fn(&PortRef) -> Option<u16>) -> Vec<SubsetPort> {
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
