//! A connection that ends when the certificates of its client are no longer valid.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::net::io::Io;
use crate::tls::client_chains::ClientChain;

/// Ends its input when a certificate of the client has expired, or the trust anchors no longer verify it. The server then closes the
/// connection even during a response: it does not support half-closed connections, so it takes the end of the input for a disconnect.
pub(super) struct CertifiedStream {
    io: Io,
    /// Completes when the certificates are no longer valid. `None` without a certificate, and after it has completed.
    wait_invalid: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    is_invalid: bool,
}

impl CertifiedStream {
    pub(super) fn new(io: Io, chain: Option<Arc<ClientChain>>) -> Self {
        let wait_invalid = chain.map(|chain| -> Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move { chain.wait_invalid().await })
        });
        Self {
            io,
            wait_invalid,
            is_invalid: false,
        }
    }
}

impl AsyncRead for CertifiedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(wait_invalid) = &mut self.wait_invalid
            && wait_invalid.as_mut().poll(cx).is_ready()
        {
            self.wait_invalid = None; // a completed future must not be polled again
            self.is_invalid = true;
        }
        match self.is_invalid {
            true => Poll::Ready(Ok(())),
            false => Pin::new(&mut self.io).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for CertifiedStream {
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
