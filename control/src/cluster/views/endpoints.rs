//! View: the endpoints of a service port.

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tulle_core::names::{annotation, label};

use crate::cluster::config::{Config, H2Upgrade, Ipv6};
use crate::cluster::metrics::{EntryMetrics, Metrics};
use crate::cluster::store::reader::Reader;
use crate::cluster::views::view::View;
use crate::cluster::views::workload::{
    PodAddress, SHARED_FIELDS, external_endpoint, has_address_conflict, pod_endpoint,
};
use crate::model::endpoints::{
    Endpoint, EndpointWorkload, Endpoints, Existence, Http2Params, ProtocolHint, SharedEndpointFields, TlsIdentity,
    TrafficScope,
};
use crate::model::remote_discovery::{FederatedMembers, RemoteDiscovery};
use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::remote_discovery;
use crate::resources::service::{
    Address, AddressTarget, EndpointReadiness, EndpointsSource, InternalTrafficPolicy, NotReadyAddresses, Service,
    ServiceKind, Subset,
};

/// A service port, or one pod of a headless service.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub service: NamespacedName,
    pub port: u16,
    pub hostname: Option<String>,
}

pub(in crate::cluster) struct EndpointsView;

impl View for EndpointsView {
    type Key = Key;
    type Value = Endpoints;

    fn compute(reader: &Reader<'_>, config: &Config, key: &Key) -> Endpoints {
        let Some(service) = reader.service(&key.service) else {
            return Endpoints::default();
        };
        if service.kind == ServiceKind::ExternalName {
            return Endpoints {
                existence: Existence::ExternalName,
                ..Endpoints::default()
            };
        }
        let remote = remote_discovery::discovery(service).map(Arc::new);
        let is_port_listed = service.port(key.port).is_some();
        match remote.as_deref() {
            None => local_endpoints(reader, config, service, key),
            Some(RemoteDiscovery::Federated(FederatedMembers { local: Some(name), .. })) => {
                let name = NamespacedName::new(key.service.namespace.clone(), name.clone());
                let member = reader
                    .service(&name)
                    .filter(|member| member.kind != ServiceKind::ExternalName);
                let endpoints = member.map(|member| local_endpoints(reader, config, member, key));
                let mut endpoints = endpoints.unwrap_or_default();
                if is_port_listed && !endpoints.is_port_listed {
                    endpoints = endpoints.without_port();
                }
                Endpoints {
                    is_port_listed,
                    remote,
                    ..endpoints
                }
            }
            Some(_) => Endpoints {
                existence: Existence::Present,
                is_port_listed,
                remote,
                ..Endpoints::default()
            },
        }
    }

    fn metrics(metrics: &Metrics, key: &Key, _value: &Endpoints) -> EntryMetrics {
        metrics.endpoints(&key.service, key.port, key.hostname.as_deref())
    }

    fn update_metrics(metrics: &EntryMetrics, value: &Endpoints) {
        metrics.set_endpoints(value.endpoints.len(), value.existence == Existence::Present);
    }

    fn reuse_unchanged(old: &Endpoints, new: &mut Endpoints) {
        for endpoint in &mut new.endpoints {
            if let Some(old) = old.get(endpoint.addr)
                && old == endpoint
            {
                *endpoint = old.clone();
            }
        }
    }
}

/// The endpoints of a Service in this cluster.
fn local_endpoints(reader: &Reader<'_>, config: &Config, service: &Service, key: &Key) -> Endpoints {
    let (mut addresses, mut terminating) = (BTreeMap::new(), BTreeMap::new());
    for (meta, subset) in service_subsets(reader, config, service) {
        // Slices of a Service without ports have no ports either, and are skipped.
        if subset.ports.is_empty() {
            continue;
        }
        let Some(port) = endpoint_port(service, key.port, subset) else {
            continue;
        };
        let listing = Listing {
            meta,
            service_port: key.port,
        };
        // If IPv6 is off, its addresses must not get into `addresses`: otherwise a ready IPv6 address would replace the
        // terminating IPv4 endpoints, which are used only if `addresses` is empty.
        let is_candidate = |address: &&Address| {
            address.ready != EndpointReadiness::NotReady
                && matches_hostname(address, key)
                && (address.ip.is_ipv4() || config.ipv6 == Ipv6::Serve)
        };
        for address in subset.addresses.iter().filter(is_candidate) {
            if let Some((endpoint, state)) = resolve_endpoint(reader, config, address, port, &listing) {
                let target_map = match (state, service.not_ready_addresses) {
                    (EndpointState::Terminating, NotReadyAddresses::Omitted) => &mut terminating,
                    (EndpointState::Terminating, NotReadyAddresses::Published) | (EndpointState::Active, _) => {
                        &mut addresses
                    }
                };
                target_map.insert(endpoint.addr, Arc::new(endpoint));
            }
        }
    }
    // Terminating endpoints are used if there are no others: the slices may not list the new pod yet.
    let are_terminating = addresses.is_empty() && !terminating.is_empty();
    if are_terminating {
        addresses = terminating;
    }
    prefer_ipv6(&mut addresses);
    let is_hinted = |endpoint: &Arc<Endpoint>| !endpoint.hint_nodes.is_empty();
    let scope = match service.internal_traffic_policy {
        InternalTrafficPolicy::Local => TrafficScope::Node,
        // Like zone hints, node hints apply only if every endpoint has them.
        InternalTrafficPolicy::Cluster if !addresses.is_empty() && addresses.values().all(is_hinted) => {
            TrafficScope::HintedNode
        }
        InternalTrafficPolicy::Cluster => TrafficScope::Cluster,
    };
    Endpoints {
        existence: Existence::Present,
        scope,
        endpoints: addresses.into_values().collect(),
        are_terminating,
        is_port_listed: service.port(key.port).is_some(),
        remote: None,
    }
}

/// The subsets of the EndpointSlices or Endpoints of a Service, each with the metadata of its object.
pub(super) fn service_subsets<'a>(
    reader: &Reader<'a>,
    config: &Config,
    service: &Service,
) -> Vec<(&'a Meta, &'a Subset)> {
    match config.endpoints_source {
        EndpointsSource::EndpointSlices => reader
            .slices_of(&service.meta.name)
            .into_iter()
            .map(|slice| (&slice.meta, &slice.subset))
            .collect(),
        EndpointsSource::Endpoints => reader
            .endpoints(&service.meta.name)
            .into_iter()
            .flat_map(|endpoints| endpoints.subsets.iter().map(|subset| (&endpoints.meta, subset)))
            .collect(),
    }
}

/// The endpoint port with the name of the Service port. A port that the Service does not list is used unchanged.
pub(super) fn endpoint_port(service: &Service, port: u16, subset: &Subset) -> Option<u16> {
    match service.port(port) {
        Some(listed) => subset
            .ports
            .iter()
            .find(|port| port.name == listed.name)
            .map(|port| port.port),
        None => Some(port),
    }
}

fn matches_hostname(address: &Address, key: &Key) -> bool {
    key.hostname.is_none() || address.hostname.as_deref() == key.hostname.as_deref()
}

/// An endpoint is terminating if it is so in its slice, or if its pod is being deleted. The pod is checked too, because slices
/// are updated later and the application may already have closed its port.
#[derive(Clone, Copy)]
enum EndpointState {
    Active,
    Terminating,
}

fn resolve_endpoint(
    reader: &Reader<'_>,
    config: &Config,
    address: &Address,
    port: u16,
    listing: &Listing<'_>,
) -> Option<(Endpoint, EndpointState)> {
    let mut state = match address.ready {
        EndpointReadiness::Terminating => EndpointState::Terminating,
        // `is_candidate` has removed addresses that are not ready.
        EndpointReadiness::Ready | EndpointReadiness::NotReady => EndpointState::Active,
    };
    let mut endpoint = match &address.target {
        AddressTarget::Pod(name) => {
            let pod = reader.pod(name)?;
            if pod.meta.terminating {
                state = EndpointState::Terminating;
            }
            let address = PodAddress::Pod(SocketAddr::new(address.ip, port));
            pod_endpoint(reader, config, pod, address)?
        }
        AddressTarget::ExternalWorkload(name) => {
            let workload = reader.external_workload(name)?;
            if has_address_conflict(reader, workload, address.ip) {
                return None;
            }
            external_endpoint(reader, config, workload, address.ip, port)
        }
        AddressTarget::Other => listing.endpoint_without_workload(config, address.ip, port),
    };
    endpoint.node = endpoint.node.or_else(|| address.node.clone());
    endpoint.zone = address.zone.clone();
    endpoint.hint_zones = address.hint_zones.clone();
    endpoint.hint_nodes = address.hint_nodes.clone();
    Some((endpoint, state))
}

/// The slice or Endpoints object that lists an address, and the requested port of the Service.
struct Listing<'a> {
    meta: &'a Meta,
    service_port: u16,
}

impl Listing<'_> {
    /// The endpoint at an address whose `targetRef` names no workload, described by the annotations and labels of the listing.
    /// Mirrored Services list the gateway of the other cluster in this way.
    fn endpoint_without_workload(&self, config: &Config, ip: IpAddr, port: u16) -> Endpoint {
        let mut shared = SharedEndpointFields::default();
        let annotated = |key| self.meta.annotation(key).filter(|text| !text.is_empty());
        let remote_name = annotated(annotation::REMOTE_SERVICE_NAME);
        shared.authority_override = remote_name.map(|name| format!("{name}:{}", self.service_port).into());
        if let Some(identity) = annotated(annotation::REMOTE_GATEWAY_IDENTITY) {
            let name: Arc<str> = identity.into();
            shared.identity = Some(TlsIdentity::Dns {
                server_name: name.clone(),
                name,
            });
            shared.protocol = (config.h2_upgrade == H2Upgrade::Offer).then_some(ProtocolHint::H2);
            shared.http2 = Http2Params::Configured;
        }
        if let Some(cluster) = self.meta.label(label::MIRRORED_CLUSTER) {
            shared.labels.push(("target_cluster".into(), cluster.into()));
            // Service and namespace come before `svc`. In the name of one pod of a headless Service, the pod's hostname
            // comes first.
            let dns_labels: Vec<&str> = remote_name.unwrap_or_default().split('.').collect();
            let service_index = dns_labels
                .iter()
                .position(|label| *label == "svc")
                .and_then(|svc_index| svc_index.checked_sub(2));
            if let Some([service, namespace]) = service_index.and_then(|index| dns_labels.get(index..index + 2)) {
                shared.labels.push(("target_service".into(), (*service).into()));
                shared
                    .labels
                    .push(("target_service_namespace".into(), (*namespace).into()));
            }
        }
        Endpoint {
            shared: SHARED_FIELDS.intern(shared),
            ..Endpoint::from_addr((ip, port).into())
        }
    }
}

/// Removes the IPv4 addresses of workloads that have both families.
fn prefer_ipv6(addresses: &mut BTreeMap<SocketAddr, Arc<Endpoint>>) {
    let ipv6_workloads: HashSet<EndpointWorkload> = addresses
        .values()
        .filter(|endpoint| endpoint.addr.is_ipv6() && endpoint.workload != EndpointWorkload::Unknown)
        .map(|endpoint| endpoint.workload.clone())
        .collect();
    addresses.retain(|addr, endpoint| addr.is_ipv6() || !ipv6_workloads.contains(&endpoint.workload));
}
