//! What runs: pods, external workloads, the nodes under them and the objects that own them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    Container as KubernetesContainer, Node as KubernetesNode, Pod as KubernetesPod, PodSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;
use tulle_core::addr;
use tulle_core::identity::Identity;
use tulle_core::names::label;

use crate::resources::meta::{Meta, is_subdomain};
use crate::resources::port_list::{PortList, ResolvedPorts};
use crate::resources::probe;
use crate::resources::service::{PortRef, Protocol, Readiness, is_tcp, parse_ip, port_number};
use crate::resources::text::{maybe_shared, shared};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub meta: Meta,
    pub ips: Vec<IpAddr>,
    pub host_ips: Vec<IpAddr>,
    pub network: PodNetwork,
    /// None when the object has no status.
    pub phase: Option<Phase>,
    /// None when the object has no conditions.
    pub ready: Option<Readiness>,
    pub node: Option<Arc<str>>,
    pub service_account: Arc<str>,
    /// With a subdomain, the pod's name below its headless service.
    pub hostname: Option<String>,
    pub subdomain: Option<String>,
    pub ports: Vec<ContainerPort>,
    /// Ports and paths of HTTP probes, sorted.
    pub probes: Vec<(u16, Arc<str>)>,
    pub proxy: ProxyContainer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodNetwork {
    Own,
    Host,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Running,
    /// Succeeded or Failed: it will never serve again.
    Over,
    Pending,
}

/// A TCP port that a container or an external workload declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerPort {
    pub name: Option<Arc<str>>,
    pub port: u16,
    pub host_port: Option<u16>,
}

/// The sidecar, as its container's environment describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyContainer {
    Absent,
    /// It does not say where its admin or control port is.
    Broken,
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
        let mut ips = Vec::new();
        for ip in status.pod_ips.unwrap_or_default() {
            ips.push(parse_ip(&ip.ip, "status.podIPs")?);
        }
        if let Some(ip) = status.pod_ip.filter(|ip| !ip.is_empty()) {
            let ip = parse_ip(&ip, "status.podIP")?;
            if !ips.contains(&ip) {
                ips.insert(0, ip);
            }
        }
        let mut host_ips = Vec::new();
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
            "Running" => Phase::Running,
            "Succeeded" | "Failed" => Phase::Over,
            _ => Phase::Pending,
        });
        let ready = status.conditions.map(|conditions| {
            let ready = conditions
                .iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True");
            if ready { Readiness::Ready } else { Readiness::NotReady }
        });
        let mut ports = Vec::new();
        let mut probes = BTreeSet::new();
        let mut proxy = ProxyContainer::Absent;
        for container in running_containers(&spec) {
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
        // It is part of the pod's identity. An API server takes no other; a directory might.
        if !is_subdomain(&service_account) {
            return Err(format!(
                "spec.serviceAccountName {service_account:?} is not a name of an object; expected one such as web"
            ));
        }
        Ok(Self {
            meta,
            ips,
            host_ips,
            network: if spec.host_network == Some(true) {
                PodNetwork::Host
            } else {
                PodNetwork::Own
            },
            phase,
            ready,
            node: maybe_shared(spec.node_name.filter(|node| !node.is_empty())),
            service_account: shared(&service_account),
            hostname: spec.hostname,
            subdomain: spec.subdomain,
            ports,
            probes: probes.into_iter().collect(),
            proxy,
        })
    }

    /// Paths of the HTTP probes of a port.
    pub fn probe_paths(&self, port: u16) -> BTreeSet<String> {
        let of_port = self.probes.iter().filter(|(probed, _)| *probed == port);
        of_port.map(|(_, path)| path.to_string()).collect()
    }

    /// Numbers that a port reference stands for; several containers may use one name.
    pub fn resolve(&self, port: &PortRef) -> BTreeSet<u16> {
        resolve(&self.ports, port)
    }

    /// The port that a Service's target port leads to: of several containers with one name for a port the first counts.
    pub fn target_port(&self, port: &PortRef) -> Option<u16> {
        target_port(&self.ports, port)
    }

    /// Addresses that nothing else in the mesh can have while the pod is there: its own, and those of its host where it
    /// listens on them.
    pub fn claims(&self) -> impl Iterator<Item = IpAddr> {
        let is_there = self.phase != Some(Phase::Over) && !self.meta.terminating;
        let own = self
            .ips
            .iter()
            .filter(move |_| is_there && self.network == PodNetwork::Own);
        let is_on_host = self.network == PodNetwork::Host || self.ports.iter().any(|port| port.host_port.is_some());
        let of_host = self.host_ips.iter().filter(move |_| is_there && is_on_host);
        own.chain(of_host).copied()
    }

    /// Whether it runs and has an address of its own to answer for.
    pub fn is_serving(&self) -> bool {
        self.phase == Some(Phase::Running) && !self.meta.terminating
    }
}

/// Containers that run as long as the pod does: its containers, then its native sidecars. Names of ports are looked up in
/// this order.
///
/// Source: `FindPort` in `k8s.io/kubernetes/pkg/api/v1/pod`.
pub fn running_containers(spec: &PodSpec) -> impl Iterator<Item = &KubernetesContainer> {
    let is_sidecar = |container: &&KubernetesContainer| container.restart_policy.as_deref() == Some("Always");
    let sidecars = spec.init_containers.iter().flatten().filter(is_sidecar);
    spec.containers.iter().chain(sidecars)
}

/// The list of ports of an annotation for a pod that is yet to be created.
pub fn resolve_ports(list: &PortList, spec: &PodSpec) -> ResolvedPorts {
    list.resolve(|name| {
        let ports = running_containers(spec).flat_map(|container| container.ports.iter().flatten());
        let named = ports.filter(|port| is_tcp(port.protocol.as_deref()) && port.name.as_deref() == Some(name));
        named.filter_map(|port| port_number(port.container_port).ok()).collect()
    })
}

/// The list of ports of an annotation for a workload that declares these.
pub fn resolve_declared(list: &PortList, declared: &[ContainerPort]) -> ResolvedPorts {
    list.resolve(|name| {
        let named = declared.iter().filter(|port| port.name.as_deref() == Some(name));
        named.map(|port| port.port).collect()
    })
}

fn target_port(ports: &[ContainerPort], port: &PortRef) -> Option<u16> {
    match port {
        PortRef::Number(number) => Some(*number),
        PortRef::Name(name) => ports
            .iter()
            .find(|port| port.name.as_deref() == Some(name))
            .map(|port| port.port),
    }
}

fn resolve(ports: &[ContainerPort], port: &PortRef) -> BTreeSet<u16> {
    match port {
        PortRef::Number(number) => BTreeSet::from([*number]),
        PortRef::Name(name) => ports
            .iter()
            .filter(|port| port.name.as_deref() == Some(name))
            .map(|port| port.port)
            .collect(),
    }
}

fn container_ports(container: &KubernetesContainer) -> Result<Vec<ContainerPort>, String> {
    let mut ports = Vec::new();
    for port in container
        .ports
        .iter()
        .flatten()
        .filter(|port| is_tcp(port.protocol.as_deref()))
    {
        let in_container = |error| format!("container {}: {error}", container.name);
        ports.push(ContainerPort {
            name: maybe_shared(port.name.clone()),
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

/// HTTP probes of one container as port and path, as the kubelet sends it, without its query.
fn container_probes(container: &KubernetesContainer, ports: &[ContainerPort]) -> Vec<(u16, Arc<str>)> {
    let probes = [
        &container.liveness_probe,
        &container.readiness_probe,
        &container.startup_probe,
    ];
    let mut found = Vec::new();
    for get in probes.into_iter().flatten().filter_map(|probe| probe.http_get.as_ref()) {
        let path = probe::path(get.path.as_deref().unwrap_or_default());
        // A probe of a port that the container does not have never reaches anything.
        if let (Some(path), Ok(port)) = (path, PortRef::from_kubernetes(get.port.clone()))
            && let Some(port) = target_port(ports, &port)
        {
            found.push((port, shared(&path)));
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
            _ => Self::Broken,
        }
    }
}

/// A workload outside Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalWorkload {
    pub meta: Meta,
    pub uid: String,
    /// A DNS-like name or a SPIFFE URI.
    pub identity: String,
    pub server_name: String,
    pub ips: Vec<IpAddr>,
    pub ports: Vec<ContainerPort>,
    /// Ports of other protocols, which no proxy serves but EndpointSlices list.
    pub other_ports: Vec<(Protocol, ContainerPort)>,
    /// None when the object has no status.
    pub ready: Option<Readiness>,
    /// What its status says, ours and others', as it is.
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
    /// How the older version of the API spells it, and how it stays in what was written so.
    #[serde(rename = "meshTls")]
    old_mesh_tls: Option<RawMeshTls>,
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
            .or(raw.spec.old_mesh_tls)
            .ok_or("spec.meshTLS is missing")?;
        for (field, value) in [("identity", &identity), ("serverName", &server_name)] {
            if value.is_empty() || value.len() > 253 {
                return Err(format!(
                    "spec.meshTLS.{field} has {} characters; 1 to 253 are allowed",
                    value.len()
                ));
            }
        }
        // What no proxy could verify is never reached without.
        identity
            .parse::<Identity>()
            .map_err(|error| format!("spec.meshTLS.identity: {error}"))?;
        if !matches!(server_name.parse(), Ok(Identity::Dns(_))) {
            return Err(format!(
                "spec.meshTLS.serverName is {server_name:?}, which is no DNS name"
            ));
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
                return Err(format!("spec.workloadIPs[].ip is {ip}, an address of a link alone"));
            }
            ips.push(ip);
        }
        let mut ports = Vec::new();
        let mut other_ports = Vec::new();
        for raw in raw.spec.ports {
            let port = ContainerPort {
                name: maybe_shared(raw.name),
                port: port_number(raw.port)?,
                host_port: None,
            };
            if is_tcp(raw.protocol.as_deref()) {
                ports.push(port);
            } else if let Some(protocol) = Protocol::other_than_tcp(raw.protocol.as_deref()) {
                other_ports.push((protocol, port));
            }
        }
        let conditions = raw.status.and_then(|status| status.conditions);
        let ready = conditions.as_ref().map(|conditions| {
            let ready = conditions
                .iter()
                .any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
            if ready { Readiness::Ready } else { Readiness::NotReady }
        });
        Ok(Self {
            meta,
            uid,
            identity,
            server_name,
            ips,
            ports,
            other_ports,
            ready,
            conditions: conditions.unwrap_or_default(),
        })
    }

    pub fn resolve(&self, port: &PortRef) -> BTreeSet<u16> {
        resolve(&self.ports, port)
    }

    /// Of external workloads that name an address, this one among them, the one that has it in its place, if there is one:
    /// the oldest has it, and with it those of its namespace that have other ports.
    pub fn holder<'a>(&self, all: impl IntoIterator<Item = &'a Self>) -> Option<&'a Self> {
        let is_older = |other: &&'a Self| other.meta.seniority() < self.meta.seniority();
        let mut older: Vec<&Self> = all.into_iter().filter(is_older).collect();
        older.sort_by(|a, b| a.meta.seniority().cmp(&b.meta.seniority()));
        let oldest = older.first()?;
        if oldest.meta.namespace() != self.meta.namespace() {
            return Some(oldest);
        }
        let is_of_ours = |port: &ContainerPort| self.ports.iter().any(|ours| ours.port == port.port);
        let takes =
            |other: &&Self| other.meta.namespace() == self.meta.namespace() && other.ports.iter().any(is_of_ours);
        older.into_iter().find(takes)
    }

    /// The port that a Service's target port leads to; an external workload serves only ports that it declares.
    pub fn target_port(&self, port: &PortRef) -> Option<u16> {
        target_port(&self.ports, port).filter(|port| self.ports.iter().any(|declared| declared.port == *port))
    }
}

/// A node, of which only the zone matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub meta: Meta,
    pub zone: Option<Arc<str>>,
}

impl Node {
    pub fn from_kubernetes(node: KubernetesNode) -> Result<Self, String> {
        let meta = Meta::from_kubernetes(node.metadata)?;
        let zone = meta.label(label::ZONE).filter(|zone| !zone.is_empty()).map(shared);
        Ok(Self { meta, zone })
    }
}

/// An object of which only the metadata matters: namespaces, secrets, replica sets, jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bare {
    pub meta: Meta,
}

#[derive(Deserialize)]
pub(super) struct RawBare {
    metadata: ObjectMeta,
}

impl Bare {
    pub(super) fn from_raw(raw: RawBare) -> Result<Self, String> {
        Ok(Self {
            meta: Meta::from_kubernetes(raw.metadata)?,
        })
    }
}

/// Label of the control plane's own pods, which terminate TLS themselves and need no sidecar.
pub const CONTROL_PLANE_COMPONENT: &str = label::CONTROL_PLANE_COMPONENT;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_external_workload_is_known_by_the_name_of_either_version() {
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
    fn an_external_workload_that_no_proxy_could_verify_or_may_reach_is_refused() {
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
        for (identity, server_name, ip, is_taken) in [
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
            assert_eq!(read.is_ok(), is_taken, "{identity} {server_name} {ip}: {read:?}");
        }
    }
}
