//! Ports as injection sees them: what containers expose, and which of it is opaque.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Probe, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tulle_core::ports::PortSet;

/// The ports and ranges of a comma list in which names stand for the ports of containers; and the parts that are none.
pub(super) fn resolve(text: &str, containers: &[Container]) -> (String, Vec<String>) {
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let named = ports_of(containers).find(|(name, _)| *name == Some(part));
        match named {
            Some((_, port)) => known.push(port.to_string()),
            None if part.parse::<PortSet>().is_ok() => known.push(part.to_owned()),
            None => unknown.push(part.to_owned()),
        }
    }
    (known.join(","), unknown)
}

/// The value of the opaque-ports annotation for containers that expose ports which are opaque by default.
pub(super) fn opaque_of_containers(default: &str, containers: &[Container]) -> Option<String> {
    let opaque = default_set(default, containers);
    let exposed = ports_of(containers).map(|(_, port)| port);
    list(exposed.filter(|port| opaque.contains(*port)))
}

/// The same for a Service: what counts is where a port leads, what is listed is the port itself.
pub(super) fn opaque_of_service(default: &str, ports: &[ServicePort]) -> Option<String> {
    let opaque = default_set(default, &[]);
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

/// All ports that containers expose or are probed at over HTTP, as text sorted by its letters.
///
/// The proxy asks for the policies of these ports before anybody connects.
pub(super) fn inbound(containers: &[Container]) -> String {
    let probes = containers.iter().flat_map(|container| {
        let probes = [&container.liveness_probe, &container.readiness_probe];
        probes
            .into_iter()
            .filter_map(|probe| probe.as_ref().and_then(http_port))
    });
    let ports: BTreeSet<String> = ports_of(containers)
        .map(|(_, port)| port)
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

/// Each port of each container with its name.
fn ports_of(containers: &[Container]) -> impl Iterator<Item = (Option<&str>, u16)> {
    let ports = containers.iter().flat_map(|container| container.ports.iter().flatten());
    ports.filter_map(|port| Some((port.name.as_deref(), u16::try_from(port.container_port).ok()?)))
}

fn default_set(default: &str, containers: &[Container]) -> PortSet {
    // Parts that are none were refused, or warned of, where the list came from.
    resolve(default, containers).0.parse().unwrap_or_default()
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
