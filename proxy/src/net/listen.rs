//! Listening sockets and the accept loop of one worker.

use std::{
    future::Future,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use futures_util::FutureExt as _;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::{
    net::{TcpListener, TcpStream},
    time::Instant,
};
use tulle_core::addr::{self, ClientAddr};

use crate::net::{
    connect::{self, SocketOptions},
    pause::Pause,
};

/// How long an accept loop rests after the process ran out of descriptors or memory.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);
/// Where a client comes so soon after another, who is still there, more will: a crowd.
const SOON: Duration = Duration::from_micros(300);
/// How long the listener is left alone then. Those who come meanwhile are accepted together: to be woken for each of them would
/// cost us, and them, more than they wait.
const TOGETHER: Duration = Duration::from_micros(100);
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

/// Has the kernel not acknowledge a client's first bytes by a packet of its own: that goes with the answer. Whoever waits for more
/// of them asks for it, by `Io::acknowledge`. A kernel that refuses still carries traffic.
pub(crate) fn acknowledge_with_answer(listener: &std::net::TcpListener) {
    // Not before it listens, which would take it back.
    if let Err(error) = SockRef::from(listener).set_tcp_quickack(false) {
        tracing::debug!(%error, "requests are acknowledged before they are answered");
    }
}

/// Accepts until `stop` resolves, then takes what the kernel already queued, so that nobody who got through the
/// handshake is reset. `open` says how many connections there are.
pub(crate) async fn accept_loop(
    listener: std::net::TcpListener,
    pause: Pause,
    stop: impl Future<Output = ()>,
    open: impl Fn() -> usize,
    serve: impl Fn(TcpStream, ClientAddr),
) {
    let hand_over = |(stream, peer): (TcpStream, SocketAddr)| serve(stream, ClientAddr(addr::canonical(peer)));
    let mut crowd = Crowd::default();
    tokio::pin!(stop);
    loop {
        // Nothing else keeps the kernel from waking us for who comes than not to watch.
        let watched = match listener.try_clone().and_then(TcpListener::from_std) {
            Ok(watched) => watched,
            Err(error) => {
                tracing::warn!(%error, "watching for connections failed");
                match tokio::time::timeout(PAUSE_AFTER_ERROR, &mut stop).await {
                    Ok(()) => return take_queued(&listener, hand_over),
                    Err(_) => continue,
                }
            }
        };
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut stop => return take_queued(&listener, hand_over),
                accepted = watched.accept() => accepted,
            };
            let (before, mut first) = (open(), Some(accepted));
            if let Err(error) = take(|| first.take().or_else(|| watched.accept().now_or_never()), hand_over) {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
            }
            if crowd.comes(Instant::now(), before, open()) {
                break;
            }
        }
        drop(watched);
        if let Err(error) = pause.wait(TOGETHER).await {
            tracing::debug!(%error, "connections are accepted one by one");
        }
    }
}

/// Hands over all that `next` accepts, up to an error that is the listener's.
fn take(
    mut next: impl FnMut() -> Option<io::Result<(TcpStream, SocketAddr)>>,
    hand_over: impl Fn((TcpStream, SocketAddr)),
) -> io::Result<()> {
    while let Some(accepted) = next() {
        match accepted {
            Ok(connection) => hand_over(connection),
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Hands over all that are queued, as the kernel has it: the runtime may not know of the latest yet.
fn take_queued(listener: &std::net::TcpListener, hand_over: impl Fn((TcpStream, SocketAddr))) {
    let next = || match listener.accept() {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        accepted => Some(accepted.and_then(|(stream, peer)| {
            stream.set_nonblocking(true)?;
            Ok((TcpStream::from_std(stream)?, peer))
        })),
    };
    if let Err(error) = take(next, hand_over) {
        tracing::warn!(%error, "clients that were not served yet are lost");
    }
}

/// When clients came last, and how many there were then.
#[derive(Default)]
struct Crowd {
    last: Option<(Instant, usize)>,
}

impl Crowd {
    /// Whether those who came now, to so many others, are part of one. Who opens one connection after the other is none.
    fn comes(&mut self, now: Instant, before: usize, after: usize) -> bool {
        let last = self.last.replace((now, after));
        last.is_some_and(|(at, open)| now - at < SOON && before >= open)
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
    use super::*;
    use crate::net::io::{Io, Tcp};

    fn listening(options: SocketOptions) -> std::net::TcpListener {
        bind(([127, 0, 0, 1], 0).into(), None, Sharing::Alone, options).unwrap()
    }

    #[test]
    fn a_crowd_is_of_clients_who_come_soon_after_each_other_and_stay() {
        let (begun, micros) = (Instant::now(), Duration::from_micros);
        let mut crowd = Crowd::default();
        assert!(!crowd.comes(begun, 5, 6), "the first");
        assert!(!crowd.comes(begun + micros(200), 5, 6), "the one before has left");
        assert!(crowd.comes(begun + micros(400), 6, 9));
        assert!(crowd.comes(begun + micros(600), 9, 10));
        assert!(!crowd.comes(begun + micros(1000), 10, 11), "much later");
    }

    #[tokio::test]
    async fn all_of_a_crowd_are_accepted_and_those_still_queued_at_the_end() {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let listener = listening(SocketOptions::default());
        let addr = listener.local_addr().unwrap();
        let (sender, mut accepted) = tokio::sync::mpsc::unbounded_channel();
        let accepting = tokio::spawn(async move {
            let stop = stopped.map(|_| ());
            let serve = |stream, _| sender.send(stream).unwrap();
            accept_loop(listener, Pause::new().unwrap(), stop, || sender.strong_count(), serve).await;
        });
        let mut open = Vec::new();
        for _ in 0..100 {
            open.push(TcpStream::connect(addr).await.unwrap());
        }
        for _ in 0..100 {
            open.push(accepted.recv().await.unwrap());
        }
        let _last = std::net::TcpStream::connect(addr).unwrap();
        stop.send(()).unwrap();
        accepting.await.unwrap();
        assert!(accepted.recv().await.is_some());
        assert!(accepted.recv().await.is_none());
    }

    #[tokio::test]
    async fn first_bytes_are_acknowledged_with_the_answer_until_somebody_asks_for_it() {
        let listener = listening(SocketOptions::default());
        acknowledge_with_answer(&listener);
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = TcpListener::from_std(listener).unwrap().accept().await.unwrap();
        let socket = SockRef::from(&stream).try_clone().unwrap();
        assert!(!socket.tcp_quickack().unwrap());
        Io::tcp(Tcp::new(stream)).acknowledge();
        assert!(socket.tcp_quickack().unwrap());
    }

    #[tokio::test]
    async fn what_is_accepted_has_the_options_of_its_listener() {
        let options = SocketOptions {
            keepalive: Some(Duration::from_secs(11)),
            user_timeout: Some(Duration::from_secs(12)),
        };
        let listener = listening(options);
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = TcpListener::from_std(listener).unwrap().accept().await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(11));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(12)));
    }
}
