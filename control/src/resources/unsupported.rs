//! Finds parts of stored objects that the mesh does not apply, such as invalid annotations and unsupported parts of routes.
//!
//! They are counted in metrics. Admission, if it is enabled, rejects some of them earlier.

use tulle_core::names::{annotation, label};

use crate::resources::acceptance::{self, RouteRejection};
use crate::resources::annotations;
use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::policy::server::{AccessPolicy, Server, WorkloadSelector};
use crate::resources::port_list::{PortList, ResolvedPorts};
use crate::resources::route::{Parent, ParentKind, Route};
use crate::resources::route_admission;
use crate::resources::service::{EndpointSlice, PortRef, Service};
use crate::resources::workload::{ContainerPort, resolve_declared};
use crate::resources::{Kind, Object};

/// A part of an object that the mesh does not apply, and the reason. The part is ignored, or the requests that it matches
/// fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedPart {
    /// The annotation, or the field of the spec.
    pub field: &'static str,
    pub reason: String,
}

/// Returns all parts of an object that the mesh does not apply, considering this object alone.
pub fn unsupported_parts(object: &Object) -> Vec<UnsupportedPart> {
    match object {
        Object::Service(service) => check_service(service),
        Object::EgressNetwork(network) => {
            let mut found = check_parent_annotations(&network.meta);
            found.extend(check_port_list(&network.meta, annotation::OPAQUE_PORTS, |list| {
                list.resolve(|_| Vec::new())
            }));
            found
        }
        Object::EndpointSlice(slice) => check_slice(slice),
        Object::Pod(pod) => check_workload(&pod.meta, &pod.ports),
        Object::ExternalWorkload(workload) => check_workload(&workload.meta, &workload.ports),
        object => object.route().map(|route| check_route(route)).unwrap_or_default(),
    }
}

/// Whether a workload declares the port of a Server that has a port name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortNameMatch {
    /// The Server does not select the workload, or has a port number.
    NotSelected,
    Declared,
    Undeclared,
}

/// Looks for the named port of a Server in a workload.
pub fn match_port_name(server: &Server, workload: &Object) -> PortNameMatch {
    let Some(port @ PortRef::Name(_)) = &server.port else {
        return PortNameMatch::NotSelected;
    };
    let ports = match (workload, &server.workloads) {
        (Object::Pod(pod), WorkloadSelector::Pods(selector)) if selector.matches(&pod.meta.labels) => {
            pod.resolve_port(port)
        }
        (Object::ExternalWorkload(workload), WorkloadSelector::ExternalWorkloads(selector))
            if selector.matches(&workload.meta.labels) =>
        {
            workload.resolve_port(port)
        }
        _ => return PortNameMatch::NotSelected,
    };
    if ports.is_empty() {
        PortNameMatch::Undeclared
    } else {
        PortNameMatch::Declared
    }
}

/// Returns the unsupported part of a Server that has this port name, which no workload declares.
pub fn undeclared_port_name(port_name: &str) -> UnsupportedPart {
    UnsupportedPart {
        field: "spec.port",
        reason: format!(
            "no workload that the Server selects declares a port {port_name:?}, so the Server has no effect"
        ),
    }
}

/// Returns the parts of routes and rate limits that this Server does not support, with the object of each part.
pub fn unsupported_by_server<'a>(
    server: &Server,
    objects: impl IntoIterator<Item = &'a Object>,
) -> Vec<(Kind, NamespacedName, UnsupportedPart)> {
    let check = |object: &Object| {
        let (field, reason) = match (object, object.route()) {
            (_, Some(route)) => ("spec.parentRefs", server_rejection(server, route)?.to_string()),
            (Object::RateLimitPolicy(limit), _) if limit.server == server.meta.name.name => (
                "spec.targetRef",
                acceptance::rate_limit_unsupported_reason(server.protocol)?,
            ),
            _ => return None,
        };
        Some((
            object.kind(),
            object.meta().name.clone(),
            UnsupportedPart { field, reason },
        ))
    };
    objects.into_iter().filter_map(check).collect()
}

/// Returns why the Server rejects the route, if this rejection makes requests fail. Otherwise returns `None`.
fn server_rejection(server: &Server, route: &Route) -> Option<RouteRejection> {
    let is_server = |parent: &&Parent| parent.kind == ParentKind::Server && parent.name == server.meta.name;
    let parents = route.parents.iter().filter(is_server);
    let rejections = parents.map(|parent| acceptance::check_server_route(server, route, parent).err());
    // One accepted reference is enough: it has no rejection (`None`), which sorts first.
    let rejection = rejections.min_by_key(Option::is_some).flatten();
    rejection.filter(|rejection| {
        matches!(
            rejection,
            RouteRejection::ProtocolMismatch(_) | RouteRejection::UnsupportedParentField(_)
        )
    })
}

fn check_service(service: &Service) -> Vec<UnsupportedPart> {
    let mut found = check_parent_annotations(&service.meta);
    found.extend(check_port_list(&service.meta, annotation::OPAQUE_PORTS, |list| {
        list.resolve(|name| service.ports_named(name))
    }));
    found
}

fn check_slice(slice: &EndpointSlice) -> Vec<UnsupportedPart> {
    let without_service = slice.service.is_none().then(|| {
        let label = label::SERVICE_NAME;
        format!("no Service: the slice needs the label {label}, or a Service as its only owner")
    });
    let fqdn_addresses = slice
        .has_fqdn_addresses
        .then(|| "FQDN is not supported; use IPv4 or IPv6".to_owned());
    let checks = [("metadata.labels", without_service), ("addressType", fqdn_addresses)];
    checks.into_iter().filter_map(to_unsupported_part).collect()
}

fn check_parent_annotations(meta: &Meta) -> Vec<UnsupportedPart> {
    let all = &meta.annotations;
    let checks = [
        (
            annotation::FAILURE_ACCRUAL,
            annotations::parse_failure_accrual(all).err(),
        ),
        (annotation::PENALIZE_FAILURES, annotations::parse_load_bias(all).err()),
    ];
    let mut found = check_route_annotations(meta);
    found.extend(checks.into_iter().filter_map(to_unsupported_part));
    found
}

/// Checks the annotations of a route, which its parents can have, too.
fn check_route_annotations(meta: &Meta) -> Vec<UnsupportedPart> {
    let all = &meta.annotations;
    let checks = [
        (annotation::RETRY_HTTP, annotations::parse_http_retry(all).err()),
        (annotation::RETRY_GRPC, annotations::parse_grpc_retry(all).err()),
        (annotation::TIMEOUT_REQUEST, annotations::parse_timeouts(all).err()),
    ];
    checks.into_iter().filter_map(to_unsupported_part).collect()
}

fn check_route(route: &Route) -> Vec<UnsupportedPart> {
    let mut found = check_route_annotations(&route.meta);
    let parents = [ParentKind::Server, ParentKind::Service, ParentKind::EgressNetwork];
    let is_named = |kind: &ParentKind| route.parents.iter().any(|parent| parent.kind == *kind);
    let mut named_kinds = parents.into_iter().filter(is_named);
    let reason = named_kinds.find_map(|kind| route_admission::unsupported_reason(route, kind));
    found.extend(to_unsupported_part(("spec.rules", reason)));
    let unused = route_admission::unused_inbound_field(route);
    let unused = unused.map(|field| format!("{field} has no effect where the parent is a Server"));
    found.extend(to_unsupported_part(("spec.rules", unused)));
    found
}

fn check_workload(meta: &Meta, declared: &[ContainerPort]) -> Vec<UnsupportedPart> {
    let policy = meta.annotation(annotation::DEFAULT_INBOUND_POLICY);
    let policy = policy.and_then(|text| text.parse::<AccessPolicy>().err());
    let policy = policy.map(|error| error.to_string());
    let mut found: Vec<UnsupportedPart> = to_unsupported_part((annotation::DEFAULT_INBOUND_POLICY, policy))
        .into_iter()
        .collect();
    for key in [
        annotation::REQUIRE_IDENTITY_INBOUND_PORTS,
        annotation::OPAQUE_PORTS,
        annotation::SKIP_INBOUND_PORTS,
    ] {
        found.extend(check_port_list(meta, key, |list| resolve_declared(list, declared)));
    }
    found
}

fn check_port_list(
    meta: &Meta,
    key: &'static str,
    resolve: impl FnOnce(&PortList) -> ResolvedPorts,
) -> Option<UnsupportedPart> {
    let unknown = resolve(&PortList::parse(meta.annotation(key)?)).unknown;
    let reason = (!unknown.is_empty()).then(|| {
        format!(
            "{} is neither a port, nor a range of ports, nor the name of a declared port",
            unknown.join(", ")
        )
    });
    to_unsupported_part((key, reason))
}

fn to_unsupported_part((field, reason): (&'static str, Option<String>)) -> Option<UnsupportedPart> {
    reason.map(|reason| UnsupportedPart { field, reason })
}
