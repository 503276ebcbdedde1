//! Batches HTTP/2 frames into fewer writes.
//!
//! `h2` flushes after each DATA frame, which would cost a system call and a pass through the network stack for each 16 KiB.
//! So its writes stay in the TLS buffer until the buffer is full or `h2` has nothing more to write. Writes of plaintext
//! connections are not batched.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::net::io::Io;

/// The I/O object that `h2` uses.
pub(super) struct BatchedIo(Arc<Mutex<BatchState>>);

/// The handle with which the task of the connection flushes batches.
pub(super) struct WriteBatch(Arc<Mutex<BatchState>>);

struct BatchState {
    io: Io,
    /// Whether a write returned `Pending` since the last flush.
    write_blocked: bool,
}

pub(super) fn batch_writes(io: Io) -> (BatchedIo, WriteBatch) {
    let shared = Arc::new(Mutex::new(BatchState {
        io,
        write_blocked: false,
    }));
    (BatchedIo(shared.clone()), WriteBatch(shared))
}

impl WriteBatch {
    /// Polls `work`, which may write, then flushes its writes.
    pub(super) fn poll_and_flush<T>(
        &self,
        cx: &mut Context<'_>,
        work: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        self.0.lock().io.set_write_buffering(true);
        let polled = work(cx);
        let mut shared = self.0.lock();
        shared.io.set_write_buffering(false);
        // A write that returned `Pending` because of the batching has registered no waker. So the task wakes itself after the
        // flush. If the flush is pending, the socket wakes the task. An error of the flush is ignored here: the next read of
        // `h2` returns it.
        let flushed = Pin::new(&mut shared.io).poll_flush(cx);
        if std::mem::take(&mut shared.write_blocked) && flushed.is_ready() {
            cx.waker().wake_by_ref();
        }
        polled
    }
}

impl AsyncRead for BatchedIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().io).poll_read(cx, buf)
    }
}

impl AsyncWrite for BatchedIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let shared = &mut *self.0.lock();
        let written = Pin::new(&mut shared.io).poll_write(cx, buf);
        shared.write_blocked |= written.is_pending();
        written
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let shared = &mut *self.0.lock();
        let written = Pin::new(&mut shared.io).poll_write_vectored(cx, bufs);
        shared.write_blocked |= written.is_pending();
        written
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
