//! One buffer for each thread, which connections borrow for a read. The `read_buffer` of a connection keeps the bytes that
//! are not parsed yet.

use std::{
    cell::RefCell,
    io,
    pin::pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// Maximum size of one read. With the overhead of an HTTP/2 frame, four TLS records and the TCP headers, this fits into one
/// packet of 64 KiB.
pub(super) const READ_BUFFER_BYTES: usize = 60 * 1024;
/// The bytes of a read of at least this size keep the memory of the thread's buffer. Fewer bytes are copied.
const MIN_ZERO_COPY_BYTES: usize = 8 * 1024;

thread_local! {
    static BUFFER: RefCell<BytesMut> = RefCell::default();
}

/// Appends the bytes of one read to `read_buffer` and returns their number; 0 is the end of the stream.
pub(super) fn poll_read_into<R>(cx: &mut Context<'_>, io: &mut R, read_buffer: &mut Bytes) -> Poll<io::Result<usize>>
where
    R: AsyncRead + Unpin,
{
    BUFFER.with_borrow_mut(|buffer| {
        buffer.reserve(READ_BUFFER_BYTES);
        let n = ready!(pin!(io.read_buf(buffer)).poll(cx))?;
        if !read_buffer.is_empty() {
            let mut bytes = BytesMut::from(std::mem::take(read_buffer));
            bytes.extend_from_slice(buffer);
            *read_buffer = bytes.freeze();
        } else if n < MIN_ZERO_COPY_BYTES {
            *read_buffer = copy_small(buffer);
        } else {
            *read_buffer = buffer.split().freeze();
        }
        buffer.clear();
        Poll::Ready(Ok(n))
    })
}

/// The bytes of a short read, for `Bytes::from_owner`, which puts bytes and reference count into one allocation.
/// `Bytes::from(Vec)` would allocate the reference count separately, at the first clone.
struct FixedBuffer {
    bytes: [u8; FIXED_BUFFER_BYTES],
    len: usize,
}

const FIXED_BUFFER_BYTES: usize = 512;
/// Shorter data gets an allocation of its own size.
const MIN_FIXED_BUFFER_BYTES: usize = 64;

impl AsRef<[u8]> for FixedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

fn copy_small(bytes: &[u8]) -> Bytes {
    if bytes.len() > FIXED_BUFFER_BYTES || bytes.len() < MIN_FIXED_BUFFER_BYTES {
        return Bytes::copy_from_slice(bytes);
    }
    let mut piece = FixedBuffer {
        bytes: [0; FIXED_BUFFER_BYTES],
        len: bytes.len(),
    };
    piece.bytes[..bytes.len()].copy_from_slice(bytes);
    Bytes::from_owner(piece)
}
