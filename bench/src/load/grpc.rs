//! gRPC client for `tulle.bench.Echo` over HTTP/2. It frames messages itself, so that no client library hides retries or errors.

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

use super::args::Method;
use super::http::{Http2, response_from_head};
use super::outcome::{ExchangeResponse, Failure, ResponseStatus};
use super::target::Target;
use crate::echo::{EchoReply, EchoRequest};

/// Performs one call and reads its response up to the trailers.
pub(super) async fn exchange(client: &Http2) -> Result<ExchangeResponse, Failure> {
    let target = client.target();
    let path = PathAndQuery::from_static(match target.method {
        Method::Unary => "/tulle.bench.Echo/Unary",
        Method::ServerStream => "/tulle.bench.Echo/ServerStream",
        Method::ClientStream => "/tulle.bench.Echo/ClientStream",
        Method::Bidi => "/tulle.bench.Echo/Bidi",
    });
    let (body, mut sender) = request_body(target)?;
    let rsp = client.send(http::Method::POST, path, request_headers(), body).await?;
    let mut response = response_from_head(&rsp);
    if rsp.status() != http::StatusCode::OK {
        return Ok(response);
    }
    // A trailers-only response has no body; its status is in the response headers.
    let mut status = grpc_status(rsp.headers());
    let mut replies = ReplyStream {
        body: rsp.into_body(),
        buf: BytesMut::new(),
    };
    let mut messages = 0;
    while let Some(event) = replies.next().await? {
        match event {
            Event::Reply(reply) => {
                messages += 1;
                response.received += reply.payload.len() as u64;
                if let Some(why) = validate_reply(target, &reply) {
                    return Err(Failure::UnexpectedResponse(why.into()));
                }
                if let Some(sender) = &mut sender {
                    sender.next().await?;
                }
            }
            Event::Trailers(trailers) => {
                response.reason = response
                    .reason
                    .take()
                    .or_else(|| super::outcome::proxy_reason(&trailers));
                status = status.or_else(|| grpc_status(&trailers));
            }
        }
    }
    let code = status.ok_or(Failure::Closed)?;
    response.status = ResponseStatus::Grpc(code);
    response.sent = target.payload.len() as u64 * u64::from(n_request_messages(target));
    if code == 0 && messages != expected_replies(target) {
        return Err(Failure::UnexpectedResponse(
            format!("{messages} messages in the stream").into(),
        ));
    }
    Ok(response)
}

fn request_headers() -> HeaderMap {
    HeaderMap::from_iter([
        (CONTENT_TYPE, HeaderValue::from_static("application/grpc")),
        (TE, HeaderValue::from_static("trailers")),
    ])
}

/// Number of request messages of a call.
fn n_request_messages(target: &Target) -> u32 {
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

fn validate_reply(target: &Target, reply: &EchoReply) -> Option<&'static str> {
    match target.method {
        Method::ClientStream => {
            (reply.messages != u64::from(target.messages)).then_some("the server received another number of messages")
        }
        _ => (reply.payload != target.payload).then_some("the payload differs from the one sent"),
    }
}

/// The request body, and for a bidirectional stream the sender of its further messages.
fn request_body(target: &Target) -> Result<(Body, Option<MessageSender>), Failure> {
    let message = encode_request(target);
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
            let mut sender = MessageSender {
                message,
                left: target.messages,
                tx: Some(tx),
            };
            sender.start();
            Ok((Body::new(StreamBody::new(frames)), Some(sender)))
        }
    }
}

/// Sends the messages of a bidirectional stream. Each message waits for the reply to the previous one.
struct MessageSender {
    message: Bytes,
    left: u32,
    tx: Option<mpsc::Sender<Bytes>>,
}

impl MessageSender {
    /// Sends the first message. The channel has capacity for it.
    fn start(&mut self) {
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                if let Some(tx) = &self.tx {
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

/// Encodes a request message with gRPC's five-byte prefix: flag "not compressed", and the length.
fn encode_request(target: &Target) -> Bytes {
    let message = EchoRequest {
        payload: target.payload.clone(),
        repeat: target.messages,
    };
    let mut framed = BytesMut::with_capacity(MESSAGE_HEADER_BYTES + message.encoded_len());
    framed.put_u8(0);
    framed.put_u32(message.encoded_len() as u32);
    message.encode_raw(&mut framed);
    framed.freeze()
}

/// Reader of the messages of a response body.
struct ReplyStream {
    body: Incoming,
    buf: BytesMut,
}

enum Event {
    Reply(EchoReply),
    Trailers(HeaderMap),
}

impl ReplyStream {
    async fn next(&mut self) -> Result<Option<Event>, Failure> {
        loop {
            if let Some(message) = split_message(&mut self.buf)? {
                let reply = EchoReply::decode(message)
                    .map_err(|error| Failure::UnexpectedResponse(error.to_string().into()))?;
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

/// Removes one complete message from the front of `buf`. Returns `None` if it is incomplete.
fn split_message(buf: &mut BytesMut) -> Result<Option<Bytes>, Failure> {
    let Some(head) = buf.first_chunk::<MESSAGE_HEADER_BYTES>() else {
        return Ok(None);
    };
    let [compressed, length @ ..] = *head;
    let length = u32::from_be_bytes(length) as usize;
    if compressed != 0 || length > MAX_MESSAGE_BYTES {
        return Err(Failure::UnexpectedResponse(
            format!("message with flag {compressed} and length {length}").into(),
        ));
    }
    if buf.len() < MESSAGE_HEADER_BYTES + length {
        return Ok(None);
    }
    buf.advance(MESSAGE_HEADER_BYTES);
    Ok(Some(buf.split_to(length).freeze()))
}

fn grpc_status(headers: &HeaderMap) -> Option<u16> {
    headers.get(GRPC_STATUS)?.to_str().ok()?.parse().ok()
}

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE_HEADER_BYTES: usize = 5;
const MAX_MESSAGE_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_messages_stay_in_the_buffer() {
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
