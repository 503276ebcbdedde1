//! Ending a connection on which something may still be coming: with bytes unread, the kernel would take back what was
//! written last.

use std::{io, time::Duration};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// How long a client is still listened to.
const TIME: Duration = Duration::from_secs(2);
/// For how many bytes.
const BYTES: usize = 512 * 1024;

/// Ends our side, and reads what the other side sends up to its end; not for ever.
///
/// # Errors
/// Our side could not be ended.
pub(crate) async fn close<IO: AsyncRead + AsyncWrite + Unpin>(io: &mut IO) -> io::Result<()> {
    let ending = async {
        io.shutdown().await?;
        let (mut space, mut left) = ([0; 1024], BYTES);
        while let Ok(n) = io.read(&mut space).await {
            match left.checked_sub(n) {
                Some(rest) if n > 0 => left = rest,
                _ => break,
            }
        }
        Ok(())
    };
    // Boxed: rare, and part of every connection's future. It has ended as far as we are concerned when the time is over.
    tokio::time::timeout(TIME, Box::pin(ending)).await.unwrap_or(Ok(()))
}
