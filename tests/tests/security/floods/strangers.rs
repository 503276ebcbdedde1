//! Strangers, who hold connections open in every way that costs them little.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

/// What strangers do with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behaviour {
    Silent,
    /// A request, of which a byte comes now and then.
    Slow,
    Garbage,
    /// The first bytes of a TLS handshake.
    BeginTls,
    /// HTTP/2 with ten streams that have no end.
    OpenStreams,
    /// A request that is answered, and nothing more.
    Idle,
}

/// Where they come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sources {
    OneAddress,
    TwoHundred,
}

/// Connections that strangers hold.
pub(crate) struct Flood {
    behaviour: Behaviour,
    connections: Vec<TcpStream>,
}

impl Behaviour {
    pub(crate) const ALL: [Self; 6] = [
        Self::Silent,
        Self::Slow,
        Self::Garbage,
        Self::BeginTls,
        Self::OpenStreams,
        Self::Idle,
    ];

    fn first_bytes(self) -> Vec<u8> {
        match self {
            Self::Silent => Vec::new(),
            Self::Slow => b"G".to_vec(),
            Self::Garbage => (0..=255).rev().collect(),
            // A record of 512 bytes that begins a ClientHello, of which nothing more comes.
            Self::BeginTls => vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3],
            Self::OpenStreams => streams(),
            Self::Idle => b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
        }
    }
}

/// The preface of HTTP/2, its settings, and the heads of ten requests.
fn streams() -> Vec<u8> {
    const SETTINGS: u8 = 4;
    const HEADERS: u8 = 1;
    const END_HEADERS: u8 = 4;
    let frame = |kind, flags, stream: u32, payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    };
    // POST http://x/, from the static table.
    let head = [0x83, 0x86, 0x84, 0x41, 1, b'x'];
    let heads = (0..10).map(|n| frame(HEADERS, END_HEADERS, 2 * n + 1, &head));
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    heads.for_each(|head| bytes.extend(head));
    bytes
}

impl Flood {
    /// Opens `n` connections. Those that the other side does not take, or closes, are as good as any: strangers do not care.
    pub(crate) fn start(port: SocketAddr, behaviour: Behaviour, from: Sources, n: usize) -> Self {
        let first = behaviour.first_bytes();
        let connect = |n: usize| {
            let address = match from {
                Sources::OneAddress => 0,
                Sources::TwoHundred => n % 200,
            };
            let mut connection = connect(source(port, u8::try_from(address).unwrap()), port)?;
            connection.write_all(&first).ok()?;
            Some(connection)
        };
        Self {
            behaviour,
            connections: (0..n).filter_map(connect).collect(),
        }
    }

    /// Has those who are slow say one more byte.
    pub(crate) fn go_on(&self) {
        if self.behaviour == Behaviour::Slow {
            for mut connection in &self.connections {
                let _ = connection.write(b"E");
            }
        }
    }
}

/// An address of the strangers, in the network of the port.
fn source(port: SocketAddr, n: u8) -> Ipv4Addr {
    match port.ip().is_loopback() {
        true => Ipv4Addr::new(127, 78, 1, n + 1),
        false => super::scene::stranger(n),
    }
}

fn connect(source: Ipv4Addr, port: SocketAddr) -> Option<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).ok()?;
    socket.bind(&SocketAddr::from((source, 0)).into()).ok()?;
    socket.connect_timeout(&port.into(), CONNECT_LIMIT).ok()?;
    socket.set_nonblocking(true).ok()?;
    Some(socket.into())
}

const CONNECT_LIMIT: Duration = Duration::from_secs(2);
