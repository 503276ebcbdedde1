//! Request errors: the side at fault, whether the request can be sent again, and the status that the client gets.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use ::h2::Reason;
use http::{HeaderValue, StatusCode};
use tulle_core::{addr::Addr, identity::Identity};

use crate::{metrics::http::ErrorLabels, net::connect::ConnectError};

/// The side that caused an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The client sent an invalid request or closed the connection.
    Client,
    /// The other end of the upstream connection.
    Upstream,
    /// The configuration from the control plane.
    Policy,
    /// This proxy.
    Proxy,
}

/// Whether the request of a failed attempt can be sent again although no policy asks for a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resendable {
    /// The server has not processed the request, even if it was sent, so any request can be sent again.
    Always,
    /// The server may have processed the request, so only an idempotent one can be sent again.
    IfIdempotent,
    Never,
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Error {
    #[error("connect timed out")]
    ConnectTimeout(#[source] ConnectError),
    #[error("connect error")]
    Connect(#[source] ConnectError),
    #[error("connect error: dialling {addr} for another request failed ({cause})")]
    DialFailed {
        addr: SocketAddr,
        /// Cause code.
        cause: &'static str,
    },
    #[error("the TLS handshake with {addr} failed")]
    Tls {
        addr: SocketAddr,
        /// Cause code.
        cause: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Either an HTTP/1 connection has closed, or an HTTP/2 connection before its first request.
    #[error("connection to {addr} closed before a response")]
    ConnectionClosed {
        addr: SocketAddr,
        reused: bool,
        /// Whether the server may have read a part of the request, and so may have processed it.
        may_be_processed: bool,
    },
    /// The request may have been processed.
    #[error("connection to {addr} closed before a response, and reconnecting failed ({cause})")]
    ReconnectFailed {
        addr: SocketAddr,
        /// Cause code of the failed dial.
        cause: &'static str,
    },
    /// The request may have been processed.
    #[error("HTTP/2 connection to {addr} ended before a response")]
    Http2ConnectionEnded { addr: SocketAddr },
    #[error("{addr} had no free HTTP/2 stream within {waited:?}")]
    NoFreeStream {
        addr: SocketAddr,
        waited: Duration,
        /// Whether a part of the request may have been sent, so that the server may have processed it.
        may_be_processed: bool,
    },
    #[error("HTTP/2 error")]
    H2(#[source] ::h2::Error),
    #[error("I/O with the server failed")]
    ServerIo(#[source] std::io::Error),
    #[error("invalid response: {0}")]
    InvalidResponse(&'static str),
    #[error("no extended CONNECT stream (RFC 8441) to {addr} is available")]
    NoExtendedConnectStream { addr: SocketAddr },
    /// A resend was safe, but the body was too large to be kept for it.
    #[error(transparent)]
    TooLargeToResend(Box<Self>),
    #[error("receiving the request body failed")]
    ReadRequestBody(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the attempt was cancelled: it timed out, its response ended, or another endpoint got the request")]
    AttemptCancelled,
    /// An HTTP/1 body is longer or shorter than its `content-length`. Received bodies have the right length, so usually a filter
    /// has changed the header. The error does not tell whether it is the body of a request or of a response:
    /// [`Self::is_request_body_error`] assumes a request, [`Self::side`] and [`Self::cause`] assume a response.
    #[error("the length of a body differs from its content-length")]
    ContentLengthMismatch,
    #[error("invalid request: {0}")]
    InvalidRequest(&'static str),
    #[error("the path is ambiguous, and the policy of its destination depends on the path")]
    AmbiguousPath,
    #[error(
        "the request head exceeds {limit} bytes (HTTP/2: as header list size) or {MAX_HEADERS} header lines (HTTP/1)"
    )]
    HeaderTooLarge { limit: usize },
    #[error("the request head was not received within {0:?}")]
    HeaderReadTimeout(Duration),
    #[error("no data of the request body was received for {0:?}")]
    BodyIdleTimeout(Duration),
    #[error("the client closed the connection, reset the stream before the response, or did not answer a ping")]
    ClientClosed,
    #[error("the connection to the client failed")]
    ClientIo(#[source] std::io::Error),
    #[error("no endpoints")]
    NoEndpoints,
    #[error("no endpoint became available within {0:?}")]
    QueueTimeout(Duration, UnavailableCause),
    /// An earlier request has timed out in the queue, so this one has not waited.
    #[error("no endpoint is available")]
    FailingFast(UnavailableCause),
    #[error("the route has no backends")]
    NoBackends,
    #[error("too many requests wait for an endpoint")]
    QueueFull,
    #[error("too many requests in flight")]
    MaxInFlight,
    #[error("the requests in flight on one HTTP/2 connection have header lists of more than {limit} bytes")]
    HeaderListsTooLarge { limit: usize },
    #[error("large incomplete request heads use {limit} bytes of memory, which is the limit")]
    HeadMemoryUsedUp { limit: usize },
    #[error("memory is about to run out")]
    MemoryPressure,
    #[error("the limit of {limit} connections is reached")]
    TooManyConnections { limit: usize },
    #[error("no route for request")]
    RouteNotFound,
    #[error("this gateway does not serve {0}")]
    GatewayDomain(Arc<str>),
    #[error("this gateway does not serve {0} to other clusters: its Service is not exported, or does not exist")]
    GatewayNotExported(Arc<str>),
    #[error("the request has passed this gateway before")]
    GatewayLoop,
    #[error("the policy has an invalid backend: {0}")]
    InvalidBackend(&'static str),
    #[error("the control plane has not sent the policy of this port")]
    PolicyUnknown,
    /// The proxy does not request the policy of the port.
    #[error("no application listens on this port, and clients connect to too many such ports")]
    PortNotWatched,
    /// The control plane denies this proxy a policy or a profile.
    #[error("{0}")]
    DiscoveryDenied(String),
    #[error("{0}")]
    InvalidPolicy(String),
    /// A route forbids the opaque connection.
    #[error("the policy forbids the connection")]
    Forbidden { policy: String },
    #[error("unauthorized request on route")]
    Unauthorized { rule: String, why: &'static str },
    #[error("rate limit exceeded")]
    RateLimited { limit: String },
    #[error("redirected to {location:?}")]
    Redirect { status: StatusCode, location: HeaderValue },
    #[error("{message}")]
    Injected { status: StatusCode, message: String },
    #[error("{message}")]
    InjectedGrpc { code: i32, message: String },
    #[error("the endpoint does not have the identity {required}")]
    IdentityMismatch { required: String, actual: Option<Identity> },
    #[error(transparent)]
    Timeout(TimeoutKind),
    #[error("the discovery of {0} timed out")]
    DiscoveryTimeout(Addr),
    #[error("{name} is not a service of the mesh, and DNS has no address for it")]
    NameUnresolved {
        name: Arc<str>,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("the proxy does not forward to {0}")]
    TargetForbidden(Addr),
    #[error("{limit} names of destinations are in use, which is the limit")]
    TooManyNames { limit: usize },
}

/// Why no endpoint is available. `balance::balancer::UnavailableReason` has the same variants; the two modules do not
/// import each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnavailableCause {
    /// The endpoints cannot be reached. `after` is the cause code of a failed dial to one of them; `None` if none of their last
    /// dials failed.
    Unreachable { after: Option<&'static str> },
    /// Circuit breakers have ejected at least one of them.
    Ejected,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TimeoutKind {
    /// The whole request, with all its attempts.
    #[error("request timeout: not answered within {0:?}")]
    Request(Duration),
    /// One attempt, until its response head.
    #[error("response headers timeout: none within {0:?}")]
    ResponseHeaders(Duration),
    /// The response, until its end.
    #[error("response timeout: not complete within {0:?}")]
    Response(Duration),
    #[error("idle timeout: no data for {0:?}")]
    Idle(Duration),
    /// The response head, over all attempts, with the timeout of a ServiceProfile.
    #[error("response timeout: no response within {0:?}")]
    Profile(Duration),
}

/// gRPC status codes.
pub(crate) mod grpc {
    pub(crate) use tulle_core::retry::{DEADLINE_EXCEEDED, INTERNAL, RESOURCE_EXHAUSTED, UNAVAILABLE};

    pub(crate) const UNKNOWN: i32 = 2;
    pub(crate) const INVALID_ARGUMENT: i32 = 3;
    pub(crate) const NOT_FOUND: i32 = 5;
    pub(crate) const PERMISSION_DENIED: i32 = 7;
    pub(crate) const FAILED_PRECONDITION: i32 = 9;
    pub(crate) const ABORTED: i32 = 10;
    pub(crate) const UNIMPLEMENTED: i32 = 12;
    pub(crate) const DATA_LOSS: i32 = 15;
}

/// The status that the client gets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorStatus {
    pub(crate) status: StatusCode,
    pub(crate) grpc_code: i32,
    /// Whether the response also closes the client's connection gracefully.
    pub(crate) closes_connection: bool,
}

impl Error {
    /// Wraps an error from receiving a request body.
    pub(crate) fn from_request_body(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::ReadRequestBody(error.into())
    }

    pub(crate) fn from_connect(error: ConnectError) -> Self {
        match error {
            ConnectError::Timeout { .. } => Self::ConnectTimeout(error),
            _ => Self::Connect(error),
        }
    }

    /// Whether the request body failed. The server then does not get the rest of it.
    pub(crate) fn is_request_body_error(&self) -> bool {
        matches!(
            self,
            Self::ReadRequestBody(_) | Self::BodyIdleTimeout(_) | Self::ContentLengthMismatch | Self::AttemptCancelled
        )
    }

    pub(crate) fn is_connection_refused(&self) -> bool {
        matches!(
            self,
            Self::Connect(ConnectError::Io { source, .. }) if source.kind() == std::io::ErrorKind::ConnectionRefused
        )
    }

    pub(crate) fn side(&self) -> Side {
        match self {
            Self::TooLargeToResend(error) => error.side(),
            Self::ReadRequestBody(_)
            | Self::InvalidRequest(_)
            | Self::AmbiguousPath
            | Self::HeaderTooLarge { .. }
            | Self::HeaderReadTimeout(_)
            | Self::BodyIdleTimeout(_)
            | Self::NoExtendedConnectStream { .. }
            | Self::TargetForbidden(_)
            | Self::ClientClosed
            | Self::ClientIo(_) => Side::Client,
            Self::ConnectTimeout(_)
            | Self::Connect(_)
            | Self::DialFailed { .. }
            | Self::Tls { .. }
            | Self::ConnectionClosed { .. }
            | Self::ReconnectFailed { .. }
            | Self::Http2ConnectionEnded { .. }
            | Self::NoFreeStream { .. }
            | Self::H2(_)
            | Self::ServerIo(_)
            | Self::InvalidResponse(_)
            | Self::ContentLengthMismatch
            | Self::IdentityMismatch { .. }
            | Self::Timeout(_) => Side::Upstream,
            Self::AttemptCancelled
            | Self::MaxInFlight
            | Self::HeaderListsTooLarge { .. }
            | Self::HeadMemoryUsedUp { .. }
            | Self::MemoryPressure
            | Self::TooManyConnections { .. }
            | Self::QueueFull
            | Self::DiscoveryTimeout(_)
            | Self::TooManyNames { .. }
            | Self::PolicyUnknown
            | Self::PortNotWatched
            | Self::DiscoveryDenied(_) => Side::Proxy,
            Self::NoEndpoints
            | Self::NameUnresolved { .. }
            | Self::QueueTimeout(..)
            | Self::FailingFast(_)
            | Self::RouteNotFound
            | Self::GatewayDomain(_)
            | Self::GatewayNotExported(_)
            | Self::GatewayLoop
            | Self::NoBackends
            | Self::InvalidBackend(_)
            | Self::InvalidPolicy(_)
            | Self::Forbidden { .. }
            | Self::Unauthorized { .. }
            | Self::RateLimited { .. }
            | Self::Redirect { .. }
            | Self::Injected { .. }
            | Self::InjectedGrpc { .. } => Side::Policy,
        }
    }

    /// Whether no connection could be opened, so nothing was sent.
    pub(crate) fn is_dial_error(&self) -> bool {
        matches!(
            self,
            Self::ConnectTimeout(_) | Self::Connect(_) | Self::DialFailed { .. } | Self::Tls { .. }
        )
    }

    /// Whether the peer of an HTTP/2 connection reports that it has not processed the stream: with `REFUSED_STREAM`, or with a
    /// GOAWAY whose last stream is lower. The request can be sent again on a new connection, as after other errors for which
    /// [`Self::resendable`] is `Always`.
    pub(crate) fn is_refused_stream(&self) -> bool {
        match self {
            Self::TooLargeToResend(error) => error.is_refused_stream(),
            // Only streams above the last stream of a GOAWAY fail with it; the others continue.
            Self::H2(error) => {
                error.reason() == Some(Reason::REFUSED_STREAM) || (error.is_go_away() && error.is_remote())
            }
            _ => false,
        }
    }

    /// Whether the peer closed the connection with GOAWAY and `NO_ERROR`.
    pub(crate) fn is_graceful_go_away(&self) -> bool {
        matches!(self, Self::H2(error) if error.is_go_away() && error.is_remote() && error.reason() == Some(Reason::NO_ERROR))
    }

    pub(crate) fn resendable(&self) -> Resendable {
        match self {
            error if error.is_dial_error() => Resendable::Always,
            error if error.is_refused_stream() => Resendable::Always,
            Self::ConnectionClosed {
                may_be_processed: false,
                ..
            }
            | Self::NoFreeStream {
                may_be_processed: false,
                ..
            } => Resendable::Always,
            Self::ConnectionClosed { reused: true, .. }
            | Self::ReconnectFailed { .. }
            | Self::Http2ConnectionEnded { .. } => Resendable::IfIdempotent,
            Self::H2(error) if error.is_io() || error.is_go_away() => Resendable::IfIdempotent,
            _ => Resendable::Never,
        }
    }

    /// HTTP status and gRPC code of the error response.
    ///
    /// Source: the responses of Linkerd's proxy.
    pub(crate) fn status(&self) -> ErrorStatus {
        let error_status = |status, grpc, close| ErrorStatus {
            status,
            grpc_code: grpc,
            closes_connection: close,
        };
        match self {
            Self::TooLargeToResend(error) => error.status(),
            Self::ConnectTimeout(_)
            | Self::DialFailed {
                cause: "connect-timeout",
                ..
            }
            | Self::QueueTimeout(..) => error_status(StatusCode::GATEWAY_TIMEOUT, grpc::DEADLINE_EXCEEDED, true),
            Self::Timeout(kind) => error_status(
                StatusCode::GATEWAY_TIMEOUT,
                grpc::DEADLINE_EXCEEDED,
                matches!(kind, TimeoutKind::Profile(_)),
            ),
            Self::Connect(_)
            | Self::DialFailed { .. }
            | Self::Tls { .. }
            | Self::ConnectionClosed { .. }
            | Self::ReconnectFailed { .. }
            | Self::Http2ConnectionEnded { .. }
            | Self::H2(_)
            | Self::ServerIo(_)
            | Self::InvalidResponse(_)
            | Self::ContentLengthMismatch
            | Self::IdentityMismatch { .. }
            | Self::AttemptCancelled
            | Self::InvalidBackend(_) => error_status(StatusCode::BAD_GATEWAY, grpc::UNAVAILABLE, true),
            Self::NoEndpoints
            | Self::NoBackends
            | Self::FailingFast(_)
            | Self::QueueFull
            | Self::NoFreeStream { .. }
            | Self::MaxInFlight
            | Self::HeaderListsTooLarge { .. }
            | Self::HeadMemoryUsedUp { .. }
            | Self::MemoryPressure
            | Self::TooManyConnections { .. }
            | Self::TooManyNames { .. }
            | Self::NameUnresolved { .. }
            | Self::PolicyUnknown
            | Self::PortNotWatched
            | Self::DiscoveryDenied(_)
            | Self::DiscoveryTimeout(_) => error_status(StatusCode::SERVICE_UNAVAILABLE, grpc::UNAVAILABLE, true),
            Self::ReadRequestBody(_) | Self::InvalidRequest(_) | Self::ClientClosed | Self::ClientIo(_) => {
                error_status(StatusCode::BAD_REQUEST, grpc::INVALID_ARGUMENT, true)
            }
            Self::HeaderTooLarge { .. } => error_status(
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                grpc::RESOURCE_EXHAUSTED,
                true,
            ),
            Self::HeaderReadTimeout(_) | Self::BodyIdleTimeout(_) => {
                error_status(StatusCode::REQUEST_TIMEOUT, grpc::DEADLINE_EXCEEDED, true)
            }
            Self::AmbiguousPath => error_status(StatusCode::BAD_REQUEST, grpc::INVALID_ARGUMENT, false),
            Self::NoExtendedConnectStream { .. } => {
                error_status(StatusCode::NOT_IMPLEMENTED, grpc::UNIMPLEMENTED, false)
            }
            Self::RouteNotFound | Self::GatewayDomain(_) | Self::GatewayNotExported(_) => {
                error_status(StatusCode::NOT_FOUND, grpc::NOT_FOUND, false)
            }
            Self::GatewayLoop => error_status(StatusCode::LOOP_DETECTED, grpc::ABORTED, true),
            Self::Forbidden { .. } | Self::Unauthorized { .. } | Self::TargetForbidden(_) => {
                error_status(StatusCode::FORBIDDEN, grpc::PERMISSION_DENIED, false)
            }
            Self::RateLimited { .. } => error_status(StatusCode::TOO_MANY_REQUESTS, grpc::RESOURCE_EXHAUSTED, false),
            Self::Redirect { status, .. } => error_status(*status, grpc::NOT_FOUND, false),
            Self::Injected { status, .. } => error_status(*status, grpc::FAILED_PRECONDITION, false),
            Self::InjectedGrpc { code, .. } => error_status(StatusCode::OK, *code, false),
            Self::InvalidPolicy(_) => error_status(StatusCode::INTERNAL_SERVER_ERROR, grpc::INTERNAL, true),
        }
    }

    /// Label `error` of `*_http_errors_total` and `*_tcp_errors_total`.
    ///
    /// Source: Linkerd's proxy. As there, a request that times out in the queue counts as `failfast`, and a later request that does
    /// not wait counts as `loadshed`.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::TooLargeToResend(error) => error.label(),
            Self::MaxInFlight
            | Self::HeaderListsTooLarge { .. }
            | Self::HeadMemoryUsedUp { .. }
            | Self::NoFreeStream { .. }
            | Self::MemoryPressure
            | Self::TooManyConnections { .. }
            | Self::TooManyNames { .. }
            | Self::QueueFull
            | Self::FailingFast(_)
            | Self::NoEndpoints
            | Self::NoBackends => "loadshed",
            Self::QueueTimeout(..) => "failfast",
            Self::IdentityMismatch { .. } => "identity required",
            Self::GatewayDomain(_) | Self::GatewayNotExported(_) => "gateway domain invalid",
            Self::GatewayLoop => "gateway loop",
            Self::PolicyUnknown | Self::PortNotWatched => "policy unknown",
            Self::DiscoveryDenied(_) => "discovery denied",
            Self::Forbidden { .. } => "forbidden",
            Self::AmbiguousPath => "ambiguous path",
            Self::Timeout(_) => "response timeout",
            Self::ConnectTimeout(_)
            | Self::Connect(_)
            | Self::DialFailed { .. }
            | Self::Tls { .. }
            | Self::ConnectionClosed { .. }
            | Self::ReconnectFailed { .. }
            | Self::Http2ConnectionEnded { .. }
            | Self::H2(_)
            | Self::ServerIo(_) => "i/o",
            _ => "unexpected",
        }
    }

    /// Cause code and details for `l5d-proxy-cause`, without direction, proxy and target.
    pub(crate) fn cause_header(&self) -> String {
        let code = self.cause();
        match self {
            Self::Forbidden { policy } => format!("{code}:{policy}"),
            Self::Unauthorized { rule, why } => format!("{code}:{rule}; why={why}"),
            Self::RateLimited { limit } => format!("{code}; limit={limit}"),
            Self::TooLargeToResend(error) => format!("{code}; after={}", error.cause()),
            Self::QueueTimeout(_, UnavailableCause::Unreachable { after: Some(after) })
            | Self::FailingFast(UnavailableCause::Unreachable { after: Some(after) }) => {
                format!("{code}; after={after}")
            }
            Self::ReconnectFailed { cause, .. } => format!("{code}; then={cause}"),
            _ => code.to_owned(),
        }
    }

    /// The endpoint that failed, if the error is about an endpoint.
    pub(crate) fn failed_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::ConnectTimeout(error) | Self::Connect(error) => Some(error.addr()),
            Self::DialFailed { addr, .. }
            | Self::Tls { addr, .. }
            | Self::ConnectionClosed { addr, .. }
            | Self::ReconnectFailed { addr, .. }
            | Self::Http2ConnectionEnded { addr }
            | Self::NoFreeStream { addr, .. }
            | Self::NoExtendedConnectStream { addr } => Some(*addr),
            Self::TooLargeToResend(error) => error.failed_addr(),
            _ => None,
        }
    }

    /// Labels for the metrics of responses and of routes.
    pub(crate) fn response_labels(&self) -> ErrorLabels {
        ErrorLabels {
            cause: self.cause(),
            route_error: self.route_error_label(),
        }
    }

    /// Label `error` of route metrics.
    fn route_error_label(&self) -> &'static str {
        match self {
            Self::TooLargeToResend(error) => error.route_error_label(),
            Self::QueueTimeout(..) => "FAIL_FAST",
            Self::MaxInFlight
            | Self::HeaderListsTooLarge { .. }
            | Self::HeadMemoryUsedUp { .. }
            | Self::NoFreeStream { .. }
            | Self::MemoryPressure
            | Self::TooManyConnections { .. }
            | Self::TooManyNames { .. }
            | Self::QueueFull
            | Self::FailingFast(_)
            | Self::NoEndpoints
            | Self::NoBackends => "LOAD_SHED",
            Self::Timeout(TimeoutKind::Request(_)) => "REQUEST_TIMEOUT",
            Self::Timeout(TimeoutKind::ResponseHeaders(_) | TimeoutKind::Profile(_)) => "RESPONSE_HEADERS_TIMEOUT",
            Self::Timeout(TimeoutKind::Response(_)) => "RESPONSE_STREAM_TIMEOUT",
            Self::Timeout(TimeoutKind::Idle(_)) | Self::BodyIdleTimeout(_) => "IDLE_TIMEOUT",
            Self::ClientClosed | Self::ClientIo(_) | Self::ReadRequestBody(_) => "CANCEL",
            Self::H2(error) if error.is_go_away() => "GO_AWAY",
            Self::H2(error) => match error.reason() {
                Some(Reason::CANCEL) => "CANCEL",
                Some(Reason::REFUSED_STREAM) => "REFUSED",
                Some(Reason::ENHANCE_YOUR_CALM) => "ENHANCE_YOUR_CALM",
                Some(_) => "RESET",
                None => "IO",
            },
            Self::ConnectTimeout(_)
            | Self::Connect(_)
            | Self::DialFailed { .. }
            | Self::Tls { .. }
            | Self::ConnectionClosed { .. }
            | Self::ReconnectFailed { .. }
            | Self::Http2ConnectionEnded { .. }
            | Self::ServerIo(_) => "IO",
            _ => "UNKNOWN",
        }
    }

    /// The stable cause code, for `l5d-proxy-cause` and metric labels.
    pub(crate) fn cause(&self) -> &'static str {
        match self {
            // The published name contains `retry`, but it means a resend.
            Self::TooLargeToResend(_) => "body-too-large-to-retry",
            Self::ConnectTimeout(error) | Self::Connect(error) => error.cause(),
            Self::DialFailed { cause, .. } | Self::Tls { cause, .. } => cause,
            Self::ConnectionClosed { .. }
            | Self::ReconnectFailed { .. }
            | Self::Http2ConnectionEnded { .. }
            | Self::AttemptCancelled => "connection-closed",
            Self::NoFreeStream { .. } => "no-free-stream",
            Self::H2(_) => "stream-reset",
            Self::ServerIo(_) | Self::InvalidResponse(_) | Self::ContentLengthMismatch => "bad-response",
            Self::ReadRequestBody(_) | Self::InvalidRequest(_) => "bad-request",
            // Published with an underscore, like `policy_unknown`. All other codes have hyphens.
            Self::AmbiguousPath => "ambiguous_path",
            Self::NoExtendedConnectStream { .. } => "no-extended-connect",
            Self::HeaderTooLarge { .. } => "head-too-long",
            Self::HeaderReadTimeout(_) => "head-timeout",
            Self::BodyIdleTimeout(_) => "body-timeout",
            Self::ClientClosed | Self::ClientIo(_) => "client-left",
            Self::NoEndpoints => "no-endpoints",
            Self::QueueTimeout(_, UnavailableCause::Ejected) | Self::FailingFast(UnavailableCause::Ejected) => {
                "breaker-open"
            }
            Self::QueueTimeout(..) | Self::FailingFast(_) => "endpoints-unready",
            Self::QueueFull => "queue-full",
            Self::MaxInFlight
            | Self::HeaderListsTooLarge { .. }
            | Self::HeadMemoryUsedUp { .. }
            | Self::TooManyConnections { .. }
            | Self::TooManyNames { .. } => "overload",
            Self::MemoryPressure => "memory-short",
            Self::RouteNotFound => "no-route",
            Self::GatewayDomain(_) => "gateway-domain",
            Self::GatewayNotExported(_) => "gateway-not-exported",
            Self::GatewayLoop => "gateway-loop",
            Self::InvalidBackend(_) | Self::NoBackends => "no-backend",
            Self::PolicyUnknown => "policy_unknown",
            Self::PortNotWatched => "port-not-watched",
            Self::DiscoveryDenied(_) => "discovery-denied",
            Self::InvalidPolicy(_) => "invalid-policy",
            Self::Forbidden { .. } => "forbidden",
            Self::Unauthorized { .. } => "policy-denied",
            Self::RateLimited { .. } => "rate-limited",
            Self::Redirect { .. } => "redirect",
            Self::Injected { .. } | Self::InjectedGrpc { .. } => "injected",
            Self::IdentityMismatch { .. } => "tls-identity-mismatch",
            Self::Timeout(TimeoutKind::Request(_) | TimeoutKind::Profile(_)) => "deadline",
            Self::Timeout(TimeoutKind::ResponseHeaders(_) | TimeoutKind::Response(_)) => "response-timeout",
            Self::Timeout(TimeoutKind::Idle(_)) => "idle-timeout",
            Self::DiscoveryTimeout(_) => "discovery-timeout",
            Self::NameUnresolved { .. } => "name-unresolved",
            Self::TargetForbidden(_) => "target-forbidden",
        }
    }
}

/// Maximum number of header lines in the head of an HTTP/1 message.
pub(super) const MAX_HEADERS: usize = 4096;

#[cfg(test)]
mod tests;
