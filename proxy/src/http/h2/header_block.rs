//! Limits the memory and the time of a header block that is not complete. `h2` has no such limits and does not tell that it holds
//! one, so this follows the frames that the client sends.

use std::{
    future::Future as _,
    io,
    num::NonZeroU64,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

use crate::http::{
    error::Error,
    h2::config::Http2Config,
    stack::head_memory::{ClientHeadMemory, HeadReservation, UNRESERVED_HEAD_BYTES},
};

/// The I/O object of a connection, which `h2` reads from its preface on.
pub(super) struct TrackedIo<T> {
    io: T,
    tracker: HeaderBlockTracker,
    unfinished_block: UnfinishedBlock,
}

/// Limits the header block that is not complete.
pub(super) struct HeaderBlockLimits {
    unfinished_block: UnfinishedBlock,
    /// Memory that `h2` may hold for the block.
    max_bytes: usize,
    reserved: Option<Box<HeadReservation>>,
    /// Maximum time until the block is complete.
    timeout: Duration,
    deadline: Option<BlockDeadline>,
}

struct BlockDeadline {
    block: NonZeroU64,
    sleep: Pin<Box<Sleep>>,
}

/// The number of the header block that `h2` holds and that is not complete; 0 if there is none.
#[derive(Clone, Default)]
struct UnfinishedBlock(Arc<AtomicU64>);

/// The position in the bytes of the client.
struct HeaderBlockTracker {
    frame_header: [u8; FRAME_HEADER_BYTES],
    n_frame_header: usize,
    /// Bytes that follow before the next frame header.
    n_left: usize,
    block: HeaderBlock,
    /// Number of header blocks that have begun.
    n_blocks: u64,
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

/// `h2` may hold `max_bytes` for one header block, which must be complete within `timeout`.
pub(super) fn track<T>(io: T, max_bytes: usize, timeout: Duration) -> (TrackedIo<T>, HeaderBlockLimits) {
    let unfinished_block = UnfinishedBlock::default();
    let tracked = TrackedIo {
        io,
        tracker: HeaderBlockTracker::new(),
        unfinished_block: unfinished_block.clone(),
    };
    let limits = HeaderBlockLimits {
        unfinished_block,
        max_bytes,
        reserved: None,
        timeout,
        deadline: None,
    };
    (tracked, limits)
}

/// Memory that `h2` may hold for a header block that is not complete: decoded fields up to twice the limit of the header list, of
/// which a short one takes about twice the size that counts. Or a field that is not decoded: of up to six frames, or 1.25 times as many
/// as twice the limit needs.
pub(super) fn max_bytes(params: &Http2Config, max_frame_size: Option<u32>) -> usize {
    let decoded = (params.max_header_list_bytes as usize).saturating_mul(4);
    let frames = (max_frame_size.unwrap_or(MIN_MAX_FRAME_SIZE) as usize).saturating_mul(6);
    decoded.max(frames)
}

impl HeaderBlockLimits {
    pub(super) fn is_unfinished(&self) -> bool {
        self.unfinished_block.get().is_some()
    }

    /// Called when `h2` waits for more bytes of the client.
    ///
    /// # Errors
    /// Too little memory is left for the block, or it is not complete in time.
    pub(super) fn check(&mut self, cx: &mut Context<'_>, memory: &ClientHeadMemory) -> Result<(), Error> {
        let Some(block) = self.unfinished_block.get() else {
            self.reserved = None;
            self.deadline = None;
            return Ok(());
        };
        memory.reserve(cx, self.max_bytes, &mut self.reserved)?;
        let deadline = match &mut self.deadline {
            Some(deadline) if deadline.block == block => deadline,
            other => other.insert(BlockDeadline {
                block,
                sleep: Box::pin(sleep(self.timeout)),
            }),
        };
        match deadline.sleep.as_mut().poll(cx) {
            Poll::Ready(()) => Err(Error::HeaderReadTimeout(self.timeout)),
            Poll::Pending => Ok(()),
        }
    }
}

impl UnfinishedBlock {
    fn get(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, block: Option<NonZeroU64>) {
        self.0.store(block.map_or(0, NonZeroU64::get), Ordering::Relaxed);
    }
}

impl HeaderBlockTracker {
    fn new() -> Self {
        Self {
            frame_header: [0; FRAME_HEADER_BYTES],
            n_frame_header: 0,
            n_left: PREFACE_BYTES,
            block: HeaderBlock::None,
            n_blocks: 0,
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
        if matches!(kind, HEADERS | PUSH_PROMISE) {
            self.n_blocks += 1;
        }
        self.block = match kind {
            HEADERS | PUSH_PROMISE | CONTINUATION if flags & END_HEADERS == 0 => HeaderBlock::Continues,
            HEADERS | PUSH_PROMISE | CONTINUATION if counts => HeaderBlock::EndsWithFrame,
            // Other frames within a header block end the connection.
            _ => HeaderBlock::None,
        };
    }

    fn unfinished_block(&self) -> Option<NonZeroU64> {
        let is_unfinished = match self.block {
            HeaderBlock::None => false,
            HeaderBlock::Continues => true,
            HeaderBlock::EndsWithFrame => self.n_left > 0,
        };
        NonZeroU64::new(self.n_blocks).filter(|_| is_unfinished)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for TrackedIo<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let n_before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        this.tracker.record(&buf.filled()[n_before..]);
        this.unfinished_block.set(this.tracker.unfinished_block());
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
    use std::net::Ipv4Addr;

    use futures_util::task::noop_waker_ref;

    use super::*;
    use crate::{
        http::stack::head_memory::{ClientAddress, HeadMemory},
        net::memory::MemoryPressure,
    };

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
        // Each frame, and the number of the block that is unfinished just before the end of the frame and after it, or 0.
        let cases: &[(u8, u8, u16, [u64; 2])] = &[
            (DATA, 0, large, [0, 0]),
            (HEADERS, END_HEADERS, usual, [0, 0]),
            (HEADERS, END_HEADERS | 1, large, [2, 0]),
            (HEADERS, 1, usual, [3, 3]),
            (CONTINUATION, 0, large, [3, 3]),
            (CONTINUATION, END_HEADERS, usual, [3, 0]),
            (PUSH_PROMISE, 0, usual, [4, 4]),
            (CONTINUATION, END_HEADERS, large, [4, 0]),
            (DATA, END_HEADERS, usual, [0, 0]),
        ];
        for n_at_once in [1, 7, 1000, usize::MAX] {
            let mut tracker = HeaderBlockTracker::new();
            tracker.record(&[END_HEADERS; PREFACE_BYTES]);
            for case in cases {
                let (kind, flags, length, expected) = *case;
                let bytes = frame(kind, flags, length);
                let (last, most) = bytes.split_last().unwrap();
                most.chunks(n_at_once).for_each(|part| tracker.record(part));
                let before_end = tracker.unfinished_block();
                tracker.record(&[*last]);
                assert_eq!(
                    [before_end, tracker.unfinished_block()].map(|block| block.map_or(0, NonZeroU64::get)),
                    expected,
                    "{case:?} by {n_at_once}"
                );
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_header_block_has_the_whole_timeout() {
        let timeout = Duration::from_secs(10);
        let memory = HeadMemory::new(None, MemoryPressure::default());
        let client = (Ipv4Addr::LOCALHOST, 1).into();
        let memory = ClientHeadMemory::new(memory, client, ClientAddress::Unverified);
        let (_io, mut limits) = track(tokio::io::empty(), 1 << 20, timeout);
        let mut is_permitted = |block| {
            limits.unfinished_block.set(NonZeroU64::new(block));
            let checked = limits.check(&mut Context::from_waker(noop_waker_ref()), &memory);
            assert_eq!(limits.reserved.is_some(), block != 0);
            checked.is_ok()
        };
        // Seconds from one check to the next, and the block that is unfinished then, or 0.
        for (seconds, block) in [(0, 1), (9, 1), (2, 2), (9, 2), (2, 0), (60, 0), (60, 3), (9, 3)] {
            tokio::time::advance(Duration::from_secs(seconds)).await;
            assert!(is_permitted(block), "{block}");
        }
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(!is_permitted(3));
    }
}
