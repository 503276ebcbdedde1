//! HTTP/1 carried over HTTP/2 between proxies: the outbound side upgrades, the inbound side restores.

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

/// The HTTP/1 request that an HTTP/2 request stands for.
pub(crate) struct RestoredRequest {
    version: Version,
    /// What the answer has to prove, if it asks for a WebSocket.
    websocket_accept: Option<HeaderValue>,
}

/// Turns an HTTP/1 request into the HTTP/2 request that stands for it.
///
/// # Errors
/// It addresses nobody, so HTTP/2 cannot express it.
pub(crate) fn upgrade(req: &mut Request<Body>) -> Result<(), Error> {
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
    strip_for_http2(headers);
    *req.version_mut() = Version::HTTP_2;
    Ok(())
}

/// The request that stands for `req` in HTTP/2, which stays as it is.
///
/// # Errors
/// It addresses nobody.
pub(crate) fn to_extended_connect(req: &Request<Body>) -> Result<Request<Body>, Error> {
    let mut carried = Request::new(Body::empty());
    *carried.uri_mut() = req.uri().clone();
    let headers = carried.headers_mut();
    *headers = req.headers().clone();
    headers::strip_hop_by_hop(headers);
    // A stream has no length.
    for name in [header::SEC_WEBSOCKET_KEY, header::CONTENT_LENGTH] {
        headers.remove(name);
    }
    upgrade(&mut carried)?;
    *carried.method_mut() = Method::CONNECT;
    carried
        .extensions_mut()
        .insert(Protocol::from_static(websocket::WEBSOCKET));
    Ok(carried)
}

/// Puts scheme and authority, which HTTP/2 wants, into the target.
///
/// # Errors
/// The request addresses nobody.
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
                .ok_or(Error::InvalidRequest("it names no host"))?;
            authority_of(host).ok_or(Error::InvalidRequest("its host is not an authority"))?
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
    *req.uri_mut() = Uri::from_parts(parts).map_err(|_| Error::InvalidRequest("its target"))?;
    Ok(())
}

/// Makes a request HTTP/1 again that was; `None` for real HTTP/2.
///
/// # Errors
/// The mark is none that a proxy sends, or is on what a proxy does not send.
pub(crate) fn restore(req: &mut Request<Body>) -> Result<Option<RestoredRequest>, Error> {
    let Some(orig_proto) = req.headers_mut().remove(L5D_ORIG_PROTO) else {
        return Ok(None);
    };
    if req.version() != Version::HTTP_2 {
        return Ok(None); // only proxies upgrade, and they speak HTTP/2 then
    }
    let orig_proto = orig_proto.to_str().unwrap_or_default();
    let (version, absolute) = match orig_proto.strip_suffix(ABSOLUTE_FORM) {
        Some(version) => (version, true),
        None => (orig_proto, false),
    };
    let version = match version {
        HTTP_11 => Version::HTTP_11,
        HTTP_10 => Version::HTTP_10,
        _ => return Err(Error::InvalidRequest("its l5d-orig-proto is unknown")),
    };
    *req.version_mut() = version;
    if absolute {
        insert_host(req);
    } else {
        set_origin_form(req);
    }
    let mut proof = None;
    if *req.method() == Method::CONNECT
        && let Some(protocol) = req.extensions_mut().remove::<Protocol>()
    {
        if protocol.as_str() != websocket::WEBSOCKET {
            return Err(Error::InvalidRequest("its :protocol is not websocket"));
        }
        proof = Some(websocket::to_http1_handshake(req));
    }
    Ok(Some(RestoredRequest {
        version,
        websocket_accept: proof,
    }))
}

/// Moves the authority from the target to `Host`, as HTTP/1 servers expect it.
pub(crate) fn set_origin_form(req: &mut Request<Body>) {
    insert_host(req);
    if let Some(path) = std::mem::take(req.uri_mut()).into_parts().path_and_query {
        *req.uri_mut() = Uri::from(path);
    }
}

/// HTTP/1.1 wants a `Host` even where the target has an authority, which counts: nobody should see another.
fn insert_host(req: &mut Request<Body>) {
    if let Some(host) = req.uri().authority().and_then(host_of) {
        req.headers_mut().insert(header::HOST, host);
    }
}

thread_local! {
    /// A `host` and the authority that it is; requests of one thread mostly have the same.
    static LAST: RefCell<(HeaderValue, Option<Authority>)> = const { RefCell::new((HeaderValue::from_static(""), None)) };
}

fn authority_of(host: &HeaderValue) -> Option<Authority> {
    LAST.with_borrow_mut(|(known, authority)| {
        if known != host {
            *authority = Authority::try_from(host.as_bytes()).ok();
            *known = host.clone();
        }
        authority.clone()
    })
}

fn host_of(authority: &Authority) -> Option<HeaderValue> {
    LAST.with_borrow_mut(|(host, known)| {
        if host.as_bytes() != authority.as_str().as_bytes() {
            *host = HeaderValue::from_str(authority.as_str()).ok()?;
            *known = Some(authority.clone());
        }
        Some(host.clone())
    })
}

/// Marks the response to a restored request and removes what HTTP/2 must not carry.
///
/// # Errors
/// The application has switched to another protocol than it was asked to.
pub(crate) fn encode_response(rsp: &mut Response<Body>, restored: &RestoredRequest) -> Result<(), Error> {
    if rsp.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(proof) = &restored.websocket_accept
    {
        return websocket::to_http2_response(rsp, proof);
    }
    let orig_proto = if restored.version == Version::HTTP_10 {
        HTTP_10
    } else {
        HTTP_11
    };
    rsp.headers_mut()
        .insert(L5D_ORIG_PROTO, HeaderValue::from_static(orig_proto));
    strip_for_http2(rsp.headers_mut());
    *rsp.version_mut() = Version::HTTP_2;
    Ok(())
}

/// Removes headers that are not allowed in HTTP/2.
pub(crate) fn strip_for_http2(headers: &mut HeaderMap) {
    if headers::get(headers, &header::TRANSFER_ENCODING).is_some() {
        headers.remove(header::TRANSFER_ENCODING);
    }
}

/// Turns the response to an upgraded request back into HTTP/1.
pub(crate) fn downgrade(rsp: &mut Response<Body>) {
    rsp.headers_mut().remove(L5D_ORIG_PROTO);
    *rsp.version_mut() = Version::HTTP_11;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_upgraded_is_restored() {
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
            upgrade(&mut req).unwrap();
            assert_eq!(req.version(), Version::HTTP_2);
            assert_eq!(req.uri().authority().unwrap(), host);
            let restored = restore(&mut req).unwrap().map(|restored| restored.version);
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
            restore(&mut req).unwrap();
            assert_eq!(req.headers()["host"], "allowed", "{orig_proto}");
        }
    }

    #[test]
    fn a_request_without_an_authority_is_refused() {
        assert!(upgrade(&mut Request::get("/").body(Body::empty()).unwrap()).is_err());
    }
}
