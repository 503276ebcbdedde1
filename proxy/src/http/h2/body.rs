//! Request and response bodies that are received on HTTP/2 streams.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::RecvStream;
use http_body::{Frame, SizeHint};
use tokio::{sync::oneshot, time::Instant};

use crate::http::{error::Error, h2::flow_control::StreamToken, headers, timer::ResettableTimer};

pub(crate) struct StreamBody {
    stream: RecvStream,
    origin: BodyOrigin,
    /// Bytes that are still missing according to `content-length`; `None` without one.
    n_remaining: Option<u64>,
    /// Cancels the rest of the request body if this response body is dropped before its end.
    cancel_upload: Option<oneshot::Sender<()>>,
    /// Idle timeout of a client's body; created by the first wait for data.
    idle: Option<Box<IdleTimeout>>,
    /// Counts the stream as open.
    _token: StreamToken,
}

/// The sender of a body.
#[derive(Clone)]
pub(super) enum BodyOrigin {
    Client(Arc<ResponseProgress>),
    Server,
}

/// Shared by a response and its request body: each sent part of the response restarts the idle timeout of the request body.
pub(super) struct ResponseProgress {
    pub(super) sent_since_check: AtomicBool,
    /// Maximum time without bytes in either direction.
    pub(super) idle_timeout: Duration,
}

impl ResponseProgress {
    pub(super) fn record_sent(&self) {
        self.sent_since_check.store(true, Ordering::Relaxed);
    }

    fn take_sent(&self) -> bool {
        self.sent_since_check.swap(false, Ordering::Relaxed)
    }
}

/// Idle timeout of a request body.
#[derive(Default)]
struct IdleTimeout {
    timer: ResettableTimer,
    deadline: Option<Instant>,
}

impl IdleTimeout {
    /// Ready with the timeout error when no bytes were forwarded in either direction for the idle timeout.
    fn poll(&mut self, cx: &mut Context<'_>, progress: &ResponseProgress) -> Poll<Error> {
        let limit = progress.idle_timeout;
        loop {
            if progress.take_sent() {
                self.deadline = None;
            }
            let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + limit);
            self.timer.set(deadline);
            ready!(self.timer.poll(cx));
            if !progress.take_sent() {
                return Poll::Ready(Error::BodyIdleTimeout(limit));
            }
            self.deadline = None;
        }
    }
}

impl Drop for StreamBody {
    fn drop(&mut self) {
        if let Some(cancel_upload) = self.cancel_upload.take()
            && !self.stream.is_end_stream()
            && self.n_remaining != Some(0)
        {
            // Fails if the upload has ended.
            let _ = cancel_upload.send(());
        }
    }
}

impl StreamBody {
    pub(super) fn new(stream: RecvStream, origin: BodyOrigin, n_remaining: Option<u64>, token: StreamToken) -> Self {
        Self {
            stream,
            origin,
            n_remaining,
            cancel_upload: None,
            idle: None,
            _token: token,
        }
    }

    /// Cancels the request body if the response body is dropped before its end.
    pub(super) fn with_upload_cancellation(mut self, cancel_upload: Option<oneshot::Sender<()>>) -> Self {
        self.cancel_upload = cancel_upload;
        self
    }

    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let polled = self.poll_stream(cx);
        let BodyOrigin::Client(progress) = &self.origin else {
            return polled;
        };
        if polled.is_pending() {
            return self
                .idle
                .get_or_insert_default()
                .poll(cx, progress)
                .map(|timeout_error| Some(Err(timeout_error)));
        }
        if let Some(idle) = &mut self.idle {
            idle.deadline = None;
        }
        polled
    }

    fn poll_stream(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match ready!(self.stream.poll_data(cx)) {
            Some(Ok(data)) => {
                // The receiver takes the data now, so the window opens again.
                let _ = self.stream.flow_control().release_capacity(data.len());
                self.n_remaining = self.n_remaining.map(|left| left.saturating_sub(data.len() as u64));
                Poll::Ready(Some(Ok(Frame::data(data))))
            }
            Some(Err(error)) => Poll::Ready(Some(Err(self.map_error(error)))),
            None => match ready!(self.stream.poll_trailers(cx)) {
                Ok(Some(trailers)) if trailers.keys().any(|name| !headers::is_forwarded_trailer(name)) => {
                    let forwarded = trailers.iter().filter(|(name, _)| headers::is_forwarded_trailer(name));
                    let forwarded = forwarded.map(|(name, value)| (name.clone(), value.clone()));
                    Poll::Ready(Some(Ok(Frame::trailers(forwarded.collect()))))
                }
                Ok(Some(trailers)) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
                Ok(None) => Poll::Ready(None),
                Err(error) => Poll::Ready(Some(Err(self.map_error(error)))),
            },
        }
    }

    fn map_error(&self, error: h2::Error) -> Error {
        match self.origin {
            BodyOrigin::Client(_) => Error::from_request_body(error),
            // This proxy has reset the stream because the request body failed: the client has disconnected or stopped sending.
            BodyOrigin::Server if error.is_reset() && !error.is_remote() && !error.is_library() => Error::ClientClosed,
            BodyOrigin::Server => Error::H2(error),
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        match self.n_remaining {
            _ if self.is_end_stream() => SizeHint::with_exact(0),
            Some(left) => SizeHint::with_exact(left),
            None => SizeHint::default(),
        }
    }
}
