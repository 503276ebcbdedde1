//! Completes the objects of manifests as the API server and its controllers would, and validates them.

use std::sync::Arc;

use tulle_core::dns_names::is_dns_subdomain;
use tulle_core::names::{label, port};

use crate::resources::Object;
use crate::resources::service::{EndpointReadiness, Service, ServiceKind};
use crate::resources::validation;
use crate::resources::workload::{Pod, PodNetwork, PodPhase, ProxyContainer};

/// Sets defaults, readiness and addresses that the manifest omits, removes the status of routes, and validates the object as
/// admission does.
///
/// # Errors
/// Fails if an API server would reject the object, or if a required value is missing that only a running cluster could
/// add.
pub(super) fn complete_and_validate(object: &mut Object) -> Result<(), String> {
    let name = &object.meta().name.name;
    if !is_dns_subdomain(name) {
        return Err(format!(
            "metadata.name {name:?} is not a valid DNS subdomain; use lower-case letters, digits, `-` and `.`"
        ));
    }
    match object {
        Object::Service(service) => validate_service(service),
        Object::Pod(pod) => set_pod_defaults(Arc::make_mut(pod)),
        Object::ExternalWorkload(workload) => {
            let workload = Arc::make_mut(workload);
            workload.ready = workload.ready.or(Some(EndpointReadiness::Ready));
            Ok(())
        }
        object => {
            clear_status(object);
            validation::validate(object)
        }
    }
}

fn validate_service(service: &Service) -> Result<(), String> {
    if service.kind == ServiceKind::Unassigned {
        return Err(
            "spec.clusterIP is missing; set the address that clients connect to, or None for a headless service".into(),
        );
    }
    let nameless = service.ports.iter().filter(|port| port.name.is_empty()).count();
    if nameless > 0 && service.ports.len() > 1 {
        return Err("spec.ports: every port needs a name if there are several ports".into());
    }
    Ok(())
}

/// Sets phase, readiness, host addresses, host ports and the ports of the sidecar, as kubelet and injector would.
fn set_pod_defaults(pod: &mut Pod) -> Result<(), String> {
    if pod.ips.is_empty() {
        return Err("status.podIP is missing; set the address that the workload listens on".into());
    }
    pod.phase = pod.phase.or(Some(PodPhase::Running));
    pod.ready = pod.ready.or(Some(EndpointReadiness::Ready));
    if pod.network == PodNetwork::Host {
        if pod.host_ips.is_empty() {
            pod.host_ips.clone_from(&pod.ips);
        }
        for declared in Arc::make_mut(&mut pod.ports) {
            declared.host_port = Some(declared.port);
        }
    }
    let meshed = pod
        .meta
        .label(label::CONTROL_PLANE_NS)
        .is_some_and(|namespace| !namespace.is_empty());
    if meshed && pod.proxy == ProxyContainer::Absent && pod.meta.label(label::CONTROL_PLANE_COMPONENT).is_none() {
        pod.proxy = ProxyContainer::Present {
            inbound: Some(port::INBOUND),
            admin: port::ADMIN,
            control: port::TAP,
        };
    }
    Ok(())
}

/// Removes the status of a route, which is ignored in manifests.
pub(super) fn clear_status(object: &mut Object) {
    if let Some(route) = object.route_mut() {
        route.clear_status();
    }
}
