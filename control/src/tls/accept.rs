//! The handshake with a client that is not verified yet: limited in time, and in the bytes that the client can send.
//!
//! A handshake message can have 64 KiB, which the TLS library keeps until the message is complete. This is several times the
//! memory of an idle connection.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("the TLS handshake failed")]
    Failed(#[source] io::Error),
    #[error("the TLS handshake took longer than {HANDSHAKE_TIMEOUT:?}")]
    Timeout,
}

/// A stream that fails when more than a number of bytes have been read, until the limit is removed.
pub(crate) struct ReadLimit<S> {
    stream: S,
    n_left: Option<usize>,
}

/// Accepts TLS on a stream.
///
/// # Errors
/// Fails if the handshake fails, needs more than [`HANDSHAKE_TIMEOUT`], or the client sends more than [`MAX_HANDSHAKE_BYTES`].
pub(crate) async fn accept<S>(config: Arc<ServerConfig>, stream: S) -> Result<TlsStream<ReadLimit<S>>, HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let stream = ReadLimit {
        stream,
        n_left: Some(MAX_HANDSHAKE_BYTES),
    };
    let mut tls = timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(stream))
        .await
        .map_err(|_| HandshakeError::Timeout)?
        .map_err(HandshakeError::Failed)?;
    tls.get_mut().0.n_left = None;
    Ok(tls)
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadLimit<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let n_before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let n_read = buf.filled().len() - n_before;
        if let Some(n_left) = &mut self.n_left {
            *n_left = n_left
                .checked_sub(n_read)
                .ok_or_else(|| io::Error::other("the client sent too much in the TLS handshake"))?;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadLimit<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of bytes that a client can send in the handshake: several times the size of a ClientHello and a certificate
/// chain.
pub(crate) const MAX_HANDSHAKE_BYTES: usize = 32 * 1024;
