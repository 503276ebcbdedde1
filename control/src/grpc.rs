//! gRPC methods that encode a response only once: streams with the same response share the bytes.
//!
//! tonic's own servers encode each message once per stream, into a buffer that lives as long as the stream. A control
//! plane has tens of thousands of streams, and most of them send the same messages.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::stream::{self, Stream};
use http::header::CONTENT_TYPE;
use http::{Extensions, HeaderMap, HeaderValue, Request, Response};
use http_body::{Body as HttpBody, Frame};
use prost::Message;
use tonic::body::Body;
use tonic::codec::{Codec as _, Streaming};
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::server::NamedService;
use tonic::{Code, Status};
use tulle_core::identity::Identity;
use tulle_proto::codec::Codec;

/// The client of a call, as the connection has authenticated it. Each request from a connection has it as an extension.
#[derive(Clone, Debug)]
pub enum Caller {
    /// A process on this host, in plaintext over loopback.
    ThisMachine,
    /// A TLS client with the identities in its certificate. The list is empty without a client certificate.
    Peer { ip: IpAddr, identities: Arc<[Identity]> },
}

impl Caller {
    /// The client's address.
    pub(crate) fn ip(&self) -> IpAddr {
        match self {
            Self::ThisMachine => Ipv4Addr::LOCALHOST.into(),
            Self::Peer { ip, .. } => *ip,
        }
    }

    /// The address of the client of a request. Requests from this process have no `Caller`; their address is loopback.
    pub(crate) fn ip_from_extensions(extensions: &Extensions) -> IpAddr {
        Self::ip_or_loopback(extensions.get())
    }

    /// The address of a client; loopback if there is none, because requests from this process have no `Caller`.
    pub(crate) fn ip_or_loopback(caller: Option<&Self>) -> IpAddr {
        caller.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), Self::ip)
    }
}

/// The methods of a gRPC service.
pub trait Methods: Clone + Send + Sync + 'static {
    /// The full service name, including its package.
    const SERVICE: &'static str;

    /// Responds to a call of the method. For an unknown method the status is UNIMPLEMENTED.
    fn call(self, method: &str, req: Request<Body>) -> impl Future<Output = Response<Body>> + Send;
}

/// A gRPC service for tonic's router.
#[derive(Clone, Debug)]
pub struct Service<M>(pub(crate) M);

impl<M: Methods> tower::Service<Request<Body>> for Service<M> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        let methods = self.0.clone();
        Box::pin(async move {
            // tonic routes requests by the service name. The last path segment is the method.
            let path = req.uri().path().to_owned();
            let method = path.rsplit('/').next().unwrap_or_default();
            Ok(methods.call(method, req).await)
        })
    }
}

impl<M: Methods> NamedService for Service<M> {
    const NAME: &'static str = M::SERVICE;
}

/// The response to an unknown method.
pub(crate) fn unimplemented() -> Response<Body> {
    Status::unimplemented("").into_http()
}

/// Encodes messages in sequence, in gRPC's wire format.
pub(crate) fn encode<M: Message>(messages: &[M]) -> Bytes {
    let length = messages
        .iter()
        .map(|message| FRAME_HEADER_LEN + message.encoded_len())
        .sum();
    let mut bytes = BytesMut::with_capacity(length);
    for message in messages {
        bytes.put_u8(UNCOMPRESSED);
        // Messages of 4 GiB do not occur.
        bytes.put_u32(u32::try_from(message.encoded_len()).unwrap_or(u32::MAX));
        message.encode(&mut bytes).expect("the buffer has the computed length");
    }
    bytes.freeze()
}

/// Responds with a stream of encoded messages to a request that has one message. The stream ends with the status OK.
pub(crate) async fn stream<M, S>(req: Request<Body>, method: impl FnOnce(M) -> Result<S, Status>) -> Response<Body>
where
    M: Message + Default + 'static,
    S: Stream<Item = Bytes> + Send + 'static,
{
    respond(message(req).await.and_then(method))
}

/// Responds with one encoded message to a request that has one message.
pub(crate) async fn unary<M>(req: Request<Body>, method: impl FnOnce(M) -> Result<Bytes, Status>) -> Response<Body>
where
    M: Message + Default + 'static,
{
    stream(req, |message| method(message).map(|bytes| stream::iter([bytes]))).await
}

/// Decodes the message of a request with one message.
pub(crate) async fn message<M: Message + Default + 'static>(req: Request<Body>) -> Result<M, Status> {
    let decoder = Codec::<M, M>::default().decoder();
    let mut messages = Streaming::new_request(decoder, req.into_body(), None, None);
    messages
        .message()
        .await?
        .ok_or_else(|| Status::invalid_argument("the request has no message"))
}

/// Responds with a stream of encoded messages, which ends with the status OK, or with an error.
pub(crate) fn respond<S>(messages: Result<S, Status>) -> Response<Body>
where
    S: Stream<Item = Bytes> + Send + 'static,
{
    let messages = match messages {
        Ok(messages) => Box::pin(messages),
        Err(status) => return status.into_http(),
    };
    let mut rsp = Response::new(Body::new(Messages {
        messages,
        state: BodyState::Open,
    }));
    rsp.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
    rsp
}

struct Messages {
    messages: Pin<Box<dyn Stream<Item = Bytes> + Send>>,
    state: BodyState,
}

#[derive(PartialEq, Eq)]
enum BodyState {
    Open,
    /// The trailers are sent.
    Ended,
}

impl HttpBody for Messages {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.state == BodyState::Ended {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(Ok(match ready!(self.messages.as_mut().poll_next(cx)) {
            Some(bytes) => Frame::data(bytes),
            None => {
                self.state = BodyState::Ended;
                let ok = HeaderValue::from(Code::Ok as u16);
                Frame::trailers(HeaderMap::from_iter([(Status::GRPC_STATUS, ok)]))
            }
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.state == BodyState::Ended
    }
}

/// Length of the prefix of each message: a compression flag and the message length.
const FRAME_HEADER_LEN: usize = 5;
const UNCOMPRESSED: u8 = 0;

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use tulle_proto::destination::GetDestination;

    use super::*;

    fn request(path: &str) -> GetDestination {
        GetDestination {
            path: path.to_owned(),
            ..GetDestination::default()
        }
    }

    #[tokio::test]
    async fn encoded_messages_are_decoded_by_tonic() {
        let encoded = encode(&[request("a"), request(&"b".repeat(70_000))]);
        let body = http_body_util::Full::new(encoded);
        let decoder = Codec::<GetDestination, GetDestination>::default().decoder();
        let mut messages = Streaming::new_request(decoder, body, None, None);
        assert_eq!(messages.message().await.unwrap().unwrap().path, "a");
        assert_eq!(messages.message().await.unwrap().unwrap().path.len(), 70_000);
        assert!(messages.message().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_response_shares_the_bytes_and_ends_with_its_status() {
        let answer = encode(&[request("answer")]);
        let call = Request::new(Body::new(http_body_util::Full::new(encode(&[request("question")]))));
        let rsp = unary(call, |request: GetDestination| {
            assert_eq!(request.path, "question");
            Ok(answer.clone())
        })
        .await;
        assert_eq!(rsp.headers()[CONTENT_TYPE], "application/grpc");
        let mut body = rsp.into_body();
        let data = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!((data.as_ptr(), data.len()), (answer.as_ptr(), answer.len()));
        let trailers = body.frame().await.unwrap().unwrap().into_trailers().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
        assert!(body.is_end_stream() && body.frame().await.is_none());
    }

    #[tokio::test]
    async fn missing_or_invalid_messages_and_errors_of_the_method_are_answered_by_a_status() {
        let refuse = |_: GetDestination| Err(Status::not_found("no such thing"));
        for (body, code) in [
            (Bytes::new(), Code::InvalidArgument),
            (Bytes::from_static(&[0, 0, 0, 0, 9, 1]), Code::Internal),
            (encode(&[request("a")]), Code::NotFound),
        ] {
            let rsp = unary(Request::new(Body::new(http_body_util::Full::new(body))), refuse).await;
            let status = Status::from_header_map(rsp.headers()).unwrap();
            assert_eq!(status.code(), code, "{status:?}");
        }
    }
}
