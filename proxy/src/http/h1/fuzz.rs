//! Readings of whole messages, for what must hold of them.

use bytes::{Bytes, BytesMut};
use futures_util::stream;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};

use crate::http::{
    error::Error,
    h1::{
        framing::{Chunk, Decoded, Framing},
        head, write,
    },
    headers,
};

/// A message that has come whole.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Whole<T> {
    pub(crate) head: T,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: HeaderMap,
}

/// The data and the trailers of a body in chunks, and what follows it, or why there are none.
pub(crate) fn chunks(pieces: &mut dyn Iterator<Item = Bytes>) -> Result<(Vec<u8>, HeaderMap, Vec<u8>), &'static str> {
    let mut inbox = Bytes::new();
    let mut framing = Framing::Chunked(Chunk::Size);
    let (data, trailers) = body(&mut framing, &mut inbox, pieces)?;
    let rest = [&inbox[..], &pieces.collect::<Vec<_>>().concat()].concat();
    Ok((data, trailers, rest))
}

fn body(
    framing: &mut Framing,
    inbox: &mut Bytes,
    pieces: &mut dyn Iterator<Item = Bytes>,
) -> Result<(Vec<u8>, HeaderMap), &'static str> {
    let mut data = Vec::new();
    loop {
        match framing.decode(inbox)? {
            Decoded::Data(piece) => data.extend_from_slice(&piece),
            Decoded::Trailers(trailers) => return Ok((data, trailers)),
            Decoded::End => return Ok((data, HeaderMap::new())),
            Decoded::More => match pieces.next() {
                Some(piece) => *inbox = [&inbox[..], &piece].concat().into(),
                None if *framing == Framing::UntilClose => return Ok((data, HeaderMap::new())),
                None => return Err("it is cut"),
            },
        }
    }
}

/// All whole requests of a connection, up to the first that is refused, or after which nothing may come; leaves what follows.
pub(crate) fn requests(bytes: &mut Bytes) -> Vec<Whole<(Method, String)>> {
    let mut all = Vec::new();
    while let Ok(Some(head)) = head::request(bytes) {
        let (method, target) = (head.request.method().clone(), head.request.uri().to_string());
        let mut framing = head.framing;
        let Ok((body, trailers)) = body(&mut framing, bytes, &mut std::iter::empty()) else {
            break;
        };
        let ends = !head.keep_alive
            || method == Method::CONNECT
            || head.request.headers().contains_key(header::UPGRADE)
            || head.request.version() != Version::HTTP_11;
        all.push(Whole {
            head: (method, target),
            headers: head.request.headers().clone(),
            body,
            trailers,
        });
        if ends {
            break;
        }
    }
    all
}

/// What is left of headers without those of one connection, and those that the writer and the target decide on.
pub(crate) fn passed_on(headers: &HeaderMap) -> HeaderMap {
    let mut headers = headers.clone();
    headers::strip_hop_by_hop(&mut headers);
    for name in [header::HOST, header::CONTENT_LENGTH, header::TRANSFER_ENCODING] {
        headers.remove(name);
    }
    headers
}

/// What of trailers is some. A list of what concerns one connection is none, and so has no say about the others.
pub(crate) fn trailers(trailers: &HeaderMap) -> HeaderMap {
    let lines = trailers.iter().filter(|(name, _)| headers::is_trailer(name));
    lines.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// A request as we write it: with the length of its body, where nothing comes after it, and in chunks.
pub(crate) fn written(whole: &Whole<(Method, String)>) -> Vec<Bytes> {
    let of_body = |(headers, body)| {
        let mut req = Request::new(body);
        *req.method_mut() = whole.head.0.clone();
        *req.uri_mut() = whole.head.1.parse().expect("it was a target before");
        *req.headers_mut() = headers;
        encoded(write::request(req))
    };
    bodies(whole).into_iter().map(of_body).collect()
}

/// A response as we write it to who asked in this way, with what goes before it: with the length of its body, where nothing comes
/// after it, and piece by piece.
pub(crate) fn response_written(answer: &Answer, version: Version, method: &Method) -> Vec<Bytes> {
    let mut before = BytesMut::new();
    for (status, headers) in &answer.interims {
        let mut rsp = Response::new(());
        *rsp.status_mut() = *status;
        *rsp.headers_mut() = headers.clone();
        write::interim(&rsp, &mut before);
    }
    let of_body = |(headers, body)| {
        let mut rsp = Response::new(body);
        *rsp.status_mut() = answer.last.head;
        *rsp.headers_mut() = headers;
        let (message, _) = write::response(rsp, write::Answered { version, method }, write::Afterwards::Kept);
        [&before[..], &encoded(message)].concat().into()
    };
    bodies(&answer.last).into_iter().map(of_body).collect()
}

/// The ways to send what is in a message, each with the headers that go with it.
fn bodies<T>(whole: &Whole<T>) -> Vec<(HeaderMap, UnsyncBoxBody<Bytes, Error>)> {
    let mut headers = whole.headers.clone();
    headers::strip_hop_by_hop(&mut headers);
    let body = Bytes::from(whole.body.clone());
    let mut all = Vec::new();
    if whole.trailers.is_empty() {
        let known = Full::new(body.clone()).map_err(|never| match never {});
        all.push((headers.clone(), known.boxed_unsync()));
    }
    if !body.is_empty() || !whole.trailers.is_empty() {
        headers.remove(header::CONTENT_LENGTH);
        let half = body.len() / 2;
        let pieces = [body.slice(..half), body.slice(half..)];
        let pieces = pieces.into_iter().filter(|piece| !piece.is_empty()).map(Frame::data);
        let trailers = (!whole.trailers.is_empty()).then(|| Frame::trailers(whole.trailers.clone()));
        let frames: Vec<_> = pieces.chain(trailers).map(Ok).collect();
        all.push((headers, StreamBody::new(stream::iter(frames)).boxed_unsync()));
    }
    all
}

fn encoded<B: write::Sent>(mut message: write::Message<B>) -> Bytes {
    let mut out = Vec::new();
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let written = message.poll_write(&mut cx, &mut out);
    assert!(
        matches!(written, std::task::Poll::Ready(Ok(()))),
        "{written:?} after {out:?}"
    );
    out.into()
}

/// A response, and the interim ones before it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) interims: Vec<(StatusCode, HeaderMap)>,
    pub(crate) last: Whole<StatusCode>,
}

/// The response to a request of this method, if it comes whole before the bytes end; and whether nothing comes after it.
pub(crate) fn response(mut bytes: Bytes, method: &Method) -> Option<(Answer, bool)> {
    let mut interims = Vec::new();
    loop {
        let head = head::response(&mut bytes, method).ok()??;
        let (status, headers) = (head.response.status(), head.response.headers().clone());
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return None;
        }
        if status.is_informational() {
            interims.push((status, headers));
            continue;
        }
        let mut framing = head.framing;
        let (body, trailers) = body(&mut framing, &mut bytes, &mut std::iter::empty()).ok()?;
        let last = Whole {
            head: status,
            headers,
            body,
            trailers,
        };
        return Some((Answer { interims, last }, bytes.is_empty()));
    }
}

/// The bytes of a request's head, for who gets all of it at once and for who gets one after the other.
pub(crate) fn request_ends(bytes: &[u8]) -> [Option<usize>; 2] {
    ends(bytes, |bytes| matches!(head::request(bytes), Ok(Some(_))))
}

/// As [`request_ends`], of a response.
pub(crate) fn response_ends(bytes: &[u8]) -> [Option<usize>; 2] {
    ends(bytes, |bytes| {
        matches!(head::response(bytes, &Method::GET), Ok(Some(_)))
    })
}

fn ends(bytes: &[u8], is_head: impl Fn(&mut Bytes) -> bool) -> [Option<usize>; 2] {
    let end = |come: usize| {
        let mut rest = Bytes::copy_from_slice(&bytes[..come]);
        is_head(&mut rest).then(|| come - rest.len())
    };
    let looked_at = |come: &usize| *come == 1 || head::may_end(&bytes[..*come], come - 1);
    [end(bytes.len()), (1..=bytes.len()).filter(looked_at).find_map(end)]
}
