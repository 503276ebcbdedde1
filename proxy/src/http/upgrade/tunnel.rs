//! Tunnels: connections that stop being HTTP after an upgrade, such as WebSocket, or after CONNECT.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::oneshot,
};
use tulle_core::{connections::ConnectionHandle, drain};

use crate::{
    http::h2::upgraded_stream::UpgradedStream,
    net::{copy, io::Io},
};

/// One side of a tunnel.
pub(crate) enum TunnelSide {
    /// A whole connection.
    Connection(Io),
    /// One stream of an HTTP/2 connection.
    Stream(Box<UpgradedStream>),
}

/// The client's side of the tunnel that follows an upgrade request, once the request is accepted.
pub(crate) struct ClientTunnel {
    /// Receives the client's connection or stream when the HTTP server of this proxy has sent the upgrade response.
    side_rx: oneshot::Receiver<TunnelSide>,
    /// Ready when the tunnel must be closed. This future is dropped at the end of the tunnel, or with a request that is not accepted.
    denied: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl ClientTunnel {
    pub(crate) fn new(side_rx: oneshot::Receiver<TunnelSide>) -> Self {
        let denied = Box::pin(std::future::pending::<()>());
        Self { side_rx, denied }
    }

    /// Closes the tunnel when `denied` is ready.
    pub(crate) fn close_when(&mut self, denied: impl Future<Output = ()> + Send + 'static) {
        self.denied = Box::pin(denied);
    }

    /// Waits for the client's connection or stream. Returns `None` if the client closed before the upgrade.
    pub(crate) async fn wait_side(self) -> Option<TunnelSide> {
        self.side_rx.await.ok()
    }
}

/// Copies bytes between the client and the upstream until both have closed. The copy starts when the upgrade response was sent.
///
/// A drain waits for the tunnel. The tunnel is closed when its client is denied ([`ClientTunnel::close_when`]) or the client's
/// connection is evicted.
pub(crate) fn spawn_tunnel(client_tunnel: ClientTunnel, mut upstream: TunnelSide, drain: &drain::Watch) {
    let ClientTunnel { side_rx, denied } = client_tunnel;
    let guard = drain.guard();
    // The task needs its own abort handle to register it for eviction. The handle exists only after `spawn`.
    let (handle_tx, handle_rx) = oneshot::channel();
    let task = tokio::spawn(async move {
        let _guard = guard;
        let (Ok(mut client), Ok(handle)) = (side_rx.await, handle_rx.await) else {
            return tracing::debug!("the client closed the connection before the upgrade");
        };
        if let Some(connection) = client.handle() {
            connection.replace_task(handle);
        }
        tokio::select! {
            copied = copy::copy_bidirectional(&mut client, &mut upstream) => {
                if let Err(error) = copied {
                    tracing::debug!(%error, "tunnel ended");
                }
            }
            () = denied => {}
        }
    });
    // Sending fails only if the task has already ended.
    let _ = handle_tx.send(task.abort_handle());
}

impl TunnelSide {
    /// The handle of an accepted connection. A stream has none.
    fn handle(&self) -> Option<ConnectionHandle> {
        match self {
            Self::Connection(io) => io.handle(),
            Self::Stream(_) => None,
        }
    }
}

/// Runs a poll function on the connection or the stream.
macro_rules! on_transport {
    ($self:ident, $s:ident => $call:expr) => {
        match &mut *$self {
            TunnelSide::Connection($s) => $call,
            TunnelSide::Stream($s) => $call,
        }
    };
}

impl copy::ResetOnDrop for TunnelSide {
    fn reset_on_drop(&self) {
        if let Self::Connection(io) = self {
            io.reset_on_drop();
        }
        // Dropping an unfinished stream resets it.
    }
}

impl AsyncRead for TunnelSide {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        on_transport!(self, s => Pin::new(s).poll_read(cx, buf))
    }
}

impl AsyncWrite for TunnelSide {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        on_transport!(self, s => Pin::new(s).poll_write(cx, buf))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_transport!(self, s => Pin::new(s).poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_transport!(self, s => Pin::new(s).poll_shutdown(cx))
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
        connections::{ConnectionLimiter, SameAddressEviction},
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
    async fn a_tunnel_keeps_its_permit_until_eviction() {
        let limiter = ConnectionLimiter::new("test", 1, SameAddressEviction::Idlest, &Registry::new());
        let ip = |last| IpAddr::from(Ipv4Addr::new(10, 0, 0, last));
        let ((mut client, accepted), (upstream, mut application)) = (pair().await, pair().await);
        let accepted = Tcp::new(accepted).with_permit(limiter.admit(ip(1)));
        let (client_tx, client_rx) = oneshot::channel();
        let (_signal, drain) = drain::channel();
        let upstream = TunnelSide::Connection(Io::tcp(Tcp::new(upstream)));
        spawn_tunnel(ClientTunnel::new(client_rx), upstream, &drain);
        assert!(client_tx.send(TunnelSide::Connection(Io::tcp(accepted))).is_ok());
        client.write_all(b"hello").await.unwrap();
        application.read_exact(&mut [0; 5]).await.unwrap();
        assert_eq!(limiter.n_connections(), 1);
        let evicting = limiter.admit(ip(2)).unwrap();
        for side in [&mut client, &mut application] {
            assert!(side.read(&mut [0]).await.is_err(), "must be reset");
        }
        assert_eq!(limiter.n_connections(), 1);
        drop(evicting);
        assert_eq!(limiter.n_connections(), 0);
    }
}
