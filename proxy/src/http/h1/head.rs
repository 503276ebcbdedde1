//! Reading the heads of requests and responses.
//!
//! A request can be read in one way or is refused. A response is refused where its end could be doubted; what is
//! merely untidy is put right, because its application worked before there was a proxy. Characters in a target that the
//! types of a request refuse, and servers take, are percent-encoded.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};

use crate::http::{
    h1::framing::{Chunk, Framing},
    headers::number,
    spare,
};

/// Header lines that are read without an allocation for them.
pub(super) const MAX_HEAD_LINES: usize = 128;
/// Most header lines.
pub(crate) const MAX_LINES: usize = 4096;
/// Most bytes of a response head.
pub(super) const MAX_HEAD: usize = 64 * 1024;

/// A parsed request head.
#[derive(Debug)]
pub(crate) struct RequestHead {
    pub(crate) request: Request<()>,
    pub(crate) framing: Framing,
    /// Whether the client may send another request afterwards.
    pub(crate) keep_alive: bool,
    /// Whether the client waits for an interim response before it sends the body.
    pub(crate) expects: bool,
    /// Whether the target had characters that were percent-encoded.
    pub(crate) target_encoded: bool,
}

/// A parsed response head.
#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub(crate) response: Response<()>,
    pub(crate) framing: Framing,
    /// Whether the connection may carry another request afterwards.
    pub(crate) keep_alive: bool,
}

/// Why a head was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadHead {
    /// More than anybody needs.
    TooLong,
    Wrong(&'static str),
}

impl From<&'static str> for BadHead {
    fn from(what: &'static str) -> Self {
        Self::Wrong(what)
    }
}

/// Parses a request head from the start of `bytes`; `None` while it is incomplete. Consumes what it used.
///
/// # Errors
/// It is no HTTP/1 request, or could be read in more than one way.
pub(crate) fn request(bytes: &mut Bytes) -> Result<Option<RequestHead>, BadHead> {
    match parsed_request(bytes) {
        Err(BadHead::Wrong(wrong @ (FIRST_LINE | TARGET))) => with_encoded_target(bytes).unwrap_or(Err(wrong.into())),
        parsed => parsed,
    }
}

const FIRST_LINE: &str = "its first line";
const TARGET: &str = "its target";

/// Parses a request head once more, with its target percent-encoded; `None` where that changes nothing.
#[cold]
fn with_encoded_target(bytes: &mut Bytes) -> Option<Result<Option<RequestHead>, BadHead>> {
    let start = bytes.iter().position(|byte| *byte == b' ')? + 1;
    let length = bytes[start..].iter().position(|byte| b" \r\n".contains(byte));
    let end = length.map_or(bytes.len(), |length| start + length);
    let target = encoded(&bytes[start..end])?;
    let mut whole = Bytes::from([&bytes[..start], &target, &bytes[end..]].concat());
    let mut parsed = parsed_request(&mut whole);
    if let Ok(Some(head)) = &mut parsed {
        head.target_encoded = true;
        *bytes = whole;
    }
    Some(parsed)
}

/// A target in which those characters are percent-encoded that [`Uri`] refuses, as browsers encode them; `None` where there are
/// none. A scheme and an authority stay as they are.
///
/// Source: the path and query percent-encode sets of the WHATWG URL Standard, as far as `http` does not take what is in them.
fn encoded(target: &[u8]) -> Option<Vec<u8>> {
    let path = match target.first() {
        Some(b'/') => 0,
        _ => {
            let authority = target.windows(3).position(|part| part == b"://")? + 3;
            authority + target[authority..].iter().position(|byte| b"/?".contains(byte))?
        }
    };
    let query = target.iter().position(|byte| *byte == b'?').unwrap_or(target.len());
    let is_text = std::str::from_utf8(target).is_ok();
    let is_refused = |(at, byte): (usize, u8)| match byte {
        b'<' | b'>' => true,
        b'`' => at < query,
        b'"' => at > query,
        0x80.. => !is_text,
        _ => false,
    };
    let mut encoded = Vec::with_capacity(target.len() + 16);
    for (at, byte) in target.iter().copied().enumerate() {
        match at >= path && is_refused((at, byte)) {
            true => encoded.extend_from_slice(format!("%{byte:02X}").as_bytes()),
            false => encoded.push(byte),
        }
    }
    (encoded.len() > target.len()).then_some(encoded)
}

fn parsed_request(bytes: &mut Bytes) -> Result<Option<RequestHead>, BadHead> {
    let mut few = [const { MaybeUninit::uninit() }; MAX_HEAD_LINES];
    let mut many = Vec::new();
    let mut parsed = httparse::Request::new(&mut []);
    let mut result = parsed.parse_with_uninit_headers(bytes, &mut few);
    if result == Err(httparse::Error::TooManyHeaders) {
        many.resize(MAX_LINES, MaybeUninit::uninit());
        parsed = httparse::Request::new(&mut []);
        result = parsed.parse_with_uninit_headers(bytes, &mut many);
    }
    let used = match result {
        Ok(httparse::Status::Complete(used)) => used,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(refused(error)),
    };
    let mut request = Request::new(());
    let (Some(method), Some(target), Some(version)) = (parsed.method, parsed.path, parsed.version) else {
        return Err("its request line".into());
    };
    *request.method_mut() = Method::from_bytes(method.as_bytes()).map_err(|_| "its method")?;
    // Others drop what follows a '#', or pass it on.
    if target.contains('#') {
        return Err("its target has a fragment".into());
    }
    *request.uri_mut() = Uri::from_maybe_shared(part(bytes, target.as_bytes())).map_err(|_| TARGET)?;
    *request.version_mut() = version_of(version);
    *request.headers_mut() = headers(bytes, parsed.headers)?;
    consume(bytes, used);
    check_host(&mut request)?;
    let framing = framing_of_request(&request)?;
    let is_11 = request.version() == Version::HTTP_11;
    let expects = is_11
        && matches!(framing, Framing::Length(1..) | Framing::Chunked(_))
        && request
            .headers()
            .get(header::EXPECT)
            .is_some_and(|expected| expected.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    Ok(Some(RequestHead {
        keep_alive: is_persistent(request.version(), request.headers()),
        request,
        framing,
        expects,
        target_encoded: false,
    }))
}

/// Parses a response head from the start of `bytes`; `None` while it is incomplete. Consumes what it used.
///
/// # Errors
/// It is no HTTP/1 response, or its end could be doubted.
pub(crate) fn response(bytes: &mut Bytes, method: &Method) -> Result<Option<ResponseHead>, BadHead> {
    let mut config = httparse::ParserConfig::default();
    config.allow_spaces_after_header_name_in_responses(true);
    let mut few = [const { MaybeUninit::uninit() }; MAX_HEAD_LINES];
    let mut many = Vec::new();
    let mut parsed = httparse::Response::new(&mut []);
    let mut result = config.parse_response_with_uninit_headers(&mut parsed, bytes, &mut few);
    if result == Err(httparse::Error::TooManyHeaders) {
        many.resize(MAX_LINES, MaybeUninit::uninit());
        parsed = httparse::Response::new(&mut []);
        result = config.parse_response_with_uninit_headers(&mut parsed, bytes, &mut many);
    }
    let used = match result {
        Ok(httparse::Status::Complete(used)) if used > MAX_HEAD => return Err(BadHead::TooLong),
        Ok(httparse::Status::Complete(used)) => used,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(refused(error)),
    };
    let mut response = Response::new(());
    *response.version_mut() = version_of(parsed.version.unwrap_or(1));
    *response.status_mut() = parsed
        .code
        .and_then(|code| StatusCode::from_u16(code).ok())
        .ok_or("its status is not a number from 100 to 999")?;
    *response.headers_mut() = headers(bytes, parsed.headers)?;
    consume(bytes, used);
    let (framing, clean) = framing_of_response(&response, method)?;
    match framing {
        // One framing is passed on, the one that counts.
        Framing::Chunked(_) => drop(response.headers_mut().remove(header::CONTENT_LENGTH)),
        Framing::Length(length) if is_repeated(response.headers()) => {
            response.headers_mut().insert(header::CONTENT_LENGTH, length.into());
        }
        Framing::Length(_) | Framing::None | Framing::UntilClose => {}
    }
    let persistent = is_persistent(response.version(), response.headers());
    Ok(Some(ResponseHead {
        keep_alive: clean && framing != Framing::UntilClose && persistent,
        response,
        framing,
    }))
}

/// Whether a head may have become complete with the bytes from `seen` on: an empty line ends it.
pub(crate) fn may_end(bytes: &[u8], seen: usize) -> bool {
    let new = &bytes[seen.saturating_sub(3)..];
    new.windows(2).any(|end| end == b"\n\n") || new.windows(3).any(|end| end == b"\n\r\n")
}

/// Whether a header tells where a message ends.
pub(super) fn is_framing(name: &HeaderName) -> bool {
    *name == header::CONTENT_LENGTH || *name == header::TRANSFER_ENCODING
}

/// Lets go of what is used up, so that nothing keeps its memory.
fn consume(bytes: &mut Bytes, used: usize) {
    bytes.advance(used);
    if bytes.is_empty() {
        *bytes = Bytes::new();
    }
}

fn refused(error: httparse::Error) -> BadHead {
    BadHead::Wrong(match error {
        httparse::Error::TooManyHeaders => return BadHead::TooLong,
        httparse::Error::HeaderName => "a header name",
        httparse::Error::HeaderValue => "a header value",
        httparse::Error::NewLine => "a line end",
        httparse::Error::Status => "its status",
        httparse::Error::Version => "its version is not HTTP/1",
        httparse::Error::Token => FIRST_LINE,
    })
}

fn version_of(minor: u8) -> Version {
    if minor == 0 { Version::HTTP_10 } else { Version::HTTP_11 }
}

/// The bytes of `part`, which is within `whole`, without a copy.
fn part(whole: &Bytes, part: &[u8]) -> Bytes {
    if part.is_empty() {
        Bytes::new()
    } else {
        whole.slice_ref(part)
    }
}

fn headers(bytes: &Bytes, lines: &[httparse::Header<'_>]) -> Result<HeaderMap, BadHead> {
    let mut headers = spare::headers(lines.len());
    for line in lines {
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| "a header name")?;
        let value = HeaderValue::from_maybe_shared(part(bytes, line.value)).map_err(|_| "a header value")?;
        headers.append(name, value);
    }
    Ok(headers)
}

/// One host at most, and the target's where that names one: it counts, so nobody should see another.
///
/// Source: RFC 9112 §3.2. A request without a host is accepted: it may go where it was sent, as without proxies.
fn check_host(request: &mut Request<()>) -> Result<(), BadHead> {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err("it names two hosts".into());
    }
    let of_authority = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:[]%".contains(byte);
    if host.is_some_and(|host| !host.as_bytes().iter().all(of_authority)) {
        return Err("its host is not an authority".into());
    }
    let of_target = match request.uri().authority() {
        Some(authority) if request.uri().scheme().is_some() => authority.as_str(),
        _ => return Ok(()),
    };
    let of_target = of_target.rsplit('@').next().unwrap_or(of_target);
    if host.is_none_or(|host| host != of_target) {
        let host = HeaderValue::from_str(of_target).map_err(|_| "its target")?;
        request.headers_mut().insert(header::HOST, host);
    }
    Ok(())
}

/// Source: RFC 9112 §6.1 and §6.3, where they let a server choose: the stricter way.
fn framing_of_request(request: &Request<()>) -> Result<Framing, BadHead> {
    let headers = request.headers();
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let framing = match (lengths.next(), codings.next()) {
        (None, None) => return Ok(Framing::None),
        (Some(_), Some(_)) => return Err("it has both a content-length and a transfer-encoding".into()),
        (Some(length), None) => {
            if lengths.next().is_some() {
                return Err("it has two content-lengths".into());
            }
            Framing::Length(number(length.as_bytes()).ok_or("its content-length is not a number")?)
        }
        (None, Some(coding)) => {
            if codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
                return Err("its transfer-encoding is not just chunked".into());
            }
            if request.version() == Version::HTTP_10 {
                return Err("HTTP/1.0 knows no transfer-encoding".into());
            }
            Framing::Chunked(Chunk::Size)
        }
    };
    if *request.method() == Method::CONNECT {
        return Err("CONNECT has no body".into());
    }
    Ok(framing)
}

/// Source: RFC 9112 §6.1 and §6.3. The second value is false when the message was framed twice, or in chunks by somebody of a
/// version that has none: its end is certain, but the connection is not used again.
fn framing_of_response(response: &Response<()>, method: &Method) -> Result<(Framing, bool), BadHead> {
    if has_no_body(response.status(), method) {
        return Ok((Framing::None, true));
    }
    let headers = response.headers();
    let length = content_length(headers)?;
    let codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let mut codings = codings
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        // An old way to say that there is none.
        .filter(|coding| !coding.eq_ignore_ascii_case(b"identity"));
    match (codings.next(), codings.next()) {
        (None, _) => Ok((length.map_or(Framing::UntilClose, Framing::Length), true)),
        (Some(coding), None) if coding.eq_ignore_ascii_case(b"chunked") => {
            let is_known = response.version() == Version::HTTP_11;
            Ok((Framing::Chunked(Chunk::Size), length.is_none() && is_known))
        }
        // Passed on without its name, it could not be undone.
        _ => Err("its transfer-encoding is not just chunked".into()),
    }
}

/// Whether the response to a request ends with its head, whatever its headers say.
pub(super) fn has_no_body(status: StatusCode, method: &Method) -> bool {
    *method == Method::HEAD
        || status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
        || (*method == Method::CONNECT && status.is_success())
}

/// Whether a response ends HTTP on its connection.
pub(super) fn switches(status: StatusCode, method: &Method) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (*method == Method::CONNECT && status.is_success())
}

/// Whether the length is told more than once.
fn is_repeated(headers: &HeaderMap) -> bool {
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    lengths.next().is_some_and(|first| first.as_bytes().contains(&b',')) || lengths.next().is_some()
}

/// The length that a response tells, be it more than once.
fn content_length(headers: &HeaderMap) -> Result<Option<u64>, BadHead> {
    let mut length = None;
    for value in headers.get_all(header::CONTENT_LENGTH) {
        for part in value.as_bytes().split(|b| *b == b',') {
            let number = number(part.trim_ascii()).ok_or("its content-length is not a number")?;
            if length.is_some_and(|known| known != number) {
                return Err("it has two different content-lengths".into());
            }
            length = Some(number);
        }
    }
    Ok(length)
}

fn is_persistent(version: Version, headers: &HeaderMap) -> bool {
    let says = |token: &[u8]| {
        headers.get_all(header::CONNECTION).iter().any(|value| {
            value
                .as_bytes()
                .split(|b| *b == b',')
                .any(|part| part.trim_ascii().eq_ignore_ascii_case(token))
        })
    };
    if version == Version::HTTP_10 {
        says(b"keep-alive") && !says(b"close")
    } else {
        !says(b"close")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse_response(text: &str) -> Result<Option<ResponseHead>, BadHead> {
        response(&mut Bytes::copy_from_slice(text.as_bytes()), &Method::GET)
    }

    fn parse_request(text: &str) -> Result<Option<RequestHead>, BadHead> {
        request(&mut Bytes::copy_from_slice(text.as_bytes()))
    }

    #[test]
    fn framing_follows_the_head_of_a_response() {
        for (text, framing, keep_alive) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", Framing::Length(5), true),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 5, 5\r\n\r\n",
                Framing::Length(5),
                true,
            ),
            (
                "HTTP/1.1 200 OK\r\ncontent-length : 5\r\n\r\n",
                Framing::Length(5),
                true,
            ),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\n",
                Framing::UntilClose,
                false,
            ),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
                Framing::Chunked(Chunk::Size),
                false,
            ),
            ("HTTP/1.1 200 OK\r\n\r\n", Framing::UntilClose, false),
            ("HTTP/1.1 204 No Content\r\n\r\n", Framing::None, true),
            (
                "HTTP/1.1 200 OK\r\nconnection: x, close\r\ncontent-length: 0\r\n\r\n",
                Framing::Length(0),
                false,
            ),
            (
                "HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
                Framing::Length(0),
                false,
            ),
            (
                "HTTP/1.0 200 OK\r\nconnection: Keep-Alive\r\ncontent-length: 1\r\n\r\n",
                Framing::Length(1),
                true,
            ),
        ] {
            let head = parse_response(text).unwrap().unwrap();
            assert_eq!((head.framing, head.keep_alive), (framing, keep_alive), "{text}");
            let told = head.response.headers().get_all("content-length");
            let told: Vec<_> = told.iter().cloned().collect();
            match framing {
                Framing::Length(length) => assert_eq!(told, [HeaderValue::from(length)], "{text}"),
                _ => assert!(told.is_empty(), "{text}"),
            }
        }
    }

    #[test]
    fn doubtful_responses_are_refused() {
        for text in [
            "HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
            "HTTP/1.1 20 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\na: b\r\n c\r\ncontent-length: 5\r\n\r\n",
            "HTTP/1.1 200 OK\r\na: b\rc\r\ncontent-length: 5\r\n\r\n",
            "SMTP ready\r\n",
        ] {
            assert!(parse_response(text).is_err(), "{text}");
        }
        assert!(parse_response("HTTP/1.1 200 OK\r\ncontent-le").unwrap().is_none());
    }

    #[test]
    fn the_head_of_a_response_has_a_longest_length() {
        let start = "HTTP/1.1 200 OK\r\na: ";
        let of = |len: usize| start.to_owned() + &"b".repeat(len - start.len() - 4) + "\r\n\r\n";
        assert!(parse_response(&of(MAX_HEAD)).unwrap().is_some());
        assert_eq!(parse_response(&of(MAX_HEAD + 1)).unwrap_err(), BadHead::TooLong);
    }

    #[test]
    fn framing_follows_the_head_of_a_request() {
        for (text, framing, keep_alive, expects) in [
            ("GET / HTTP/1.1\r\n\r\n", Framing::None, true, false),
            ("GET / HTTP/1.0\r\n\r\n", Framing::None, false, false),
            (
                "GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
                Framing::None,
                true,
                false,
            ),
            (
                "GET / HTTP/1.1\r\nconnection: x, Close\r\n\r\n",
                Framing::None,
                false,
                false,
            ),
            (
                "POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\n",
                Framing::Length(5),
                true,
                false,
            ),
            (
                "POST / HTTP/1.1\r\ncontent-length: 5\r\nexpect: 100-Continue\r\n\r\n",
                Framing::Length(5),
                true,
                true,
            ),
            (
                "POST / HTTP/1.1\r\ncontent-length: 0\r\nexpect: 100-continue\r\n\r\n",
                Framing::Length(0),
                true,
                false,
            ),
            (
                "\r\nPOST / HTTP/1.1\r\ntransfer-encoding: Chunked\r\n\r\n",
                Framing::Chunked(Chunk::Size),
                true,
                false,
            ),
        ] {
            let head = parse_request(text).unwrap().unwrap();
            assert_eq!(
                (head.framing, head.keep_alive, head.expects),
                (framing, keep_alive, expects),
                "{text}"
            );
        }
    }

    #[test]
    fn requests_that_could_be_read_in_two_ways_are_refused() {
        for lines in [
            "content-length: 5\r\ntransfer-encoding: chunked",
            "content-length: 5\r\ncontent-length: 5",
            "content-length: 5, 5",
            "content-length: +5",
            "content-length: -5",
            "content-length: 0x5",
            "content-length: 5 5",
            "content-length:",
            "content-length: 18446744073709551616",
            "transfer-encoding: chunked, chunked",
            "transfer-encoding: gzip, chunked",
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
            "transfer-encoding: xchunked",
            "transfer-encoding:",
            "content-length : 5",
            "content length: 5",
            " content-length: 5",
            "a: b\r\n content-length: 5",
            "a: b\rcontent-length: 5",
            "a: b\0c",
            "host: a\r\nhost: a",
            "host: a/b",
            "host: a@b",
            "host: a b",
            ": nameless",
        ] {
            let text = format!("POST / HTTP/1.1\r\n{lines}\r\n\r\n");
            assert!(matches!(parse_request(&text), Err(BadHead::Wrong(_))), "{text:?}");
        }
        for line in [
            "GET / HTTP/1.0\r\ntransfer-encoding: chunked",
            "CONNECT a:1 HTTP/1.1\r\ncontent-length: 1",
            "GET /a#b HTTP/1.1",
            "GET  / HTTP/1.1",
            "GET /a b HTTP/1.1",
            "GET / HTTP/2.0",
            "GET / HTTP/1.2",
            "GET /\u{e4} HTTP/1.1\r\na: \u{7f}",
            "GET /",
            "G\u{e4}T / HTTP/1.1",
        ] {
            let text = format!("{line}\r\n\r\n");
            assert!(matches!(parse_request(&text), Err(BadHead::Wrong(_))), "{text:?}");
        }
    }

    #[test]
    fn characters_that_browsers_encode_are_encoded_in_targets() {
        for (target, expected) in [
            ("/?q=\"a\"&x=<b>", "/?q=%22a%22&x=%3Cb%3E"),
            ("/a<b>`c`?d=`e`", "/a%3Cb%3E%60c%60?d=`e`"),
            ("http://web.test/a<b>?\"", "http://web.test/a%3Cb%3E?%22"),
            ("http://web.test?\"", "http://web.test/?%22"),
            ("/caf\u{e9}?caf\u{e9}", "/caf%E9?caf%E9"),
        ] {
            let text = format!("GET {target} HTTP/1.1\r\nhost: web.test\r\n\r\nnext");
            let bytes: Vec<u8> = text.chars().map(|c| u8::try_from(u32::from(c)).unwrap()).collect();
            for come in 1..bytes.len() - 4 {
                let parsed = request(&mut Bytes::copy_from_slice(&bytes[..come]));
                assert!(matches!(parsed, Ok(None)), "{target}: {parsed:?} after {come} bytes");
            }
            let mut bytes = Bytes::from(bytes);
            let head = request(&mut bytes).unwrap().unwrap();
            assert_eq!(
                (&*head.request.uri().to_string(), head.target_encoded),
                (expected, true)
            );
            assert_eq!(bytes, "next");
        }
        for target in ["/a?b=%22{|}^'\\", "/\"{}|^'\\", "/\u{e4}"] {
            let head = parse_request(&format!("GET {target} HTTP/1.1\r\n\r\n"))
                .unwrap()
                .unwrap();
            assert_eq!((&*head.request.uri().to_string(), head.target_encoded), (target, false));
        }
        for line in [
            "GET /<a#b> HTTP/1.1",
            "GET /<a b> HTTP/1.1",
            "GET /<a\tb> HTTP/1.1",
            "GET /<a\rb> HTTP/1.1",
            "GET /<a\u{7f}b> HTTP/1.1",
            "GET http://we<b>.test/ HTTP/1.1",
            "GET <a> HTTP/1.1",
            "CONNECT a<b>:80 HTTP/1.1",
        ] {
            let text = format!("{line}\r\n\r\n");
            assert!(matches!(parse_request(&text), Err(BadHead::Wrong(_))), "{text:?}");
        }
    }

    #[test]
    fn the_host_of_an_absolute_target_counts() {
        for (lines, host) in [
            ("http://a/x HTTP/1.1\r\nhost: b", "a"),
            ("http://me@a:80/x HTTP/1.1", "a:80"),
            ("/x HTTP/1.1\r\nhost: b", "b"),
        ] {
            let head = parse_request(&format!("GET {lines}\r\n\r\n")).unwrap().unwrap();
            assert_eq!(head.request.headers()["host"], host, "{lines}");
        }
    }

    #[test]
    fn many_short_lines_are_read_and_too_many_are_too_long() {
        let with = |n: usize| parse_request(&format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(n)));
        let head = with(1000).unwrap().unwrap();
        assert_eq!(head.request.headers().get_all("a").iter().count(), 1000);
        assert_eq!(with(MAX_LINES + 1).unwrap_err(), BadHead::TooLong);
    }

    #[test]
    fn a_head_is_looked_at_again_only_where_it_may_have_ended() {
        let text = b"GET / HTTP/1.1\r\na: b\r\n\r\n";
        let ends: Vec<_> = (4..text.len()).filter(|n| may_end(&text[..*n], n - 1)).collect();
        assert_eq!(ends, [] as [usize; 0]);
        assert!(may_end(text, text.len() - 1));
        assert!(may_end(text, 20));
        assert!(may_end(b"GET / HTTP/1.1\na: b\n\n", 20));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), seen in 0usize..300) {
            let bytes = Bytes::from(bytes);
            may_end(&bytes, seen.min(bytes.len()));
            let _ = request(&mut bytes.clone());
            let _ = response(&mut { bytes }, &Method::GET);
        }
    }
}
