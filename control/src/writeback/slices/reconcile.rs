//! Which EndpointSlices a service needs for its external workloads, and what has to be written to get there.
//!
//! Pure, and idempotent: once a plan is carried out, the next one is empty. As few slices as possible are written, not as
//! few as possible kept: an endpoint stays in its slice, and gaps are filled by what comes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use tracing::error;
use tulle_core::names::label;

use crate::resources::service::{
    Family, PortRef, Protocol, Readiness, SLICE_WRITER, Service, ServiceKind, ServicePort,
};
use crate::resources::workload::{ContainerPort, ExternalWorkload};

/// What has to be written, to be carried out in this order.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub(super) create: Vec<EndpointSlice>,
    /// Each with the version that it replaces.
    pub(super) update: Vec<EndpointSlice>,
    pub(super) delete: Vec<Arc<EndpointSlice>>,
}

/// A port of a slice; slices hold endpoints that resolve the service's ports to the same set of these.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Port {
    name: String,
    number: Option<i32>,
    protocol: String,
    app_protocol: Option<String>,
}

type Ports = BTreeSet<Port>;

/// Endpoints by the name of their workload.
type Endpoints = BTreeMap<Arc<str>, Endpoint>;

/// What is wanted and what is there of one family and set of ports.
#[derive(Default)]
struct Group<'a> {
    wanted: Endpoints,
    slices: Vec<&'a Arc<EndpointSlice>>,
}

/// A slice that will be written with these endpoints.
struct Draft<'a> {
    slice: &'a EndpointSlice,
    endpoints: Vec<Endpoint>,
}

/// Compares the slices of a service, all of them ours, with what its selected workloads ask for.
pub(super) fn reconcile(service: &Service, workloads: &[Arc<ExternalWorkload>], slices: &[Arc<EndpointSlice>]) -> Plan {
    let mut plan = Plan::default();
    let families: BTreeSet<Family> = match &*service.families {
        [] => BTreeSet::from([Family::V4, Family::V6]),
        families => families.iter().copied().collect(),
    };
    let mut groups: BTreeMap<(Family, Ports), Group<'_>> = BTreeMap::new();
    for slice in slices {
        match family(slice).filter(|family| families.contains(family) && is_owned(slice, service)) {
            Some(family) => groups.entry((family, ports_of(slice))).or_default().slices.push(slice),
            None => plan.delete.push(slice.clone()),
        }
    }
    for workload in workloads {
        let ports = resolve(service, workload);
        for family in &families {
            if let Some(endpoint) = endpoint(service, workload, *family) {
                let group = groups.entry((*family, ports.clone())).or_default();
                group.wanted.insert(workload.meta.name.name.clone(), endpoint);
            }
        }
    }
    let labels = labels(service);
    for ((family, ports), group) in groups {
        let left = plan.keep(service, &labels, group);
        plan.create.extend(left.into_iter().map(|endpoints| EndpointSlice {
            metadata: new_metadata(service, &labels),
            address_type: address_type(family).to_owned(),
            ports: Some(ports.iter().map(Port::to_kubernetes).collect()),
            endpoints,
        }));
    }
    plan.reuse_names(service);
    if service.meta.terminating {
        plan.create.clear();
    }
    plan
}

impl Plan {
    pub(super) fn is_empty(&self) -> bool {
        self.create.is_empty() && self.update.is_empty() && self.delete.is_empty()
    }

    /// Keeps what is right in the slices of one group, and returns what needs new ones.
    fn keep(&mut self, service: &Service, labels: &BTreeMap<String, String>, group: Group<'_>) -> Vec<Vec<Endpoint>> {
        let Group { mut wanted, slices } = group;
        let mut drafts = Vec::new();
        let mut untouched: Vec<Draft<'_>> = Vec::new();
        for slice in slices {
            let mut endpoints = Vec::with_capacity(slice.endpoints.len());
            for endpoint in &slice.endpoints {
                // What is there twice is kept once, and a slice that others made too long is cut.
                if endpoints.len() < MAX_ENDPOINTS
                    && let Some(wanted) = workload_of(endpoint, service).and_then(|name| wanted.remove(name))
                {
                    endpoints.push(wanted);
                }
            }
            let draft = Draft { slice, endpoints };
            if draft.endpoints.is_empty() {
                self.delete.push(slice.clone());
            } else if draft.endpoints == slice.endpoints && slice.metadata.labels.as_ref() == Some(labels) {
                untouched.push(draft);
            } else {
                drafts.push(draft);
            }
        }
        let mut left: Vec<Endpoint> = wanted.into_values().rev().collect();
        // The fullest first, so that the emptiest may become empty one day.
        drafts.sort_by_key(|draft| std::cmp::Reverse(draft.endpoints.len()));
        for draft in &mut drafts {
            draft.fill(&mut left);
        }
        // What fills no slice of its own goes where it leaves the smallest gap.
        let rest = left.len() % MAX_ENDPOINTS;
        let fits = |draft: &Draft<'_>| draft.endpoints.len() + rest <= MAX_ENDPOINTS;
        let closest = (0..untouched.len())
            .filter(|index| rest > 0 && fits(&untouched[*index]))
            .max_by_key(|index| untouched[*index].endpoints.len());
        if let Some(closest) = closest {
            let mut draft = untouched.swap_remove(closest);
            draft.endpoints.extend(left.drain(..rest));
            drafts.push(draft);
        }
        for Draft { slice, endpoints } in drafts {
            let mut slice = slice.clone();
            slice.metadata.labels = Some(labels.clone());
            slice.endpoints = endpoints;
            self.update.push(slice);
        }
        left.reverse();
        left.chunks(MAX_ENDPOINTS).map(<[Endpoint]>::to_vec).collect()
    }

    /// A slice that would go lends its name to one that would come: one write instead of two.
    fn reuse_names(&mut self, service: &Service) {
        let (create, update) = (&mut self.create, &mut self.update);
        self.delete.retain(|old| {
            let fits = |new: &EndpointSlice| new.address_type == old.address_type && is_owned(old, service);
            let Some(index) = create.iter().rposition(fits) else {
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

impl Draft<'_> {
    fn fill(&mut self, left: &mut Vec<Endpoint>) {
        while self.endpoints.len() < MAX_ENDPOINTS
            && let Some(endpoint) = left.pop()
        {
            self.endpoints.push(endpoint);
        }
    }
}

/// The workload that an endpoint of ours stands for.
fn workload_of<'a>(endpoint: &'a Endpoint, service: &Service) -> Option<&'a str> {
    let target = endpoint.target_ref.as_ref()?;
    let ours = target.kind.as_deref() == Some(WORKLOAD_KIND)
        && target.namespace.as_deref() == Some(&**service.meta.namespace());
    target.name.as_deref().filter(|_| ours)
}

fn is_owned(slice: &EndpointSlice, service: &Service) -> bool {
    let owners = slice.metadata.owner_references.iter().flatten();
    owners
        .filter(|owner| owner.kind == "Service" && owner.api_version == "v1")
        .any(|owner| owner.uid == service.uid)
}

fn family(slice: &EndpointSlice) -> Option<Family> {
    [Family::V4, Family::V6]
        .into_iter()
        .find(|family| slice.address_type == address_type(*family))
}

fn address_type(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    }
}

fn ports_of(slice: &EndpointSlice) -> Ports {
    let ports = slice.ports.iter().flatten();
    ports
        .map(|port| Port {
            name: port.name.clone().unwrap_or_default(),
            number: port.port,
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
            app_protocol: port.app_protocol.clone(),
        })
        .collect()
}

impl Port {
    fn to_kubernetes(&self) -> EndpointPort {
        EndpointPort {
            name: Some(self.name.clone()),
            port: self.number,
            protocol: Some(self.protocol.clone()),
            app_protocol: self.app_protocol.clone(),
        }
    }
}

/// The ports of the service in one workload; what the workload does not declare is left out.
fn resolve(service: &Service, workload: &ExternalWorkload) -> Ports {
    let tcp = service.ports.iter().map(|port| (None, port));
    let other = service
        .other_ports
        .iter()
        .map(|(protocol, port)| (Some(*protocol), port));
    let mut ports = Ports::new();
    for (protocol, port) in tcp.chain(other) {
        let Some(declared) = declared(workload, protocol, port) else {
            let ServicePort { port, target, .. } = port;
            let (service, workload) = (&service.meta.name, &workload.meta.name);
            error!(%service, %workload, port, ?target, "the workload has no such port; its endpoint goes without");
            continue;
        };
        ports.insert(Port {
            name: port.name.clone(),
            number: Some(declared.port.into()),
            protocol: protocol.map_or("TCP", Protocol::as_str).to_owned(),
            app_protocol: port.app_protocol.clone(),
        });
    }
    ports
}

/// The workload's port that a service's port leads to; no protocol stands for TCP.
fn declared<'a>(
    workload: &'a ExternalWorkload,
    protocol: Option<Protocol>,
    port: &ServicePort,
) -> Option<&'a ContainerPort> {
    let is_target = |declared: &ContainerPort| match &port.target {
        PortRef::Number(number) => declared.port == *number,
        PortRef::Name(name) => declared.name.as_deref() == Some(name),
    };
    match protocol {
        None => workload.ports.iter().find(|declared| is_target(declared)),
        Some(protocol) => {
            let mut others = workload.other_ports.iter();
            let found = others.find(|(other, declared)| *other == protocol && is_target(declared));
            found.map(|(_, declared)| declared)
        }
    }
}

/// The endpoint of a workload, if it has addresses of the family.
fn endpoint(service: &Service, workload: &ExternalWorkload, family: Family) -> Option<Endpoint> {
    let ips = workload
        .ips
        .iter()
        .filter(|ip| Family::of(ip) == family && is_endpoint(ip));
    let addresses: Vec<String> = ips.map(ToString::to_string).collect();
    if addresses.is_empty() {
        return None;
    }
    let ready = workload.ready == Some(Readiness::Ready);
    let name = &*workload.meta.name.name;
    let zone = workload.meta.label(label::ZONE).filter(|zone| !zone.is_empty());
    Some(Endpoint {
        addresses,
        conditions: Some(EndpointConditions {
            ready: Some(ready),
            serving: Some(ready),
            terminating: Some(false),
        }),
        hostname: (service.kind == ServiceKind::Headless && is_label(name)).then(|| name.to_owned()),
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

/// Whether an API server takes the address for an endpoint. One that it refuses would keep all others of its slice out.
fn is_endpoint(ip: &IpAddr) -> bool {
    let special = match ip {
        IpAddr::V4(ip) => {
            ip.is_unspecified() || ip.is_loopback() || ip.is_link_local() || is_local_multicast(ip.octets())
        }
        IpAddr::V6(ip) => {
            let [first, ..] = ip.segments();
            ip.is_unspecified() || ip.is_loopback() || ip.is_unicast_link_local() || first & 0xff0f == 0xff02
        }
    };
    !special
}

fn is_local_multicast(octets: [u8; 4]) -> bool {
    octets.starts_with(&[224, 0, 0])
}

/// Whether a name can be a host's name below the service.
fn is_label(name: &str) -> bool {
    name.len() <= 63 && !name.contains('.')
}

/// The service's labels, and those that say whose slice this is.
fn labels(service: &Service) -> BTreeMap<String, String> {
    let of_service = service.meta.labels.iter();
    let mut labels: BTreeMap<_, _> = of_service
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    labels.insert(label::SERVICE_NAME.to_owned(), service.meta.name.name.to_string());
    labels.insert(label::SLICE_MANAGED_BY.to_owned(), SLICE_WRITER.to_owned());
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

/// As many as Kubernetes' own controllers put into a slice by default.
pub(super) const MAX_ENDPOINTS: usize = 100;

const WORKLOAD_KIND: &str = "ExternalWorkload";
