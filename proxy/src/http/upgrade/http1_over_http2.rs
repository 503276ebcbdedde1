//! HTTP/1 requests over HTTP/2 between proxies: the outbound proxy upgrades them, the inbound proxy restores them.

use std::cell::RefCell;

use h2::ext::Protocol;
use http::{
    HeaderMap, Method, Request, Response, StatusCode, Uri, Version,
    header::{self, HeaderValue},
    uri::{Authority, PathAndQuery, Scheme},
};
use tulle_core::names::header::L5D_ORIG_PROTO;

use crate::http::{body::Body, error::Error, headers, upgrade::websocket};

const HTTP_11: &str = "HTTP/1.1";
const HTTP_10: &str = "HTTP/1.0";
const ABSOLUTE_FORM: &str = "; absolute-form";

/// The properties of a restored HTTP/1 request that are needed to convert its response.
pub(crate) struct RestoredRequest {
    version: Version,
    /// The expected `sec-websocket-accept`, for a WebSocket handshake.
    websocket_accept: Option<HeaderValue>,
}

/// Turns an HTTP/1 request into an HTTP/2 request.
///
/// # Errors
/// The request has no valid host, which HTTP/2 requires.
pub(crate) fn request_to_http2(req: &mut Request<Body>) -> Result<(), Error> {
    let orig_proto = match (req.version() == Version::HTTP_10, req.uri().scheme().is_some()) {
        (false, false) => HTTP_11,
        (false, true) => "HTTP/1.1; absolute-form",
        (true, false) => HTTP_10,
        (true, true) => "HTTP/1.0; absolute-form",
    };
    set_absolute_form(req)?;
    let headers = req.headers_mut();
    headers.insert(L5D_ORIG_PROTO, HeaderValue::from_static(orig_proto));
    headers.remove(header::HOST);
    remove_transfer_encoding(headers);
    *req.version_mut() = Version::HTTP_2;
    Ok(())
}

/// The extended CONNECT request that carries the WebSocket handshake `req` over HTTP/2 (RFC 8441).
///
/// # Errors
/// The request has no valid host.
pub(crate) fn to_extended_connect(req: &Request<Body>) -> Result<Request<Body>, Error> {
    let mut connect = Request::new(Body::empty());
    *connect.uri_mut() = req.uri().clone();
    let headers = connect.headers_mut();
    *headers = req.headers().clone();
    headers::strip_hop_by_hop(headers);
    // A WebSocket stream has no length.
    for name in [header::SEC_WEBSOCKET_KEY, header::CONTENT_LENGTH] {
        headers.remove(name);
    }
    request_to_http2(&mut connect)?;
    *connect.method_mut() = Method::CONNECT;
    connect
        .extensions_mut()
        .insert(Protocol::from_static(websocket::WEBSOCKET));
    Ok(connect)
}

/// Adds the scheme and the authority to the target, as HTTP/2 requires.
///
/// # Errors
/// The request has no valid host.
pub(crate) fn set_absolute_form(req: &mut Request<Body>) -> Result<(), Error> {
    if req.uri().scheme().is_some() && req.uri().authority().is_some() {
        return Ok(());
    }
    let authority = match req.uri().authority() {
        Some(authority) => authority.clone(),
        None => {
            let host = req
                .headers()
                .get(header::HOST)
                .ok_or(Error::InvalidRequest("the request has no host"))?;
            parse_authority(host).ok_or(Error::InvalidRequest("the host is not a valid authority"))?
        }
    };
    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(Scheme::HTTP);
    parts.authority = Some(authority);
    parts.path_and_query = Some(
        req.uri()
            .path_and_query()
            .cloned()
            .unwrap_or_else(|| PathAndQuery::from_static("/")),
    );
    *req.uri_mut() = Uri::from_parts(parts).map_err(|_| Error::InvalidRequest("the request target is invalid"))?;
    Ok(())
}

/// Restores an HTTP/1 request that a peer's proxy upgraded. Returns `None` for a request that the client sent with HTTP/2.
///
/// # Errors
/// `l5d-orig-proto` has an unknown value, or the extended CONNECT protocol is not WebSocket.
pub(crate) fn request_to_http1(req: &mut Request<Body>) -> Result<Option<RestoredRequest>, Error> {
    let Some(orig_proto) = req.headers_mut().remove(L5D_ORIG_PROTO) else {
        return Ok(None);
    };
    if req.version() != Version::HTTP_2 {
        return Ok(None); // proxies set the header in HTTP/2 only
    }
    let orig_proto = orig_proto.to_str().unwrap_or_default();
    let (version, absolute) = match orig_proto.strip_suffix(ABSOLUTE_FORM) {
        Some(version) => (version, true),
        None => (orig_proto, false),
    };
    let version = match version {
        HTTP_11 => Version::HTTP_11,
        HTTP_10 => Version::HTTP_10,
        _ => return Err(Error::InvalidRequest("the value of l5d-orig-proto is unknown")),
    };
    *req.version_mut() = version;
    if absolute {
        insert_host(req);
    } else {
        set_origin_form(req);
    }
    let mut websocket_accept = None;
    if *req.method() == Method::CONNECT
        && let Some(protocol) = req.extensions_mut().remove::<Protocol>()
    {
        if protocol.as_str() != websocket::WEBSOCKET {
            return Err(Error::InvalidRequest("the :protocol is not websocket"));
        }
        websocket_accept = Some(websocket::to_http1_handshake(req));
    }
    Ok(Some(RestoredRequest {
        version,
        websocket_accept,
    }))
}

/// Moves the authority from the target to `Host`, as HTTP/1 servers expect.
pub(crate) fn set_origin_form(req: &mut Request<Body>) {
    insert_host(req);
    if let Some(path) = std::mem::take(req.uri_mut()).into_parts().path_and_query {
        *req.uri_mut() = Uri::from(path);
    }
}

/// Sets `Host` to the authority of the target, which has precedence. HTTP/1.1 requires `Host` also for an absolute target.
fn insert_host(req: &mut Request<Body>) {
    if let Some(host) = req.uri().authority().and_then(host_header) {
        req.headers_mut().insert(header::HOST, host);
    }
}

thread_local! {
    /// The last `host` value and its parsed authority, as a cache: consecutive requests of a thread usually have the same host.
    static LAST_HOST: RefCell<(HeaderValue, Option<Authority>)> = const { RefCell::new((HeaderValue::from_static(""), None)) };
}

fn parse_authority(host: &HeaderValue) -> Option<Authority> {
    LAST_HOST.with_borrow_mut(|(last_host, last_authority)| {
        if last_host != host {
            *last_authority = Authority::try_from(host.as_bytes()).ok();
            *last_host = host.clone();
        }
        last_authority.clone()
    })
}

fn host_header(authority: &Authority) -> Option<HeaderValue> {
    LAST_HOST.with_borrow_mut(|(last_host, last_authority)| {
        if last_host.as_bytes() != authority.as_str().as_bytes() {
            *last_host = HeaderValue::from_str(authority.as_str()).ok()?;
            *last_authority = Some(authority.clone());
        }
        Some(last_host.clone())
    })
}

/// Turns the response to a restored request into HTTP/2.
///
/// # Errors
/// The application switched to a protocol other than the requested WebSocket.
pub(crate) fn response_to_http2(rsp: &mut Response<Body>, restored: &RestoredRequest) -> Result<(), Error> {
    if rsp.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(expected) = &restored.websocket_accept
    {
        return websocket::to_http2_response(rsp, expected);
    }
    let orig_proto = if restored.version == Version::HTTP_10 {
        HTTP_10
    } else {
        HTTP_11
    };
    rsp.headers_mut()
        .insert(L5D_ORIG_PROTO, HeaderValue::from_static(orig_proto));
    remove_transfer_encoding(rsp.headers_mut());
    *rsp.version_mut() = Version::HTTP_2;
    Ok(())
}

/// Removes `transfer-encoding`, which HTTP/2 does not permit. The other headers that HTTP/2 does not permit (RFC 9113,
/// section 8.2.2) are hop-by-hop headers, which were removed before.
pub(crate) fn remove_transfer_encoding(headers: &mut HeaderMap) {
    if headers::get(headers, &header::TRANSFER_ENCODING).is_some() {
        headers.remove(header::TRANSFER_ENCODING);
    }
}

/// Turns the response to an upgraded request back into HTTP/1.
pub(crate) fn response_to_http1(rsp: &mut Response<Body>) {
    rsp.headers_mut().remove(L5D_ORIG_PROTO);
    *rsp.version_mut() = Version::HTTP_11;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upgraded_request_is_restored_unchanged() {
        for (uri, host, version) in [
            ("/a?b=c", "web:80", Version::HTTP_11),
            ("http://web/a", "web", Version::HTTP_11),
            ("/", "web", Version::HTTP_10),
            ("http://web/", "web", Version::HTTP_10),
        ] {
            let original = || {
                Request::post(uri)
                    .version(version)
                    .header("host", host)
                    .body(Body::empty())
                    .unwrap()
            };
            let mut req = original();
            request_to_http2(&mut req).unwrap();
            assert_eq!(req.version(), Version::HTTP_2);
            assert_eq!(req.uri().authority().unwrap(), host);
            let restored = request_to_http1(&mut req).unwrap().map(|restored| restored.version);
            assert_eq!(restored, Some(version));
            assert_eq!((req.uri(), req.version()), (original().uri(), version));
            assert_eq!(req.headers()["host"], host);
        }
    }

    #[test]
    fn the_target_authority_replaces_the_host_header() {
        for orig_proto in [HTTP_11, "HTTP/1.1; absolute-form"] {
            let req = Request::get("http://allowed/").version(Version::HTTP_2);
            let req = req.header("host", "denied").header(L5D_ORIG_PROTO, orig_proto);
            let mut req = req.body(Body::empty()).unwrap();
            request_to_http1(&mut req).unwrap();
            assert_eq!(req.headers()["host"], "allowed", "{orig_proto}");
        }
    }

    #[test]
    fn a_request_without_an_authority_is_refused() {
        assert!(request_to_http2(&mut Request::get("/").body(Body::empty()).unwrap()).is_err());
    }
}
