//! Request bodies of HTTP/1. A body reads from the connection when it is polled.

use std::{
    io,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::time::Instant;

use crate::http::{
    body::ReceivedBody,
    error::Error,
    h1::{
        framing::{DecodeStep, Framing},
        read_buffer,
        server_connection::{RequestBodyState, ServerConnection, SharedServerConnection},
    },
};

pub(crate) struct RequestBody {
    pub(super) connection: SharedServerConnection,
    pub(super) framing: Framing,
    pub(super) idle: IdleDeadline,
    pub(super) is_ended: bool,
}

/// Limits the time in which no byte of the request is received and no byte of the response is written.
pub(super) struct IdleDeadline {
    pub(super) limit: Duration,
    /// `None` unless the body waits for data.
    pub(super) at: Option<Instant>,
}

impl IdleDeadline {
    /// Ready when the limit has passed. Bytes of the response restart it.
    fn poll(&mut self, cx: &mut Context<'_>, connection: &mut ServerConnection) -> Poll<()> {
        loop {
            let mut at = self.at.unwrap_or_else(|| Instant::now() + self.limit);
            if let Some(wrote_at) = connection.wrote_at.take() {
                at = at.max(wrote_at + self.limit);
            }
            self.at = Some(at);
            connection.timer.set(at);
            ready!(connection.timer.poll(cx));
            if connection.wrote_at.is_none() {
                return Poll::Ready(());
            }
        }
    }
}

impl RequestBody {
    pub(super) fn new(
        connection: &SharedServerConnection,
        framing: Framing,
        expects_continue: bool,
        idle_timeout: Duration,
    ) -> Self {
        let mut shared = connection.lock();
        shared.wrote_at = None;
        shared.request_state = if expects_continue {
            RequestBodyState::AwaitingContinue
        } else {
            RequestBodyState::Receiving
        };
        Self {
            connection: connection.clone(),
            framing,
            idle: IdleDeadline {
                limit: idle_timeout,
                at: None,
            },
            is_ended: false,
        }
    }
}

impl ReceivedBody for RequestBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if self.is_ended {
            return Poll::Ready(None);
        }
        let connection = &mut *self.connection.lock();
        if matches!(
            connection.request_state,
            RequestBodyState::Abandoned | RequestBodyState::ConnectionLost
        ) {
            return Poll::Ready(Some(Err(Error::from_request_body(
                "the request body cannot be read any more",
            ))));
        }
        loop {
            let decoded = self.framing.decode(&mut connection.read_buffer);
            let is_end = self.framing.is_end();
            let frame = match decoded {
                Ok(DecodeStep::Data(data)) => Some(Ok(Frame::data(data))),
                Ok(DecodeStep::Trailers(trailers)) => Some(Ok(Frame::trailers(trailers))),
                Ok(DecodeStep::End) => None,
                Ok(DecodeStep::NeedsData) => {
                    match read_buffer::poll_read_into(cx, &mut connection.io, &mut connection.read_buffer) {
                        Poll::Ready(Ok(0)) => {
                            let error = Error::from_request_body(io::Error::from(io::ErrorKind::UnexpectedEof));
                            return fail(connection, error, RequestBodyState::ConnectionLost);
                        }
                        Poll::Ready(Ok(_)) => {
                            self.idle.at = None;
                            continue;
                        }
                        Poll::Ready(Err(error)) => {
                            return fail(
                                connection,
                                Error::from_request_body(error),
                                RequestBodyState::ConnectionLost,
                            );
                        }
                        Poll::Pending => {
                            ready!(self.idle.poll(cx, connection));
                            let error = Error::BodyIdleTimeout(self.idle.limit);
                            return fail(connection, error, RequestBodyState::Abandoned);
                        }
                    }
                }
                Err(reason) => {
                    return fail(
                        connection,
                        Error::from_request_body(reason),
                        RequestBodyState::Abandoned,
                    );
                }
            };
            if is_end {
                self.is_ended = true;
                connection.set_request_state(RequestBodyState::Complete);
            } else {
                connection.request_state = RequestBodyState::Receiving;
            }
            return Poll::Ready(frame);
        }
    }

    fn is_end_stream(&self) -> bool {
        self.framing.is_end()
    }

    fn size_hint(&self) -> SizeHint {
        self.framing.size_hint()
    }
}

/// Ends the body with an error.
fn fail(
    connection: &mut ServerConnection,
    error: Error,
    state: RequestBodyState,
) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
    connection.set_request_state(state);
    Poll::Ready(Some(Err(error)))
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if self.is_ended {
            return;
        }
        let mut connection = self.connection.lock();
        if connection.request_state == RequestBodyState::ConnectionLost {
            return;
        }
        // Skip bytes that are already buffered: often a short body is buffered completely.
        let is_complete = loop {
            match self.framing.decode(&mut connection.read_buffer) {
                Ok(DecodeStep::Data(_)) => {}
                Ok(DecodeStep::Trailers(_) | DecodeStep::End) => {
                    break connection.request_state == RequestBodyState::Receiving;
                }
                Ok(DecodeStep::NeedsData) | Err(_) => break false,
            }
        };
        connection.set_request_state(if is_complete {
            RequestBodyState::Complete
        } else {
            RequestBodyState::Abandoned
        });
    }
}
