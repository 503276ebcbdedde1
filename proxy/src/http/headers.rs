//! Header hygiene: what concerns one hop only, who is addressed, and what proxies tell each other.

use std::time::{Duration, SystemTime};

use http::{
    HeaderMap, HeaderName, Method, Request, Uri, Version,
    header::{self, HeaderValue},
    uri::{Authority, Scheme},
};
use http_body::Body as _;
use tulle_core::names::header as names;

use crate::http::{body::Body, error::Error};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const TRAILERS: &[u8] = b"trailers";
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// The first value of a header. Messages have few headers, so that looking at each is less than looking one up.
pub(crate) fn get<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    headers
        .iter()
        .find_map(|(other, value)| (other == name).then_some(value))
}

/// Whom a request is addressed to, by its target or its `host`.
pub(crate) fn authority(req: &Request<Body>) -> Option<Authority> {
    let of_header = || req.headers().get(header::HOST)?.to_str().ok()?.parse().ok();
    req.uri().authority().cloned().or_else(of_header)
}

/// Which kinds of headers a message has that are removed before it is forwarded.
#[derive(Default)]
struct Found {
    /// Headers of the connection alone (RFC 9110 §7.6.1).
    hop_by_hop: bool,
    /// `l5d-*` headers.
    of_proxies: bool,
    /// Names that become `l5d-*` where an application takes underscores for hyphens.
    folded: bool,
}

impl Found {
    /// Most messages have none of these, and looking at each name once is less than looking for each of them.
    fn of(headers: &HeaderMap) -> Self {
        let mut found = Self::default();
        for name in headers.keys() {
            match name.as_str() {
                "connection" | "upgrade" | "keep-alive" | "proxy-connection" | "te" => found.hop_by_hop = true,
                name if name.starts_with("l5d") => {
                    found.of_proxies |= name.starts_with("l5d-");
                    found.folded |= is_folded(name);
                }
                _ => {}
            }
        }
        found
    }
}

/// Whether a name is one of those that only proxies say, to applications that take underscores for hyphens (CGI, WSGI).
fn is_folded(name: &str) -> bool {
    match name.as_bytes() {
        [b'l', b'5', b'd', b'_', ..] => true,
        [b'l', b'5', b'd', b'-', rest @ ..] => rest.contains(&b'_'),
        _ => false,
    }
}

/// Removes headers whose names become those of proxies where an application takes underscores for hyphens.
pub(crate) fn strip_folded(headers: &mut HeaderMap) {
    // Hardly any message has one.
    while let Some(name) = headers.keys().find(|name| is_folded(name.as_str())).cloned() {
        headers.remove(name);
    }
}

/// Removes what concerns only the connection a message came on.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if Found::of(headers).hop_by_hop {
        remove_hop_by_hop(headers);
    }
}

/// [`strip_hop_by_hop`] and [`strip_folded`] at once, for each request of a client's proxy.
pub(crate) fn strip_hop_by_hop_and_folded(headers: &mut HeaderMap) {
    let found = Found::of(headers);
    if found.folded {
        strip_folded(headers);
    }
    if found.hop_by_hop {
        remove_hop_by_hop(headers);
    }
}

/// [`strip_hop_by_hop`] and [`strip_forged`] at once, for each response of an application.
pub(crate) fn strip_hop_by_hop_and_forged(headers: &mut HeaderMap) {
    let found = Found::of(headers);
    if found.hop_by_hop {
        remove_hop_by_hop(headers);
    }
    if found.of_proxies {
        remove_forged(headers);
    }
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let lines: Vec<_> = headers.get_all(header::CONNECTION).iter().cloned().collect();
        headers.remove(header::CONNECTION);
        for name in lines.iter().flat_map(|line| line.as_bytes().split(|b| *b == b',')) {
            if let Ok(name) = HeaderName::from_bytes(name.trim_ascii())
                && !is_end_to_end(&name)
            {
                headers.remove(name);
            }
        }
    }
    for name in [header::UPGRADE, KEEP_ALIVE, PROXY_CONNECTION] {
        headers.remove(name);
    }
    if headers.contains_key(header::TE) {
        // Of this one, HTTP/2 and gRPC know exactly one value.
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

/// Headers that a message means for its last receiver, or a proxy for another, whatever its `connection` lists.
fn is_end_to_end(name: &HeaderName) -> bool {
    [
        header::HOST,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::TE,
    ]
    .contains(name)
        || name.as_str().starts_with("l5d-")
}

/// Whether a trailer is for the last receiver. Others concern one connection, or say what only proxies may.
pub(crate) fn is_trailer(name: &HeaderName) -> bool {
    let of_connection = [
        header::CONNECTION,
        header::UPGRADE,
        header::TRAILER,
        KEEP_ALIVE,
        PROXY_CONNECTION,
    ];
    !is_end_to_end(name) && !is_folded(name.as_str()) && !of_connection.contains(name)
}

/// Whether an HTTP/1.1 request asks for another protocol. An upgrade to cleartext HTTP/2 is not one: it is answered
/// as HTTP/1.1, which every client accepts.
pub(crate) fn wants_upgrade<B>(req: &Request<B>) -> bool {
    if req.version() != Version::HTTP_11 {
        return false;
    }
    // Nor is one that offers it among others: the application could choose it, and speak HTTP/2 past us.
    let is_h2c = |to: &HeaderValue| {
        let mut protocols = to.as_bytes().split(|b| *b == b',');
        protocols.any(|protocol| protocol.trim_ascii().eq_ignore_ascii_case(b"h2c"))
    };
    let headers = req.headers();
    *req.method() == Method::CONNECT
        || (headers.contains_key(header::UPGRADE) && !headers.get_all(header::UPGRADE).iter().any(is_h2c))
}

/// Keeps of what concerns only the connection of a message what asks for, or grants, another protocol on it.
pub(crate) fn strip_all_but_upgrade(headers: &mut HeaderMap) {
    let lists_upgrade = |line: &HeaderValue| {
        let mut names = line.as_bytes().split(|b| *b == b',');
        names.any(|name| name.trim_ascii().eq_ignore_ascii_case(b"upgrade"))
    };
    let is_listed = headers.get_all(header::CONNECTION).iter().any(lists_upgrade);
    let protocols: Vec<_> = headers.get_all(header::UPGRADE).iter().cloned().collect();
    strip_hop_by_hop(headers);
    if is_listed {
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    }
    for protocol in protocols {
        headers.append(header::UPGRADE, protocol);
    }
}

/// Refuses requests that cannot be passed on as what they are: that are addressed to two hosts or to none, whose target does not fit
/// their method, or whose body could not be told from what follows it. What a request of HTTP/2 is addressed to is in its target
/// afterwards, and nowhere else.
///
/// # Errors
/// The request breaks a rule of its version.
pub(crate) fn check_request(req: &mut Request<Body>) -> Result<(), Error> {
    match req.version() {
        Version::HTTP_2 => check_http2(req),
        _ => check_http1(req),
    }
}

fn check_http1(req: &Request<Body>) -> Result<(), Error> {
    let coded = |value: &HeaderValue| !value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
    if req.headers().get_all(header::TRANSFER_ENCODING).iter().any(coded) {
        return Err(Error::BadRequest("its transfer-encoding is not just chunked"));
    }
    check_restored(req)
}

/// The rules of HTTP/1 for a request that came through HTTP/2, which has no transfer-encoding. What concerns the bytes of a
/// request was looked at when it was read.
pub(crate) fn check_restored(req: &Request<Body>) -> Result<(), Error> {
    let uri = req.uri();
    let is_connect = *req.method() == Method::CONNECT;
    let authority_form = uri.scheme().is_none() && uri.authority().is_some() && uri.path_and_query().is_none();
    match (is_connect, req.version()) {
        (true, Version::HTTP_11) if !authority_form => {
            return Err(Error::BadRequest("the target of CONNECT is not an authority"));
        }
        (true, Version::HTTP_10) => return Err(Error::BadRequest("CONNECT needs HTTP/1.1")),
        (true, _) if !req.body().is_end_stream() => return Err(Error::BadRequest("CONNECT has no body")),
        (false, _) if authority_form => {
            return Err(Error::BadRequest("only CONNECT has an authority for a target"));
        }
        _ => {}
    }
    let unframed = req.version() == Version::HTTP_10
        && !req.body().is_end_stream()
        && !req.headers().contains_key(header::CONTENT_LENGTH);
    if unframed {
        return Err(Error::BadRequest(
            "an HTTP/1.0 request with a body needs a content-length",
        ));
    }
    Ok(())
}

/// Source: RFC 9113 §8.3.1 for the authority, §8.5 for CONNECT, RFC 9110 §8.6 for the length.
fn check_http2(req: &mut Request<Body>) -> Result<(), Error> {
    let (mut host, mut length) = (None, None);
    for (name, value) in req.headers() {
        if *name == header::HOST {
            if host.replace(value).is_some() {
                return Err(Error::BadRequest("it names two hosts"));
            }
        } else if *name == header::CONTENT_LENGTH && length.replace(value).is_some() {
            return Err(Error::BadRequest("it has two content-lengths"));
        }
    }
    if length.is_some_and(|length| number(length.as_bytes()).is_none()) {
        return Err(Error::BadRequest("its content-length is not a number"));
    }
    if length.is_some() && *req.method() == Method::CONNECT {
        return Err(Error::BadRequest("CONNECT has no body"));
    }
    let authority = req.uri().authority();
    if authority.is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(Error::BadRequest("its authority names a user"));
    }
    match (authority, host) {
        (Some(_), None) => return Ok(()),
        (Some(authority), Some(host)) => {
            if !is_same_host(authority, host, req.uri().scheme()) {
                return Err(Error::BadRequest("its host is not its authority"));
            }
        }
        (None, Some(host)) => {
            let authority = Authority::try_from(host.as_bytes()).ok();
            let authority = authority.filter(|authority| !authority.as_str().contains('@'));
            let authority = authority.ok_or(Error::BadRequest("its host is not an authority"))?;
            if *req.method() == Method::CONNECT {
                return Err(Error::BadRequest("CONNECT needs an authority"));
            }
            let mut parts = std::mem::take(req.uri_mut()).into_parts();
            parts.scheme = Some(Scheme::HTTP); // which a target without an authority cannot keep
            parts.authority = Some(authority);
            *req.uri_mut() = Uri::from_parts(parts).map_err(|_| Error::BadRequest("its target"))?;
        }
        (None, None) => return Err(Error::BadRequest("it names no host")),
    }
    req.headers_mut().remove(header::HOST);
    Ok(())
}

/// Whether a `host` says the same as an authority: letters count alike in both cases, and the port of the scheme may be left out.
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
    let port = |of: &Authority| of.port_u16().unwrap_or(default);
    host.host().eq_ignore_ascii_case(authority.host()) && port(&host) == port(authority) && !host.as_str().contains('@')
}

/// How long a server keeps the connection of a response when it is idle, if it says so.
pub(crate) fn keep_alive_timeout(headers: &HeaderMap) -> Option<Duration> {
    let seconds = |parameter: &[u8]| {
        let (name, value) = parameter.split_at_checked(parameter.iter().position(|b| *b == b'=')?)?;
        let is_timeout = name.trim_ascii().eq_ignore_ascii_case(b"timeout");
        number(value[1..].trim_ascii()).filter(|_| is_timeout)
    };
    let told = get(headers, &KEEP_ALIVE)?.as_bytes();
    told.split(|b| *b == b',').find_map(seconds).map(Duration::from_secs)
}

/// What a request's head counts as in HTTP/2 (RFC 9113, section 10.5.1), its method and scheme aside.
pub(crate) fn list_size<B>(req: &Request<B>) -> usize {
    const EACH: usize = 32;
    let target = req.uri().authority().map_or(0, |authority| authority.as_str().len())
        + req.uri().path_and_query().map_or(0, |path| path.as_str().len());
    let lines = req
        .headers()
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + EACH);
    target + lines.sum::<usize>()
}

/// The length that the headers tell.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    number(headers.get(header::CONTENT_LENGTH)?.as_bytes())
}

/// Digits only: a sign, for one, is a number to some readers.
pub(crate) fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Whether the request speaks gRPC.
pub(crate) fn is_grpc(version: Version, headers: &HeaderMap) -> bool {
    version == Version::HTTP_2
        && get(headers, &header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// How long a server asks not to be asked again: `retry-after` in seconds or as a date, or what gRPC has for it.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    if let Some(after) = headers.get(header::RETRY_AFTER) {
        let after = after.to_str().ok()?.trim();
        return match after.parse() {
            Ok(seconds) => Some(Duration::from_secs(seconds)),
            Err(_) => httpdate::parse_http_date(after)
                .ok()?
                .duration_since(SystemTime::now())
                .ok(),
        };
    }
    let millis = headers.get("grpc-retry-pushback-ms")?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_millis(millis))
}

/// Removes what only a peer's proxy may tell us from a response; returns its reasons for the log and for retries.
pub(crate) fn strip_proxy_headers(headers: &mut HeaderMap) -> ProxyWords {
    if !Found::of(headers).of_proxies {
        return ProxyWords::default();
    }
    let close = headers.remove(names::L5D_PROXY_CONNECTION);
    ProxyWords {
        error: headers.remove(names::L5D_PROXY_ERROR),
        close: close.is_some_and(|value| value == "close"),
    }
}

/// Removes from an application's response what only proxies say.
pub(crate) fn strip_forged(headers: &mut HeaderMap) {
    if Found::of(headers).of_proxies {
        remove_forged(headers);
    }
}

fn remove_forged(headers: &mut HeaderMap) {
    for name in [
        names::L5D_PROXY_ERROR,
        names::L5D_PROXY_CAUSE,
        names::L5D_PROXY_CONNECTION,
    ] {
        headers.remove(name);
    }
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

    #[test]
    fn servers_ask_for_peace_in_three_ways() {
        let asked = |name: &'static str, value: &str| {
            let value = HeaderValue::from_str(value).unwrap();
            retry_after(&HeaderMap::from_iter([(HeaderName::from_static(name), value)]))
        };
        assert_eq!(asked("retry-after", "7"), Some(Duration::from_secs(7)));
        assert_eq!(
            asked("grpc-retry-pushback-ms", "1500"),
            Some(Duration::from_millis(1500))
        );
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(60));
        let until = asked("retry-after", &date).unwrap();
        assert!((50..=60).contains(&until.as_secs()), "{until:?}");
        for (name, value) in [("retry-after", "soon"), ("grpc-retry-pushback-ms", "-1"), ("date", "7")] {
            assert_eq!(asked(name, value), None, "{name}: {value}");
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
    fn bodies_that_nobody_could_delimit_are_refused() {
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
    fn servers_say_how_long_they_keep_an_idle_connection() {
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
            let told = keep_alive_timeout(&headers(&[("keep-alive", value)]));
            assert_eq!(told, seconds.map(Duration::from_secs), "{value}");
        }
    }

    #[test]
    fn of_a_connection_only_the_upgrade_is_kept() {
        let mut given = headers(&[
            ("connection", "keep-alive, x-hop"),
            ("connection", "upgrade, l5d-client-id"),
            ("x-hop", "1"),
            ("keep-alive", "5"),
            ("upgrade", "tcp"),
            ("l5d-client-id", "me"),
        ]);
        strip_all_but_upgrade(&mut given);
        let expected = [("connection", "Upgrade"), ("upgrade", "tcp"), ("l5d-client-id", "me")];
        assert_eq!(given, headers(&expected));
        let mut unlisted = headers(&[("connection", "close"), ("upgrade", "tcp")]);
        strip_all_but_upgrade(&mut unlisted);
        assert_eq!(unlisted, headers(&[("upgrade", "tcp")]));
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
        assert!(!wants_upgrade(&req("websocket, H2C")));
        assert!(!wants_upgrade(&Request::get("/").body(Body::empty()).unwrap()));
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
