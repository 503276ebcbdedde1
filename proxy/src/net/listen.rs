//! Listening sockets and the accept loop of one worker.

use std::{
    convert::Infallible,
    io::{self, Read as _},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd as _, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::Instant,
};
use tulle_core::addr::{self, ClientAddr};

use crate::net::{
    awaited::{Awaited, Turns},
    connect::{self, SocketOptions},
    detect,
    pause::Pause,
};

/// How long an accept loop rests after the process ran out of descriptors or memory.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);
/// So many clients who come so soon after each other on average, while the number of those who are busy varies by so many, are a
/// crowd, until for so long nobody comes.
const CROWD: usize = 32;
const SOON: Duration = Duration::from_micros(300);
const VARIATION: usize = 4;
const DISPERSED: Duration = Duration::from_millis(2);
/// How long those of a crowd wait for an answer at most: if none has come by then, they are no crowd any more. They are accepted
/// together, and with what they have said by then: to be woken by each of them, and by each of their requests, would cost us, and
/// them, more than they wait.
pub(crate) const TOGETHER: Duration = Duration::from_millis(1);
/// Answers that are passed on before those of a crowd get their turn. Each brings its client back, so that all of them at once
/// would leave the next hop without work until the first of many is served again.
const ANSWERS_AT_ONCE: usize = 5;
/// How long a client of a crowd may be silent before it is served like others.
const SILENCE: Duration = Duration::from_millis(2);
/// Clients that are accepted before those are served who were accepted before.
const AT_ONCE: usize = 128;
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
/// handshake is reset.
pub(crate) async fn accept_loop(
    listener: std::net::TcpListener,
    pause: Pause,
    stop: impl Future<Output = ()>,
    serve: impl Fn(Client, ClientAddr),
) {
    let mut door = Door::new(&listener, serve);
    let accepting = async {
        loop {
            let Err(error) = door.accept(&pause).await;
            tracing::warn!(%error, "accepting connections failed");
            door.serve(|_| true);
            tokio::time::sleep(PAUSE_AFTER_ERROR).await;
        }
    };
    tokio::select! {
        biased;
        () = stop => {}
        () = accepting => {}
    }
    // As the kernel has it: the runtime may not know of the latest yet.
    if let Err(error) = door.fill(&mut None).await {
        tracing::warn!(%error, "clients who were not accepted yet are lost");
    }
    door.serve(|_| true);
}

/// A client who was accepted, with what was read of it. No runtime watches it yet.
pub(crate) struct Client {
    pub(crate) stream: std::net::TcpStream,
    pub(crate) said: Bytes,
}

/// A listener, who came to it, and who of them is not served yet.
struct Door<'l, S> {
    listener: &'l std::net::TcpListener,
    serve: S,
    crowd: Crowd,
    lobby: Vec<Waiting>,
    /// The answers that this worker waits for.
    awaited: Arc<Awaited>,
}

struct Waiting {
    client: Client,
    addr: ClientAddr,
    since: Instant,
}

/// Whether there may be more clients to accept.
#[derive(PartialEq, Eq)]
enum More {
    Maybe,
    No,
}

impl<'l, S: Fn(Client, ClientAddr)> Door<'l, S> {
    fn new(listener: &'l std::net::TcpListener, serve: S) -> Self {
        Self {
            listener,
            serve,
            crowd: Crowd::new(Instant::now()),
            lobby: Vec::new(),
            awaited: Awaited::by_this_worker(),
        }
    }

    /// Serves clients as they come. Those of a crowd wait for an answer, with which we will be awake anyway, if one is awaited
    /// that comes soon.
    ///
    /// # Errors
    /// What keeps us from accepting.
    async fn accept(&mut self, pause: &Pause) -> io::Result<Infallible> {
        let (awaited, mut watched, mut turns) = (self.awaited.clone(), None, None);
        loop {
            let now = Instant::now();
            if self.crowd.is_there(now) && awaited.n() > 0 {
                watched = None; // nothing else keeps the kernel from waking us for who comes
                let by_turns = turns.get_or_insert_with(|| awaited.by_turns());
                by_turns.next(ANSWERS_AT_ONCE); // before those who come now
                self.serve(|waiting| waiting.speaks() || now - waiting.since > SILENCE);
                tokio::select! {
                    biased;
                    () = awaited.comes() => {}
                    waited = pause.wait() => {
                        waited?;
                        self.crowd = Crowd::new(Instant::now());
                    }
                }
                self.fill(&mut turns).await?;
            } else {
                turns = None;
                self.serve(|_| true);
                let watched = match &watched {
                    Some(watched) => watched,
                    None => watched.insert(watch(self.listener.as_fd())?),
                };
                let mut readable = watched.readable().await?;
                self.fill(&mut turns).await?;
                readable.clear_ready();
            }
        }
    }

    /// Takes in all who are queued. Where these are many, the first are served meanwhile, and whoever else there is: that takes
    /// longer than any answer should wait. Most of them have said something, and what they are is known with that: else the
    /// memory for finding out would be taken for all of them at a time, and not be given back.
    async fn fill(&mut self, turns: &mut Option<Turns>) -> io::Result<()> {
        while self.fill_some()? == More::Maybe {
            *turns = None;
            self.serve(|waiting| {
                waiting.speaks();
                true
            });
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    fn fill_some(&mut self) -> io::Result<More> {
        let (now, before) = (Instant::now(), self.lobby.len());
        let filled = loop {
            if self.lobby.len() - before == AT_ONCE {
                break Ok(More::Maybe);
            }
            let accepted = self.listener.accept();
            match accepted.and_then(|(stream, addr)| stream.set_nonblocking(true).map(|()| (stream, addr))) {
                Ok((stream, addr)) => self.lobby.push(Waiting {
                    client: Client {
                        stream,
                        said: Bytes::new(),
                    },
                    addr: ClientAddr(addr::canonical(addr)),
                    since: now,
                }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(More::No),
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => break Err(error),
            }
        };
        self.crowd.came(now, self.lobby.len() - before, self.awaited.n());
        filled
    }

    /// Serves those in the lobby of whom `may` is true.
    fn serve(&mut self, may: impl FnMut(&mut Waiting) -> bool) {
        for Waiting { client, addr, .. } in self.lobby.extract_if(.., may) {
            (self.serve)(client, addr);
        }
    }
}

impl Waiting {
    /// Whether there is something to do for this client.
    fn speaks(&mut self) -> bool {
        let mut space = [0; detect::MAX_LOOK];
        match self.client.stream.read(&mut space) {
            Ok(n) => self.client.said = Bytes::copy_from_slice(&space[..n]),
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        }
        true
    }
}

#[expect(unsafe_code, reason = "tokio asks for a promise")]
fn watch(listener: BorrowedFd<'_>) -> io::Result<AsyncFd<BorrowedFd<'_>>> {
    // SAFETY: what is borrowed stays open, and the same, until it is given back.
    Ok(unsafe { AsyncFd::register_with_interest(listener, Interest::READABLE) }?)
}

/// Whether clients crowd: judged by each few dozen of them.
struct Crowd {
    is_one: bool,
    last: Instant,
    /// The clients since the last judgement: since when, how many, and the fewest and most that were busy at a time.
    since: Instant,
    n: usize,
    least: usize,
    most: usize,
}

impl Crowd {
    fn new(now: Instant) -> Self {
        Self {
            is_one: false,
            last: now,
            since: now,
            n: 0,
            least: usize::MAX,
            most: 0,
        }
    }

    /// Whether it is worth while to wait for more of them.
    fn is_there(&self, now: Instant) -> bool {
        self.is_one && now - self.last < SOON
    }

    /// Takes notice of `n` clients who came now, when so many others were `busy`. Who opens one connection after the other is no
    /// crowd, whoever else stays.
    fn came(&mut self, now: Instant, n: usize, busy: usize) {
        if n == 0 {
            return;
        }
        if now - self.last > DISPERSED {
            *self = Self::new(now);
        }
        self.last = now;
        self.n += n;
        self.least = self.least.min(busy);
        self.most = self.most.max(busy + n);
        if self.n >= CROWD {
            let is_one = now - self.since < SOON * self.n as u32 && self.most - self.least >= VARIATION;
            *self = Self {
                is_one,
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
    use std::{
        io::Write as _,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use futures_util::FutureExt as _;
    use tokio::{
        io::AsyncReadExt as _,
        net::{TcpListener, TcpStream},
    };

    use super::*;
    use crate::net::{
        awaited::Answer,
        io::{Io, Tcp},
    };

    fn listening(options: SocketOptions) -> std::net::TcpListener {
        bind(([127, 0, 0, 1], 0).into(), None, Sharing::Alone, options).unwrap()
    }

    /// Has 128 clients come, so many at once and so many microseconds after each other, to as many others as `busy` says; says
    /// when they are a crowd.
    fn crowd_of(at_once: usize, after: u64, busy: impl Fn(usize) -> usize) -> Vec<usize> {
        let mut now = Instant::now();
        let mut crowd = Crowd::new(now);
        let came = (1..=128 / at_once).map(|n| n * at_once);
        came.filter(|n| {
            now += Duration::from_micros(after);
            crowd.came(now, at_once, busy(*n));
            crowd.is_there(now)
        })
        .collect()
    }

    #[test]
    fn a_crowd_is_of_many_clients_who_come_soon_after_each_other_and_stay() {
        assert_eq!(crowd_of(1, 200, |n| n), (32..=128).collect::<Vec<_>>());
        assert_eq!(crowd_of(8, 1600, |_| 10), (32..=128).step_by(8).collect::<Vec<_>>());
        let one_by_one = crowd_of(1, 200, |n| 10 + n % 2);
        assert!(one_by_one.is_empty(), "{one_by_one:?}");
        let soon_more = |n| if n > 40 { n } else { 10 };
        assert_eq!(crowd_of(1, 200, soon_more), (64..=128).collect::<Vec<_>>());
        let no_more = |n| if n > 40 { 10 } else { n };
        assert_eq!(crowd_of(1, 200, no_more), (32..96).collect::<Vec<_>>());
        let slowly = crowd_of(1, 400, |n| n);
        assert!(slowly.is_empty(), "{slowly:?}");
        let few = crowd_of(8, 2400, |_| 10);
        assert!(few.is_empty(), "{few:?}");
    }

    #[test]
    fn nobody_waits_for_more_of_a_crowd_after_a_moment_without_them() {
        let mut now = Instant::now();
        let mut crowd = Crowd::new(now);
        crowd.came(now, 32, 0);
        assert!(crowd.is_there(now));
        now += SOON;
        assert!(!crowd.is_there(now));
        crowd.came(now, 1, 0);
        assert!(crowd.is_there(now), "it is back");
        now += DISPERSED * 2;
        crowd.came(now, 1, 0);
        assert!(!crowd.is_there(now), "these are others");
    }

    /// A listener, the clients that it served, each after how many answers, and what stops it. The time stands still, but for
    /// what a test lets pass.
    struct Accepting {
        addr: SocketAddr,
        stop: tokio::sync::oneshot::Sender<()>,
        served: tokio::sync::mpsc::UnboundedReceiver<(Client, usize)>,
        passed_on: Arc<AtomicUsize>,
    }

    fn accepting() -> Accepting {
        accepting_from(listening(SocketOptions::default()), Duration::from_secs(60))
    }

    /// With another time that a crowd waits for an answer at most, which does not stand still.
    fn accepting_from(listener: std::net::TcpListener, together: Duration) -> Accepting {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let addr = listener.local_addr().unwrap();
        let (sender, served) = tokio::sync::mpsc::unbounded_channel();
        let passed_on = Arc::<AtomicUsize>::default();
        let n = passed_on.clone();
        tokio::spawn(async move {
            let serve = |client, _| sender.send((client, n.load(Ordering::Relaxed))).unwrap();
            accept_loop(listener, Pause::new(together).unwrap(), stopped.map(|_| ()), serve).await;
        });
        Accepting {
            addr,
            stop,
            served,
            passed_on,
        }
    }

    impl Accepting {
        /// Has one come who says this at once.
        fn come(&self, said: &[u8]) -> std::net::TcpStream {
            let mut client = std::net::TcpStream::connect(self.addr).unwrap();
            client.write_all(said).unwrap();
            client
        }

        /// Has a crowd come, and be served.
        async fn crowd(&mut self) -> Vec<std::net::TcpStream> {
            let crowd = [(); CROWD].map(|()| self.come(b"hello"));
            for _ in &crowd {
                self.next().await;
            }
            crowd.into()
        }

        /// The next client that is served: what it had said by then, and all that it says.
        async fn next(&mut self) -> (Bytes, TcpStream) {
            let (client, _) = self.served.recv().await.unwrap();
            (client.said, TcpStream::from_std(client.stream).unwrap())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_comes_while_no_answer_is_awaited_is_served_at_once_and_so_is_who_is_no_crowd() {
        let mut accepting = accepting();
        let answer = Answer::awaited();
        let _alone = accepting.come(b"hello");
        assert!(accepting.next().await.0.is_empty());
        drop(answer);
        let _crowd = accepting.crowd().await;
        let _another = accepting.come(b"hello");
        assert!(accepting.next().await.0.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_is_served_with_what_it_has_said_and_nothing_is_lost() {
        let mut accepting = accepting();
        let _crowd = accepting.crowd().await;
        let _answer = Answer::awaited();
        let mut open = Vec::new();
        for n in 0..100_u8 {
            open.push(accepting.come(&[n; 5000]));
        }
        let mut seen = Vec::new();
        for _ in 0..100 {
            let (said, stream) = accepting.next().await;
            assert!(!said.is_empty());
            let mut all = [0; 5000];
            Tcp::with_prefix(stream, said).read_exact(&mut all).await.unwrap();
            assert_eq!(all, [all[0]; 5000]);
            seen.push(all[0]);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    /// Has answers come, three times as many as are passed on at once, to a crowd of which somebody is served.
    async fn answers(accepting: &mut Accepting) -> tokio::task::JoinSet<()> {
        let (come, mut passing) = (Arc::new(tokio::sync::Notify::new()), tokio::task::JoinSet::new());
        for _ in 0..3 * ANSWERS_AT_ONCE {
            let (answer, come, passed_on) = (Answer::awaited(), come.clone(), accepting.passed_on.clone());
            passing.spawn(async move {
                come.notified().await;
                answer.pass_on().await;
                passed_on.fetch_add(1, Ordering::Relaxed);
            });
        }
        let _first = accepting.come(b"hello");
        accepting.next().await;
        come.notify_waiters();
        passing
    }

    #[tokio::test(start_paused = true)]
    async fn those_of_a_crowd_are_served_between_answers_to_others() {
        let mut accepting = accepting();
        let _crowd = accepting.crowd().await;
        let passing = answers(&mut accepting).await;
        let _another = accepting.come(b"hello");
        assert_eq!(accepting.served.recv().await.unwrap().1, ANSWERS_AT_ONCE);
        passing.join_all().await;
    }

    #[tokio::test(start_paused = true)]
    async fn no_answer_waits_for_a_long_queue_to_be_accepted() {
        let mut accepting = accepting();
        let _crowd = accepting.crowd().await;
        let passing = answers(&mut accepting).await;
        let queued = [(); 2 * AT_ONCE].map(|()| accepting.come(b"hello"));
        let mut passed_on = Vec::new();
        for _ in &queued {
            passed_on.push(accepting.served.recv().await.unwrap().1);
        }
        assert_eq!(passed_on[AT_ONCE - 1], ANSWERS_AT_ONCE);
        assert_eq!(passed_on[AT_ONCE], 3 * ANSWERS_AT_ONCE);
        passing.join_all().await;
    }

    #[tokio::test(start_paused = true)]
    async fn those_of_a_long_queue_are_served_with_what_they_have_said() {
        let mut accepting = accepting();
        let _queued = [(); AT_ONCE + 1].map(|()| accepting.come(b"hello"));
        for _ in 0..AT_ONCE {
            assert_eq!(accepting.next().await.0, "hello");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_answer_waits_for_a_listener_that_has_ended() {
        let mut accepting = accepting();
        let _crowd = accepting.crowd().await;
        let passing = answers(&mut accepting).await;
        accepting.stop.send(()).unwrap();
        passing.join_all().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_that_waits_for_an_answer_in_vain_is_none() {
        let mut accepting = accepting_from(listening(SocketOptions::default()), Duration::from_micros(1));
        let _answer = Answer::awaited();
        for _ in 0..3 {
            let _crowd = accepting.crowd().await;
            let _silent = accepting.come(b"");
            assert!(accepting.next().await.0.is_empty());
        }
    }

    #[tokio::test]
    async fn others_have_their_turn_while_a_long_queue_is_accepted() {
        let listener = listening(SocketOptions::default());
        let addr = listener.local_addr().unwrap();
        let _queued = [(); AT_ONCE + 1].map(|()| std::net::TcpStream::connect(addr).unwrap());
        let mut accepting = accepting_from(listener, TOGETHER);
        let passed_on = accepting.passed_on.clone();
        tokio::spawn(async move {
            loop {
                passed_on.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        });
        let mut turns = Vec::new();
        for _ in 0..=AT_ONCE {
            turns.push(accepting.served.recv().await.unwrap().1);
        }
        assert_eq!(turns[0], turns[AT_ONCE - 1]);
        assert!(turns[AT_ONCE - 1] < turns[AT_ONCE], "{turns:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_silent_of_a_crowd_are_served_after_a_moment_or_when_they_leave_or_when_no_answer_is_awaited() {
        let mut accepting = accepting();
        let _crowd = accepting.crowd().await;
        let answer = Answer::awaited();
        let leaves = accepting.come(b"");
        let _speaks = accepting.come(b"hello");
        assert_eq!(accepting.next().await.0, "hello", "who came before is left alone");
        drop(leaves);
        drop(Answer::awaited());
        let (said, mut left) = accepting.next().await;
        assert!(said.is_empty());
        assert_eq!(left.read(&mut [0]).await.unwrap(), 0);

        let (_silent, mut speak) = (accepting.come(b""), Vec::new());
        for passed in 0.. {
            speak.push(accepting.come(b"hello"));
            drop(Answer::awaited());
            if accepting.next().await.0.is_empty() {
                assert_eq!(passed, SILENCE.as_micros() / 200 + 1);
                break;
            }
            tokio::time::advance(Duration::from_micros(200)).await;
        }

        let (_silent, _speaks) = (accepting.come(b""), accepting.come(b"hello"));
        drop(Answer::awaited());
        assert_eq!(accepting.next().await.0, "hello");
        assert_eq!(accepting.next().await.0, "hello");
        drop(answer);
        assert!(accepting.next().await.0.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_lost_at_the_end() {
        let mut accepting = accepting();
        let _crowd = accepting.crowd().await;
        let _answer = Answer::awaited();
        let _in_the_lobby = [accepting.come(b""), accepting.come(b"hello")];
        assert_eq!(accepting.next().await.0, "hello");
        let _queued = accepting.come(b"");
        accepting.stop.send(()).unwrap();
        for _ in 0..2 {
            assert!(accepting.served.recv().await.is_some());
        }
        assert!(accepting.served.recv().await.is_none());
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
