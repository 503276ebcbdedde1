//! Listening sockets and the accept loop of one worker.

use std::{
    convert::Infallible,
    io::{self, Read as _},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd as _, BorrowedFd},
    time::Duration,
};

use bytes::Bytes;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::io::{Interest, unix::AsyncFd};
use tulle_core::{
    addr::{self, ClientAddr},
    log_limit::LogLimiter,
    warn_limited,
};

use crate::net::{
    connect::{self, SocketOptions},
    detect,
};

/// Backoff of an accept loop after the process ran out of descriptors or memory.
const ACCEPT_ERROR_BACKOFF: Duration = Duration::from_millis(50);
/// Maximum number of clients that are accepted before they are served and other tasks run.
const ACCEPT_BATCH_SIZE: usize = 128;
/// Default maximum length of the accept queue.
const DEFAULT_BACKLOG: i32 = 4096;

/// Whether an address is bound more than once in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortSharing {
    Exclusive,
    /// Each worker binds it once; the kernel distributes the connections among the workers.
    Workers,
}

/// Binds `addr`. Accepted connections inherit the socket options of the listener.
///
/// # Errors
/// The address is in use, needs privileges, or is not on this host.
pub(crate) fn bind(
    addr: SocketAddr,
    backlog: Option<u32>,
    sharing: PortSharing,
    options: SocketOptions,
) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(sharing == PortSharing::Workers)?;
    if addr.ip() == Ipv6Addr::UNSPECIFIED {
        socket.set_only_v6(false)?; // one listener serves both families
    }
    socket.set_nonblocking(true)?;
    connect::apply_options(&socket, options);
    socket.bind(&addr.into())?;
    socket.listen(backlog.map_or(DEFAULT_BACKLOG, |n| i32::try_from(n).unwrap_or(i32::MAX)))?;
    Ok(socket.into())
}

/// Whether this host has the address; for example, a host without IPv6 does not have `::1`.
pub(crate) fn is_local_addr(ip: IpAddr) -> bool {
    match std::net::TcpListener::bind((ip, 0)) {
        Ok(_) => true,
        Err(error) => {
            error.kind() != io::ErrorKind::AddrNotAvailable && error.raw_os_error() != Some(libc::EAFNOSUPPORT)
        }
    }
}

/// Disables quick acknowledgements, so that the ACK of a client's first bytes is sent with the response. Code that waits for
/// more bytes of the client enables them again (`Io::enable_quickack`). Failures are only logged, because the connection
/// still carries traffic.
pub(crate) fn disable_quickack(listener: &std::net::TcpListener) {
    // Set after `listen`, which resets the option.
    if let Err(error) = SockRef::from(listener).set_tcp_quickack(false) {
        tracing::debug!(%error, "disabling TCP_QUICKACK failed, requests are acknowledged separately");
    }
}

/// Accepts until `stop` resolves, then accepts the connections that the kernel has already queued, so that no client that
/// completed the handshake is reset.
pub(crate) async fn accept_loop(
    listener: std::net::TcpListener,
    stop: impl Future<Output = ()>,
    serve: impl Fn(AcceptedSocket, ClientAddr),
) {
    let mut acceptor = Acceptor {
        listener: &listener,
        serve,
        accepted: Vec::new(),
    };
    let log_limiter = LogLimiter::<()>::default();
    let accepting = async {
        loop {
            let Err(error) = acceptor.accept().await;
            warn_limited!(log_limiter, (), "accepting connections failed", %error);
            tokio::time::sleep(ACCEPT_ERROR_BACKOFF).await;
        }
    };
    tokio::select! {
        biased;
        () = stop => {}
        () = accepting => {}
    }
    // Asks the kernel: the runtime may not know of the latest connections yet.
    if let Err(error) = acceptor.accept_queued().await {
        tracing::warn!(%error, "accepting the queued connections failed; they are lost");
    }
}

/// An accepted client, with the bytes read from it so far. It is not registered with a runtime yet.
pub(crate) struct AcceptedSocket {
    pub(crate) stream: std::net::TcpStream,
    pub(crate) prefix: Bytes,
}

struct Acceptor<'l, S> {
    listener: &'l std::net::TcpListener,
    serve: S,
    /// Clients of the current batch. They are kept here to reuse the allocation.
    accepted: Vec<(AcceptedSocket, ClientAddr)>,
}

/// Whether the accept queue may hold more clients.
#[derive(PartialEq, Eq)]
enum QueueState {
    MayHoldMore,
    Empty,
}

impl<S: Fn(AcceptedSocket, ClientAddr)> Acceptor<'_, S> {
    /// Accepts clients and serves them as they arrive.
    ///
    /// # Errors
    /// An accept error that concerns the listener.
    async fn accept(&mut self) -> io::Result<Infallible> {
        let registration = register_readable(self.listener.as_fd())?;
        loop {
            let mut readable = registration.readable().await?;
            self.accept_queued().await?;
            readable.clear_ready();
        }
    }

    /// Accepts and serves all queued clients, in batches. Between batches other tasks run, so that responses do not wait.
    ///
    /// In a full batch, the first bytes of all clients are read immediately. Otherwise each client would need its own detection
    /// buffer at the same time, and the allocator would keep that memory.
    async fn accept_queued(&mut self) -> io::Result<()> {
        loop {
            let queue_state = self.accept_batch();
            let is_full = matches!(queue_state, Ok(QueueState::MayHoldMore));
            for (mut client, addr) in self.accepted.drain(..) {
                if is_full {
                    client.read_first_bytes();
                }
                (self.serve)(client, addr);
            }
            if queue_state? == QueueState::Empty {
                return Ok(());
            }
            tokio::task::yield_now().await;
        }
    }

    fn accept_batch(&mut self) -> io::Result<QueueState> {
        while self.accepted.len() < ACCEPT_BATCH_SIZE {
            let accepted = self.listener.accept();
            match accepted.and_then(|(stream, addr)| stream.set_nonblocking(true).map(|()| (stream, addr))) {
                Ok((stream, addr)) => {
                    let client = AcceptedSocket {
                        stream,
                        prefix: Bytes::new(),
                    };
                    self.accepted.push((client, ClientAddr(addr::canonical(addr))));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(QueueState::Empty),
                Err(error) if is_connection_error(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(QueueState::MayHoldMore)
    }
}

impl AcceptedSocket {
    /// Reads the bytes that the client has sent so far. Ignores errors: the next read returns them again.
    fn read_first_bytes(&mut self) {
        let mut space = [0; detect::MAX_DETECT_BYTES];
        if let Ok(n) = self.stream.read(&mut space) {
            self.prefix = Bytes::copy_from_slice(&space[..n]);
        }
    }
}

#[expect(unsafe_code, reason = "AsyncFd requires a safety guarantee")]
fn register_readable(listener: BorrowedFd<'_>) -> io::Result<AsyncFd<BorrowedFd<'_>>> {
    // SAFETY: the borrowed descriptor stays open and unchanged until it is deregistered.
    Ok(unsafe { AsyncFd::register_with_interest(listener, Interest::READABLE) }?)
}

/// True for errors that concern the connection being accepted, not the listener.
fn is_connection_error(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use futures_util::FutureExt as _;
    use tokio::{
        io::AsyncReadExt as _,
        net::{TcpListener, TcpStream},
    };

    use super::*;
    use crate::net::io::{Io, Tcp};

    fn listener(options: SocketOptions) -> std::net::TcpListener {
        bind(([127, 0, 0, 1], 0).into(), None, PortSharing::Exclusive, options).unwrap()
    }

    struct TestAcceptor {
        addr: SocketAddr,
        stop: tokio::sync::oneshot::Sender<()>,
        served: tokio::sync::mpsc::UnboundedReceiver<AcceptedSocket>,
    }

    fn acceptor() -> TestAcceptor {
        let listener = listener(SocketOptions::default());
        let addr = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (served_tx, served) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            let serve = |client, _| served_tx.send(client).unwrap();
            accept_loop(listener, stopped.map(|_| ()), serve).await;
        });
        TestAcceptor { addr, stop, served }
    }

    impl TestAcceptor {
        /// Connects a client that sends `data` immediately.
        fn connect(&self, data: &[u8]) -> std::net::TcpStream {
            let mut client = std::net::TcpStream::connect(self.addr).unwrap();
            client.write_all(data).unwrap();
            client
        }

        /// The next served client: the bytes that were read from it, and its connection.
        async fn next(&mut self) -> (Bytes, TcpStream) {
            let client = self.served.recv().await.unwrap();
            (client.prefix, TcpStream::from_std(client.stream).unwrap())
        }
    }

    #[tokio::test]
    async fn clients_are_served_as_they_arrive() {
        let mut acceptor = acceptor();
        let _silent = acceptor.connect(b"");
        acceptor.next().await;
        let _sending = acceptor.connect(b"hello");
        let (received, mut stream) = acceptor.next().await;
        assert!(received.is_empty());
        let mut read = [0; 5];
        stream.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"hello");
    }

    #[tokio::test]
    async fn first_bytes_of_clients_in_a_full_batch_are_read_before_they_are_served() {
        let mut acceptor = acceptor();
        let mut open = Vec::new();
        for n in 0..ACCEPT_BATCH_SIZE {
            open.push(acceptor.connect(&[n as u8; 5000]));
        }
        for n in 0..ACCEPT_BATCH_SIZE {
            let (received, stream) = acceptor.next().await;
            assert!(!received.is_empty());
            let mut all = [0; 5000];
            Tcp::with_prefix(stream, received).read_exact(&mut all).await.unwrap();
            assert_eq!(all, [n as u8; 5000]);
        }
    }

    #[tokio::test]
    async fn other_tasks_run_between_batches() {
        let mut acceptor = acceptor();
        let _queued = [(); ACCEPT_BATCH_SIZE + 1].map(|()| acceptor.connect(b""));
        // This task runs again after the first batch is served, before the acceptor continues.
        acceptor.next().await;
        let n_served = 1 + std::iter::from_fn(|| acceptor.served.try_recv().ok()).count();
        assert_eq!(n_served, ACCEPT_BATCH_SIZE);
        acceptor.next().await;
    }

    #[tokio::test]
    async fn queued_connections_are_served_after_stop() {
        let mut acceptor = acceptor();
        let _queued = [acceptor.connect(b""), acceptor.connect(b"hello")];
        acceptor.stop.send(()).unwrap();
        for _ in 0..2 {
            assert!(acceptor.served.recv().await.is_some());
        }
        assert!(acceptor.served.recv().await.is_none());
    }

    #[tokio::test]
    async fn first_bytes_are_acknowledged_with_the_response_unless_quickack_is_enabled() {
        let listener = listener(SocketOptions::default());
        disable_quickack(&listener);
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = TcpListener::from_std(listener).unwrap().accept().await.unwrap();
        let socket = SockRef::from(&stream).try_clone().unwrap();
        assert!(!socket.tcp_quickack().unwrap());
        Io::tcp(Tcp::new(stream)).enable_quickack();
        assert!(socket.tcp_quickack().unwrap());
    }

    #[tokio::test]
    async fn accepted_connections_have_the_options_of_their_listener() {
        let options = SocketOptions {
            keepalive: Some(Duration::from_secs(11)),
            user_timeout: Some(Duration::from_secs(12)),
        };
        let listener = listener(options);
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = TcpListener::from_std(listener).unwrap().accept().await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(11));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(12)));
    }
}
