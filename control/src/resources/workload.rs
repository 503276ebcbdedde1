//! Workloads: pods, external workloads, their nodes and owners.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container as KubernetesContainer, Pod as KubernetesPod, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;
use smallvec::SmallVec;
use tulle_core::addr;
use tulle_core::dns_names::is_dns_subdomain;
use tulle_core::identity::Identity;
use tulle_core::names::label;

use crate::resources::interning::{Interner, intern, intern_opt};
use crate::resources::meta::Meta;
use crate::resources::port_list::{PortList, ResolvedPorts};
use crate::resources::probe_path;
use crate::resources::service::{EndpointReadiness, NonTcpProtocol, PortRef, is_tcp, parse_ip, port_number};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub meta: Meta,
    pub ips: SmallVec<[IpAddr; 1]>,
    pub host_ips: SmallVec<[IpAddr; 1]>,
    pub network: PodNetwork,
    /// `None` if the object has no status.
    pub phase: Option<PodPhase>,
    /// `None` if the object has no conditions.
    pub ready: Option<EndpointReadiness>,
    pub node: Option<Arc<str>>,
    pub service_account: Arc<str>,
    /// With a subdomain, the first label of the pod's DNS name: `<hostname>.<subdomain>.<namespace>.svc`.
    pub hostname: Option<Box<str>>,
    pub subdomain: Option<Box<str>>,
    /// Interned, because replicas declare the same ports.
    pub ports: Arc<[DeclaredPort]>,
    /// Ports and paths of HTTP probes, sorted and interned.
    pub probes: Arc<[(u16, Arc<str>)]>,
    pub proxy: ProxyContainer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodNetwork {
    Pod,
    Host,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodPhase {
    Running,
    /// Succeeded or Failed: the pod will not serve again.
    Terminated,
    Pending,
}

/// A port that a container or an external workload declares. It is a TCP port, except in `non_tcp_ports`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeclaredPort {
    pub name: Option<Arc<str>>,
    pub port: u16,
    pub host_port: Option<u16>,
}

/// The sidecar, according to the environment of its container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyContainer {
    Absent,
    /// The environment has no valid admin or control port.
    Invalid,
    Present {
        inbound: Option<u16>,
        admin: u16,
        control: u16,
    },
}

impl Pod {
    pub fn from_kubernetes(pod: KubernetesPod) -> Result<Self, String> {
        let meta = Meta::from_kubernetes(pod.metadata)?;
        let spec = pod.spec.ok_or("spec is missing")?;
        let status = pod.status.unwrap_or_default();
        let mut ips = SmallVec::new();
        for ip in status.pod_ips.unwrap_or_default() {
            ips.push(parse_ip(&ip.ip, "status.podIPs")?);
        }
        if let Some(ip) = status.pod_ip.filter(|ip| !ip.is_empty()) {
            let ip = parse_ip(&ip, "status.podIP")?;
            if !ips.contains(&ip) {
                ips.insert(0, ip);
            }
        }
        let mut host_ips = SmallVec::new();
        for ip in status.host_ips.unwrap_or_default() {
            host_ips.push(parse_ip(&ip.ip, "status.hostIPs")?);
        }
        if let Some(ip) = status.host_ip.filter(|ip| !ip.is_empty()) {
            let ip = parse_ip(&ip, "status.hostIP")?;
            if !host_ips.contains(&ip) {
                host_ips.insert(0, ip);
            }
        }
        let phase = status.phase.as_deref().map(|phase| match phase {
            "Running" => PodPhase::Running,
            "Succeeded" | "Failed" => PodPhase::Terminated,
            _ => PodPhase::Pending,
        });
        let ready = status.conditions.map(|conditions| {
            let ready = conditions
                .iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True");
            EndpointReadiness::from_ready(ready)
        });
        let mut ports = Vec::new();
        let mut probes = BTreeSet::new();
        let mut proxy = ProxyContainer::Absent;
        for container in long_running_containers(&spec) {
            let declared = container_ports(container)?;
            probes.extend(container_probes(container, &declared));
            ports.extend(declared);
        }
        let init_containers = spec.init_containers.iter().flatten();
        if let Some(container) = init_containers
            .chain(&spec.containers)
            .find(|one| one.name == "linkerd-proxy")
        {
            proxy = ProxyContainer::from_kubernetes(container);
        }
        let service_account = spec
            .service_account_name
            .or(spec.service_account)
            .filter(|account| !account.is_empty())
            .unwrap_or_else(|| "default".to_owned());
        // The service account is part of the pod's identity. An API server validates it, but a manifest directory does
        // not.
        if !is_dns_subdomain(&service_account) {
            return Err(format!(
                "spec.serviceAccountName {service_account:?} is not a valid name; use a DNS subdomain such as web"
            ));
        }
        Ok(Self {
            meta,
            ips,
            host_ips,
            network: if spec.host_network == Some(true) {
                PodNetwork::Host
            } else {
                PodNetwork::Pod
            },
            phase,
            ready,
            node: intern_opt(spec.node_name.filter(|node| !node.is_empty())),
            service_account: intern(&service_account),
            hostname: spec.hostname.map(Into::into),
            subdomain: spec.subdomain.map(Into::into),
            ports: PORT_LISTS.intern(ports),
            probes: PROBE_LISTS.intern(Vec::from_iter(probes)),
            proxy,
        })
    }

    pub fn probe_paths(&self, port: u16) -> BTreeSet<String> {
        let probes = self.probes.iter().filter(|(probed_port, _)| *probed_port == port);
        probes.map(|(_, path)| path.to_string()).collect()
    }

    /// Resolves a port reference. Several containers can declare the same port name.
    pub fn resolve_port(&self, port: &PortRef) -> BTreeSet<u16> {
        resolve_port(&self.ports, port)
    }

    /// Resolves the target port of a Service. If several containers declare the same port name, the first one counts.
    pub fn target_port(&self, port: &PortRef) -> Option<u16> {
        target_port(&self.ports, port)
    }

    /// Returns the addresses that the pod claims: its own IPs unless it uses the host network, and the host IPs if it uses the
    /// host network or a host port. No address if the pod has ended or is being deleted.
    pub fn claimed_ips(&self) -> impl Iterator<Item = IpAddr> {
        let holds_addresses = self.phase != Some(PodPhase::Terminated) && !self.meta.terminating;
        let pod_ips = self
            .ips
            .iter()
            .filter(move |_| holds_addresses && self.network == PodNetwork::Pod);
        let is_on_host = self.network == PodNetwork::Host || self.ports.iter().any(|port| port.host_port.is_some());
        let host_ips = self.host_ips.iter().filter(move |_| holds_addresses && is_on_host);
        pod_ips.chain(host_ips).copied()
    }

    /// Returns whether the pod has the label of meshed pods, but no proxy whose ports are known. Such a pod is no endpoint. A pod of
    /// the control plane needs no proxy: it terminates TLS itself.
    pub fn lacks_proxy(&self) -> bool {
        let control_plane = self.meta.label(label::CONTROL_PLANE_NS);
        let is_meshed = control_plane.is_some_and(|namespace| !namespace.is_empty());
        is_meshed
            && match self.proxy {
                ProxyContainer::Present { .. } => false,
                ProxyContainer::Absent => self.meta.label(label::CONTROL_PLANE_COMPONENT).is_none(),
                ProxyContainer::Invalid => true,
            }
    }

    /// Returns whether the pod is running and is not being deleted.
    pub fn is_serving(&self) -> bool {
        self.phase == Some(PodPhase::Running) && !self.meta.terminating
    }
}

/// Returns the containers that run as long as the pod: its containers, then its native sidecars. Port names are
/// resolved in this order.
///
/// Source: `FindPort` in `k8s.io/kubernetes/pkg/api/v1/pod`.
pub fn long_running_containers(spec: &PodSpec) -> impl Iterator<Item = &KubernetesContainer> {
    let is_sidecar = |container: &&KubernetesContainer| container.restart_policy.as_deref() == Some("Always");
    let sidecars = spec.init_containers.iter().flatten().filter(is_sidecar);
    spec.containers.iter().chain(sidecars)
}

/// Resolves a list of ports for a pod that is not created yet.
pub fn resolve_ports(list: &PortList, spec: &PodSpec) -> ResolvedPorts {
    list.resolve(|name| {
        let ports = long_running_containers(spec).flat_map(|container| container.ports.iter().flatten());
        let named = ports.filter(|port| is_tcp(port.protocol.as_deref()) && port.name.as_deref() == Some(name));
        named.filter_map(|port| port_number(port.container_port).ok()).collect()
    })
}

/// Resolves a list of ports for a workload that declares these ports.
pub fn resolve_declared(list: &PortList, declared: &[DeclaredPort]) -> ResolvedPorts {
    list.resolve(|name| {
        let named = declared.iter().filter(|port| port.name.as_deref() == Some(name));
        named.map(|port| port.port).collect()
    })
}

fn target_port(ports: &[DeclaredPort], port: &PortRef) -> Option<u16> {
    match port {
        PortRef::Number(number) => Some(*number),
        PortRef::Name(name) => ports
            .iter()
            .find(|port| port.name.as_deref() == Some(name))
            .map(|port| port.port),
    }
}

fn resolve_port(ports: &[DeclaredPort], port: &PortRef) -> BTreeSet<u16> {
    match port {
        PortRef::Number(number) => BTreeSet::from([*number]),
        PortRef::Name(name) => ports
            .iter()
            .filter(|port| port.name.as_deref() == Some(name))
            .map(|port| port.port)
            .collect(),
    }
}

fn container_ports(container: &KubernetesContainer) -> Result<Vec<DeclaredPort>, String> {
    let mut ports = Vec::new();
    for port in container
        .ports
        .iter()
        .flatten()
        .filter(|port| is_tcp(port.protocol.as_deref()))
    {
        let in_container = |error| format!("container {}: {error}", container.name);
        ports.push(DeclaredPort {
            name: intern_opt(port.name.clone()),
            port: port_number(port.container_port).map_err(in_container)?,
            host_port: port
                .host_port
                .filter(|port| *port != 0)
                .map(port_number)
                .transpose()
                .map_err(in_container)?,
        });
    }
    Ok(ports)
}

/// Returns the HTTP probes of a container, as port and path. The path is the one that the kubelet requests, without its
/// query.
fn container_probes(container: &KubernetesContainer, ports: &[DeclaredPort]) -> Vec<(u16, Arc<str>)> {
    let probes = [
        &container.liveness_probe,
        &container.readiness_probe,
        &container.startup_probe,
    ];
    let mut found = Vec::new();
    for get in probes.into_iter().flatten().filter_map(|probe| probe.http_get.as_ref()) {
        let path = probe_path::kubelet_request_path(get.path.as_deref().unwrap_or_default());
        // Skips probes of port names that the container does not declare.
        if let (Some(path), Ok(port)) = (path, PortRef::from_kubernetes(get.port.clone()))
            && let Some(port) = target_port(ports, &port)
        {
            found.push((port, intern(&path)));
        }
    }
    found
}

impl ProxyContainer {
    fn from_kubernetes(container: &KubernetesContainer) -> Self {
        let port = |variable: &str| {
            let env = container.env.iter().flatten().find(|env| env.name == variable)?;
            let (_, port) = env.value.as_ref()?.rsplit_once(':')?;
            port.parse::<u16>().ok().filter(|port| *port > 0)
        };
        match (
            port("LINKERD2_PROXY_ADMIN_LISTEN_ADDR"),
            port("LINKERD2_PROXY_CONTROL_LISTEN_ADDR"),
        ) {
            (Some(admin), Some(control)) => Self::Present {
                inbound: port("LINKERD2_PROXY_INBOUND_LISTEN_ADDR"),
                admin,
                control,
            },
            _ => Self::Invalid,
        }
    }
}

/// A workload outside Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalWorkload {
    pub meta: Meta,
    pub uid: String,
    /// A DNS name or a SPIFFE URI.
    pub identity: String,
    pub server_name: String,
    pub ips: Vec<IpAddr>,
    pub ports: Vec<DeclaredPort>,
    /// Ports of other protocols. Proxies do not serve them, but EndpointSlices list them.
    pub non_tcp_ports: Vec<(NonTcpProtocol, DeclaredPort)>,
    /// `None` if the object has no status.
    pub ready: Option<EndpointReadiness>,
    /// The conditions of the status, unchanged, including those of other controllers.
    pub conditions: Vec<Value>,
}

#[derive(Deserialize)]
pub(super) struct RawExternalWorkload {
    metadata: ObjectMeta,
    spec: RawSpec,
    status: Option<RawStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawSpec {
    #[serde(rename = "meshTLS")]
    mesh_tls: Option<RawMeshTls>,
    /// The spelling of the older API version, which stays in objects written with it.
    #[serde(rename = "meshTls")]
    legacy_mesh_tls: Option<RawMeshTls>,
    #[serde(default)]
    ports: Vec<RawPort>,
    #[serde(rename = "workloadIPs", default)]
    workload_ips: Vec<RawIp>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawMeshTls {
    identity: String,
    server_name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPort {
    name: Option<String>,
    port: i32,
    protocol: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawIp {
    ip: String,
}

#[derive(Deserialize)]
struct RawStatus {
    conditions: Option<Vec<Value>>,
}

impl ExternalWorkload {
    pub(super) fn from_raw(raw: RawExternalWorkload) -> Result<Self, String> {
        let uid = raw.metadata.uid.clone().unwrap_or_default();
        let meta = Meta::from_kubernetes(raw.metadata)?;
        let RawMeshTls { identity, server_name } = raw
            .spec
            .mesh_tls
            .or(raw.spec.legacy_mesh_tls)
            .ok_or("spec.meshTLS is missing")?;
        for (field, value) in [("identity", &identity), ("serverName", &server_name)] {
            if value.is_empty() || value.len() > 253 {
                return Err(format!(
                    "spec.meshTLS.{field} has {} characters; 1 to 253 are allowed",
                    value.len()
                ));
            }
        }
        // An identity that no proxy can verify would make the workload unreachable.
        identity
            .parse::<Identity>()
            .map_err(|error| format!("spec.meshTLS.identity: {error}"))?;
        if !matches!(server_name.parse(), Ok(Identity::Dns(_))) {
            return Err(format!("spec.meshTLS.serverName {server_name:?} is not a DNS name"));
        }
        if raw.spec.workload_ips.len() > 2 {
            return Err(format!(
                "spec.workloadIPs has {} entries; at most 2 are allowed",
                raw.spec.workload_ips.len()
            ));
        }
        let mut ips = Vec::new();
        for ip in &raw.spec.workload_ips {
            let ip = parse_ip(&ip.ip, "spec.workloadIPs[].ip")?;
            if addr::is_link_local(ip) {
                return Err(format!(
                    "spec.workloadIPs[].ip {ip} is a link-local address; use a routable address"
                ));
            }
            ips.push(ip);
        }
        let mut ports = Vec::new();
        let mut other_ports = Vec::new();
        for raw in raw.spec.ports {
            let port = DeclaredPort {
                name: intern_opt(raw.name),
                port: port_number(raw.port)?,
                host_port: None,
            };
            if is_tcp(raw.protocol.as_deref()) {
                ports.push(port);
            } else if let Some(protocol) = NonTcpProtocol::parse(raw.protocol.as_deref()) {
                other_ports.push((protocol, port));
            }
        }
        let conditions = raw.status.and_then(|status| status.conditions);
        let ready = conditions.as_ref().map(|conditions| {
            let ready = conditions
                .iter()
                .any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
            EndpointReadiness::from_ready(ready)
        });
        Ok(Self {
            meta,
            uid,
            identity,
            server_name,
            ips,
            ports,
            non_tcp_ports: other_ports,
            ready,
            conditions: conditions.unwrap_or_default(),
        })
    }

    pub fn resolve_port(&self, port: &PortRef) -> BTreeSet<u16> {
        resolve_port(&self.ports, port)
    }

    /// Returns the older external workload that takes precedence for an address over this one, if there is one. `with_address`
    /// are all external workloads that have the address.
    ///
    /// An address belongs to the namespace of its oldest workload: workloads of other namespaces cannot have it. Workloads of
    /// this namespace share the address if their ports differ; of two with the same port, the older one takes precedence.
    pub fn conflicting_older_workload<'a>(&self, with_address: impl IntoIterator<Item = &'a Self>) -> Option<&'a Self> {
        let is_older = |other: &&'a Self| other.meta.age_order() < self.meta.age_order();
        let mut older: Vec<&Self> = with_address.into_iter().filter(is_older).collect();
        older.sort_by(|a, b| a.meta.age_order().cmp(&b.meta.age_order()));
        let oldest = older.first()?;
        if oldest.meta.namespace() != self.meta.namespace() {
            return Some(oldest);
        }
        let is_shared_port = |port: &DeclaredPort| self.ports.iter().any(|ours| ours.port == port.port);
        let conflicts =
            |other: &&Self| other.meta.namespace() == self.meta.namespace() && other.ports.iter().any(is_shared_port);
        older.into_iter().find(conflicts)
    }

    /// Resolves the target port of a Service. An external workload serves only the ports that it declares.
    pub fn target_port(&self, port: &PortRef) -> Option<u16> {
        target_port(&self.ports, port).filter(|port| self.ports.iter().any(|declared| declared.port == *port))
    }
}

/// A node, of which only the zone is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub meta: Meta,
    pub zone: Option<Arc<str>>,
}

impl Node {
    pub(super) fn from_raw(raw: RawMetadataOnly) -> Result<Self, String> {
        Self::from_metadata(raw.metadata)
    }

    pub(super) fn from_metadata(metadata: ObjectMeta) -> Result<Self, String> {
        let meta = Meta::from_kubernetes(metadata)?;
        let zone = meta.label(label::ZONE).filter(|zone| !zone.is_empty()).map(intern);
        Ok(Self { meta, zone })
    }
}

/// An object of which only the metadata is used: namespaces, replica sets, jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialObjectMetadata {
    pub meta: Meta,
}

#[derive(Deserialize)]
pub(super) struct RawMetadataOnly {
    metadata: ObjectMeta,
}

impl PartialObjectMetadata {
    pub(super) fn from_raw(raw: RawMetadataOnly) -> Result<Self, String> {
        Self::from_metadata(raw.metadata)
    }

    pub(super) fn from_metadata(metadata: ObjectMeta) -> Result<Self, String> {
        Meta::from_kubernetes(metadata).map(|meta| Self { meta })
    }
}

static PORT_LISTS: Interner<[DeclaredPort]> = Interner::new();
static PROBE_LISTS: Interner<[(u16, Arc<str>)]> = Interner::new();

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_external_workload_has_the_mesh_tls_field_of_either_version() {
        let read = |spec: Value| {
            let raw = json!({ "metadata": { "name": "vm", "namespace": "shop" }, "spec": spec });
            let workload = ExternalWorkload::from_raw(serde_json::from_value(raw).unwrap());
            workload.map(|workload| workload.identity)
        };
        let named = |identity: &str| json!({ "identity": identity, "serverName": "vm" });
        assert_eq!(read(json!({ "meshTLS": named("new") })).unwrap(), "new");
        assert_eq!(read(json!({ "meshTls": named("old") })).unwrap(), "old");
        let both = json!({ "meshTls": named("old"), "meshTLS": named("new") });
        assert_eq!(read(both).unwrap(), "new");
        assert_eq!(read(json!({})).unwrap_err(), "spec.meshTLS is missing");
    }

    #[test]
    fn external_workloads_with_invalid_identities_or_link_local_addresses_are_rejected() {
        let read = |identity: &str, server_name: &str, ip: &str| {
            let raw = json!({
                "metadata": { "name": "vm", "namespace": "shop" },
                "spec": {
                    "meshTLS": { "identity": identity, "serverName": server_name },
                    "workloadIPs": [{ "ip": ip }],
                },
            });
            ExternalWorkload::from_raw(serde_json::from_value(raw).unwrap())
        };
        for (identity, server_name, ip, is_accepted) in [
            ("vm.shop", "vm.shop", "10.2.0.1", true),
            ("spiffe://root/vm", "vm.shop", "fd00::1", true),
            ("10.0.0.1", "vm.shop", "10.2.0.1", false),
            ("no identity", "vm.shop", "10.2.0.1", false),
            ("http://root/vm", "vm.shop", "10.2.0.1", false),
            ("vm.shop", "10.0.0.1", "10.2.0.1", false),
            ("vm.shop", "spiffe://root/vm", "10.2.0.1", false),
            ("vm.shop", "vm.shop", "169.254.169.254", false),
            ("vm.shop", "vm.shop", "fe80::1", false),
        ] {
            let read = read(identity, server_name, ip);
            assert_eq!(read.is_ok(), is_accepted, "{identity} {server_name} {ip}: {read:?}");
        }
    }
}
