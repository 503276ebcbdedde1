//! How to reach a destination: its protocol, its routes, and what stands behind them.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use tulle_core::backoff::Backoff;

use crate::policy::endpoint::EndpointSpec;
use crate::policy::filter::Filter;
use crate::policy::matches::{self, HostMatch};
use crate::policy::meta::Meta;
use crate::policy::route::{Route, Rule};

/// The policy of one destination.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClientPolicy {
    pub(crate) meta: Arc<Meta>,
    pub(crate) protocol: ClientProtocol,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ClientProtocol {
    /// Look at the first bytes, for `timeout` at most.
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

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClientHttp {
    pub(crate) routes: Arc<[Route<HttpTarget>]>,
    pub(crate) failure_accrual: Option<FailureAccrual>,
}

/// What happens to a request that a rule has chosen.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HttpTarget {
    pub(crate) backends: Distribution<Filter>,
    pub(crate) timeouts: Timeouts,
    pub(crate) retry: Option<Retry>,
    /// Whether requests may bring timeouts and retries of their own in `l5d-*` headers.
    pub(crate) request_headers: RequestOverrides,
}

/// Whether a request may override its route's timeouts and retries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RequestOverrides {
    #[default]
    Ignore,
    Allow,
}

/// Which backend gets a request, or a connection; `F` is what filters those.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Distribution<F> {
    /// None: every request is shed.
    Empty,
    /// The first that has an available endpoint. Never an empty list.
    FirstAvailable(Arc<[RouteBackend<F>]>),
    /// By weight among those that have an available endpoint. At least one weight is not zero, and all fit in a `u32` together.
    RandomAvailable(Arc<[(RouteBackend<F>, u32)]>),
}

/// A backend, and the filters that only its requests pass, after those of the rule.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RouteBackend<F> {
    pub(crate) filters: Vec<F>,
    pub(crate) backend: Arc<Backend>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Backend {
    pub(crate) meta: Arc<Meta>,
    pub(crate) queue: Queue,
    pub(crate) target: BackendTarget,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum BackendTarget {
    /// One fixed address.
    Forward(Arc<EndpointSpec>),
    /// The endpoints that discovery knows under `path`.
    Balance { path: Arc<str>, load: LoadParams },
    /// Nowhere: requests get 502.
    Fail,
}

/// How the load of an endpoint is estimated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadParams {
    PeakEwma {
        default_rtt: Duration,
        decay: Duration,
    },
    /// Failures count as if they had taken `penalty`, or as long as the peer asks us to stay away.
    PenaltyPeakEwma {
        default_rtt: Duration,
        decay: Duration,
        penalty: Duration,
        max_retry_after: Duration,
    },
}

/// Requests that wait for an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queue {
    pub(crate) capacity: usize,
    /// How long one waits before it fails, and all after it fail at once.
    pub(crate) failfast_timeout: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timeouts {
    /// From entering the route to the end of both bodies, all tries included.
    pub(crate) request: Option<Duration>,
    /// From the end of the request to the end of the response, for each try.
    pub(crate) response: Option<Duration>,
    /// Without data in either direction.
    pub(crate) idle: Option<Duration>,
}

/// When and how often a request is sent again.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Retry {
    pub(crate) max_retries: u16,
    /// Longer bodies are not kept, so their requests are not tried again.
    pub(crate) max_request_bytes: usize,
    pub(crate) conditions: RetryConditions,
    /// For the response head, for each try but the last.
    pub(crate) timeout: Option<Duration>,
    pub(crate) backoff: Option<HintedBackoff>,
}

/// Any of these calls for another try.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RetryConditions {
    pub(crate) http: Vec<RangeInclusive<u16>>,
    /// Codes of gRPC, which count where a response has one.
    pub(crate) grpc: Vec<i32>,
}

/// A backoff that may heed how long a server asks to be left alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HintedBackoff {
    pub(crate) steps: Backoff,
    pub(crate) heeds_hints: bool,
}

/// When endpoints are taken out for failing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FailureAccrual {
    pub(crate) kind: AccrualKind,
    /// Until an endpoint that was taken out may be tried again.
    pub(crate) backoff: HintedBackoff,
    /// As many stay, whatever they do.
    pub(crate) min_ready_endpoints: u32,
}

/// What takes an endpoint out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AccrualKind {
    Consecutive {
        max_failures: u32,
    },
    Unified {
        /// From 0 to 1.
        success_rate: f64,
        window: Duration,
        min_requests: u32,
        /// 0: no limit.
        max_consecutive_failures: u32,
    },
}

/// The one route of a stream of bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OpaqueRoute {
    pub(crate) meta: Arc<Meta>,
    pub(crate) filters: Vec<OpaqueFilter>,
    pub(crate) backends: Distribution<OpaqueFilter>,
}

/// A route of TLS connections that stay encrypted.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TlsRoute {
    /// No names: all connections.
    pub(crate) snis: Vec<HostMatch>,
    pub(crate) route: OpaqueRoute,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OpaqueFilter {
    Invalid(Arc<str>),
    Forbidden,
    /// A filter that we do not know; no connection passes.
    Unknown,
}

/// The index of the most specific TLS route for a server name, the first among equals.
pub(crate) fn find_tls(routes: &[TlsRoute], sni: &str) -> Option<usize> {
    let sni = sni.strip_suffix('.').unwrap_or(sni);
    let mut best: Option<(_, usize)> = None;
    for (index, route) in routes.iter().enumerate() {
        let score = if route.snis.is_empty() {
            None
        } else {
            let Some(score) = matches::best_host(&route.snis, sni) else {
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
    /// Everything to one endpoint, for destinations that the control plane has no policy for.
    pub(crate) fn forward(meta: Arc<Meta>, endpoint: Arc<EndpointSpec>, params: ForwardParams) -> Self {
        let backend = Arc::new(Backend {
            meta: meta.clone(),
            queue: params.queue,
            target: BackendTarget::Forward(endpoint),
        });
        let http = Distribution::only(backend.clone());
        let opaque = OpaqueRoute {
            meta: meta.clone(),
            filters: Vec::new(),
            backends: Distribution::only(backend),
        };
        Self::catch_all(meta, Vec::new(), http, opaque, params.detect_timeout)
    }

    /// For a name that the control plane does not know: there are no backends.
    pub(crate) fn nowhere(detect_timeout: Duration) -> Self {
        let meta = Meta::default_named("unknown");
        let opaque = OpaqueRoute {
            meta: meta.clone(),
            filters: Vec::new(),
            backends: Distribution::Empty,
        };
        Self::catch_all(meta, Vec::new(), Distribution::Empty, opaque, detect_timeout)
    }

    /// For an update that cannot be decoded: HTTP requests get 500, connections are closed.
    pub(crate) fn invalid(detect_timeout: Duration) -> Self {
        let meta = Meta::default_named("invalid");
        let opaque = OpaqueRoute {
            meta: meta.clone(),
            filters: vec![OpaqueFilter::Unknown],
            backends: Distribution::Empty,
        };
        Self::catch_all(meta, vec![Filter::Unknown], Distribution::Empty, opaque, detect_timeout)
    }

    fn catch_all(
        meta: Arc<Meta>,
        filters: Vec<Filter>,
        backends: Distribution<Filter>,
        opaque: OpaqueRoute,
        timeout: Duration,
    ) -> Self {
        let payload = HttpTarget {
            backends,
            timeouts: Timeouts::default(),
            retry: None,
            request_headers: RequestOverrides::default(),
        };
        let rule = Rule {
            matches: Vec::new(),
            filters,
            payload,
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
    /// Everything to one backend.
    fn only(backend: Arc<Backend>) -> Self {
        Self::FirstAvailable(
            [RouteBackend {
                filters: Vec::new(),
                backend,
            }]
            .into(),
        )
    }
}

/// What a policy of our own making takes from the configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardParams {
    pub(crate) detect_timeout: Duration,
    pub(crate) queue: Queue,
}
