//! JSON of a server policy: the policy of one port of a workload.

use serde_json::{Value, json};
use tulle_proto::inbound::{
    Authn, Authz, GrpcRoute, HttpLocalRateLimit, HttpRoute, Identity, ProxyProtocol, Server, authn, grpc_route,
    http_local_rate_limit, http_route, proxy_protocol,
};

use super::parts::{
    duration, grpc_failure, grpc_match, host, http_failure, http_match, list, metadata, network, object, optional,
    redirect, request_headers,
};

pub(in super::super) fn server(server: &Server) -> Value {
    object([
        ("labels", json!(server.labels)),
        ("protocol", optional(server.protocol.as_ref(), protocol)),
        ("authorizations", list(&server.authorizations, authorization)),
    ])
}

fn protocol(protocol: &ProxyProtocol) -> Value {
    use proxy_protocol::Kind;
    let Some(kind) = &protocol.kind else { return Value::Null };
    let (name, fields) = match kind {
        Kind::Detect(detect) => (
            "detect",
            object([
                ("timeout", duration(detect.timeout.as_ref())),
                ("httpRoutes", list(&detect.http_routes, route)),
                (
                    "httpLocalRateLimit",
                    optional(detect.http_local_rate_limit.as_ref(), rate_limit),
                ),
            ]),
        ),
        Kind::Http1(http) => ("http1", http_fields(&http.routes, http.local_rate_limit.as_ref())),
        Kind::Http2(http) => ("http2", http_fields(&http.routes, http.local_rate_limit.as_ref())),
        Kind::Grpc(grpc) => ("grpc", object([("routes", list(&grpc.routes, grpc_route))])),
        Kind::Opaque(_) => ("opaque", json!({})),
        Kind::Tls(_) => ("tls", json!({})),
    };
    json!({ name: fields })
}

fn http_fields(routes: &[HttpRoute], limit: Option<&HttpLocalRateLimit>) -> Value {
    object([
        ("routes", list(routes, route)),
        ("localRateLimit", optional(limit, rate_limit)),
    ])
}

fn authorization(authz: &Authz) -> Value {
    let network_with_exceptions = |source: &tulle_proto::inbound::Network| {
        object([
            ("net", optional(source.net.as_ref(), network)),
            ("except", list(&source.except, network)),
        ])
    };
    object([
        ("metadata", metadata(authz.metadata.as_ref())),
        ("labels", json!(authz.labels)),
        ("networks", list(&authz.networks, network_with_exceptions)),
        (
            "authentication",
            optional(authz.authentication.as_ref(), authentication),
        ),
    ])
}

fn authentication(authn: &Authn) -> Value {
    use authn::permit_mesh_tls::Clients;
    match &authn.permit {
        None => Value::Null,
        Some(authn::Permit::Unauthenticated(_)) => json!("unauthenticated"),
        Some(authn::Permit::MeshTls(tls)) => match &tls.clients {
            None => Value::Null,
            Some(Clients::Unauthenticated(_)) => json!({ "meshTLS": "unauthenticated" }),
            Some(Clients::Identities(clients)) => {
                let suffix = |suffix: &tulle_proto::inbound::IdentitySuffix| match &suffix.parts[..] {
                    [] => json!("*"),
                    parts => json!(format!("*.{}", parts.join("."))),
                };
                let fields = object([
                    ("identities", list(&clients.identities, identity)),
                    ("suffixes", list(&clients.suffixes, suffix)),
                ]);
                json!({ "meshTLS": fields })
            }
        },
    }
}

fn identity(identity: &Identity) -> Value {
    json!(identity.name)
}

fn rate_limit(limit: &HttpLocalRateLimit) -> Value {
    let rate = |limit: &http_local_rate_limit::Limit| json!(limit.requests_per_second);
    let override_json = |rule: &http_local_rate_limit::Override| {
        let clients = rule.clients.as_ref().map_or(&[][..], |clients| &clients.identities);
        object([
            ("requestsPerSecond", optional(rule.limit.as_ref(), rate)),
            ("clients", list(clients, identity)),
        ])
    };
    object([
        ("metadata", metadata(limit.metadata.as_ref())),
        ("total", optional(limit.total.as_ref(), rate)),
        ("identity", optional(limit.identity.as_ref(), rate)),
        ("overrides", list(&limit.overrides, override_json)),
    ])
}

fn route(route: &HttpRoute) -> Value {
    let filter = |filter: &http_route::Filter| {
        use http_route::filter::Kind;
        match &filter.kind {
            None => Value::Null,
            Some(Kind::FailureInjector(failure)) => json!({ "failureInjector": http_failure(failure) }),
            Some(Kind::RequestHeaderModifier(modifier)) => {
                json!({ "requestHeaderModifier": request_headers(modifier) })
            }
            Some(Kind::Redirect(to)) => json!({ "redirect": redirect(to) }),
        }
    };
    let rule = |rule: &http_route::Rule| {
        object([
            ("matches", list(&rule.matches, http_match)),
            ("filters", list(&rule.filters, filter)),
        ])
    };
    object([
        ("metadata", metadata(route.metadata.as_ref())),
        ("hosts", list(&route.hosts, host)),
        ("authorizations", list(&route.authorizations, authorization)),
        ("rules", list(&route.rules, rule)),
    ])
}

fn grpc_route(route: &GrpcRoute) -> Value {
    let filter = |filter: &grpc_route::Filter| {
        use grpc_route::filter::Kind;
        match &filter.kind {
            None => Value::Null,
            Some(Kind::FailureInjector(failure)) => json!({ "failureInjector": grpc_failure(failure) }),
            Some(Kind::RequestHeaderModifier(modifier)) => {
                json!({ "requestHeaderModifier": request_headers(modifier) })
            }
        }
    };
    let rule = |rule: &grpc_route::Rule| {
        object([
            ("matches", list(&rule.matches, grpc_match)),
            ("filters", list(&rule.filters, filter)),
        ])
    };
    object([
        ("metadata", metadata(route.metadata.as_ref())),
        ("hosts", list(&route.hosts, host)),
        ("authorizations", list(&route.authorizations, authorization)),
        ("rules", list(&route.rules, rule)),
    ])
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use tulle_proto::inbound::{IdentitySuffix, Network};
    use tulle_proto::net::IpNetwork;

    use super::*;

    #[test]
    fn a_port_shows_its_permitted_clients() {
        let any = authn::permit_mesh_tls::PermitClientIdentities {
            identities: vec![Identity {
                name: "load.demo".to_owned(),
            }],
            suffixes: vec![IdentitySuffix { parts: Vec::new() }],
        };
        let permit = authn::Permit::MeshTls(authn::PermitMeshTls {
            clients: Some(authn::permit_mesh_tls::Clients::Identities(any)),
        });
        let input = Server {
            protocol: Some(ProxyProtocol {
                kind: Some(proxy_protocol::Kind::Opaque(proxy_protocol::Opaque {})),
            }),
            labels: [("name".to_owned(), "web".to_owned())].into(),
            authorizations: vec![Authz {
                networks: vec![Network {
                    net: Some(IpNetwork {
                        ip: Some(IpAddr::from([10, 0, 0, 0]).into()),
                        prefix_len: 8,
                    }),
                    except: Vec::new(),
                }],
                authentication: Some(Authn { permit: Some(permit) }),
                ..Authz::default()
            }],
            ..Server::default()
        };
        let expected = json!({
            "labels": { "name": "web" },
            "protocol": { "opaque": {} },
            "authorizations": [{
                "networks": [{ "net": "10.0.0.0/8" }],
                "authentication": { "meshTLS": { "identities": ["load.demo"], "suffixes": ["*"] } },
            }],
        });
        assert_eq!(server(&input), expected);
    }

    #[test]
    fn an_empty_response_is_shown_as_empty_json() {
        assert_eq!(server(&Server::default()), json!({}));
    }
}
