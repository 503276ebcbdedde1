//! Keeping a request, and its body until its response head comes, so that it can be sent once more.

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

use crate::http::{body::Body, error::Error};

/// Longest body that is kept where no policy says otherwise, in bytes.
pub(crate) const LIMIT: usize = 64 * 1024;

/// A request that can be sent again.
pub(crate) struct Copy {
    method: Method,
    uri: Uri,
    version: Version,
    /// A list takes less than a map, and is looked at only in need.
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Option<Kept>,
}

/// The way to get a body back, whether or not it is still being sent; none where it is too long from the start.
pub(crate) struct Kept(Option<Arc<Mutex<State>>>);

#[derive(Default)]
struct State {
    /// Not read yet; gone once the body has been taken back.
    rest: Option<Body>,
    frames: VecDeque<Bytes>,
    len: usize,
    limit: usize,
    /// Too long, or its trailers have passed: the body cannot be repeated.
    spent: bool,
    /// Whoever waits for more to send.
    sender: Option<Waker>,
}

/// A body that is kept while it is sent.
pub(crate) struct Keeping(Arc<Mutex<State>>);

/// Splits a body into what is sent and the way to get it back, if it has no more than `limit` bytes.
pub(crate) fn keep(body: Body, limit: usize) -> (Body, Kept) {
    if body.size_hint().lower() > limit as u64 {
        return (body, Kept(None));
    }
    let state = Arc::new(Mutex::new(State {
        rest: Some(body),
        limit,
        ..State::default()
    }));
    (Body::keeping(Box::new(Keeping(state.clone()))), Kept(Some(state)))
}

impl Copy {
    /// Keeps what is needed to send `req` once more; its body is kept as it passes, up to so many bytes.
    pub(crate) fn of(req: &mut Request<Body>, max_body: usize) -> Self {
        let body = if req.body().is_end_stream() {
            None
        } else {
            let (sent, kept) = keep(std::mem::take(req.body_mut()), max_body);
            *req.body_mut() = sent;
            Some(kept)
        };
        Self {
            method: req.method().clone(),
            uri: req.uri().clone(),
            version: req.version(),
            headers: lines(req.headers()),
            body,
        }
    }

    pub(crate) fn method(&self) -> &Method {
        &self.method
    }

    /// Whether the body could be kept so far.
    pub(crate) fn is_whole(&self) -> bool {
        self.body.as_ref().is_none_or(Kept::is_whole)
    }

    /// Whether the request has no body, so that this copy stays good however often it is sent.
    pub(crate) fn has_no_body(&self) -> bool {
        self.body.is_none()
    }

    /// The request again, if its body could be kept; a body once.
    pub(crate) fn request(&self) -> Option<Request<Body>> {
        let body = match &self.body {
            None => Body::empty(),
            Some(kept) => kept.again()?,
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

fn lines(headers: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
    let mut lines = Vec::with_capacity(headers.len());
    lines.extend(headers.iter().map(|(name, value)| (name.clone(), value.clone())));
    lines
}

impl Kept {
    /// Whether the body could be kept so far.
    pub(crate) fn is_whole(&self) -> bool {
        self.0.as_ref().is_some_and(|state| !state.lock().spent)
    }

    /// The body from its start, where that is still possible; once. Who is still sending it finds that it has broken off.
    pub(crate) fn again(&self) -> Option<Body> {
        let mut state = self.0.as_ref()?.lock();
        if state.spent {
            return None;
        }
        let rest = state.rest.take()?;
        if let Some(sender) = state.sender.take() {
            sender.wake();
        }
        Some(Body::replayed(std::mem::take(&mut state.frames), rest))
    }
}

impl Keeping {
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let mut state = self.0.lock();
        let Some(body) = &mut state.rest else {
            return Poll::Ready(Some(Err(Error::TakenBack)));
        };
        let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) else {
            state.sender = Some(cx.waker().clone());
            return Poll::Pending;
        };
        if !state.spent {
            match &frame {
                Some(Ok(frame)) if let Some(data) = frame.data_ref() => {
                    state.len += data.len();
                    state.frames.push_back(data.clone());
                    state.spent = state.len > state.limit;
                }
                Some(_) => state.spent = true,
                None => {}
            }
            if state.spent {
                state.frames = VecDeque::new();
            }
        }
        Poll::Ready(frame)
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.0.lock().rest.as_ref().is_some_and(Body::is_end_stream)
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.0.lock().rest.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn a_body_sent_in_part_is_whole_again() {
        let pieces: VecDeque<_> = ["one", "two", "three"].map(|s| Bytes::from_static(s.as_bytes())).into();
        let (mut sent, kept) = keep(Body::replayed(pieces, Body::empty()), LIMIT);
        assert_eq!(sent.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
        drop(sent);
        assert_eq!(kept.again().unwrap().collect().await.unwrap().to_bytes(), "onetwothree");
    }

    #[tokio::test]
    async fn a_body_is_taken_from_who_still_sends_it() {
        let pieces: VecDeque<_> = ["one", "two"].map(|s| Bytes::from_static(s.as_bytes())).into();
        let (mut sent, kept) = keep(Body::replayed(pieces, Body::empty()), LIMIT);
        assert_eq!(sent.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
        let again = kept.again().unwrap();
        assert!(
            sent.frame().await.unwrap().is_err(),
            "it has broken off, and is not at its end"
        );
        assert!(!sent.is_end_stream());
        assert_eq!(again.collect().await.unwrap().to_bytes(), "onetwo");
    }

    #[tokio::test]
    async fn a_long_body_is_not_kept() {
        let pieces: VecDeque<_> = vec![Bytes::from(vec![0; LIMIT]), Bytes::from_static(b"x")].into();
        let (sent, kept) = keep(Body::replayed(pieces, Body::empty()), LIMIT);
        sent.collect().await.unwrap();
        assert!(kept.again().is_none());
    }
}
