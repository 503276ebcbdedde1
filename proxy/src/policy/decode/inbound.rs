//! The policy of a port, from `inbound.proto`.

use std::collections::BTreeMap;
use std::sync::Arc;

use tulle_core::identity::Identity;
use tulle_core::networks::NetworkMatch;
use tulle_proto::http_route::HostMatch;
use tulle_proto::inbound as proto;
use tulle_proto::meta::Metadata;
use tulle_proto::net::IpNetwork;

use crate::policy::authz::{Authentication, Authorization, IdentityPattern};
use crate::policy::decode::fields::{DecodeError, duration, meta};
use crate::policy::decode::routes;
use crate::policy::filter::Filter;
use crate::policy::matches::RequestMatch;
use crate::policy::meta::{Meta, Resource};
use crate::policy::rate_limit::{RateLimit, RateLimitOverride};
use crate::policy::route::{Route, Rule};
use crate::policy::server::{ServerHttp, ServerPolicy, ServerProtocol};

/// All authorizations of a route, in order.
type Authorizations = Arc<[Authorization]>;

/// Decodes the policy of a port.
///
/// # Errors
/// A field is missing or invalid; then the whole message is refused.
pub(crate) fn server_policy(message: proto::Server) -> Result<ServerPolicy, DecodeError> {
    use proto::proxy_protocol::{Detect, Grpc, Http1, Http2, Kind};

    let meta = meta_from_labels(&message.labels, "server")?;
    let mut authorizations = authorizations(message.authorizations)?;
    authorizations.push(Authorization::localhost());
    let authorizations: Authorizations = authorizations.into();

    let kind = message
        .protocol
        .and_then(|protocol| protocol.kind)
        .ok_or(DecodeError::Missing("protocol"))?;
    let protocol = match kind {
        Kind::Detect(Detect {
            timeout,
            http_routes,
            http_local_rate_limit,
        }) => ServerProtocol::Detect {
            timeout: duration("detect timeout", timeout)?,
            http: http(http_routes, http_local_rate_limit, &authorizations)?,
        },
        Kind::Http1(Http1 {
            routes,
            local_rate_limit,
        }) => ServerProtocol::Http1(http(routes, local_rate_limit, &authorizations)?),
        Kind::Http2(Http2 {
            routes,
            local_rate_limit,
        }) => ServerProtocol::Http2(http(routes, local_rate_limit, &authorizations)?),
        Kind::Grpc(Grpc { routes }) => ServerProtocol::Grpc(grpc(routes, &authorizations)?),
        Kind::Opaque(_) => ServerProtocol::Opaque,
        Kind::Tls(_) => ServerProtocol::Tls,
    };
    Ok(ServerPolicy {
        meta,
        protocol,
        authorizations,
    })
}

fn http(
    messages: Vec<proto::HttpRoute>,
    limit: Option<proto::HttpLocalRateLimit>,
    server_authorizations: &Authorizations,
) -> Result<ServerHttp, DecodeError> {
    let rate_limit = limit.map(rate_limit).transpose()?.map(Arc::new);
    if messages.is_empty() {
        return Ok(ServerHttp {
            rate_limit,
            ..ServerHttp::catch_all(server_authorizations.clone())
        });
    }
    let routes = messages.into_iter().map(|message| {
        let proto::HttpRoute {
            metadata,
            hosts,
            authorizations,
            rules,
        } = message;
        route(
            RouteParts {
                metadata,
                hosts,
                authorizations,
            },
            server_authorizations,
            |authorizations| {
                let rule = |rule: proto::http_route::Rule| {
                    Ok(Rule {
                        matches: normalize_path_matches(routes::http_matches(rule.matches)?),
                        filters: rule.filters.into_iter().map(http_filter).collect::<Result<_, _>>()?,
                        action: authorizations.clone(),
                    })
                };
                rules.into_iter().map(rule).collect()
            },
        )
    });
    Ok(ServerHttp {
        routes: routes.collect::<Result<_, _>>()?,
        rate_limit,
    })
}

fn grpc(messages: Vec<proto::GrpcRoute>, server_authorizations: &Authorizations) -> Result<ServerHttp, DecodeError> {
    if messages.is_empty() {
        return Ok(ServerHttp::catch_all(server_authorizations.clone()));
    }
    let routes = messages.into_iter().map(|message| {
        let proto::GrpcRoute {
            metadata,
            hosts,
            authorizations,
            rules,
        } = message;
        route(
            RouteParts {
                metadata,
                hosts,
                authorizations,
            },
            server_authorizations,
            |authorizations| {
                let rule = |rule: proto::grpc_route::Rule| {
                    Ok(Rule {
                        matches: routes::grpc_matches(rule.matches)?,
                        filters: rule.filters.into_iter().map(grpc_filter).collect::<Result<_, _>>()?,
                        action: authorizations.clone(),
                    })
                };
                rules.into_iter().map(rule).collect()
            },
        )
    });
    Ok(ServerHttp {
        routes: routes.collect::<Result<_, _>>()?,
        rate_limit: None,
    })
}

/// Converts matches so that they can be compared with normalized paths. A port whose rules depend on the path normalizes the path of
/// each request.
fn normalize_path_matches(matches: Vec<RequestMatch>) -> Vec<RequestMatch> {
    matches.into_iter().map(RequestMatch::with_normalized_path).collect()
}

/// The common fields of HTTP and gRPC routes.
struct RouteParts {
    metadata: Option<Metadata>,
    hosts: Vec<HostMatch>,
    authorizations: Vec<proto::Authz>,
}

fn route(
    parts: RouteParts,
    server_authorizations: &Authorizations,
    rules: impl FnOnce(&Authorizations) -> Result<Vec<Rule<Authorizations>>, DecodeError>,
) -> Result<Route<Authorizations>, DecodeError> {
    let meta = meta(parts.metadata)?;
    let decode = || {
        let authorizations = with_server_authorizations(parts.authorizations, server_authorizations)?;
        let hosts = routes::hosts(parts.hosts)?;
        Ok(Route {
            meta: meta.clone(),
            hosts,
            rules: rules(&authorizations)?,
        })
    };
    decode().map_err(|error: DecodeError| error.in_resource(&meta))
}

fn http_filter(message: proto::http_route::Filter) -> Result<Filter, DecodeError> {
    use proto::http_route::filter::Kind;
    match message.kind {
        Some(Kind::FailureInjector(injector)) => routes::http_failure(injector),
        Some(Kind::RequestHeaderModifier(modifier)) => routes::request_headers(modifier),
        Some(Kind::Redirect(redirect)) => routes::redirect(redirect),
        None => Ok(Filter::unknown()),
    }
}

fn grpc_filter(message: proto::grpc_route::Filter) -> Result<Filter, DecodeError> {
    use proto::grpc_route::filter::Kind;
    match message.kind {
        Some(Kind::FailureInjector(injector)) => routes::grpc_failure(injector),
        Some(Kind::RequestHeaderModifier(modifier)) => routes::request_headers(modifier),
        None => Ok(Filter::unknown()),
    }
}

/// A route's own authorizations, then the server's.
fn with_server_authorizations(
    messages: Vec<proto::Authz>,
    server_authorizations: &Authorizations,
) -> Result<Authorizations, DecodeError> {
    if messages.is_empty() {
        return Ok(server_authorizations.clone());
    }
    let mut own = authorizations(messages)?;
    own.extend(server_authorizations.iter().cloned());
    Ok(own.into())
}

fn authorizations(messages: Vec<proto::Authz>) -> Result<Vec<Authorization>, DecodeError> {
    messages.into_iter().map(authorization).collect()
}

fn authorization(message: proto::Authz) -> Result<Authorization, DecodeError> {
    let meta = match message.metadata {
        Some(metadata) => meta(Some(metadata))?,
        None => meta_from_labels(&message.labels, "serverauthorization")?,
    };
    let decode = || {
        if message.networks.is_empty() {
            return Err(DecodeError::Missing("authorization.networks"));
        }
        let networks = message.networks.into_iter().map(network).collect::<Result<_, _>>()?;
        let authentication = authentication(message.authentication)?;
        Ok(Authorization {
            networks,
            authentication,
            meta: meta.clone(),
        })
    };
    decode().map_err(|error: DecodeError| error.in_resource(&meta))
}

fn network(message: proto::Network) -> Result<NetworkMatch, DecodeError> {
    let net = |message: IpNetwork| {
        message.try_into().map_err(|source| DecodeError::Convert {
            field: "network",
            source,
        })
    };
    Ok(NetworkMatch {
        net: net(message.net.ok_or(DecodeError::Missing("network"))?)?,
        except: message.except.into_iter().map(net).collect::<Result<_, _>>()?,
    })
}

fn authentication(message: Option<proto::Authn>) -> Result<Authentication, DecodeError> {
    use proto::authn::Permit;
    use proto::authn::permit_mesh_tls::{Clients, PermitClientIdentities};

    let permit = message
        .and_then(|message| message.permit)
        .ok_or(DecodeError::Missing("authentication"))?;
    let clients = match permit {
        Permit::Unauthenticated(_) => return Ok(Authentication::Unauthenticated),
        Permit::MeshTls(tls) => tls
            .clients
            .ok_or(DecodeError::Missing("authentication.mesh_tls.clients"))?,
    };
    Ok(match clients {
        Clients::Unauthenticated(_) => Authentication::TlsUnauthenticated,
        Clients::Identities(PermitClientIdentities { identities, suffixes }) => Authentication::TlsIdentities {
            identities: identities.into_iter().map(identity).collect(),
            patterns: suffixes
                .iter()
                .map(|suffix| IdentityPattern::from_labels(&suffix.parts))
                .collect(),
        },
    })
}

/// The identity in its canonical form. An invalid identity is kept as it is, and matches no client.
fn identity(message: proto::Identity) -> Box<str> {
    match message.name.parse::<Identity>() {
        Ok(identity) => identity.as_str().into(),
        Err(_) => message.name.into(),
    }
}

fn rate_limit(message: proto::HttpLocalRateLimit) -> Result<RateLimit, DecodeError> {
    let overrides = message.overrides.into_iter().map(|entry| {
        Ok(RateLimitOverride {
            requests_per_second: entry
                .limit
                .ok_or(DecodeError::Missing("limit of a rate limit override"))?
                .requests_per_second,
            clients: entry
                .clients
                .unwrap_or_default()
                .identities
                .into_iter()
                .map(identity)
                .collect(),
        })
    });
    Ok(RateLimit {
        meta: meta(message.metadata)?,
        total: message.total.map(|limit| limit.requests_per_second),
        per_identity: message.identity.map(|limit| limit.requests_per_second),
        overrides: overrides.collect::<Result<_, _>>()?,
    })
}

/// The resource that the labels name. The name `default:x` means the built-in default `x`.
fn meta_from_labels(labels: &BTreeMap<String, String>, default_kind: &str) -> Result<Arc<Meta>, DecodeError> {
    let name = labels.get("name").ok_or(DecodeError::Missing("labels.name"))?;
    if let Some(name) = name.strip_prefix("default:") {
        return Ok(Meta::default_named(name));
    }
    let label = |name, default: &str| labels.get(name).map_or(default, String::as_str).into();
    Ok(Arc::new(Meta::Resource(Resource {
        group: label("group", "policy.linkerd.io"),
        kind: label("kind", default_kind),
        namespace: "".into(),
        name: name.as_str().into(),
        section: "".into(),
        port: None,
    })))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proto::authn::permit_mesh_tls::{Clients, PermitClientIdentities};
    use proto::authn::{Permit, PermitMeshTls, PermitUnauthenticated};
    use proto::http_local_rate_limit::{Limit, Override};
    use proto::proxy_protocol::{Detect, Kind};
    use proto::{Authn, Authz, Network, ProxyProtocol, Server};
    use tulle_core::identity::Identity as Id;
    use tulle_proto::http_route::HttpRouteMatch;
    use tulle_proto::meta::{self as proto_meta, metadata};

    use super::*;
    use crate::policy::authz::{ConnectionTls, authorize};

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn net(text: &str) -> Option<IpNetwork> {
        Some(text.parse::<ipnet::IpNet>().unwrap().into())
    }

    fn permit(permit: Permit) -> Option<Authn> {
        Some(Authn { permit: Some(permit) })
    }

    fn authz() -> Authz {
        Authz {
            networks: vec![Network {
                net: net("10.0.0.0/8"),
                except: vec![],
            }],
            authentication: permit(Permit::Unauthenticated(PermitUnauthenticated {})),
            labels: labels(&[("name", "everybody")]),
            metadata: None,
        }
    }

    fn resource(name: &str) -> Option<Metadata> {
        let resource = proto_meta::Resource {
            group: "policy.linkerd.io".into(),
            kind: "httproute".into(),
            name: name.into(),
            ..proto_meta::Resource::default()
        };
        Some(Metadata {
            kind: Some(metadata::Kind::Resource(resource)),
        })
    }

    fn route() -> proto::HttpRoute {
        proto::HttpRoute {
            metadata: resource("r"),
            rules: vec![proto::http_route::Rule {
                matches: vec![HttpRouteMatch::default()],
                filters: vec![],
            }],
            ..proto::HttpRoute::default()
        }
    }

    fn detect() -> Detect {
        let seconds = prost_types::Duration { seconds: 10, nanos: 0 };
        Detect {
            timeout: Some(seconds),
            http_routes: vec![route()],
            http_local_rate_limit: None,
        }
    }

    fn server(edit: impl FnOnce(&mut Server, &mut Detect)) -> Server {
        let mut server = Server {
            authorizations: vec![authz()],
            labels: labels(&[("name", "web")]),
            ..Server::default()
        };
        let mut detect = detect();
        edit(&mut server, &mut detect);
        let protocol = ProxyProtocol {
            kind: Some(Kind::Detect(detect)),
        };
        server.protocol.get_or_insert(protocol);
        server
    }

    fn edited_resource(metadata: Option<Metadata>, edit: impl FnOnce(&mut proto_meta::Resource)) -> Option<Metadata> {
        let mut metadata = metadata;
        if let Some(Metadata {
            kind: Some(metadata::Kind::Resource(resource)),
        }) = &mut metadata
        {
            edit(resource);
        }
        metadata
    }

    fn server_with_protocol(kind: Kind) -> Server {
        server(|server, _| server.protocol = Some(ProxyProtocol { kind: Some(kind) }))
    }

    fn http1(route: proto::HttpRoute) -> proto::proxy_protocol::Http1 {
        proto::proxy_protocol::Http1 {
            routes: vec![route],
            local_rate_limit: None,
        }
    }

    fn grpc_protocol(route: proto::GrpcRoute) -> proto::proxy_protocol::Grpc {
        proto::proxy_protocol::Grpc { routes: vec![route] }
    }

    fn decode_detect(message: Server) -> (ServerPolicy, ServerHttp) {
        let policy = server_policy(message).unwrap();
        let ServerProtocol::Detect { timeout, http } = policy.protocol.clone() else {
            panic!("{policy:?}")
        };
        assert_eq!(timeout, Duration::from_secs(10));
        (policy, http)
    }

    #[test]
    fn a_complete_policy_is_decoded() {
        let message = server(|_, detect| {
            detect.http_routes[0].authorizations = vec![Authz {
                labels: labels(&[("name", "default:audit")]),
                ..authz()
            }];
        });
        let (policy, http) = decode_detect(message.clone());
        assert_eq!((policy.meta.kind(), policy.meta.name()), ("server", "web"));
        let names = |list: &[Authorization]| list.iter().map(|a| a.meta.name().to_owned()).collect::<Vec<_>>();
        assert_eq!(names(&policy.authorizations), ["everybody", "localhost"]);
        let own = &http.routes[0].rules[0].action;
        assert_eq!(names(own), ["audit", "everybody", "localhost"]);
        assert!(own[0].meta.is_audit() && !own[1].meta.is_audit());
        assert_eq!(
            policy,
            server_policy(message).unwrap(),
            "policies decoded from equal messages are equal"
        );
    }

    #[test]
    fn without_routes_a_default_route_matches_everything() {
        let (policy, http) = decode_detect(server(|_, detect| detect.http_routes.clear()));
        assert_eq!(http.routes[0].meta.name(), "default");
        assert_eq!(http.routes[0].rules[0].action, policy.authorizations);
        let http1 = Kind::Http1(proto::proxy_protocol::Http1 {
            routes: vec![],
            local_rate_limit: None,
        });
        let message = server(|server, _| server.protocol = Some(ProxyProtocol { kind: Some(http1) }));
        let policy = server_policy(message).unwrap();
        assert!(matches!(policy.protocol, ServerProtocol::Http1(_)));
    }

    fn assert_refused(cases: impl IntoIterator<Item = (&'static str, Server)>) {
        for (reason, message) in cases {
            let error = anyhow::Error::new(server_policy(message).unwrap_err());
            assert!(
                format!("{error:#}").contains(reason),
                "{error:#} does not say {reason:?}"
            );
        }
    }

    #[test]
    fn incomplete_messages_are_refused_with_the_reason() {
        let with_authorization = |edit: fn(&mut Authz)| server(|server, _| edit(&mut server.authorizations[0]));
        let no_protocol = Server {
            protocol: None,
            ..server(|_, _| ())
        };
        let no_kind = ProxyProtocol { kind: None };
        assert_refused([
            ("protocol is missing", no_protocol),
            (
                "protocol is missing",
                server(|server, _| server.protocol = Some(no_kind)),
            ),
            ("detect timeout is missing", server(|_, detect| detect.timeout = None)),
            ("labels.name is missing", server(|server, _| server.labels.clear())),
            (
                "authorization.networks is missing",
                with_authorization(|authz| authz.networks.clear()),
            ),
            (
                "network is missing",
                with_authorization(|authz| authz.networks[0].net = None),
            ),
            (
                "prefix length 33",
                with_authorization(|authz| authz.networks[0].net.as_mut().unwrap().prefix_len = 33),
            ),
            (
                "prefix length 33",
                with_authorization(|authz| {
                    let except = &mut authz.networks[0].except;
                    except.extend(net("10.1.0.0/16"));
                    except[0].prefix_len = 33;
                }),
            ),
            (
                "authentication is missing",
                with_authorization(|authz| authz.authentication = None),
            ),
            (
                "authentication is missing",
                with_authorization(|authz| authz.authentication = Some(Authn { permit: None })),
            ),
            (
                "authentication.mesh_tls.clients is missing",
                with_authorization(|authz| {
                    authz.authentication = permit(Permit::MeshTls(PermitMeshTls { clients: None }));
                }),
            ),
            (
                "labels.name is missing",
                with_authorization(|authz| authz.labels.clear()),
            ),
            (
                "metadata is missing",
                with_authorization(|authz| authz.metadata = Some(Metadata { kind: None })),
            ),
        ]);
    }

    #[test]
    fn incomplete_routes_and_rate_limits_are_refused_with_the_reason() {
        let with_route = |edit: fn(&mut proto::HttpRoute)| server(|_, detect| edit(&mut detect.http_routes[0]));
        let with_resource = |edit: fn(&mut proto_meta::Resource)| {
            server(|_, detect| detect.http_routes[0].metadata = edited_resource(resource("r"), edit))
        };
        let no_metadata = proto::HttpRoute {
            metadata: None,
            ..route()
        };
        assert_refused([
            ("metadata is missing", with_route(|route| route.metadata = None)),
            (
                "metadata is missing",
                server_with_protocol(Kind::Http1(http1(no_metadata))),
            ),
            (
                "metadata is missing",
                server_with_protocol(Kind::Grpc(grpc_protocol(proto::GrpcRoute::default()))),
            ),
            (
                "metadata.name is missing",
                with_resource(|resource| resource.name.clear()),
            ),
            (
                "metadata.group is missing",
                with_resource(|resource| resource.group.clear()),
            ),
            (
                "metadata.kind is missing",
                with_resource(|resource| resource.kind.clear()),
            ),
            (
                "metadata.port is \"65536\"",
                with_resource(|resource| resource.port = 65_536),
            ),
            (
                "labels.name is missing",
                with_route(|route| {
                    route.authorizations = vec![Authz {
                        labels: labels(&[]),
                        ..authz()
                    }];
                }),
            ),
            (
                "host match is missing",
                with_route(|route| route.hosts = vec![HostMatch { r#match: None }]),
            ),
            (
                "path match is missing",
                with_route(|route| {
                    route.rules[0].matches[0].path = Some(tulle_proto::http_route::PathMatch { kind: None });
                }),
            ),
            (
                "metadata is missing",
                server(|_, detect| detect.http_local_rate_limit = Some(Default::default())),
            ),
            (
                "limit of a rate limit override is missing",
                server(|_, detect| {
                    detect.http_local_rate_limit = Some(proto::HttpLocalRateLimit {
                        metadata: resource("l"),
                        overrides: vec![Override::default()],
                        ..proto::HttpLocalRateLimit::default()
                    });
                }),
            ),
        ]);
    }

    #[test]
    fn labels_name_a_server_or_a_default() {
        for (given, expected) in [
            (&[("name", "web")][..], ("policy.linkerd.io", "server", "web")),
            (&[("name", "default:deny")], ("", "default", "deny")),
            (&[("group", "g"), ("kind", "k"), ("name", "web")], ("g", "k", "web")),
        ] {
            let message = server(|server, _| server.labels = labels(given));
            let meta = server_policy(message).unwrap().meta;
            assert_eq!((meta.group(), meta.kind(), meta.name()), expected);
            // Without metadata, the labels name the resource.
            let message = server(|server, _| server.authorizations[0].labels = labels(given));
            let kind = if expected.1 == "server" {
                "serverauthorization"
            } else {
                expected.1
            };
            let meta = server_policy(message).unwrap().authorizations[0].meta.clone();
            assert_eq!((meta.group(), meta.kind(), meta.name()), (expected.0, kind, expected.2));
        }
        let message = server(|server, _| server.authorizations[0].metadata = resource("a"));
        assert_eq!(
            server_policy(message).unwrap().authorizations[0].meta.kind(),
            "httproute"
        );
    }

    #[test]
    fn every_protocol_is_decoded() {
        for (kind, expected) in [
            (Kind::Opaque(Default::default()), ServerProtocol::Opaque),
            (Kind::Tls(Default::default()), ServerProtocol::Tls),
        ] {
            assert_eq!(server_policy(server_with_protocol(kind)).unwrap().protocol, expected);
        }
        let http2 = proto::proxy_protocol::Http2 {
            routes: vec![route()],
            local_rate_limit: None,
        };
        let calls = proto::GrpcRoute {
            metadata: resource("calls"),
            rules: vec![Default::default()],
            ..Default::default()
        };
        for (kind, name) in [
            (Kind::Http1(http1(route())), "r"),
            (Kind::Http2(http2), "r"),
            (Kind::Grpc(grpc_protocol(calls)), "calls"),
            (Kind::Grpc(proto::proxy_protocol::Grpc { routes: vec![] }), "default"),
        ] {
            let policy = server_policy(server_with_protocol(kind.clone())).unwrap();
            let is_same_protocol = match policy.protocol {
                ServerProtocol::Http1(_) => matches!(kind, Kind::Http1(_)),
                ServerProtocol::Http2(_) => matches!(kind, Kind::Http2(_)),
                ServerProtocol::Grpc(_) => matches!(kind, Kind::Grpc(_)),
                _ => false,
            };
            assert!(is_same_protocol, "{kind:?}");
            let (ServerProtocol::Http1(http) | ServerProtocol::Http2(http) | ServerProtocol::Grpc(http)) =
                &policy.protocol
            else {
                panic!()
            };
            assert_eq!(http.routes[0].meta.name(), name);
            assert_eq!(http.routes[0].rules[0].action, policy.authorizations);
        }
    }

    #[test]
    fn addresses_of_a_server_are_ignored() {
        let nonsense = tulle_proto::net::IpAddress { ip: None };
        let message = server(|server, _| server.server_ips = vec![nonsense]);
        assert_eq!(
            server_policy(message).unwrap(),
            server_policy(server(|_, _| ())).unwrap()
        );
    }

    #[test]
    fn an_unknown_filter_refuses_the_requests_of_its_rule() {
        let (_, http) = decode_detect(server(|_, detect| {
            detect.http_routes[0].rules[0].filters = vec![proto::http_route::Filter { kind: None }];
        }));
        assert_eq!(http.routes[0].rules[0].filters, [Filter::unknown()]);
    }

    #[test]
    fn clients_are_authorized_by_identity_or_suffix() {
        let clients = |names: &[&str], suffixes: &[&[&str]]| {
            let identities = names
                .iter()
                .map(|name| proto::Identity { name: (*name).into() })
                .collect();
            let suffixes = suffixes.iter().map(|parts| proto::IdentitySuffix {
                parts: parts.iter().map(|part| (*part).into()).collect(),
            });
            let suffixes = suffixes.collect();
            Clients::Identities(PermitClientIdentities { identities, suffixes })
        };
        for (clients, name, expected) in [
            (clients(&["A.test"], &[]), "a.test", true),
            (clients(&["b.test"], &[]), "a.test", false),
            (clients(&[], &[&["Test"]]), "a.test", true),
            (clients(&[], &[&[]]), "spiffe://a/b", true),
            (clients(&["not an identity"], &[]), "a.test", false),
            (Clients::Unauthenticated(PermitUnauthenticated {}), "a.test", true),
        ] {
            let message = server(|server, _| {
                let tls = PermitMeshTls {
                    clients: Some(clients.clone()),
                };
                server.authorizations[0].authentication = permit(Permit::MeshTls(tls));
            });
            let policy = server_policy(message).unwrap();
            let id: Id = name.parse().unwrap();
            let tls = ConnectionTls::Terminated { client: Some(&id) };
            let found = authorize(&policy.authorizations, [10, 0, 0, 1].into(), tls);
            assert_eq!(found.is_ok(), expected, "{clients:?} {name}");
        }
    }

    #[test]
    fn rate_limits_are_decoded() {
        let (_, http) = decode_detect(server(|_, detect| {
            let clients = proto::http_local_rate_limit::r#override::ClientIdentities {
                identities: vec![proto::Identity { name: "a.test".into() }],
            };
            detect.http_local_rate_limit = Some(proto::HttpLocalRateLimit {
                metadata: resource("l"),
                total: Some(Limit { requests_per_second: 5 }),
                identity: None,
                overrides: vec![Override {
                    limit: Some(Limit { requests_per_second: 2 }),
                    clients: Some(clients),
                }],
            });
        }));
        let limit = http.rate_limit.unwrap();
        assert_eq!((limit.total, limit.per_identity), (Some(5), None));
        assert_eq!(
            limit.overrides,
            [RateLimitOverride {
                requests_per_second: 2,
                clients: vec!["a.test".into()]
            }]
        );
    }
}
