//! Ports as injection sees them: what containers expose, and which of it is opaque.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{PodSpec, Probe, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tulle_core::ports::PortSet;

use crate::resources::port_list::PortList;
use crate::resources::workload::{resolve_ports, running_containers};

/// The value of the opaque-ports annotation for a pod that exposes ports which are opaque by default.
pub(super) fn opaque_of_pod(default: &str, spec: &PodSpec) -> Option<String> {
    let opaque = default_set(default, spec);
    let exposed = ports_of(spec).filter(|port| opaque.contains(*port));
    list(exposed)
}

/// The same for a Service: what counts is where a port leads, what is listed is the port itself.
pub(super) fn opaque_of_service(default: &str, ports: &[ServicePort]) -> Option<String> {
    let opaque = default_set(default, &PodSpec::default());
    let exposed = ports.iter().filter_map(|port| {
        let target = match &port.target_port {
            Some(IntOrString::Int(0)) | None => port.port,
            Some(IntOrString::Int(target)) => *target,
            Some(IntOrString::String(_)) => return None,
        };
        let port = u16::try_from(port.port).ok()?;
        opaque.contains(u16::try_from(target).ok()?).then_some(port)
    });
    list(exposed)
}

/// All ports that a pod exposes or is probed at over HTTP, as text sorted by its letters.
///
/// The proxy asks for the policies of these ports before anybody connects.
pub(super) fn inbound(spec: &PodSpec) -> String {
    let probes = running_containers(spec).flat_map(|container| {
        let probes = [
            &container.liveness_probe,
            &container.readiness_probe,
            &container.startup_probe,
        ];
        probes
            .into_iter()
            .filter_map(|probe| probe.as_ref().and_then(http_port))
    });
    let ports: BTreeSet<String> = ports_of(spec).chain(probes).map(|port| port.to_string()).collect();
    Vec::from_iter(ports).join(",")
}

fn http_port(probe: &Probe) -> Option<u16> {
    match &probe.http_get.as_ref()?.port {
        IntOrString::Int(port) => u16::try_from(*port).ok(),
        IntOrString::String(_) => None,
    }
}

/// Each port of each container that runs as long as the pod.
fn ports_of(spec: &PodSpec) -> impl Iterator<Item = u16> {
    let ports = running_containers(spec).flat_map(|container| container.ports.iter().flatten());
    ports.filter_map(|port| u16::try_from(port.container_port).ok())
}

fn default_set(default: &str, spec: &PodSpec) -> PortSet {
    // Parts that are none were refused, or warned of, where the list came from.
    resolve_ports(&PortList::parse(default), spec).to_set()
}

/// A comma list without repetition; nothing when there is nothing to list.
fn list(ports: impl Iterator<Item = u16>) -> Option<String> {
    let mut listed: Vec<String> = Vec::new();
    for port in ports.map(|port| port.to_string()) {
        if !listed.contains(&port) {
            listed.push(port);
        }
    }
    (!listed.is_empty()).then(|| listed.join(","))
}
