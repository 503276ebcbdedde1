//! The policies in force, as `/debug/policies` shows them.

use std::sync::Arc;

use serde::Serialize;
use tulle_core::nets::NetworkMatch;

use crate::{
    inbound::policy::{FallbackOrigin, Port, Ports},
    policy::{
        authz::{Authentication, Authorization, IdentitySuffix},
        route,
        server::ServerProtocol,
    },
};

/// The policy of one port.
#[derive(Serialize)]
pub(crate) struct Shown {
    port: u16,
    policy: String,
    /// Who says so.
    source: &'static str,
    protocol: &'static str,
    /// For connections that carry no HTTP.
    authorizations: Vec<Permission>,
    routes: Vec<Route>,
    rate_limit: Option<Limit>,
}

#[derive(Serialize)]
struct Route {
    name: String,
    rules: Vec<Vec<Permission>>,
}

/// Who may.
#[derive(Serialize)]
struct Permission {
    name: String,
    networks: Vec<String>,
    clients: Vec<String>,
}

#[derive(Serialize)]
struct Limit {
    name: String,
    requests_per_second: Option<u32>,
    requests_per_second_of_an_identity: Option<u32>,
}

impl Ports {
    /// The policies of all ports that are watched, by port.
    pub(crate) fn shown(&self) -> Vec<Shown> {
        let mut all: Vec<_> = self.each(Shown::of);
        all.sort_unstable_by_key(|shown| shown.port);
        all
    }
}

impl Shown {
    fn of(number: u16, port: &Port) -> Self {
        let current = port.current();
        let policy = &current.policy;
        let http = policy.protocol.http();
        Self {
            port: number,
            policy: policy.meta.to_string(),
            source: match (port.is_known(), port.fallback_origin()) {
                (true, _) => "control plane",
                (false, FallbackOrigin::Remembered) => "control plane, some time ago; it has not answered again",
                (false, FallbackOrigin::Unknown) => {
                    "unknown: the control plane has not answered, and nobody may use the port"
                }
                (false, FallbackOrigin::Environment) => "default of the environment, until the control plane answers",
            },
            protocol: match &policy.protocol {
                ServerProtocol::Detect { .. } => "detect",
                ServerProtocol::Http1(_) => "http/1",
                ServerProtocol::Http2(_) => "http/2",
                ServerProtocol::Grpc(_) => "grpc",
                ServerProtocol::Opaque => "opaque",
                ServerProtocol::Tls => "tls",
            },
            authorizations: policy.authorizations.iter().map(Permission::of).collect(),
            routes: http.map_or_else(Vec::new, |http| {
                let route = |route: &route::Route<Arc<[Authorization]>>| Route {
                    name: route.meta.to_string(),
                    rules: route.rules.iter().map(|rule| permissions(&rule.payload)).collect(),
                };
                http.routes.iter().map(route).collect()
            }),
            rate_limit: http.and_then(|http| http.rate_limit.as_ref()).map(|limit| Limit {
                name: limit.meta.to_string(),
                requests_per_second: limit.total,
                requests_per_second_of_an_identity: limit.identity,
            }),
        }
    }
}

fn network(network: &NetworkMatch) -> String {
    let mut text = network.net.to_string();
    for except in &network.except {
        text = format!("{text} but {except}");
    }
    text
}

fn permissions(authorizations: &[Authorization]) -> Vec<Permission> {
    authorizations.iter().map(Permission::of).collect()
}

impl Permission {
    fn of(authorization: &Authorization) -> Self {
        let clients = match &authorization.authentication {
            Authentication::Unauthenticated => vec!["anybody".to_owned()],
            Authentication::TlsUnauthenticated => vec!["anybody with TLS".to_owned()],
            Authentication::TlsIdentities { identities, suffixes } => {
                let mut names: Vec<_> = identities.iter().map(ToString::to_string).collect();
                names.sort_unstable();
                names.extend(suffixes.iter().map(|suffix| match suffix {
                    IdentitySuffix::Any => "any identity".to_owned(),
                    IdentitySuffix::Dns(suffix) => format!("*{suffix}"),
                }));
                names
            }
        };
        Self {
            name: authorization.meta.to_string(),
            networks: authorization.networks.iter().map(network).collect(),
            clients,
        }
    }
}
