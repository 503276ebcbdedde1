//! Follows the frames that a client sends, because `h2` does not tell that it holds a header block that is not complete.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http::{h2::config::Http2Config, stack::head_memory::UNRESERVED_HEAD_BYTES};

/// The I/O object of a connection, which `h2` reads from its preface on.
pub(super) struct TrackedIo<T> {
    io: T,
    tracker: HeaderBlockTracker,
    state: HeaderBlockState,
}

/// Whether `h2` holds a header block of the client that is not complete.
#[derive(Clone, Default)]
pub(super) struct HeaderBlockState(Arc<AtomicBool>);

/// The position in the bytes of the client.
struct HeaderBlockTracker {
    frame_header: [u8; FRAME_HEADER_BYTES],
    n_frame_header: usize,
    /// Bytes that follow before the next frame header.
    n_left: usize,
    block: HeaderBlock,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeaderBlock {
    None,
    /// Another frame has to follow. `h2` decodes what it has: a few bytes can refer to many entries of a table, so their number does
    /// not matter.
    Continues,
    /// It ends with this frame, which is not its first one, or larger than what the connection covers.
    EndsWithFrame,
}

pub(super) fn track<T>(io: T) -> (TrackedIo<T>, HeaderBlockState) {
    let state = HeaderBlockState::default();
    let tracked = TrackedIo {
        io,
        tracker: HeaderBlockTracker::new(),
        state: state.clone(),
    };
    (tracked, state)
}

/// Memory that `h2` may hold for a header block that is not complete: decoded fields up to twice the limit of the header list, of
/// which a short one takes about twice the size that counts. Or a field that is not decoded: of up to six frames, or 1.25 times as many
/// as twice the limit needs.
pub(super) fn max_bytes(params: &Http2Config, max_frame_size: Option<u32>) -> usize {
    let decoded = (params.max_header_list_bytes as usize).saturating_mul(4);
    let frames = (max_frame_size.unwrap_or(MIN_MAX_FRAME_SIZE) as usize).saturating_mul(6);
    decoded.max(frames)
}

impl HeaderBlockState {
    pub(super) fn is_unfinished(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl HeaderBlockTracker {
    fn new() -> Self {
        Self {
            frame_header: [0; FRAME_HEADER_BYTES],
            n_frame_header: 0,
            n_left: PREFACE_BYTES,
            block: HeaderBlock::None,
        }
    }

    fn record(&mut self, mut received: &[u8]) {
        loop {
            let n = self.n_left.min(received.len());
            self.n_left -= n;
            received = &received[n..];
            if received.is_empty() {
                return;
            }
            let n = (FRAME_HEADER_BYTES - self.n_frame_header).min(received.len());
            self.frame_header[self.n_frame_header..][..n].copy_from_slice(&received[..n]);
            self.n_frame_header += n;
            received = &received[n..];
            if self.n_frame_header == FRAME_HEADER_BYTES {
                self.begin_frame();
            }
        }
    }

    fn begin_frame(&mut self) {
        let [length_1, length_2, length_3, kind, flags, ..] = self.frame_header;
        self.n_frame_header = 0;
        self.n_left = u32::from_be_bytes([0, length_1, length_2, length_3]) as usize;
        let counts = self.block == HeaderBlock::Continues || self.n_left > UNRESERVED_HEAD_BYTES;
        self.block = match kind {
            HEADERS | PUSH_PROMISE | CONTINUATION if flags & END_HEADERS == 0 => HeaderBlock::Continues,
            HEADERS | PUSH_PROMISE | CONTINUATION if counts => HeaderBlock::EndsWithFrame,
            // Other frames within a header block end the connection.
            _ => HeaderBlock::None,
        };
    }

    fn is_unfinished(&self) -> bool {
        match self.block {
            HeaderBlock::None => false,
            HeaderBlock::Continues => true,
            HeaderBlock::EndsWithFrame => self.n_left > 0,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for TrackedIo<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let n_before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        this.tracker.record(&buf.filled()[n_before..]);
        this.state.0.store(this.tracker.is_unfinished(), Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for TrackedIo<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Source: RFC 9113 §3.4, §4.1, §6 and §6.5.2.
const PREFACE_BYTES: usize = 24;
const FRAME_HEADER_BYTES: usize = 9;
const MIN_MAX_FRAME_SIZE: u32 = 1 << 14;
const HEADERS: u8 = 1;
const PUSH_PROMISE: u8 = 5;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: u8 = 0;

    fn frame(kind: u8, flags: u8, length: u16) -> Vec<u8> {
        let [high, low] = length.to_be_bytes();
        let mut bytes = vec![0, high, low, kind, flags, 0, 0, 0, 1];
        bytes.resize(bytes.len() + usize::from(length), END_HEADERS);
        bytes
    }

    #[test]
    fn header_blocks_are_unfinished_until_their_last_byte() {
        let usual = 100;
        let large = 16_000;
        // Each frame, and whether a block is unfinished just before the end of the frame and after it.
        let cases: &[(u8, u8, u16, [bool; 2])] = &[
            (DATA, 0, large, [false, false]),
            (HEADERS, END_HEADERS, usual, [false, false]),
            (HEADERS, END_HEADERS | 1, large, [true, false]),
            (HEADERS, 1, usual, [true, true]),
            (CONTINUATION, 0, large, [true, true]),
            (CONTINUATION, END_HEADERS, usual, [true, false]),
            (PUSH_PROMISE, 0, usual, [true, true]),
            (CONTINUATION, END_HEADERS, large, [true, false]),
            (DATA, END_HEADERS, usual, [false, false]),
        ];
        for n_at_once in [1, 7, 1000, usize::MAX] {
            let mut tracker = HeaderBlockTracker::new();
            tracker.record(&[END_HEADERS; PREFACE_BYTES]);
            for case in cases {
                let (kind, flags, length, expected) = *case;
                let bytes = frame(kind, flags, length);
                let (last, most) = bytes.split_last().unwrap();
                most.chunks(n_at_once).for_each(|part| tracker.record(part));
                let before_end = tracker.is_unfinished();
                tracker.record(&[*last]);
                assert_eq!(
                    [before_end, tracker.is_unfinished()],
                    expected,
                    "{case:?} by {n_at_once}"
                );
            }
        }
    }
}
