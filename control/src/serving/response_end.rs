//! Ends the responses of a connection that closes gracefully.
//!
//! The streams of proxies have no end of their own, so a graceful shutdown would wait for them forever.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::body::Body;
use tonic::{Code, Status};
use tulle_core::drain::Watch;

/// A response body that ends with the status OK, after the messages that are ready, when its connection begins to close: at the
/// drain or at its maximum age. The client then opens the stream again on another connection.
pub(super) struct EndWithConnection {
    body: Body,
    connection_ending: Pin<Box<dyn Future<Output = ()> + Send>>,
    ended: bool,
}

impl EndWithConnection {
    /// Wraps a response body. `connection_ending` signals when the connection begins to close.
    pub(super) fn new(body: Body, connection_ending: Watch) -> Self {
        Self {
            body,
            connection_ending: Box::pin(async move { connection_ending.signaled().await }),
            ended: false,
        }
    }
}

impl HttpBody for EndWithConnection {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        self.connection_ending.as_mut().poll(cx).map(|()| {
            self.ended = true;
            self.body = Body::empty(); // releases the subscription
            let ok = HeaderValue::from(Code::Ok as u16);
            Some(Ok(Frame::trailers(HeaderMap::from_iter([(Status::GRPC_STATUS, ok)]))))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream::{self, StreamExt as _};
    use http_body_util::{BodyExt as _, StreamBody};
    use tulle_core::drain;

    use super::*;

    #[tokio::test]
    async fn a_closing_connection_ends_a_response_after_the_messages_that_are_ready() {
        let (signal, watch) = drain::channel();
        let ready = ["one", "two"].map(|message| Ok::<_, Status>(Frame::data(Bytes::from(message))));
        let endless = StreamBody::new(stream::iter(ready).chain(stream::pending()));
        let mut body = EndWithConnection::new(Body::new(endless), watch);
        signal.drain().await;
        for message in ["one", "two"] {
            assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), message);
        }
        let trailers = body.frame().await.unwrap().unwrap().into_trailers().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
        assert!(body.is_end_stream() && body.frame().await.is_none());
    }

    #[tokio::test]
    async fn a_response_that_ends_by_itself_keeps_its_status() {
        let (_signal, watch) = drain::channel();
        let failed = Status::not_found("no such thing").into_http::<Body>().into_body();
        assert!(EndWithConnection::new(failed, watch).frame().await.is_none());
    }
}
