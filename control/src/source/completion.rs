//! What an API server and the controllers around it do to an object before anybody reads it: defaults, admission,
//! and the status that nobody writes into a file.

use std::sync::Arc;

use tulle_core::names::{label, port};

use crate::resources::Object;
use crate::resources::meta::is_subdomain;
use crate::resources::route::Route;
use crate::resources::route_admission;
use crate::resources::service::{Readiness, Service, ServiceKind};
use crate::resources::workload::{CONTROL_PLANE_COMPONENT, Phase, Pod, PodNetwork, ProxyContainer};

/// Completes an object of a file.
///
/// # Errors
/// Why an API server would refuse it, or what only a running cluster could have added.
pub(super) fn complete(object: &mut Object) -> Result<(), String> {
    let name = &object.meta().name.name;
    if !is_subdomain(name) {
        return Err(format!(
            "metadata.name {name:?} is not made of lower-case letters, digits, `-` and `.`"
        ));
    }
    match object {
        Object::Service(service) => check_service(service),
        Object::Pod(pod) => complete_pod(Arc::make_mut(pod)),
        Object::ExternalWorkload(workload) => {
            let workload = Arc::make_mut(workload);
            workload.ready = workload.ready.or(Some(Readiness::Ready));
            Ok(())
        }
        Object::PolicyHttpRoute(route)
        | Object::GatewayHttpRoute(route)
        | Object::GrpcRoute(route)
        | Object::TlsRoute(route)
        | Object::TcpRoute(route) => complete_route(Arc::make_mut(route)),
        Object::ServiceProfile(profile) => profile.admit(),
        _ => Ok(()),
    }
}

fn check_service(service: &Service) -> Result<(), String> {
    if service.kind == ServiceKind::Unassigned {
        return Err("spec.clusterIP is missing; write the address clients dial, or None for a headless service".into());
    }
    let nameless = service.ports.iter().filter(|port| port.name.is_empty()).count();
    if nameless > 0 && service.ports.len() > 1 {
        return Err("spec.ports: every port needs a name when there are several".into());
    }
    Ok(())
}

fn complete_pod(pod: &mut Pod) -> Result<(), String> {
    if pod.ips.is_empty() {
        return Err("status.podIP is missing; write the address the workload listens on".into());
    }
    pod.phase = pod.phase.or(Some(Phase::Running));
    pod.ready = pod.ready.or(Some(Readiness::Ready));
    if pod.network == PodNetwork::Host {
        if pod.host_ips.is_empty() {
            pod.host_ips.clone_from(&pod.ips);
        }
        for declared in &mut pod.ports {
            declared.host_port = Some(declared.port);
        }
    }
    let meshed = pod
        .meta
        .label(label::CONTROL_PLANE_NS)
        .is_some_and(|namespace| !namespace.is_empty());
    if meshed && pod.proxy == ProxyContainer::Absent && pod.meta.label(CONTROL_PLANE_COMPONENT).is_none() {
        pod.proxy = ProxyContainer::Present {
            inbound: Some(port::INBOUND),
            admin: port::ADMIN,
            control: port::TAP,
        };
    }
    Ok(())
}

/// Statuses in files are ignored.
pub(super) fn forget_status(object: &mut Object) {
    if let Some(route) = object.route_mut() {
        route.forget_status();
    }
}

fn complete_route(route: &mut Route) -> Result<(), String> {
    route.forget_status();
    route_admission::admit(route)
}
