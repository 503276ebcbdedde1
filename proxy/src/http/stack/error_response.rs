//! Errors as responses: HTTP, or gRPC where the client speaks it.

use std::{net::SocketAddr, sync::Arc};

use http::{
    HeaderMap, Request, Response, StatusCode, Version,
    header::{self, HeaderName, HeaderValue},
};
use tulle_core::{addr::Addr, metrics::Labels, names::header as names};

use crate::http::{body::Body, error::Error, headers, lifecycle::classify::GRPC_STATUS};

const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// What must be known of a request to answer it with an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorFormat {
    version: Version,
    grpc: bool,
}

/// Whether responses of ours say why: towards our own application, or to a peer with an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorDetail {
    Include,
    Omit,
}

impl ErrorFormat {
    /// Whoever sent an HTTP/1 head that could not be read.
    pub(crate) fn http1() -> Self {
        Self {
            version: Version::HTTP_11,
            grpc: false,
        }
    }

    pub(crate) fn of_request(req: &Request<Body>) -> Self {
        Self {
            version: req.version(),
            grpc: headers::is_grpc(req.version(), req.headers()),
        }
    }
}

/// Where a proxy stands that answers, and between whom.
#[derive(Clone)]
pub(crate) struct ResponderInfo {
    pub(crate) direction: &'static str,
    /// Our identity.
    pub(crate) proxy_identity: Arc<str>,
    /// What the client wants to reach.
    pub(crate) target: Addr,
    pub(crate) client_addr: SocketAddr,
    /// Whom the client has proven to be.
    pub(crate) client_id: Option<HeaderValue>,
    /// What errors are counted by here, where it is more than their kind.
    pub(crate) error_labeler: Option<Arc<dyn ErrorLabeler>>,
}

/// Knows what the errors of its requests are counted by.
pub(crate) trait ErrorLabeler: Send + Sync {
    /// All labels but that of the kind; `None` for an error that has a family of its own.
    fn labels(&self, error: &Error) -> Option<Labels>;
}

/// The response that an error becomes.
pub(crate) fn error_response(
    error: &Error,
    asker: ErrorFormat,
    reasons: ErrorDetail,
    place: &ResponderInfo,
) -> Response<Body> {
    let answer = error.status();
    let mut rsp = Response::new(Body::empty());
    let headers = put_error_headers(&mut rsp, error, reasons, place);
    if asker.grpc {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(GRPC_STATUS, HeaderValue::from(answer.grpc_code));
        if reasons == ErrorDetail::Include || matches!(error, Error::InjectedGrpc { .. }) {
            headers.insert(GRPC_MESSAGE, header_text(&error.to_string()));
        }
        *rsp.status_mut() = StatusCode::OK;
    } else {
        if let Error::Redirect { location, .. } = error {
            headers.insert(header::LOCATION, location.clone());
        }
        *rsp.status_mut() = answer.status;
    }
    if answer.closes_connection {
        if asker.version <= Version::HTTP_11 {
            rsp.headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if reasons == ErrorDetail::Include {
            rsp.headers_mut()
                .insert(names::L5D_PROXY_CONNECTION, HeaderValue::from_static("close"));
        }
    }
    rsp
}

/// The end of a gRPC response that has begun.
pub(crate) fn grpc_error_trailers(error: &Error) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    trailers.insert(GRPC_STATUS, HeaderValue::from(error.status().grpc_code));
    trailers.insert(GRPC_MESSAGE, header_text(&error.to_string()));
    trailers
}

fn put_error_headers<'a>(
    rsp: &'a mut Response<Body>,
    error: &Error,
    reasons: ErrorDetail,
    place: &ResponderInfo,
) -> &'a mut HeaderMap {
    let headers = rsp.headers_mut();
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static("0"));
    if reasons == ErrorDetail::Include {
        headers.insert(names::L5D_PROXY_ERROR, header_text(&error.to_string()));
        let target = error.failed_addr().map_or_else(|| place.target.clone(), Addr::Socket);
        let ResponderInfo {
            direction,
            proxy_identity: hop,
            ..
        } = place;
        let cause = format!(
            "{}; direction={direction}; hop={hop}; target={target}",
            error.cause_header()
        );
        headers.insert(names::L5D_PROXY_CAUSE, header_text(&cause));
    }
    headers
}

/// A message as a header value; what headers cannot carry is left out.
fn header_text(message: &str) -> HeaderValue {
    let printable: String = message.chars().filter(|c| (' '..='~').contains(c)).collect();
    HeaderValue::from_str(&printable).unwrap_or(HeaderValue::from_static("error"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> ResponderInfo {
        ResponderInfo {
            direction: "outbound",
            proxy_identity: "web.shop".into(),
            target: Addr::Socket(([10, 0, 0, 1], 80).into()),
            client_addr: ([10, 0, 0, 2], 4321).into(),
            client_id: None,
            error_labeler: None,
        }
    }

    #[test]
    fn grpc_clients_get_a_grpc_status() {
        let req = Request::post("http://x/s/m")
            .version(Version::HTTP_2)
            .header("content-type", "application/grpc+proto")
            .body(Body::empty())
            .unwrap();
        let rsp = error_response(
            &Error::MaxInFlight,
            ErrorFormat::of_request(&req),
            ErrorDetail::Include,
            &place(),
        );
        assert_eq!(
            (rsp.status(), &rsp.headers()["grpc-status"]),
            (StatusCode::OK, &HeaderValue::from(14))
        );
        let headers = "overload; direction=outbound; hop=web.shop; target=10.0.0.1:80";
        assert_eq!(rsp.headers()["l5d-proxy-cause"], headers);
    }

    #[test]
    fn unmeshed_clients_get_no_error_detail() {
        let req = Request::get("/").body(Body::empty()).unwrap();
        let denied = Error::Unauthorized {
            rule: "Server/x".into(),
            why: "no-tls",
        };
        let rsp = error_response(&denied, ErrorFormat::of_request(&req), ErrorDetail::Omit, &place());
        assert_eq!(rsp.status(), StatusCode::FORBIDDEN);
        assert!(!rsp.headers().contains_key("l5d-proxy-error"));
        assert!(!rsp.headers().contains_key("l5d-proxy-cause"));
        assert!(!rsp.headers().contains_key("connection"));
        let rsp = error_response(&denied, ErrorFormat::of_request(&req), ErrorDetail::Include, &place());
        let headers = "policy-denied:Server/x; why=no-tls; direction=outbound; hop=web.shop; target=10.0.0.1:80";
        assert_eq!(rsp.headers()["l5d-proxy-cause"], headers);
    }
}
