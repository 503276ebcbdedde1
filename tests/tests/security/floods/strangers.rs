//! The clients that flood a port: with an identity or without, each holds connections open in one cheap way.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use socket2::{Domain, Socket, Type};

/// What a flood does with each of its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behaviour {
    Silent,
    /// A request, of which a byte comes each second.
    Slow,
    /// A TLS handshake, of which a byte comes each second.
    SlowTls,
    Garbage,
    /// The first bytes of a TLS handshake.
    BeginTls,
    /// HTTP/2 with ten streams that have no end.
    OpenStreams,
    /// A request that is answered, and nothing more.
    Idle,
    /// TLS with a verified identity, and HTTP/2 without a request.
    Verified,
}

/// Where they come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sources {
    OneAddress,
    TwoHundred,
}

/// Connections that a flood holds.
pub(crate) struct Flood {
    connections: Arc<Vec<Held>>,
    slow: Option<Slow>,
}

/// With what identity peers connect, and to whom.
#[derive(Clone)]
pub(crate) struct Peers {
    pub(crate) tls: Arc<ClientConfig>,
    pub(crate) server: ServerName<'static>,
}

enum Held {
    Tcp(TcpStream),
    Tls {
        _stream: Box<StreamOwned<ClientConnection, TcpStream>>,
    },
}

/// Says a byte each second on every connection, until it is dropped.
struct Slow {
    stop: Option<mpsc::Sender<()>>,
    said: mpsc::Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Behaviour {
    pub(crate) const OF_STRANGERS: [Self; 7] = [
        Self::Silent,
        Self::Slow,
        Self::SlowTls,
        Self::Garbage,
        Self::BeginTls,
        Self::OpenStreams,
        Self::Idle,
    ];

    pub(crate) fn is_slow(self) -> bool {
        matches!(self, Self::Slow | Self::SlowTls)
    }

    /// What is said at once; of those that are slow, a byte at a time.
    fn bytes(self) -> Vec<u8> {
        match self {
            Self::Silent | Self::Verified => Vec::new(),
            Self::Slow => b"GET /live HTTP/1.1\r\n".to_vec(),
            Self::Garbage => (0..=255).rev().collect(),
            // A record of 512 bytes that begins a ClientHello, of which nothing more comes.
            Self::BeginTls | Self::SlowTls => vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3],
            Self::OpenStreams => streams(),
            Self::Idle => b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
        }
    }
}

/// The preface of HTTP/2 and its settings.
fn preface() -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    bytes
}

/// The preface and the heads of ten requests.
fn streams() -> Vec<u8> {
    // POST http://x/, from the static table.
    let head = [0x83, 0x86, 0x84, 0x41, 1, b'x'];
    let mut bytes = preface();
    for n in 0..10 {
        bytes.extend(frame(HEADERS, END_HEADERS, 2 * n + 1, &head));
    }
    bytes
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

impl Flood {
    /// Opens `n` connections. Those that the other side does not take, or closes, are as good as any: a flood does not care.
    pub(crate) fn start(
        port: SocketAddr,
        behaviour: Behaviour,
        from: Sources,
        n: usize,
        peers: Option<&Peers>,
    ) -> Self {
        let bytes = behaviour.bytes();
        let first = match behaviour.is_slow() {
            true => &bytes[..1],
            false => &bytes[..],
        };
        let connect = |n: usize| {
            let address = match from {
                Sources::OneAddress => 0,
                Sources::TwoHundred => n % 200,
            };
            let source = source(port, u8::try_from(address).unwrap());
            match (behaviour, peers) {
                (Behaviour::Verified, Some(peers)) => peers.connect(source, port),
                _ => {
                    let mut stream = connect(source, port)?;
                    stream.set_nonblocking(true).ok()?;
                    stream.write_all(first).ok()?;
                    Some(Held::Tcp(stream))
                }
            }
        };
        let connections: Arc<Vec<Held>> = Arc::new((0..n).filter_map(connect).collect());
        let slow = behaviour
            .is_slow()
            .then(|| Slow::start(connections.clone(), bytes[1..].to_vec()));
        Self { connections, slow }
    }

    /// Where a byte comes each second, waits until the next one was said on every connection.
    pub(crate) fn wait_for_byte(&self) {
        if let Some(slow) = &self.slow {
            slow.said.recv().expect("there are more bytes than rounds");
        }
    }

    /// Connections that were open at least at first.
    pub(crate) fn n(&self) -> usize {
        self.connections.len()
    }
}

impl Slow {
    fn start(connections: Arc<Vec<Held>>, bytes: Vec<u8>) -> Self {
        let (stop, stopped) = mpsc::channel();
        let (saying, said) = mpsc::channel();
        let thread = thread::spawn(move || {
            for byte in bytes {
                if stopped.recv_timeout(BETWEEN_BYTES) != Err(mpsc::RecvTimeoutError::Timeout) {
                    return;
                }
                for connection in &*connections {
                    if let Held::Tcp(stream) = connection {
                        let _ = (&*stream).write(&[byte]);
                    }
                }
                let _ = saying.send(());
            }
        });
        Self {
            stop: Some(stop),
            said,
            thread: Some(thread),
        }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        let Some(slow) = &mut self.slow else { return };
        drop(slow.stop.take());
        if let Some(thread) = slow.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Peers {
    fn connect(&self, source: IpAddr, port: SocketAddr) -> Option<Held> {
        let stream = connect(source, port)?;
        stream.set_read_timeout(Some(CONNECT_LIMIT)).ok()?;
        let tls = ClientConnection::new(self.tls.clone(), self.server.clone()).ok()?;
        let mut stream = StreamOwned::new(tls, stream);
        stream.write_all(&preface()).ok()?;
        stream.flush().ok()?;
        Some(Held::Tls {
            _stream: Box::new(stream),
        })
    }
}

/// An address of the strangers, in the network of the port.
fn source(port: SocketAddr, n: u8) -> IpAddr {
    match port.ip() {
        ip if ip.is_loopback() => Ipv4Addr::new(127, 78, 1, n + 1).into(),
        IpAddr::V4(_) => super::scene::stranger(n).into(),
        IpAddr::V6(_) => super::scene::v6(super::scene::stranger(n)).into(),
    }
}

fn connect(source: IpAddr, port: SocketAddr) -> Option<TcpStream> {
    let socket = Socket::new(Domain::for_address(port), Type::STREAM, None).ok()?;
    socket.bind(&SocketAddr::from((source, 0)).into()).ok()?;
    socket.connect_timeout(&port.into(), CONNECT_LIMIT).ok()?;
    Some(socket.into())
}

const SETTINGS: u8 = 4;
const HEADERS: u8 = 1;
const END_HEADERS: u8 = 4;
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
const BETWEEN_BYTES: Duration = Duration::from_secs(1);
