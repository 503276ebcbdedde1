//! An HTTP/2 stream that, like a connection, carries the bytes of another protocol (RFC 8441, section 4).

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use h2::{RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http::h2::flow_control::StreamToken;

/// Both directions of a stream. It is reset if it is dropped before both have ended.
pub(crate) struct UpgradedStream {
    send: SendStream<Bytes>,
    recv: RecvStream,
    /// Bytes received but not read yet.
    read_buffer: Bytes,
    /// Counts the stream as open.
    _token: StreamToken,
    _guard: Option<UpgradedStreamGuard>,
}

/// Number of streams of one connection that carry another protocol, or are about to.
#[derive(Clone, Default)]
pub(super) struct UpgradedStreamCounter(Arc<AtomicUsize>);

/// Counts one stream until this is dropped.
pub(super) struct UpgradedStreamGuard(UpgradedStreamCounter);

impl UpgradedStreamCounter {
    /// Counts one more stream, if there are fewer than `max`.
    pub(super) fn try_acquire(&self, max: usize) -> Option<UpgradedStreamGuard> {
        let incremented = |n: usize| (n < max).then_some(n + 1);
        let update = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, incremented);
        update.ok().map(|_| UpgradedStreamGuard(self.clone()))
    }
}

impl Drop for UpgradedStreamGuard {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl UpgradedStream {
    pub(super) fn new(send: SendStream<Bytes>, recv: RecvStream, token: StreamToken) -> Self {
        Self {
            send,
            recv,
            read_buffer: Bytes::new(),
            _token: token,
            _guard: None,
        }
    }

    pub(super) fn with_guard(self, guard: UpgradedStreamGuard) -> Self {
        Self {
            _guard: Some(guard),
            ..self
        }
    }

    /// Sends as much of `buf` as the peer's flow-control window permits.
    fn poll_send(&mut self, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize, h2::Error>> {
        self.send.reserve_capacity(buf.len());
        let mut room = self.send.capacity();
        while room == 0 {
            room = match ready!(self.send.poll_capacity(cx)) {
                Some(room) => room?,
                None => return Poll::Ready(Ok(0)), // the stream was reset or has ended
            };
        }
        let part = Bytes::copy_from_slice(&buf[..room.min(buf.len())]);
        let len = part.len();
        self.send.send_data(part, false)?;
        Poll::Ready(Ok(len))
    }
}

impl AsyncRead for UpgradedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        while self.read_buffer.is_empty() {
            match ready!(self.recv.poll_data(cx)) {
                Some(data) => self.read_buffer = data.map_err(io::Error::other)?,
                None => return Poll::Ready(Ok(())),
            }
        }
        let n = self.read_buffer.len().min(buf.remaining());
        buf.put_slice(&self.read_buffer[..n]);
        self.read_buffer.advance(n);
        // The window opens only as bytes are read, so a slow reader limits the sender.
        let _ = self.recv.flow_control().release_capacity(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for UpgradedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(cx, buf).map_err(io::Error::other)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(())) // the task of the connection flushes
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.send.send_data(Bytes::new(), true).map_err(io::Error::other))
    }
}
