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
    connect::{self, SocketOptions},
    detect,
    pending_responses::{PendingResponses, ReleaseThrottle},
    short_timer::ShortTimer,
};

/// Backoff of an accept loop after the process ran out of descriptors or memory.
const ACCEPT_ERROR_BACKOFF: Duration = Duration::from_millis(50);
/// Minimum interval between warnings of one accept loop.
const ACCEPT_WARNING_INTERVAL: Duration = Duration::from_secs(10);
/// Number of clients by which a burst is detected.
const BURST_SAMPLE_SIZE: usize = 32;
/// Maximum mean interval between the clients of a burst. A burst also pauses when no client has arrived for this time; the next
/// client resumes it.
const BURST_MAX_MEAN_INTERVAL: Duration = Duration::from_micros(300);
/// Minimum difference between the lowest and the highest number of pending responses during a burst.
const BURST_MIN_RESPONSE_SPREAD: usize = 4;
/// Time without a new client after which a burst is over.
const BURST_RESET_AFTER: Duration = Duration::from_millis(2);
/// Maximum time that clients of a burst stay in the accept queue while no response is released; then the burst is over. The
/// queued clients are accepted together, with the data that they have sent by then. A wake-up for each client and each request
/// would cost more than this wait.
pub(crate) const BURST_MAX_WAIT: Duration = Duration::from_millis(1);
/// Responses that are released before clients of the burst are served. Each response makes its client send the next request. If
/// all responses were released at once, the next hop would be idle until the first request of many is served.
const RESPONSES_PER_RELEASE: usize = 5;
/// Maximum time that a client of a burst may be silent; then it is served like any other.
const BURST_MAX_CLIENT_SILENCE: Duration = Duration::from_millis(2);
/// Maximum number of clients that are accepted in a row; then they are served, and other tasks run.
const ACCEPT_BATCH_SIZE: usize = 128;
/// Default size of the accept queue.
const DEFAULT_BACKLOG: i32 = 4096;

/// Whether an address is bound more than once in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortSharing {
    Exclusive,
    /// Bound once by each worker; the kernel spreads connections between them.
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

/// Disables quick acknowledgements, so that the ACK of a client's first bytes is sent with the response. A reader that waits
/// for more bytes calls `Io::enable_quickack`. Failures are only logged, because the connection still carries traffic.
pub(crate) fn disable_quickack(listener: &std::net::TcpListener) {
    // Set after `listen`, which would reset it.
    if let Err(error) = SockRef::from(listener).set_tcp_quickack(false) {
        tracing::debug!(%error, "disabling TCP_QUICKACK failed, requests are acknowledged separately");
    }
}

/// Accepts until `stop` resolves, then accepts the connections that the kernel has already queued, so that no client that
/// completed the handshake is reset.
pub(crate) async fn accept_loop(
    listener: std::net::TcpListener,
    burst_timer: ShortTimer,
    stop: impl Future<Output = ()>,
    serve: impl Fn(AcceptedSocket, ClientAddr),
) {
    let mut acceptor = Acceptor::new(&listener, serve);
    let mut warned_at: Option<Instant> = None;
    let accepting = async {
        loop {
            let Err(error) = acceptor.accept(&burst_timer).await;
            if warned_at.is_none_or(|at| at.elapsed() >= ACCEPT_WARNING_INTERVAL) {
                warned_at = Some(Instant::now());
                tracing::warn!(%error, "accepting connections failed");
            }
            acceptor.serve_ready(|_| true);
            tokio::time::sleep(ACCEPT_ERROR_BACKOFF).await;
        }
    };
    tokio::select! {
        biased;
        () = stop => {}
        () = accepting => {}
    }
    // Asks the kernel: the runtime may not know of the latest connections yet.
    if let Err(error) = acceptor.accept_queued(&mut None).await {
        tracing::warn!(%error, "accepting the queued connections failed, they are lost");
    }
    acceptor.serve_ready(|_| true);
}

/// An accepted client, with the bytes read from it so far. It is not registered with a runtime yet.
pub(crate) struct AcceptedSocket {
    pub(crate) stream: std::net::TcpStream,
    pub(crate) prefix: Bytes,
}

struct Acceptor<'l, S> {
    listener: &'l std::net::TcpListener,
    serve: S,
    burst: BurstDetector,
    waiting_clients: Vec<WaitingClient>,
    responses: Arc<PendingResponses>,
}

/// An accepted client that is not served yet.
struct WaitingClient {
    client: AcceptedSocket,
    addr: ClientAddr,
    accepted_at: Instant,
}

/// Whether the accept queue may hold more clients.
#[derive(PartialEq, Eq)]
enum QueueState {
    MayHoldMore,
    Empty,
}

impl<'l, S: Fn(AcceptedSocket, ClientAddr)> Acceptor<'l, S> {
    fn new(listener: &'l std::net::TcpListener, serve: S) -> Self {
        Self {
            listener,
            serve,
            burst: BurstDetector::new(Instant::now()),
            waiting_clients: Vec::new(),
            responses: PendingResponses::current(),
        }
    }

    /// Accepts and serves clients: in a burst while responses are pending, by [`Self::burst_round`], otherwise by
    /// [`Self::normal_round`].
    ///
    /// # Errors
    /// An accept error that concerns the listener.
    async fn accept(&mut self, burst_timer: &ShortTimer) -> io::Result<Infallible> {
        let (mut registration, mut throttle) = (None, None);
        loop {
            let now = Instant::now();
            if self.burst.is_active(now) && self.responses.n_pending() > 0 {
                registration = None; // unregisters the listener, so that new clients do not wake the worker
                self.burst_round(now, burst_timer, &mut throttle).await?;
            } else {
                throttle = None;
                self.normal_round(&mut registration).await?;
            }
        }
    }

    /// Clients of a burst wait until a response is released, because its arrival wakes the worker anyway:
    /// 1. releases the next [`RESPONSES_PER_RELEASE`] responses; the others are throttled;
    /// 2. serves clients that have sent data or were silent too long;
    /// 3. waits for the next released response, or [`BURST_MAX_WAIT`], which ends the burst;
    /// 4. accepts all queued clients.
    async fn burst_round(
        &mut self,
        now: Instant,
        burst_timer: &ShortTimer,
        throttle: &mut Option<ReleaseThrottle>,
    ) -> io::Result<()> {
        throttle
            .get_or_insert_with(|| self.responses.throttle())
            .release(RESPONSES_PER_RELEASE);
        self.serve_ready(|client| client.read_first_bytes() || now - client.accepted_at > BURST_MAX_CLIENT_SILENCE);
        tokio::select! {
            biased;
            () = self.responses.wait_for_release_of_any() => {}
            waited = burst_timer.wait() => {
                waited?;
                self.burst = BurstDetector::new(Instant::now());
            }
        }
        self.accept_queued(throttle).await
    }

    /// Serves every client as it arrives. Responses are not throttled.
    async fn normal_round(&mut self, registration: &mut Option<AsyncFd<BorrowedFd<'l>>>) -> io::Result<()> {
        self.serve_ready(|_| true);
        let registration = match registration {
            Some(registration) => registration,
            None => registration.insert(register_readable(self.listener.as_fd())?),
        };
        let mut readable = registration.readable().await?;
        self.accept_queued(&mut None).await?;
        readable.clear_ready();
        Ok(())
    }

    /// Accepts all queued clients, in batches. If there is more than one batch, throttling ends, and after each batch its clients
    /// are served and other tasks run, so that responses do not wait.
    ///
    /// The first bytes of these clients are read at once: otherwise detection buffers for all of them would be allocated at the
    /// same time and not be returned to the system.
    async fn accept_queued(&mut self, throttle: &mut Option<ReleaseThrottle>) -> io::Result<()> {
        while self.accept_batch()? == QueueState::MayHoldMore {
            *throttle = None; // ends throttling
            self.serve_ready(|client| {
                client.read_first_bytes(); // usually the protocol is known then; the client is served in any case
                true
            });
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    fn accept_batch(&mut self) -> io::Result<QueueState> {
        let (now, n_before) = (Instant::now(), self.waiting_clients.len());
        let queue_state = loop {
            if self.waiting_clients.len() - n_before == ACCEPT_BATCH_SIZE {
                break Ok(QueueState::MayHoldMore);
            }
            let accepted = self.listener.accept();
            match accepted.and_then(|(stream, addr)| stream.set_nonblocking(true).map(|()| (stream, addr))) {
                Ok((stream, addr)) => self.waiting_clients.push(WaitingClient {
                    client: AcceptedSocket {
                        stream,
                        prefix: Bytes::new(),
                    },
                    addr: ClientAddr(addr::canonical(addr)),
                    accepted_at: now,
                }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(QueueState::Empty),
                Err(error) if is_connection_error(&error) => {}
                Err(error) => break Err(error),
            }
        };
        self.burst
            .record(now, self.waiting_clients.len() - n_before, self.responses.n_pending());
        queue_state
    }

    /// Serves the waiting clients for which `is_ready` is true.
    fn serve_ready(&mut self, is_ready: impl FnMut(&mut WaitingClient) -> bool) {
        for WaitingClient { client, addr, .. } in self.waiting_clients.extract_if(.., is_ready) {
            (self.serve)(client, addr);
        }
    }
}

impl WaitingClient {
    /// Reads what the client has sent. Returns whether it can be served: it has sent data, or its connection has ended.
    fn read_first_bytes(&mut self) -> bool {
        let mut space = [0; detect::MAX_DETECT_BYTES];
        match self.client.stream.read(&mut space) {
            Ok(n) => self.client.prefix = Bytes::copy_from_slice(&space[..n]),
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        }
        true
    }
}

#[expect(unsafe_code, reason = "AsyncFd requires a safety guarantee")]
fn register_readable(listener: BorrowedFd<'_>) -> io::Result<AsyncFd<BorrowedFd<'_>>> {
    // SAFETY: the borrowed descriptor stays open and unchanged until it is deregistered.
    Ok(unsafe { AsyncFd::register_with_interest(listener, Interest::READABLE) }?)
}

/// Detects bursts: samples of [`BURST_SAMPLE_SIZE`] clients with a mean interval of at most [`BURST_MAX_MEAN_INTERVAL`], while
/// the number of pending responses varies by at least [`BURST_MIN_RESPONSE_SPREAD`].
struct BurstDetector {
    /// Whether the last complete sample was a burst.
    is_burst: bool,
    last_arrival: Instant,
    /// The current sample: its start, its number of clients, and the lowest and highest number of pending responses.
    sample_start: Instant,
    n_clients: usize,
    min_responses: usize,
    max_responses: usize,
}

impl BurstDetector {
    fn new(now: Instant) -> Self {
        Self {
            is_burst: false,
            last_arrival: now,
            sample_start: now,
            n_clients: 0,
            min_responses: usize::MAX,
            max_responses: 0,
        }
    }

    /// Whether there is a burst, and it is not paused.
    fn is_active(&self, now: Instant) -> bool {
        self.is_burst && now - self.last_arrival < BURST_MAX_MEAN_INTERVAL
    }

    /// Records `n` clients that arrive now, while `n_pending` responses are pending. A client that opens one connection after
    /// the other is no burst, however many requests of others are in progress, because their number hardly varies.
    fn record(&mut self, now: Instant, n: usize, n_pending: usize) {
        if n == 0 {
            return;
        }
        if now - self.last_arrival > BURST_RESET_AFTER {
            *self = Self::new(now);
        }
        self.last_arrival = now;
        self.n_clients += n;
        self.min_responses = self.min_responses.min(n_pending);
        // Each new client will soon have a pending response.
        self.max_responses = self.max_responses.max(n_pending + n);
        if self.n_clients >= BURST_SAMPLE_SIZE {
            let is_burst = now - self.sample_start < BURST_MAX_MEAN_INTERVAL * self.n_clients as u32
                && self.max_responses - self.min_responses >= BURST_MIN_RESPONSE_SPREAD;
            *self = Self {
                is_burst,
                ..Self::new(now)
            };
        }
    }
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
        io::{Io, Tcp},
        pending_responses::PendingResponse,
    };

    fn listening(options: SocketOptions) -> std::net::TcpListener {
        bind(([127, 0, 0, 1], 0).into(), None, PortSharing::Exclusive, options).unwrap()
    }

    /// Simulates 128 clients that arrive `at_once` at a time, every `interval` microseconds. When `n` clients have arrived,
    /// `n_pending(n)` responses are pending. Returns the numbers of arrived clients at which a burst is active.
    fn active_at(at_once: usize, interval: u64, n_pending: impl Fn(usize) -> usize) -> Vec<usize> {
        let mut now = Instant::now();
        let mut detector = BurstDetector::new(now);
        let arrivals = (1..=128 / at_once).map(|n| n * at_once);
        arrivals
            .filter(|n| {
                now += Duration::from_micros(interval);
                detector.record(now, at_once, n_pending(*n));
                detector.is_active(now)
            })
            .collect()
    }

    #[test]
    fn a_burst_is_many_clients_at_short_intervals_with_varying_load() {
        // A sample has 32 clients. Its result applies from its last client on, until the last client of the next sample.
        assert_eq!(active_at(1, 200, |n| n), (32..=128).collect::<Vec<_>>());
        assert_eq!(active_at(8, 1600, |_| 10), (32..=128).step_by(8).collect::<Vec<_>>());
        let one_by_one = active_at(1, 200, |n| 10 + n % 2);
        assert!(one_by_one.is_empty(), "{one_by_one:?}");
        let load_varies_after_40 = |n| if n > 40 { n } else { 10 };
        assert_eq!(active_at(1, 200, load_varies_after_40), (64..=128).collect::<Vec<_>>());
        let load_is_constant_after_40 = |n| if n > 40 { 10 } else { n };
        assert_eq!(
            active_at(1, 200, load_is_constant_after_40),
            (32..96).collect::<Vec<_>>()
        );
        let slow = active_at(1, 400, |n| n);
        assert!(slow.is_empty(), "{slow:?}");
        let slow_groups = active_at(8, 2400, |_| 10);
        assert!(slow_groups.is_empty(), "{slow_groups:?}");
    }

    #[test]
    fn a_burst_ends_when_no_client_arrives_for_the_reset_time() {
        let mut now = Instant::now();
        let mut detector = BurstDetector::new(now);
        detector.record(now, 32, 0);
        assert!(detector.is_active(now));
        now += BURST_MAX_MEAN_INTERVAL;
        assert!(!detector.is_active(now));
        detector.record(now, 1, 0);
        assert!(detector.is_active(now), "the burst continues");
        now += BURST_RESET_AFTER * 2;
        detector.record(now, 1, 0);
        assert!(!detector.is_active(now), "the burst is over");
    }

    /// A listener, its served clients, each with the number of responses before it, and its stop signal. Time stands still
    /// unless a test advances it.
    struct TestAcceptor {
        addr: SocketAddr,
        stop: tokio::sync::oneshot::Sender<()>,
        served: tokio::sync::mpsc::UnboundedReceiver<(AcceptedSocket, usize)>,
        n_released: Arc<AtomicUsize>,
    }

    fn acceptor() -> TestAcceptor {
        acceptor_on(listening(SocketOptions::default()), Duration::from_secs(60))
    }

    /// Like [`acceptor`], with another maximum wait of a burst, in real time.
    fn acceptor_on(listener: std::net::TcpListener, max_wait: Duration) -> TestAcceptor {
        let (stop_tx, stop_rx) = tokio::sync::oneshot::channel::<()>();
        let addr = listener.local_addr().unwrap();
        let (served_tx, served_rx) = tokio::sync::mpsc::unbounded_channel();
        let n_released = Arc::<AtomicUsize>::default();
        let n = n_released.clone();
        tokio::spawn(async move {
            let serve = |client, _| served_tx.send((client, n.load(Ordering::Relaxed))).unwrap();
            accept_loop(listener, ShortTimer::new(max_wait).unwrap(), stop_rx.map(|_| ()), serve).await;
        });
        TestAcceptor {
            addr,
            stop: stop_tx,
            served: served_rx,
            n_released,
        }
    }

    impl TestAcceptor {
        /// Connects a client that sends `data` immediately.
        fn connect(&self, data: &[u8]) -> std::net::TcpStream {
            let mut client = std::net::TcpStream::connect(self.addr).unwrap();
            client.write_all(data).unwrap();
            client
        }

        /// Connects a burst of clients and waits until they are served.
        async fn serve_burst(&mut self) -> Vec<std::net::TcpStream> {
            let clients = [(); BURST_SAMPLE_SIZE].map(|()| self.connect(b"hello"));
            for _ in &clients {
                self.next().await;
            }
            clients.into()
        }

        /// The next served client: what it had sent by then, and its connection.
        async fn next(&mut self) -> (Bytes, TcpStream) {
            let (client, _) = self.served.recv().await.unwrap();
            (client.prefix, TcpStream::from_std(client.stream).unwrap())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn clients_outside_a_burst_and_without_pending_responses_are_served_at_once() {
        let mut acceptor = acceptor();
        let response = PendingResponse::register();
        let _alone = acceptor.connect(b"hello");
        assert!(acceptor.next().await.0.is_empty());
        drop(response);
        let _burst = acceptor.serve_burst().await;
        let _another = acceptor.connect(b"hello");
        assert!(acceptor.next().await.0.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_served_with_its_first_bytes() {
        let mut acceptor = acceptor();
        let _burst = acceptor.serve_burst().await;
        let _response = PendingResponse::register();
        let mut open = Vec::new();
        for n in 0..100_u8 {
            open.push(acceptor.connect(&[n; 5000]));
        }
        let mut seen = Vec::new();
        for _ in 0..100 {
            let (received, stream) = acceptor.next().await;
            assert!(!received.is_empty());
            let mut all = [0; 5000];
            Tcp::with_prefix(stream, received).read_exact(&mut all).await.unwrap();
            assert_eq!(all, [all[0]; 5000]);
            seen.push(all[0]);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    /// Makes three times as many responses arrive as are released at once, while a client of the burst is served.
    async fn make_responses_arrive(acceptor: &mut TestAcceptor) -> tokio::task::JoinSet<()> {
        let (arrive, mut releasing) = (Arc::new(tokio::sync::Notify::new()), tokio::task::JoinSet::new());
        for _ in 0..3 * RESPONSES_PER_RELEASE {
            let (response, arrive, n_released) =
                (PendingResponse::register(), arrive.clone(), acceptor.n_released.clone());
            releasing.spawn(async move {
                arrive.notified().await;
                response.wait_for_release().await;
                n_released.fetch_add(1, Ordering::Relaxed);
            });
        }
        let _first = acceptor.connect(b"hello");
        acceptor.next().await;
        arrive.notify_waiters();
        releasing
    }

    #[tokio::test(start_paused = true)]
    async fn burst_clients_are_served_between_released_responses() {
        let mut acceptor = acceptor();
        let _burst = acceptor.serve_burst().await;
        let releasing = make_responses_arrive(&mut acceptor).await;
        let _another = acceptor.connect(b"hello");
        assert_eq!(acceptor.served.recv().await.unwrap().1, RESPONSES_PER_RELEASE);
        releasing.join_all().await;
    }

    #[tokio::test(start_paused = true)]
    async fn responses_do_not_wait_until_a_long_queue_is_accepted() {
        let mut acceptor = acceptor();
        let _burst = acceptor.serve_burst().await;
        let releasing = make_responses_arrive(&mut acceptor).await;
        let queued = [(); 2 * ACCEPT_BATCH_SIZE].map(|()| acceptor.connect(b"hello"));
        let mut n_released = Vec::new();
        for _ in &queued {
            n_released.push(acceptor.served.recv().await.unwrap().1);
        }
        assert_eq!(n_released[ACCEPT_BATCH_SIZE - 1], RESPONSES_PER_RELEASE);
        assert_eq!(n_released[ACCEPT_BATCH_SIZE], 3 * RESPONSES_PER_RELEASE);
        releasing.join_all().await;
    }

    #[tokio::test(start_paused = true)]
    async fn clients_of_a_long_queue_are_served_with_their_first_bytes() {
        let mut acceptor = acceptor();
        let _queued = [(); ACCEPT_BATCH_SIZE + 1].map(|()| acceptor.connect(b"hello"));
        for _ in 0..ACCEPT_BATCH_SIZE {
            assert_eq!(acceptor.next().await.0, "hello");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stopped_listener_does_not_throttle_responses() {
        let mut acceptor = acceptor();
        let _burst = acceptor.serve_burst().await;
        let releasing = make_responses_arrive(&mut acceptor).await;
        acceptor.stop.send(()).unwrap();
        releasing.join_all().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_ends_when_no_response_arrives_in_time() {
        let mut acceptor = acceptor_on(listening(SocketOptions::default()), Duration::from_micros(1));
        let _response = PendingResponse::register();
        for _ in 0..3 {
            let _burst = acceptor.serve_burst().await;
            let _silent = acceptor.connect(b"");
            assert!(acceptor.next().await.0.is_empty());
        }
    }

    #[tokio::test]
    async fn other_tasks_run_while_a_long_queue_is_accepted() {
        let listener = listening(SocketOptions::default());
        let addr = listener.local_addr().unwrap();
        let _queued = [(); ACCEPT_BATCH_SIZE + 1].map(|()| std::net::TcpStream::connect(addr).unwrap());
        let mut acceptor = acceptor_on(listener, BURST_MAX_WAIT);
        let n_released = acceptor.n_released.clone();
        tokio::spawn(async move {
            loop {
                n_released.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        });
        let mut n_before = Vec::new();
        for _ in 0..=ACCEPT_BATCH_SIZE {
            n_before.push(acceptor.served.recv().await.unwrap().1);
        }
        assert_eq!(n_before[0], n_before[ACCEPT_BATCH_SIZE - 1]);
        assert!(
            n_before[ACCEPT_BATCH_SIZE - 1] < n_before[ACCEPT_BATCH_SIZE],
            "{n_before:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn silent_burst_clients_are_served_after_a_timeout_a_close_or_without_pending_responses() {
        let mut acceptor = acceptor();
        let _burst = acceptor.serve_burst().await;
        let response = PendingResponse::register();
        let closing = acceptor.connect(b"");
        let _sending = acceptor.connect(b"hello");
        assert_eq!(acceptor.next().await.0, "hello", "the silent client still waits");
        drop(closing);
        drop(PendingResponse::register());
        let (received, mut closed) = acceptor.next().await;
        assert!(received.is_empty());
        assert_eq!(closed.read(&mut [0]).await.unwrap(), 0);

        let (_silent, mut sending) = (acceptor.connect(b""), Vec::new());
        // 200 µs pass in each round.
        for round in 0.. {
            sending.push(acceptor.connect(b"hello"));
            drop(PendingResponse::register());
            if acceptor.next().await.0.is_empty() {
                assert_eq!(round, BURST_MAX_CLIENT_SILENCE.as_micros() / 200 + 1);
                break;
            }
            tokio::time::advance(Duration::from_micros(200)).await;
        }

        let (_silent, _sending) = (acceptor.connect(b""), acceptor.connect(b"hello"));
        drop(PendingResponse::register());
        assert_eq!(acceptor.next().await.0, "hello");
        assert_eq!(acceptor.next().await.0, "hello");
        drop(response);
        assert!(acceptor.next().await.0.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn queued_connections_are_served_after_stop() {
        let mut acceptor = acceptor();
        let _burst = acceptor.serve_burst().await;
        let _response = PendingResponse::register();
        let _pending = [acceptor.connect(b""), acceptor.connect(b"hello")];
        assert_eq!(acceptor.next().await.0, "hello");
        let _queued = acceptor.connect(b"");
        acceptor.stop.send(()).unwrap();
        for _ in 0..2 {
            assert!(acceptor.served.recv().await.is_some());
        }
        assert!(acceptor.served.recv().await.is_none());
    }

    #[tokio::test]
    async fn first_bytes_are_acknowledged_with_the_response_unless_quickack_is_enabled() {
        let listener = listening(SocketOptions::default());
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
        let listener = listening(options);
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = TcpListener::from_std(listener).unwrap().accept().await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(11));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(12)));
    }
}
