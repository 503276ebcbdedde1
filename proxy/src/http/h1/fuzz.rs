//! Readings of whole messages, for what must hold of them.

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, Method, Request, Version, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};

use crate::http::{
    h1::{
        framing::{Chunk, Decoded, Framing},
        head, write,
    },
    headers,
};

/// A message that has come whole.
#[derive(Debug, PartialEq)]
pub(crate) struct Whole<T> {
    pub(crate) head: T,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: HeaderMap,
}

/// The data and the trailers of a body in chunks, or why there are none.
pub(crate) fn chunks(pieces: &mut dyn Iterator<Item = Bytes>) -> Result<(Vec<u8>, HeaderMap), &'static str> {
    let mut inbox = Bytes::new();
    let mut framing = Framing::Chunked(Chunk::Size);
    body(&mut framing, &mut inbox, pieces)
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

/// All whole requests of a connection, up to the first that is refused, or after which nothing may come.
pub(crate) fn requests(mut bytes: Bytes) -> Vec<Whole<(Method, String)>> {
    let mut all = Vec::new();
    while let Ok(Some(head)) = head::request(&mut bytes) {
        let (method, target) = (head.request.method().clone(), head.request.uri().to_string());
        let mut framing = head.framing;
        let Ok((body, trailers)) = body(&mut framing, &mut bytes, &mut std::iter::empty()) else {
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

/// A request as we write it: with the length of its body, where nothing comes after it, and in chunks.
pub(crate) fn written(whole: &Whole<(Method, String)>) -> Vec<Bytes> {
    let mut req = Request::new(());
    *req.method_mut() = whole.head.0.clone();
    *req.uri_mut() = whole.head.1.parse().expect("it was a target before");
    *req.headers_mut() = whole.headers.clone();
    headers::strip_hop_by_hop(req.headers_mut());
    let body = Bytes::from(whole.body.clone());
    let mut all = Vec::new();
    if whole.trailers.is_empty() {
        let known = Full::new(body.clone()).map_err(|never| match never {});
        all.push(encoded(write::request(req.clone().map(|()| known))));
    }
    if !body.is_empty() || !whole.trailers.is_empty() {
        req.headers_mut().remove(header::CONTENT_LENGTH);
        let half = body.len() / 2;
        let pieces = [body.slice(..half), body.slice(half..)];
        let pieces = pieces.into_iter().filter(|piece| !piece.is_empty()).map(Frame::data);
        let trailers = (!whole.trailers.is_empty()).then(|| Frame::trailers(whole.trailers.clone()));
        let frames = pieces.chain(trailers).map(Ok);
        all.push(encoded(write::request(
            req.map(|()| StreamBody::new(stream::iter(frames))),
        )));
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

/// The response to a GET, if it comes whole before the bytes end.
pub(crate) fn response(mut bytes: Bytes) -> Option<Whole<u16>> {
    loop {
        let head = head::response(&mut bytes, &Method::GET).ok()??;
        let status = head.response.status();
        if status.is_informational() {
            if status.as_u16() == 101 {
                return None;
            }
            continue;
        }
        let mut framing = head.framing;
        let (body, trailers) = body(&mut framing, &mut bytes, &mut std::iter::empty()).ok()?;
        return Some(Whole {
            head: status.as_u16(),
            headers: head.response.headers().clone(),
            body,
            trailers,
        });
    }
}
