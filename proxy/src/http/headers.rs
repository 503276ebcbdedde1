//! Header hygiene: what concerns one hop only, who is addressed, and what proxies tell each other.

use std::time::{Duration, SystemTime};

use http::{
    HeaderMap, HeaderName, Method, Request, Version,
    header::{self, HeaderValue},
    uri::Authority,
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

/// Whether there is anything that only proxies say.
pub(crate) fn of_proxies(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| name.as_str().starts_with("l5d-"))
}

/// Removes what concerns only the connection a message came on.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // Most messages have none of them, and looking at each name once is less than looking for each of them.
    let concerns = |name: &HeaderName| {
        matches!(
            name.as_str(),
            "connection" | "upgrade" | "keep-alive" | "proxy-connection" | "te"
        )
    };
    if !headers.keys().any(concerns) {
        return;
    }
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
    !is_end_to_end(name) && !of_connection.contains(name)
}

/// Whether an HTTP/1.1 request asks for another protocol. An upgrade to cleartext HTTP/2 is not one: it is answered
/// as HTTP/1.1, which every client accepts.
pub(crate) fn wants_upgrade(req: &Request<Body>) -> bool {
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

/// Refuses requests that cannot be passed on as what they are: whose target does not fit their method, or whose body
/// could not be told from what follows it.
pub(crate) fn check_request(req: &Request<Body>) -> Result<(), Error> {
    let uri = req.uri();
    let authority_form = uri.scheme().is_none() && uri.authority().is_some() && uri.path_and_query().is_none();
    match (*req.method() == Method::CONNECT, req.version()) {
        (true, Version::HTTP_11) if !authority_form => {
            return Err(Error::BadRequest("the target of CONNECT is not an authority"));
        }
        (true, Version::HTTP_10) => return Err(Error::BadRequest("CONNECT needs HTTP/1.1")),
        (false, Version::HTTP_10 | Version::HTTP_11) if authority_form => {
            return Err(Error::BadRequest("only CONNECT has an authority for a target"));
        }
        _ => {}
    }
    let coded = |value: &HeaderValue| !value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
    if req.headers().get_all(header::TRANSFER_ENCODING).iter().any(coded) {
        return Err(Error::BadRequest("its transfer-encoding is not just chunked"));
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
    if !of_proxies(headers) {
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
    if !of_proxies(headers) {
        return;
    }
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
        assert!(check_request(&req(Version::HTTP_10, "chunked")).is_err());
        assert!(check_request(&req(Version::HTTP_11, "gzip, chunked")).is_err());
        assert!(check_request(&req(Version::HTTP_11, "chunked")).is_ok());
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
        for (req, fits) in [
            (req(Method::GET, "/a"), true),
            (req(Method::GET, "http://x/a"), true),
            (req(Method::GET, "x:80"), false),
            (req(Method::CONNECT, "x:80"), true),
            (req(Method::CONNECT, "/a"), false),
            (req(Method::OPTIONS, "*"), true),
        ] {
            assert_eq!(check_request(&req).is_ok(), fits, "{req:?}");
        }
    }
}
