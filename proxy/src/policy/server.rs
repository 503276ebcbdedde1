//! What a port of this workload speaks, and who may reach it.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use crate::policy::authz::{Authentication, Authorization};
use crate::policy::filter::Filter;
use crate::policy::meta::{self, Meta};
use crate::policy::rate_limit::RateLimit;
use crate::policy::route::{Route, Rule};

/// The policy of one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerPolicy {
    pub(crate) meta: Arc<Meta>,
    pub(crate) protocol: ServerProtocol,
    /// For connections that are not HTTP; HTTP requests are judged by their route's list, which ends with this one.
    pub(crate) authorizations: Arc<[Authorization]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ServerProtocol {
    /// Look at the first bytes, for `timeout` at most.
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerHttp {
    /// Each rule holds all authorizations that count for it, the route's own first.
    pub(crate) routes: Arc<[Route<Arc<[Authorization]>>]>,
    pub(crate) rate_limit: Option<Arc<RateLimit>>,
}

/// A policy by name, for ports that the control plane has not spoken of yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultPolicy {
    Deny,
    AllAuthenticated,
    AllUnauthenticated,
    ClusterAuthenticated,
    ClusterUnauthenticated,
    Audit,
}

/// Why a text names no default policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a default policy; expected deny, all-authenticated, all-unauthenticated, \
     cluster-authenticated, cluster-unauthenticated or audit"
)]
pub(crate) struct ParseDefaultPolicyError {
    text: String,
}

impl ServerPolicy {
    /// For an update that cannot be decoded: HTTP requests get 500, connections are closed.
    pub(crate) fn invalid(detect_timeout: Duration) -> Self {
        let meta = Meta::default_named("invalid");
        // Requests pass the authorization of the route, but not its filter, so that the answer says whose fault it is.
        let authorizations: Arc<[_]> = [Authorization::anywhere(Authentication::Unauthenticated, meta.clone())].into();
        let rule = Rule {
            matches: Vec::new(),
            filters: vec![Filter::Unknown],
            payload: authorizations,
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

    /// For a port whose policy the control plane has not told: HTTP requests are answered 503, other connections are closed.
    pub(crate) fn unknown() -> Self {
        let http = ServerHttp {
            routes: Arc::new([]),
            rate_limit: None,
        };
        Self {
            meta: Meta::default_named("unknown"),
            protocol: ServerProtocol::Detect {
                timeout: UNKNOWN_DETECT_TIMEOUT,
                http,
            },
            authorizations: Arc::new([]),
        }
    }

    /// Whether every client may connect, whoever and wherever it is.
    pub(crate) fn permits_everybody(&self) -> bool {
        self.authorizations.iter().any(Authorization::permits_everybody)
    }
}

/// For finding out whether a client that is refused anyway speaks HTTP, and can be told why.
const UNKNOWN_DETECT_TIMEOUT: Duration = Duration::from_millis(100);

impl ServerHttp {
    /// One route named `default` for all requests.
    pub(crate) fn catch_all(authorizations: Arc<[Authorization]>) -> Self {
        let route = Route::catch_all(Meta::default_named("default"), authorizations);
        Self {
            routes: [route].into(),
            rate_limit: None,
        }
    }
}

impl DefaultPolicy {
    /// The policy of a port whose protocol has to be detected; `cluster` are the networks of the cluster.
    pub(crate) fn detect(self, timeout: Duration, cluster: &[IpNet]) -> ServerPolicy {
        let authorizations = self.authorizations(cluster);
        let http = ServerHttp::catch_all(authorizations.clone());
        ServerPolicy {
            meta: self.meta(),
            protocol: ServerProtocol::Detect { timeout, http },
            authorizations,
        }
    }

    /// The policy of a port whose bytes are not looked at.
    pub(crate) fn opaque(self, cluster: &[IpNet]) -> ServerPolicy {
        let authorizations = self.authorizations(cluster);
        ServerPolicy {
            meta: self.meta(),
            protocol: ServerProtocol::Opaque,
            authorizations,
        }
    }

    /// Whether it is about the networks of the cluster, so that these have to be known.
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

    fn authorizations(self, cluster: &[IpNet]) -> Arc<[Authorization]> {
        let authentication = match self {
            Self::Deny => return Arc::new([]),
            Self::AllAuthenticated | Self::ClusterAuthenticated => Authentication::any_identity(),
            Self::AllUnauthenticated | Self::ClusterUnauthenticated | Self::Audit => Authentication::Unauthenticated,
        };
        let mut authorization = Authorization::anywhere(authentication, self.meta());
        if self.needs_cluster_networks() {
            authorization.networks = cluster.iter().map(|net| (*net).into()).collect();
        }
        [authorization].into()
    }
}

impl FromStr for DefaultPolicy {
    type Err = ParseDefaultPolicyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        DEFAULT_POLICIES
            .into_iter()
            .find(|policy| policy.as_str() == text)
            .ok_or_else(|| ParseDefaultPolicyError { text: text.to_owned() })
    }
}

const DEFAULT_POLICIES: [DefaultPolicy; 6] = [
    DefaultPolicy::Deny,
    DefaultPolicy::AllAuthenticated,
    DefaultPolicy::AllUnauthenticated,
    DefaultPolicy::ClusterAuthenticated,
    DefaultPolicy::ClusterUnauthenticated,
    DefaultPolicy::Audit,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_policies_are_known_by_name() {
        for policy in DEFAULT_POLICIES {
            assert_eq!(policy.as_str().parse(), Ok(policy));
        }
        let err = "all".parse::<DefaultPolicy>().unwrap_err().to_string();
        assert!(
            err.starts_with("\"all\" is not a default policy; expected deny"),
            "{err}"
        );
    }
}
