use std::net::{IpAddr, Ipv4Addr};

use tulle_core::causes;

use super::*;
use crate::metrics::routes::grpc_code_name;

const ADDR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 80);
const LIMIT: Duration = Duration::from_secs(1);

fn refused() -> ConnectError {
    ConnectError::Io {
        addr: ADDR,
        source: std::io::ErrorKind::ConnectionRefused.into(),
    }
}

/// Errors of [`Side::Upstream`].
fn upstream_errors() -> Vec<Error> {
    let (addr, limit) = (ADDR, LIMIT);
    let tls = |cause| Error::Tls {
        addr,
        cause,
        source: "handshake".into(),
    };
    let dial_failed = |cause| Error::DialFailed { addr, cause };
    vec![
        Error::ConnectTimeout(ConnectError::Timeout { addr, limit }),
        Error::Connect(refused()),
        Error::Connect(ConnectError::OwnListener { addr }),
        dial_failed("connect-refused"),
        dial_failed("connect-timeout"),
        dial_failed("tls-identity-mismatch"),
        tls("tls-identity-mismatch"),
        tls("tls-untrusted"),
        tls("tls-expired"),
        tls("tls-refused"),
        tls("tls-handshake"),
        Error::ConnectionClosed {
            addr,
            reused: false,
            may_be_processed: true,
        },
        Error::ReconnectFailed {
            addr,
            cause: "connect-refused",
        },
        Error::Http2ConnectionEnded { addr },
        Error::NoFreeStream {
            addr,
            waited: limit,
            may_be_processed: false,
        },
        Error::H2(Reason::INTERNAL_ERROR.into()),
        Error::ServerIo(std::io::ErrorKind::UnexpectedEof.into()),
        Error::InvalidResponse("the content-length is not a number"),
        Error::ContentLengthMismatch,
        Error::IdentityMismatch {
            required: String::new(),
            actual: None,
        },
        Error::Timeout(TimeoutKind::Request(limit)),
        Error::Timeout(TimeoutKind::ResponseHeaders(limit)),
        Error::Timeout(TimeoutKind::Response(limit)),
        Error::Timeout(TimeoutKind::Idle(limit)),
        Error::Timeout(TimeoutKind::Profile(limit)),
    ]
}

/// Errors of [`Side::Client`].
fn client_errors() -> Vec<Error> {
    vec![
        Error::from_request_body("gone"),
        Error::InvalidRequest("the request target is invalid"),
        Error::AmbiguousPath,
        Error::HeaderTooLarge { limit: 1 },
        Error::HeaderReadTimeout(LIMIT),
        Error::NoExtendedConnectStream { addr: ADDR },
        Error::BodyIdleTimeout(LIMIT),
        Error::ClientClosed,
        Error::TargetForbidden(Addr::Socket(ADDR)),
    ]
}

/// Errors of [`Side::Proxy`].
fn proxy_errors() -> Vec<Error> {
    vec![
        Error::QueueFull,
        Error::MaxInFlight,
        Error::HeaderListsTooLarge { limit: 1 },
        Error::HeadMemoryUsedUp { limit: 1 },
        Error::MemoryPressure,
        Error::PolicyUnknown,
        Error::PortNotWatched,
        Error::DiscoveryDenied("only clients in namespace shop".into()),
        Error::DiscoveryTimeout(Addr::Socket(ADDR)),
        Error::TooManyConnections { limit: 1 },
        Error::TooManyNames { limit: 1 },
    ]
}

/// Errors of [`Side::Policy`].
fn policy_errors() -> Vec<Error> {
    vec![
        Error::NoEndpoints,
        Error::QueueTimeout(LIMIT, UnavailableCause::Unreachable { after: None }),
        Error::QueueTimeout(LIMIT, UnavailableCause::Ejected),
        Error::FailingFast(UnavailableCause::Unreachable { after: None }),
        Error::FailingFast(UnavailableCause::Ejected),
        Error::NoBackends,
        Error::InvalidBackend("the policy gives it no dispatcher"),
        Error::RouteNotFound,
        Error::GatewayDomain("other.test".into()),
        Error::GatewayNotExported("web.test".into()),
        Error::GatewayLoop,
        Error::InvalidPolicy("unknown filter".into()),
        Error::Forbidden { policy: String::new() },
        Error::Unauthorized {
            rule: String::new(),
            why: "no-tls",
        },
        Error::RateLimited { limit: String::new() },
        Error::NameUnresolved {
            name: "files.example".into(),
            source: "no name server responds".into(),
        },
    ]
}

#[test]
fn the_errors_page_lists_every_status() {
    let errors = [upstream_errors(), client_errors(), proxy_errors(), policy_errors()];
    for error in errors.into_iter().flatten() {
        let cause = causes::find(error.cause()).unwrap_or_else(|| panic!("{error:?}: {}", error.cause()));
        let status = error.status();
        let code = grpc_code_name(u16::try_from(status.grpc_code).ok());
        for expected in [status.status.as_str(), code] {
            assert!(
                cause.statuses.contains(expected),
                "{error:?}: {expected} is not in {:?}",
                cause.statuses
            );
        }
    }
    let injected = Error::InjectedGrpc {
        code: 1,
        message: String::new(),
    };
    for error in [injected, Error::TooLargeToResend(Box::new(Error::Connect(refused())))] {
        assert!(causes::find(error.cause()).is_some(), "{error:?}");
    }
}

/// HTTP status, gRPC code, and whether the connection is closed, as in Linkerd's proxy.
#[test]
fn statuses_match_linkerd() {
    let (addr, limit) = (ADDR, LIMIT);
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
    let identity_mismatch = Error::IdentityMismatch {
        required: String::new(),
        actual: None,
    };
    let closed = Error::ConnectionClosed {
        addr,
        reused: false,
        may_be_processed: true,
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
            Error::ServerIo(std::io::ErrorKind::UnexpectedEof.into()),
            (502, 14, true),
        ),
        (Error::H2(Reason::INTERNAL_ERROR.into()), (502, 14, true)),
        (
            Error::ConnectTimeout(ConnectError::Timeout { addr, limit }),
            (504, 4, true),
        ),
        (Error::QueueTimeout(limit, UnavailableCause::Ejected), (504, 4, true)),
        (Error::MaxInFlight, (503, 14, true)),
        (Error::QueueFull, (503, 14, true)),
        (Error::FailingFast(UnavailableCause::Ejected), (503, 14, true)),
        (Error::Timeout(TimeoutKind::Request(limit)), (504, 4, false)),
        (Error::Timeout(TimeoutKind::Response(limit)), (504, 4, false)),
        (Error::Timeout(TimeoutKind::ResponseHeaders(limit)), (504, 4, false)),
        (Error::Timeout(TimeoutKind::Idle(limit)), (504, 4, false)),
        (Error::Timeout(TimeoutKind::Profile(limit)), (504, 4, true)),
        (identity_mismatch, (502, 14, true)),
        (
            Error::InvalidBackend("the policy gives it no dispatcher"),
            (502, 14, true),
        ),
        (Error::NoBackends, (503, 14, true)),
    ] {
        let ErrorStatus {
            status,
            grpc_code: grpc,
            closes_connection: close,
        } = error.status();
        assert_eq!((status.as_u16(), grpc, close), expected, "{error:?}");
    }
}

/// The `error` labels of `*_http_errors_total` that Linkerd's dashboards use.
#[test]
fn error_labels_match_linkerd() {
    let (addr, limit) = (ADDR, LIMIT);
    let dial_failed = Error::DialFailed {
        addr,
        cause: "connect-refused",
    };
    let identity_mismatch = Error::IdentityMismatch {
        required: String::new(),
        actual: None,
    };
    for (error, expected) in [
        (Error::MaxInFlight, "loadshed"),
        (Error::QueueTimeout(limit, UnavailableCause::Ejected), "failfast"),
        (Error::GatewayDomain("other.test".into()), "gateway domain invalid"),
        (Error::GatewayLoop, "gateway loop"),
        (dial_failed, "i/o"),
        (identity_mismatch, "identity required"),
        (Error::Timeout(TimeoutKind::Profile(limit)), "response timeout"),
        (Error::InvalidPolicy(String::new()), "unexpected"),
    ] {
        assert_eq!(error.label(), expected, "{error:?}");
    }
}
