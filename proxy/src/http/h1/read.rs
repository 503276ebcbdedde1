//! One read buffer a thread: a connection borrows it while there is something to read.

use std::{
    cell::RefCell,
    io,
    pin::pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// Bytes read at once: what passes the network in one packet of 64 KiB when it is sent on, with its frame, four records
/// of TLS and headers.
pub(super) const SIZE: usize = 60 * 1024;
/// Reads of at least so many bytes take the buffer along; shorter ones are copied out of it.
const LARGE: usize = 8 * 1024;

thread_local! {
    static BUFFER: RefCell<BytesMut> = RefCell::default();
}

/// Appends to `inbox` what one read yields, and says how many bytes that is; 0 is the end.
pub(super) fn poll_more<R>(cx: &mut Context<'_>, io: &mut R, inbox: &mut Bytes) -> Poll<io::Result<usize>>
where
    R: AsyncRead + Unpin,
{
    BUFFER.with_borrow_mut(|buffer| {
        buffer.reserve(SIZE);
        let n = ready!(pin!(io.read_buf(buffer)).poll(cx))?;
        if !inbox.is_empty() {
            let mut bytes = BytesMut::from(std::mem::take(inbox));
            bytes.extend_from_slice(buffer);
            *inbox = bytes.freeze();
        } else if n < LARGE {
            *inbox = copied(buffer);
        } else {
            *inbox = buffer.split().freeze();
        }
        buffer.clear();
        Poll::Ready(Ok(n))
    })
}

/// Bytes that can be shared without another allocation, as copies of slices cannot; for pieces of the usual size.
struct Piece {
    bytes: [u8; PIECE],
    len: usize,
}

const PIECE: usize = 512;
/// Less takes an allocation of its own size.
const SHORT: usize = 64;

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

fn copied(bytes: &[u8]) -> Bytes {
    if bytes.len() > PIECE || bytes.len() < SHORT {
        return Bytes::copy_from_slice(bytes);
    }
    let mut piece = Piece {
        bytes: [0; PIECE],
        len: bytes.len(),
    };
    piece.bytes[..bytes.len()].copy_from_slice(bytes);
    Bytes::from_owner(piece)
}
