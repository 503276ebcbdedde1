//! Server policies: the protocol of a port of this workload, its routes and its authorizations.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use ipnet::IpNet;

use crate::policy::authz::{self, Authentication, Authorization, ConnectionTls};
use crate::policy::filter::Filter;
use crate::policy::meta::{self, Meta};
use crate::policy::rate_limit::RateLimit;
use crate::policy::route::{Route, Rule};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerPolicy {
    pub(crate) meta: Arc<Meta>,
    pub(crate) protocol: ServerProtocol,
    /// Authorizations of connections that are not HTTP. HTTP requests use the authorizations of their route, which include these at
    /// the end.
    pub(crate) authorizations: Arc<[Authorization]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ServerProtocol {
    /// Detects the protocol, for at most `timeout`.
    Detect {
        timeout: Duration,
        http: ServerHttp,
    },
    Http1(ServerHttp),
    Http2(ServerHttp),
    Grpc(ServerHttp),
    Opaque,
    Tls,
}

impl ServerProtocol {
    /// The routes, if the protocol has them.
    pub(crate) fn http(&self) -> Option<&ServerHttp> {
        match self {
            Self::Detect { http, .. } | Self::Http1(http) | Self::Http2(http) | Self::Grpc(http) => Some(http),
            Self::Opaque | Self::Tls => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerHttp {
    /// Each rule holds all authorizations that apply to it, the route's own first.
    pub(crate) routes: Arc<[Route<Arc<[Authorization]>>]>,
    pub(crate) rate_limit: Option<Arc<RateLimit>>,
}

/// A named default policy. If so configured, this proxy applies it to ports whose policy the control plane has not sent yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DefaultPolicy {
    Deny,
    AllAuthenticated,
    #[default]
    AllUnauthenticated,
    ClusterAuthenticated,
    ClusterUnauthenticated,
    /// Every client is permitted and logged.
    Audit,
}

impl ServerPolicy {
    /// Replaces a policy that cannot be decoded: HTTP requests get 500, other connections are closed.
    pub(crate) fn invalid(detect_timeout: Duration) -> Self {
        let meta = Meta::default_named("invalid");
        // The route authorizes every client, so that its filter responds with 500 and the cause. Without an authorization the
        // response would be 403.
        let authorizations: Arc<[_]> = [Authorization::from_any_network(
            Authentication::Unauthenticated,
            meta.clone(),
        )]
        .into();
        let rule = Rule {
            matches: Vec::new(),
            filters: vec![Filter::Invalid(
                "the proxy cannot decode the policy of this port; its log has the reason".into(),
            )],
            action: authorizations,
        };
        let route = Route {
            meta: meta.clone(),
            hosts: Vec::new(),
            rules: vec![rule],
        };
        let http = ServerHttp {
            routes: [route].into(),
            rate_limit: None,
        };
        Self {
            meta,
            protocol: ServerProtocol::Detect {
                timeout: detect_timeout,
                http,
            },
            authorizations: Arc::new([]),
        }
    }

    /// The policy of a port whose policy the control plane has not sent: HTTP requests get 503, other connections are closed.
    pub(crate) fn unknown() -> Self {
        let http = ServerHttp {
            routes: Arc::new([]),
            rate_limit: None,
        };
        Self {
            meta: Meta::default_named("unknown"),
            protocol: ServerProtocol::Detect {
                timeout: UNKNOWN_POLICY_DETECT_TIMEOUT,
                http,
            },
            authorizations: Arc::new([]),
        }
    }

    /// Limits the timeout of protocol detection to `max`, the proxy's own setting.
    pub(crate) fn with_max_detect_timeout(mut self, max: Duration) -> Self {
        if let ServerProtocol::Detect { timeout, .. } = &mut self.protocol {
            *timeout = max.min(*timeout);
        }
        self
    }

    /// Whether connections must be HTTP: the policy says so, or it restricts requests in a way that opaque bytes would bypass.
    pub(crate) fn requires_http(&self) -> bool {
        match &self.protocol {
            ServerProtocol::Detect { http, .. } => http.restricts_requests(),
            ServerProtocol::Http1(_) | ServerProtocol::Http2(_) | ServerProtocol::Grpc(_) => true,
            ServerProtocol::Opaque | ServerProtocol::Tls => false,
        }
    }

    /// Whether the client may send at least one request. Requests of probes do not count, because all clients may send them.
    pub(crate) fn permits_some_request(&self, client: IpAddr, tls: ConnectionTls<'_>) -> bool {
        let permits = |authorizations: &[Authorization]| authz::authorize(authorizations, client, tls).is_ok();
        let routes = || self.protocol.http().into_iter().flat_map(|http| http.routes.iter());
        permits(&self.authorizations)
            || routes()
                .filter(|route| !route.meta.is_probe())
                .flat_map(|route| &route.rules)
                .any(|rule| permits(&rule.action))
    }

    /// Whether every client may connect, with or without an identity, from any address.
    pub(crate) fn permits_every_client(&self) -> bool {
        self.authorizations.iter().any(Authorization::permits_every_client)
    }
}

/// Maximum time of protocol detection while the policy is unknown. All clients are refused; detection finds the HTTP clients, which
/// get an error response.
const UNKNOWN_POLICY_DETECT_TIMEOUT: Duration = Duration::from_millis(100);

impl ServerHttp {
    /// Whether requests of clients that the server authorizes are restricted: by a rate limit, by a user-defined route, by a
    /// filter, or because no route matches all requests.
    ///
    /// The generated routes `default` and `probe` do not restrict requests: each has the authorizations of the server, and can only
    /// add others.
    fn restricts_requests(&self) -> bool {
        let has_filters = |route: &Route<_>| route.rules.iter().any(|rule| !rule.filters.is_empty());
        self.has_user_defined_rules()
            || self.routes.iter().any(has_filters)
            || !self.routes.iter().any(Route::matches_all_requests)
    }

    /// Whether there is a rate limit or a user-defined route. The bytes of a CONNECT tunnel would bypass both.
    pub(crate) fn has_user_defined_rules(&self) -> bool {
        self.rate_limit.is_some() || self.routes.iter().any(Route::is_user_defined)
    }

    /// Whether CONNECT tunnels are refused for all clients and hosts.
    pub(crate) fn forbids_connect_tunnels(&self) -> bool {
        self.has_user_defined_rules() && !self.routes.iter().any(|route| route.requires_method(&Method::CONNECT))
    }

    /// Which rules depend on the path.
    pub(crate) fn path_rules(&self) -> PathRules {
        let mut path_routes = self.routes.iter().filter(|route| route.depends_on_path()).peekable();
        if path_routes.peek().is_none() {
            PathRules::None
        } else if path_routes.any(Route::is_user_defined) {
            PathRules::UserDefined
        } else {
            PathRules::ProbesOnly
        }
    }

    /// One route named `default` for all requests.
    pub(crate) fn catch_all(authorizations: Arc<[Authorization]>) -> Self {
        let route = Route::catch_all(Meta::default_named("default"), authorizations);
        Self {
            routes: [route].into(),
            rate_limit: None,
        }
    }
}

/// Rules that depend on the path of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathRules {
    None,
    /// Only the rules that the control plane generates for probes.
    ProbesOnly,
    UserDefined,
}

impl DefaultPolicy {
    pub(crate) const ALL: [Self; 6] = [
        Self::Deny,
        Self::AllAuthenticated,
        Self::AllUnauthenticated,
        Self::ClusterAuthenticated,
        Self::ClusterUnauthenticated,
        Self::Audit,
    ];

    /// The policy of a port whose protocol is detected.
    pub(crate) fn policy_for_detected_port(self, timeout: Duration, cluster_networks: &[IpNet]) -> ServerPolicy {
        let authorizations = self.authorizations(cluster_networks);
        let http = ServerHttp::catch_all(authorizations.clone());
        ServerPolicy {
            meta: self.meta(),
            protocol: ServerProtocol::Detect { timeout, http },
            authorizations,
        }
    }

    /// The policy of an opaque port.
    pub(crate) fn policy_for_opaque_port(self, cluster_networks: &[IpNet]) -> ServerPolicy {
        let authorizations = self.authorizations(cluster_networks);
        ServerPolicy {
            meta: self.meta(),
            protocol: ServerProtocol::Opaque,
            authorizations,
        }
    }

    /// Whether only clients in the cluster's networks are authorized.
    pub(crate) fn needs_cluster_networks(self) -> bool {
        matches!(self, Self::ClusterAuthenticated | Self::ClusterUnauthenticated)
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Deny => "deny",
            Self::AllAuthenticated => "all-authenticated",
            Self::AllUnauthenticated => "all-unauthenticated",
            Self::ClusterAuthenticated => "cluster-authenticated",
            Self::ClusterUnauthenticated => "cluster-unauthenticated",
            Self::Audit => meta::AUDIT,
        }
    }

    fn meta(self) -> Arc<Meta> {
        Meta::default_named(self.as_str())
    }

    fn authorizations(self, cluster_networks: &[IpNet]) -> Arc<[Authorization]> {
        let authentication = match self {
            Self::Deny => return Arc::new([]),
            Self::AllAuthenticated | Self::ClusterAuthenticated => Authentication::any_identity(),
            Self::AllUnauthenticated | Self::ClusterUnauthenticated | Self::Audit => Authentication::Unauthenticated,
        };
        let mut authorization = Authorization::from_any_network(authentication, self.meta());
        if self.needs_cluster_networks() {
            authorization.networks = cluster_networks.iter().map(|net| (*net).into()).collect();
        }
        [authorization].into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::matches::{HttpMatch, PathMatch, RequestMatch};
    use crate::policy::meta::Resource;

    fn user_defined(name: &str) -> Arc<Meta> {
        Arc::new(Meta::Resource(Resource {
            group: "policy.linkerd.io".into(),
            kind: "httproute".into(),
            namespace: "".into(),
            name: name.into(),
            section: "".into(),
            port: None,
        }))
    }

    fn route(meta: Arc<Meta>, path: PathMatch) -> Route<Arc<[Authorization]>> {
        let matches = HttpMatch {
            path: Some(path),
            ..HttpMatch::default()
        };
        Route {
            rules: vec![Rule {
                matches: vec![RequestMatch::Http(matches)],
                filters: Vec::new(),
                action: Arc::new([]),
            }],
            ..Route::catch_all(meta, Arc::new([]) as Arc<[_]>)
        }
    }

    fn probe() -> Route<Arc<[Authorization]>> {
        let mut probe = route(Meta::default_named("probe"), PathMatch::exact("/healthz"));
        if let RequestMatch::Http(matches) = &mut probe.rules[0].matches[0] {
            matches.method = Some(Method::GET);
        }
        probe
    }

    #[test]
    fn a_client_that_may_send_only_probe_requests_is_not_authorized() {
        let everybody: Arc<[Authorization]> = DefaultPolicy::AllUnauthenticated
            .policy_for_detected_port(Duration::ZERO, &[])
            .authorizations;
        assert!(!everybody.is_empty());
        let permits = |mut route: Route<Arc<[Authorization]>>| {
            route.rules[0].action = everybody.clone();
            let http = ServerHttp {
                routes: [route].into(),
                rate_limit: None,
            };
            let policy = ServerPolicy {
                meta: Meta::default_named("test"),
                protocol: ServerProtocol::Http1(http),
                authorizations: Arc::new([]),
            };
            policy.permits_some_request(IpAddr::from([10, 0, 0, 1]), ConnectionTls::NotTerminated)
        };
        assert!(!permits(probe()));
        assert!(permits(route(user_defined("some"), PathMatch::prefix("/some"))));
    }

    #[test]
    fn only_rules_that_restrict_requests_require_http() {
        let root = || route(Meta::default_named("default"), PathMatch::prefix("/"));
        let mut filtered = root();
        filtered.rules[0].filters = vec![Filter::unknown()];
        let mut one_host = root();
        one_host.hosts = vec![crate::policy::matches::HostMatch::exact("a.test")];
        let limit = Arc::new(RateLimit {
            meta: Meta::default_named("limit"),
            total: Some(1),
            per_identity: None,
            overrides: Vec::new(),
        });
        for (what, routes, rate_limit, requires_http, path_rules) in [
            ("the default route", vec![root()], None, false, PathRules::None),
            (
                "probes beside it",
                vec![probe(), root()],
                None,
                false,
                PathRules::ProbesOnly,
            ),
            (
                "in Linkerd's order",
                vec![root(), probe()],
                None,
                false,
                PathRules::ProbesOnly,
            ),
            ("probes alone", vec![probe()], None, true, PathRules::ProbesOnly),
            ("no routes", vec![], None, true, PathRules::None),
            ("a filter", vec![filtered], None, true, PathRules::None),
            ("one host", vec![one_host], None, true, PathRules::None),
            ("a rate limit", vec![root()], Some(limit), true, PathRules::None),
            (
                "a route for all requests",
                vec![route(user_defined("all"), PathMatch::prefix("/"))],
                None,
                true,
                PathRules::None,
            ),
            (
                "a route for some",
                vec![root(), route(user_defined("some"), PathMatch::prefix("/some"))],
                None,
                true,
                PathRules::UserDefined,
            ),
        ] {
            let http = ServerHttp {
                routes: routes.into(),
                rate_limit,
            };
            assert_eq!(http.path_rules(), path_rules, "{what}");
            let policy = |protocol| ServerPolicy {
                meta: Meta::default_named("test"),
                protocol,
                authorizations: Arc::new([]),
            };
            let timeout = Duration::ZERO;
            let detect = policy(ServerProtocol::Detect {
                timeout,
                http: http.clone(),
            });
            assert_eq!(detect.requires_http(), requires_http, "{what}");
            assert!(policy(ServerProtocol::Http1(http)).requires_http());
        }
        assert!(ServerPolicy::invalid(Duration::ZERO).requires_http() && ServerPolicy::unknown().requires_http());
        for default in DefaultPolicy::ALL {
            assert!(!default.policy_for_detected_port(Duration::ZERO, &[]).requires_http());
            assert!(!default.policy_for_opaque_port(&[]).requires_http());
        }
    }
}
