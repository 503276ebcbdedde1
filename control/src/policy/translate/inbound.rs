//! Converts a server policy to protobuf.

use std::collections::BTreeMap;

use tulle_core::networks::NetworkMatch;
use tulle_proto::convert::wire_duration;
use tulle_proto::inbound::authn::{PermitMeshTls, PermitUnauthenticated, permit_mesh_tls};
use tulle_proto::inbound::http_local_rate_limit::r#override::ClientIdentities;
use tulle_proto::inbound::http_local_rate_limit::{Limit, Override};
use tulle_proto::inbound::{
    Authn, Authz, GrpcRoute, HttpLocalRateLimit, HttpRoute, Identity, IdentitySuffix, Network, ProxyProtocol, Server,
    authn, grpc_route, http_route, proxy_protocol,
};
use tulle_proto::meta::Metadata;

use crate::model::inbound::{
    Authorization, AuthorizationReference, ClientAuthentication, Identities, InboundPolicy, Protocol, RateLimit, Route,
    Routes, ServerReference,
};
use crate::model::reference::{ObjectRef, Reference};
use crate::model::route::{Filter, GrpcMatch, HttpMatch};
use crate::policy::translate::{
    default_metadata, grpc_failure, grpc_match, host, http_failure, http_match, object_metadata, redirect,
    request_headers,
};
use crate::resources::policy::reference::POLICY_GROUP;

pub(in crate::policy) fn server(server: &InboundPolicy) -> Server {
    let (group, kind, name) = match &server.reference {
        ServerReference::Default(policy) => ("", "default", *policy),
        ServerReference::Server(name) => (POLICY_GROUP, "server", &**name),
    };
    Server {
        protocol: Some(ProxyProtocol {
            kind: Some(protocol(server)),
        }),
        server_ips: Vec::new(),
        authorizations: server.authorizations.iter().map(authorization).collect(),
        labels: labels(group, kind, name),
    }
}

fn labels(group: &str, kind: &str, name: &str) -> BTreeMap<String, String> {
    [("group", group), ("kind", kind), ("name", name)]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

fn protocol(server: &InboundPolicy) -> proxy_protocol::Kind {
    let http_routes = || match &server.routes {
        Routes::Http(routes) => routes.iter().map(http_route).collect(),
        Routes::Grpc(_) | Routes::Opaque => Vec::new(),
    };
    let rate_limit = || server.rate_limit.as_ref().map(rate_limit);
    match server.protocol {
        Protocol::Detect(timeout) => proxy_protocol::Kind::Detect(proxy_protocol::Detect {
            timeout: Some(wire_duration(timeout)),
            http_routes: http_routes(),
            http_local_rate_limit: rate_limit(),
        }),
        Protocol::Http1 => proxy_protocol::Kind::Http1(proxy_protocol::Http1 {
            routes: http_routes(),
            local_rate_limit: rate_limit(),
        }),
        Protocol::Http2 => proxy_protocol::Kind::Http2(proxy_protocol::Http2 {
            routes: http_routes(),
            local_rate_limit: rate_limit(),
        }),
        Protocol::Grpc => {
            let routes = match &server.routes {
                Routes::Grpc(routes) => routes.iter().map(grpc_route).collect(),
                Routes::Http(_) | Routes::Opaque => Vec::new(),
            };
            proxy_protocol::Kind::Grpc(proxy_protocol::Grpc { routes })
        }
        Protocol::Opaque => proxy_protocol::Kind::Opaque(proxy_protocol::Opaque {}),
        Protocol::Tls => proxy_protocol::Kind::Tls(proxy_protocol::Tls {}),
    }
}

fn authorization(authorization: &Authorization) -> Authz {
    let (labels, metadata) = match &authorization.reference {
        AuthorizationReference::Default(name) => (labels("", "default", name), default_metadata(name)),
        AuthorizationReference::Object { kind, namespace, name } => (
            labels(POLICY_GROUP, kind, name),
            metadata_without_namespace(&ObjectRef {
                group: POLICY_GROUP,
                kind,
                namespace: namespace.clone(),
                name: name.clone(),
                port: None,
            }),
        ),
    };
    Authz {
        networks: authorization.networks.iter().map(network).collect(),
        authentication: Some(Authn {
            permit: Some(permit(&authorization.authentication)),
        }),
        labels,
        metadata: Some(metadata),
    }
}

fn metadata(reference: &Reference) -> Metadata {
    match reference {
        Reference::Default(name) => default_metadata(name),
        Reference::Object(reference) => metadata_without_namespace(reference),
    }
}

/// Omits the namespace, as Linkerd's control plane does: it is that of the workload.
fn metadata_without_namespace(reference: &ObjectRef) -> Metadata {
    object_metadata(&ObjectRef {
        namespace: "".into(),
        ..reference.clone()
    })
}

fn network(network: &NetworkMatch) -> Network {
    Network {
        net: Some(network.net.into()),
        except: network.except.iter().map(|except| (*except).into()).collect(),
    }
}

fn permit(clients: &ClientAuthentication) -> authn::Permit {
    let mesh_tls = |clients| authn::Permit::MeshTls(PermitMeshTls { clients: Some(clients) });
    match clients {
        ClientAuthentication::Unauthenticated => authn::Permit::Unauthenticated(PermitUnauthenticated {}),
        ClientAuthentication::UnauthenticatedTls => {
            mesh_tls(permit_mesh_tls::Clients::Unauthenticated(PermitUnauthenticated {}))
        }
        ClientAuthentication::Authenticated(identities) => {
            mesh_tls(permit_mesh_tls::Clients::Identities(client_identities(identities)))
        }
    }
}

fn client_identities(permitted: &Identities) -> permit_mesh_tls::PermitClientIdentities {
    permit_mesh_tls::PermitClientIdentities {
        identities: identities(&permitted.exact),
        suffixes: permitted
            .suffixes
            .iter()
            .map(|parts| IdentitySuffix { parts: parts.clone() })
            .collect(),
    }
}

fn identities(names: &[String]) -> Vec<Identity> {
    names.iter().map(|name| Identity { name: name.clone() }).collect()
}

fn http_route(route: &Route<HttpMatch>) -> HttpRoute {
    HttpRoute {
        metadata: Some(metadata(&route.reference)),
        hosts: route.hosts.iter().map(host).collect(),
        authorizations: route.authorizations.iter().map(authorization).collect(),
        rules: route
            .rules
            .iter()
            .map(|rule| http_route::Rule {
                matches: rule.matches.iter().map(http_match).collect(),
                filters: rule.filters.iter().filter_map(http_filter).collect(),
            })
            .collect(),
    }
}

/// Returns `None` for filters that inbound messages cannot express. If a rule has one, the view replaces all filters of the
/// rule by a failure.
fn http_filter(filter: &Filter) -> Option<http_route::Filter> {
    use http_route::filter::Kind;
    let kind = match filter {
        Filter::RequestHeaders(modifier) => Kind::RequestHeaderModifier(request_headers(modifier)),
        Filter::Redirect(to) => Kind::Redirect(redirect(to)),
        Filter::FailHttp { status, message } => Kind::FailureInjector(http_failure(*status, message)),
        Filter::ResponseHeaders(_)
        | Filter::UrlRewrite(_)
        | Filter::Cors(_)
        | Filter::FailGrpc { .. }
        | Filter::FailStream { .. } => return None,
    };
    Some(http_route::Filter { kind: Some(kind) })
}

fn grpc_route(route: &Route<GrpcMatch>) -> GrpcRoute {
    GrpcRoute {
        metadata: Some(metadata(&route.reference)),
        hosts: route.hosts.iter().map(host).collect(),
        authorizations: route.authorizations.iter().map(authorization).collect(),
        rules: route
            .rules
            .iter()
            .map(|rule| grpc_route::Rule {
                matches: rule.matches.iter().map(grpc_match).collect(),
                filters: rule.filters.iter().filter_map(grpc_filter).collect(),
            })
            .collect(),
    }
}

fn grpc_filter(filter: &Filter) -> Option<grpc_route::Filter> {
    use grpc_route::filter::Kind;
    let kind = match filter {
        Filter::RequestHeaders(modifier) => Kind::RequestHeaderModifier(request_headers(modifier)),
        Filter::FailGrpc { code, message } => Kind::FailureInjector(grpc_failure(*code, message)),
        Filter::ResponseHeaders(_)
        | Filter::Redirect(_)
        | Filter::UrlRewrite(_)
        | Filter::Cors(_)
        | Filter::FailHttp { .. }
        | Filter::FailStream { .. } => return None,
    };
    Some(grpc_route::Filter { kind: Some(kind) })
}

fn rate_limit(limit: &RateLimit) -> HttpLocalRateLimit {
    let rate = |requests_per_second| Limit { requests_per_second };
    HttpLocalRateLimit {
        metadata: Some(metadata_without_namespace(&limit.reference)),
        total: limit.total.map(rate),
        identity: limit.per_identity.map(rate),
        overrides: limit
            .overrides
            .iter()
            .map(|(limit, names)| Override {
                limit: Some(rate(*limit)),
                clients: Some(ClientIdentities {
                    identities: identities(names),
                }),
            })
            .collect(),
    }
}
