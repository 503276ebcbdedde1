//! WebSocket handshakes in HTTP/1, and extended CONNECT in HTTP/2 between proxies (RFC 8441, section 5).
//!
//! The outbound proxy removes the client's key and computes its accept value. The inbound proxy creates a new key for the
//! application.

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use h2::ext::Protocol;
use http::{
    HeaderMap, HeaderName, Method, Request, Response, StatusCode, Version,
    header::{self, HeaderValue},
};
use http_body::Body as _;
use tulle_core::names::header::L5D_ORIG_PROTO;

use crate::http::{body::Body, error::Error, headers};

pub(crate) const WEBSOCKET: &str = "websocket";
/// Source: RFC 6455, section 1.3.
const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Whether an HTTP/1 request is a WebSocket handshake that an extended CONNECT request can replace without loss.
pub(crate) fn can_use_extended_connect(req: &Request<Body>) -> bool {
    let upgrades_to_websocket =
        single_header(req, &header::UPGRADE).is_some_and(|to| to.as_bytes().eq_ignore_ascii_case(WEBSOCKET.as_bytes()));
    // Applications refuse an invalid key, but extended CONNECT does not forward the key.
    let has_valid_key = || {
        single_header(req, &header::SEC_WEBSOCKET_KEY)
            .is_some_and(|key| BASE64_STANDARD.decode(key.as_bytes()).is_ok_and(|key| key.len() == 16))
    };
    let has_connection_upgrade = || {
        let lines = req.headers().get_all(header::CONNECTION).iter();
        let mut names = lines.flat_map(|line| line.as_bytes().split(|b| *b == b','));
        names.any(|name| name.trim_ascii().eq_ignore_ascii_case(b"upgrade"))
    };
    *req.method() == Method::GET
        && req.version() == Version::HTTP_11
        && req.body().is_end_stream()
        && upgrades_to_websocket
        && has_valid_key()
        && has_connection_upgrade()
}

/// The value of a header that occurs exactly once.
fn single_header<'a>(req: &'a Request<Body>, name: &HeaderName) -> Option<&'a HeaderValue> {
    let mut all = req.headers().get_all(name).iter();
    all.next().filter(|_| all.next().is_none())
}

/// Turns `rsp` into the HTTP/1 response (101) to the handshake `req`.
pub(crate) fn set_handshake_response(req: &Request<Body>, rsp: &mut Response<Body>) {
    set_upgrade_headers(rsp.headers_mut());
    if let Some(key) = req.headers().get(header::SEC_WEBSOCKET_KEY) {
        rsp.headers_mut()
            .insert(header::SEC_WEBSOCKET_ACCEPT, accept_value(key));
    }
    *rsp.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *rsp.version_mut() = Version::HTTP_11;
}

/// Whether an HTTP/2 request is an extended CONNECT from a peer's proxy.
pub(crate) fn is_extended_connect_from_proxy(req: &Request<Body>) -> bool {
    *req.method() == Method::CONNECT
        && headers::get(req.headers(), &L5D_ORIG_PROTO).is_some()
        && req.extensions().get::<Protocol>().is_some()
}

/// Turns an extended CONNECT into an HTTP/1 handshake with a new key. Returns the expected `sec-websocket-accept`.
pub(crate) fn to_http1_handshake(req: &mut Request<Body>) -> HeaderValue {
    *req.method_mut() = Method::GET;
    set_upgrade_headers(req.headers_mut());
    let key = base64_header(&fastrand::u128(..).to_ne_bytes());
    let websocket_accept = accept_value(&key);
    req.headers_mut().insert(header::SEC_WEBSOCKET_KEY, key);
    websocket_accept
}

/// Turns the application's 101 response into the HTTP/2 response (200) to the peer's proxy.
///
/// # Errors
/// `upgrade` is not `websocket`, or `sec-websocket-accept` is not the expected value.
pub(crate) fn to_http2_response(rsp: &mut Response<Body>, websocket_accept: &HeaderValue) -> Result<(), Error> {
    let headers = rsp.headers_mut();
    let protocol = headers.get(header::UPGRADE).map_or(&b""[..], HeaderValue::as_bytes);
    if !protocol.eq_ignore_ascii_case(WEBSOCKET.as_bytes())
        || headers.get(header::SEC_WEBSOCKET_ACCEPT) != Some(websocket_accept)
    {
        return Err(Error::InvalidResponse(
            "the server did not switch to the requested WebSocket",
        ));
    }
    headers::strip_hop_by_hop(headers);
    for name in [header::SEC_WEBSOCKET_ACCEPT, header::CONTENT_LENGTH, L5D_ORIG_PROTO] {
        headers.remove(name);
    }
    *rsp.status_mut() = StatusCode::OK;
    *rsp.version_mut() = Version::HTTP_2;
    Ok(())
}

/// Whether an HTTP/2 response accepts an extended CONNECT. If the application did not switch protocols, its response has
/// `l5d-orig-proto`.
pub(crate) fn is_tunnel_response<B>(rsp: &Response<B>) -> bool {
    let headers = rsp.headers();
    // An error response of a proxy has a content-length; an accepted stream has none.
    rsp.status().is_success() && !headers.contains_key(L5D_ORIG_PROTO) && !headers.contains_key(header::CONTENT_LENGTH)
}

fn set_upgrade_headers(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(WEBSOCKET));
}

/// The `sec-websocket-accept` value for a key (RFC 6455, section 4.2.2).
fn accept_value(key: &HeaderValue) -> HeaderValue {
    base64_header(digest(&SHA1_FOR_LEGACY_USE_ONLY, &[key.as_bytes(), GUID].concat()).as_ref())
}

fn base64_header(bytes: &[u8]) -> HeaderValue {
    HeaderValue::try_from(BASE64_STANDARD.encode(bytes)).expect("base64 text is a valid header value")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::upgrade::http1_over_http2::{self, to_extended_connect};

    fn request(lines: &[(&str, &str)]) -> Request<Body> {
        let req = Request::get("/chat?a=b").header("host", "web.test");
        let req = lines.iter().fold(req, |req, (name, value)| req.header(*name, *value));
        req.body(Body::empty()).unwrap()
    }

    const KEY: (&str, &str) = ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");

    #[test]
    fn only_valid_websocket_handshakes_use_extended_connect() {
        let (connection, upgrade) = (("connection", "keep-alive, Upgrade"), ("upgrade", "WebSocket"));
        assert!(can_use_extended_connect(&request(&[connection, upgrade, KEY])));
        for lines in [
            vec![connection, upgrade],
            vec![connection, KEY],
            vec![upgrade, KEY],
            vec![connection, upgrade, KEY, KEY],
            vec![connection, upgrade, ("sec-websocket-key", "c2hvcnQ=")],
            vec![connection, ("upgrade", "websocket, other"), KEY],
            vec![connection, upgrade, ("upgrade", "other"), KEY],
        ] {
            assert!(!can_use_extended_connect(&request(&lines)), "{lines:?}");
        }
        let mut post = request(&[connection, upgrade, KEY]);
        *post.method_mut() = Method::POST;
        assert!(!can_use_extended_connect(&post));
        let with_body = request(&[connection, upgrade, KEY]).map(|_| Body::full("a body"));
        assert!(!can_use_extended_connect(&with_body));
    }

    #[test]
    fn a_restored_handshake_has_a_new_key() {
        let end_to_end = [
            ("sec-websocket-protocol", "chat"),
            ("sec-websocket-version", "13"),
            ("x-a", "1"),
        ];
        let hop_by_hop = [
            ("connection", "upgrade, x-b"),
            ("x-b", "2"),
            ("upgrade", "websocket"),
            KEY,
            ("content-length", "0"),
        ];
        let req = request(&[&end_to_end[..], &hop_by_hop].concat());
        let mut connect = to_extended_connect(&req).unwrap();
        assert!(is_extended_connect_from_proxy(&connect));
        assert_eq!(connect.uri(), "http://web.test/chat?a=b");
        let mut names: Vec<_> = connect.headers().keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        let expected = [
            "l5d-orig-proto",
            "sec-websocket-protocol",
            "sec-websocket-version",
            "x-a",
        ];
        assert_eq!(names, expected);
        let restored = http1_over_http2::request_to_http1(&mut connect).unwrap();
        assert!(restored.is_some() && can_use_extended_connect(&connect));
        assert_eq!(
            (connect.uri(), &connect.headers()["host"]),
            (req.uri(), &req.headers()["host"])
        );
        assert_ne!(connect.headers()[KEY.0], req.headers()[KEY.0]);
    }

    #[test]
    fn each_side_gets_the_accept_value_of_its_own_key() {
        let mut rsp = Response::new(Body::empty());
        set_handshake_response(&request(&[KEY]), &mut rsp);
        assert_eq!(rsp.status(), 101);
        // Source: RFC 6455, section 1.3.
        assert_eq!(rsp.headers()["sec-websocket-accept"], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert!(to_http2_response(&mut rsp, &HeaderValue::from_static("other")).is_err());
        let websocket_accept = rsp.headers()["sec-websocket-accept"].clone();
        to_http2_response(&mut rsp, &websocket_accept).unwrap();
        assert!(rsp.headers().is_empty() && is_tunnel_response(&rsp), "{rsp:?}");
    }
}
