//! What runs: pods, external workloads, the nodes under them and the objects that own them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Container as KubernetesContainer, Node as KubernetesNode, Pod as KubernetesPod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use tulle_core::names::label;

use crate::resources::meta::Meta;
use crate::resources::service::{PortRef, Readiness, is_tcp, parse_ip, port_number};

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
    pub node: Option<String>,
    pub service_account: String,
    /// With a subdomain, the pod's name below its headless service.
    pub hostname: Option<String>,
    pub subdomain: Option<String>,
    pub ports: Vec<ContainerPort>,
    /// Paths of HTTP probes by port.
    pub probes: BTreeMap<u16, BTreeSet<String>>,
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
    pub name: Option<String>,
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
        let mut probes: BTreeMap<u16, BTreeSet<String>> = BTreeMap::new();
        let mut proxy = ProxyContainer::Absent;
        let init_containers = spec.init_containers.unwrap_or_default();
        for container in init_containers.iter().chain(&spec.containers) {
            let declared = container_ports(container)?;
            for (port, path) in container_probes(container, &declared) {
                probes.entry(port).or_default().insert(path);
            }
            ports.extend(declared);
            if container.name == "linkerd-proxy" {
                proxy = ProxyContainer::from_kubernetes(container);
            }
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
            node: spec.node_name.filter(|node| !node.is_empty()),
            service_account: spec
                .service_account_name
                .or(spec.service_account)
                .filter(|account| !account.is_empty())
                .unwrap_or_else(|| "default".to_owned()),
            hostname: spec.hostname,
            subdomain: spec.subdomain,
            ports,
            probes,
            proxy,
        })
    }

    /// Numbers that a port reference stands for; several containers may use one name.
    pub fn resolve(&self, port: &PortRef) -> BTreeSet<u16> {
        resolve(&self.ports, port)
    }

    /// Whether it runs and has an address of its own to answer for.
    pub fn is_serving(&self) -> bool {
        self.phase == Some(Phase::Running) && !self.meta.terminating
    }
}

fn resolve(ports: &[ContainerPort], port: &PortRef) -> BTreeSet<u16> {
    match port {
        PortRef::Number(number) => BTreeSet::from([*number]),
        PortRef::Name(name) => ports
            .iter()
            .filter(|port| port.name.as_ref() == Some(name))
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
            name: port.name.clone(),
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

/// HTTP probes of one container as port and path without its query.
fn container_probes(container: &KubernetesContainer, ports: &[ContainerPort]) -> Vec<(u16, String)> {
    let probes = [
        &container.liveness_probe,
        &container.readiness_probe,
        &container.startup_probe,
    ];
    let mut found = Vec::new();
    for get in probes.into_iter().flatten().filter_map(|probe| probe.http_get.as_ref()) {
        let path = get
            .path
            .as_deref()
            .and_then(|path| path.split('?').next())
            .filter(|path| !path.is_empty());
        let path = path.unwrap_or("/");
        if let Ok(port) = PortRef::from_kubernetes(get.port.clone()) {
            found.extend(resolve(ports, &port).into_iter().map(|port| (port, path.to_owned())));
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
    /// A DNS-like name or a SPIFFE URI.
    pub identity: String,
    pub server_name: String,
    pub ips: Vec<IpAddr>,
    pub ports: Vec<ContainerPort>,
    /// None when the object has no status.
    pub ready: Option<Readiness>,
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
    // The older version of the API spells it `meshTls`.
    #[serde(rename = "meshTLS", alias = "meshTls")]
    mesh_tls: RawMeshTls,
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
    conditions: Option<Vec<RawCondition>>,
}

#[derive(Deserialize)]
struct RawCondition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
}

impl ExternalWorkload {
    pub(super) fn from_raw(raw: RawExternalWorkload) -> Result<Self, String> {
        let meta = Meta::from_kubernetes(raw.metadata)?;
        for (field, value) in [
            ("identity", &raw.spec.mesh_tls.identity),
            ("serverName", &raw.spec.mesh_tls.server_name),
        ] {
            if value.is_empty() || value.len() > 253 {
                return Err(format!(
                    "spec.meshTLS.{field} has {} characters; 1 to 253 are allowed",
                    value.len()
                ));
            }
        }
        if raw.spec.workload_ips.len() > 2 {
            return Err(format!(
                "spec.workloadIPs has {} entries; at most 2 are allowed",
                raw.spec.workload_ips.len()
            ));
        }
        let mut ips = Vec::new();
        for ip in &raw.spec.workload_ips {
            ips.push(parse_ip(&ip.ip, "spec.workloadIPs[].ip")?);
        }
        let mut ports = Vec::new();
        for port in raw.spec.ports.iter().filter(|port| is_tcp(port.protocol.as_deref())) {
            ports.push(ContainerPort {
                name: port.name.clone(),
                port: port_number(port.port)?,
                host_port: None,
            });
        }
        let ready = raw.status.and_then(|status| status.conditions).map(|conditions| {
            let ready = conditions
                .iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True");
            if ready { Readiness::Ready } else { Readiness::NotReady }
        });
        let RawMeshTls { identity, server_name } = raw.spec.mesh_tls;
        Ok(Self {
            meta,
            identity,
            server_name,
            ips,
            ports,
            ready,
        })
    }

    pub fn resolve(&self, port: &PortRef) -> BTreeSet<u16> {
        resolve(&self.ports, port)
    }
}

/// A node, of which only the zone matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub meta: Meta,
    pub zone: Option<String>,
}

impl Node {
    pub fn from_kubernetes(node: KubernetesNode) -> Result<Self, String> {
        let meta = Meta::from_kubernetes(node.metadata)?;
        let zone = meta
            .label(label::ZONE)
            .filter(|zone| !zone.is_empty())
            .map(str::to_owned);
        Ok(Self { meta, zone })
    }
}

/// An object of which only the metadata matters: namespaces, replica sets, jobs.
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
pub const CONTROL_PLANE_COMPONENT: &str = "linkerd.io/control-plane-component";
