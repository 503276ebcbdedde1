//! Computes which EndpointSlices a Service needs for its external workloads, and the required writes.
//!
//! Pure and idempotent: after a plan is applied, the next one is empty. It minimizes writes, not the number of slices:
//! an endpoint stays in its slice, and new endpoints fill the gaps.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use tulle_core::names::label;

use crate::resources::service::{
    EndpointReadiness, IpFamily, NonTcpProtocol, PortRef, SLICE_MANAGED_BY_VALUE, Service, ServiceKind, ServicePort,
};
use crate::resources::workload::{DeclaredPort, ExternalWorkload};

/// The writes to execute, in this order.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub(super) create: Vec<EndpointSlice>,
    /// Each has the resource version that it replaces.
    pub(super) update: Vec<EndpointSlice>,
    pub(super) delete: Vec<Arc<EndpointSlice>>,
}

/// A port of a slice. All endpoints of a slice have the same set of these ports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SlicePort {
    name: String,
    number: Option<i32>,
    protocol: String,
    app_protocol: Option<String>,
}

type Ports = BTreeSet<SlicePort>;

/// Endpoints by the name of their workload.
type Endpoints = BTreeMap<Arc<str>, Endpoint>;

/// Desired endpoints and existing slices of one IP family and set of ports.
#[derive(Default)]
struct SliceGroup<'a> {
    desired: Endpoints,
    slices: Vec<&'a Arc<EndpointSlice>>,
}

/// A slice and the endpoints that it will have.
struct SliceUpdate<'a> {
    slice: &'a EndpointSlice,
    endpoints: Vec<Endpoint>,
}

/// Compares the slices of a Service, all managed by this controller, with its selected workloads.
pub(super) fn reconcile(service: &Service, workloads: &[Arc<ExternalWorkload>], slices: &[Arc<EndpointSlice>]) -> Plan {
    let mut plan = Plan::default();
    let families: BTreeSet<IpFamily> = match &*service.families {
        [] => BTreeSet::from([IpFamily::V4, IpFamily::V6]),
        families => families.iter().copied().collect(),
    };
    let mut groups: BTreeMap<(IpFamily, Ports), SliceGroup<'_>> = BTreeMap::new();
    for slice in slices {
        match ip_family(slice).filter(|family| families.contains(family) && is_owned_by(slice, service)) {
            Some(family) => groups
                .entry((family, slice_ports(slice)))
                .or_default()
                .slices
                .push(slice),
            None => plan.delete.push(slice.clone()),
        }
    }
    for workload in workloads {
        let ports = resolve_ports(service, workload);
        for family in &families {
            if let Some(endpoint) = build_endpoint(service, workload, *family) {
                let group = groups.entry((*family, ports.clone())).or_default();
                group.desired.insert(workload.meta.name.name.clone(), endpoint);
            }
        }
    }
    let labels = slice_labels(service);
    for ((family, ports), group) in groups {
        let new_slices = plan.update_slices(service, &labels, group);
        plan.create
            .extend(new_slices.into_iter().map(|endpoints| EndpointSlice {
                metadata: new_metadata(service, &labels),
                address_type: address_type(family).to_owned(),
                ports: Some(ports.iter().map(SlicePort::to_kubernetes).collect()),
                endpoints,
            }));
    }
    plan.convert_to_updates(service);
    if service.meta.terminating {
        plan.create.clear();
    }
    plan
}

impl Plan {
    pub(super) fn is_empty(&self) -> bool {
        self.create.is_empty() && self.update.is_empty() && self.delete.is_empty()
    }

    /// Updates the existing slices of one group. Returns the endpoints of each new slice.
    fn update_slices(
        &mut self,
        service: &Service,
        labels: &BTreeMap<String, String>,
        group: SliceGroup<'_>,
    ) -> Vec<Vec<Endpoint>> {
        let SliceGroup { mut desired, slices } = group;
        let (mut changed, mut unchanged) = (Vec::new(), Vec::new());
        for slice in slices {
            let endpoints = take_endpoints_of_slice(slice, service, &mut desired);
            let is_same = endpoints == slice.endpoints && slice.metadata.labels.as_ref() == Some(labels);
            if endpoints.is_empty() {
                self.delete.push(slice.clone());
            } else if is_same {
                unchanged.push(SliceUpdate { slice, endpoints });
            } else {
                changed.push(SliceUpdate { slice, endpoints });
            }
        }
        let mut new_endpoints: VecDeque<Endpoint> = desired.into_values().collect();
        fill_changed_slices(&mut changed, &mut new_endpoints);
        changed.extend(add_rest_to_unchanged_slice(unchanged, &mut new_endpoints));
        for SliceUpdate { slice, endpoints } in changed {
            let mut slice = EndpointSlice::clone(slice);
            slice.metadata.labels = Some(labels.clone());
            slice.endpoints = endpoints;
            self.update.push(slice);
        }
        let new_endpoints = Vec::from(new_endpoints);
        new_endpoints
            .chunks(MAX_ENDPOINTS_PER_SLICE)
            .map(<[Endpoint]>::to_vec)
            .collect()
    }

    /// Replaces each pair of a delete and a create by one update of the existing slice. The type of addresses of a slice cannot
    /// change, and only slices of this Service are updated.
    fn convert_to_updates(&mut self, service: &Service) {
        let (create, update) = (&mut self.create, &mut self.update);
        self.delete.retain(|old| {
            if !is_owned_by(old, service) {
                return true;
            }
            let has_same_type = |new: &EndpointSlice| new.address_type == old.address_type;
            let Some(index) = create.iter().rposition(has_same_type) else {
                return true;
            };
            let mut new = create.remove(index);
            new.metadata.generate_name = None;
            new.metadata.name.clone_from(&old.metadata.name);
            new.metadata.uid.clone_from(&old.metadata.uid);
            new.metadata.resource_version.clone_from(&old.metadata.resource_version);
            update.push(new);
            false
        });
    }
}

/// Takes the desired endpoints of the workloads that the slice has already. Leaves out duplicates, and the endpoints above the
/// maximum number of a slice, which another client can have added.
fn take_endpoints_of_slice(slice: &EndpointSlice, service: &Service, desired: &mut Endpoints) -> Vec<Endpoint> {
    let mut endpoints = Vec::with_capacity(slice.endpoints.len());
    for endpoint in &slice.endpoints {
        if endpoints.len() < MAX_ENDPOINTS_PER_SLICE
            && let Some(endpoint) = target_workload(endpoint, service).and_then(|name| desired.remove(name))
        {
            endpoints.push(endpoint);
        }
    }
    endpoints
}

/// Adds new endpoints to the slices that are written anyway. The fullest slices are filled first, so that small slices can become
/// empty and be deleted.
fn fill_changed_slices(changed: &mut [SliceUpdate<'_>], new_endpoints: &mut VecDeque<Endpoint>) {
    changed.sort_by_key(|update| std::cmp::Reverse(update.endpoints.len()));
    for update in changed {
        let free = MAX_ENDPOINTS_PER_SLICE.saturating_sub(update.endpoints.len());
        let n_added = free.min(new_endpoints.len());
        update.endpoints.extend(new_endpoints.drain(..n_added));
    }
}

/// Takes the new endpoints that remain after full new slices, and adds them to the fullest unchanged slice with room for all of
/// them. Returns the update of that slice.
fn add_rest_to_unchanged_slice<'a>(
    mut unchanged: Vec<SliceUpdate<'a>>,
    new_endpoints: &mut VecDeque<Endpoint>,
) -> Option<SliceUpdate<'a>> {
    let n_rest = new_endpoints.len() % MAX_ENDPOINTS_PER_SLICE;
    if n_rest == 0 {
        return None;
    }
    let fullest = (0..unchanged.len())
        .filter(|index| unchanged[*index].endpoints.len() + n_rest <= MAX_ENDPOINTS_PER_SLICE)
        .max_by_key(|index| unchanged[*index].endpoints.len())?;
    let mut update = unchanged.swap_remove(fullest);
    let rest = new_endpoints.split_off(new_endpoints.len() - n_rest);
    update.endpoints.extend(rest);
    Some(update)
}

/// Returns the name of the workload of an endpoint.
fn target_workload<'a>(endpoint: &'a Endpoint, service: &Service) -> Option<&'a str> {
    let target = endpoint.target_ref.as_ref()?;
    let is_workload = target.kind.as_deref() == Some(WORKLOAD_KIND)
        && target.namespace.as_deref() == Some(&**service.meta.namespace());
    target.name.as_deref().filter(|_| is_workload)
}

fn is_owned_by(slice: &EndpointSlice, service: &Service) -> bool {
    let owners = slice.metadata.owner_references.iter().flatten();
    owners
        .filter(|owner| owner.kind == "Service" && owner.api_version == "v1")
        .any(|owner| owner.uid == service.uid)
}

fn ip_family(slice: &EndpointSlice) -> Option<IpFamily> {
    [IpFamily::V4, IpFamily::V6]
        .into_iter()
        .find(|family| slice.address_type == address_type(*family))
}

fn address_type(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "IPv4",
        IpFamily::V6 => "IPv6",
    }
}

fn slice_ports(slice: &EndpointSlice) -> Ports {
    let ports = slice.ports.iter().flatten();
    ports
        .map(|port| SlicePort {
            name: port.name.clone().unwrap_or_default(),
            number: port.port,
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
            app_protocol: port.app_protocol.clone(),
        })
        .collect()
}

impl SlicePort {
    fn to_kubernetes(&self) -> EndpointPort {
        EndpointPort {
            name: Some(self.name.clone()),
            port: self.number,
            protocol: Some(self.protocol.clone()),
            app_protocol: self.app_protocol.clone(),
        }
    }
}

/// Resolves the ports of the Service for one workload. Ports that the workload does not declare are omitted.
fn resolve_ports(service: &Service, workload: &ExternalWorkload) -> Ports {
    let mut ports = Ports::new();
    for (protocol, port) in all_ports(service) {
        let Some(declared) = declared_port(workload, protocol, port) else {
            continue;
        };
        ports.insert(SlicePort {
            name: port.name.clone(),
            number: Some(declared.port.into()),
            protocol: protocol.map_or("TCP", NonTcpProtocol::as_str).to_owned(),
            app_protocol: port.app_protocol.clone(),
        });
    }
    ports
}

/// Returns the number and the target of each port of the Service that the workload does not declare.
pub(super) fn undeclared_ports<'a>(service: &'a Service, workload: &ExternalWorkload) -> Vec<(u16, &'a PortRef)> {
    all_ports(service)
        .filter(|(protocol, port)| declared_port(workload, *protocol, port).is_none())
        .map(|(_, port)| (port.port, &port.target))
        .collect()
}

/// Returns the ports of a Service. `None` as the protocol means TCP.
fn all_ports(service: &Service) -> impl Iterator<Item = (Option<NonTcpProtocol>, &ServicePort)> {
    let tcp_ports = service.ports.iter().map(|port| (None, port));
    let non_tcp_ports = service
        .non_tcp_ports
        .iter()
        .map(|(protocol, port)| (Some(*protocol), port));
    tcp_ports.chain(non_tcp_ports)
}

/// Resolves a port of the Service for one workload. `None` as the protocol means TCP.
fn declared_port<'a>(
    workload: &'a ExternalWorkload,
    protocol: Option<NonTcpProtocol>,
    port: &ServicePort,
) -> Option<&'a DeclaredPort> {
    let is_target = |declared: &DeclaredPort| match &port.target {
        PortRef::Number(number) => declared.port == *number,
        PortRef::Name(name) => declared.name.as_deref() == Some(name),
    };
    match protocol {
        None => workload.ports.iter().find(|declared| is_target(declared)),
        Some(protocol) => {
            let mut others = workload.non_tcp_ports.iter();
            let found = others.find(|(other, declared)| *other == protocol && is_target(declared));
            found.map(|(_, declared)| declared)
        }
    }
}

/// Builds the endpoint of a workload. `None` if the workload has no address of the family.
fn build_endpoint(service: &Service, workload: &ExternalWorkload, family: IpFamily) -> Option<Endpoint> {
    let ips = workload
        .ips
        .iter()
        .filter(|ip| IpFamily::from_ip(ip) == family && is_valid_endpoint_ip(ip));
    let addresses: Vec<String> = ips.map(ToString::to_string).collect();
    if addresses.is_empty() {
        return None;
    }
    let ready = workload.ready == Some(EndpointReadiness::Ready);
    let name = &*workload.meta.name.name;
    let zone = workload.meta.label(label::ZONE).filter(|zone| !zone.is_empty());
    Some(Endpoint {
        addresses,
        conditions: Some(EndpointConditions {
            ready: Some(ready),
            serving: Some(ready),
            terminating: Some(false),
        }),
        hostname: (service.kind == ServiceKind::Headless && is_single_label(name)).then(|| name.to_owned()),
        target_ref: Some(ObjectReference {
            kind: Some(WORKLOAD_KIND.to_owned()),
            namespace: Some(workload.meta.namespace().to_string()),
            name: Some(name.to_owned()),
            uid: Some(workload.uid.clone()).filter(|uid| !uid.is_empty()),
            ..ObjectReference::default()
        }),
        zone: zone.map(str::to_owned),
        ..Endpoint::default()
    })
}

/// Returns whether an API server accepts the address in an endpoint. An invalid address would make it reject the whole
/// slice.
fn is_valid_endpoint_ip(ip: &IpAddr) -> bool {
    let special = match ip {
        IpAddr::V4(ip) => {
            let is_link_local_multicast = ip.octets().starts_with(&[224, 0, 0]);
            ip.is_unspecified() || ip.is_loopback() || ip.is_link_local() || is_link_local_multicast
        }
        IpAddr::V6(ip) => {
            // ff02::/16, with any flags.
            let is_link_local_multicast = ip.segments()[0] & 0xff0f == 0xff02;
            ip.is_unspecified() || ip.is_loopback() || ip.is_unicast_link_local() || is_link_local_multicast
        }
    };
    !special
}

/// Returns whether a name, which is a DNS subdomain, is a single label and can be a hostname below the Service.
fn is_single_label(name: &str) -> bool {
    name.len() <= 63 && !name.contains('.')
}

/// Returns the labels of the Service, with those that mark the slice as ours.
fn slice_labels(service: &Service) -> BTreeMap<String, String> {
    let service_labels = service.meta.labels.iter();
    let mut labels: BTreeMap<_, _> = service_labels
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    labels.insert(label::SERVICE_NAME.to_owned(), service.meta.name.name.to_string());
    labels.insert(label::SLICE_MANAGED_BY.to_owned(), SLICE_MANAGED_BY_VALUE.to_owned());
    labels.remove(label::HEADLESS);
    if service.kind == ServiceKind::Headless {
        labels.insert(label::HEADLESS.to_owned(), String::new());
    }
    labels
}

fn new_metadata(service: &Service, labels: &BTreeMap<String, String>) -> ObjectMeta {
    let name = &service.meta.name;
    ObjectMeta {
        generate_name: Some(format!("linkerd-external-{}-", name.name)),
        namespace: Some(name.namespace.to_string()),
        labels: Some(labels.clone()),
        owner_references: Some(vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Service".to_owned(),
            name: name.name.to_string(),
            uid: service.uid.clone(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }]),
        ..ObjectMeta::default()
    }
}

/// The default of Kubernetes' own controllers.
pub(super) const MAX_ENDPOINTS_PER_SLICE: usize = 100;

const WORKLOAD_KIND: &str = "ExternalWorkload";
