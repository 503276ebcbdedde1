//! The ports that containers expose, and which of them are opaque.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{PodSpec, Probe, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tulle_core::ports::PortSet;

use crate::resources::port_list::PortList;
use crate::resources::workload::{long_running_containers, resolve_ports};

/// Value of the opaque-ports annotation of a pod: the exposed ports that are opaque by default. `None` if there are none.
pub(in crate::injection) fn pod_opaque_ports(default: &str, spec: &PodSpec) -> Option<String> {
    let opaque = default_opaque_ports(default, spec);
    let exposed = container_ports(spec).filter(|port| opaque.contains(*port));
    join_unique(exposed)
}

/// Value of the opaque-ports annotation of a Service: the ports whose target ports are opaque by default. `None` if there are
/// none.
pub(in crate::injection) fn service_opaque_ports(default: &str, ports: &[ServicePort]) -> Option<String> {
    let opaque = default_opaque_ports(default, &PodSpec::default());
    let exposed = ports.iter().filter_map(|port| {
        let target = match &port.target_port {
            Some(IntOrString::Int(0)) | None => port.port,
            Some(IntOrString::Int(target)) => *target,
            Some(IntOrString::String(_)) => return None,
        };
        let port = u16::try_from(port.port).ok()?;
        opaque.contains(u16::try_from(target).ok()?).then_some(port)
    });
    join_unique(exposed)
}

/// All ports that a pod exposes or that HTTP probes use, sorted as text.
///
/// The proxy requests the policies of these ports when it starts.
pub(in crate::injection) fn inbound_ports(spec: &PodSpec) -> String {
    let probes = long_running_containers(spec).flat_map(|container| {
        let probes = [
            &container.liveness_probe,
            &container.readiness_probe,
            &container.startup_probe,
        ];
        probes
            .into_iter()
            .filter_map(|probe| probe.as_ref().and_then(http_port))
    });
    let ports: BTreeSet<String> = container_ports(spec)
        .chain(probes)
        .map(|port| port.to_string())
        .collect();
    Vec::from_iter(ports).join(",")
}

fn http_port(probe: &Probe) -> Option<u16> {
    match &probe.http_get.as_ref()?.port {
        IntOrString::Int(port) => u16::try_from(*port).ok(),
        IntOrString::String(_) => None,
    }
}

/// The ports of all containers that run as long as the pod.
fn container_ports(spec: &PodSpec) -> impl Iterator<Item = u16> {
    let ports = long_running_containers(spec).flat_map(|container| container.ports.iter().flatten());
    ports.filter_map(|port| u16::try_from(port.container_port).ok())
}

fn default_opaque_ports(default: &str, spec: &PodSpec) -> PortSet {
    // The list is a value of the chart. Its invalid entries are ignored without a report.
    resolve_ports(&PortList::parse(default), spec).to_set()
}

/// Unique ports separated by commas; `None` if there are none.
fn join_unique(ports: impl Iterator<Item = u16>) -> Option<String> {
    let mut listed: Vec<String> = Vec::new();
    for port in ports.map(|port| port.to_string()) {
        if !listed.contains(&port) {
            listed.push(port);
        }
    }
    (!listed.is_empty()).then(|| listed.join(","))
}
