//! View: the server policy of a workload's port.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tulle_core::identity;
use tulle_core::names::annotation;
use tulle_core::networks::NetworkMatch;

use crate::cluster::config::Config;
use crate::cluster::metrics::{EntryMetrics, Metrics};
use crate::cluster::store::reader::Reader;
use crate::cluster::views::routes::{self, ErrorForm, ServerRoute, failure_filter};
use crate::cluster::views::view::View;
use crate::cluster::views::workload::WorkloadRef;
use crate::model::inbound::{
    Authorization, AuthorizationReference, ClientAuthentication, Identities, InboundPolicy, Protocol, RateLimit, Route,
    Routes, Rule, ServerReference,
};
use crate::model::reference::{ObjectRef, Reference};
use crate::model::route::{Filter, GrpcMatch, HttpMatch, PathMatch};
use crate::resources::acceptance;
use crate::resources::meta::NamespacedName;
use crate::resources::policy::authorization::{
    AuthorizationPolicy, AuthorizationTarget, RequiredAuthentication, ServerAuthorization, ServerClient, ServerSelector,
};
use crate::resources::policy::rate_limit::RateLimitPolicy;
use crate::resources::policy::reference::{MeshClient, POLICY_GROUP};
use crate::resources::policy::server::{
    AccessPolicy, AccessPolicyClients as PolicyClients, AccessPolicyNetworks as PolicyNetworks, ProxyProtocol, Server,
};
use crate::resources::route::{self as resource, Rules};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub workload: WorkloadId,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum WorkloadId {
    Pod(NamespacedName),
    External(NamespacedName),
}

impl WorkloadId {
    pub fn name(&self) -> &NamespacedName {
        match self {
            Self::Pod(name) | Self::External(name) => name,
        }
    }
}

pub(in crate::cluster) struct InboundView;

impl View for InboundView {
    type Key = Key;
    type Value = Option<InboundPolicy>;

    fn compute(reader: &Reader<'_>, config: &Config, key: &Key) -> Option<InboundPolicy> {
        let (workload, probe_paths) = match &key.workload {
            WorkloadId::Pod(name) => {
                let pod = reader.pod(name)?;
                (WorkloadRef::Pod(pod), pod.probe_paths(key.port))
            }
            WorkloadId::External(name) => (WorkloadRef::External(reader.external_workload(name)?), BTreeSet::new()),
        };
        let context = PortContext {
            reader,
            config,
            workload,
            port: key.port,
            probe_paths: &probe_paths,
        };
        Some(match &workload.servers(reader, key.port)[..] {
            [server, others @ ..] => InboundPolicy {
                overridden_servers: others.iter().map(|other| other.meta.name.name.clone()).collect(),
                ..context.server_policy(server)
            },
            [] => context.unselected_port_policy(),
        })
    }

    fn metrics(metrics: &Metrics, key: &Key, _value: &Option<InboundPolicy>) -> EntryMetrics {
        metrics.inbound(&key.workload.name().namespace)
    }

    fn update_metrics(metrics: &EntryMetrics, value: &Option<InboundPolicy>) {
        match value {
            Some(InboundPolicy {
                reference: ServerReference::Server(by),
                overridden_servers: overridden,
                ..
            }) => metrics.set_overridden_servers(overridden, by),
            _ => metrics.set_overridden_servers(&[], ""),
        }
    }
}

/// One port of a workload, with the inputs of its policy.
struct PortContext<'a> {
    reader: &'a Reader<'a>,
    config: &'a Config,
    workload: WorkloadRef<'a>,
    port: u16,
    probe_paths: &'a BTreeSet<String>,
}

impl PortContext<'_> {
    fn unselected_port_policy(&self) -> InboundPolicy {
        let policy = self.default_policy();
        let protocol = self.protocol(None);
        InboundPolicy {
            reference: ServerReference::Default(policy.as_str()),
            protocol,
            authorizations: self.access_policy_authorizations(policy),
            routes: match protocol {
                Protocol::Opaque => Routes::Opaque,
                _ => Routes::Http(self.default_routes()),
            },
            rate_limit: None,
            overridden_servers: Vec::new(),
        }
    }

    /// The default policy of the workload's annotations, or of the cluster. An invalid policy denies all clients, because the
    /// intended restriction is unknown. If the list of ports that require an identity has an invalid entry and does not contain
    /// this port, the policy also denies all clients, because the invalid entry may stand for this port.
    fn default_policy(&self) -> AccessPolicy {
        let mut policy = match self.workload.meta().annotation(annotation::DEFAULT_INBOUND_POLICY) {
            Some(text) => text.parse().unwrap_or(AccessPolicy::Deny),
            None => self.config.default_policy,
        };
        let Some(identity_ports) = self
            .workload
            .annotated_ports(annotation::REQUIRE_IDENTITY_INBOUND_PORTS)
        else {
            return policy;
        };
        if identity_ports.to_set().contains(self.port) {
            match &mut policy {
                AccessPolicy::Allow { clients, .. } => *clients = PolicyClients::Authenticated,
                // `audit` would allow unauthenticated clients.
                AccessPolicy::Audit => {
                    policy = AccessPolicy::Allow {
                        clients: PolicyClients::Authenticated,
                        from: PolicyNetworks::All,
                    };
                }
                AccessPolicy::Deny => {}
            }
        } else if !identity_ports.unknown.is_empty() {
            policy = AccessPolicy::Deny;
        }
        policy
    }

    fn protocol(&self, server: Option<&Server>) -> Protocol {
        match self.workload.protocol(self.config, server, self.port) {
            ProxyProtocol::Unknown => Protocol::Detect(DETECT_TIMEOUT),
            ProxyProtocol::Http1 => Protocol::Http1,
            ProxyProtocol::Http2 => Protocol::Http2,
            ProxyProtocol::Grpc => Protocol::Grpc,
            ProxyProtocol::Opaque => Protocol::Opaque,
            ProxyProtocol::Tls => Protocol::Tls,
        }
    }

    fn server_policy(&self, server: &Server) -> InboundPolicy {
        let protocol = self.protocol(Some(server));
        if server.unreadable.is_some() {
            return self.unreadable_server_policy(server, protocol);
        }
        let attached = routes::server_routes(self.reader, self.config, &server.meta.name);
        let mut authorizations = self.authorizations_of_server(server);
        let routes = match protocol {
            Protocol::Detect(_) | Protocol::Http1 | Protocol::Http2 => {
                Routes::Http(self.http_routes(server, &attached))
            }
            Protocol::Grpc => Routes::Grpc(self.grpc_routes(server, &attached)),
            Protocol::Opaque | Protocol::Tls => {
                // Opaque connections cannot be answered with an error, so no client is authorized.
                if routes::find_protocol_mismatch(&attached).is_some() {
                    authorizations.clear();
                }
                Routes::Opaque
            }
        };
        InboundPolicy {
            reference: ServerReference::Server(server.meta.name.name.clone()),
            protocol,
            authorizations,
            routes,
            rate_limit: self.rate_limit(server),
            overridden_servers: Vec::new(),
        }
    }

    /// The policy of an unreadable Server. It authorizes no client, because the unreadable part of the Server may restrict the
    /// clients that its authorizations permit. With an HTTP protocol, the probes of the pod are still permitted.
    fn unreadable_server_policy(&self, server: &Server, protocol: Protocol) -> InboundPolicy {
        InboundPolicy {
            reference: ServerReference::Server(server.meta.name.name.clone()),
            protocol,
            authorizations: Vec::new(),
            routes: match protocol {
                Protocol::Detect(_) | Protocol::Http1 | Protocol::Http2 => Routes::Http(self.default_routes()),
                Protocol::Grpc => Routes::Grpc(vec![default_route(GrpcMatch::default())]),
                Protocol::Opaque | Protocol::Tls => Routes::Opaque,
            },
            rate_limit: None,
            overridden_servers: Vec::new(),
        }
    }

    fn authorizations_of_server(&self, server: &Server) -> Vec<Authorization> {
        let namespace = server.meta.namespace();
        let mut found = Vec::new();
        for authorization in self.reader.server_authorizations(namespace) {
            let is_target = match &authorization.servers {
                ServerSelector::Name(name) => *name == server.meta.name.name,
                ServerSelector::Selector(selector) => selector.matches(&server.meta.labels),
            };
            if is_target {
                found.extend(self.server_authorization(authorization));
            }
        }
        for policy in self.reader.authorization_policies(namespace) {
            let is_target = match &policy.target {
                AuthorizationTarget::Server(name) => *name == server.meta.name.name,
                AuthorizationTarget::Namespace => true,
                AuthorizationTarget::Route(..) => false,
            };
            if is_target {
                found.extend(self.authorization_policy(policy));
            }
        }
        found.extend(self.access_policy_authorizations(server.access_policy));
        found
    }

    fn route_authorizations(&self, route: &resource::Route) -> Vec<Authorization> {
        let policies = self.reader.authorization_policies(route.meta.namespace());
        let is_target = |policy: &&&Arc<AuthorizationPolicy>| {
            matches!(&policy.target, AuthorizationTarget::Route(kind, name)
                if (*kind, name) == (route.kind, &route.meta.name.name))
        };
        policies
            .iter()
            .filter(is_target)
            .filter_map(|policy| self.authorization_policy(policy))
            .collect()
    }

    /// Converts a ServerAuthorization. `None` if it authorizes no client.
    fn server_authorization(&self, authorization: &ServerAuthorization) -> Option<Authorization> {
        let clients = match &authorization.client {
            ServerClient::Unauthenticated => ClientAuthentication::Unauthenticated,
            ServerClient::UnauthenticatedTls => ClientAuthentication::UnauthenticatedTls,
            ServerClient::Meshed(clients) => ClientAuthentication::Authenticated(self.identities(clients)),
            ServerClient::NoClient => return None,
        };
        let networks = authorization.networks.clone();
        let networks = networks.unwrap_or_else(|| network_matches(&self.config.cluster_networks));
        // Proxies reject a message with an authorization that has no networks.
        (!networks.is_empty()).then(|| Authorization {
            reference: object_reference("serverauthorization", &authorization.meta.name),
            networks,
            authentication: clients,
        })
    }

    /// Converts an AuthorizationPolicy. `None` if a required authentication does not exist, because a client must satisfy all.
    fn authorization_policy(&self, policy: &AuthorizationPolicy) -> Option<Authorization> {
        let networks = match &policy.network {
            Some(name) => self.reader.network_authentication(name)?.networks.clone(),
            None => all_networks(),
        };
        let clients = match &policy.client {
            Some(RequiredAuthentication::MeshTls(name)) => ClientAuthentication::Authenticated(
                self.identities(&self.reader.mesh_tls_authentication(name)?.clients),
            ),
            Some(RequiredAuthentication::ServiceAccount(name)) => {
                ClientAuthentication::Authenticated(self.identities(&[MeshClient::ServiceAccount(name.clone())]))
            }
            None => ClientAuthentication::Unauthenticated,
        };
        Some(Authorization {
            reference: object_reference("authorizationpolicy", &policy.meta.name),
            networks,
            authentication: clients,
        })
    }

    fn access_policy_authorizations(&self, policy: AccessPolicy) -> Vec<Authorization> {
        let (clients, networks) = match policy {
            AccessPolicy::Deny => return Vec::new(),
            AccessPolicy::Audit => (ClientAuthentication::Unauthenticated, all_networks()),
            AccessPolicy::Allow { clients, from } => {
                let clients = match clients {
                    PolicyClients::Authenticated => ClientAuthentication::Authenticated(Identities::any()),
                    PolicyClients::Unauthenticated => ClientAuthentication::Unauthenticated,
                };
                let networks = match from {
                    PolicyNetworks::All => all_networks(),
                    PolicyNetworks::Cluster => network_matches(&self.config.cluster_networks),
                };
                (clients, networks)
            }
        };
        if networks.is_empty() {
            return Vec::new();
        }
        vec![Authorization {
            reference: AuthorizationReference::Default(policy.as_str()),
            networks,
            authentication: clients,
        }]
    }

    fn identities(&self, clients: &[MeshClient]) -> Identities {
        let mut identities = Identities::default();
        for client in clients {
            match client {
                MeshClient::Identity(name) => identities.exact.push(name.clone()),
                MeshClient::Suffix(labels) => identities.suffixes.push(labels.clone()),
                MeshClient::ServiceAccount(account) => identities.exact.push(self.service_account_identity(account)),
                MeshClient::Namespace(namespace) => {
                    let Config {
                        controller_namespace,
                        trust_domain,
                        ..
                    } = self.config;
                    let suffix = format!("{namespace}.serviceaccount.identity.{controller_namespace}.{trust_domain}");
                    identities.suffixes.push(suffix.split('.').map(str::to_owned).collect());
                }
            }
        }
        identities
    }

    fn service_account_identity(&self, account: &NamespacedName) -> String {
        let Config {
            controller_namespace,
            trust_domain,
            ..
        } = self.config;
        identity::service_account_identity(&account.name, &account.namespace, controller_namespace, trust_domain)
    }

    fn http_routes(&self, server: &Server, attached: &[ServerRoute<'_>]) -> Vec<Route<HttpMatch>> {
        let mut found = Vec::new();
        if let Some((route, failure)) = routes::find_server_wide_failure(attached, ErrorForm::Http) {
            return vec![self.failing_route(route, failure, HttpMatch::match_all())];
        }
        for server_route in attached {
            if let Rules::Http(rules) = &server_route.route.rules {
                let rules = rules.iter().map(|rule| Rule {
                    matches: routes::http_matches(rule),
                    filters: routes::inbound_http_filters(server_route, rule),
                });
                found.push(self.route(server_route.route, rules.collect()));
            }
        }
        let found = if found.is_empty() { self.default_routes() } else { found };
        self.replace_filters_if_rate_limit_unsupported(server, ErrorForm::Http, found)
    }

    /// A route that answers all requests of the Server with an error, because it is unknown which requests `route` is meant to
    /// restrict.
    fn failing_route<M>(&self, route: &resource::Route, failure: Filter, match_all: M) -> Route<M> {
        let rule = Rule {
            matches: vec![match_all],
            filters: vec![failure],
        };
        Route {
            hosts: Vec::new(),
            ..self.route(route, vec![rule])
        }
    }

    fn grpc_routes(&self, server: &Server, attached: &[ServerRoute<'_>]) -> Vec<Route<GrpcMatch>> {
        let mut found = Vec::new();
        if let Some((route, failure)) = routes::find_server_wide_failure(attached, ErrorForm::Grpc) {
            return vec![self.failing_route(route, failure, GrpcMatch::default())];
        }
        for server_route in attached {
            if let Rules::Grpc(rules) = &server_route.route.rules {
                let rules = rules.iter().map(|rule| Rule {
                    matches: routes::grpc_matches(rule),
                    filters: routes::inbound_grpc_filters(server_route, rule),
                });
                found.push(self.route(server_route.route, rules.collect()));
            }
        }
        if found.is_empty() {
            found.push(default_route(GrpcMatch::default()));
        }
        self.replace_filters_if_rate_limit_unsupported(server, ErrorForm::Grpc, found)
    }

    fn route<M>(&self, route: &resource::Route, rules: Vec<Rule<M>>) -> Route<M> {
        Route {
            reference: routes::reference(route),
            hosts: routes::hosts(route),
            authorizations: self.route_authorizations(route),
            rules,
        }
    }

    /// A route for all requests, and one for the pod's health probes, which may be unauthenticated. Probe paths are exact
    /// matches, so the order of the two routes has no effect.
    fn default_routes(&self) -> Vec<Route<HttpMatch>> {
        let mut found = vec![default_route(HttpMatch::match_all())];
        if !self.probe_paths.is_empty() && !self.config.probe_networks.is_empty() {
            let probe = |path: &String| HttpMatch {
                path: Some(PathMatch::Exact(path.clone())),
                method: Some("GET".to_owned()),
                ..HttpMatch::default()
            };
            found.push(Route {
                reference: Reference::Default("probe"),
                hosts: Vec::new(),
                authorizations: vec![Authorization {
                    reference: AuthorizationReference::Default("probe"),
                    networks: network_matches(&self.config.probe_networks),
                    authentication: ClientAuthentication::Unauthenticated,
                }],
                rules: vec![Rule {
                    matches: self.probe_paths.iter().map(probe).collect(),
                    filters: Vec::new(),
                }],
            });
        }
        found
    }

    fn oldest_rate_limit(&self, server: &Server) -> Option<&Arc<RateLimitPolicy>> {
        let limits = self.reader.rate_limits(server.meta.namespace()).into_iter();
        let limits = limits.filter(|limit| limit.server == server.meta.name.name);
        limits.min_by(|a, b| a.meta.age_order().cmp(&b.meta.age_order()))
    }

    /// Returns the routes unchanged, or with an error as the response of each rule if the Server's rate limit is unreadable or not
    /// supported.
    fn replace_filters_if_rate_limit_unsupported<M>(
        &self,
        server: &Server,
        form: ErrorForm,
        mut routes: Vec<Route<M>>,
    ) -> Vec<Route<M>> {
        let Some(limit) = self.oldest_rate_limit(server) else {
            return routes;
        };
        let unreadable = limit.unreadable.as_ref().map(ToString::to_string);
        if let Some(reason) = unreadable.or_else(|| acceptance::rate_limit_unsupported_reason(server.protocol)) {
            let message = format!("HTTPLocalRateLimitPolicy {}: {reason}", limit.meta.name);
            for rule in routes.iter_mut().flat_map(|route| &mut route.rules) {
                rule.filters = vec![failure_filter(form, message.clone())];
            }
        }
        routes
    }

    fn rate_limit(&self, server: &Server) -> Option<RateLimit> {
        let limit = self
            .oldest_rate_limit(server)
            .filter(|limit| limit.unreadable.is_none())?;
        let overrides = limit.overrides.iter().map(|limit_override| {
            let identities = limit_override
                .clients
                .iter()
                .map(|client| self.service_account_identity(client))
                .collect();
            (limit_override.limit.get(), identities)
        });
        Some(RateLimit {
            reference: ObjectRef {
                group: POLICY_GROUP,
                kind: "HTTPLocalRateLimitPolicy",
                namespace: limit.meta.namespace().clone(),
                name: limit.meta.name.name.clone(),
                port: None,
            },
            total: limit.total.map(std::num::NonZero::get),
            per_identity: limit.per_identity.map(std::num::NonZero::get),
            overrides: overrides.collect(),
        })
    }
}

fn default_route<M>(match_all: M) -> Route<M> {
    Route {
        reference: Reference::Default("default"),
        hosts: Vec::new(),
        authorizations: Vec::new(),
        rules: vec![Rule {
            matches: vec![match_all],
            filters: Vec::new(),
        }],
    }
}

fn object_reference(kind: &'static str, name: &NamespacedName) -> AuthorizationReference {
    AuthorizationReference::Object {
        kind,
        namespace: name.namespace.clone(),
        name: name.name.clone(),
    }
}

fn network_matches(networks: &[IpNet]) -> Vec<NetworkMatch> {
    networks.iter().copied().map(NetworkMatch::from).collect()
}

fn all_networks() -> Vec<NetworkMatch> {
    let v4 = IpNet::V4(ipnet::Ipv4Net::default());
    let v6 = IpNet::V6(ipnet::Ipv6Net::default());
    network_matches(&[v4, v6])
}

/// Timeout of protocol detection in the proxy.
const DETECT_TIMEOUT: Duration = Duration::from_secs(10);
