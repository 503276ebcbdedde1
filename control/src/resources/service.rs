//! Services, and their endpoints: Endpoints and EndpointSlices in one form.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    Endpoints as KubernetesEndpoints, ObjectReference, Service as KubernetesService,
    ServicePort as KubernetesServicePort,
};
use k8s_openapi::api::discovery::v1::{Endpoint as KubernetesEndpoint, EndpointSlice as KubernetesSlice};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tulle_core::names::label;
use tulle_core::ports::PortSet;

use crate::resources::interning::{Interner, intern, intern_opt};
use crate::resources::labels::Labels;
use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::port_list;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub meta: Meta,
    pub uid: String,
    /// Empty for headless services.
    pub cluster_ips: Vec<IpAddr>,
    pub kind: ServiceKind,
    pub ports: Vec<ServicePort>,
    /// Ports of other protocols. Proxies do not serve them, but EndpointSlices list them.
    pub non_tcp_ports: Vec<(NonTcpProtocol, ServicePort)>,
    pub selector: Labels,
    pub internal_traffic_policy: InternalTrafficPolicy,
    /// The IP families. An empty list, as in a manifest without families, means both.
    pub families: Vec<IpFamily>,
    pub not_ready_addresses: NotReadyAddresses,
}

/// What happens to addresses of pods that are not ready or are being deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotReadyAddresses {
    Omitted,
    /// `publishNotReadyAddresses` is set.
    Published,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceKind {
    ClusterIp,
    Headless,
    ExternalName,
    /// The ClusterIP is not assigned yet.
    Unassigned,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InternalTrafficPolicy {
    #[default]
    Cluster,
    /// Only endpoints on the client's node.
    Local,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IpFamily {
    V4,
    V6,
}

impl IpFamily {
    pub fn from_ip(ip: &IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NonTcpProtocol {
    Udp,
    Sctp,
}

impl NonTcpProtocol {
    /// Returns `None` for TCP and for unknown protocols.
    pub fn parse(protocol: Option<&str>) -> Option<Self> {
        match protocol {
            Some("UDP") => Some(Self::Udp),
            Some("SCTP") => Some(Self::Sctp),
            _ => None,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    pub name: String,
    pub port: u16,
    pub target: PortRef,
    pub app_protocol: Option<String>,
}

impl ServicePort {
    /// Returns the protocol of `appProtocol`. An unknown value means opaque.
    pub fn app_protocol_kind(&self) -> DeclaredProtocol {
        match self.app_protocol.as_deref().map(str::to_ascii_lowercase).as_deref() {
            None => DeclaredProtocol::None,
            Some("http") => DeclaredProtocol::Http1,
            // Kubernetes does not define `grpc`, but other meshes support it.
            Some("kubernetes.io/h2c" | "grpc") => DeclaredProtocol::Http2,
            Some(_) => DeclaredProtocol::Opaque,
        }
    }
}

/// The protocol of a port of a Service or an EgressNetwork, as its object declares it to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeclaredProtocol {
    /// The client's proxy detects it.
    None,
    Http1,
    Http2,
    Opaque,
}

impl fmt::Display for DeclaredProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "not declared",
            Self::Http1 => "HTTP/1",
            Self::Http2 => "HTTP/2",
            Self::Opaque => "opaque",
        })
    }
}

impl Service {
    /// Returns the protocol of a port: opaque if the port is marked as opaque, otherwise that of its `appProtocol`.
    ///
    /// The mark takes precedence because proxies obey it first: it is in the profile. An operator can therefore disable
    /// parsing, for example if the application terminates TLS, without a change of the `appProtocol` in a manifest.
    pub fn declared_protocol(&self, port: u16, default_opaque_ports: &PortSet) -> DeclaredProtocol {
        if self.is_opaque(port, default_opaque_ports) {
            return DeclaredProtocol::Opaque;
        }
        self.port(port)
            .map_or(DeclaredProtocol::None, ServicePort::app_protocol_kind)
    }

    /// Returns whether a port is marked as opaque for clients: by the annotation, or else by the cluster's default.
    pub fn is_opaque(&self, port: u16, default_opaque_ports: &PortSet) -> bool {
        port_list::is_marked_opaque(&self.meta, port, default_opaque_ports, |name| self.ports_named(name))
    }

    pub fn ports_named(&self, name: &str) -> Vec<u16> {
        let named = self.ports.iter().filter(|port| port.name == name);
        named.map(|port| port.port).collect()
    }
}

/// A port, by number or by its name in the workload.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PortRef {
    Number(u16),
    Name(String),
}

impl PortRef {
    pub fn from_kubernetes(port: IntOrString) -> Result<Self, String> {
        match port {
            IntOrString::Int(number) => port_number(number).map(Self::Number),
            IntOrString::String(text) => match text.parse::<i32>() {
                Ok(number) => port_number(number).map(Self::Number),
                Err(_) if text.is_empty() => Err("port name is empty".to_owned()),
                Err(_) => Ok(Self::Name(text)),
            },
        }
    }
}

/// Returns the number as a port, or an error if it is out of range.
pub fn port_number(number: i32) -> Result<u16, String> {
    match u16::try_from(number) {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(format!("port {number} is not in 1-65535")),
    }
}

pub fn is_tcp(protocol: Option<&str>) -> bool {
    protocol.is_none_or(|protocol| protocol.eq_ignore_ascii_case("TCP"))
}

impl Service {
    pub fn from_kubernetes(service: KubernetesService) -> Result<Self, String> {
        let uid = service.metadata.uid.clone().unwrap_or_default();
        let meta = Meta::from_kubernetes(service.metadata)?;
        let spec = service.spec.unwrap_or_default();
        let mut addresses = spec.cluster_ips.unwrap_or_default();
        if addresses.is_empty() {
            addresses.extend(spec.cluster_ip);
        }
        let headless = addresses.iter().any(|address| address == "None");
        let mut cluster_ips = Vec::new();
        for address in addresses
            .iter()
            .filter(|address| !address.is_empty() && *address != "None")
        {
            cluster_ips.push(parse_ip(address, "spec.clusterIP")?);
        }
        let kind = match (spec.type_.as_deref(), headless, cluster_ips.is_empty()) {
            (Some("ExternalName"), _, _) => ServiceKind::ExternalName,
            (_, true, _) => ServiceKind::Headless,
            (_, false, true) => ServiceKind::Unassigned,
            (_, false, false) => ServiceKind::ClusterIp,
        };
        let mut ports = Vec::new();
        let mut other_ports = Vec::new();
        for port in spec.ports.unwrap_or_default() {
            if is_tcp(port.protocol.as_deref()) {
                ports.push(ServicePort::from_kubernetes(port)?);
            } else if let Some(protocol) = NonTcpProtocol::parse(port.protocol.as_deref()) {
                other_ports.push((protocol, ServicePort::from_kubernetes(port)?));
            }
        }
        let traffic = match spec.internal_traffic_policy.as_deref() {
            Some("Local") => InternalTrafficPolicy::Local,
            _ => InternalTrafficPolicy::Cluster,
        };
        let families = spec.ip_families.unwrap_or_default();
        let families = families
            .iter()
            .map(|family| if family == "IPv6" { IpFamily::V6 } else { IpFamily::V4 })
            .collect();
        Ok(Self {
            meta,
            uid,
            cluster_ips,
            kind,
            ports,
            non_tcp_ports: other_ports,
            selector: spec.selector.iter().flatten().collect(),
            internal_traffic_policy: traffic,
            families,
            not_ready_addresses: match spec.publish_not_ready_addresses {
                Some(true) => NotReadyAddresses::Published,
                Some(false) | None => NotReadyAddresses::Omitted,
            },
        })
    }

    pub fn port(&self, number: u16) -> Option<&ServicePort> {
        self.ports.iter().find(|port| port.port == number)
    }
}

impl ServicePort {
    fn from_kubernetes(port: KubernetesServicePort) -> Result<Self, String> {
        let number = port_number(port.port)?;
        let target = match port.target_port {
            None | Some(IntOrString::Int(0)) => PortRef::Number(number),
            Some(target) => PortRef::from_kubernetes(target)?,
        };
        Ok(Self {
            name: port.name.unwrap_or_default(),
            port: number,
            target,
            app_protocol: port.app_protocol,
        })
    }
}

/// Addresses that share their ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subset {
    pub ports: Vec<SubsetPort>,
    pub addresses: Box<[Address]>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SubsetPort {
    /// The name of the Service's port. Empty if that has no name.
    pub name: String,
    pub port: u16,
}

/// An address of a service, ready or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub ip: IpAddr,
    pub ready: EndpointReadiness,
    pub hostname: Option<Box<str>>,
    pub node: Option<Arc<str>>,
    pub zone: Option<Arc<str>>,
    pub hint_zones: Arc<[Arc<str>]>,
    pub hint_nodes: Arc<[Arc<str>]>,
    pub target: AddressTarget,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointReadiness {
    Ready,
    /// Terminating but still serving. Used only if no ready address is left.
    Terminating,
    NotReady,
}

impl EndpointReadiness {
    /// Returns the readiness of an endpoint that is not terminating.
    pub fn from_ready(ready: bool) -> Self {
        if ready { Self::Ready } else { Self::NotReady }
    }
}

/// The kind from which endpoints are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointsSource {
    EndpointSlices,
    Endpoints,
}

/// The object that an address belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressTarget {
    Pod(NamespacedName),
    ExternalWorkload(NamespacedName),
    /// None, or an object of another kind, such as a Node.
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoints {
    pub meta: Meta,
    pub subsets: Vec<Subset>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct EndpointSlice {
    pub meta: Meta,
    /// The complete object, if this control plane wrote it.
    pub managed_object: Option<Arc<KubernetesSlice>>,
    /// The Service of the slice. A slice without a Service has no effect.
    pub service: Option<NamespacedName>,
    pub subset: Subset,
    /// The address type is FQDN. Such addresses are ignored, because proxies do not connect to names.
    pub has_fqdn_addresses: bool,
}

impl Endpoints {
    pub fn from_kubernetes(endpoints: KubernetesEndpoints) -> Result<Self, String> {
        let meta = Meta::from_kubernetes(endpoints.metadata)?;
        let mut subsets = Vec::new();
        for subset in endpoints.subsets.unwrap_or_default() {
            let mut ports = Vec::new();
            for port in subset.ports.unwrap_or_default() {
                if is_tcp(port.protocol.as_deref()) {
                    ports.push(SubsetPort {
                        name: port.name.unwrap_or_default(),
                        port: port_number(port.port)?,
                    });
                }
            }
            let mut addresses = Vec::new();
            for address in subset.addresses.unwrap_or_default() {
                addresses.push(Address {
                    ip: parse_ip(&address.ip, "subsets[].addresses[].ip")?,
                    ready: EndpointReadiness::Ready,
                    hostname: hostname(address.hostname),
                    node: intern_opt(address.node_name),
                    zone: None,
                    hint_zones: Arc::default(),
                    hint_nodes: Arc::default(),
                    target: AddressTarget::from_kubernetes(address.target_ref, meta.namespace()),
                });
            }
            subsets.push(Subset {
                ports,
                addresses: addresses.into(),
            });
        }
        Ok(Self { meta, subsets })
    }
}

impl EndpointSlice {
    pub fn from_kubernetes(mut slice: KubernetesSlice) -> Result<Self, String> {
        slice.metadata.managed_fields = None;
        let labels = slice.metadata.labels.as_ref();
        let writer = labels.and_then(|labels| labels.get(label::SLICE_MANAGED_BY));
        let managed = (writer.map(String::as_str) == Some(SLICE_MANAGED_BY_VALUE)).then(|| Arc::new(slice.clone()));
        let meta = Meta::from_kubernetes(slice.metadata)?;
        let owner = meta
            .owner
            .as_ref()
            .filter(|owner| &*owner.kind == "Service")
            .map(|owner| &*owner.name);
        let service = meta.label(label::SERVICE_NAME).or(owner);
        let service = service.map(|service| NamespacedName::new(meta.namespace().clone(), service));
        let mut ports = Vec::new();
        for port in slice.ports.unwrap_or_default() {
            // A port without a number means all ports, which is not supported.
            if let (true, Some(number)) = (is_tcp(port.protocol.as_deref()), port.port) {
                ports.push(SubsetPort {
                    name: port.name.unwrap_or_default(),
                    port: port_number(number)?,
                });
            }
        }
        let mut addresses = Vec::new();
        let has_fqdn_addresses = slice.address_type == "FQDN";
        if !has_fqdn_addresses {
            for endpoint in slice.endpoints {
                addresses.extend(Address::from_kubernetes(endpoint, meta.namespace())?);
            }
        }
        Ok(Self {
            meta,
            managed_object: managed,
            service,
            subset: Subset {
                ports,
                addresses: addresses.into(),
            },
            has_fqdn_addresses,
        })
    }
}

impl Address {
    /// Reads the first address of an endpoint. One address is enough, because all addresses of an endpoint belong to
    /// the same workload.
    ///
    /// Source: `addresses` of `Endpoint` in `discovery.k8s.io/v1`.
    fn from_kubernetes(endpoint: KubernetesEndpoint, namespace: &Arc<str>) -> Result<Option<Self>, String> {
        let Some(address) = endpoint.addresses.first() else {
            return Ok(None);
        };
        let conditions = endpoint.conditions.unwrap_or_default();
        let ready = match conditions.ready {
            None | Some(true) => EndpointReadiness::Ready,
            Some(false) if conditions.serving == Some(true) && conditions.terminating == Some(true) => {
                EndpointReadiness::Terminating
            }
            Some(false) => EndpointReadiness::NotReady,
        };
        let hints = endpoint.hints.unwrap_or_default();
        let (zones, nodes) = (hints.for_zones.unwrap_or_default(), hints.for_nodes.unwrap_or_default());
        Ok(Some(Self {
            ip: parse_ip(address, "endpoints[].addresses[]")?,
            ready,
            hostname: hostname(endpoint.hostname),
            node: intern_opt(endpoint.node_name),
            zone: intern_opt(endpoint.zone),
            hint_zones: NAME_LISTS.intern(Vec::from_iter(zones.iter().map(|zone| intern(&zone.name)))),
            hint_nodes: NAME_LISTS.intern(Vec::from_iter(nodes.iter().map(|node| intern(&node.name)))),
            target: AddressTarget::from_kubernetes(endpoint.target_ref, namespace),
        }))
    }
}

impl AddressTarget {
    fn from_kubernetes(target: Option<ObjectReference>, namespace: &Arc<str>) -> Self {
        let Some(target) = target else { return Self::Other };
        let namespace = target
            .namespace
            .map_or_else(|| namespace.clone(), |namespace| intern(&namespace));
        let name = NamespacedName::new(namespace, target.name.unwrap_or_default());
        match target.kind.as_deref() {
            Some("Pod") => Self::Pod(name),
            Some("ExternalWorkload") => Self::ExternalWorkload(name),
            _ => Self::Other,
        }
    }
}

fn hostname(name: Option<String>) -> Option<Box<str>> {
    name.filter(|name| !name.is_empty()).map(Into::into)
}

pub fn parse_ip(text: &str, field: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| format!("{field}: {text:?} is not an IP address"))
}

static NAME_LISTS: Interner<[Arc<str>]> = Interner::new();

/// Value of [`label::SLICE_MANAGED_BY`] on slices of external workloads.
pub const SLICE_MANAGED_BY_VALUE: &str = "linkerd-external-workloads-controller";
