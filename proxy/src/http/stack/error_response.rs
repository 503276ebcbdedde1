//! Responses to errors: HTTP, or gRPC if the client speaks it.

use std::{net::SocketAddr, sync::Arc};

use http::{
    HeaderMap, Request, Response, StatusCode, Version,
    header::{self, HeaderName, HeaderValue},
};
use tulle_core::{addr::Addr, metrics::Labels, names::header as names};

use crate::http::{
    body::Body, connection_closer::CloseAfterResponse, error::Error, headers, lifecycle::classify::GRPC_STATUS,
};

const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// The properties of a request that decide the form of an error response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorFormat {
    version: Version,
    grpc: bool,
}

/// Whether an error response contains the reason. Only the local application and peers with an identity get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorDetail {
    Include,
    Omit,
}

impl ErrorFormat {
    /// The format for HTTP/1, also if the request could not be parsed.
    pub(crate) fn http1() -> Self {
        Self {
            version: Version::HTTP_11,
            grpc: false,
        }
    }

    pub(crate) fn from_request(req: &Request<Body>) -> Self {
        Self {
            version: req.version(),
            grpc: headers::is_grpc(req.version(), req.headers()),
        }
    }
}

/// A client connection and its proxy, for error responses and the access log.
#[derive(Clone)]
pub(crate) struct ConnectionInfo {
    pub(crate) direction: &'static str,
    pub(crate) proxy_identity: Arc<str>,
    /// The target address of the client.
    pub(crate) target: Addr,
    pub(crate) client_addr: SocketAddr,
    /// The client's verified identity.
    pub(crate) client_id: Option<HeaderValue>,
    /// Creates the labels of the error counter; `None` for the default labels.
    pub(crate) error_labeler: Option<Arc<dyn ErrorLabeler>>,
}

/// Labels of the error counter.
pub(crate) trait ErrorLabeler: Send + Sync {
    /// All labels except `error`; `None` for an error that another metric family counts.
    fn labels(&self, error: &Error) -> Option<Labels>;
}

pub(crate) fn error_response(
    error: &Error,
    format: ErrorFormat,
    detail: ErrorDetail,
    connection: &ConnectionInfo,
) -> Response<Body> {
    let status = error.status();
    let mut rsp = Response::new(Body::empty());
    let headers = put_error_headers(&mut rsp, error, detail, connection);
    if format.grpc {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(GRPC_STATUS, HeaderValue::from(status.grpc_code));
        if detail == ErrorDetail::Include || matches!(error, Error::InjectedGrpc { .. }) {
            headers.insert(GRPC_MESSAGE, grpc_message(&error.to_string()));
        }
        *rsp.status_mut() = StatusCode::OK;
    } else {
        if let Error::Redirect { location, .. } = error {
            headers.insert(header::LOCATION, location.clone());
        }
        *rsp.status_mut() = status.status;
    }
    if status.closes_connection {
        if format.version <= Version::HTTP_11 {
            rsp.extensions_mut().insert(CloseAfterResponse);
        }
        if detail == ErrorDetail::Include {
            rsp.headers_mut()
                .insert(names::L5D_PROXY_CONNECTION, HeaderValue::from_static("close"));
        }
    }
    rsp
}

/// Trailers for a gRPC response that fails after its head.
pub(crate) fn grpc_error_trailers(error: &Error, detail: ErrorDetail) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    trailers.insert(GRPC_STATUS, HeaderValue::from(error.status().grpc_code));
    if detail == ErrorDetail::Include {
        trailers.insert(GRPC_MESSAGE, grpc_message(&error.to_string()));
    }
    trailers
}

fn put_error_headers<'a>(
    rsp: &'a mut Response<Body>,
    error: &Error,
    detail: ErrorDetail,
    connection: &ConnectionInfo,
) -> &'a mut HeaderMap {
    let headers = rsp.headers_mut();
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static("0"));
    if detail == ErrorDetail::Include {
        headers.insert(names::L5D_PROXY_ERROR, header_text(&error.to_string()));
        let target = error
            .failed_addr()
            .map_or_else(|| connection.target.clone(), Addr::Socket);
        let ConnectionInfo {
            direction,
            proxy_identity: hop,
            ..
        } = connection;
        let cause = format!(
            "{}; direction={direction}; hop={hop}; target={target}",
            error.cause_header()
        );
        headers.insert(names::L5D_PROXY_CAUSE, header_text(&cause));
    }
    headers
}

/// The printable ASCII characters of a message, as a header value.
fn header_text(message: &str) -> HeaderValue {
    let printable: String = message.chars().filter(|c| (' '..='~').contains(c)).collect();
    HeaderValue::from_str(&printable).unwrap_or(HeaderValue::from_static("error"))
}

/// The value of `grpc-message`: percent-encoded, as clients decode it (gRPC over HTTP/2, "Responses").
fn grpc_message(message: &str) -> HeaderValue {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    HeaderValue::from_str(&encoded).unwrap_or(HeaderValue::from_static("error"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grpc_message_is_percent_encoded() {
        for (message, encoded) in [
            ("no endpoints", "no endpoints"),
            ("50% of a\nline", "50%25 of a%0Aline"),
            ("Zähler", "Z%C3%A4hler"),
        ] {
            assert_eq!(grpc_message(message), encoded);
        }
    }

    fn connection() -> ConnectionInfo {
        ConnectionInfo {
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
            ErrorFormat::from_request(&req),
            ErrorDetail::Include,
            &connection(),
        );
        assert_eq!(
            (rsp.status(), &rsp.headers()["grpc-status"]),
            (StatusCode::OK, &HeaderValue::from(14))
        );
        let expected_cause = "overload; direction=outbound; hop=web.shop; target=10.0.0.1:80";
        assert_eq!(rsp.headers()["l5d-proxy-cause"], expected_cause);
    }

    #[test]
    fn the_connection_of_an_http1_client_closes_after_some_errors() {
        let closing = Error::InvalidRequest("not HTTP");
        assert!(closing.status().closes_connection);
        for (version, closes) in [(Version::HTTP_11, true), (Version::HTTP_2, false)] {
            let mut req = Request::new(Body::empty());
            *req.version_mut() = version;
            let rsp = error_response(
                &closing,
                ErrorFormat::from_request(&req),
                ErrorDetail::Omit,
                &connection(),
            );
            let is_closing = rsp.extensions().get::<CloseAfterResponse>().is_some();
            assert_eq!(is_closing, closes, "{version:?}");
        }
    }

    #[test]
    fn unmeshed_clients_get_no_error_detail() {
        let req = Request::get("/").body(Body::empty()).unwrap();
        let denied = Error::Unauthorized {
            rule: "Server/x".into(),
            why: "no-tls",
        };
        let rsp = error_response(
            &denied,
            ErrorFormat::from_request(&req),
            ErrorDetail::Omit,
            &connection(),
        );
        assert_eq!(rsp.status(), StatusCode::FORBIDDEN);
        assert!(!rsp.headers().contains_key("l5d-proxy-error"));
        assert!(!rsp.headers().contains_key("l5d-proxy-cause"));
        assert!(rsp.extensions().get::<CloseAfterResponse>().is_none());
        let trailers = grpc_error_trailers(&denied, ErrorDetail::Omit);
        assert_eq!(trailers["grpc-status"], HeaderValue::from(7));
        assert!(!trailers.contains_key("grpc-message"));
        assert!(grpc_error_trailers(&denied, ErrorDetail::Include).contains_key("grpc-message"));
        let rsp = error_response(
            &denied,
            ErrorFormat::from_request(&req),
            ErrorDetail::Include,
            &connection(),
        );
        let expected_cause = "policy-denied:Server/x; why=no-tls; direction=outbound; hop=web.shop; target=10.0.0.1:80";
        assert_eq!(rsp.headers()["l5d-proxy-cause"], expected_cause);
    }
}
