//! The client policy of one destination.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::model::reference::Reference;
use crate::model::route::{Filter, GrpcMatch, HostMatch, HttpMatch};

#[derive(Clone, Debug, PartialEq)]
pub enum Outbound {
    Policy(Box<Policy>),
    /// The address has no policy. The proxy uses the profile of the address, from the destination service.
    NoPolicy,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    pub reference: Reference,
    pub protocol: Protocol,
    pub accrual: Option<FailureAccrual>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Protocol {
    Detect {
        timeout: Duration,
        http: Vec<Route<HttpMatch>>,
        opaque: StreamRoute,
    },
    Http1(Vec<Route<HttpMatch>>),
    Http2(Vec<Route<HttpMatch>>),
    Grpc(Vec<Route<GrpcMatch>>),
    Tls(Vec<StreamRoute>),
    Opaque(Vec<StreamRoute>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Route<M> {
    pub reference: Reference,
    pub hosts: Vec<HostMatch>,
    pub rules: Vec<Rule<M>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Rule<M> {
    pub matches: Vec<M>,
    pub filters: Vec<Filter>,
    pub backends: Distribution,
    pub mirrors: Vec<Mirror>,
    pub timeouts: Timeouts,
    pub retry: Option<Retry>,
}

/// A backend that gets a copy of a fraction of the requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Mirror {
    pub backend: Backend,
    pub numerator: u32,
    pub denominator: u32,
}

/// A route for connections whose bytes are forwarded without being parsed.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamRoute {
    pub reference: Reference,
    /// TLS server names. An empty list matches all connections.
    pub snis: Vec<HostMatch>,
    pub action: StreamAction,
}

#[derive(Clone, Debug, PartialEq)]
pub enum StreamAction {
    Forward(Distribution),
    Forbidden,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Distribution {
    Single(Box<Backend>),
    /// At least one weight is not 0.
    Weighted(Vec<(Backend, u32)>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Backend {
    pub reference: Reference,
    pub target: BackendTarget,
    pub filters: Vec<Filter>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum BackendTarget {
    /// The endpoints that the destination service returns for this path.
    Balance {
        path: String,
        load: Load,
    },
    Forward(SocketAddr),
    /// No target: a filter of the backend responds with an error.
    Failing,
}

/// How a balancer computes the load of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    PeakEwma,
    /// As `PeakEwma`, but the latency of a failure is at least `penalty`. Linkerd calls this a load bias.
    Penalized {
        penalty: Duration,
        max_retry_after: Duration,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    pub request: Option<Duration>,
    pub response: Option<Duration>,
    pub idle: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    pub limit: u16,
    /// Timeout of each attempt, after which the request is retried.
    pub timeout: Option<Duration>,
    /// Minimum delay before a retry. `None` means the default.
    pub backoff: Option<Duration>,
    pub conditions: RetryConditions,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RetryConditions {
    Http(Vec<RangeInclusive<u16>>),
    Grpc {
        cancelled: bool,
        deadline_exceeded: bool,
        internal: bool,
        resource_exhausted: bool,
        unavailable: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FailureAccrual {
    /// Ejects an endpoint after consecutive failures.
    Consecutive { max_failures: u32, backoff: Backoff },
    /// Ejects an endpoint after consecutive failures, or if its success rate in the window is below the threshold.
    Unified {
        threshold: f64,
        window: Duration,
        min_requests: u32,
        max_failures: u32,
        backoff: Backoff,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    pub min: Duration,
    pub max: Duration,
    pub jitter: f32,
    pub honor_retry_after: bool,
}
