//! The policies in force, for `/debug/policies`.

use std::sync::Arc;

use serde::Serialize;
use tulle_core::networks::NetworkMatch;

use crate::{
    inbound::policy::{FallbackOrigin, PortPolicies, PortPolicy},
    policy::{
        authz::{Authentication, Authorization, IdentityPattern},
        route,
        server::ServerProtocol,
    },
};

#[derive(Serialize)]
pub(crate) struct PortStatus {
    port: u16,
    policy: String,
    /// The source of the policy.
    source: &'static str,
    protocol: &'static str,
    /// Authorizations of connections that are not HTTP.
    authorizations: Vec<AuthorizationStatus>,
    routes: Vec<RouteStatus>,
    rate_limit: Option<RateLimitStatus>,
}

#[derive(Serialize)]
struct RouteStatus {
    name: String,
    rules: Vec<Vec<AuthorizationStatus>>,
}

/// The clients that an authorization permits.
#[derive(Serialize)]
struct AuthorizationStatus {
    name: String,
    networks: Vec<String>,
    clients: Vec<String>,
}

#[derive(Serialize)]
struct RateLimitStatus {
    name: String,
    requests_per_second: Option<u32>,
    requests_per_second_per_identity: Option<u32>,
}

impl PortPolicies {
    /// The policies of all watched and polled ports, in the order of the ports.
    pub(crate) fn port_statuses(&self) -> Vec<PortStatus> {
        let mut all: Vec<_> = self.map_ports(PortStatus::from_port);
        all.sort_unstable_by_key(|status| status.port);
        all
    }
}

impl PortStatus {
    fn from_port(port: u16, port_policy: &PortPolicy) -> Self {
        let current = port_policy.current();
        let policy = &current.server_policy;
        let http = policy.protocol.http();
        Self {
            port,
            policy: policy.meta.to_string(),
            source: match (port_policy.is_received(), port_policy.fallback_origin()) {
                (true, _) => "control plane",
                (false, FallbackOrigin::LastKnown) if port_policy.is_denied() => {
                    "control plane, last known; the control plane denies the current one to this proxy"
                }
                (false, FallbackOrigin::LastKnown) => "control plane, last known; the current watch has no answer yet",
                (false, FallbackOrigin::Unknown) if port_policy.is_denied() => {
                    "unknown: the control plane denies it to this proxy, and connections are refused"
                }
                (false, FallbackOrigin::Unknown | FallbackOrigin::NotWatched) => {
                    "unknown: the control plane has not answered, and connections are refused"
                }
                (false, FallbackOrigin::OwnDefault) => {
                    "the proxy's own default policy (LINKERD2_PROXY_INBOUND_DEFAULT_POLICY), until the control plane answers"
                }
            },
            protocol: match &policy.protocol {
                ServerProtocol::Detect { .. } => "detect",
                ServerProtocol::Http1(_) => "http/1",
                ServerProtocol::Http2(_) => "http/2",
                ServerProtocol::Grpc(_) => "grpc",
                ServerProtocol::Opaque => "opaque",
                ServerProtocol::Tls => "tls",
            },
            authorizations: policy
                .authorizations
                .iter()
                .map(AuthorizationStatus::from_authorization)
                .collect(),
            routes: http.map_or_else(Vec::new, |http| {
                let route = |route: &route::Route<Arc<[Authorization]>>| RouteStatus {
                    name: route.meta.to_string(),
                    rules: route
                        .rules
                        .iter()
                        .map(|rule| authorization_statuses(&rule.action))
                        .collect(),
                };
                http.routes.iter().map(route).collect()
            }),
            rate_limit: http
                .and_then(|http| http.rate_limit.as_ref())
                .map(|limit| RateLimitStatus {
                    name: limit.meta.to_string(),
                    requests_per_second: limit.total,
                    requests_per_second_per_identity: limit.per_identity,
                }),
        }
    }
}

fn format_network(network: &NetworkMatch) -> String {
    let mut text = network.net.to_string();
    for except in &network.except {
        text = format!("{text} except {except}");
    }
    text
}

fn authorization_statuses(authorizations: &[Authorization]) -> Vec<AuthorizationStatus> {
    authorizations
        .iter()
        .map(AuthorizationStatus::from_authorization)
        .collect()
}

impl AuthorizationStatus {
    fn from_authorization(authorization: &Authorization) -> Self {
        let clients = match &authorization.authentication {
            Authentication::Unauthenticated => vec!["any client".to_owned()],
            Authentication::TlsUnauthenticated => vec!["any client with TLS".to_owned()],
            Authentication::TlsIdentities { identities, patterns } => {
                let mut names: Vec<_> = identities.iter().map(ToString::to_string).collect();
                names.sort_unstable();
                names.extend(patterns.iter().map(|pattern| match pattern {
                    IdentityPattern::Any => "any identity".to_owned(),
                    IdentityPattern::Dns(suffix) => format!("*{suffix}"),
                }));
                names
            }
        };
        Self {
            name: authorization.meta.to_string(),
            networks: authorization.networks.iter().map(format_network).collect(),
            clients,
        }
    }
}
