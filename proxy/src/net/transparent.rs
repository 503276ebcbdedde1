//! Sockets that keep the client's address: they accept connections for any address and dial from another address.
//!
//! Their packets follow the rules and routes that `tulle-init --inbound-mode tproxy` makes.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
};

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpSocket, TcpStream};

/// Allows a socket to use addresses of other hosts; connections that a listener accepts inherit the option.
///
/// # Errors
/// The process has neither `NET_RAW` nor `NET_ADMIN`.
pub(crate) fn set_transparent<'a>(socket: impl Into<SockRef<'a>>) -> io::Result<()> {
    socket.into().set_ip_transparent_v4(true) // despite its name, also for IPv6 sockets
}

/// Opens a TCP connection from the client's address.
///
/// # Errors
/// The connection fails, or every source port is in use.
pub(crate) async fn connect(client: IpAddr, addr: SocketAddr) -> io::Result<TcpStream> {
    let random = std::iter::repeat_with(|| fastrand::u16(SOURCE_PORTS)).take(MAX_RANDOM_PORTS);
    let mut last_error = io::Error::from(io::ErrorKind::AddrInUse);
    // Port 0 is last: the kernel then chooses a port.
    for port in random.chain([0]) {
        match connect_from(SocketAddr::new(client, port), addr).await {
            Err(error) if [io::ErrorKind::AddrInUse, io::ErrorKind::AddrNotAvailable].contains(&error.kind()) => {
                last_error = error;
            }
            result => return result,
        }
    }
    Err(last_error)
}

async fn connect_from(from: SocketAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    // `SO_REUSEADDR`: one source port may be used at once for connections to several addresses of the application.
    socket.set_reuse_address(true)?;
    set_transparent(&socket)?;
    socket.bind(&from.into())?;
    TcpSocket::from_std_stream(socket.into()).connect(to).await
}

/// Source ports that are tried first. They are outside the range that a client's kernel uses (Linux by default: 32768 to
/// 60999), so that the connection to the application cannot have the same addresses and ports as the client's connection to
/// the proxy.
const SOURCE_PORTS: RangeInclusive<u16> = 61_000..=65_535;
/// Maximum number of random ports that are tried before the kernel chooses one.
const MAX_RANDOM_PORTS: usize = 16;
