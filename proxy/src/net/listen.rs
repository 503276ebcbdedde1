//! Listening sockets and the accept loop of one worker.

use std::{
    future::{Future, poll_fn},
    io::{self, Read as _},
    mem,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    pin::pin,
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::{
    net::{TcpListener, TcpStream},
    time::Instant,
};
use tulle_core::addr::{self, ClientAddr};

use crate::net::{
    awaited::Awaited,
    connect::{self, SocketOptions},
    io::Tcp,
    pause::Pause,
};

/// A client, with what was read of it.
type Accepted = (Tcp, SocketAddr);

/// How long an accept loop rests after the process ran out of descriptors or memory.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);
/// So many clients who come so soon after each other, of whom so many are there at a time, are a crowd, until for so long nobody
/// comes.
const CROWD: u32 = 32;
const SOON: Duration = Duration::from_micros(300);
const COMPANY: usize = 4;
const DISPERSED: Duration = Duration::from_millis(2);
/// How long a crowd is left alone, where no answer is awaited and where one is. Those who come meanwhile are accepted together,
/// with what they have said: to be woken by each of them, and by each of their requests, would cost us, and them, more than they
/// wait.
const TOGETHER: [Duration; 2] = [Duration::from_micros(400), Duration::from_millis(1)];
/// How long a client of a crowd may be silent before it is served like others.
const SILENCE: Duration = Duration::from_millis(2);
/// What is read of a client before it is served; most requests.
const FIRST_BYTES: usize = 2048;
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
    serve: impl Fn(Tcp, ClientAddr),
) {
    let serve = |(stream, peer): Accepted| serve(stream, ClientAddr(addr::canonical(peer)));
    let (mut crowd, mut lobby) = (Crowd::new(Instant::now()), Lobby::default());
    let accepting = async {
        loop {
            one_by_one(&listener, &mut crowd, &open, &serve).await;
            together(&listener, &pause, &mut crowd, &mut lobby, &open, &serve).await;
        }
    };
    tokio::select! {
        biased;
        () = stop => {}
        () = accepting => {}
    }
    // As the kernel has it: the runtime may not know of the latest yet.
    if let Err(error) = lobby.fill(&listener) {
        tracing::warn!(%error, "clients that were not served yet are lost");
    }
    lobby.release(serve, |_| true);
}

/// Serves clients as they come, up to the first of a crowd.
async fn one_by_one(
    listener: &std::net::TcpListener,
    crowd: &mut Crowd,
    open: impl Fn() -> usize,
    serve: impl Fn(Accepted),
) {
    // Nothing else keeps the kernel from waking us for who comes than not to watch.
    let watched = match listener.try_clone().and_then(TcpListener::from_std) {
        Ok(watched) => watched,
        Err(error) => {
            tracing::warn!(%error, "watching for connections failed");
            return tokio::time::sleep(PAUSE_AFTER_ERROR).await;
        }
    };
    loop {
        let mut first = Some(watched.accept().await);
        let (mut n, before) = (0, open());
        let next = || first.take().or_else(|| watched.accept().now_or_never());
        let serve = |(stream, peer)| {
            n += 1;
            serve((Tcp::new(stream), peer));
        };
        if let Err(error) = take(next, serve) {
            tracing::warn!(%error, "accepting a connection failed");
            tokio::time::sleep(PAUSE_AFTER_ERROR).await;
        }
        crowd.came(Instant::now(), n, before);
        if crowd.is_there {
            return;
        }
    }
}

/// Serves a crowd when we are awake anyway, as an answer has come that was awaited, up to where nobody comes for a moment.
async fn together(
    listener: &std::net::TcpListener,
    pause: &Pause,
    crowd: &mut Crowd,
    lobby: &mut Lobby,
    open: impl Fn() -> usize,
    serve: impl Fn(Accepted),
) {
    let awaited = Awaited::by_this_worker();
    loop {
        let mut waiting = pin!(pause.wait(TOGETHER[usize::from(awaited.any())]));
        let mut is_woken = false;
        let waited = poll_fn(|cx| {
            if mem::replace(&mut is_woken, true) {
                return Poll::Ready(Ok(()));
            }
            awaited.wakes(cx.waker());
            waiting.as_mut().poll(cx)
        });
        if let Err(error) = waited.await {
            tracing::debug!(%error, "connections are accepted one by one");
            crowd.is_there = false;
            return lobby.release(serve, |_| true);
        }
        let (now, before) = (Instant::now(), lobby.0.len());
        if let Err(error) = lobby.fill(listener) {
            tracing::warn!(%error, "accepting a connection failed");
            tokio::time::sleep(PAUSE_AFTER_ERROR).await;
        }
        if lobby.0.is_empty() && now - crowd.last > SOON {
            return;
        }
        crowd.came(now, (lobby.0.len() - before) as u32, before + open());
        lobby.release(&serve, |client| client.speaks() || now - client.since > SILENCE);
    }
}

/// Clients of a crowd that are accepted but not served.
#[derive(Default)]
struct Lobby(Vec<Waiting>);

struct Waiting {
    stream: std::net::TcpStream,
    peer: SocketAddr,
    since: Instant,
    said: Bytes,
}

impl Lobby {
    /// Takes in all who are queued.
    fn fill(&mut self, listener: &std::net::TcpListener) -> io::Result<()> {
        let next = || match listener.accept() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            accepted => Some(accepted.and_then(|(stream, peer)| stream.set_nonblocking(true).map(|()| (stream, peer)))),
        };
        let since = Instant::now();
        take(next, |(stream, peer)| {
            self.0.push(Waiting {
                stream,
                peer,
                since,
                said: Bytes::new(),
            });
        })
    }

    /// Serves those of whom `may` is true.
    fn release(&mut self, serve: impl Fn(Accepted), may: impl FnMut(&mut Waiting) -> bool) {
        for Waiting { stream, peer, said, .. } in self.0.extract_if(.., may) {
            match TcpStream::from_std(stream) {
                Ok(stream) => serve((Tcp::with_prefix(stream, said), peer)),
                Err(error) => tracing::warn!(%error, "a connection cannot be served"),
            }
        }
    }
}

impl Waiting {
    /// Whether there is something to do for this client.
    fn speaks(&mut self) -> bool {
        let mut space = [0; FIRST_BYTES];
        match self.stream.read(&mut space) {
            Ok(n) => self.said = Bytes::copy_from_slice(&space[..n]),
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        }
        true
    }
}

/// Hands over all that `next` accepts, up to an error that is the listener's.
fn take<C>(mut next: impl FnMut() -> Option<io::Result<C>>, mut hand_over: impl FnMut(C)) -> io::Result<()> {
    while let Some(accepted) = next() {
        match accepted {
            Ok(connection) => hand_over(connection),
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether clients crowd: judged by each few dozen of them.
struct Crowd {
    is_there: bool,
    last: Instant,
    /// The clients since the last judgement: since when, how many, and the fewest and most that were open at a time.
    since: Instant,
    n: u32,
    least: usize,
    most: usize,
}

impl Crowd {
    fn new(now: Instant) -> Self {
        Self {
            is_there: false,
            last: now,
            since: now,
            n: 0,
            least: usize::MAX,
            most: 0,
        }
    }

    /// Takes notice of `n` clients who came now, when `before` were open. Who opens one connection after the other is no crowd.
    fn came(&mut self, now: Instant, n: u32, before: usize) {
        if n == 0 {
            return;
        }
        if now - self.last > DISPERSED {
            *self = Self::new(now);
        }
        self.last = now;
        self.n += n;
        self.least = self.least.min(before);
        self.most = self.most.max(before + n as usize);
        if self.n >= CROWD {
            let is_there = now - self.since < SOON * self.n && self.most - self.least >= COMPANY;
            *self = Self {
                is_there,
                ..Self::new(now)
            };
        }
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::net::io::Io;

    fn listening(options: SocketOptions) -> std::net::TcpListener {
        bind(([127, 0, 0, 1], 0).into(), None, Sharing::Alone, options).unwrap()
    }

    /// Has 128 clients come, so many at once and so many microseconds after each other, to as many others as `others` says; says
    /// when they are a crowd.
    fn crowd_of(at_once: u32, after: u64, others: impl Fn(u32) -> usize) -> Vec<u32> {
        let mut now = Instant::now();
        let mut crowd = Crowd::new(now);
        let came = (1..=128 / at_once).map(|n| n * at_once);
        came.filter(|n| {
            now += Duration::from_micros(after);
            crowd.came(now, at_once, others(*n));
            crowd.is_there
        })
        .collect()
    }

    #[test]
    fn a_crowd_is_of_many_clients_who_come_soon_after_each_other_and_stay() {
        assert_eq!(crowd_of(1, 200, |n| n as usize), (32..=128).collect::<Vec<_>>());
        assert_eq!(crowd_of(8, 1600, |_| 10), (32..=128).step_by(8).collect::<Vec<_>>());
        let one_by_one = crowd_of(1, 200, |n| 10 + n as usize % 2);
        assert!(one_by_one.is_empty(), "{one_by_one:?}");
        let soon_more = |n: u32| if n > 40 { n as usize } else { 10 };
        assert_eq!(crowd_of(1, 200, soon_more), (64..=128).collect::<Vec<_>>());
        let no_more = |n: u32| if n > 40 { 10 } else { n as usize };
        assert_eq!(crowd_of(1, 200, no_more), (32..96).collect::<Vec<_>>());
        let slowly = crowd_of(1, 400, |n| n as usize);
        assert!(slowly.is_empty(), "{slowly:?}");
        let few = crowd_of(8, 2400, |_| 10);
        assert!(few.is_empty(), "{few:?}");
    }

    /// Accepts until the sender is used; what is accepted comes out of the receiver, and counts as open for as long as it could.
    fn accepting() -> (
        SocketAddr,
        tokio::sync::oneshot::Sender<()>,
        tokio::sync::mpsc::UnboundedReceiver<Tcp>,
    ) {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let listener = listening(SocketOptions::default());
        let addr = listener.local_addr().unwrap();
        let (sender, accepted) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            let open = AtomicUsize::new(0);
            let serve = |tcp, _| {
                open.fetch_add(1, Ordering::Relaxed);
                sender.send(tcp).unwrap();
            };
            accept_loop(
                listener,
                Pause::new().unwrap(),
                stopped.map(|_| ()),
                || open.load(Ordering::Relaxed),
                serve,
            )
            .await;
        });
        (addr, stop, accepted)
    }

    #[tokio::test]
    async fn all_of_a_crowd_are_served_and_those_still_queued_at_the_end() {
        let (addr, stop, mut accepted) = accepting();
        let mut open = Vec::new();
        for _ in 0..100 {
            open.push(TcpStream::connect(addr).await.unwrap());
        }
        for _ in 0..100 {
            accepted.recv().await.unwrap();
        }
        let _last = std::net::TcpStream::connect(addr).unwrap();
        stop.send(()).unwrap();
        assert!(accepted.recv().await.is_some());
        assert!(accepted.recv().await.is_none());
    }

    #[tokio::test]
    async fn what_a_client_of_a_crowd_has_said_is_not_lost() {
        let (addr, _stop, mut accepted) = accepting();
        let mut open = Vec::new();
        for n in 0..100_u8 {
            let mut client = TcpStream::connect(addr).await.unwrap();
            client.write_all(&[n; 5000]).await.unwrap();
            open.push(client);
        }
        let mut seen = Vec::new();
        for _ in 0..100 {
            let mut said = [0; 5000];
            accepted.recv().await.unwrap().read_exact(&mut said).await.unwrap();
            assert_eq!(said, [said[0]; 5000]);
            seen.push(said[0]);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn who_waits_in_the_lobby_is_served_once_it_speaks_or_has_left() {
        let listener = listening(SocketOptions::default());
        let addr = listener.local_addr().unwrap();
        let mut lobby = Lobby::default();
        let mut silent = TcpStream::connect(addr).await.unwrap();
        let mut speaking = TcpStream::connect(addr).await.unwrap();
        let leaving = TcpStream::connect(addr).await.unwrap();
        lobby.fill(&listener).unwrap();
        let served = std::cell::RefCell::new(Vec::new());
        let serve = |(tcp, peer): Accepted| served.borrow_mut().push((tcp, peer));
        lobby.release(serve, Waiting::speaks);
        assert!(served.borrow().is_empty());
        speaking.write_all(b"hello").await.unwrap();
        drop(leaving);
        while lobby.0.len() > 1 {
            lobby.release(serve, Waiting::speaks);
        }
        assert_eq!(lobby.0[0].peer, silent.local_addr().unwrap());
        silent.write_all(b"hello").await.unwrap();
        while !lobby.0.is_empty() {
            lobby.release(serve, Waiting::speaks);
        }
        for (mut tcp, peer) in served.take() {
            let mut said = [0; 5];
            let read = tcp.read_exact(&mut said).await;
            assert_eq!(
                read.is_ok(),
                [speaking.local_addr().unwrap(), silent.local_addr().unwrap()].contains(&peer)
            );
        }
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
