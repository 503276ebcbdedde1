//! Parses the heads of requests and responses.
//!
//! A request is refused if parsers could interpret it in more than one way. A response is refused if its end is ambiguous.
//! Other errors of responses are corrected, because applications must work as without a proxy. Characters of a target that
//! servers accept, but `Uri` rejects, are percent-encoded.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};

use crate::http::{
    error::MAX_HEADERS,
    h1::framing::{ChunkState, Framing, MAX_STACK_HEADERS},
    header_map_pool,
    headers::{has_no_body, parse_decimal},
};

/// Maximum size of a response head.
pub(super) const MAX_RESPONSE_HEAD_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(crate) struct RequestHead {
    pub(crate) request: Request<()>,
    pub(crate) framing: Framing,
    /// Whether the client may send another request on the connection.
    pub(crate) keep_alive: bool,
    /// Whether the client waits for `100 Continue` before it sends the body.
    pub(crate) expects_continue: bool,
    /// Whether the parser has percent-encoded characters of the target.
    pub(crate) target_encoded: bool,
}

#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub(crate) response: Response<()>,
    pub(crate) framing: Framing,
    /// Whether the connection can carry another request.
    pub(crate) keep_alive: bool,
}

/// Why a head is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadError {
    /// The head has too many bytes or headers.
    TooLarge,
    /// The first line is invalid, perhaps only because of characters in the target.
    InvalidFirstLine(&'static str),
    Invalid(&'static str),
}

impl From<&'static str> for HeadError {
    fn from(reason: &'static str) -> Self {
        Self::Invalid(reason)
    }
}

/// Parses a request head from the start of `bytes` and consumes it; `None` while it is incomplete.
///
/// # Errors
/// The bytes are not an HTTP/1 request, or parsers could interpret them in more than one way.
pub(crate) fn parse_request_head(bytes: &mut Bytes) -> Result<Option<RequestHead>, HeadError> {
    match parse_strict_request(bytes) {
        Err(error @ HeadError::InvalidFirstLine(_)) => parse_with_encoded_target(bytes).unwrap_or(Err(error)),
        parsed => parsed,
    }
}

/// Parses a request head after percent-encoding its target; `None` if the target has nothing to encode.
#[cold]
fn parse_with_encoded_target(bytes: &mut Bytes) -> Option<Result<Option<RequestHead>, HeadError>> {
    let start = bytes.iter().position(|byte| *byte == b' ')? + 1;
    let length = bytes[start..].iter().position(|byte| b" \r\n".contains(byte));
    let end = length.map_or(bytes.len(), |length| start + length);
    let target = percent_encode_target(&bytes[start..end])?;
    let mut whole = Bytes::from([&bytes[..start], &target, &bytes[end..]].concat());
    let mut parsed = parse_strict_request(&mut whole);
    if let Ok(Some(head)) = &mut parsed {
        head.target_encoded = true;
        *bytes = whole;
    }
    Some(parsed)
}

/// Percent-encodes the characters of a target that [`Uri`] rejects and browsers encode; `None` if the target has no such
/// characters. Scheme and authority stay unchanged.
///
/// Source: the path and query percent-encode sets of the WHATWG URL Standard, without the characters that `http`
/// accepts.
fn percent_encode_target(target: &[u8]) -> Option<Vec<u8>> {
    let path_start = match target.first() {
        Some(b'/') => 0,
        _ => {
            let authority_start = target.windows(3).position(|part| part == b"://")? + 3;
            authority_start + target[authority_start..].iter().position(|byte| b"/?".contains(byte))?
        }
    };
    let query_start = target.iter().position(|byte| *byte == b'?').unwrap_or(target.len());
    let is_text = std::str::from_utf8(target).is_ok();
    let must_encode = |(index, byte): (usize, u8)| match byte {
        b'<' | b'>' => true,
        b'`' => index < query_start,
        b'"' => index > query_start,
        0x80.. => !is_text,
        _ => false,
    };
    let mut encoded = Vec::with_capacity(target.len() + 16);
    for (index, byte) in target.iter().copied().enumerate() {
        match index >= path_start && must_encode((index, byte)) {
            true => encoded.extend_from_slice(format!("%{byte:02X}").as_bytes()),
            false => encoded.push(byte),
        }
    }
    (encoded.len() > target.len()).then_some(encoded)
}

fn parse_strict_request(bytes: &mut Bytes) -> Result<Option<RequestHead>, HeadError> {
    let mut stack_headers = [const { MaybeUninit::uninit() }; MAX_STACK_HEADERS];
    let mut heap_headers = Vec::new();
    let mut parsed = httparse::Request::new(&mut []);
    let mut result = parsed.parse_with_uninit_headers(bytes, &mut stack_headers);
    if result == Err(httparse::Error::TooManyHeaders) {
        heap_headers.resize(MAX_HEADERS, MaybeUninit::uninit());
        parsed = httparse::Request::new(&mut []);
        result = parsed.parse_with_uninit_headers(bytes, &mut heap_headers);
    }
    let used = match result {
        Ok(httparse::Status::Complete(used)) => used,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(head_error(error)),
    };
    let mut request = Request::new(());
    let (Some(method), Some(target), Some(version)) = (parsed.method, parsed.path, parsed.version) else {
        return Err("incomplete request line".into());
    };
    *request.method_mut() = Method::from_bytes(method.as_bytes()).map_err(|_| "malformed method")?;
    // Servers disagree on fragments: some drop them, some forward them.
    if target.contains('#') {
        return Err("the request target has a fragment".into());
    }
    *request.uri_mut() = Uri::from_maybe_shared(subslice(bytes, target.as_bytes()))
        .map_err(|_| HeadError::InvalidFirstLine("the request target is invalid"))?;
    *request.version_mut() = http1_version(version);
    *request.headers_mut() = parse_headers(bytes, parsed.headers)?;
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
        expects_continue: expects,
        target_encoded: false,
    }))
}

/// Parses a response head from the start of `bytes` and consumes it; `None` while it is incomplete.
///
/// # Errors
/// The bytes are not an HTTP/1 response, or the end of the response is ambiguous.
pub(crate) fn parse_response_head(bytes: &mut Bytes, method: &Method) -> Result<Option<ResponseHead>, HeadError> {
    let mut config = httparse::ParserConfig::default();
    config.allow_spaces_after_header_name_in_responses(true);
    let mut stack_headers = [const { MaybeUninit::uninit() }; MAX_STACK_HEADERS];
    let mut heap_headers = Vec::new();
    let mut parsed = httparse::Response::new(&mut []);
    let mut result = config.parse_response_with_uninit_headers(&mut parsed, bytes, &mut stack_headers);
    if result == Err(httparse::Error::TooManyHeaders) {
        heap_headers.resize(MAX_HEADERS, MaybeUninit::uninit());
        parsed = httparse::Response::new(&mut []);
        result = config.parse_response_with_uninit_headers(&mut parsed, bytes, &mut heap_headers);
    }
    let used = match result {
        Ok(httparse::Status::Complete(used)) if used > MAX_RESPONSE_HEAD_BYTES => return Err(HeadError::TooLarge),
        Ok(httparse::Status::Complete(used)) => used,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(head_error(error)),
    };
    let mut response = Response::new(());
    *response.version_mut() = http1_version(parsed.version.unwrap_or(1));
    *response.status_mut() = parsed
        .code
        .and_then(|code| StatusCode::from_u16(code).ok())
        .ok_or("the status is not a number from 100 to 999")?;
    *response.headers_mut() = parse_headers(bytes, parsed.headers)?;
    consume(bytes, used);
    let (framing, may_reuse_connection) = framing_of_response(&response, method)?;
    match framing {
        // Forward only the framing header that applies.
        Framing::Chunked(_) => drop(response.headers_mut().remove(header::CONTENT_LENGTH)),
        Framing::Length(length) if has_repeated_length(response.headers()) => {
            response.headers_mut().insert(header::CONTENT_LENGTH, length.into());
        }
        Framing::Length(_) | Framing::None | Framing::UntilClose => {}
    }
    let persistent = is_persistent(response.version(), response.headers());
    Ok(Some(ResponseHead {
        keep_alive: may_reuse_connection && framing != Framing::UntilClose && persistent,
        response,
        framing,
    }))
}

pub(super) fn is_framing_header(name: &HeaderName) -> bool {
    *name == header::CONTENT_LENGTH || *name == header::TRANSFER_ENCODING
}

/// Advances `bytes`, and frees its memory when it is used up.
fn consume(bytes: &mut Bytes, used: usize) {
    bytes.advance(used);
    if bytes.is_empty() {
        *bytes = Bytes::new();
    }
}

fn head_error(error: httparse::Error) -> HeadError {
    HeadError::Invalid(match error {
        httparse::Error::TooManyHeaders => return HeadError::TooLarge,
        httparse::Error::HeaderName => "malformed header name",
        httparse::Error::HeaderValue => "malformed header value",
        httparse::Error::NewLine => "malformed line end",
        httparse::Error::Status => "malformed status",
        httparse::Error::Version => "the version is not HTTP/1",
        httparse::Error::Token => return HeadError::InvalidFirstLine("malformed first line"),
    })
}

fn http1_version(minor: u8) -> Version {
    if minor == 0 { Version::HTTP_10 } else { Version::HTTP_11 }
}

/// Returns `part`, a slice of `whole`, without a copy.
fn subslice(whole: &Bytes, part: &[u8]) -> Bytes {
    if part.is_empty() {
        Bytes::new()
    } else {
        whole.slice_ref(part)
    }
}

fn parse_headers(bytes: &Bytes, lines: &[httparse::Header<'_>]) -> Result<HeaderMap, HeadError> {
    let mut headers = header_map_pool::take(lines.len());
    for line in lines {
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| "malformed header name")?;
        let value =
            HeaderValue::from_maybe_shared(subslice(bytes, line.value)).map_err(|_| "malformed header value")?;
        headers.append(name, value);
    }
    Ok(headers)
}

/// Refuses a request with two hosts. The authority of an absolute target replaces `host`, so that no later hop sees another
/// host. A request without a host is accepted: it can go to its original destination, as without a proxy.
///
/// Source: RFC 9112 §3.2, and RFC 9110 §4.2.4 about userinfo.
fn check_host(request: &mut Request<()>) -> Result<(), HeadError> {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err("the request has two hosts".into());
    }
    let is_authority_char = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:[]%".contains(byte);
    if host.is_some_and(|host| !host.as_bytes().iter().all(is_authority_char)) {
        return Err("the host is not a valid authority".into());
    }
    let target_host = match request.uri().authority() {
        Some(authority) if authority.as_str().contains('@') => {
            return Err("the request target contains userinfo".into());
        }
        Some(authority) if request.uri().scheme().is_some() => authority.as_str(),
        _ => return Ok(()),
    };
    if host.is_none_or(|host| host != target_host) {
        let host = HeaderValue::from_str(target_host).map_err(|_| "the request target is invalid")?;
        request.headers_mut().insert(header::HOST, host);
    }
    Ok(())
}

/// The framing of a request. Where the RFC permits two interpretations, the stricter one applies.
///
/// Source: RFC 9112 §6.1 and §6.3.
fn framing_of_request(request: &Request<()>) -> Result<Framing, HeadError> {
    let headers = request.headers();
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let framing = match (lengths.next(), codings.next()) {
        (None, None) => return Ok(Framing::None),
        (Some(_), Some(_)) => return Err("the request has both a content-length and a transfer-encoding".into()),
        (Some(length), None) => {
            if lengths.next().is_some() {
                return Err("the request has two content-lengths".into());
            }
            Framing::Length(parse_decimal(length.as_bytes()).ok_or("the content-length is not a number")?)
        }
        (None, Some(coding)) => {
            if codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
                return Err("the transfer-encoding is not exactly chunked".into());
            }
            if request.version() == Version::HTTP_10 {
                return Err("HTTP/1.0 has no transfer-encoding".into());
            }
            Framing::Chunked(ChunkState::Size)
        }
    };
    if *request.method() == Method::CONNECT {
        return Err("a CONNECT request must not have a body".into());
    }
    Ok(framing)
}

/// The framing of a response, and whether the connection may be reused. It is not reused after a message with both framing
/// headers or a chunked HTTP/1.0 message, although the end of these messages is certain.
///
/// Source: RFC 9112 §6.1 and §6.3.
fn framing_of_response(response: &Response<()>, method: &Method) -> Result<(Framing, bool), HeadError> {
    if has_no_body(response.status(), method) {
        return Ok((Framing::None, true));
    }
    let headers = response.headers();
    let length = content_length(headers)?;
    let codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let mut codings = codings
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        // Old servers send `identity` for no coding.
        .filter(|coding| !coding.eq_ignore_ascii_case(b"identity"));
    match (codings.next(), codings.next()) {
        (None, _) => Ok((length.map_or(Framing::UntilClose, Framing::Length), true)),
        (Some(coding), None) if coding.eq_ignore_ascii_case(b"chunked") => {
            let allows_chunked = response.version() == Version::HTTP_11;
            Ok((Framing::Chunked(ChunkState::Size), length.is_none() && allows_chunked))
        }
        // The proxy does not forward this header, so the receiver could not decode another coding.
        _ => Err("the transfer-encoding is not exactly chunked".into()),
    }
}

/// Whether the connection carries another protocol after a response: by an upgrade or a CONNECT tunnel.
pub(super) fn switches_protocol(status: StatusCode, method: &Method) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (*method == Method::CONNECT && status.is_success())
}

/// Whether `content-length` has more than one value.
fn has_repeated_length(headers: &HeaderMap) -> bool {
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    lengths.next().is_some_and(|first| first.as_bytes().contains(&b',')) || lengths.next().is_some()
}

/// Returns the `content-length`; repeated values must be equal.
fn content_length(headers: &HeaderMap) -> Result<Option<u64>, HeadError> {
    let mut length = None;
    for value in headers.get_all(header::CONTENT_LENGTH) {
        for part in value.as_bytes().split(|b| *b == b',') {
            let number = parse_decimal(part.trim_ascii()).ok_or("the content-length is not a number")?;
            if length.is_some_and(|known| known != number) {
                return Err("the response has two different content-lengths".into());
            }
            length = Some(number);
        }
    }
    Ok(length)
}

/// Whether the connection stays open after the message.
fn is_persistent(version: Version, headers: &HeaderMap) -> bool {
    let has_connection_token = |token: &[u8]| {
        headers.get_all(header::CONNECTION).iter().any(|value| {
            value
                .as_bytes()
                .split(|b| *b == b',')
                .any(|part| part.trim_ascii().eq_ignore_ascii_case(token))
        })
    };
    if version == Version::HTTP_10 {
        has_connection_token(b"keep-alive") && !has_connection_token(b"close")
    } else {
        !has_connection_token(b"close")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::http::h1::framing::has_new_empty_line;

    fn parse_response(text: &str) -> Result<Option<ResponseHead>, HeadError> {
        parse_response_head(&mut Bytes::copy_from_slice(text.as_bytes()), &Method::GET)
    }

    fn parse_request(text: &str) -> Result<Option<RequestHead>, HeadError> {
        parse_request_head(&mut Bytes::copy_from_slice(text.as_bytes()))
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
                Framing::Chunked(ChunkState::Size),
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
            let lengths_sent = head.response.headers().get_all("content-length");
            let lengths_sent: Vec<_> = lengths_sent.iter().cloned().collect();
            match framing {
                Framing::Length(length) => assert_eq!(lengths_sent, [HeaderValue::from(length)], "{text}"),
                _ => assert!(lengths_sent.is_empty(), "{text}"),
            }
        }
    }

    #[test]
    fn ambiguous_responses_are_refused() {
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
    fn a_response_head_over_the_maximum_is_refused() {
        let start = "HTTP/1.1 200 OK\r\na: ";
        let head_of_length = |len: usize| start.to_owned() + &"b".repeat(len - start.len() - 4) + "\r\n\r\n";
        assert!(
            parse_response(&head_of_length(MAX_RESPONSE_HEAD_BYTES))
                .unwrap()
                .is_some()
        );
        assert_eq!(
            parse_response(&head_of_length(MAX_RESPONSE_HEAD_BYTES + 1)).unwrap_err(),
            HeadError::TooLarge
        );
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
                Framing::Chunked(ChunkState::Size),
                true,
                false,
            ),
        ] {
            let head = parse_request(text).unwrap().unwrap();
            assert_eq!(
                (head.framing, head.keep_alive, head.expects_continue),
                (framing, keep_alive, expects),
                "{text}"
            );
        }
    }

    #[test]
    fn ambiguous_requests_are_refused() {
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
            assert_ne!(parse_request(&text).expect_err(&text), HeadError::TooLarge);
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
            assert_ne!(parse_request(&text).expect_err(&text), HeadError::TooLarge);
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
            for n_received in 1..bytes.len() - 4 {
                let parsed = parse_request_head(&mut Bytes::copy_from_slice(&bytes[..n_received]));
                assert!(
                    matches!(parsed, Ok(None)),
                    "{target}: {parsed:?} after {n_received} bytes"
                );
            }
            let mut bytes = Bytes::from(bytes);
            let head = parse_request_head(&mut bytes).unwrap().unwrap();
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
            // The credentials would reach the next hop.
            "GET http://me@a:80/x HTTP/1.1",
            "CONNECT me:password@a:80 HTTP/1.1",
        ] {
            let text = format!("{line}\r\n\r\n");
            assert_ne!(parse_request(&text).expect_err(&text), HeadError::TooLarge);
        }
    }

    #[test]
    fn the_host_of_an_absolute_target_replaces_the_host_header() {
        for (lines, host) in [
            ("http://a/x HTTP/1.1\r\nhost: b", "a"),
            ("http://a:80/x HTTP/1.1", "a:80"),
            ("/x HTTP/1.1\r\nhost: b", "b"),
        ] {
            let head = parse_request(&format!("GET {lines}\r\n\r\n")).unwrap().unwrap();
            assert_eq!(head.request.headers()["host"], host, "{lines}");
        }
    }

    #[test]
    fn heads_with_many_headers_are_parsed_up_to_the_limit() {
        let parse_with_headers = |n: usize| parse_request(&format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(n)));
        let head = parse_with_headers(1000).unwrap().unwrap();
        assert_eq!(head.request.headers().get_all("a").iter().count(), 1000);
        assert_eq!(parse_with_headers(MAX_HEADERS + 1).unwrap_err(), HeadError::TooLarge);
    }

    #[test]
    fn a_head_is_parsed_again_only_if_it_may_be_complete() {
        let text = b"GET / HTTP/1.1\r\na: b\r\n\r\n";
        let ends: Vec<_> = (4..text.len())
            .filter(|n| has_new_empty_line(&text[..*n], n - 1))
            .collect();
        assert_eq!(ends, [] as [usize; 0]);
        assert!(has_new_empty_line(text, text.len() - 1));
        assert!(has_new_empty_line(text, 20));
        assert!(has_new_empty_line(b"GET / HTTP/1.1\na: b\n\n", 20));
    }

    proptest! {
        #[test]
        fn parsing_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300), seen in 0usize..300) {
            let bytes = Bytes::from(bytes);
            has_new_empty_line(&bytes, seen.min(bytes.len()));
            let _ = parse_request_head(&mut bytes.clone());
            let _ = parse_response_head(&mut { bytes }, &Method::GET);
        }
    }
}
