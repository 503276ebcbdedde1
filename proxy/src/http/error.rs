//! Why a request failed: whose fault it is, whether it may be tried again, and what the client is told.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use ::h2::Reason;
use http::{HeaderValue, StatusCode};
use tulle_core::{addr::Addr, identity::Identity};

use crate::{http::h1::head::MAX_LINES, metrics::http::Fault, net::connect::ConnectError};

/// Whose fault a failed request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The client sent something wrong or went away.
    Client,
    /// The other end of the upstream connection.
    Peer,
    /// What the control plane said.
    Policy,
    /// This proxy.
    Us,
}

/// Whether a failed attempt may be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// Nothing of the request reached anybody who could have acted on it.
    NeverSent,
    /// It may have been processed; only a request that is safe to repeat may be sent again.
    IfIdempotent,
    No,
}

/// A request that did not get its response.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Error {
    #[error("connect timed out")]
    ConnectTimeout(#[source] ConnectError),
    #[error("connect error")]
    Connect(#[source] ConnectError),
    #[error("connect error: another request's dial of {addr} has just failed")]
    DialFailed {
        addr: SocketAddr,
        /// Which kind of failure.
        cause: &'static str,
    },
    #[error("TLS handshake with {addr}")]
    Tls {
        addr: SocketAddr,
        /// Which kind of failure.
        cause: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("connection to {addr} closed before a response")]
    Closed {
        addr: SocketAddr,
        reused: bool,
        /// Whether somebody may have read something of the request.
        sent: bool,
    },
    /// The request may have been processed.
    #[error("connection to {addr} closed before a response, and there is no other ({cause})")]
    Gone {
        addr: SocketAddr,
        /// Why the dial of another connection failed.
        cause: &'static str,
    },
    #[error("HTTP/2 connection to {addr} ended before a response")]
    ConnectionLost { addr: SocketAddr },
    #[error("{addr} had no free HTTP/2 stream within {limit:?}")]
    NoFreeStream {
        addr: SocketAddr,
        limit: Duration,
        /// Whether something of the request may have left.
        sent: bool,
    },
    #[error("HTTP/2 error")]
    H2(#[source] ::h2::Error),
    #[error("reading the response")]
    Response(#[source] std::io::Error),
    #[error("invalid response: {0}")]
    BadResponse(&'static str),
    #[error("{addr} takes no extended CONNECT (RFC 8441), or no more of them")]
    NoStream { addr: SocketAddr },
    /// It was safe to send once more, but for its body.
    #[error(transparent)]
    TooLargeToRetry(Box<Self>),
    #[error("receiving the request body")]
    RequestBody(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the request is given up here, or sent to another endpoint")]
    TakenBack,
    #[error("a body is not as long as its content-length")]
    Miscounted,
    #[error("invalid request: {0}")]
    BadRequest(&'static str),
    #[error("the path can be taken for another one, and what is permitted here depends on it")]
    AmbiguousPath,
    #[error("the request's head has more than {limit} bytes, or more than {MAX_LINES} lines")]
    HeadTooLong { limit: usize },
    #[error("the request's head did not come within {0:?}")]
    HeadTimeout(Duration),
    #[error("nothing more of the request's body came for {0:?}")]
    BodyTimeout(Duration),
    #[error("the client left before its response")]
    Left,
    #[error("the client's connection broke")]
    Client(#[source] std::io::Error),
    #[error("no endpoints")]
    NoEndpoints,
    #[error("no endpoint became available within {0:?}")]
    FailFast(Duration, Unready),
    #[error("no endpoint is available")]
    Unavailable(Unready),
    #[error("the route has no backends")]
    NoBackends,
    #[error("too many requests wait for an endpoint")]
    QueueFull,
    #[error("too many requests in flight")]
    Shed,
    #[error("the requests in flight on one HTTP/2 connection have header lists of more than {limit} bytes")]
    TooManyHeaders { limit: usize },
    #[error("memory is about to run out")]
    MemoryShort,
    #[error("{limit} connections are open, as many as there may be")]
    TooManyConnections { limit: usize },
    #[error("no route for request")]
    RouteNotFound,
    #[error("this gateway does not serve {0}")]
    GatewayDomain(Arc<str>),
    #[error("the request has passed this gateway before")]
    GatewayLoop,
    #[error("backend refuses: {0}")]
    NoBackend(&'static str),
    #[error("the control plane has not told who may use this port")]
    PolicyUnknown,
    #[error("{0}")]
    InvalidPolicy(String),
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
    #[error("endpoint is not {required}")]
    RequireId { required: String, actual: Option<Identity> },
    #[error(transparent)]
    Late(Late),
    #[error("the discovery of {0} did not answer in time")]
    Undiscovered(Addr),
    #[error("{name} is of no service of the mesh, and DNS has no address of it")]
    Unresolved {
        name: Arc<str>,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("no client is led to {0}")]
    TargetForbidden(Addr),
    #[error("{limit} targets are in use, and no further name is looked up")]
    TooManyNames { limit: usize },
}

/// Why no endpoint is available of those that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unready {
    /// They cannot be reached; one of them for this cause, if any has been tried.
    Unreached { after: Option<&'static str> },
    /// Some were taken out for failing.
    Ejected,
}

/// Which time of a request is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Late {
    /// Of the request, with all that was tried.
    #[error("request timeout: not answered within {0:?}")]
    Request(Duration),
    /// Of one try, to the head of its response.
    #[error("response headers timeout: none within {0:?}")]
    Head(Duration),
    /// Of the response, to its end.
    #[error("response timeout: not complete within {0:?}")]
    Response(Duration),
    #[error("idle timeout: no data for {0:?}")]
    Idle(Duration),
    /// Of the response, by a ServiceProfile.
    #[error("response timeout: no response within {0:?}")]
    Profile(Duration),
}

/// Code `Unavailable` and its siblings of gRPC.
pub(crate) mod grpc {
    pub(crate) use tulle_core::retry::{DEADLINE_EXCEEDED, INTERNAL, RESOURCE_EXHAUSTED, UNAVAILABLE};

    pub(crate) const UNKNOWN: i32 = 2;
    pub(crate) const INVALID_ARGUMENT: i32 = 3;
    pub(crate) const NOT_FOUND: i32 = 5;
    pub(crate) const PERMISSION_DENIED: i32 = 7;
    pub(crate) const FAILED_PRECONDITION: i32 = 9;
    pub(crate) const ABORTED: i32 = 10;
    pub(crate) const UNIMPLEMENTED: i32 = 12;
}

/// What the client is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) grpc: i32,
    /// Whether the client's connection is closed gracefully with it.
    pub(crate) close: bool,
}

impl Error {
    /// An error of a body that a client sends us.
    pub(crate) fn from_client(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::RequestBody(error.into())
    }

    pub(crate) fn connect(error: ConnectError) -> Self {
        match error {
            ConnectError::Timeout { .. } => Self::ConnectTimeout(error),
            _ => Self::Connect(error),
        }
    }

    /// Whether it was the request's body that failed, which nobody gets the rest of.
    pub(crate) fn is_of_request_body(&self) -> bool {
        matches!(
            self,
            Self::RequestBody(_) | Self::BodyTimeout(_) | Self::Miscounted | Self::TakenBack
        )
    }

    /// Whether nobody listens where this dialled.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Connect(ConnectError::Io { source, .. }) if source.kind() == std::io::ErrorKind::ConnectionRefused
        )
    }

    pub(crate) fn side(&self) -> Side {
        match self {
            Self::TooLargeToRetry(error) => error.side(),
            Self::RequestBody(_)
            | Self::BadRequest(_)
            | Self::AmbiguousPath
            | Self::HeadTooLong { .. }
            | Self::HeadTimeout(_)
            | Self::BodyTimeout(_)
            | Self::NoStream { .. }
            | Self::TargetForbidden(_)
            | Self::Left
            | Self::Client(_) => Side::Client,
            Self::ConnectTimeout(_)
            | Self::Connect(_)
            | Self::DialFailed { .. }
            | Self::Tls { .. }
            | Self::Closed { .. }
            | Self::Gone { .. }
            | Self::ConnectionLost { .. }
            | Self::NoFreeStream { .. }
            | Self::H2(_)
            | Self::Response(_)
            | Self::BadResponse(_)
            | Self::Miscounted
            | Self::RequireId { .. }
            | Self::Late(_) => Side::Peer,
            Self::TakenBack
            | Self::Shed
            | Self::TooManyHeaders { .. }
            | Self::MemoryShort
            | Self::TooManyConnections { .. }
            | Self::QueueFull
            | Self::Undiscovered(_)
            | Self::TooManyNames { .. }
            | Self::PolicyUnknown => Side::Us,
            Self::NoEndpoints
            | Self::Unresolved { .. }
            | Self::FailFast(..)
            | Self::Unavailable(_)
            | Self::RouteNotFound
            | Self::GatewayDomain(_)
            | Self::GatewayLoop
            | Self::NoBackends
            | Self::NoBackend(_)
            | Self::InvalidPolicy(_)
            | Self::Unauthorized { .. }
            | Self::RateLimited { .. }
            | Self::Redirect { .. }
            | Self::Injected { .. }
            | Self::InjectedGrpc { .. } => Side::Policy,
        }
    }

    /// Whether there was no connection to send anything on.
    pub(crate) fn is_of_dial(&self) -> bool {
        matches!(
            self,
            Self::ConnectTimeout(_) | Self::Connect(_) | Self::DialFailed { .. } | Self::Tls { .. }
        )
    }

    /// Whether the other end of an HTTP/2 connection says that it has not processed the stream: it refused the stream, or the stream
    /// is above the last one that it answers before it ends the connection. A new connection may do better.
    pub(crate) fn is_unprocessed(&self) -> bool {
        match self {
            Self::TooLargeToRetry(error) => error.is_unprocessed(),
            // Streams up to the last one go on, so that only those above it fail with what the other end has said.
            Self::H2(error) => {
                error.reason() == Some(Reason::REFUSED_STREAM) || (error.is_go_away() && error.is_remote())
            }
            _ => false,
        }
    }

    /// Whether a connection was ended in good order.
    pub(crate) fn is_graceful_end(&self) -> bool {
        matches!(self, Self::H2(error) if error.is_go_away() && error.is_remote() && error.reason() == Some(Reason::NO_ERROR))
    }

    pub(crate) fn retry(&self) -> Retry {
        match self {
            error if error.is_of_dial() => Retry::NeverSent,
            error if error.is_unprocessed() => Retry::NeverSent,
            Self::Closed { sent: false, .. } | Self::NoFreeStream { sent: false, .. } => Retry::NeverSent,
            Self::Closed { reused: true, .. } | Self::Gone { .. } | Self::ConnectionLost { .. } => Retry::IfIdempotent,
            Self::H2(error) if error.is_io() || error.is_go_away() => Retry::IfIdempotent,
            _ => Retry::No,
        }
    }

    /// Source: `spec` of the compatible system, its table of errors and responses.
    pub(crate) fn answer(&self) -> Answer {
        let answer = |status, grpc, close| Answer { status, grpc, close };
        match self {
            Self::TooLargeToRetry(error) => error.answer(),
            Self::ConnectTimeout(_)
            | Self::DialFailed {
                cause: "connect-timeout",
                ..
            }
            | Self::FailFast(..) => answer(StatusCode::GATEWAY_TIMEOUT, grpc::DEADLINE_EXCEEDED, true),
            Self::Late(late) => answer(
                StatusCode::GATEWAY_TIMEOUT,
                grpc::DEADLINE_EXCEEDED,
                matches!(late, Late::Profile(_)),
            ),
            Self::Connect(_)
            | Self::DialFailed { .. }
            | Self::Tls { .. }
            | Self::Closed { .. }
            | Self::Gone { .. }
            | Self::ConnectionLost { .. }
            | Self::H2(_)
            | Self::Response(_)
            | Self::BadResponse(_)
            | Self::Miscounted
            | Self::RequireId { .. }
            | Self::TakenBack
            | Self::NoBackend(_) => answer(StatusCode::BAD_GATEWAY, grpc::UNAVAILABLE, true),
            Self::NoEndpoints
            | Self::NoBackends
            | Self::Unavailable(_)
            | Self::QueueFull
            | Self::NoFreeStream { .. }
            | Self::Shed
            | Self::TooManyHeaders { .. }
            | Self::MemoryShort
            | Self::TooManyConnections { .. }
            | Self::TooManyNames { .. }
            | Self::Unresolved { .. }
            | Self::PolicyUnknown
            | Self::Undiscovered(_) => answer(StatusCode::SERVICE_UNAVAILABLE, grpc::UNAVAILABLE, true),
            Self::RequestBody(_) | Self::BadRequest(_) | Self::Left | Self::Client(_) => {
                answer(StatusCode::BAD_REQUEST, grpc::INVALID_ARGUMENT, true)
            }
            Self::HeadTooLong { .. } => answer(
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                grpc::RESOURCE_EXHAUSTED,
                true,
            ),
            Self::HeadTimeout(_) | Self::BodyTimeout(_) => {
                answer(StatusCode::REQUEST_TIMEOUT, grpc::DEADLINE_EXCEEDED, true)
            }
            Self::AmbiguousPath => answer(StatusCode::BAD_REQUEST, grpc::INVALID_ARGUMENT, false),
            Self::NoStream { .. } => answer(StatusCode::NOT_IMPLEMENTED, grpc::UNIMPLEMENTED, false),
            Self::RouteNotFound | Self::GatewayDomain(_) => answer(StatusCode::NOT_FOUND, grpc::NOT_FOUND, false),
            Self::GatewayLoop => answer(StatusCode::LOOP_DETECTED, grpc::ABORTED, true),
            Self::Unauthorized { .. } | Self::TargetForbidden(_) => {
                answer(StatusCode::FORBIDDEN, grpc::PERMISSION_DENIED, false)
            }
            Self::RateLimited { .. } => answer(StatusCode::TOO_MANY_REQUESTS, grpc::RESOURCE_EXHAUSTED, false),
            Self::Redirect { status, .. } => answer(*status, grpc::NOT_FOUND, false),
            Self::Injected { status, .. } => answer(*status, grpc::FAILED_PRECONDITION, false),
            Self::InjectedGrpc { code, .. } => answer(StatusCode::OK, *code, false),
            Self::InvalidPolicy(_) => answer(StatusCode::INTERNAL_SERVER_ERROR, grpc::INTERNAL, true),
        }
    }

    /// Label of `*_http_errors_total`.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::TooLargeToRetry(error) => error.label(),
            Self::Shed
            | Self::TooManyHeaders { .. }
            | Self::NoFreeStream { .. }
            | Self::MemoryShort
            | Self::TooManyConnections { .. }
            | Self::TooManyNames { .. }
            | Self::QueueFull
            | Self::Unavailable(_)
            | Self::NoEndpoints
            | Self::NoBackends => "loadshed",
            Self::FailFast(..) => "failfast",
            Self::RequireId { .. } => "identity required",
            Self::GatewayDomain(_) => "gateway domain invalid",
            Self::GatewayLoop => "gateway loop",
            Self::PolicyUnknown => "policy unknown",
            Self::AmbiguousPath => "ambiguous path",
            Self::Late(_) => "response timeout",
            Self::ConnectTimeout(_)
            | Self::Connect(_)
            | Self::DialFailed { .. }
            | Self::Tls { .. }
            | Self::Closed { .. }
            | Self::Gone { .. }
            | Self::ConnectionLost { .. }
            | Self::H2(_)
            | Self::Response(_) => "i/o",
            _ => "unexpected",
        }
    }

    /// Code and details as `l5d-proxy-cause` tells them, but for who tells.
    pub(crate) fn told(&self) -> String {
        let code = self.cause();
        match self {
            Self::Unauthorized { rule, why } => format!("{code}:{rule}; why={why}"),
            Self::RateLimited { limit } => format!("{code}; limit={limit}"),
            Self::TooLargeToRetry(error) => format!("{code}; after={}", error.cause()),
            Self::FailFast(_, Unready::Unreached { after: Some(after) })
            | Self::Unavailable(Unready::Unreached { after: Some(after) }) => format!("{code}; after={after}"),
            Self::Gone { cause, .. } => format!("{code}; then={cause}"),
            _ => code.to_owned(),
        }
    }

    /// The address that failed, where it is another than was asked for.
    pub(crate) fn target(&self) -> Option<SocketAddr> {
        match self {
            Self::ConnectTimeout(error) | Self::Connect(error) => Some(error.addr()),
            Self::DialFailed { addr, .. }
            | Self::Tls { addr, .. }
            | Self::Closed { addr, .. }
            | Self::Gone { addr, .. }
            | Self::ConnectionLost { addr }
            | Self::NoFreeStream { addr, .. }
            | Self::NoStream { addr } => Some(*addr),
            Self::TooLargeToRetry(error) => error.target(),
            _ => None,
        }
    }

    /// What it is called in metrics.
    pub(crate) fn fault(&self) -> Fault {
        Fault {
            cause: self.cause(),
            stream: self.stream_label(),
        }
    }

    /// The name of an error in the metrics of routes.
    fn stream_label(&self) -> &'static str {
        match self {
            Self::TooLargeToRetry(error) => error.stream_label(),
            Self::FailFast(..) => "FAIL_FAST",
            Self::Shed
            | Self::TooManyHeaders { .. }
            | Self::NoFreeStream { .. }
            | Self::MemoryShort
            | Self::TooManyConnections { .. }
            | Self::TooManyNames { .. }
            | Self::QueueFull
            | Self::Unavailable(_)
            | Self::NoEndpoints
            | Self::NoBackends => "LOAD_SHED",
            Self::Late(Late::Request(_)) => "REQUEST_TIMEOUT",
            Self::Late(Late::Head(_) | Late::Profile(_)) => "RESPONSE_HEADERS_TIMEOUT",
            Self::Late(Late::Response(_)) => "RESPONSE_STREAM_TIMEOUT",
            Self::Late(Late::Idle(_)) | Self::BodyTimeout(_) => "IDLE_TIMEOUT",
            Self::Left | Self::Client(_) | Self::RequestBody(_) => "CANCEL",
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
            | Self::Closed { .. }
            | Self::Gone { .. }
            | Self::ConnectionLost { .. }
            | Self::Response(_) => "IO",
            _ => "UNKNOWN",
        }
    }

    /// The stable machine-readable reason, for `l5d-proxy-cause` and metric labels.
    pub(crate) fn cause(&self) -> &'static str {
        match self {
            Self::TooLargeToRetry(_) => "body-too-large-to-retry",
            Self::ConnectTimeout(error) | Self::Connect(error) => error.cause(),
            Self::DialFailed { cause, .. } | Self::Tls { cause, .. } => cause,
            Self::Closed { .. } | Self::Gone { .. } | Self::ConnectionLost { .. } | Self::TakenBack => {
                "connection-closed"
            }
            Self::NoFreeStream { .. } => "no-free-stream",
            Self::H2(_) => "stream-reset",
            Self::Response(_) | Self::BadResponse(_) | Self::Miscounted => "bad-response",
            Self::RequestBody(_) | Self::BadRequest(_) => "bad-request",
            Self::AmbiguousPath => "ambiguous_path",
            Self::NoStream { .. } => "no-extended-connect",
            Self::HeadTooLong { .. } => "head-too-long",
            Self::HeadTimeout(_) => "head-timeout",
            Self::BodyTimeout(_) => "body-timeout",
            Self::Left | Self::Client(_) => "client-left",
            Self::NoEndpoints => "no-endpoints",
            Self::FailFast(_, Unready::Ejected) | Self::Unavailable(Unready::Ejected) => "breaker-open",
            Self::FailFast(..) | Self::Unavailable(_) => "endpoints-unready",
            Self::QueueFull => "queue-full",
            Self::Shed | Self::TooManyHeaders { .. } | Self::TooManyConnections { .. } | Self::TooManyNames { .. } => {
                "overload"
            }
            Self::MemoryShort => "memory-short",
            Self::RouteNotFound => "no-route",
            Self::GatewayDomain(_) => "gateway-domain",
            Self::GatewayLoop => "gateway-loop",
            Self::NoBackend(_) | Self::NoBackends => "no-backend",
            Self::PolicyUnknown => "policy_unknown",
            Self::InvalidPolicy(_) => "invalid-policy",
            Self::Unauthorized { .. } => "policy-denied",
            Self::RateLimited { .. } => "rate-limited",
            Self::Redirect { .. } => "redirect",
            Self::Injected { .. } | Self::InjectedGrpc { .. } => "injected",
            Self::RequireId { .. } => "tls-identity-mismatch",
            Self::Late(Late::Request(_) | Late::Profile(_)) => "deadline",
            Self::Late(Late::Head(_) | Late::Response(_)) => "response-timeout",
            Self::Late(Late::Idle(_)) => "idle-timeout",
            Self::Undiscovered(_) => "discovery-timeout",
            Self::Unresolved { .. } => "name-unresolved",
            Self::TargetForbidden(_) => "target-forbidden",
        }
    }
}

#[cfg(test)]
mod tests {
    use tulle_core::causes;

    use super::*;
    use crate::metrics::routes::code_name;

    #[test]
    fn the_page_of_errors_says_what_clients_are_told() {
        let (addr, limit) = (SocketAddr::from(([10, 0, 0, 1], 80)), Duration::from_secs(1));
        let refused = || ConnectError::Io {
            addr,
            source: std::io::ErrorKind::ConnectionRefused.into(),
        };
        let tls = |cause| Error::Tls {
            addr,
            cause,
            source: "handshake".into(),
        };
        let dial_failed = |cause| Error::DialFailed { addr, cause };
        for error in [
            Error::ConnectTimeout(ConnectError::Timeout { addr, limit }),
            Error::Connect(refused()),
            Error::Connect(ConnectError::Ourselves { addr }),
            dial_failed("connect-refused"),
            dial_failed("connect-timeout"),
            dial_failed("tls-identity-mismatch"),
            tls("tls-identity-mismatch"),
            tls("tls-untrusted"),
            tls("tls-expired"),
            tls("tls-refused"),
            tls("tls-handshake"),
            Error::Closed {
                addr,
                reused: false,
                sent: true,
            },
            Error::Gone {
                addr,
                cause: "connect-refused",
            },
            Error::ConnectionLost { addr },
            Error::NoFreeStream {
                addr,
                limit,
                sent: false,
            },
            Error::H2(Reason::INTERNAL_ERROR.into()),
            Error::Response(std::io::ErrorKind::UnexpectedEof.into()),
            Error::BadResponse("its length"),
            Error::Miscounted,
            Error::from_client("gone"),
            Error::BadRequest("its target"),
            Error::AmbiguousPath,
            Error::HeadTooLong { limit: 1 },
            Error::HeadTimeout(limit),
            Error::NoStream { addr },
            Error::BodyTimeout(limit),
            Error::Left,
            Error::NoEndpoints,
            Error::FailFast(limit, Unready::Unreached { after: None }),
            Error::FailFast(limit, Unready::Ejected),
            Error::Unavailable(Unready::Unreached { after: None }),
            Error::Unavailable(Unready::Ejected),
            Error::NoBackends,
            Error::NoBackend("it has no dispatcher"),
            Error::QueueFull,
            Error::Shed,
            Error::TooManyHeaders { limit: 1 },
            Error::MemoryShort,
            Error::RouteNotFound,
            Error::GatewayDomain("other.test".into()),
            Error::GatewayLoop,
            Error::PolicyUnknown,
            Error::InvalidPolicy("of nobody".into()),
            Error::Unauthorized {
                rule: String::new(),
                why: "no-tls",
            },
            Error::RateLimited { limit: String::new() },
            Error::RequireId {
                required: String::new(),
                actual: None,
            },
            Error::Late(Late::Request(limit)),
            Error::Late(Late::Head(limit)),
            Error::Late(Late::Response(limit)),
            Error::Late(Late::Idle(limit)),
            Error::Late(Late::Profile(limit)),
            Error::Undiscovered(Addr::Socket(addr)),
            Error::TargetForbidden(Addr::Socket(addr)),
            Error::TooManyConnections { limit: 1 },
            Error::TooManyNames { limit: 1 },
            Error::Unresolved {
                name: "files.example".into(),
                source: "nobody answers".into(),
            },
        ] {
            let cause = causes::find(error.cause()).unwrap_or_else(|| panic!("{error:?}: {}", error.cause()));
            let answer = error.answer();
            let code = code_name(u16::try_from(answer.grpc).ok());
            for told in [answer.status.as_str(), code] {
                assert!(
                    cause.answers.contains(told),
                    "{error:?}: {told} is not in {:?}",
                    cause.answers
                );
            }
        }
        let injected = Error::InjectedGrpc {
            code: 1,
            message: String::new(),
        };
        for error in [injected, Error::TooLargeToRetry(Box::new(Error::Connect(refused())))] {
            assert!(causes::find(error.cause()).is_some(), "{error:?}");
        }
    }

    /// What clients of Linkerd's proxy are told: status, code of gRPC, and whether their connection is closed.
    #[test]
    fn answers_are_those_of_the_contract() {
        let (addr, limit) = (SocketAddr::from(([10, 0, 0, 1], 80)), Duration::from_secs(1));
        let refused = || ConnectError::Io {
            addr,
            source: std::io::ErrorKind::ConnectionRefused.into(),
        };
        let status = |status| StatusCode::from_u16(status).unwrap();
        let redirect = Error::Redirect {
            status: status(302),
            location: HeaderValue::from_static("http://x/"),
        };
        let injected = Error::Injected {
            status: status(418),
            message: String::new(),
        };
        let injected_grpc = Error::InjectedGrpc {
            code: 8,
            message: String::new(),
        };
        let unauthorized = Error::Unauthorized {
            rule: String::new(),
            why: "no-tls",
        };
        let not_required = Error::RequireId {
            required: String::new(),
            actual: None,
        };
        let closed = Error::Closed {
            addr,
            reused: false,
            sent: true,
        };
        for (error, expected) in [
            (Error::InvalidPolicy(String::new()), (500, 13, true)),
            (Error::RouteNotFound, (404, 5, false)),
            (Error::GatewayDomain("other.test".into()), (404, 5, false)),
            (Error::GatewayLoop, (508, 10, true)),
            (unauthorized, (403, 7, false)),
            (Error::RateLimited { limit: String::new() }, (429, 8, false)),
            (redirect, (302, 5, false)),
            (injected, (418, 9, false)),
            (injected_grpc, (200, 8, false)),
            (Error::Connect(refused()), (502, 14, true)),
            (closed, (502, 14, true)),
            (
                Error::Response(std::io::ErrorKind::UnexpectedEof.into()),
                (502, 14, true),
            ),
            (Error::H2(Reason::INTERNAL_ERROR.into()), (502, 14, true)),
            (
                Error::ConnectTimeout(ConnectError::Timeout { addr, limit }),
                (504, 4, true),
            ),
            (Error::FailFast(limit, Unready::Ejected), (504, 4, true)),
            (Error::Shed, (503, 14, true)),
            (Error::QueueFull, (503, 14, true)),
            (Error::Unavailable(Unready::Ejected), (503, 14, true)),
            (Error::Late(Late::Request(limit)), (504, 4, false)),
            (Error::Late(Late::Response(limit)), (504, 4, false)),
            (Error::Late(Late::Head(limit)), (504, 4, false)),
            (Error::Late(Late::Idle(limit)), (504, 4, false)),
            (Error::Late(Late::Profile(limit)), (504, 4, true)),
            (not_required, (502, 14, true)),
            (Error::NoBackend("it has no dispatcher"), (502, 14, true)),
            (Error::NoBackends, (503, 14, true)),
        ] {
            let Answer { status, grpc, close } = error.answer();
            assert_eq!((status.as_u16(), grpc, close), expected, "{error:?}");
        }
    }

    /// What dashboards of Linkerd know of `*_http_errors_total`.
    #[test]
    fn kinds_of_errors_are_those_of_the_contract() {
        let (addr, limit) = (SocketAddr::from(([10, 0, 0, 1], 80)), Duration::from_secs(1));
        let dial_failed = Error::DialFailed {
            addr,
            cause: "connect-refused",
        };
        let not_required = Error::RequireId {
            required: String::new(),
            actual: None,
        };
        for (error, expected) in [
            (Error::Shed, "loadshed"),
            (Error::FailFast(limit, Unready::Ejected), "failfast"),
            (Error::GatewayDomain("other.test".into()), "gateway domain invalid"),
            (Error::GatewayLoop, "gateway loop"),
            (dial_failed, "i/o"),
            (not_required, "identity required"),
            (Error::Late(Late::Profile(limit)), "response timeout"),
            (Error::InvalidPolicy(String::new()), "unexpected"),
        ] {
            assert_eq!(error.label(), expected, "{error:?}");
        }
    }
}
