//! Frames that leave together.
//!
//! `h2` flushes after each frame of data, which would be a system call for 16 KiB, and its way through the network. So what it
//! writes is held back in TLS until that is full, or until whoever drives the connection has nothing more for it.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::net::io::Io;

/// A connection as `h2` has it.
pub(super) struct Batched(Arc<Mutex<Shared>>);

/// The same connection as who drives it has it.
pub(super) struct Batch(Arc<Mutex<Shared>>);

struct Shared {
    io: Io,
    /// Whether a write was refused since the last flush: perhaps only because it was held back, of which nobody is woken.
    refused: bool,
}

pub(super) fn batched(io: Io) -> (Batched, Batch) {
    let shared = Arc::new(Mutex::new(Shared { io, refused: false }));
    (Batched(shared.clone()), Batch(shared))
}

impl Batch {
    /// Polls `work`, which may write, then sends what it has written.
    pub(super) fn poll<T>(&self, cx: &mut Context<'_>, work: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        self.0.lock().io.hold_back(true);
        let polled = work(cx);
        let mut shared = self.0.lock();
        shared.io.hold_back(false);
        // Where the other side takes no more now, we are woken when it does. An error shows when h2 reads.
        let flushed = Pin::new(&mut shared.io).poll_flush(cx);
        if std::mem::take(&mut shared.refused) && flushed.is_ready() {
            cx.waker().wake_by_ref();
        }
        polled
    }
}

impl AsyncRead for Batched {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().io).poll_read(cx, buf)
    }
}

impl AsyncWrite for Batched {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let shared = &mut *self.0.lock();
        let written = Pin::new(&mut shared.io).poll_write(cx, buf);
        shared.refused |= written.is_pending();
        written
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let shared = &mut *self.0.lock();
        let written = Pin::new(&mut shared.io).poll_write_vectored(cx, bufs);
        shared.refused |= written.is_pending();
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
