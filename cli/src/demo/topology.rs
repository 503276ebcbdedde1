//! The topology of the demo, from its manifests: hosts, applications and services.
//!
//! The control plane reads the same files. The topology decides which network namespaces, addresses and processes exist.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use serde::Deserialize;
use tulle_core::duration;
use tulle_core::names::annotation;

/// Everything that the demo builds, with the addresses from the manifests.
#[derive(Clone, Debug)]
pub(super) struct Topology {
    pub(super) workloads: Vec<Workload>,
    pub(super) services: BTreeMap<String, Service>,
    /// The last part of all identities.
    pub(super) trust_domain: String,
}

/// A host of the mesh: an application and its sidecar.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) service_account: String,
    pub(super) identity: String,
    pub(super) ip: Ipv4Addr,
    pub(super) app: App,
    /// Port numbers by port name.
    pub(super) ports: BTreeMap<String, u16>,
}

/// The application that a workload runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum App {
    Load,
    /// HTTP and gRPC; each response is delayed by this duration.
    Web(Duration),
    Ws,
    Tcp,
}

#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) cluster_ip: Ipv4Addr,
    /// Service port numbers by port name.
    pub(super) ports: BTreeMap<String, u16>,
    /// Names of the service's workloads.
    pub(super) endpoints: Vec<String>,
}

/// Errors in the manifests that prevent the demo from running.
#[derive(Debug, thiserror::Error)]
pub(super) enum TopologyError {
    #[error("{file} is not a stream of Kubernetes objects in YAML")]
    Yaml {
        file: String,
        #[source]
        source: serde_yaml_ng::Error,
    },
    #[error("ExternalWorkload {name}: {reason}")]
    Workload { name: String, reason: String },
    #[error("Service {name}: {reason}")]
    Service { name: String, reason: String },
    #[error("{what} is missing; the demo needs {needs}")]
    Missing { what: String, needs: &'static str },
    #[error("expected exactly one ExternalWorkload with the label app: load, found {0}")]
    LoadWorkloads(usize),
}

impl Topology {
    /// Parses manifests, given as pairs of file name and text.
    pub(super) fn parse(files: &[(String, String)]) -> Result<Self, TopologyError> {
        let mut workloads = Vec::new();
        let mut services = Vec::new();
        for (file, text) in files {
            for document in serde_yaml_ng::Deserializer::from_str(text) {
                let object = Option::<Object>::deserialize(document).map_err(|source| TopologyError::Yaml {
                    file: file.clone(),
                    source,
                })?;
                match object {
                    Some(Object::ExternalWorkload(raw)) => workloads.push(raw.into_workload()?),
                    Some(Object::Service(raw)) => services.push(raw),
                    // Policies and similar objects are validated by the control plane.
                    Some(Object::Other) | None => {}
                }
            }
        }
        check_addresses_and_names(&workloads)?;
        let services = services
            .into_iter()
            .map(|raw| raw.into_service(&workloads))
            .collect::<Result<_, _>>()?;
        let trust_domain = workloads
            .first()
            .and_then(|first| trust_domain(&first.workload.identity));
        let topology = Self {
            trust_domain: trust_domain.unwrap_or_default().to_owned(),
            workloads: workloads.into_iter().map(|labelled| labelled.workload).collect(),
            services,
        };
        topology.check_complete()?;
        Ok(topology)
    }

    pub(super) fn workload(&self, name: &str) -> Option<&Workload> {
        self.workloads.iter().find(|workload| workload.name == name)
    }

    /// The workload that runs the load generators.
    pub(super) fn load_workload(&self) -> Option<&Workload> {
        self.workloads.iter().find(|workload| workload.app == App::Load)
    }

    /// The address that clients dial for a port of a service.
    pub(super) fn service_addr(&self, service: &str, port: &str) -> Option<SocketAddrV4> {
        let service = self.services.get(service)?;
        Some(SocketAddrV4::new(service.cluster_ip, *service.ports.get(port)?))
    }

    /// The endpoints of a port of a service.
    pub(super) fn endpoints(&self, service: &str, port: &str) -> Vec<(&Workload, SocketAddrV4)> {
        let names = self.services.get(service).map_or(&[][..], |service| &service.endpoints);
        let workloads = names.iter().filter_map(|name| self.workload(name));
        workloads
            .filter_map(|workload| Some((workload, SocketAddrV4::new(workload.ip, *workload.ports.get(port)?))))
            .collect()
    }

    fn check_complete(&self) -> Result<(), TopologyError> {
        let is_load = |workload: &&Workload| workload.app == App::Load;
        let n_load = self.workloads.iter().filter(is_load).count();
        if n_load != 1 {
            return Err(TopologyError::LoadWorkloads(n_load));
        }
        for (service, port) in [("web", "http"), ("web", "grpc"), ("ws", "http"), ("tcp", "echo")] {
            let needs = "the services web (ports http and grpc), ws (http) and tcp (echo), each with a workload";
            if self.service_addr(service, port).is_none() || self.endpoints(service, port).is_empty() {
                return Err(TopologyError::Missing {
                    what: format!("a Service {service} whose port {port} has an endpoint"),
                    needs,
                });
            }
        }
        Ok(())
    }
}

impl Workload {
    /// All ports that the application listens on.
    pub(super) fn port_numbers(&self) -> impl Iterator<Item = u16> + '_ {
        self.ports.values().copied()
    }
}

/// A workload with its labels, which are needed only to evaluate the services' selectors.
struct LabelledWorkload {
    workload: Workload,
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(tag = "kind")]
enum Object {
    ExternalWorkload(RawWorkload),
    Service(RawService),
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    #[serde(default = "default_namespace")]
    namespace: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct RawWorkload {
    metadata: Metadata,
    spec: RawWorkloadSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawWorkloadSpec {
    #[serde(rename = "meshTLS")]
    mesh_tls: RawMeshTls,
    #[serde(default, rename = "workloadIPs")]
    workload_ips: Vec<RawIp>,
    #[serde(default)]
    ports: Vec<RawPort>,
}

#[derive(Deserialize)]
struct RawMeshTls {
    identity: String,
}

#[derive(Deserialize)]
struct RawIp {
    ip: String,
}

#[derive(Deserialize)]
struct RawPort {
    #[serde(default)]
    name: String,
    port: u16,
}

#[derive(Deserialize)]
struct RawService {
    metadata: Metadata,
    spec: RawServiceSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawServiceSpec {
    #[serde(rename = "clusterIP", default)]
    cluster_ip: String,
    #[serde(default)]
    selector: BTreeMap<String, String>,
    ports: Vec<RawPort>,
}

impl RawWorkload {
    fn into_workload(self) -> Result<LabelledWorkload, TopologyError> {
        let name = self.metadata.name;
        let invalid = |reason: String| TopologyError::Workload {
            name: name.clone(),
            reason,
        };
        let ip = match &self.spec.workload_ips[..] {
            [only] => only.ip.parse::<Ipv4Addr>().ok(),
            _ => None,
        };
        let ip =
            ip.ok_or_else(|| invalid("the demo supports exactly one IPv4 address in spec.workloadIPs".to_owned()))?;
        let identity = self.spec.mesh_tls.identity;
        let service_account = identity.split('.').next().unwrap_or_default().to_owned();
        if trust_domain(&identity).is_none() {
            return Err(invalid(format!(
                "spec.meshTLS.identity {identity:?} is not \
                 <service account>.<namespace>.serviceaccount.identity.linkerd.<trust domain>"
            )));
        }
        let delay = match self.metadata.annotations.get(annotation::DEMO_DELAY) {
            None => Duration::ZERO,
            Some(text) => {
                duration::parse(text).map_err(|err| invalid(format!("annotation {}: {err}", annotation::DEMO_DELAY)))?
            }
        };
        let app = match self.metadata.labels.get(APP_LABEL).map(String::as_str) {
            Some("load") => App::Load,
            Some("web") => App::Web(delay),
            Some("ws") => App::Ws,
            Some("tcp") => App::Tcp,
            other => {
                return Err(invalid(format!(
                    "label {APP_LABEL} is {other:?}; expected load, web, ws or tcp"
                )));
            }
        };
        let workload = Workload {
            namespace: self.metadata.namespace,
            service_account,
            identity,
            ip,
            app,
            ports: self.spec.ports.into_iter().map(|raw| (raw.name, raw.port)).collect(),
            name,
        };
        Ok(LabelledWorkload {
            workload,
            labels: self.metadata.labels,
        })
    }
}

impl RawService {
    fn into_service(self, workloads: &[LabelledWorkload]) -> Result<(String, Service), TopologyError> {
        let name = self.metadata.name;
        let cluster_ip = self.spec.cluster_ip.parse().map_err(|_| TopologyError::Service {
            name: name.clone(),
            reason: format!("spec.clusterIP {:?} is not an IPv4 address", self.spec.cluster_ip),
        })?;
        let selected = workloads.iter().filter(|candidate| {
            let has = |(key, value): (&String, &String)| candidate.labels.get(key) == Some(value);
            candidate.workload.namespace == self.metadata.namespace
                && !self.spec.selector.is_empty()
                && self.spec.selector.iter().all(has)
        });
        let service = Service {
            cluster_ip,
            ports: self.spec.ports.into_iter().map(|raw| (raw.name, raw.port)).collect(),
            endpoints: selected.map(|labelled| labelled.workload.name.clone()).collect(),
        };
        Ok((name, service))
    }
}

fn check_addresses_and_names(workloads: &[LabelledWorkload]) -> Result<(), TopologyError> {
    let mut taken = BTreeMap::from([
        (CONTROL_IP, "the control plane"),
        (OUTSIDE_IP, "the host outside the mesh"),
    ]);
    for LabelledWorkload { workload, .. } in workloads {
        let invalid = |reason: String| TopologyError::Workload {
            name: workload.name.clone(),
            reason,
        };
        if workload.ip.octets()[..3] != CONTROL_IP.octets()[..3] {
            return Err(invalid(format!(
                "{} is not in the demo's network {NETWORK}",
                workload.ip
            )));
        }
        if let Some(other) = taken.insert(workload.ip, &workload.name) {
            return Err(invalid(format!("{} is already the address of {other}", workload.ip)));
        }
        let is_short = workload.name.len() <= MAX_NAME_LENGTH;
        if !is_short || !workload.name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            return Err(invalid(format!(
                "the name must consist of at most {MAX_NAME_LENGTH} letters, digits and '-'"
            )));
        }
    }
    Ok(())
}

/// The trust domain of an identity: the part after `.serviceaccount.identity.linkerd.`
fn trust_domain(identity: &str) -> Option<&str> {
    let (workload, domain) = identity.split_once(IDENTITY_INFIX)?;
    (workload.split('.').count() == 2 && !domain.is_empty()).then_some(domain)
}

fn default_namespace() -> String {
    "default".to_owned()
}

pub(super) const CONTROL_IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// Address of the host outside the mesh.
pub(super) const OUTSIDE_IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 9);
/// The namespace of the control plane's identities.
pub(super) const CONTROL_NAMESPACE: &str = "linkerd";
pub(super) const NETWORK: &str = "10.77.0.0/24";
const IDENTITY_INFIX: &str = ".serviceaccount.identity.linkerd.";
const APP_LABEL: &str = "app";
const MAX_NAME_LENGTH: usize = 20;

#[cfg(test)]
mod tests {
    use super::super::manifests;
    use super::*;

    fn shipped() -> Vec<(String, String)> {
        manifests::shipped()
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .collect()
    }

    #[test]
    fn the_shipped_manifests_describe_the_whole_demo() {
        let topology = Topology::parse(&shipped()).unwrap();
        let names: Vec<_> = topology
            .workloads
            .iter()
            .map(|workload| workload.name.as_str())
            .collect();
        assert_eq!(names, ["load", "web-1", "web-2", "web-3", "ws", "tcp"]);
        assert_eq!(topology.trust_domain, "cluster.local");
        assert_eq!(
            topology.workload("web-3").unwrap().app,
            App::Web(Duration::from_millis(50))
        );
        assert_eq!(topology.load_workload().unwrap().service_account, "load");
        assert_eq!(
            topology.service_addr("web", "grpc").unwrap().to_string(),
            "10.96.0.10:9090"
        );
        let endpoints: Vec<_> = topology
            .endpoints("web", "http")
            .into_iter()
            .map(|(_, addr)| addr.to_string())
            .collect();
        assert_eq!(endpoints, ["10.77.0.11:8080", "10.77.0.12:8080", "10.77.0.13:8080"]);
    }

    #[test]
    fn edited_manifests_are_refused_with_the_name_and_the_reason() {
        let check = |from: &str, to: &str, expected: &str| {
            let mut files = shipped();
            for (_, text) in &mut files {
                *text = text.replace(from, to);
            }
            let error = Topology::parse(&files).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(
            "10.77.0.12",
            "10.77.0.11",
            "ExternalWorkload web-2: 10.77.0.11 is already the address of web-1",
        );
        check(
            "10.77.0.31",
            "10.78.0.31",
            "ExternalWorkload tcp: 10.78.0.31 is not in the demo's network",
        );
        check(
            "50ms",
            "50 parsecs",
            "ExternalWorkload web-3: annotation demo.tulle.dev/delay",
        );
        check("app: ws", "app: game", "expected load, web, ws or tcp");
        check("name: load\n", "name: lo/ad\n", "the name must consist of");
        check(
            "clusterIP: 10.96.0.20",
            "clusterIP: None",
            "Service ws: spec.clusterIP \"None\"",
        );
        check(
            "name: echo",
            "name: chat",
            "a Service tcp whose port echo has an endpoint",
        );
        check("kind: Service\n", "kind: [\n", "is not a stream of Kubernetes objects");
        check(
            "load.demo.serviceaccount",
            "load.serviceaccount",
            "ExternalWorkload load: spec.meshTLS.identity",
        );
    }
}
