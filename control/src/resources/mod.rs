//! Decoded Kubernetes objects, reduced to the fields that are used.
//!
//! [`decode`] reads objects from any serde deserializer, such as YAML of a directory or JSON of an API server;
//! [`protobuf::decode`] reads those of the most frequent kinds from an API server's protobuf. The result is immutable. Decoding
//! does not depend on the source. It applies the API's defaults and rejects what admission rejects, except in routes and
//! annotations, which have checks of their own:
//!
//! - [`validation`]: whether an object is valid, for admission and for directories of manifests
//! - [`route_support`]: which parts of a route are valid, and which the mesh supports
//! - [`acceptance`]: whether routes and EgressNetworks are accepted, which depends on other objects
//! - [`unserved`]: which parts of an object the mesh does not apply, for the metric `unserved_configuration`

pub mod acceptance;
pub mod annotations;
pub mod event;
pub mod exported_services;
pub mod go_duration;
pub mod interning;
pub mod labels;
pub mod meta;
pub mod policy;
pub mod port_list;
mod probe_path;
pub mod protobuf;
pub mod remote_discovery;
pub mod route;
pub mod route_support;
pub mod service;
pub mod service_profile;
pub mod status;
pub mod string_map;
pub mod unreadable;
pub mod unserved;
pub mod validation;
pub mod workload;

use std::sync::Arc;

use serde::Deserializer;
use serde::de::{DeserializeOwned, Error};
use tulle_core::metrics::{Gauge, Labels, Registry};

use crate::resources::meta::Meta;
use crate::resources::policy::authentication::{MeshTlsAuthentication, NetworkAuthentication};
use crate::resources::policy::authorization::{AuthorizationPolicy, ServerAuthorization};
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::rate_limit::RateLimitPolicy;
use crate::resources::policy::reference::{GATEWAY_GROUP, POLICY_GROUP};
use crate::resources::policy::server::Server;
use crate::resources::route::{Route, RouteKind};
use crate::resources::service::{EndpointSlice, Endpoints, Service};
use crate::resources::service_profile::ServiceProfile;
use crate::resources::workload::{ExternalWorkload, Node, PartialObjectMetadata, Pod};

/// Generates the enum of kinds, the enum of objects and the table of kinds from one list.
macro_rules! kinds {
    ($($kind:ident($object:ty): $group:expr, $versions:expr, $name:literal, $metric:literal, $scope:ident;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Kind { $($kind,)* }

        #[derive(Clone, Debug, PartialEq)]
        pub enum Object { $($kind(Arc<$object>),)* }

        impl Object {
            pub fn kind(&self) -> Kind {
                match self { $(Self::$kind(_) => Kind::$kind,)* }
            }

            pub fn meta(&self) -> &Meta {
                match self { $(Self::$kind(object) => &object.meta,)* }
            }

            /// Returns the metadata, for a source that completes it as an API server does.
            pub fn meta_mut(&mut self) -> &mut Meta {
                match self { $(Self::$kind(object) => &mut Arc::make_mut(object).meta,)* }
            }
        }

        pub const KINDS: &[KindInfo] = &[$(KindInfo {
            kind: Kind::$kind,
            group: $group,
            versions: &$versions,
            name: $name,
            metric_prefix: $metric,
            scope: Scope::$scope,
        },)*];
    };
}

/// How the API server names and scopes a kind.
#[derive(Debug)]
pub struct KindInfo {
    pub kind: Kind,
    pub group: &'static str,
    pub versions: &'static [&'static str],
    pub name: &'static str,
    /// The prefix of `<prefix>_cache_size`.
    pub metric_prefix: &'static str,
    pub scope: Scope,
}

impl KindInfo {
    /// Returns the resource name in API paths: lower-case plural.
    pub fn plural(&self) -> String {
        let name = self.name.to_ascii_lowercase();
        match name.strip_suffix('y') {
            Some(stem) => format!("{stem}ies"),
            None if name.ends_with('s') => name,
            None => format!("{name}s"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    Namespaced,
    Cluster,
}

kinds! {
    Service(Service): "", ["v1"], "Service", "service", Namespaced;
    Endpoints(Endpoints): "", ["v1"], "Endpoints", "endpoints", Namespaced;
    EndpointSlice(EndpointSlice): "discovery.k8s.io", ["v1"], "EndpointSlice", "endpointslices", Namespaced;
    Pod(Pod): "", ["v1"], "Pod", "pod", Namespaced;
    Node(Node): "", ["v1"], "Node", "node", Cluster;
    Namespace(PartialObjectMetadata): "", ["v1"], "Namespace", "namespace", Cluster;
    ReplicaSet(PartialObjectMetadata): "apps", ["v1"], "ReplicaSet", "replicaset", Namespaced;
    Job(PartialObjectMetadata): "batch", ["v1"], "Job", "job", Namespaced;
    ExternalWorkload(ExternalWorkload):
        "workload.linkerd.io", ["v1beta1", "v1alpha1"], "ExternalWorkload", "externalworkload", Namespaced;
    Server(Server): POLICY_GROUP, ["v1beta3", "v1beta2", "v1beta1", "v1alpha1"], "Server", "server", Namespaced;
    ServerAuthorization(ServerAuthorization):
        POLICY_GROUP, ["v1beta1", "v1alpha1"], "ServerAuthorization", "serverauthorization", Namespaced;
    AuthorizationPolicy(AuthorizationPolicy):
        POLICY_GROUP, ["v1alpha1"], "AuthorizationPolicy", "authorizationpolicy", Namespaced;
    MeshTlsAuthentication(MeshTlsAuthentication):
        POLICY_GROUP, ["v1alpha1"], "MeshTLSAuthentication", "meshtlsauthentication", Namespaced;
    NetworkAuthentication(NetworkAuthentication):
        POLICY_GROUP, ["v1alpha1"], "NetworkAuthentication", "networkauthentication", Namespaced;
    RateLimitPolicy(RateLimitPolicy):
        POLICY_GROUP, ["v1alpha1"], "HTTPLocalRateLimitPolicy", "httplocalratelimitpolicy", Namespaced;
    EgressNetwork(EgressNetwork): POLICY_GROUP, ["v1alpha1"], "EgressNetwork", "egressnetwork", Namespaced;
    PolicyHttpRoute(Route):
        POLICY_GROUP, ["v1beta3", "v1beta2", "v1beta1", "v1alpha1"], "HTTPRoute", "policy_httproute", Namespaced;
    GatewayHttpRoute(Route): GATEWAY_GROUP, ["v1", "v1beta1"], "HTTPRoute", "gateway_httproute", Namespaced;
    GrpcRoute(Route): GATEWAY_GROUP, ["v1", "v1alpha2"], "GRPCRoute", "gateway_grpcroute", Namespaced;
    TlsRoute(Route): GATEWAY_GROUP, ["v1", "v1alpha3", "v1alpha2"], "TLSRoute", "gateway_tlsroute", Namespaced;
    TcpRoute(Route): GATEWAY_GROUP, ["v1", "v1alpha2"], "TCPRoute", "gateway_tcproute", Namespaced;
    ServiceProfile(ServiceProfile):
        "linkerd.io", ["v1alpha2", "v1alpha1"], "ServiceProfile", "serviceprofile", Namespaced;
}

impl Object {
    /// Returns the route, if the object is a route of any kind.
    pub fn route(&self) -> Option<&Arc<Route>> {
        match self {
            Self::PolicyHttpRoute(route)
            | Self::GatewayHttpRoute(route)
            | Self::GrpcRoute(route)
            | Self::TlsRoute(route)
            | Self::TcpRoute(route) => Some(route),
            _ => None,
        }
    }
}

impl Object {
    /// Returns the route, for a source that changes it.
    pub(crate) fn route_mut(&mut self) -> Option<&mut Route> {
        match self {
            Self::PolicyHttpRoute(route)
            | Self::GatewayHttpRoute(route)
            | Self::GrpcRoute(route)
            | Self::TlsRoute(route)
            | Self::TcpRoute(route) => Some(Arc::make_mut(route)),
            _ => None,
        }
    }
}

impl Kind {
    pub fn is_route(self) -> bool {
        matches!(
            self,
            Self::PolicyHttpRoute | Self::GatewayHttpRoute | Self::GrpcRoute | Self::TlsRoute | Self::TcpRoute
        )
    }

    pub fn info(self) -> &'static KindInfo {
        // The macro generates the table in the order of the enum.
        &KINDS[self as usize]
    }

    /// Finds the kind for `apiVersion` and `kind` of a manifest.
    pub fn find(api_version: &str, kind: &str) -> Option<Self> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let found = KINDS
            .iter()
            .find(|info| info.group == group && info.name == kind && info.versions.contains(&version));
        found.map(|info| info.kind)
    }

    /// Like [`find`](Self::find), for any version of the group.
    pub fn find_any_version(api_version: &str, kind: &str) -> Option<Self> {
        let (group, _) = api_version.split_once('/').unwrap_or(("", api_version));
        let found = KINDS.iter().find(|info| info.group == group && info.name == kind);
        found.map(|info| info.kind)
    }

    /// Returns the gauge of the number of objects of this kind in the store. Sources create it, so that kinds without objects
    /// have a series, too.
    pub fn cache_size_gauge(self, registry: &Registry, cluster: &str) -> Arc<Gauge> {
        let name = format!("{}_cache_size", self.info().metric_prefix);
        let family = registry.gauge(&name, "Objects of this kind that are known.");
        family.get(&Labels::new().with("cluster", cluster))
    }
}

/// Decodes one object of a kind.
///
/// # Errors
/// Fails if the object does not have the schema of the kind, or has an invalid value. The checks of routes and annotations are
/// separate.
pub fn decode<'de, D: Deserializer<'de>>(kind: Kind, from: D) -> Result<Object, D::Error> {
    decode_kind(kind, from).map(normalize_scope)
}

/// Removes the namespace of an object of a cluster-scoped kind.
fn normalize_scope(mut object: Object) -> Object {
    if object.kind().info().scope == Scope::Cluster {
        object.meta_mut().name.namespace = "".into();
    }
    object
}

fn decode_kind<'de, D: Deserializer<'de>>(kind: Kind, from: D) -> Result<Object, D::Error> {
    match kind {
        Kind::Service => decode_as(from, Service::from_kubernetes, Object::Service),
        Kind::Endpoints => decode_as(from, Endpoints::from_kubernetes, Object::Endpoints),
        Kind::EndpointSlice => decode_as(from, EndpointSlice::from_kubernetes, Object::EndpointSlice),
        Kind::Pod => decode_as(from, Pod::from_kubernetes, Object::Pod),
        Kind::Node => decode_as(from, Node::from_raw, Object::Node),
        Kind::Namespace => decode_as(from, PartialObjectMetadata::from_raw, Object::Namespace),
        Kind::ReplicaSet => decode_as(from, PartialObjectMetadata::from_raw, Object::ReplicaSet),
        Kind::Job => decode_as(from, PartialObjectMetadata::from_raw, Object::Job),
        Kind::ExternalWorkload => decode_as(from, ExternalWorkload::from_raw, Object::ExternalWorkload),
        Kind::Server => decode_as(from, Server::from_raw, Object::Server),
        Kind::ServerAuthorization => decode_as(from, ServerAuthorization::from_raw, Object::ServerAuthorization),
        Kind::AuthorizationPolicy => decode_as(from, AuthorizationPolicy::from_raw, Object::AuthorizationPolicy),
        Kind::MeshTlsAuthentication => decode_as(from, MeshTlsAuthentication::from_raw, Object::MeshTlsAuthentication),
        Kind::NetworkAuthentication => decode_as(from, NetworkAuthentication::from_raw, Object::NetworkAuthentication),
        Kind::RateLimitPolicy => decode_as(from, RateLimitPolicy::from_raw, Object::RateLimitPolicy),
        Kind::EgressNetwork => decode_as(from, EgressNetwork::from_raw, Object::EgressNetwork),
        Kind::PolicyHttpRoute => decode_as(
            from,
            |raw| Route::from_raw_http(raw, RouteKind::PolicyHttp),
            Object::PolicyHttpRoute,
        ),
        Kind::GatewayHttpRoute => decode_as(
            from,
            |raw| Route::from_raw_http(raw, RouteKind::GatewayHttp),
            Object::GatewayHttpRoute,
        ),
        Kind::GrpcRoute => decode_as(from, Route::from_raw_grpc, Object::GrpcRoute),
        Kind::TlsRoute => decode_as(
            from,
            |raw| Route::from_raw_stream(raw, RouteKind::Tls),
            Object::TlsRoute,
        ),
        Kind::TcpRoute => decode_as(
            from,
            |raw| Route::from_raw_stream(raw, RouteKind::Tcp),
            Object::TcpRoute,
        ),
        Kind::ServiceProfile => decode_as(from, ServiceProfile::from_raw, Object::ServiceProfile),
    }
}

fn decode_as<'de, D, R, T>(
    from: D,
    convert: impl FnOnce(R) -> Result<T, String>,
    wrap: impl FnOnce(Arc<T>) -> Object,
) -> Result<Object, D::Error>
where
    D: Deserializer<'de>,
    R: DeserializeOwned,
{
    let raw = R::deserialize(from)?;
    convert(raw)
        .map(|object| wrap(Arc::new(object)))
        .map_err(D::Error::custom)
}
