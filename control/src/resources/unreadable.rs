//! Unreadable objects: they cannot be decoded, or they are invalid in a directory of manifests.
//!
//! An API server stores objects that cannot be decoded if it does not call admission, or if its CRD has another version.
//!
//! An unreadable object is known by its name and its readable fields. Where omitting it would allow traffic that it should
//! deny, a placeholder denies the traffic: a Server that authorizes no client (only probes of HTTP ports are permitted), an
//! EgressNetwork or rate limit whose requests fail, a route whose rules fail. Authorizations and authentications need no
//! placeholder, because omitting them allows nothing. The last readable version of an object takes precedence over its
//! placeholder.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::resources::labels::Selector;
use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::rate_limit::RateLimitPolicy;
use crate::resources::policy::server::{AccessPolicy, ProxyProtocol, Server, WorkloadSelector};
use crate::resources::route::{self, Route, RouteKind, Rule, Rules, StreamRule, UnreadablePart};
use crate::resources::service::PortRef;
use crate::resources::status::ParentRef;
use crate::resources::{Kind, Object, Scope};

/// An object of which at least a part cannot be decoded, or that is invalid in a directory of manifests.
#[derive(Clone, Debug, PartialEq)]
pub struct Unreadable {
    pub kind: Kind,
    pub name: NamespacedName,
    /// The invalid value and the accepted form.
    pub reason: String,
    /// Used until a readable version of the object is known. `None` if the object can be omitted safely.
    pub placeholder: Option<Object>,
}

impl Unreadable {
    /// Returns `None` for an object without a name, and for a route without a parent in the mesh.
    pub fn from_value(kind: Kind, object: &Value, reason: &str) -> Option<Self> {
        let mut meta = meta(&object["metadata"])?;
        if kind.info().scope == Scope::Cluster {
            meta.name.namespace = "".into();
        }
        let name = meta.name.clone();
        let placeholder_object = placeholder(kind, object, meta, reason);
        let has_valid_parent_refs = parse_list::<ParentRef>(&object["spec"]["parentRefs"]).is_ok();
        match placeholder_object.as_ref().and_then(Object::route) {
            Some(route) if has_valid_parent_refs && !route.has_mesh_parent() => None,
            _ => Some(Self {
                kind,
                name,
                reason: reason.to_owned(),
                placeholder: placeholder_object,
            }),
        }
    }

    /// Returns whether an object that cannot be decoded concerns the mesh. A route does if a parent is in the mesh, or if its
    /// parents cannot be read.
    pub fn concerns_mesh(kind: Kind, object: &Value) -> bool {
        Self::from_value(kind, object, "").is_some()
    }

    /// Creates the `Unreadable` of an object that decodes from `value` but is invalid.
    pub fn from_rejected(object: Object, value: &Value, reason: &str) -> Self {
        let (kind, meta) = (object.kind(), object.meta().clone());
        Self {
            kind,
            name: meta.name.clone(),
            reason: reason.to_owned(),
            placeholder: match object.route() {
                Some(_) => Some(rejected_route(object, reason)),
                None => placeholder(kind, value, meta, reason),
            },
        }
    }
}

impl Object {
    pub fn is_placeholder(&self) -> bool {
        match self {
            Self::Server(server) => server.unreadable.is_some(),
            Self::EgressNetwork(network) => network.unreadable.is_some(),
            Self::RateLimitPolicy(limit) => limit.unreadable.is_some(),
            object => object.route().is_some_and(|route| route.unreadable_part().is_some()),
        }
    }
}

/// Reads the metadata, or at least namespace, name and version.
fn meta(value: &Value) -> Option<Meta> {
    let whole = ObjectMeta::deserialize(value).map_err(|error| error.to_string());
    if let Ok(meta) = whole.and_then(Meta::from_kubernetes) {
        return Some(meta);
    }
    let text = |field: &str| value[field].as_str().filter(|text| !text.is_empty());
    Some(Meta {
        name: NamespacedName::new(text("namespace").unwrap_or("default"), text("name")?),
        version: text("resourceVersion").unwrap_or_default().to_owned(),
        ..Meta::default()
    })
}

fn placeholder(kind: Kind, object: &Value, meta: Meta, reason: &str) -> Option<Object> {
    let route = |kind| placeholder_route(kind, object, meta.clone(), reason).into();
    Some(match kind {
        Kind::Server => Object::Server(placeholder_server(object, meta, reason).into()),
        Kind::EgressNetwork => Object::EgressNetwork(EgressNetwork::placeholder(object, meta, reason).into()),
        Kind::RateLimitPolicy => Object::RateLimitPolicy(RateLimitPolicy::placeholder(object, meta, reason)?.into()),
        Kind::PolicyHttpRoute => Object::PolicyHttpRoute(route(RouteKind::PolicyHttp)),
        Kind::GatewayHttpRoute => Object::GatewayHttpRoute(route(RouteKind::GatewayHttp)),
        Kind::GrpcRoute => Object::GrpcRoute(route(RouteKind::Grpc)),
        Kind::TlsRoute => Object::TlsRoute(route(RouteKind::Tls)),
        Kind::TcpRoute => Object::TcpRoute(route(RouteKind::Tcp)),
        // Omitting these kinds allows no additional traffic.
        Kind::ServerAuthorization
        | Kind::AuthorizationPolicy
        | Kind::MeshTlsAuthentication
        | Kind::NetworkAuthentication
        | Kind::ExternalWorkload
        | Kind::ServiceProfile
        | Kind::Service
        | Kind::Endpoints
        | Kind::EndpointSlice
        | Kind::Pod
        | Kind::Node
        | Kind::Namespace
        | Kind::ReplicaSet
        | Kind::Job => return None,
    })
}

/// Creates a Server that authorizes no client. It selects all workloads if the selector cannot be read, and all ports if
/// the port cannot be read.
fn placeholder_server(object: &Value, meta: Meta, reason: &str) -> Server {
    let spec = &object["spec"];
    let selector = |field: &str| Option::<Selector>::deserialize(&spec[field]);
    let workloads = match (selector("podSelector"), selector("externalWorkloadSelector")) {
        (Ok(Some(pods)), Ok(None)) => WorkloadSelector::Pods(pods),
        (Ok(None), Ok(Some(workloads))) => WorkloadSelector::ExternalWorkloads(workloads),
        _ => WorkloadSelector::All,
    };
    let port = IntOrString::deserialize(&spec["port"]).map_err(|error| error.to_string());
    Server {
        meta,
        workloads,
        port: port.and_then(PortRef::from_kubernetes).ok(),
        protocol: ProxyProtocol::deserialize(&spec["proxyProtocol"]).unwrap_or_default(),
        access_policy: AccessPolicy::Deny,
        unreadable: Some(reason.into()),
    }
}

/// Creates a route whose unreadable rules fail. All rules fail if a field outside of the rules is unreadable.
fn placeholder_route(kind: RouteKind, object: &Value, meta: Meta, reason: &str) -> Route {
    let spec = &object["spec"];
    let rules = match kind {
        RouteKind::PolicyHttp | RouteKind::GatewayHttp => http_rules(&spec["rules"]).map(Rules::Http),
        RouteKind::Grpc => http_rules(&spec["rules"]).map(Rules::Grpc),
        RouteKind::Tls | RouteKind::Tcp => stream_rules(&spec["rules"]).map(Rules::Stream),
    };
    let parents = parse_list::<ParentRef>(&spec["parentRefs"]);
    let hostnames = parse_list::<String>(&spec["hostnames"]);
    let status = Option::deserialize(&object["status"]);
    let matches_are_readable = parents.is_ok() && hostnames.is_ok() && rules.is_ok();
    let status_is_readable = status.is_ok();
    let mut route = Route {
        meta,
        generation: object["metadata"]["generation"].as_i64(),
        kind,
        hostnames: hostnames.unwrap_or_default(),
        parents: Vec::new(),
        rules: rules.unwrap_or_else(|()| default_rules(kind)),
        statuses: Vec::new(),
        unreadable: None,
    };
    let parents = parents.unwrap_or_else(|()| parse_readable_entries(&spec["parentRefs"]));
    route.set_parents(&parents, status.unwrap_or_default());
    // If everything around the rules can be read, an unreadable rule explains the error, and the other rules are served.
    if matches_are_readable && status_is_readable && route.unreadable_part().is_some() {
        return route;
    }
    // Otherwise the error is in another field, perhaps an unknown one. It can apply to all rules, so none is served.
    route.unreadable = Some(UnreadablePart {
        reason: reason.to_owned(),
        matches_are_readable,
    });
    route
}

fn rejected_route(mut object: Object, reason: &str) -> Object {
    let unreadable = Some(UnreadablePart {
        reason: reason.to_owned(),
        matches_are_readable: true,
    });
    if let Some(route) = object.route_mut() {
        route.unreadable = unreadable;
    }
    object
}

fn default_rules(kind: RouteKind) -> Rules {
    match kind {
        RouteKind::PolicyHttp | RouteKind::GatewayHttp => Rules::Http(route::match_all_rules()),
        RouteKind::Grpc => Rules::Grpc(route::match_all_rules()),
        RouteKind::Tls | RouteKind::Tcp => Rules::Stream(vec![StreamRule::default()]),
    }
}

/// Decodes each rule. An unreadable rule matches the same requests as its `matches`, if these can be read.
fn http_rules<M: DeserializeOwned>(rules: &Value) -> Result<Vec<Rule<M>>, ()> {
    let rule = |value: &Value| {
        let error = match Rule::<M>::deserialize(value) {
            Ok(rule) => return rule,
            Err(error) => error,
        };
        let matches = Option::<Vec<M>>::deserialize(&value["matches"]);
        let unreadable = UnreadablePart {
            reason: format!("spec.rules: {error}"),
            matches_are_readable: matches.is_ok() && value.is_object(),
        };
        Rule::from_unreadable(matches.unwrap_or_default(), unreadable)
    };
    match rules {
        Value::Null => Ok(route::match_all_rules()),
        rules => Ok(rules.as_array().ok_or(())?.iter().map(rule).collect()),
    }
}

fn stream_rules(rules: &Value) -> Result<Vec<StreamRule>, ()> {
    let rule = |value: &Value| {
        StreamRule::deserialize(value).unwrap_or_else(|error| {
            StreamRule::from_unreadable(UnreadablePart {
                reason: format!("spec.rules: {error}"),
                matches_are_readable: true,
            })
        })
    };
    match rules {
        Value::Null => Ok(Vec::new()),
        rules => Ok(rules.as_array().ok_or(())?.iter().map(rule).collect()),
    }
}

fn parse_list<T: DeserializeOwned>(value: &Value) -> Result<Vec<T>, ()> {
    let list = Option::<Vec<T>>::deserialize(value);
    list.map(Option::unwrap_or_default).map_err(|_| ())
}

/// Decodes a list and skips unreadable entries.
pub(super) fn parse_readable_entries<T: DeserializeOwned>(value: &Value) -> Vec<T> {
    let entries = value.as_array().into_iter().flatten();
    entries.filter_map(|entry| T::deserialize(entry).ok()).collect()
}
