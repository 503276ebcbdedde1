//! Header hygiene: what concerns one hop only, who is addressed, and what proxies tell each other.

use http::{
    HeaderMap, HeaderName, Method, Request, Version,
    header::{self, HeaderValue},
};
use tulle_core::names::header as names;

use crate::http::{body::Body, error::Error};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Removes what concerns only the connection a message came on.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if let Some(listed) = headers.remove(header::CONNECTION) {
        for name in listed.as_bytes().split(|b| *b == b',') {
            if let Ok(name) = HeaderName::from_bytes(name.trim_ascii())
                && name != header::TE
            {
                headers.remove(name);
            }
        }
    }
    for name in [header::UPGRADE, KEEP_ALIVE, PROXY_CONNECTION] {
        if headers.contains_key(&name) {
            headers.remove(name);
        }
    }
}

/// Whether an HTTP/1.1 request asks for another protocol. An upgrade to cleartext HTTP/2 is not one: it is answered
/// as HTTP/1.1, which every client accepts.
pub(crate) fn wants_upgrade(req: &Request<Body>) -> bool {
    if req.version() != Version::HTTP_11 {
        return false;
    }
    *req.method() == Method::CONNECT
        || req
            .headers()
            .get(header::UPGRADE)
            .is_some_and(|to| !to.as_bytes().eq_ignore_ascii_case(b"h2c"))
}

/// Refuses requests whose target does not fit their method.
pub(crate) fn check_target(req: &Request<Body>) -> Result<(), Error> {
    let uri = req.uri();
    let authority_form = uri.scheme().is_none() && uri.authority().is_some() && uri.path_and_query().is_none();
    match (*req.method() == Method::CONNECT, req.version()) {
        (true, Version::HTTP_11) if !authority_form => {
            Err(Error::BadRequest("the target of CONNECT is not an authority"))
        }
        (true, Version::HTTP_10) => Err(Error::BadRequest("CONNECT needs HTTP/1.1")),
        (false, Version::HTTP_10 | Version::HTTP_11) if authority_form => {
            Err(Error::BadRequest("only CONNECT has an authority for a target"))
        }
        _ => Ok(()),
    }
}

/// Whether the request speaks gRPC.
pub(crate) fn is_grpc(version: Version, headers: &HeaderMap) -> bool {
    version == Version::HTTP_2
        && headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// Removes what only a peer's proxy may tell us from a response; returns its reasons for the log and for retries.
pub(crate) fn strip_proxy_headers(headers: &mut HeaderMap) -> ProxyWords {
    let mut words = ProxyWords::default();
    if headers.contains_key(names::L5D_PROXY_ERROR) {
        words.error = headers.remove(names::L5D_PROXY_ERROR);
    }
    if headers.contains_key(names::L5D_PROXY_CONNECTION) {
        words.close = headers
            .remove(names::L5D_PROXY_CONNECTION)
            .is_some_and(|value| value == "close");
    }
    words
}

/// What a peer's proxy said with a response.
#[derive(Debug, Default)]
pub(crate) struct ProxyWords {
    pub(crate) error: Option<HeaderValue>,
    pub(crate) close: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(k, v)| (HeaderName::from_static(k), HeaderValue::from_static(v)))
            .collect()
    }

    #[test]
    fn headers_of_one_hop_stay_there() {
        let mut given = headers(&[
            ("connection", "x-hop, keep-alive"),
            ("x-hop", "1"),
            ("keep-alive", "5"),
            ("proxy-connection", "close"),
            ("upgrade", "h2c"),
            ("x-end", "2"),
        ]);
        strip_hop_by_hop(&mut given);
        assert_eq!(given, headers(&[("x-end", "2")]));
    }

    #[test]
    fn only_real_upgrades_count() {
        let req = |upgrade: &str| {
            Request::get("/")
                .header("upgrade", upgrade)
                .body(Body::empty())
                .unwrap()
        };
        assert!(wants_upgrade(&req("websocket")));
        assert!(!wants_upgrade(&req("h2c")));
        assert!(!wants_upgrade(&Request::get("/").body(Body::empty()).unwrap()));
    }

    #[test]
    fn targets_fit_their_methods() {
        let req = |method: Method, uri: &str| Request::builder().method(method).uri(uri).body(Body::empty()).unwrap();
        for (req, fits) in [
            (req(Method::GET, "/a"), true),
            (req(Method::GET, "http://x/a"), true),
            (req(Method::GET, "x:80"), false),
            (req(Method::CONNECT, "x:80"), true),
            (req(Method::CONNECT, "/a"), false),
            (req(Method::OPTIONS, "*"), true),
        ] {
            assert_eq!(check_target(&req).is_ok(), fits, "{req:?}");
        }
    }
}
