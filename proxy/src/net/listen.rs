//! Listening sockets and the accept loop of one worker.

use std::{
    future::Future,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tulle_core::addr::{self, ClientAddr};

use crate::net::connect::{self, SocketOptions};

/// How long an accept loop rests after the process ran out of descriptors or memory.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);
/// Connections that may wait to be accepted, unless the environment says otherwise.
const BACKLOG: i32 = 4096;

/// Whether an address is bound more than once in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    Alone,
    /// Once a worker; the kernel spreads connections between them.
    Workers,
}

/// Binds `addr`. Every connection that is accepted has the options of its listener, from before anybody has accepted it.
///
/// # Errors
/// The address is taken by another process, not ours to bind, or not on this host.
pub(crate) fn bind(
    addr: SocketAddr,
    backlog: Option<u32>,
    sharing: Sharing,
    options: SocketOptions,
) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(sharing == Sharing::Workers)?;
    if addr.ip() == Ipv6Addr::UNSPECIFIED {
        socket.set_only_v6(false)?; // one listener serves both families
    }
    socket.set_nonblocking(true)?;
    connect::apply(&socket, options);
    socket.bind(&addr.into())?;
    socket.listen(backlog.map_or(BACKLOG, |n| i32::try_from(n).unwrap_or(i32::MAX)))?;
    Ok(socket.into())
}

/// Whether this machine has an address at all; of one without IPv6 that is not `::1`.
pub(crate) fn is_here(ip: IpAddr) -> bool {
    match std::net::TcpListener::bind((ip, 0)) {
        Ok(_) => true,
        Err(error) => {
            error.kind() != io::ErrorKind::AddrNotAvailable && error.raw_os_error() != Some(libc::EAFNOSUPPORT)
        }
    }
}

/// Accepts until `stop` resolves, then takes what the kernel already queued, so that nobody who got through the
/// handshake is reset.
pub(crate) async fn accept_loop(
    listener: TcpListener,
    stop: impl Future<Output = ()>,
    serve: impl Fn(TcpStream, ClientAddr),
) {
    let hand_over = |(stream, peer): (TcpStream, SocketAddr)| serve(stream, ClientAddr(addr::canonical(peer)));
    tokio::pin!(stop);
    loop {
        tokio::select! {
            biased;
            () = &mut stop => break,
            accepted = listener.accept() => match accepted {
                Ok(connection) => hand_over(connection),
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection failed");
                    tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                }
            },
        }
    }
    while let Some(Ok(connection)) = futures_util::FutureExt::now_or_never(listener.accept()) {
        hand_over(connection);
    }
}

/// True for errors that concern the connection being accepted, not the listener.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
    )
}

#[cfg(test)]
mod tests {
    use socket2::SockRef;

    use super::*;

    #[tokio::test]
    async fn what_is_accepted_has_the_options_of_its_listener() {
        let options = SocketOptions {
            keepalive: Some(Duration::from_secs(11)),
            user_timeout: Some(Duration::from_secs(12)),
        };
        let listener = bind(([127, 0, 0, 1], 0).into(), None, Sharing::Alone, options).unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = TcpListener::from_std(listener).unwrap().accept().await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(11));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(12)));
    }
}
