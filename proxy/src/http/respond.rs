//! Errors as responses: HTTP, or gRPC where the client speaks it.

use std::{net::SocketAddr, sync::Arc};

use http::{
    HeaderMap, Request, Response, StatusCode, Version,
    header::{self, HeaderName, HeaderValue},
};
use tulle_core::{addr::Addr, metrics::Labels, names::header as names};

use crate::http::{body::Body, classify::GRPC_STATUS, error::Error, headers};

const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// What must be known of a request to answer it with an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asker {
    version: Version,
    grpc: bool,
}

/// Whether responses of ours say why: towards our own application, or to a peer with an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reasons {
    Told,
    Kept,
}

impl Asker {
    /// Whoever sent an HTTP/1 head that could not be read.
    pub(crate) fn unknown() -> Self {
        Self {
            version: Version::HTTP_11,
            grpc: false,
        }
    }

    pub(crate) fn of(req: &Request<Body>) -> Self {
        Self {
            version: req.version(),
            grpc: headers::is_grpc(req.version(), req.headers()),
        }
    }
}

/// Where a proxy stands that answers, and between whom.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) direction: &'static str,
    /// Our identity.
    pub(crate) hop: Arc<str>,
    /// What the client wants to reach.
    pub(crate) target: Addr,
    pub(crate) client: SocketAddr,
    /// Whom the client has proven to be.
    pub(crate) client_id: Option<HeaderValue>,
    /// What errors are counted by here, where it is more than their kind.
    pub(crate) labelled: Option<Arc<dyn Labelled>>,
}

/// Knows what the errors of its requests are counted by.
pub(crate) trait Labelled: Send + Sync {
    /// All labels but that of the kind; `None` for an error that has a family of its own.
    fn labels(&self, error: &Error) -> Option<Labels>;
}

/// The response that an error becomes.
pub(crate) fn error(error: &Error, asker: Asker, reasons: Reasons, place: &Place) -> Response<Body> {
    let answer = error.answer();
    let mut rsp = Response::new(Body::empty());
    let told = headers_of(&mut rsp, error, reasons, place);
    if asker.grpc {
        told.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        told.insert(GRPC_STATUS, HeaderValue::from(answer.grpc));
        if reasons == Reasons::Told || matches!(error, Error::InjectedGrpc { .. }) {
            told.insert(GRPC_MESSAGE, text(&error.to_string()));
        }
        *rsp.status_mut() = StatusCode::OK;
    } else {
        if let Error::Redirect { location, .. } = error {
            told.insert(header::LOCATION, location.clone());
        }
        *rsp.status_mut() = answer.status;
    }
    if answer.close {
        if asker.version <= Version::HTTP_11 {
            rsp.headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if reasons == Reasons::Told {
            rsp.headers_mut()
                .insert(names::L5D_PROXY_CONNECTION, HeaderValue::from_static("close"));
        }
    }
    rsp
}

/// The end of a gRPC response that has begun.
pub(crate) fn trailers(error: &Error) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    trailers.insert(GRPC_STATUS, HeaderValue::from(error.answer().grpc));
    trailers.insert(GRPC_MESSAGE, text(&error.to_string()));
    trailers
}

fn headers_of<'a>(rsp: &'a mut Response<Body>, error: &Error, reasons: Reasons, place: &Place) -> &'a mut HeaderMap {
    let told = rsp.headers_mut();
    told.insert(header::CONTENT_LENGTH, HeaderValue::from_static("0"));
    if reasons == Reasons::Told {
        told.insert(names::L5D_PROXY_ERROR, text(&error.to_string()));
        let target = error.target().map_or_else(|| place.target.clone(), Addr::Socket);
        let Place { direction, hop, .. } = place;
        let cause = format!("{}; direction={direction}; hop={hop}; target={target}", error.told());
        told.insert(names::L5D_PROXY_CAUSE, text(&cause));
    }
    told
}

/// A message as a header value; what headers cannot carry is left out.
fn text(message: &str) -> HeaderValue {
    let printable: String = message.chars().filter(|c| (' '..='~').contains(c)).collect();
    HeaderValue::from_str(&printable).unwrap_or(HeaderValue::from_static("error"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> Place {
        Place {
            direction: "outbound",
            hop: "web.shop".into(),
            target: Addr::Socket(([10, 0, 0, 1], 80).into()),
            client: ([10, 0, 0, 2], 4321).into(),
            client_id: None,
            labelled: None,
        }
    }

    #[test]
    fn grpc_clients_get_a_grpc_status() {
        let req = Request::post("http://x/s/m")
            .version(Version::HTTP_2)
            .header("content-type", "application/grpc+proto")
            .body(Body::empty())
            .unwrap();
        let rsp = error(&Error::Shed, Asker::of(&req), Reasons::Told, &place());
        assert_eq!(
            (rsp.status(), &rsp.headers()["grpc-status"]),
            (StatusCode::OK, &HeaderValue::from(14))
        );
        let told = "overload; direction=outbound; hop=web.shop; target=10.0.0.1:80";
        assert_eq!(rsp.headers()["l5d-proxy-cause"], told);
    }

    #[test]
    fn strangers_are_told_no_reasons() {
        let req = Request::get("/").body(Body::empty()).unwrap();
        let denied = Error::Unauthorized {
            rule: "Server/x".into(),
            why: "no-tls",
        };
        let rsp = error(&denied, Asker::of(&req), Reasons::Kept, &place());
        assert_eq!(rsp.status(), StatusCode::FORBIDDEN);
        assert!(!rsp.headers().contains_key("l5d-proxy-error"));
        assert!(!rsp.headers().contains_key("l5d-proxy-cause"));
        assert!(!rsp.headers().contains_key("connection"));
        let rsp = error(&denied, Asker::of(&req), Reasons::Told, &place());
        let told = "policy-denied:Server/x; why=no-tls; direction=outbound; hop=web.shop; target=10.0.0.1:80";
        assert_eq!(rsp.headers()["l5d-proxy-cause"], told);
    }
}
