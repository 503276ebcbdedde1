//! Closes a connection that may still receive data. If data is unread when a connection is closed, the kernel sends a
//! reset, and the peer may lose the last response.

use std::{io, time::Duration};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Maximum time to read after the write side is shut down.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of bytes to read and discard.
const MAX_DISCARDED_BYTES: usize = 512 * 1024;

/// Shuts down the write side, then reads and discards data until the peer closes or a limit is reached.
///
/// # Errors
/// Shutting down the write side fails.
pub(crate) async fn close<IO: AsyncRead + AsyncWrite + Unpin>(io: &mut IO) -> io::Result<()> {
    let ending = async {
        io.shutdown().await?;
        let (mut space, mut n_remaining) = ([0; 1024], MAX_DISCARDED_BYTES);
        while let Ok(n) = io.read(&mut space).await {
            match n_remaining.checked_sub(n) {
                Some(n_left) if n > 0 => n_remaining = n_left,
                _ => break,
            }
        }
        Ok(())
    };
    // Boxed: rare, and otherwise a part of every connection's future. A timeout counts as success.
    tokio::time::timeout(LINGER_TIMEOUT, Box::pin(ending))
        .await
        .unwrap_or(Ok(()))
}
