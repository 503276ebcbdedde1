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
use tulle_core::{connections::ActivityTracker, drain};

use crate::{
    http::h2::upgraded_stream::UpgradedStream,
    net::{copy, io::Io},
};

/// One side of a tunnel.
pub(crate) enum TunnelEnd {
    /// A connection of its own.
    Connection(Io),
    /// A stream of HTTP/2, which shares its connection.
    Stream(Box<UpgradedStream>),
}

/// Joins the client's side, once the server lets go of it, with the upstream one; bytes pass until both have ended.
///
/// A tunnel does not hear of a drain, it holds it open. It is cut when `refused` is ready, or when the place of the client's
/// connection goes to another one.
pub(crate) fn spawn_tunnel(
    client: oneshot::Receiver<TunnelEnd>,
    mut upstream: TunnelEnd,
    drain: &drain::Watch,
    refused: impl Future<Output = ()> + Send + 'static,
) {
    let guard = drain.guard();
    let (named, name) = oneshot::channel();
    let task = tokio::spawn(async move {
        let _guard = guard;
        let (Ok(mut client), Ok(task)) = (client.await, name.await) else {
            return tracing::debug!("the client left before its upgrade");
        };
        if let Some(activity) = client.activity() {
            activity.replace_task(task);
        }
        tokio::select! {
            copied = copy::copy_bidirectional(&mut client, &mut upstream) => {
                if let Err(error) = copied {
                    tracing::debug!(%error, "tunnel ended");
                }
            }
            () = refused => {}
        }
    });
    // An error is a task that has ended.
    let _ = named.send(task.abort_handle());
}

impl TunnelEnd {
    /// What the place of a connection is told; a stream has none.
    fn activity(&self) -> Option<ActivityTracker> {
        match self {
            Self::Connection(io) => io.activity(),
            Self::Stream(_) => None,
        }
    }
}

/// Runs a poll function on whichever leg this is.
macro_rules! on_leg {
    ($self:ident, $s:ident => $call:expr) => {
        match &mut *$self {
            TunnelEnd::Connection($s) => $call,
            TunnelEnd::Stream($s) => $call,
        }
    };
}

impl copy::ResetOnDrop for TunnelEnd {
    fn reset(&self) {
        if let Self::Connection(io) = self {
            io.reset();
        }
        // A stream that is dropped before its end is reset anyway.
    }
}

impl AsyncRead for TunnelEnd {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        on_leg!(self, s => Pin::new(s).poll_read(cx, buf))
    }
}

impl AsyncWrite for TunnelEnd {
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

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
    };
    use tulle_core::{
        connections::{ConnectionLimiter, FullLimitPolicy},
        metrics::Registry,
    };

    use super::*;
    use crate::net::io::Tcp;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (dialled, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn a_tunnel_has_the_place_of_its_client_until_that_goes_to_another_one() {
        let limiter = ConnectionLimiter::new("test", 1, FullLimitPolicy::CloseIdlest, &Registry::new());
        let ip = |last| IpAddr::from(Ipv4Addr::new(10, 0, 0, last));
        let ((mut client, accepted), (upstream, mut application)) = (pair().await, pair().await);
        let accepted = Tcp::new(accepted).with_permit(limiter.admit(ip(1)));
        let (upgrade, upgraded) = oneshot::channel();
        let (_signal, drain) = drain::channel();
        let upstream = TunnelEnd::Connection(Io::tcp(Tcp::new(upstream)));
        spawn_tunnel(upgraded, upstream, &drain, std::future::pending());
        assert!(upgrade.send(TunnelEnd::Connection(Io::tcp(accepted))).is_ok());
        client.write_all(b"hello").await.unwrap();
        application.read_exact(&mut [0; 5]).await.unwrap();
        assert_eq!(limiter.n_connections(), 1);
        let newcomer = limiter.admit(ip(2)).unwrap();
        for side in [&mut client, &mut application] {
            assert!(side.read(&mut [0]).await.is_err(), "a reset");
        }
        assert_eq!(limiter.n_connections(), 1);
        drop(newcomer);
        assert_eq!(limiter.n_connections(), 0);
    }
}
