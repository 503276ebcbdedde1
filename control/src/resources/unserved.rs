//! What an object asks for that is not served: annotations that cannot be read, and parts of routes that no proxy does.
//!
//! Admission refuses what it is asked about; what is stored all the same is counted by these findings.

use tulle_core::names::{annotation, label};

use crate::resources::acceptance::{self, Refusal};
use crate::resources::annotations;
use crate::resources::meta::{Meta, Name};
use crate::resources::policy::server::{DefaultPolicy, Server, Workloads};
use crate::resources::port_list::{PortList, ResolvedPorts};
use crate::resources::route::{Parent, ParentKind, Route};
use crate::resources::route_admission;
use crate::resources::service::{EndpointSlice, PortRef, Service};
use crate::resources::workload::{ContainerPort, resolve_declared};
use crate::resources::{Kind, Object};

/// One part of an object that is not served, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unserved {
    /// The annotation, or the part of the spec.
    pub field: &'static str,
    pub reason: String,
}

/// Everything that an object asks for in vain.
pub fn of(object: &Object) -> Vec<Unserved> {
    match object {
        Object::Service(service) => of_service(service),
        Object::EgressNetwork(network) => {
            let mut found = of_parent(&network.meta);
            found.extend(of_list(&network.meta, annotation::OPAQUE_PORTS, |list| {
                list.resolve(|_| Vec::new())
            }));
            found
        }
        Object::EndpointSlice(slice) => of_slice(slice),
        Object::Pod(pod) => of_workload(&pod.meta, &pod.ports),
        Object::ExternalWorkload(workload) => of_workload(&workload.meta, &workload.ports),
        object => object.route().map(|route| of_route(route)).unwrap_or_default(),
    }
}

/// Whether a workload declares the port that a Server names; nothing where the Server does not select it, or gives a number.
pub fn declares_port_of(server: &Server, workload: &Object) -> Option<bool> {
    let port = server.port.as_ref().filter(|port| matches!(port, PortRef::Name(_)))?;
    match (workload, &server.workloads) {
        (Object::Pod(pod), Workloads::Pods(selector)) if selector.matches(&pod.meta.labels) => {
            Some(!pod.resolve(port).is_empty())
        }
        (Object::ExternalWorkload(workload), Workloads::External(selector))
            if selector.matches(&workload.meta.labels) =>
        {
            Some(!workload.resolve(port).is_empty())
        }
        _ => None,
    }
}

/// What is said of a Server that names a port which none of its workloads declares.
pub fn undeclared_port(server: &Server) -> Option<Unserved> {
    let Some(PortRef::Name(port)) = &server.port else {
        return None;
    };
    Some(Unserved {
        field: "spec.port",
        reason: format!("no workload that the Server selects declares a port {port:?}, so that it holds for nothing"),
    })
}

/// What objects ask for in vain because of the Server that they name.
pub fn of_server<'a>(server: &Server, named_by: impl IntoIterator<Item = &'a Object>) -> Vec<(Kind, Name, Unserved)> {
    let of_object = |object: &Object| {
        let (field, reason) = match (object, object.route()) {
            (_, Some(route)) => ("spec.parentRefs", refusal_of_server(server, route)?.to_string()),
            (Object::RateLimitPolicy(limit), _) if limit.server == server.meta.name.name => {
                ("spec.targetRef", acceptance::without_rate_limits(server.protocol)?)
            }
            _ => return None,
        };
        Some((object.kind(), object.meta().name.clone(), Unserved { field, reason }))
    };
    named_by.into_iter().filter_map(of_object).collect()
}

/// Why no reference of the route to the Server is served, where that changes what the Server answers.
fn refusal_of_server(server: &Server, route: &Route) -> Option<Refusal> {
    let names = |parent: &&Parent| parent.kind == ParentKind::Server && parent.name == server.meta.name;
    let parents = route.parents.iter().filter(names);
    let mut judged: Vec<_> = parents
        .map(|parent| acceptance::of_server_route(server, route, parent).err())
        .collect();
    judged.sort_by_key(Option::is_some);
    let first = judged.into_iter().next().flatten();
    first.filter(|refusal| matches!(refusal, Refusal::Protocol(_) | Refusal::PartOfServer(_)))
}

fn of_service(service: &Service) -> Vec<Unserved> {
    let mut found = of_parent(&service.meta);
    found.extend(of_list(&service.meta, annotation::OPAQUE_PORTS, |list| {
        list.resolve(|name| {
            let named = service.ports.iter().filter(|port| port.name == name);
            named.map(|port| port.port).collect()
        })
    }));
    found
}

/// A slice that serves nobody.
fn of_slice(slice: &EndpointSlice) -> Vec<Unserved> {
    let nameless = slice.service.is_none().then(|| {
        let label = label::SERVICE_NAME;
        format!("it names no Service: it has neither the label {label} nor a Service as its only owner")
    });
    let names = slice
        .has_names
        .then(|| "FQDN: no proxy dials names; accepted: IPv4, IPv6".to_owned());
    let checks = [("metadata.labels", nameless), ("addressType", names)];
    checks.into_iter().filter_map(unserved).collect()
}

/// Annotations of what routes are attached to.
fn of_parent(meta: &Meta) -> Vec<Unserved> {
    let all = &meta.annotations;
    let checks = [
        (annotation::FAILURE_ACCRUAL, annotations::failure_accrual(all).err()),
        (annotation::PENALIZE_FAILURES, annotations::load_bias(all).err()),
    ];
    let mut found = of_rules(meta);
    found.extend(checks.into_iter().filter_map(unserved));
    found
}

/// Annotations of routes, and of their parents.
fn of_rules(meta: &Meta) -> Vec<Unserved> {
    let all = &meta.annotations;
    let checks = [
        (annotation::RETRY_HTTP, annotations::http_retry(all).err()),
        (annotation::RETRY_GRPC, annotations::grpc_retry(all).err()),
        (annotation::TIMEOUT_REQUEST, annotations::timeouts(all).err()),
    ];
    checks.into_iter().filter_map(unserved).collect()
}

fn of_route(route: &Route) -> Vec<Unserved> {
    let mut found = of_rules(&route.meta);
    let parents = [ParentKind::Server, ParentKind::Service, ParentKind::EgressNetwork];
    let is_named = |kind: &ParentKind| route.parents.iter().any(|parent| parent.kind == *kind);
    let reasons = parents.into_iter().filter(is_named);
    let reason = reasons.filter_map(|kind| route_admission::unserved(route, kind)).next();
    found.extend(unserved(("spec.rules", reason)));
    let unused = route_admission::unused_inbound(route);
    let unused = unused.map(|field| format!("{field} says nothing where the parent is a Server"));
    found.extend(unserved(("spec.rules", unused)));
    found
}

fn of_workload(meta: &Meta, declared: &[ContainerPort]) -> Vec<Unserved> {
    let policy = meta.annotation(annotation::DEFAULT_INBOUND_POLICY);
    let policy = policy.and_then(|text| text.parse::<DefaultPolicy>().err());
    let policy = policy.map(|error| error.to_string());
    let mut found: Vec<Unserved> = unserved((annotation::DEFAULT_INBOUND_POLICY, policy))
        .into_iter()
        .collect();
    for key in [
        annotation::REQUIRE_IDENTITY_INBOUND_PORTS,
        annotation::OPAQUE_PORTS,
        annotation::SKIP_INBOUND_PORTS,
    ] {
        found.extend(of_list(meta, key, |list| resolve_declared(list, declared)));
    }
    found
}

fn of_list(meta: &Meta, key: &'static str, resolve: impl FnOnce(&PortList) -> ResolvedPorts) -> Option<Unserved> {
    let unknown = resolve(&PortList::parse(meta.annotation(key)?)).unknown;
    let reason = (!unknown.is_empty()).then(|| {
        format!(
            "{} is neither a port, nor a range of ports, nor the name of a port that is declared",
            unknown.join(", ")
        )
    });
    unserved((key, reason))
}

fn unserved((field, reason): (&'static str, Option<String>)) -> Option<Unserved> {
    reason.map(|reason| Unserved { field, reason })
}
