//! Sends a body on an HTTP/2 stream, within the peer's flow-control window.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::{Reason, SendStream};
use http_body::Body as _;

use crate::http::{
    body::Body,
    error::Error,
    h2::body::ResponseProgress,
    stack::error_response::{self, ErrorDetail},
};

/// A body that is being sent.
pub(super) struct BodySender {
    body: Body,
    stream: SendStream<Bytes>,
    chunk: Bytes,
    /// Set for a gRPC response, whose body ends with gRPC status trailers if it fails. The value says whether these contain
    /// the error message.
    grpc_error_detail: Option<ErrorDetail>,
    /// Records sent bytes, for the idle timeout of the request body.
    progress: Option<Arc<ResponseProgress>>,
}

impl BodySender {
    pub(super) fn new(body: Body, stream: SendStream<Bytes>) -> Self {
        Self {
            body,
            stream,
            chunk: Bytes::new(),
            grpc_error_detail: None,
            progress: None,
        }
    }

    /// If `detail` is given, a failed body ends with gRPC status trailers.
    pub(super) fn with_grpc_error_detail(mut self, detail: Option<ErrorDetail>) -> Self {
        self.grpc_error_detail = detail;
        self
    }

    /// Records sent bytes in `progress`, which the request body reads.
    pub(super) fn with_progress(mut self, progress: Arc<ResponseProgress>) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Sends the rest of the body.
    pub(super) async fn send_rest(mut self) {
        if let Err(error) = poll_fn(|cx| self.poll_send(cx)).await {
            tracing::debug!(%error, "body ended early");
        }
    }

    /// Ends the stream after its body has failed. Returns the error of the body, or of the stream.
    fn abort(&mut self, error: Error) -> Error {
        // If the stream of the received body was reset, the reset is forwarded: gRPC clients know its meaning.
        match self.grpc_error_detail {
            Some(detail) if !matches!(&error, Error::H2(error) if error.is_reset()) => {
                let trailers = error_response::grpc_error_trailers(&error, detail);
                if let Err(stream_error) = self.stream.send_trailers(trailers) {
                    return Error::H2(stream_error);
                }
            }
            _ => self.stream.send_reset(reset_reason(&error, Reason::CANCEL)),
        }
        error
    }

    /// Ready when `h2` has got the whole body, or the peer does not accept more of it.
    ///
    /// # Errors
    /// The body fails, and the stream was reset or ended with a gRPC status; or the connection fails.
    pub(super) fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        loop {
            if !self.chunk.is_empty() {
                self.stream.reserve_capacity(self.chunk.len());
                let capacity = match self.stream.poll_capacity(cx) {
                    Poll::Ready(Some(capacity)) => capacity.map_err(Error::H2)?,
                    Poll::Ready(None) => return Poll::Ready(Ok(())), // the stream was reset or has ended
                    Poll::Pending => {
                        let timeout_error = ready!(self.body.poll_deadline(self.chunk.len(), cx));
                        return Poll::Ready(Err(self.abort(timeout_error)));
                    }
                };
                if capacity == 0 {
                    continue; // spurious wake-up: poll again
                }
                let part = self.chunk.split_to(capacity.min(self.chunk.len()));
                let last = self.chunk.is_empty() && self.body.is_end_stream();
                self.stream.send_data(part, last).map_err(Error::H2)?;
                if let Some(progress) = &self.progress {
                    progress.record_sent();
                }
                if last {
                    return Poll::Ready(Ok(()));
                }
                continue;
            }
            if let Poll::Ready(reset) = self.stream.poll_reset(cx) {
                return Poll::Ready(reset.map(drop).map_err(Error::H2));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                None => {
                    self.stream.send_data(Bytes::new(), true).map_err(Error::H2)?;
                    return Poll::Ready(Ok(()));
                }
                Some(Err(error)) => return Poll::Ready(Err(self.abort(error))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if data.is_empty() && !self.body.is_end_stream() => {}
                    Ok(data) if data.is_empty() => {
                        self.stream.send_data(data, true).map_err(Error::H2)?;
                        return Poll::Ready(Ok(()));
                    }
                    Ok(data) => self.chunk = data,
                    Err(frame) => {
                        if let Ok(trailers) = frame.into_trailers() {
                            self.stream.send_trailers(trailers).map_err(Error::H2)?;
                            return Poll::Ready(Ok(()));
                        }
                    }
                },
            }
        }
    }
}

/// The reason with which to reset a stream: that of the failed stream, or else `default`.
pub(super) fn reset_reason(error: &Error, default: Reason) -> Reason {
    match error {
        error if error.is_refused_stream() => Reason::REFUSED_STREAM,
        Error::H2(error) => error.reason().unwrap_or(default),
        _ => default,
    }
}
