//! Client policies: the protocol of a destination, its routes and their backends.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use tulle_core::backoff::Backoff;

use crate::policy::endpoint::EndpointSpec;
use crate::policy::filter::{Filter, Ratio};
use crate::policy::matches::{self, HostMatch, RequestMatch};
use crate::policy::meta::Meta;
use crate::policy::route::{Route, Rule};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClientPolicy {
    pub(crate) meta: Arc<Meta>,
    pub(crate) protocol: ClientProtocol,
}

impl ClientPolicy {
    /// Whether this is the policy of an EgressNetwork, which can deny traffic. Other policies only route it.
    pub(crate) fn is_egress_network(&self) -> bool {
        matches!(&*self.meta, Meta::Resource(resource) if &*resource.kind == "EgressNetwork")
    }

    /// Whether the rules are compared with the normal form of a request's path, as for a Server. An EgressNetwork can deny paths.
    /// If the original path were compared, a client could write a denied path in a form that matches no rule (`/a%64min`), and the
    /// destination would still read it as the denied path.
    pub(crate) fn compares_normalized_paths(&self) -> bool {
        self.is_egress_network()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ClientProtocol {
    /// Detects the protocol, for at most `timeout`.
    Detect {
        timeout: Duration,
        http1: ClientHttp,
        http2: ClientHttp,
        opaque: Option<OpaqueRoute>,
    },
    Http1(ClientHttp),
    Http2(ClientHttp),
    Grpc(ClientHttp),
    /// Without a route, connections are refused.
    Opaque(Option<OpaqueRoute>),
    Tls(Arc<[TlsRoute]>),
}

impl ClientProtocol {
    /// Converts all matches so that they can be compared with normalized paths.
    pub(crate) fn normalize_path_matches(&mut self) {
        let http = match self {
            Self::Detect { http1, http2, .. } => vec![http1, http2],
            Self::Http1(http) | Self::Http2(http) | Self::Grpc(http) => vec![http],
            Self::Opaque(_) | Self::Tls(_) => Vec::new(),
        };
        for http in http {
            let routes = http.routes.iter().map(|route| {
                let mut route = route.clone();
                for rule in &mut route.rules {
                    let matches = std::mem::take(&mut rule.matches);
                    rule.matches = matches.into_iter().map(RequestMatch::with_normalized_path).collect();
                }
                route
            });
            http.routes = routes.collect();
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClientHttp {
    pub(crate) routes: Arc<[Route<RouteAction>]>,
    pub(crate) failure_accrual: Option<FailureAccrual>,
}

/// The action of a route rule: backends, mirrors, timeouts and retries of its requests.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RouteAction {
    pub(crate) backends: Distribution<Filter>,
    pub(crate) mirrors: Vec<MirrorSpec>,
    pub(crate) timeouts: Timeouts,
    pub(crate) retry: Option<RetryPolicy>,
    /// Whether requests may set their own timeouts and retries in `l5d-*` headers.
    pub(crate) header_overrides: HeaderOverrides,
}

/// A backend that gets copies of some of the requests. Its responses are discarded.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MirrorSpec {
    pub(crate) backend: Arc<BackendSpec>,
    pub(crate) ratio: Ratio,
}

/// Whether a request may override its route's timeouts and retries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum HeaderOverrides {
    #[default]
    Ignore,
    Allow,
}

/// The choice of a backend for a request or connection; `F` is the filter type.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Distribution<F> {
    /// No backend: every request fails (`Error::NoBackends`).
    Empty,
    /// The first backend that has an available endpoint. The list is never empty.
    FirstAvailable(Arc<[RouteBackend<F>]>),
    /// A backend drawn by weight among those that have an available endpoint. At least one weight is not zero.
    RandomAvailable(Arc<[(RouteBackend<F>, u32)]>),
}

/// A backend and its filters. The filters of the rule apply first.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RouteBackend<F> {
    pub(crate) filters: Vec<F>,
    pub(crate) backend: Arc<BackendSpec>,
}

/// A backend as the policy specifies it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BackendSpec {
    pub(crate) meta: Arc<Meta>,
    pub(crate) queue: Queue,
    pub(crate) target: BackendTarget,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum BackendTarget {
    /// One fixed address.
    Forward(Arc<EndpointSpec>),
    /// A service, by its name and port, such as `web.shop.svc.cluster.local:80`; `path` in the API.
    Balance { authority: Arc<str>, load: LoadParams },
    /// The policy names no target of a kind that this proxy knows: requests get 502.
    Fail,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadParams {
    PeakEwma {
        default_rtt: Duration,
        decay: Duration,
    },
    /// Failures count as a latency of at least `penalty`, or the `retry-after` time of the peer if that is longer.
    PenaltyPeakEwma {
        default_rtt: Duration,
        decay: Duration,
        penalty: Duration,
        max_retry_after: Duration,
    },
}

/// Limits of the requests that wait for an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queue {
    pub(crate) capacity: usize,
    /// Maximum time that a request waits for an endpoint. After a request has waited this long, later requests fail immediately.
    pub(crate) failfast_timeout: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timeouts {
    /// From entering the route to the end of the response, including all attempts.
    pub(crate) request: Option<Duration>,
    /// From the end of the request to the end of the response, for each attempt.
    pub(crate) response: Option<Duration>,
    /// Maximum time without data in either direction, from the response head on.
    pub(crate) idle: Option<Duration>,
}

/// When and how often a request is retried.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RetryPolicy {
    pub(crate) max_retries: u16,
    /// Longer request bodies are not buffered, so their requests are not retried.
    pub(crate) max_request_bytes: usize,
    pub(crate) conditions: RetryConditions,
    /// Timeout of the response head, for each attempt but the last.
    pub(crate) timeout: Option<Duration>,
    pub(crate) backoff: Option<BackoffPolicy>,
}

/// The responses that are retried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RetryConditions {
    /// HTTP status codes.
    pub(crate) http: Vec<RangeInclusive<u16>>,
    /// gRPC status codes. A response is retried if its HTTP status or its gRPC status matches.
    pub(crate) grpc: Vec<i32>,
}

/// The delays between tries, and whether the server's `retry-after` may extend them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackoffPolicy {
    pub(crate) delays: Backoff,
    pub(crate) honors_retry_after: bool,
}

/// When failing endpoints are ejected (circuit breaking).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FailureAccrual {
    pub(crate) kind: AccrualKind,
    /// Delay before an ejected endpoint is tried again.
    pub(crate) backoff: BackoffPolicy,
    /// Minimum number of ready endpoints: an endpoint is not ejected if fewer would remain.
    pub(crate) min_ready_endpoints: u32,
}

/// The failures that eject an endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AccrualKind {
    Consecutive {
        max_failures: u32,
    },
    /// Ejects after consecutive failures, or if the success rate within `window` is too low.
    Unified {
        /// From 0 to 1.
        success_rate: f64,
        /// `decay` in the API.
        window: Duration,
        min_requests: u32,
        /// 0: no limit.
        max_consecutive_failures: u32,
    },
}

/// The only route of opaque connections, or a route of TLS connections.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OpaqueRoute {
    pub(crate) meta: Arc<Meta>,
    pub(crate) filters: Vec<OpaqueFilter>,
    pub(crate) backends: Distribution<OpaqueFilter>,
}

/// A route of TLS connections that stay encrypted.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TlsRoute {
    /// Empty: all connections.
    pub(crate) snis: Vec<HostMatch>,
    pub(crate) route: OpaqueRoute,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OpaqueFilter {
    /// Refuses connections, for this reason.
    Invalid(Arc<str>),
    /// Refuses connections, because the control plane denies this proxy the policy or the profile.
    DiscoveryDenied(Arc<str>),
    Forbidden,
}

/// Finds the most specific TLS route for a server name, the first of equals. Returns its index.
pub(crate) fn find_tls_route(routes: &[TlsRoute], sni: &str) -> Option<usize> {
    let sni = sni.strip_suffix('.').unwrap_or(sni);
    let mut best: Option<(_, usize)> = None;
    for (index, route) in routes.iter().enumerate() {
        let score = if route.snis.is_empty() {
            None
        } else {
            let Some(score) = matches::best_host_score(&route.snis, sni) else {
                continue;
            };
            Some(score)
        };
        if best.as_ref().is_none_or(|(best, _)| score > *best) {
            best = Some((score, index));
        }
    }
    best.map(|(_, index)| index)
}

impl ClientPolicy {
    /// The policy of a destination for which the control plane has none: all traffic goes to one endpoint.
    pub(crate) fn forward(meta: Arc<Meta>, endpoint: Arc<EndpointSpec>, config: LocalPolicyConfig) -> Self {
        let backend = Arc::new(BackendSpec {
            meta: meta.clone(),
            queue: config.queue,
            target: BackendTarget::Forward(endpoint),
        });
        let http = Distribution::single(backend.clone());
        let opaque = OpaqueRoute {
            meta: meta.clone(),
            filters: Vec::new(),
            backends: Distribution::single(backend),
        };
        Self::catch_all(meta, Vec::new(), http, opaque, config.detect_timeout)
    }

    /// The policy of a name that the control plane does not know: it has no backends.
    pub(crate) fn unknown_name(detect_timeout: Duration) -> Self {
        let meta = Meta::default_named("unknown");
        let opaque = OpaqueRoute {
            meta: meta.clone(),
            filters: Vec::new(),
            backends: Distribution::Empty,
        };
        Self::catch_all(meta, Vec::new(), Distribution::Empty, opaque, detect_timeout)
    }

    /// Replaces a policy that cannot be used, for this reason: HTTP requests get 500, other connections are closed.
    pub(crate) fn invalid(reason: String, detect_timeout: Duration) -> Self {
        let opaque = OpaqueFilter::Invalid(reason.as_str().into());
        Self::refuse_all("invalid", Filter::Invalid(reason.into()), opaque, detect_timeout)
    }

    /// The policy of a destination that the control plane denies this proxy, for this reason: HTTP requests get 503, other
    /// connections are closed.
    pub(crate) fn denied(reason: &str, detect_timeout: Duration) -> Self {
        let reason = Arc::<str>::from(reason);
        let opaque = OpaqueFilter::DiscoveryDenied(reason.clone());
        Self::refuse_all("denied", Filter::DiscoveryDenied(reason), opaque, detect_timeout)
    }

    fn refuse_all(name: &str, http: Filter, opaque: OpaqueFilter, detect_timeout: Duration) -> Self {
        let meta = Meta::default_named(name);
        let opaque = OpaqueRoute {
            meta: meta.clone(),
            filters: vec![opaque],
            backends: Distribution::Empty,
        };
        Self::catch_all(meta, vec![http], Distribution::Empty, opaque, detect_timeout)
    }

    fn catch_all(
        meta: Arc<Meta>,
        filters: Vec<Filter>,
        backends: Distribution<Filter>,
        opaque: OpaqueRoute,
        timeout: Duration,
    ) -> Self {
        let action = RouteAction {
            backends,
            mirrors: Vec::new(),
            timeouts: Timeouts::default(),
            retry: None,
            header_overrides: HeaderOverrides::default(),
        };
        let rule = Rule {
            matches: Vec::new(),
            filters,
            action,
        };
        let route = Route {
            meta: meta.clone(),
            hosts: Vec::new(),
            rules: vec![rule],
        };
        let http = ClientHttp {
            routes: [route].into(),
            failure_accrual: None,
        };
        let protocol = ClientProtocol::Detect {
            timeout,
            http1: http.clone(),
            http2: http,
            opaque: Some(opaque),
        };
        Self { meta, protocol }
    }
}

impl<F> Distribution<F> {
    fn single(backend: Arc<BackendSpec>) -> Self {
        Self::FirstAvailable(
            [RouteBackend {
                filters: Vec::new(),
                backend,
            }]
            .into(),
        )
    }
}

/// Settings of the policies that this proxy creates if the control plane has no usable one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalPolicyConfig {
    pub(crate) detect_timeout: Duration,
    pub(crate) queue: Queue,
}
