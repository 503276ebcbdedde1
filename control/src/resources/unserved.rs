//! Finds unserved parts of stored objects, such as invalid annotations, and parts of routes that the mesh does not support.
//!
//! They are counted in metrics. Admission, if it is enabled, rejects some of them earlier.

use tulle_core::metrics::{Family, Gauge, Registry};
use tulle_core::names::{annotation, label};
use tulle_core::ports::PortSet;

use crate::model::remote_discovery::RemoteDiscovery;
use crate::resources::acceptance::{self, RouteRejection};
use crate::resources::annotations::{self, InvalidAnnotation};
use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::policy::authorization::{ServerAuthorization, ServerClient};
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::server::{AccessPolicy, Server, WorkloadSelector};
use crate::resources::port_list::{PortList, ResolvedPorts};
use crate::resources::remote_discovery::{self, MAX_MEMBERS};
use crate::resources::route::{Parent, ParentKind, Route};
use crate::resources::route_support;
use crate::resources::service::{DeclaredProtocol, EndpointSlice, PortRef, Service, ServicePort};
use crate::resources::workload::{DeclaredPort, Pod, resolve_declared};
use crate::resources::{Kind, Object};

/// A part of an object that the mesh does not apply, and the reason. The part is ignored, or the requests that it matches fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnservedPart {
    /// The annotation, or the path of the field.
    pub field: &'static str,
    pub reason: String,
}

/// Returns the metric of unserved parts.
pub fn metric_family(registry: &Registry) -> Family<Gauge> {
    registry.gauge(
        "unserved_configuration",
        "Parts of an object that are invalid, not supported, replaced by another object, or refer to an object that does not exist, by annotation or field. They have no effect, or their requests fail. An invalid file of the control plane has the kind `File`; its last valid version stays in force.",
    )
}

/// Returns the parts whose series has the value 1, sorted, as `name field`.
#[cfg(test)]
pub(crate) fn counted_parts(registry: &Registry) -> Vec<String> {
    let page = registry.render();
    let parts = page.lines().filter_map(|line| {
        let line = line.strip_prefix("unserved_configuration{")?.strip_suffix("} 1")?;
        let (_, name) = line.split_once("name=\"")?;
        let (name, field) = name.split_once("\",field=\"")?;
        Some(format!("{name} {}", field.trim_end_matches('"')))
    });
    let mut parts: Vec<_> = parts.collect();
    parts.sort();
    parts
}

/// Returns all unserved parts of an object, considering this object alone.
pub fn unserved_parts(object: &Object) -> Vec<UnservedPart> {
    match object {
        Object::Service(service) => check_service(service),
        Object::EgressNetwork(network) => {
            let mut found = invalid_egress_annotations(network);
            let unused = annotations::unused(&network.meta.annotations, object.kind().info().name);
            add_unused(&mut found, unused);
            found
        }
        Object::ServerAuthorization(authorization) => check_server_authorization(authorization),
        Object::EndpointSlice(slice) => check_slice(slice),
        Object::Pod(pod) => {
            let mut found = check_workload(&pod.meta, &pod.ports);
            found.extend(check_proxy(pod));
            found
        }
        Object::ExternalWorkload(workload) => check_workload(&workload.meta, &workload.ports),
        object => object.route().map(|route| check_route(route)).unwrap_or_default(),
    }
}

/// Whether a workload declares the port that a Server selects by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortNameMatch {
    /// The Server does not select the workload by its labels, or does not select its port by name.
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

/// Returns the unserved part of a Server that has this port name, which no workload declares.
pub fn undeclared_port_name(port_name: &str) -> UnservedPart {
    UnservedPart {
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
) -> Vec<(Kind, NamespacedName, UnservedPart)> {
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
            UnservedPart { field, reason },
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

/// Returns the invalid annotations of an EgressNetwork.
pub(super) fn invalid_egress_annotations(network: &EgressNetwork) -> Vec<UnservedPart> {
    let invalid = annotations::invalid_on_parent(&network.meta.annotations);
    let mut found: Vec<UnservedPart> = invalid.into_iter().map(Into::into).collect();
    found.extend(check_port_list(&network.meta, annotation::OPAQUE_PORTS, |list| {
        list.resolve(|_| Vec::new())
    }));
    found
}

fn check_service(service: &Service) -> Vec<UnservedPart> {
    let all = &service.meta.annotations;
    let invalid = annotations::invalid_on_parent(all);
    let mut found: Vec<UnservedPart> = invalid.into_iter().map(Into::into).collect();
    add_unused(&mut found, annotations::unused(all, Kind::Service.info().name));
    found.extend(check_port_list(&service.meta, annotation::OPAQUE_PORTS, |list| {
        list.resolve(|name| service.ports_named(name))
    }));
    let invalid = remote_discovery::invalid_members(&service.meta);
    let invalid = (!invalid.is_empty()).then(|| {
        format!(
            "{} is not <service>@<cluster>, or comes after {MAX_MEMBERS} others, so it is not a member",
            invalid.join(", ")
        )
    });
    found.extend(to_unserved_part((annotation::REMOTE_DISCOVERY, invalid)));
    let unnamed = (remote_discovery::discovery(service) == Some(RemoteDiscovery::Unnamed)).then(|| {
        format!(
            "without the label {}, which names the Service of the other cluster, the mirror has no endpoints",
            label::REMOTE_SERVICE
        )
    });
    found.extend(to_unserved_part((label::REMOTE_DISCOVERY, unnamed)));
    found
}

/// Returns each `appProtocol` of a Service that has no effect, because its port is marked as opaque.
pub fn overridden_app_protocols(service: &Service, default_opaque_ports: &PortSet) -> Vec<UnservedPart> {
    let is_overridden = |port: &&ServicePort| {
        let protocol = port.app_protocol_kind();
        matches!(protocol, DeclaredProtocol::Http1 | DeclaredProtocol::Http2)
            && service.is_opaque(port.port, default_opaque_ports)
    };
    let overridden = service.ports.iter().filter(is_overridden);
    let part = |port: &ServicePort| UnservedPart {
        field: "spec.ports",
        reason: format!(
            "appProtocol {} of port {} has no effect, because the port is marked as opaque by the annotation {} or by default; \
             set the annotation to the ports that are opaque, or remove appProtocol",
            port.app_protocol.as_deref().unwrap_or_default(),
            port.port,
            annotation::OPAQUE_PORTS
        ),
    };
    overridden.map(part).collect()
}

/// Returns the part of a ServerAuthorization because of which it authorizes no client.
fn check_server_authorization(authorization: &ServerAuthorization) -> Vec<UnservedPart> {
    let has_no_network = authorization.networks.as_ref().is_some_and(Vec::is_empty);
    let without_networks = has_no_network.then(|| {
        "it is empty, so no client is authorized; remove it to authorize clients in the cluster networks".to_owned()
    });
    let without_client = (authorization.client == ServerClient::NoClient).then(|| {
        "it names no client, so no client is authorized; set unauthenticated, or identities or serviceAccounts of meshTLS"
            .to_owned()
    });
    let checks = [
        ("spec.client.networks", without_networks),
        ("spec.client", without_client),
    ];
    checks.into_iter().filter_map(to_unserved_part).collect()
}

fn check_slice(slice: &EndpointSlice) -> Vec<UnservedPart> {
    let without_service = slice.service.is_none().then(|| {
        let label = label::SERVICE_NAME;
        format!("no Service: the slice needs the label {label}, or a Service as its only owner")
    });
    let fqdn_addresses = slice
        .has_fqdn_addresses
        .then(|| "FQDN is not supported; use IPv4 or IPv6".to_owned());
    let checks = [("metadata.labels", without_service), ("addressType", fqdn_addresses)];
    checks.into_iter().filter_map(to_unserved_part).collect()
}

fn check_route(route: &Route) -> Vec<UnservedPart> {
    let all = &route.meta.annotations;
    let invalid = annotations::invalid_on_route(all);
    let mut found: Vec<UnservedPart> = invalid.into_iter().map(Into::into).collect();
    if route.has_only_server_parents() {
        let unused = annotations::present(all).map(|key| (key, format!("it {NO_EFFECT_ON_SERVER}")));
        add_unused(&mut found, unused);
    } else if route.has_mesh_parent() {
        add_unused(&mut found, annotations::unused(all, route.kind.kind()));
    }
    let parents = [ParentKind::Server, ParentKind::Service, ParentKind::EgressNetwork];
    let is_named = |kind: &ParentKind| route.parents.iter().any(|parent| parent.kind == *kind);
    let mut named_kinds = parents.into_iter().filter(is_named);
    let reason = named_kinds.find_map(|kind| route_support::unsupported_reason(route, kind));
    found.extend(to_unserved_part(("spec.rules", reason)));
    let unused = route_support::fields_without_effect_on_servers(route);
    found.extend(unused.into_iter().map(|field| UnservedPart {
        field: "spec.rules",
        reason: format!("{field} {NO_EFFECT_ON_SERVER}"),
    }));
    found
}

/// Adds annotations without effect, each with the reason. One that is found to be invalid is not added again.
fn add_unused(found: &mut Vec<UnservedPart>, unused: impl IntoIterator<Item = (&'static str, String)>) {
    for (field, reason) in unused {
        if found.iter().all(|part| part.field != field) {
            found.push(UnservedPart { field, reason });
        }
    }
}

impl From<InvalidAnnotation> for UnservedPart {
    fn from(invalid: InvalidAnnotation) -> Self {
        Self {
            field: invalid.key,
            reason: invalid.to_string(),
        }
    }
}

fn check_workload(meta: &Meta, declared: &[DeclaredPort]) -> Vec<UnservedPart> {
    let policy = meta.annotation(annotation::DEFAULT_INBOUND_POLICY);
    let policy = policy.and_then(|text| text.parse::<AccessPolicy>().err());
    let policy = policy.map(|error| error.to_string());
    let mut found: Vec<UnservedPart> = to_unserved_part((annotation::DEFAULT_INBOUND_POLICY, policy))
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

/// Checks that the proxy of a meshed pod is known. Without it, clients could only send plaintext to the pod.
fn check_proxy(pod: &Pod) -> Option<UnservedPart> {
    let reason = pod.lacks_proxy().then(|| {
        format!(
            "the pod has the label {}, but no container linkerd-proxy with valid addresses in LINKERD2_PROXY_ADMIN_LISTEN_ADDR and \
             LINKERD2_PROXY_CONTROL_LISTEN_ADDR, so its Services do not have it as an endpoint; inject the proxy, or remove the label",
            label::CONTROL_PLANE_NS
        )
    });
    to_unserved_part(("spec.containers", reason))
}

fn check_port_list(
    meta: &Meta,
    key: &'static str,
    resolve: impl FnOnce(&PortList) -> ResolvedPorts,
) -> Option<UnservedPart> {
    let unknown = resolve(&PortList::parse(meta.annotation(key)?)).unknown;
    let reason = (!unknown.is_empty()).then(|| {
        format!(
            "{} is neither a port, nor a range of ports, nor the name of a declared port",
            unknown.join(", ")
        )
    });
    to_unserved_part((key, reason))
}

fn to_unserved_part((field, reason): (&'static str, Option<String>)) -> Option<UnservedPart> {
    reason.map(|reason| UnservedPart { field, reason })
}

const NO_EFFECT_ON_SERVER: &str = "has no effect where the parent is a Server";

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::resources::decode;

    fn fields(kind: Kind, annotations: Value, spec: Value) -> Vec<&'static str> {
        let metadata = json!({"name": "x", "namespace": "shop", "annotations": annotations});
        let object = decode(kind, &json!({"metadata": metadata, "spec": spec})).unwrap();
        unserved_parts(&object).into_iter().map(|part| part.field).collect()
    }

    #[test]
    fn annotations_that_are_invalid_or_without_effect_are_found_once() {
        let idle = json!({"timeout.linkerd.io/idle": "soon"});
        let limit = json!({"retry.linkerd.io/limit": "many"});
        let service = json!({"clusterIP": "10.0.0.1", "ports": [{"port": 80}]});
        let network = json!({"trafficPolicy": "Allow"});
        let route = |parent: &str| {
            let group = if parent == "Service" { "" } else { "policy.linkerd.io" };
            json!({"parentRefs": [{"group": group, "kind": parent, "name": "web"}], "rules": [{}]})
        };
        let gateway = json!({"parentRefs": [{"name": "gateway"}], "rules": [{}]});
        for (kind, spec, idle_count, limit_count) in [
            (Kind::Service, service, 1, 1),
            (Kind::EgressNetwork, network, 1, 1),
            (Kind::GatewayHttpRoute, route("Service"), 1, 1),
            (Kind::GrpcRoute, route("Service"), 1, 1),
            (Kind::TcpRoute, route("Service"), 1, 1),
            (Kind::PolicyHttpRoute, route("Server"), 1, 1),
            // Other controllers can use such a route.
            (Kind::GatewayHttpRoute, gateway, 1, 0),
        ] {
            let found = fields(kind, idle.clone(), spec.clone());
            assert_eq!(found, ["timeout.linkerd.io/idle"].repeat(idle_count), "{kind:?}");
            let found = fields(kind, limit.clone(), spec);
            assert_eq!(found, ["retry.linkerd.io/limit"].repeat(limit_count), "{kind:?}");
        }
    }

    #[test]
    fn a_meshed_pod_without_a_known_proxy_is_found() {
        let addr = |name: &str| json!({"name": format!("LINKERD2_PROXY_{name}_LISTEN_ADDR"), "value": "0.0.0.0:4190"});
        let proxy = |env: Value| json!([{"name": "web"}, {"name": "linkerd-proxy", "env": env}]);
        let complete = proxy(json!([addr("ADMIN"), addr("CONTROL")]));
        let meshed = json!({"linkerd.io/control-plane-ns": "linkerd"});
        let control_plane_pod =
            json!({"linkerd.io/control-plane-ns": "linkerd", "linkerd.io/control-plane-component": "x"});
        for (labels, containers, n_found) in [
            (&meshed, complete, 0),
            (&meshed, proxy(json!([addr("ADMIN")])), 1),
            (&meshed, json!([{"name": "web"}]), 1),
            (&control_plane_pod, json!([{"name": "web"}]), 0),
            (&json!({}), json!([{"name": "web"}]), 0),
        ] {
            let metadata = json!({"name": "x", "namespace": "shop", "labels": labels});
            let manifest = json!({"metadata": metadata, "spec": {"containers": containers}});
            let found = unserved_parts(&decode(Kind::Pod, &manifest).unwrap());
            let found: Vec<_> = found.into_iter().map(|part| part.field).collect();
            assert_eq!(found, ["spec.containers"].repeat(n_found), "{manifest}");
        }
    }

    #[test]
    fn a_server_authorization_that_authorizes_no_client_is_found() {
        for (client, expected) in [
            (json!({"unauthenticated": true}), &[][..]),
            (json!({"meshTLS": {"identities": ["*"]}}), &[]),
            (
                json!({"unauthenticated": true, "networks": []}),
                &["spec.client.networks"],
            ),
            (json!({}), &["spec.client"]),
            (json!({"meshTLS": {"identities": []}}), &["spec.client"]),
        ] {
            let spec = json!({"server": {"name": "web"}, "client": client});
            assert_eq!(fields(Kind::ServerAuthorization, json!({}), spec), expected, "{client}");
        }
    }

    #[test]
    fn an_app_protocol_has_no_effect_on_an_opaque_port() {
        let default = "25,3306".parse().unwrap();
        let check = |annotations: Value, app_protocol: Value, expected: &[u16]| {
            let port = |name: &str, port: u16| json!({"name": name, "port": port, "appProtocol": app_protocol});
            let spec = json!({"clusterIP": "10.0.0.1", "ports": [port("a", 80), port("b", 3306)]});
            let metadata = json!({"name": "x", "namespace": "shop", "annotations": annotations});
            let object = decode(Kind::Service, &json!({"metadata": metadata, "spec": spec})).unwrap();
            let Object::Service(service) = object else { panic!() };
            let found = overridden_app_protocols(&service, &default);
            let expected: Vec<String> = expected.iter().map(|port| format!("of port {port} ")).collect();
            assert_eq!(found.len(), expected.len(), "{annotations} {app_protocol}: {found:?}");
            for (part, expected) in found.iter().zip(expected) {
                assert!(part.reason.contains(&expected), "{part:?}");
            }
        };
        let marked = |ports: &str| json!({"config.linkerd.io/opaque-ports": ports});
        check(json!({}), json!("HTTP"), &[3306]);
        check(json!({}), json!("mysql"), &[]);
        check(json!({}), Value::Null, &[]);
        check(marked(""), json!("http"), &[]);
        check(marked("a"), json!("grpc"), &[80]);
        check(marked("1-4000"), json!("kubernetes.io/h2c"), &[80, 3306]);
    }

    #[test]
    fn outbound_settings_have_no_effect_where_all_parents_are_servers() {
        let annotations = json!({"retry.linkerd.io/http": "5xx", "timeout.linkerd.io/request": "1s"});
        let annotated = ["retry.linkerd.io/http", "timeout.linkerd.io/request"];
        let server = json!({"group": "policy.linkerd.io", "kind": "Server", "name": "web"});
        let service = json!({"group": "", "kind": "Service", "name": "web"});
        let rule = |field: &str, value: Value| json!([{field: value}, {field: value}]);
        for (rules, n_fields) in [
            (json!([{}]), 0),
            (rule("timeouts", json!({"request": "1s"})), 1),
            (rule("retry", json!({"attempts": 2})), 1),
            (rule("sessionPersistence", json!({})), 1),
            (rule("backendRefs", json!([{"name": "web", "port": 80}])), 1),
            (
                json!([{"timeouts": {"request": "1s"}, "backendRefs": [{"name": "web", "port": 80}]}]),
                2,
            ),
        ] {
            let spec = json!({"parentRefs": [server], "rules": rules});
            let expected = [&annotated[..], &["spec.rules"].repeat(n_fields)].concat();
            assert_eq!(
                fields(Kind::GatewayHttpRoute, annotations.clone(), spec),
                expected,
                "{rules}"
            );
        }
        let rules = json!([{"timeouts": {"request": "1s"}, "backendRefs": [{"name": "web", "port": 80}]}]);
        let spec = json!({"parentRefs": [server, service], "rules": rules});
        assert_eq!(fields(Kind::GatewayHttpRoute, annotations, spec), [""; 0]);
    }
}
