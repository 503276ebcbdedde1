//! What is kept of a request, and for how long it may take to come.
//!
//! A client can open thousands of streams, each with a full head, and send no message on any of them.

use std::error::Error as StdError;
use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName, TE};
use http::{HeaderMap, Request};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::Limited;
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep};
use tonic::body::Body;

/// The request with the headers of gRPC alone, and a body that is bounded in size and time.
pub(super) fn bounded(req: Request<Incoming>) -> Request<Body> {
    let (mut head, body) = req.into_parts();
    let kept = KEPT.into_iter().filter_map(|name| {
        let value = head.headers.get(&name)?.clone();
        Some((name, value))
    });
    head.headers = kept.collect::<HeaderMap>();
    let body = TimelyBody {
        body: Limited::new(body, MAX_REQUEST),
        deadline: Box::pin(sleep(REQUEST_TIMEOUT)),
    };
    Request::from_parts(head, Body::new(body))
}

/// A body that fails if it has not ended in time.
struct TimelyBody<B> {
    body: B,
    deadline: Pin<Box<Sleep>>,
}

type BoxError = Box<dyn StdError + Send + Sync>;

impl<B> HttpBody for TimelyBody<B>
where
    B: HttpBody<Data = Bytes, Error = BoxError> + Unpin,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        self.deadline.as_mut().poll(cx).map(|()| {
            Some(Err(
                format!("the request did not come within {REQUEST_TIMEOUT:?}").into()
            ))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What services read; all else is memory for as long as a message is awaited.
const KEPT: [HeaderName; 5] = [
    CONTENT_TYPE,
    TE,
    HeaderName::from_static("grpc-timeout"),
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-accept-encoding"),
];
/// Requests of all services fit many times over.
pub(super) const MAX_REQUEST: usize = 256 * 1024;
/// How long a request may take, from its head to its end.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, StreamBody};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_in_time_fails() {
        let body = StreamBody::new(futures_util::stream::pending::<Result<Frame<Bytes>, BoxError>>());
        let mut body = TimelyBody {
            body,
            deadline: Box::pin(sleep(REQUEST_TIMEOUT)),
        };
        let failed = body.frame().await.unwrap().unwrap_err();
        assert!(failed.to_string().contains("did not come"), "{failed}");
    }
}
