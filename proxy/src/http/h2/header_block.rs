//! Limits the time until a header block is complete, and the memory of all incomplete blocks together. `h2` limits only the
//! size of each block, and does not report whether it holds one. So this module parses the frame headers that the client
//! sends.

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

/// The I/O object of a connection. `h2` reads all bytes of the client from it, including the preface.
pub(super) struct TrackedIo<T> {
    io: T,
    tracker: HeaderBlockTracker,
    block_state: HeaderBlockState,
}

/// Limits the time and the memory of the incomplete header block.
pub(super) struct HeaderBlockLimits {
    block_state: HeaderBlockState,
    /// Memory that `h2` may hold for the block.
    max_bytes: usize,
    reserved: HeadReservation,
    /// Maximum time until the block is complete.
    timeout: Duration,
    deadline: Option<BlockDeadline>,
}

struct BlockDeadline {
    number: u64,
    sleep: Pin<Box<Sleep>>,
}

/// The client's incomplete header block, if there is one. Shared by the I/O object and the limits.
#[derive(Clone, Default)]
pub(super) struct HeaderBlockState(Arc<AtomicU64>);

/// An incomplete header block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UnfinishedBlock {
    /// Number of the block on its connection, from 1.
    number: u64,
    /// Whether `h2` may hold more than [`UNRESERVED_HEAD_BYTES`] of the block.
    needs_memory: bool,
}

/// Parses the frame headers in the bytes of the client, and follows its header blocks.
struct HeaderBlockTracker {
    frame_header: [u8; FRAME_HEADER_BYTES],
    n_frame_header: usize,
    /// Number of bytes before the next frame header.
    n_left: usize,
    block: HeaderBlock,
    /// Number of header blocks that have begun.
    n_blocks: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeaderBlock {
    None,
    /// Another frame of the block must follow. Such a block always needs memory: even a few bytes can refer to large fields
    /// in HPACK's dynamic table, and `h2` holds the decoded fields.
    Continues,
    /// The block ends with the current frame.
    EndsWithFrame {
        /// Whether the frame is larger than [`UNRESERVED_HEAD_BYTES`], or not the first frame of the block.
        needs_memory: bool,
    },
}

/// Wraps `io`, and returns the limits of its header blocks. `h2` may hold `max_bytes` for one block, which must be complete
/// within `timeout`.
pub(super) fn track<T>(io: T, max_bytes: usize, timeout: Duration) -> (TrackedIo<T>, HeaderBlockLimits) {
    let block_state = HeaderBlockState::default();
    let tracked = TrackedIo {
        io,
        tracker: HeaderBlockTracker::new(),
        block_state: block_state.clone(),
    };
    let limits = HeaderBlockLimits {
        block_state,
        max_bytes,
        reserved: HeadReservation::default(),
        timeout,
        deadline: None,
    };
    (tracked, limits)
}

/// Maximum number of bytes that `h2` holds for an incomplete header block: the larger of two cases.
///
/// - Decoded fields: 4 times `max_header_list_bytes`. The builder in `server.rs` makes `h2` accept twice this limit, and a short
///   field takes about twice as much memory as it counts towards the limit.
/// - Frames of a field that cannot be decoded yet: six frames of the maximum size. `h2` accepts more frames only if they are
///   short, and then they hold at most 3 times `max_header_list_bytes` together, less than the decoded fields.
pub(super) fn max_bytes(params: &Http2Config, max_frame_size: Option<u32>) -> usize {
    let decoded = (params.max_header_list_bytes as usize).saturating_mul(4);
    let frames = (max_frame_size.unwrap_or(MIN_MAX_FRAME_SIZE) as usize).saturating_mul(6);
    decoded.max(frames)
}

impl HeaderBlockLimits {
    pub(super) fn block_state(&self) -> &HeaderBlockState {
        &self.block_state
    }

    /// Checks the limits. Called when `h2` cannot continue, usually because it waits for more bytes of the client.
    ///
    /// # Errors
    /// Too little memory is left for the block, or it is not complete in time.
    pub(super) fn check(&mut self, cx: &mut Context<'_>, memory: &ClientHeadMemory) -> Result<(), Error> {
        let Some(unfinished) = self.block_state.get() else {
            self.reserved = HeadReservation::default();
            self.deadline = None;
            return Ok(());
        };
        let n_bytes = match unfinished.needs_memory {
            true => self.max_bytes,
            false => 0,
        };
        self.reserved.update(cx, memory, n_bytes)?;
        let deadline = match &mut self.deadline {
            Some(deadline) if deadline.number == unfinished.number => deadline,
            other => other.insert(BlockDeadline {
                number: unfinished.number,
                sleep: Box::pin(sleep(self.timeout)),
            }),
        };
        match deadline.sleep.as_mut().poll(cx) {
            Poll::Ready(()) => Err(Error::HeaderReadTimeout(self.timeout)),
            Poll::Pending => Ok(()),
        }
    }
}

impl HeaderBlockState {
    pub(super) fn is_unfinished(&self) -> bool {
        self.get().is_some()
    }

    fn get(&self) -> Option<UnfinishedBlock> {
        let value = NonZeroU64::new(self.0.load(Ordering::Relaxed))?.get();
        Some(UnfinishedBlock {
            number: value >> 1,
            needs_memory: value & 1 == 1,
        })
    }

    fn set(&self, block: Option<UnfinishedBlock>) {
        let value = block.map_or(0, |block| block.number << 1 | u64::from(block.needs_memory));
        self.0.store(value, Ordering::Relaxed);
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

    /// Parses received bytes.
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
        let needs_memory = self.block == HeaderBlock::Continues || self.n_left > UNRESERVED_HEAD_BYTES;
        if matches!(kind, HEADERS | PUSH_PROMISE) {
            self.n_blocks += 1;
        }
        self.block = match kind {
            HEADERS | PUSH_PROMISE | CONTINUATION if flags & END_HEADERS == 0 => HeaderBlock::Continues,
            HEADERS | PUSH_PROMISE | CONTINUATION => HeaderBlock::EndsWithFrame { needs_memory },
            // Other frames within a header block end the connection.
            _ => HeaderBlock::None,
        };
    }

    fn unfinished(&self) -> Option<UnfinishedBlock> {
        let needs_memory = match self.block {
            HeaderBlock::Continues => true,
            HeaderBlock::EndsWithFrame { needs_memory } if self.n_left > 0 => needs_memory,
            HeaderBlock::EndsWithFrame { .. } | HeaderBlock::None => return None,
        };
        Some(UnfinishedBlock {
            number: self.n_blocks,
            needs_memory,
        })
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for TrackedIo<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let n_before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        this.tracker.record(&buf.filled()[n_before..]);
        this.block_state.set(this.tracker.unfinished());
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
        http::stack::head_memory::{ClientKind, HeadMemory},
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
        let small_block = |number| {
            Some(UnfinishedBlock {
                number,
                needs_memory: false,
            })
        };
        let large_block = |number| {
            Some(UnfinishedBlock {
                number,
                needs_memory: true,
            })
        };
        // Each frame, and the block that is unfinished before and after the last byte of the frame.
        let cases: &[(u8, u8, u16, [Option<UnfinishedBlock>; 2])] = &[
            (DATA, 0, large, [None, None]),
            (HEADERS, END_HEADERS, usual, [small_block(1), None]),
            (HEADERS, END_HEADERS | 1, large, [large_block(2), None]),
            (HEADERS, 1, usual, [large_block(3), large_block(3)]),
            (CONTINUATION, 0, large, [large_block(3), large_block(3)]),
            (CONTINUATION, END_HEADERS, usual, [large_block(3), None]),
            (PUSH_PROMISE, 0, usual, [large_block(4), large_block(4)]),
            (CONTINUATION, END_HEADERS, large, [large_block(4), None]),
            (DATA, END_HEADERS, usual, [None, None]),
        ];
        for chunk_size in [1, 7, 1000, usize::MAX] {
            let mut tracker = HeaderBlockTracker::new();
            tracker.record(&[END_HEADERS; PREFACE_BYTES]);
            for case in cases {
                let (kind, flags, length, expected) = *case;
                let bytes = frame(kind, flags, length);
                let (last, most) = bytes.split_last().unwrap();
                most.chunks(chunk_size).for_each(|part| tracker.record(part));
                let before_end = tracker.unfinished();
                tracker.record(&[*last]);
                assert_eq!(
                    [before_end, tracker.unfinished()],
                    expected,
                    "{case:?} in chunks of {chunk_size}"
                );
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_header_block_has_the_whole_timeout() {
        let timeout = Duration::from_secs(10);
        let memory = HeadMemory::new(None, MemoryPressure::default());
        let client = (Ipv4Addr::LOCALHOST, 1).into();
        let memory = ClientHeadMemory::new(memory, client, ClientKind::WithoutIdentity);
        let (_io, mut limits) = track(tokio::io::empty(), 1 << 20, timeout);
        let mut is_permitted = |number: u64| {
            let needs_memory = number.is_multiple_of(2);
            let unfinished = (number > 0).then_some(UnfinishedBlock { number, needs_memory });
            limits.block_state.set(unfinished);
            let checked = limits.check(&mut Context::from_waker(noop_waker_ref()), &memory);
            assert_eq!(!limits.reserved.is_empty(), unfinished.is_some() && needs_memory);
            checked.is_ok()
        };
        // Seconds since the previous check, and the number of the unfinished block, or 0.
        for (seconds, block) in [(0, 1), (9, 1), (2, 2), (9, 2), (2, 0), (60, 0), (60, 3), (9, 3)] {
            tokio::time::advance(Duration::from_secs(seconds)).await;
            assert!(is_permitted(block), "{block}");
        }
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(!is_permitted(3));
    }
}
