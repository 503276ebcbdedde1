//! Sending a body on an HTTP/2 stream, as the peer has room for it.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::{Reason, SendStream};
use http_body::Body as _;

use crate::http::{body::Body, error::Error, h2::Progress, respond};

/// A body on its way out.
pub(super) struct Sending {
    body: Body,
    stream: SendStream<Bytes>,
    chunk: Bytes,
    /// Whether it ends with a status where it cannot be sent to its end.
    of_grpc: bool,
    /// Who waits for more of a request hears that its response goes on.
    progress: Option<Arc<Progress>>,
}

impl Sending {
    pub(super) fn new(body: Body, stream: SendStream<Bytes>) -> Self {
        Self {
            body,
            stream,
            chunk: Bytes::new(),
            of_grpc: false,
            progress: None,
        }
    }

    /// The body of a response of gRPC, or of another.
    pub(super) fn of_grpc(mut self, of_grpc: bool) -> Self {
        self.of_grpc = of_grpc;
        self
    }

    /// The body of a response of which a request's body hears.
    pub(super) fn heard_by(mut self, progress: Arc<Progress>) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Sends what is left.
    pub(super) async fn rest(mut self) {
        if let Err(error) = poll_fn(|cx| self.poll_send(cx)).await {
            tracing::debug!(%error, "a body ended early");
        }
    }

    /// Ends the stream because its body has failed.
    fn fail(&mut self, error: Error) -> Result<(), Error> {
        // A stream that was reset is reset as it was: clients of gRPC know what that means.
        if self.of_grpc && !matches!(&error, Error::H2(error) if error.is_reset()) {
            self.stream
                .send_trailers(respond::trailers(&error))
                .map_err(Error::H2)?;
        } else {
            self.stream.send_reset(reason(&error, Reason::CANCEL));
        }
        Err(error)
    }

    /// Ready when all has been handed over, or the peer wants no more.
    ///
    /// # Errors
    /// The body failed, and the stream has been reset, or has ended with a status of gRPC; or the stream was reset.
    pub(super) fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        loop {
            if !self.chunk.is_empty() {
                self.stream.reserve_capacity(self.chunk.len());
                let capacity = match self.stream.poll_capacity(cx) {
                    Poll::Ready(Some(capacity)) => capacity.map_err(Error::H2)?,
                    Poll::Ready(None) => return Poll::Ready(Ok(())), // the peer closed its side of the stream
                    Poll::Pending => {
                        let late = ready!(self.body.poll_late(self.chunk.len(), cx));
                        return Poll::Ready(self.fail(late));
                    }
                };
                if capacity == 0 {
                    continue; // spurious: polling again registers for more
                }
                let part = self.chunk.split_to(capacity.min(self.chunk.len()));
                let last = self.chunk.is_empty() && self.body.is_end_stream();
                self.stream.send_data(part, last).map_err(Error::H2)?;
                if let Some(progress) = &self.progress {
                    progress.sent();
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
                Some(Err(error)) => return Poll::Ready(self.fail(error)),
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

/// Why a stream is reset: as the stream that it depends on was, if there is one.
pub(super) fn reason(error: &Error, otherwise: Reason) -> Reason {
    match error {
        error if error.is_unprocessed() => Reason::REFUSED_STREAM,
        Error::H2(error) => error.reason().unwrap_or(otherwise),
        _ => otherwise,
    }
}
