//! Objects that cannot be read: stored past admission, or written for another version of their definition.
//!
//! What is known of such an object is its name, and whatever of it can be read. Where leaving it out would permit more
//! than it was to permit, something stands for it that denies: a Server that permits nobody, an EgressNetwork and a rate
//! limit whose requests fail, a route whose rules fail. Authorizations and authentications need no such stand-in: what
//! is not there permits nobody. Sources report both, and the last form that could be read comes before the stand-in.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::resources::labels::Selector;
use crate::resources::meta::{Meta, Name};
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::rate_limit::RateLimitPolicy;
use crate::resources::policy::server::{ProxyProtocol, Server, Workloads};
use crate::resources::route::{self, Requests, Route, RouteKind, Rule, Rules, StreamRule, Unread};
use crate::resources::service::PortRef;
use crate::resources::status::ParentRef;
use crate::resources::{Kind, Object, Scope};

/// An object that cannot be read, or not all of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Unreadable {
    pub kind: Kind,
    pub name: Name,
    /// With the value and what would be accepted.
    pub reason: String,
    /// What holds while no form of the object is known that could be read. None where it is enough that the object is
    /// not there.
    pub stand_in: Option<Object>,
}

impl Unreadable {
    /// None for what has no name, and for a route that names no parent of ours.
    pub fn of(kind: Kind, object: &Value, reason: &str) -> Option<Self> {
        let mut meta = meta(&object["metadata"])?;
        if kind.info().scope == Scope::Cluster {
            meta.name.namespace = "".into();
        }
        let name = meta.name.clone();
        let stand_in = stand_in(kind, object, meta, reason);
        let names_others = list::<ParentRef>(&object["spec"]["parentRefs"]).is_ok();
        match stand_in.as_ref().and_then(Object::route) {
            Some(route) if names_others && !route.is_ours() => None,
            _ => Some(Self {
                kind,
                name,
                reason: reason.to_owned(),
                stand_in,
            }),
        }
    }

    /// An object that can be read and that admission refuses.
    pub fn refused(object: Object, reason: &str) -> Self {
        let stand_in = match &object {
            Object::PolicyHttpRoute(_)
            | Object::GatewayHttpRoute(_)
            | Object::GrpcRoute(_)
            | Object::TlsRoute(_)
            | Object::TcpRoute(_) => Some(refused_route(object.clone(), reason)),
            _ => None,
        };
        Self {
            kind: object.kind(),
            name: object.meta().name.clone(),
            reason: reason.to_owned(),
            stand_in,
        }
    }
}

impl Object {
    /// Whether it stands for one that cannot be read.
    pub fn is_stand_in(&self) -> bool {
        match self {
            Self::Server(server) => server.unread.is_some(),
            Self::EgressNetwork(network) => network.unread.is_some(),
            Self::RateLimitPolicy(limit) => limit.unread.is_some(),
            object => object.route().is_some_and(|route| route.unread().is_some()),
        }
    }
}

/// The metadata as far as it can be read.
fn meta(value: &Value) -> Option<Meta> {
    let whole = ObjectMeta::deserialize(value).map_err(|error| error.to_string());
    if let Ok(meta) = whole.and_then(Meta::from_kubernetes) {
        return Some(meta);
    }
    let text = |field: &str| value[field].as_str().filter(|text| !text.is_empty());
    Some(Meta {
        name: Name::new(text("namespace").unwrap_or("default"), text("name")?),
        version: text("resourceVersion").unwrap_or_default().to_owned(),
        ..Meta::default()
    })
}

fn stand_in(kind: Kind, object: &Value, meta: Meta, reason: &str) -> Option<Object> {
    let route = |kind| partial_route(kind, object, meta.clone(), reason).into();
    Some(match kind {
        Kind::Server => Object::Server(server(object, meta, reason).into()),
        Kind::EgressNetwork => Object::EgressNetwork(EgressNetwork::unread(object, meta, reason).into()),
        Kind::RateLimitPolicy => Object::RateLimitPolicy(RateLimitPolicy::unread(object, meta, reason)?.into()),
        Kind::PolicyHttpRoute => Object::PolicyHttpRoute(route(RouteKind::PolicyHttp)),
        Kind::GatewayHttpRoute => Object::GatewayHttpRoute(route(RouteKind::GatewayHttp)),
        Kind::GrpcRoute => Object::GrpcRoute(route(RouteKind::Grpc)),
        Kind::TlsRoute => Object::TlsRoute(route(RouteKind::Tls)),
        Kind::TcpRoute => Object::TcpRoute(route(RouteKind::Tcp)),
        // Without them nobody is permitted, nothing is reached, or no more than usual is done.
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

/// A Server that permits nobody: of the workloads that it selects, or of all where that cannot be told; on its port, or
/// on all where that cannot be told.
fn server(object: &Value, meta: Meta, reason: &str) -> Server {
    let spec = &object["spec"];
    let selector = |field: &str| Option::<Selector>::deserialize(&spec[field]);
    let workloads = match (selector("podSelector"), selector("externalWorkloadSelector")) {
        (Ok(Some(pods)), Ok(None)) => Workloads::Pods(pods),
        (Ok(None), Ok(Some(workloads))) => Workloads::External(workloads),
        _ => Workloads::All,
    };
    let port = IntOrString::deserialize(&spec["port"]).map_err(|error| error.to_string());
    Server {
        meta,
        workloads,
        port: port.and_then(PortRef::from_kubernetes).ok(),
        protocol: ProxyProtocol::deserialize(&spec["proxyProtocol"]).unwrap_or_default(),
        access: crate::resources::policy::server::DefaultPolicy::Deny,
        unread: Some(reason.into()),
    }
}

/// A route whose rules fail as far as they cannot be read, or all of them where more than rules cannot be read.
fn partial_route(kind: RouteKind, object: &Value, meta: Meta, reason: &str) -> Route {
    let spec = &object["spec"];
    let rules = match kind {
        RouteKind::PolicyHttp | RouteKind::GatewayHttp => http_rules(&spec["rules"]).map(Rules::Http),
        RouteKind::Grpc => http_rules(&spec["rules"]).map(Rules::Grpc),
        RouteKind::Tls | RouteKind::Tcp => stream_rules(&spec["rules"]).map(Rules::Stream),
    };
    let parents = list::<ParentRef>(&spec["parentRefs"]);
    let hostnames = list::<String>(&spec["hostnames"]);
    let status = Option::deserialize(&object["status"]);
    let requests = match parents.is_ok() && hostnames.is_ok() && rules.is_ok() {
        true => Requests::Known,
        false => Requests::Unknown,
    };
    let is_whole = requests == Requests::Known && status.is_ok();
    let mut route = Route {
        meta,
        generation: object["metadata"]["generation"].as_i64(),
        kind,
        hostnames: hostnames.unwrap_or_default(),
        parents: Vec::new(),
        rules: rules.unwrap_or_else(|()| no_rules(kind)),
        statuses: Vec::new(),
        unread: None,
    };
    let parents = parents.unwrap_or_else(|()| readable(&spec["parentRefs"]));
    route.attach(&parents, status.unwrap_or_default());
    if !is_whole || route.unread().is_none() {
        route.unread = Some(Unread {
            reason: reason.to_owned(),
            requests,
        });
    }
    route
}

fn refused_route(mut object: Object, reason: &str) -> Object {
    let unread = Some(Unread {
        reason: reason.to_owned(),
        requests: Requests::Known,
    });
    if let Some(route) = object.route_mut() {
        route.unread = unread;
    }
    object
}

fn no_rules(kind: RouteKind) -> Rules {
    match kind {
        RouteKind::PolicyHttp | RouteKind::GatewayHttp => Rules::Http(route::everything()),
        RouteKind::Grpc => Rules::Grpc(route::everything()),
        RouteKind::Tls | RouteKind::Tcp => Rules::Stream(vec![StreamRule::default()]),
    }
}

/// The rules one by one; one that cannot be read is for the requests that its matches name, if these can be read.
fn http_rules<M: DeserializeOwned>(rules: &Value) -> Result<Vec<Rule<M>>, ()> {
    let rule = |value: &Value| {
        let error = match Rule::<M>::deserialize(value) {
            Ok(rule) => return rule,
            Err(error) => error,
        };
        let matches = Option::<Vec<M>>::deserialize(&value["matches"]);
        let unread = Unread {
            reason: format!("spec.rules: {error}"),
            requests: match matches.is_ok() && value.is_object() {
                true => Requests::Known,
                false => Requests::Unknown,
            },
        };
        Rule::unread(matches.unwrap_or_default(), unread)
    };
    match rules {
        Value::Null => Ok(route::everything()),
        rules => Ok(rules.as_array().ok_or(())?.iter().map(rule).collect()),
    }
}

fn stream_rules(rules: &Value) -> Result<Vec<StreamRule>, ()> {
    let rule = |value: &Value| {
        StreamRule::deserialize(value).unwrap_or_else(|error| {
            StreamRule::unread(Unread {
                reason: format!("spec.rules: {error}"),
                requests: Requests::Known,
            })
        })
    };
    match rules {
        Value::Null => Ok(Vec::new()),
        rules => Ok(rules.as_array().ok_or(())?.iter().map(rule).collect()),
    }
}

fn list<T: DeserializeOwned>(value: &Value) -> Result<Vec<T>, ()> {
    let list = Option::<Vec<T>>::deserialize(value);
    list.map(Option::unwrap_or_default).map_err(|_| ())
}

/// Those entries of a list that can be read.
pub(super) fn readable<T: DeserializeOwned>(value: &Value) -> Vec<T> {
    let entries = value.as_array().into_iter().flatten();
    entries.filter_map(|entry| T::deserialize(entry).ok()).collect()
}
