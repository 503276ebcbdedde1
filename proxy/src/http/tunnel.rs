//! Connections that stop being HTTP: upgrades such as WebSocket, and CONNECT.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::oneshot,
};
use tulle_core::drain;

use crate::{
    http::h2::stream::Stream,
    net::{copy, io::Io},
};

/// One side of a tunnel.
pub(crate) enum Leg {
    /// A connection of its own.
    Connection(Io),
    /// A stream of HTTP/2, which shares its connection.
    Stream(Box<Stream>),
}

/// Joins the client's side, once the server lets go of it, with the upstream one; bytes pass until both have ended.
///
/// A tunnel does not hear of a drain, it holds it open. It is cut when `refused` is ready.
pub(crate) fn spawn(
    client: oneshot::Receiver<Leg>,
    mut upstream: Leg,
    drain: &drain::Watch,
    refused: impl Future<Output = ()> + Send + 'static,
) {
    let guard = drain.guard();
    tokio::spawn(async move {
        let _guard = guard;
        let Ok(mut client) = client.await else {
            return tracing::debug!("the client left before its upgrade");
        };
        tokio::select! {
            copied = copy::both(&mut client, &mut upstream) => {
                if let Err(error) = copied {
                    tracing::debug!(%error, "tunnel ended");
                }
            }
            () = refused => {}
        }
    });
}

/// Runs a poll function on whichever leg this is.
macro_rules! on_leg {
    ($self:ident, $s:ident => $call:expr) => {
        match &mut *$self {
            Leg::Connection($s) => $call,
            Leg::Stream($s) => $call,
        }
    };
}

impl copy::Reset for Leg {
    fn reset(&self) {
        if let Self::Connection(io) = self {
            io.reset();
        }
        // A stream that is dropped before its end is reset anyway.
    }
}

impl AsyncRead for Leg {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        on_leg!(self, s => Pin::new(s).poll_read(cx, buf))
    }
}

impl AsyncWrite for Leg {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        on_leg!(self, s => Pin::new(s).poll_write(cx, buf))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_leg!(self, s => Pin::new(s).poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_leg!(self, s => Pin::new(s).poll_shutdown(cx))
    }
}
