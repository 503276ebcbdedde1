//! Sockets that keep the client's address: they accept for any address, and dial as somebody else.
//!
//! What they send and get goes through rules and routes that `tulle-init --inbound-mode tproxy` makes.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
};

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpSocket, TcpStream};

/// Lets a socket have addresses that are not ours; what a listener accepts may as well.
///
/// # Errors
/// The process has neither `NET_RAW` nor `NET_ADMIN`.
pub(crate) fn allow<'a>(socket: impl Into<SockRef<'a>>) -> io::Result<()> {
    socket.into().set_ip_transparent_v4(true) // of either family
}

/// Opens a TCP connection in the name of a client.
///
/// # Errors
/// As those of any connection; also where every port to dial from is taken.
pub(crate) async fn connect(client: IpAddr, addr: SocketAddr) -> io::Result<TcpStream> {
    let random = std::iter::repeat_with(|| fastrand::u16(PORTS)).take(TRIES);
    let mut taken = io::Error::from(io::ErrorKind::AddrInUse);
    // At last any port.
    for port in random.chain([0]) {
        match connect_from(SocketAddr::new(client, port), addr).await {
            Err(error) if [io::ErrorKind::AddrInUse, io::ErrorKind::AddrNotAvailable].contains(&error.kind()) => {
                taken = error;
            }
            result => return result,
        }
    }
    Err(taken)
}

async fn connect_from(from: SocketAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    // The same port may lead to several applications.
    socket.set_reuse_address(true)?;
    allow(&socket)?;
    socket.bind(&from.into())?;
    TcpSocket::from_std_stream(socket.into()).connect(to).await
}

/// Ports to dial from: none that a client has got from its own kernel, which would be the connection that it has to us.
///
/// Linux gives out 32768 to 60999.
const PORTS: RangeInclusive<u16> = 61_000..=65_535;
/// Ports that are tried before the kernel chooses.
const TRIES: usize = 16;
