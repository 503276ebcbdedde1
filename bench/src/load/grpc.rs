//! gRPC: calls of `tulle.bench.Echo` on an HTTP/2 connection, framed here so that nothing is hidden behind a client library.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};
use http::header::{CONTENT_TYPE, TE};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Incoming;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;

use super::Method;
use super::http::{Http2, head};
use super::outcome::{Answer, Failure, Verdict};
use super::target::Target;
use crate::echo::{EchoReply, EchoRequest};

/// One call, from its head to its trailers.
pub(super) async fn exchange(client: &Http2) -> Result<Answer, Failure> {
    let target = client.target();
    let path = PathAndQuery::from_static(match target.method {
        Method::Unary => "/tulle.bench.Echo/Unary",
        Method::ServerStream => "/tulle.bench.Echo/ServerStream",
        Method::ClientStream => "/tulle.bench.Echo/ClientStream",
        Method::Bidi => "/tulle.bench.Echo/Bidi",
    });
    let (body, mut pacer) = body(target)?;
    let rsp = client.send(http::Method::POST, path, headers(), body).await?;
    let mut answer = head(&rsp);
    if rsp.status() != http::StatusCode::OK {
        return Ok(answer);
    }
    // An error known at once comes without a body: its status is in the head.
    let mut status = status(rsp.headers());
    let mut replies = Replies {
        body: rsp.into_body(),
        buf: BytesMut::new(),
    };
    let mut messages = 0;
    while let Some(event) = replies.next().await? {
        match event {
            Event::Reply(reply) => {
                messages += 1;
                answer.received += reply.payload.len() as u64;
                if let Some(why) = wrong(target, &reply) {
                    return Err(Failure::Wrong(why.into()));
                }
                if let Some(pacer) = &mut pacer {
                    pacer.next().await?;
                }
            }
            Event::Trailers(trailers) => {
                answer.reason = answer.reason.take().or_else(|| super::outcome::proxy_reason(&trailers));
                status = status.or_else(|| self::status(&trailers));
            }
        }
    }
    let code = status.ok_or(Failure::Closed)?;
    answer.verdict = Verdict::Grpc(code);
    answer.sent = target.payload.len() as u64 * u64::from(sends(target));
    if code == 0 && messages != expected_replies(target) {
        return Err(Failure::Wrong(format!("{messages} messages in the stream").into()));
    }
    Ok(answer)
}

fn headers() -> HeaderMap {
    HeaderMap::from_iter([
        (CONTENT_TYPE, HeaderValue::from_static("application/grpc")),
        (TE, HeaderValue::from_static("trailers")),
    ])
}

/// How many messages a call sends.
fn sends(target: &Target) -> u32 {
    match target.method {
        Method::Unary | Method::ServerStream => 1,
        Method::ClientStream | Method::Bidi => target.messages,
    }
}

fn expected_replies(target: &Target) -> u32 {
    match target.method {
        Method::Unary | Method::ClientStream => 1,
        Method::ServerStream => target.messages.max(1),
        Method::Bidi => target.messages,
    }
}

fn wrong(target: &Target, reply: &EchoReply) -> Option<&'static str> {
    match target.method {
        Method::ClientStream => {
            (reply.messages != u64::from(target.messages)).then_some("messages were lost on the way")
        }
        _ => (reply.payload != target.payload).then_some("another payload than the one sent"),
    }
}

/// The request body; for a bidirectional stream also what sends its further messages.
fn body(target: &Target) -> Result<(Body, Option<Pacer>), Failure> {
    let message = encode(target);
    match target.method {
        Method::Unary | Method::ServerStream => Ok((Body::new(Full::new(message)), None)),
        Method::ClientStream => {
            let messages = stream::repeat(message).take(target.messages as usize);
            Ok((
                Body::new(StreamBody::new(
                    messages.map(|m| Ok::<_, tonic::Status>(Frame::data(m))),
                )),
                None,
            ))
        }
        Method::Bidi => {
            let (tx, rx) = mpsc::channel(1);
            let frames = ReceiverStream::new(rx).map(|m| Ok::<_, tonic::Status>(Frame::data(m)));
            let mut pacer = Pacer {
                message,
                left: target.messages,
                tx: Some(tx),
            };
            pacer.start();
            Ok((Body::new(StreamBody::new(frames)), Some(pacer)))
        }
    }
}

/// Sends the messages of a bidirectional stream one by one, each after the reply to the one before.
struct Pacer {
    message: Bytes,
    left: u32,
    tx: Option<mpsc::Sender<Bytes>>,
}

impl Pacer {
    /// Puts the first message into the empty channel.
    fn start(&mut self) {
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                if let Some(tx) = &self.tx {
                    // The channel holds one message and has none yet.
                    let _ = tx.try_send(self.message.clone());
                }
            }
            None => self.tx = None,
        }
    }

    async fn next(&mut self) -> Result<(), Failure> {
        let Some(left) = self.left.checked_sub(1) else {
            self.tx = None;
            return Ok(());
        };
        self.left = left;
        match &self.tx {
            Some(tx) => tx.send(self.message.clone()).await.map_err(|_| Failure::Closed),
            None => Ok(()),
        }
    }
}

/// A request message with gRPC's five bytes in front: not compressed, and the length.
fn encode(target: &Target) -> Bytes {
    let message = EchoRequest {
        payload: target.payload.clone(),
        repeat: target.messages,
    };
    let mut framed = BytesMut::with_capacity(PREFIX + message.encoded_len());
    framed.put_u8(0);
    framed.put_u32(message.encoded_len() as u32);
    message.encode_raw(&mut framed);
    framed.freeze()
}

/// The messages of a response body.
struct Replies {
    body: Incoming,
    buf: BytesMut,
}

enum Event {
    Reply(EchoReply),
    Trailers(HeaderMap),
}

impl Replies {
    async fn next(&mut self) -> Result<Option<Event>, Failure> {
        loop {
            if let Some(message) = split_message(&mut self.buf)? {
                let reply = EchoReply::decode(message).map_err(|error| Failure::Wrong(error.to_string().into()))?;
                return Ok(Some(Event::Reply(reply)));
            }
            let Some(frame) = self.body.frame().await else {
                return Ok(None);
            };
            match frame?.into_data() {
                Ok(data) => self.buf.extend_from_slice(&data),
                Err(frame) => return Ok(frame.into_trailers().ok().map(Event::Trailers)),
            }
        }
    }
}

/// Takes a whole message off the front of `buf`.
fn split_message(buf: &mut BytesMut) -> Result<Option<Bytes>, Failure> {
    let Some(head) = buf.first_chunk::<PREFIX>() else {
        return Ok(None);
    };
    let [compressed, length @ ..] = *head;
    let length = u32::from_be_bytes(length) as usize;
    if compressed != 0 || length > LARGEST_MESSAGE {
        return Err(Failure::Wrong(
            format!("message with flag {compressed} and length {length}").into(),
        ));
    }
    if buf.len() < PREFIX + length {
        return Ok(None);
    }
    buf.advance(PREFIX);
    Ok(Some(buf.split_to(length).freeze()))
}

fn status(headers: &HeaderMap) -> Option<u16> {
    headers.get(GRPC_STATUS)?.to_str().ok()?.parse().ok()
}

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const PREFIX: usize = 5;
const LARGEST_MESSAGE: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_taken_off_only_when_whole() {
        let mut buf = BytesMut::from(&[0, 0, 0, 0, 2, b'a'][..]);
        assert_eq!(split_message(&mut buf), Ok(None));
        buf.extend_from_slice(b"bc");
        assert_eq!(split_message(&mut buf), Ok(Some(Bytes::from_static(b"ab"))));
        assert_eq!(&buf[..], b"c");
    }

    #[test]
    fn compressed_and_huge_messages_are_refused() {
        for head in [[1, 0, 0, 0, 0], [0, 255, 255, 255, 255]] {
            assert!(split_message(&mut BytesMut::from(&head[..])).is_err(), "{head:?}");
        }
    }
}
