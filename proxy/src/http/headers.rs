//! Header rules: hop-by-hop headers, the authority of a request, and the `l5d-*` headers between proxies.

use std::time::{Duration, SystemTime};

use http::{
    HeaderMap, HeaderName, Method, Request, StatusCode, Uri, Version,
    header::{self, HeaderValue},
    uri::{Authority, Scheme},
};
use tulle_core::names::header as names;

use crate::http::error::Error;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const TRAILERS: &[u8] = b"trailers";
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// The first value of a header. Messages have few headers, so a scan is faster than a hash lookup.
pub(crate) fn get<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    headers
        .iter()
        .find_map(|(other, value)| (other == name).then_some(value))
}

/// The authority of a request, from its target or its `host` header.
pub(crate) fn authority<B>(req: &Request<B>) -> Option<Authority> {
    let from_host = || req.headers().get(header::HOST)?.to_str().ok()?.parse().ok();
    req.uri().authority().cloned().or_else(from_host)
}

/// Which kinds of removable headers a message has. They are removed before the message is forwarded.
#[derive(Default)]
struct RemovableHeaders {
    /// Hop-by-hop headers (RFC 9110 §7.6.1).
    has_hop_by_hop: bool,
    /// `l5d-*` headers, some of which are removed.
    has_proxy_headers: bool,
    /// Underscore aliases of `l5d-*` headers, see [`is_underscore_alias`].
    has_underscore_names: bool,
}

impl RemovableHeaders {
    /// Scans all names once. Most messages have none of these headers, so a scan is faster than a lookup of each header.
    fn scan(headers: &HeaderMap) -> Self {
        let mut removable = Self::default();
        for name in headers.keys() {
            match name.as_str() {
                "connection" | "upgrade" | "keep-alive" | "proxy-connection" | "te" => removable.has_hop_by_hop = true,
                name if name.starts_with("l5d") => {
                    removable.has_proxy_headers |= name.starts_with("l5d-");
                    removable.has_underscore_names |= is_underscore_alias(name);
                }
                _ => {}
            }
        }
        removable
    }
}

/// Whether a name is an `l5d-*` header for applications that treat underscores as hyphens (CGI, WSGI).
fn is_underscore_alias(name: &str) -> bool {
    match name.as_bytes() {
        [b'l', b'5', b'd', b'_', ..] => true,
        [b'l', b'5', b'd', b'-', rest @ ..] => rest.contains(&b'_'),
        _ => false,
    }
}

/// Removes headers that an application could read as `l5d-*` headers, see [`is_underscore_alias`].
pub(crate) fn strip_underscore_aliases(headers: &mut HeaderMap) {
    // Quadratic, but almost no message has such a header.
    while let Some(name) = headers.keys().find(|name| is_underscore_alias(name.as_str())).cloned() {
        headers.remove(name);
    }
}

/// Removes the hop-by-hop headers (RFC 9110 §7.6.1).
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if RemovableHeaders::scan(headers).has_hop_by_hop {
        remove_hop_by_hop(headers);
    }
}

/// [`strip_hop_by_hop`] and [`strip_underscore_aliases`] with one scan, for inbound HTTP/1 requests that are not upgrades.
pub(crate) fn strip_from_inbound_request(headers: &mut HeaderMap) {
    let removable = RemovableHeaders::scan(headers);
    if removable.has_underscore_names {
        strip_underscore_aliases(headers);
    }
    if removable.has_hop_by_hop {
        remove_hop_by_hop(headers);
    }
}

/// [`strip_hop_by_hop`] and [`strip_proxy_headers`] with one scan, for responses of the application.
pub(crate) fn strip_from_app_response(headers: &mut HeaderMap) {
    let removable = RemovableHeaders::scan(headers);
    if removable.has_hop_by_hop {
        remove_hop_by_hop(headers);
    }
    if removable.has_proxy_headers {
        remove_proxy_headers(headers);
    }
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let lines: Vec<_> = headers.get_all(header::CONNECTION).iter().cloned().collect();
        headers.remove(header::CONNECTION);
        for name in lines.iter().flat_map(|line| line.as_bytes().split(|b| *b == b',')) {
            if let Ok(name) = HeaderName::from_bytes(name.trim_ascii())
                && !is_protected(&name)
            {
                headers.remove(name);
            }
        }
    }
    for name in [header::UPGRADE, KEEP_ALIVE, PROXY_CONNECTION] {
        headers.remove(name);
    }
    if headers.contains_key(header::TE) {
        // `trailers` is the only value that HTTP/2 permits (RFC 9113 §8.2.2); gRPC requires it.
        let trailers = |value: &HeaderValue| {
            value
                .as_bytes()
                .split(|b| *b == b',')
                .any(|v| v.trim_ascii() == TRAILERS)
        };
        if headers.get_all(header::TE).iter().any(trailers) {
            headers.insert(header::TE, HeaderValue::from_static("trailers"));
        } else {
            headers.remove(header::TE);
        }
    }
}

/// Whether this header is protected: a client cannot remove it by listing it in `connection`, and cannot send it as a trailer.
/// Protected are `host`, the framing headers, `te`, which [`strip_hop_by_hop`] reduces to `trailers`, and `l5d-*` headers.
fn is_protected(name: &HeaderName) -> bool {
    [
        header::HOST,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::TE,
    ]
    .contains(name)
        || name.as_str().starts_with("l5d-")
}

/// Whether a trailer is forwarded. Framing headers, hop-by-hop headers, `l5d-*` headers and their aliases are dropped.
pub(crate) fn is_forwarded_trailer(name: &HeaderName) -> bool {
    let hop_by_hop = [
        header::CONNECTION,
        header::UPGRADE,
        header::TRAILER,
        KEEP_ALIVE,
        PROXY_CONNECTION,
    ];
    !is_protected(name) && !is_underscore_alias(name.as_str()) && !hop_by_hop.contains(name)
}

/// Whether an HTTP/1.1 request asks for an upgrade or a CONNECT tunnel. An upgrade to a protocol that carries HTTP requests, such
/// as `h2c` (HTTP/2 without TLS), does not count: the request is answered as HTTP/1.1, which every client accepts.
pub(crate) fn is_upgrade_request<B>(req: &Request<B>) -> bool {
    if req.version() != Version::HTTP_11 {
        return false;
    }
    // A list that contains such a protocol does not count either: if the application chose this protocol, the requests in the
    // tunnel would bypass the proxy.
    let lists_http = |value: &HeaderValue| {
        let mut protocols = value.as_bytes().split(|b| *b == b',');
        protocols.any(|protocol| carries_http(protocol.trim_ascii()))
    };
    let headers = req.headers();
    *req.method() == Method::CONNECT
        || (headers.contains_key(header::UPGRADE) && !headers.get_all(header::UPGRADE).iter().any(lists_http))
}

/// Whether HTTP requests follow an upgrade to this protocol: `h2c`, a version of HTTP, or a version of TLS (RFC 2817).
fn carries_http(protocol: &[u8]) -> bool {
    let name = protocol.split(|b| *b == b'/').next().unwrap_or_default();
    [&b"h2c"[..], b"http", b"tls"]
        .iter()
        .any(|http| name.eq_ignore_ascii_case(http))
}

/// Whether a request opens a tunnel and has no path: a CONNECT request, but not an extended CONNECT (RFC 8441), whose path
/// policy rules can match.
pub(crate) fn is_connect_tunnel<B>(req: &Request<B>) -> bool {
    *req.method() == Method::CONNECT && req.extensions().get::<h2::ext::Protocol>().is_none()
}

/// Whether the `connection` header lists this option.
pub(crate) fn has_connection_option(headers: &HeaderMap, option: &[u8]) -> bool {
    let is_on_line = |line: &HeaderValue| {
        let mut names = line.as_bytes().split(|b| *b == b',');
        names.any(|name| name.trim_ascii().eq_ignore_ascii_case(option))
    };
    headers.get_all(header::CONNECTION).iter().any(is_on_line)
}

/// Removes the hop-by-hop headers except those of an upgrade: `upgrade`, and `connection` if it lists `upgrade`.
pub(crate) fn strip_hop_by_hop_except_upgrade(headers: &mut HeaderMap) {
    let is_listed = has_connection_option(headers, b"upgrade");
    let protocols: Vec<_> = headers.get_all(header::UPGRADE).iter().cloned().collect();
    strip_hop_by_hop(headers);
    if is_listed {
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    }
    for protocol in protocols {
        headers.append(header::UPGRADE, protocol);
    }
}

/// Refuses ambiguous requests: with a target that is not permitted for the method, with a body whose end is unclear, or, in
/// HTTP/2, with several hosts or none. (In HTTP/1, the parser refuses several hosts, and a request without a host is
/// accepted.) Moves the authority of an HTTP/2 request from `host` to its target.
///
/// # Errors
/// The request breaks a rule of its HTTP version.
pub(crate) fn check_request<B: http_body::Body>(req: &mut Request<B>) -> Result<(), Error> {
    match req.version() {
        Version::HTTP_2 => check_http2(req),
        _ => check_http1(req),
    }
}

/// Checks the rules of HTTP/1.
fn check_http1<B: http_body::Body>(req: &Request<B>) -> Result<(), Error> {
    let is_not_chunked = |value: &HeaderValue| !value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
    if req
        .headers()
        .get_all(header::TRANSFER_ENCODING)
        .iter()
        .any(is_not_chunked)
    {
        return Err(Error::InvalidRequest("the transfer-encoding is not exactly chunked"));
    }
    check_http1_target_and_body(req)
}

/// Checks the HTTP/1 rules for the target and the body of a request, except `transfer-encoding`. Also called for HTTP/1
/// requests that a peer's proxy sent over HTTP/2. The parser has checked the bytes of the HTTP/1 head.
pub(crate) fn check_http1_target_and_body<B: http_body::Body>(req: &Request<B>) -> Result<(), Error> {
    let uri = req.uri();
    let is_connect = *req.method() == Method::CONNECT;
    let authority_form = uri.scheme().is_none() && uri.authority().is_some() && uri.path_and_query().is_none();
    match (is_connect, req.version()) {
        (true, Version::HTTP_11) if !authority_form => {
            return Err(Error::InvalidRequest(
                "the target of a CONNECT request must be an authority",
            ));
        }
        (true, Version::HTTP_10) => return Err(Error::InvalidRequest("CONNECT needs HTTP/1.1")),
        (true, _) if !req.body().is_end_stream() => {
            return Err(Error::InvalidRequest("a CONNECT request must not have a body"));
        }
        (false, _) if authority_form => {
            return Err(Error::InvalidRequest(
                "only CONNECT can have an authority as its target",
            ));
        }
        _ => {}
    }
    let is_unframed = req.version() == Version::HTTP_10
        && !req.body().is_end_stream()
        && !req.headers().contains_key(header::CONTENT_LENGTH);
    if is_unframed {
        return Err(Error::InvalidRequest(
            "an HTTP/1.0 request with a body needs a content-length",
        ));
    }
    Ok(())
}

/// Checks the rules of HTTP/2, and moves the authority from `host` to the target.
///
/// Source: RFC 9113 §8.3.1 for the authority, §8.5 for CONNECT, RFC 9110 §8.6 for the length.
fn check_http2<B: http_body::Body>(req: &mut Request<B>) -> Result<(), Error> {
    let (mut host, mut length) = (None, None);
    for (name, value) in req.headers() {
        if *name == header::HOST {
            if host.replace(value).is_some() {
                return Err(Error::InvalidRequest("the request has two hosts"));
            }
        } else if *name == header::CONTENT_LENGTH && length.replace(value).is_some() {
            return Err(Error::InvalidRequest("the request has two content-lengths"));
        }
    }
    if length.is_some_and(|length| parse_decimal(length.as_bytes()).is_none()) {
        return Err(Error::InvalidRequest("the content-length is not a number"));
    }
    if length.is_some() && *req.method() == Method::CONNECT {
        return Err(Error::InvalidRequest("a CONNECT request must not have a body"));
    }
    let authority = req.uri().authority();
    if authority.is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(Error::InvalidRequest("the authority contains userinfo"));
    }
    match (authority, host) {
        (Some(_), None) => return Ok(()),
        (Some(authority), Some(host)) => {
            if !is_same_host(authority, host, req.uri().scheme()) {
                return Err(Error::InvalidRequest("the host differs from the authority"));
            }
        }
        (None, Some(host)) => {
            let authority = Authority::try_from(host.as_bytes()).ok();
            let authority = authority.filter(|authority| !authority.as_str().contains('@'));
            let authority = authority.ok_or(Error::InvalidRequest("the host is not a valid authority"))?;
            if *req.method() == Method::CONNECT {
                return Err(Error::InvalidRequest("a CONNECT request needs an authority"));
            }
            let mut parts = std::mem::take(req.uri_mut()).into_parts();
            parts.scheme = Some(Scheme::HTTP); // a URI with an authority and a path needs a scheme
            parts.authority = Some(authority);
            *req.uri_mut() =
                Uri::from_parts(parts).map_err(|_| Error::InvalidRequest("the request target is invalid"))?;
        }
        (None, None) => return Err(Error::InvalidRequest("the request has no host")),
    }
    req.headers_mut().remove(header::HOST);
    Ok(())
}

/// Whether a `host` equals an authority, ignoring case and a default port of the scheme.
///
/// Source: RFC 3986 §6.2.
fn is_same_host(authority: &Authority, host: &HeaderValue, scheme: Option<&Scheme>) -> bool {
    if host.as_bytes() == authority.as_str().as_bytes() {
        return true;
    }
    let Ok(host) = Authority::try_from(host.as_bytes()) else {
        return false;
    };
    let default = if scheme == Some(&Scheme::HTTPS) { 443 } else { 80 };
    let port = |authority: &Authority| authority.port_u16().unwrap_or(default);
    host.host().eq_ignore_ascii_case(authority.host()) && port(&host) == port(authority) && !host.as_str().contains('@')
}

/// The `timeout` parameter of `keep-alive`: how long the server keeps the idle connection.
pub(crate) fn keep_alive_timeout(headers: &HeaderMap) -> Option<Duration> {
    let seconds = |parameter: &[u8]| {
        let (name, value) = parameter.split_at_checked(parameter.iter().position(|b| *b == b'=')?)?;
        let is_timeout = name.trim_ascii().eq_ignore_ascii_case(b"timeout");
        parse_decimal(value[1..].trim_ascii()).filter(|_| is_timeout)
    };
    let value = get(headers, &KEEP_ALIVE)?.as_bytes();
    value.split(|b| *b == b',').find_map(seconds).map(Duration::from_secs)
}

/// Size of a request's header list in bytes as in RFC 9113 §6.5.2, but without method and scheme, and without the overhead of
/// authority and path.
pub(crate) fn header_list_size<B>(req: &Request<B>) -> usize {
    const HEADER_OVERHEAD_BYTES: usize = 32;
    let target = req.uri().authority().map_or(0, |authority| authority.as_str().len())
        + req.uri().path_and_query().map_or(0, |path| path.as_str().len());
    let lines = req
        .headers()
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + HEADER_OVERHEAD_BYTES);
    target + lines.sum::<usize>()
}

/// Whether the response has no body, even if its headers announce one.
pub(crate) fn has_no_body(status: StatusCode, method: &Method) -> bool {
    *method == Method::HEAD
        || status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
        || (*method == Method::CONNECT && status.is_success())
}

pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    parse_decimal(headers.get(header::CONTENT_LENGTH)?.as_bytes())
}

/// Parses digits only. `str::parse` also accepts a sign, which other parsers may reject.
pub(crate) fn parse_decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Whether a request or response is gRPC: HTTP/2 with a `content-type` that begins with `application/grpc`.
pub(crate) fn is_grpc(version: Version, headers: &HeaderMap) -> bool {
    version == Version::HTTP_2
        && get(headers, &header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// The delay that a server requests before a retry: `retry-after` in seconds or as a date, or
/// `grpc-retry-pushback-ms`.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    if let Some(value) = headers.get(header::RETRY_AFTER) {
        let value = value.to_str().ok()?.trim();
        return match value.parse() {
            Ok(seconds) => Some(Duration::from_secs(seconds)),
            Err(_) => httpdate::parse_http_date(value)
                .ok()?
                .duration_since(SystemTime::now())
                .ok(),
        };
    }
    let millis = headers.get("grpc-retry-pushback-ms")?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_millis(millis))
}

/// Removes and returns the response headers that a peer's proxy adds for this proxy.
pub(crate) fn take_proxy_headers(headers: &mut HeaderMap) -> ProxyHeaders {
    if !RemovableHeaders::scan(headers).has_proxy_headers {
        return ProxyHeaders::default();
    }
    let close = headers.remove(names::L5D_PROXY_CONNECTION);
    ProxyHeaders {
        error: headers.remove(names::L5D_PROXY_ERROR),
        closes_connection: close.is_some_and(|value| value == "close"),
    }
}

/// Removes the headers of a response that only proxies may set.
pub(crate) fn strip_proxy_headers(headers: &mut HeaderMap) {
    if RemovableHeaders::scan(headers).has_proxy_headers {
        remove_proxy_headers(headers);
    }
}

fn remove_proxy_headers(headers: &mut HeaderMap) {
    for name in [
        names::L5D_PROXY_ERROR,
        names::L5D_PROXY_CAUSE,
        names::L5D_PROXY_CONNECTION,
    ] {
        headers.remove(name);
    }
}

/// Response headers that a peer's proxy adds for this proxy.
#[derive(Debug, Default)]
pub(crate) struct ProxyHeaders {
    pub(crate) error: Option<HeaderValue>,
    pub(crate) closes_connection: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::body::Body;

    #[test]
    fn retry_after_is_read_from_three_formats() {
        let parsed = |name: &'static str, value: &str| {
            let value = HeaderValue::from_str(value).unwrap();
            retry_after(&HeaderMap::from_iter([(HeaderName::from_static(name), value)]))
        };
        assert_eq!(parsed("retry-after", "7"), Some(Duration::from_secs(7)));
        assert_eq!(
            parsed("grpc-retry-pushback-ms", "1500"),
            Some(Duration::from_millis(1500))
        );
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(60));
        let delay = parsed("retry-after", &date).unwrap();
        assert!((50..=60).contains(&delay.as_secs()), "{delay:?}");
        for (name, value) in [("retry-after", "soon"), ("grpc-retry-pushback-ms", "-1"), ("date", "7")] {
            assert_eq!(parsed(name, value), None, "{name}: {value}");
        }
    }

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn hop_by_hop_headers_are_removed() {
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
    fn every_connection_line_counts_and_te_is_trailers_or_nothing() {
        let mut given = headers(&[
            ("connection", "x-a"),
            ("connection", "x-b, host, l5d-client-id"),
            ("x-a", "1"),
            ("x-b", "1"),
            ("host", "h"),
            ("l5d-client-id", "me"),
            ("te", "gzip, trailers"),
        ]);
        strip_hop_by_hop(&mut given);
        assert_eq!(
            given,
            headers(&[("host", "h"), ("l5d-client-id", "me"), ("te", "trailers")])
        );
        let mut given = headers(&[("te", "gzip")]);
        strip_hop_by_hop(&mut given);
        assert!(given.is_empty());
    }

    #[test]
    fn requests_with_ambiguous_framing_are_refused() {
        let req = |version, coding: &str| {
            let req = Request::post("/").version(version).header("transfer-encoding", coding);
            req.body(Body::full("GET / HTTP/1.1")).unwrap()
        };
        assert!(check_request(&mut req(Version::HTTP_10, "chunked")).is_err());
        assert!(check_request(&mut req(Version::HTTP_11, "gzip, chunked")).is_err());
        assert!(check_request(&mut req(Version::HTTP_11, "chunked")).is_ok());
        let connect = Request::connect("web.test:80").body(Body::full("a body")).unwrap();
        assert!(check_request(&mut { connect }).is_err());
    }

    #[test]
    fn a_request_of_http2_is_addressed_to_one_host() {
        let checked = |method: Method, uri: &str, lines: &[(&str, &str)]| {
            let req = Request::builder().method(method).uri(uri).version(Version::HTTP_2);
            let req = lines.iter().fold(req, |req, (name, value)| req.header(*name, *value));
            let mut req = req.body(Body::empty()).unwrap();
            check_request(&mut req).ok()?;
            assert!(!req.headers().contains_key("host"), "{uri} {lines:?}");
            Some(req.uri().to_string())
        };
        let get = |uri: &str, hosts: &[&str]| {
            let lines: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            checked(Method::GET, uri, &lines)
        };
        for (uri, hosts, expected) in [
            ("http://web/a", &[][..], "http://web/a"),
            ("/a?b", &["web:8080"], "http://web:8080/a?b"),
            ("http://web/", &["web"], "http://web/"),
            ("http://web/", &["WEB:80"], "http://web/"),
            ("https://web:443/", &["web"], "https://web:443/"),
        ] {
            assert_eq!(get(uri, hosts).as_deref(), Some(expected), "{uri} {hosts:?}");
        }
        for (uri, hosts) in [
            ("/", &[][..]),
            ("/", &[""]),
            ("/", &["a/b"]),
            ("/", &["me@web"]),
            ("/", &["web", "web"]),
            ("http://web/", &["other"]),
            ("http://web/", &["web:8080"]),
            ("https://web/", &["web:80"]),
            ("http://web/", &["me@web"]),
            ("http://web/", &[""]),
            ("http://web/", &["web", "web"]),
            ("http://me@web/", &[]),
        ] {
            assert_eq!(get(uri, hosts), None, "{uri} {hosts:?}");
        }
        assert!(checked(Method::OPTIONS, "*", &[("host", "web")]).is_some());
        assert!(checked(Method::CONNECT, "web:80", &[]).is_some());
        assert!(checked(Method::CONNECT, "web:80", &[("content-length", "1")]).is_none());
        for lengths in [&["1", "1"][..], &["+1"], &["1, 1"]] {
            let lines: Vec<_> = lengths.iter().map(|length| ("content-length", *length)).collect();
            assert!(checked(Method::POST, "http://web/", &lines).is_none(), "{lengths:?}");
        }
    }

    #[test]
    fn the_keep_alive_timeout_of_a_server_is_parsed() {
        for (value, seconds) in [
            ("timeout=5", Some(5)),
            ("timeout=5, max=100", Some(5)),
            ("max=100, Timeout = 7", Some(7)),
            ("timeout=0", Some(0)),
            ("timeout=", None),
            ("timeout=-1", None),
            ("timeout", None),
            ("max=100", None),
            ("", None),
        ] {
            let timeout = keep_alive_timeout(&headers(&[("keep-alive", value)]));
            assert_eq!(timeout, seconds.map(Duration::from_secs), "{value}");
        }
    }

    #[test]
    fn strip_hop_by_hop_except_upgrade_keeps_only_the_upgrade() {
        let mut given = headers(&[
            ("connection", "keep-alive, x-hop"),
            ("connection", "upgrade, l5d-client-id"),
            ("x-hop", "1"),
            ("keep-alive", "5"),
            ("upgrade", "tcp"),
            ("l5d-client-id", "me"),
        ]);
        strip_hop_by_hop_except_upgrade(&mut given);
        let expected = [("connection", "Upgrade"), ("upgrade", "tcp"), ("l5d-client-id", "me")];
        assert_eq!(given, headers(&expected));
        let mut unlisted = headers(&[("connection", "close"), ("upgrade", "tcp")]);
        strip_hop_by_hop_except_upgrade(&mut unlisted);
        assert_eq!(unlisted, headers(&[("upgrade", "tcp")]));
    }

    #[test]
    fn an_upgrade_to_h2c_does_not_count() {
        let req = |upgrade: &str| {
            Request::get("/")
                .header("upgrade", upgrade)
                .body(Body::empty())
                .unwrap()
        };
        assert!(is_upgrade_request(&req("websocket")));
        assert!(!is_upgrade_request(&req("h2c")));
        for protocol in ["websocket, H2C", "HTTP/2.0", "http/1.1", "TLS/1.2, websocket", "tls"] {
            assert!(!is_upgrade_request(&req(protocol)), "{protocol}");
        }
        assert!(is_upgrade_request(&req("httpx/1, tlsv")));
        assert!(!is_upgrade_request(&Request::get("/").body(Body::empty()).unwrap()));
    }

    #[test]
    fn targets_fit_their_methods() {
        let req = |method: Method, uri: &str| Request::builder().method(method).uri(uri).body(Body::empty()).unwrap();
        for (mut req, fits) in [
            (req(Method::GET, "/a"), true),
            (req(Method::GET, "http://x/a"), true),
            (req(Method::GET, "x:80"), false),
            (req(Method::CONNECT, "x:80"), true),
            (req(Method::CONNECT, "/a"), false),
            (req(Method::OPTIONS, "*"), true),
        ] {
            assert_eq!(check_request(&mut req).is_ok(), fits, "{req:?}");
        }
    }
}
