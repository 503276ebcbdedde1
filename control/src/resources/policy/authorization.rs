//! `AuthorizationPolicy` and `ServerAuthorization`: which clients can use a server, a route or a namespace.

use std::sync::Arc;

use serde::Deserialize;
use tulle_core::networks::NetworkMatch;

use crate::resources::labels::Selector;
use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::policy::reference::{
    GATEWAY_GROUP, MeshClient, POLICY_GROUP, RawNetwork, RawReference, RawResource, other_namespace_error,
    parse_networks,
};
use crate::resources::route::RouteKind;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorizationPolicy {
    pub meta: Meta,
    pub target: AuthorizationTarget,
    pub network: Option<NamespacedName>,
    pub client: Option<RequiredAuthentication>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthorizationTarget {
    Server(Arc<str>),
    /// All Servers in the policy's namespace.
    Namespace,
    Route(RouteKind, Arc<str>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequiredAuthentication {
    MeshTls(NamespacedName),
    ServiceAccount(NamespacedName),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(in crate::resources) struct PolicySpec {
    target_ref: RawReference,
    required_authentication_refs: Vec<RawReference>,
}

impl AuthorizationPolicy {
    pub(in crate::resources) fn from_raw(raw: RawResource<PolicySpec>) -> Result<Self, String> {
        let meta = Meta::from_kubernetes(raw.metadata)?;
        let target = parse_target(&raw.spec.target_ref, meta.namespace())?;
        let mut network = None;
        let mut client = None;
        for reference in &raw.spec.required_authentication_refs {
            let name = reference.resolve(meta.namespace());
            let is_duplicate = if reference.is_kind(POLICY_GROUP, "NetworkAuthentication") {
                network.replace(name).is_some()
            } else if reference.is_kind(POLICY_GROUP, "MeshTLSAuthentication") {
                client.replace(RequiredAuthentication::MeshTls(name)).is_some()
            } else if reference.is_kind("", "ServiceAccount") {
                client.replace(RequiredAuthentication::ServiceAccount(name)).is_some()
            } else {
                return Err(reference.unsupported_kind_error(
                    "spec.requiredAuthenticationRefs",
                    "MeshTLSAuthentication, NetworkAuthentication, ServiceAccount",
                ));
            };
            if is_duplicate {
                return Err(
                    "spec.requiredAuthenticationRefs may name one NetworkAuthentication at most, and one \
                            MeshTLSAuthentication or ServiceAccount at most"
                        .to_owned(),
                );
            }
        }
        Ok(Self {
            meta,
            target,
            network,
            client,
        })
    }
}

fn parse_target(reference: &RawReference, namespace: &Arc<str>) -> Result<AuthorizationTarget, String> {
    reference.check_own_namespace("spec.targetRef", namespace)?;
    let name = Arc::from(reference.name.as_str());
    if reference.is_kind(POLICY_GROUP, "Server") {
        Ok(AuthorizationTarget::Server(name))
    } else if reference.is_kind("", "Namespace") {
        if name != *namespace {
            return Err(other_namespace_error("spec.targetRef", &name, namespace));
        }
        Ok(AuthorizationTarget::Namespace)
    } else if reference.is_kind(POLICY_GROUP, "HTTPRoute") {
        Ok(AuthorizationTarget::Route(RouteKind::PolicyHttp, name))
    } else if reference.is_kind(GATEWAY_GROUP, "HTTPRoute") {
        Ok(AuthorizationTarget::Route(RouteKind::GatewayHttp, name))
    } else if reference.is_kind(GATEWAY_GROUP, "GRPCRoute") {
        Ok(AuthorizationTarget::Route(RouteKind::Grpc, name))
    } else {
        Err(reference.unsupported_kind_error("spec.targetRef", "Server, Namespace, HTTPRoute, GRPCRoute"))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAuthorization {
    pub meta: Meta,
    pub servers: ServerSelector,
    /// `None` means the cluster networks.
    pub networks: Option<Vec<NetworkMatch>>,
    pub client: ServerClient,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerSelector {
    Name(Arc<str>),
    Selector(Selector),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerClient {
    Unauthenticated,
    /// TLS is required, but no identity.
    UnauthenticatedTls,
    Meshed(Vec<MeshClient>),
    /// No client is specified, so no client is authorized.
    NoClient,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(in crate::resources) struct ServerAuthorizationSpec {
    server: RawServerSelector,
    client: RawClient,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawServerSelector {
    name: Option<String>,
    selector: Option<Selector>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawClient {
    networks: Option<Vec<RawNetwork>>,
    #[serde(default)]
    unauthenticated: bool,
    #[serde(rename = "meshTLS")]
    mesh_tls: Option<RawMeshTls>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMeshTls {
    #[serde(rename = "unauthenticatedTLS", default)]
    unauthenticated_tls: bool,
    #[serde(default)]
    identities: Vec<String>,
    #[serde(rename = "serviceAccounts", default)]
    service_accounts: Vec<RawServiceAccount>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawServiceAccount {
    name: String,
    namespace: Option<String>,
}

impl ServerAuthorization {
    pub(in crate::resources) fn from_raw(raw: RawResource<ServerAuthorizationSpec>) -> Result<Self, String> {
        let meta = Meta::from_kubernetes(raw.metadata)?;
        let servers = match (raw.spec.server.name, raw.spec.server.selector) {
            (Some(name), None) => ServerSelector::Name(name.into()),
            (None, Some(selector)) => ServerSelector::Selector(selector),
            _ => return Err("spec.server needs exactly one of name and selector".to_owned()),
        };
        let RawClient {
            networks: raw_networks,
            unauthenticated,
            mesh_tls,
        } = raw.spec.client;
        let client = match (unauthenticated, mesh_tls) {
            (true, Some(_)) => return Err("spec.client accepts only one of unauthenticated and meshTLS".to_owned()),
            (true, None) => ServerClient::Unauthenticated,
            (false, None) => ServerClient::NoClient,
            (false, Some(mesh_tls)) => parse_mesh_tls(mesh_tls, meta.namespace())?,
        };
        Ok(Self {
            servers,
            networks: raw_networks.map(parse_networks).transpose()?,
            client,
            meta,
        })
    }
}

fn parse_mesh_tls(raw: RawMeshTls, namespace: &Arc<str>) -> Result<ServerClient, String> {
    let mut clients = Vec::new();
    for identity in &raw.identities {
        clients.push(MeshClient::parse(identity)?);
    }
    for RawServiceAccount { name, namespace: other } in raw.service_accounts {
        let namespace = other.map_or_else(|| namespace.clone(), Arc::from);
        clients.push(MeshClient::ServiceAccount(NamespacedName::new(namespace, name)));
    }
    match (raw.unauthenticated_tls, clients.is_empty()) {
        (true, true) => Ok(ServerClient::UnauthenticatedTls),
        (false, false) => Ok(ServerClient::Meshed(clients)),
        (true, false) => Err(
            "spec.client.meshTLS accepts either unauthenticatedTLS, or identities and serviceAccounts, not both"
                .to_owned(),
        ),
        (false, true) => Ok(ServerClient::NoClient),
    }
}
