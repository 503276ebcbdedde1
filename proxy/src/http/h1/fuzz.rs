//! Parses and encodes complete messages, for fuzz targets and property tests.

use bytes::{Bytes, BytesMut};
use futures_util::stream;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};

use crate::http::{
    error::Error,
    h1::{
        encode,
        framing::{self, ChunkState, DecodeStep, Framing},
        head,
    },
    headers,
};

/// A complete message.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ParsedMessage<T> {
    pub(crate) head: T,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: HeaderMap,
}

/// Decodes a chunked body. Returns its data, its trailers and the bytes after it, or why it is invalid.
pub(crate) fn decode_chunked(
    pieces: &mut dyn Iterator<Item = Bytes>,
) -> Result<(Vec<u8>, HeaderMap, Vec<u8>), &'static str> {
    let mut read_buffer = Bytes::new();
    let mut framing = Framing::Chunked(ChunkState::Size);
    let (data, trailers) = decode_body(&mut framing, &mut read_buffer, pieces)?;
    let rest = [&read_buffer[..], &pieces.collect::<Vec<_>>().concat()].concat();
    Ok((data, trailers, rest))
}

/// Decodes a body; reads from `pieces` when the buffer is empty.
fn decode_body(
    framing: &mut Framing,
    read_buffer: &mut Bytes,
    pieces: &mut dyn Iterator<Item = Bytes>,
) -> Result<(Vec<u8>, HeaderMap), &'static str> {
    let mut data = Vec::new();
    loop {
        match framing.decode(read_buffer)? {
            DecodeStep::Data(piece) => data.extend_from_slice(&piece),
            DecodeStep::Trailers(trailers) => return Ok((data, trailers)),
            DecodeStep::End => return Ok((data, HeaderMap::new())),
            DecodeStep::NeedsData => match pieces.next() {
                Some(piece) => *read_buffer = [&read_buffer[..], &piece].concat().into(),
                None if *framing == Framing::UntilClose => return Ok((data, HeaderMap::new())),
                None => return Err("truncated body"),
            },
        }
    }
}

/// Parses the requests of a connection until one is invalid or ends the connection. Leaves the remaining bytes in `bytes`.
pub(crate) fn parse_requests(bytes: &mut Bytes) -> Vec<ParsedMessage<(Method, String)>> {
    let mut all = Vec::new();
    while let Ok(Some(head)) = head::parse_request_head(bytes) {
        let (method, target) = (head.request.method().clone(), head.request.uri().to_string());
        let mut framing = head.framing;
        let Ok((body, trailers)) = decode_body(&mut framing, bytes, &mut std::iter::empty()) else {
            break;
        };
        let is_last = !head.keep_alive
            || method == Method::CONNECT
            || head.request.headers().contains_key(header::UPGRADE)
            || head.request.version() != Version::HTTP_11;
        all.push(ParsedMessage {
            head: (method, target),
            headers: head.request.headers().clone(),
            body,
            trailers,
        });
        if is_last {
            break;
        }
    }
    all
}

/// Headers without hop-by-hop headers, framing headers and `host`.
pub(crate) fn end_to_end_headers(headers: &HeaderMap) -> HeaderMap {
    let mut headers = headers.clone();
    headers::strip_hop_by_hop(&mut headers);
    for name in [header::HOST, header::CONTENT_LENGTH, header::TRANSFER_ENCODING] {
        headers.remove(name);
    }
    headers
}

/// The trailers that are forwarded. A `connection` trailer is dropped, and the trailers that it names are kept.
pub(crate) fn forwarded_trailers(trailers: &HeaderMap) -> HeaderMap {
    let lines = trailers.iter().filter(|(name, _)| headers::is_forwarded_trailer(name));
    lines.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Encodes a request in each possible framing: with a length if it has no trailers, and chunked.
pub(crate) fn encode_request_variants(message: &ParsedMessage<(Method, String)>) -> Vec<Bytes> {
    let encode = |(headers, body)| {
        let mut req = Request::new(body);
        *req.method_mut() = message.head.0.clone();
        *req.uri_mut() = message.head.1.parse().expect("the target was parsed before");
        *req.headers_mut() = headers;
        encoded(encode::encode_request(req))
    };
    body_variants(message).into_iter().map(encode).collect()
}

/// Encodes a response to a request of this version and method, with its interim responses, in each possible framing.
pub(crate) fn encode_response_variants(response: &ParsedResponse, version: Version, method: &Method) -> Vec<Bytes> {
    let mut interims = BytesMut::new();
    for (status, headers) in &response.interims {
        let mut rsp = Response::new(());
        *rsp.status_mut() = *status;
        *rsp.headers_mut() = headers.clone();
        encode::encode_interim(&rsp, &mut interims);
    }
    let encode = |(headers, body)| {
        let mut rsp = Response::new(body);
        *rsp.status_mut() = response.last.head;
        *rsp.headers_mut() = headers;
        let (message, _) = encode::encode_response(
            rsp,
            encode::RequestLine { version, method },
            encode::ConnectionReuse::KeepAlive,
        );
        [&interims[..], &encoded(message)].concat().into()
    };
    body_variants(&response.last).into_iter().map(encode).collect()
}

/// The possible framings of a message: each one as headers and body.
fn body_variants<T>(message: &ParsedMessage<T>) -> Vec<(HeaderMap, UnsyncBoxBody<Bytes, Error>)> {
    let mut headers = message.headers.clone();
    headers::strip_hop_by_hop(&mut headers);
    let body = Bytes::from(message.body.clone());
    let mut all = Vec::new();
    if message.trailers.is_empty() {
        let known = Full::new(body.clone()).map_err(|never| match never {});
        all.push((headers.clone(), known.boxed_unsync()));
    }
    if !body.is_empty() || !message.trailers.is_empty() {
        headers.remove(header::CONTENT_LENGTH);
        let half = body.len() / 2;
        let pieces = [body.slice(..half), body.slice(half..)];
        let pieces = pieces.into_iter().filter(|piece| !piece.is_empty()).map(Frame::data);
        let trailers = (!message.trailers.is_empty()).then(|| Frame::trailers(message.trailers.clone()));
        let frames: Vec<_> = pieces.chain(trailers).map(Ok).collect();
        all.push((headers, StreamBody::new(stream::iter(frames)).boxed_unsync()));
    }
    all
}

/// The bytes of a message.
fn encoded<B: encode::SendableBody>(mut message: encode::OutgoingMessage<B>) -> Bytes {
    let mut out = Vec::new();
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let written = message.poll_write(&mut cx, &mut out);
    assert!(
        matches!(written, std::task::Poll::Ready(Ok(()))),
        "{written:?} after {out:?}"
    );
    out.into()
}

/// A response with the interim responses before it.
#[derive(Debug)]
pub(crate) struct ParsedResponse {
    pub(crate) interims: Vec<(StatusCode, HeaderMap)>,
    pub(crate) last: ParsedMessage<StatusCode>,
}

/// Parses the complete response to a request of this method. The second value is true if no bytes follow the response.
pub(crate) fn parse_response(mut bytes: Bytes, method: &Method) -> Option<(ParsedResponse, bool)> {
    let mut interims = Vec::new();
    loop {
        let head = head::parse_response_head(&mut bytes, method).ok()??;
        let (status, headers) = (head.response.status(), head.response.headers().clone());
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return None;
        }
        if status.is_informational() {
            interims.push((status, headers));
            continue;
        }
        let mut framing = head.framing;
        let (body, trailers) = decode_body(&mut framing, &mut bytes, &mut std::iter::empty()).ok()?;
        let last = ParsedMessage {
            head: status,
            headers,
            body,
            trailers,
        };
        return Some((ParsedResponse { interims, last }, bytes.is_empty()));
    }
}

/// Length of a request's head, parsed in two ways: from all bytes at once, and with bytes that arrive one at a time.
pub(crate) fn request_head_lengths(bytes: &[u8]) -> [Option<usize>; 2] {
    head_lengths(bytes, |bytes| matches!(head::parse_request_head(bytes), Ok(Some(_))))
}

/// As [`request_head_lengths`], for a response.
pub(crate) fn response_head_lengths(bytes: &[u8]) -> [Option<usize>; 2] {
    head_lengths(bytes, |bytes| {
        matches!(head::parse_response_head(bytes, &Method::GET), Ok(Some(_)))
    })
}

fn head_lengths(bytes: &[u8], is_head: impl Fn(&mut Bytes) -> bool) -> [Option<usize>; 2] {
    let end = |n_received: usize| {
        let mut rest = Bytes::copy_from_slice(&bytes[..n_received]);
        is_head(&mut rest).then(|| n_received - rest.len())
    };
    let is_parsed = |n: &usize| *n == 1 || framing::has_new_empty_line(&bytes[..*n], n - 1);
    [end(bytes.len()), (1..=bytes.len()).filter(is_parsed).find_map(end)]
}
