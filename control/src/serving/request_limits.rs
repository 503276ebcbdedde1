//! Limits on requests: retained headers, body size, time to receive the body.
//!
//! Without them a client can use up memory with thousands of streams that have large headers and never send a message.
//! `stream_limiter` limits the memory of all requests together.

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

/// Removes all but the gRPC headers and limits the body in size and time.
pub(super) fn limit_request(req: Request<Incoming>, max_bytes: usize) -> Request<Body> {
    let (mut head, body) = req.into_parts();
    let retained = RETAINED_HEADERS.into_iter().filter_map(|name| {
        let value = head.headers.get(&name)?.clone();
        Some((name, value))
    });
    head.headers = retained.collect::<HeaderMap>();
    let body = TimeoutBody {
        body: Limited::new(body, max_bytes),
        deadline: Box::pin(sleep(REQUEST_TIMEOUT)),
    };
    Request::from_parts(head, Body::new(body))
}

/// A body that fails if it is not complete before the deadline.
struct TimeoutBody<B> {
    body: B,
    deadline: Pin<Box<Sleep>>,
}

type BoxError = Box<dyn StdError + Send + Sync>;

impl<B> HttpBody for TimeoutBody<B>
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
            Some(Err(format!(
                "the request body was not received within {REQUEST_TIMEOUT:?}"
            )
            .into()))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Headers that the services read. All others are dropped, because a stream holds its headers until its first message
/// arrives.
const RETAINED_HEADERS: [HeaderName; 5] = [
    CONTENT_TYPE,
    TE,
    HeaderName::from_static("grpc-timeout"),
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-accept-encoding"),
];
/// Maximum time from the request headers to the end of the body.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, StreamBody};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_body_that_exceeds_its_deadline_fails() {
        let body = StreamBody::new(futures_util::stream::pending::<Result<Frame<Bytes>, BoxError>>());
        let mut body = TimeoutBody {
            body,
            deadline: Box::pin(sleep(REQUEST_TIMEOUT)),
        };
        let failed = body.frame().await.unwrap().unwrap_err();
        assert!(failed.to_string().contains("was not received"), "{failed}");
    }
}
