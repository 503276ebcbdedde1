//! A connection from a client, shared by the server and the body of the current request.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{Response, StatusCode, Version};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use crate::{
    http::{
        error::Error,
        h1::{encode, read_buffer},
        timer::ResettableTimer,
        upgrade::interim::{self, InterimSink},
    },
    net::io::Io,
};

pub(super) struct ServerConnection {
    pub(super) io: Io,
    /// Bytes read but not parsed yet.
    pub(super) read_buffer: Bytes,
    /// Interim responses from upstream that are not yet encoded for the client.
    pub(super) received_interims: Vec<Response<()>>,
    /// Encoded interim responses that are not yet sent to the client.
    pub(super) unsent_interims: BytesMut,
    pub(super) request_state: RequestBodyState,
    /// Time of the last write of response bytes while the request is incomplete. It restarts the idle timeout of the request
    /// body.
    pub(super) wrote_at: Option<Instant>,
    /// `None` before the client has sent FIN.
    pub(super) next_close_check: Option<CloseCheck>,
    /// Wakes the server when the request body has ended or was dropped.
    pub(super) server_waker: Option<Waker>,
    /// The server uses it while it waits for the client, and the request body uses it while it waits for data.
    pub(super) timer: ResettableTimer,
}

/// The next check whether a client that sent FIN has closed the connection.
pub(super) struct CloseCheck {
    at: Instant,
    /// Delay from this check to the one after it.
    next_delay: Duration,
}

pub(super) type SharedServerConnection = Arc<Mutex<ServerConnection>>;

impl InterimSink for Mutex<ServerConnection> {
    fn receive_interim(&self, response: Response<()>) {
        self.lock().received_interims.push(response);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestBodyState {
    /// The whole request was received.
    Complete,
    /// The body is being received.
    Receiving,
    /// The client waits for `100 Continue` before it sends the body.
    AwaitingContinue,
    /// The rest of the request will not be read, so the connection cannot carry another one.
    Abandoned,
    /// The connection ended or failed within the body.
    ConnectionLost,
}

impl ServerConnection {
    /// Ready when the client no longer waits for its response: the connection failed, or the kernel reports it as closed. A
    /// plaintext client that has only sent FIN still gets its response; under TLS a FIN counts as a close. Without
    /// `watch_for_close`, only a connection that is lost within the request body counts.
    pub(super) fn poll_client_closed(&mut self, cx: &mut Context<'_>, watch_for_close: bool) -> Poll<Error> {
        // Write pending interim responses. An error occurs again when the response is written.
        let _ = self.poll_interims(cx);
        match self.request_state {
            RequestBodyState::ConnectionLost => return Poll::Ready(Error::ClientClosed),
            RequestBodyState::Complete if watch_for_close && self.read_buffer.is_empty() => {}
            RequestBodyState::Complete => return Poll::Pending,
            // The request body changes the state when it ends or is dropped.
            RequestBodyState::Receiving | RequestBodyState::AwaitingContinue | RequestBodyState::Abandoned => {
                self.server_waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
        }
        loop {
            if let Some(check) = &self.next_close_check {
                self.timer.set(check.at);
                ready!(self.timer.poll(cx));
            }
            match ready!(read_buffer::poll_read_into(cx, &mut self.io, &mut self.read_buffer)) {
                Ok(0) if self.io.is_closed_by_peer() == Some(true) => return Poll::Ready(Error::ClientClosed),
                Ok(0) => {
                    let last_check = self.next_close_check.take();
                    let delay = last_check.map_or(FIRST_CLOSE_CHECK_DELAY, |check| check.next_delay);
                    self.next_close_check = Some(CloseCheck {
                        at: Instant::now() + delay,
                        next_delay: MAX_CLOSE_CHECK_DELAY.min(delay * 4),
                    });
                }
                Ok(_) => return Poll::Pending, // bytes of the next request
                Err(error) => return Poll::Ready(Error::ClientIo(error)),
            }
        }
    }

    /// Ready when the request body is complete, failed or dropped.
    pub(super) fn poll_body_done(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.request_state == RequestBodyState::Receiving {
            self.server_waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(())
    }

    pub(super) fn set_request_state(&mut self, next_state: RequestBodyState) {
        self.request_state = next_state;
        if let Some(server) = self.server_waker.take() {
            server.wake();
        }
    }

    /// Ends the wait for `100 Continue` when the final response arrives, and decides whether the request body is still read.
    pub(super) fn stop_awaiting_continue(&mut self, status: StatusCode) {
        if self.request_state == RequestBodyState::AwaitingContinue {
            // After a successful response, the application may still read the body, which the client may send without `100
            // Continue`. After any other response, the body is not read, and must not be parsed as a request if it arrives.
            self.request_state = match status.is_success() {
                true => RequestBodyState::Receiving,
                false => RequestBodyState::Abandoned,
            };
        }
    }

    /// Delays the last response, so that it leaves in one packet with the FIN.
    pub(super) fn cork(&mut self) {
        if self.request_state == RequestBodyState::Complete && self.read_buffer.is_empty() {
            self.io.cork();
        }
    }

    /// Records a write of response bytes, for the idle timeout of the request body.
    pub(super) fn record_write(&mut self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if self.request_state != RequestBodyState::Complete && matches!(written, Poll::Ready(Ok(1..))) {
            self.wrote_at = Some(Instant::now());
        }
        written
    }

    /// Writes the received interim responses; HTTP/1.0 clients get none.
    pub(super) fn write_interims(&mut self, cx: &mut Context<'_>, version: Version) {
        for rsp in std::mem::take(&mut self.received_interims) {
            if interim::is_continue(&rsp) {
                if self.request_state != RequestBodyState::AwaitingContinue {
                    continue;
                }
                self.request_state = RequestBodyState::Receiving;
            }
            if version == Version::HTTP_11 {
                encode::encode_interim(&rsp, &mut self.unsent_interims);
            }
        }
        // Unwritten bytes are written before the response. An error occurs again then.
        let _ = self.poll_interims(cx);
    }

    pub(super) fn poll_interims(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unsent_interims.is_empty() {
            let n = ready!(Pin::new(&mut self.io).poll_write(cx, &self.unsent_interims))?;
            if n == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unsent_interims.advance(n);
            if self.unsent_interims.is_empty() {
                self.unsent_interims = BytesMut::new();
                return Pin::new(&mut self.io).poll_flush(cx);
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// I/O on the connection; locks it for each call.
pub(super) struct ConnectionIo<'a>(pub(super) &'a SharedServerConnection);

impl AsyncRead for ConnectionIo<'_> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().io).poll_read(cx, buf)
    }
}

impl AsyncWrite for ConnectionIo<'_> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let mut connection = self.0.lock();
        ready!(connection.poll_interims(cx))?;
        let written = Pin::new(&mut connection.io).poll_write(cx, buf);
        connection.record_write(written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut connection = self.0.lock();
        ready!(connection.poll_interims(cx))?;
        let written = Pin::new(&mut connection.io).poll_write_vectored(cx, bufs);
        connection.record_write(written)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().io).poll_shutdown(cx)
    }
}

/// Delay before the first check whether a client that sent FIN has closed the connection.
const FIRST_CLOSE_CHECK_DELAY: Duration = Duration::from_millis(10);
/// Maximum delay between these checks while the response is outstanding.
const MAX_CLOSE_CHECK_DELAY: Duration = Duration::from_secs(1);
