//! Keeps a request and its body until the response head arrives, so that the request can be sent again.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version};
use http_body::{Body as _, Frame, SizeHint};
use parking_lot::Mutex;

use crate::http::{
    body::{Body, ReceivedBody},
    error::Error,
};

/// Default maximum size of a body that is kept, in bytes.
pub(crate) const DEFAULT_MAX_REPLAY_BYTES: usize = 64 * 1024;

/// A request that can be sent again.
pub(crate) struct ReplayableRequest {
    method: Method,
    uri: Uri,
    version: Version,
    /// A list, because it is smaller than a map. It is read only for a retry or a resend.
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Option<ReplayBuffer>,
}

/// Keeps the part of a body that was sent, so that the whole body can be sent again, even while the first send is in
/// progress. `None` if the declared length of the body exceeds the limit.
pub(crate) struct ReplayBuffer(Option<Arc<Mutex<ReplayState>>>);

#[derive(Default)]
struct ReplayState {
    /// The part that is not read yet. `None` after [`ReplayBuffer::take_body`].
    unread: Option<Body>,
    frames: VecDeque<Bytes>,
    len: usize,
    max_bytes: usize,
    /// The sent part is not kept, so the body cannot be sent again: it exceeds `max_bytes`, it failed, or its trailers were sent.
    is_discarded: bool,
    /// The task that sends the body.
    sender_waker: Option<Waker>,
}

/// A body that is recorded while it is sent.
pub(crate) struct RecordingBody(Arc<Mutex<ReplayState>>);

/// Returns the body to send, and a buffer that keeps up to `limit` bytes of it.
pub(crate) fn record_body(body: Body, limit: usize) -> (Body, ReplayBuffer) {
    if body.size_hint().lower() > limit as u64 {
        return (body, ReplayBuffer(None));
    }
    let state = Arc::new(Mutex::new(ReplayState {
        unread: Some(body),
        max_bytes: limit,
        ..ReplayState::default()
    }));
    (
        Body::received(Box::new(RecordingBody(state.clone()))),
        ReplayBuffer(Some(state)),
    )
}

impl ReplayableRequest {
    /// Keeps the head of `req`, and records up to `max_body` bytes of its body while it is sent.
    pub(crate) fn of_request(req: &mut Request<Body>, max_body: usize) -> Self {
        let body = if req.body().is_end_stream() {
            None
        } else {
            let (sent, kept) = record_body(std::mem::take(req.body_mut()), max_body);
            *req.body_mut() = sent;
            Some(kept)
        };
        Self {
            method: req.method().clone(),
            uri: req.uri().clone(),
            version: req.version(),
            headers: header_list(req.headers()),
            body,
        }
    }

    pub(crate) fn method(&self) -> &Method {
        &self.method
    }

    /// Whether the whole sent part of the body is kept.
    pub(crate) fn can_replay(&self) -> bool {
        self.body.as_ref().is_none_or(ReplayBuffer::can_replay)
    }

    /// Whether the request has no body. Then [`take_request`](Self::take_request) works more than once.
    pub(crate) fn has_no_body(&self) -> bool {
        self.body.is_none()
    }

    /// The request, with its body. `None` if the body is not kept, or was taken before.
    pub(crate) fn take_request(&self) -> Option<Request<Body>> {
        let body = match &self.body {
            None => Body::empty(),
            Some(kept) => kept.take_body()?,
        };
        let mut req = Request::new(body);
        *req.method_mut() = self.method.clone();
        *req.uri_mut() = self.uri.clone();
        *req.version_mut() = self.version;
        for (name, value) in &self.headers {
            req.headers_mut().append(name.clone(), value.clone());
        }
        Some(req)
    }
}

fn header_list(headers: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
    let mut lines = Vec::with_capacity(headers.len());
    lines.extend(headers.iter().map(|(name, value)| (name.clone(), value.clone())));
    lines
}

impl ReplayBuffer {
    /// Whether the whole sent part of the body is kept. [`Self::take_body`] does not change this.
    pub(crate) fn can_replay(&self) -> bool {
        self.0.as_ref().is_some_and(|state| !state.lock().is_discarded)
    }

    /// The body from its start, if it is kept and was not taken before. The previous send fails with
    /// [`Error::AttemptCancelled`].
    pub(crate) fn take_body(&self) -> Option<Body> {
        let mut state = self.0.as_ref()?.lock();
        if state.is_discarded {
            return None;
        }
        let rest = state.unread.take()?;
        if let Some(sender) = state.sender_waker.take() {
            sender.wake();
        }
        Some(Body::replayed(std::mem::take(&mut state.frames), rest))
    }
}

impl ReceivedBody for RecordingBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let mut state = self.0.lock();
        let Some(body) = &mut state.unread else {
            return Poll::Ready(Some(Err(Error::AttemptCancelled)));
        };
        let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) else {
            state.sender_waker = Some(cx.waker().clone());
            return Poll::Pending;
        };
        if !state.is_discarded {
            match &frame {
                Some(Ok(frame)) if let Some(data) = frame.data_ref() => {
                    state.len += data.len();
                    state.frames.push_back(data.clone());
                    state.is_discarded = state.len > state.max_bytes;
                }
                Some(_) => state.is_discarded = true,
                None => {}
            }
            if state.is_discarded {
                state.frames = VecDeque::new();
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.0.lock().unread.as_ref().is_some_and(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().unread.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn a_partly_sent_body_is_replayed_from_its_start() {
        let pieces: VecDeque<_> = ["one", "two", "three"].map(|s| Bytes::from_static(s.as_bytes())).into();
        let (mut sent, kept) = record_body(Body::replayed(pieces, Body::empty()), DEFAULT_MAX_REPLAY_BYTES);
        assert_eq!(sent.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
        drop(sent);
        assert_eq!(
            kept.take_body().unwrap().collect().await.unwrap().to_bytes(),
            "onetwothree"
        );
    }

    #[tokio::test]
    async fn replaying_a_body_stops_the_first_send() {
        let pieces: VecDeque<_> = ["one", "two"].map(|s| Bytes::from_static(s.as_bytes())).into();
        let (mut sent, kept) = record_body(Body::replayed(pieces, Body::empty()), DEFAULT_MAX_REPLAY_BYTES);
        assert_eq!(sent.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
        let again = kept.take_body().unwrap();
        assert!(
            sent.frame().await.unwrap().is_err(),
            "the first body must fail, not end"
        );
        assert!(!sent.is_end_stream());
        assert_eq!(again.collect().await.unwrap().to_bytes(), "onetwo");
    }

    #[tokio::test]
    async fn a_long_body_is_not_kept() {
        let pieces: VecDeque<_> = vec![Bytes::from(vec![0; DEFAULT_MAX_REPLAY_BYTES]), Bytes::from_static(b"x")].into();
        let (sent, kept) = record_body(Body::replayed(pieces, Body::empty()), DEFAULT_MAX_REPLAY_BYTES);
        sent.collect().await.unwrap();
        assert!(kept.take_body().is_none());
    }
}
