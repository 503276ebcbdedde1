//! The attackers: clients that hold connections open at low cost. [`tls_attackers`](super::tls_attackers) has those that
//! complete a TLS handshake.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::{Domain, SockRef, Socket, Type};

use super::tls_attackers::{TlsAttack, TlsBehaviour, TlsFlood};

/// What an attacker does on its connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Behaviour<'a> {
    Silent,
    /// A request, one byte per second.
    Slow,
    /// A TLS handshake, one byte per second.
    SlowTls,
    Garbage,
    /// The first bytes of a TLS handshake.
    BeginTls,
    /// HTTP/2 with ten streams that do not end.
    OpenStreams,
    /// A request that gets its response, and nothing more.
    Idle,
    /// The start of a request whose head is almost as large as the limit. All connections are open before the first head grows,
    /// because under memory pressure no more are accepted.
    LargeHead,
    /// The same over HTTP/2: a header block without its end.
    LargeHeaderBlock,
    InsideTls(&'a TlsAttack, TlsBehaviour),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sources {
    OneAddress,
    TwoHundred,
}

impl Sources {
    pub(crate) const ALL: &[Self] = &[Self::OneAddress, Self::TwoHundred];
}

/// The open connections of one flood.
pub(crate) enum Flood {
    Plain {
        connections: Arc<Vec<TcpStream>>,
        slow: Option<ByteSender>,
    },
    InsideTls(TlsFlood),
}

/// Sends one byte per second on every connection until it is dropped.
pub(crate) struct ByteSender {
    stop: Option<mpsc::Sender<()>>,
    sent_bytes: mpsc::Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Behaviour<'_> {
    pub(crate) const WITHOUT_TLS_HANDSHAKE: [Self; 7] = [
        Self::Silent,
        Self::Slow,
        Self::SlowTls,
        Self::Garbage,
        Self::BeginTls,
        Self::OpenStreams,
        Self::Idle,
    ];

    pub(crate) const LARGE_HEADS: [Self; 2] = [Self::LargeHead, Self::LargeHeaderBlock];

    fn sends_byte_per_second(self) -> bool {
        matches!(self, Self::Slow | Self::SlowTls)
    }

    /// The bytes to send at once; slow behaviours send them one at a time.
    fn bytes(self) -> Vec<u8> {
        match self {
            Self::Silent | Self::InsideTls(..) => Vec::new(),
            Self::Slow => b"GET /live HTTP/1.1\r\n".to_vec(),
            Self::Garbage => (0..=255).rev().collect(),
            // A record of 512 bytes that begins a ClientHello and is never completed.
            Self::BeginTls | Self::SlowTls => vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3],
            Self::OpenStreams => streams(),
            Self::Idle => b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
            Self::LargeHead => [&b"GET / HTTP/1.1\r\nhost: x\r\nx: "[..], &[b'x'; LARGE_HEAD_BYTES]].concat(),
            Self::LargeHeaderBlock => header_block(),
        }
    }
}

/// The HTTP/2 preface, a SETTINGS frame and ten HEADERS frames.
fn streams() -> Vec<u8> {
    // POST http://x/, from the static table of HPACK.
    let head = [0x83, 0x86, 0x84, 0x41, 1, b'x'];
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    for n in 0..10 {
        bytes.extend(frame(HEADERS, END_HEADERS, 2 * n + 1, &head));
    }
    bytes
}

/// The HTTP/2 preface, a SETTINGS frame, and the start of a header field.
fn header_block() -> Vec<u8> {
    // The name x, and a length of the value, 65,662, that is more than follows.
    let start = [0, 1, b'x', 0x7f, 0xff, 0xff, 0x03];
    let part = [b'x'; LARGE_HEAD_BYTES / 4];
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    bytes.extend(frame(HEADERS, 0, 1, &[&start[..], &part].concat()));
    for _ in 0..3 {
        bytes.extend(frame(CONTINUATION, 0, 1, &part));
    }
    bytes
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

impl Flood {
    /// Opens `n` connections. Connections that the server does not accept, or closes, are ignored.
    pub(crate) fn start(addr: SocketAddr, behaviour: Behaviour<'_>, from: Sources, n: usize) -> Self {
        let bytes = behaviour.bytes();
        let first = match behaviour.sends_byte_per_second() {
            true => &bytes[..1],
            false => &bytes[..],
        };
        let connect = |n: usize| {
            let attacker = match from {
                Sources::OneAddress => 0,
                Sources::TwoHundred => n % 200,
            };
            connect(source(addr, u8::try_from(attacker).unwrap()), addr)
        };
        if let Behaviour::InsideTls(attack, behaviour) = behaviour {
            return Self::InsideTls(TlsFlood::start(attack, behaviour, (0..n).filter_map(connect)));
        }
        let send_first = |mut stream: TcpStream| {
            SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER_BYTES).ok()?;
            stream.set_nonblocking(true).ok()?;
            stream.write_all(first).ok()?;
            Some(stream)
        };
        let connections: Vec<_> = match behaviour {
            Behaviour::LargeHead | Behaviour::LargeHeaderBlock => {
                let opened: Vec<_> = (0..n).filter_map(connect).collect();
                opened.into_iter().filter_map(send_first).collect()
            }
            _ => (0..n).filter_map(|n| send_first(connect(n)?)).collect(),
        };
        let connections = Arc::new(connections);
        let slow = behaviour
            .sends_byte_per_second()
            .then(|| ByteSender::start(connections.clone(), bytes[1..].to_vec()));
        Self::Plain { connections, slow }
    }

    /// Waits before a round of requests.
    ///
    /// * Slow behaviours: until the next byte was sent on every connection.
    /// * Inside TLS: from the second round on, until the attackers send no more, because they have sent everything or the server
    ///   does not read it.
    /// * Others: does not wait.
    pub(crate) fn wait_before_round(&self, round: usize) {
        match self {
            Self::Plain { slow: Some(slow), .. } => {
                slow.sent_bytes.recv().expect("there are more bytes than rounds");
            }
            Self::InsideTls(flood) if round > 0 => flood.wait_until_stalled(),
            Self::Plain { slow: None, .. } | Self::InsideTls(_) => {}
        }
    }

    /// The number of connections that were established.
    pub(crate) fn n_connections(&self) -> usize {
        match self {
            Self::Plain { connections, .. } => connections.len(),
            Self::InsideTls(flood) => flood.n_connections(),
        }
    }
}

impl ByteSender {
    fn start(connections: Arc<Vec<TcpStream>>, bytes: Vec<u8>) -> Self {
        let (stop_tx, stop_rx) = mpsc::channel();
        let (byte_sent_tx, sent_bytes) = mpsc::channel();
        let thread = thread::spawn(move || {
            for byte in bytes {
                if stop_rx.recv_timeout(BYTE_INTERVAL) != Err(mpsc::RecvTimeoutError::Timeout) {
                    return;
                }
                for mut stream in &*connections {
                    let _ = stream.write(&[byte]);
                }
                let _ = byte_sent_tx.send(());
            }
        });
        Self {
            stop: Some(stop_tx),
            sent_bytes,
            thread: Some(thread),
        }
    }
}

impl Drop for ByteSender {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// An address of an attacker, in the address family of the target.
fn source(addr: SocketAddr, n: u8) -> IpAddr {
    match addr.ip() {
        IpAddr::V4(_) => super::testbed::attacker_addr(n).into(),
        IpAddr::V6(_) => super::testbed::v6(super::testbed::attacker_addr(n)).into(),
    }
}

fn connect(source: IpAddr, addr: SocketAddr) -> Option<TcpStream> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None).ok()?;
    socket.bind(&SocketAddr::from((source, 0)).into()).ok()?;
    socket.connect_timeout(&addr.into(), CONNECT_TIMEOUT).ok()?;
    Some(socket.into())
}

const SETTINGS: u8 = 4;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
/// The limit of HTTP/1 is 64 KiB.
const LARGE_HEAD_BYTES: usize = 60_000;
/// What a connection sends at once fits into this, so that sending does not wait for the server.
const SEND_BUFFER_BYTES: usize = 128 << 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const BYTE_INTERVAL: Duration = Duration::from_secs(1);
