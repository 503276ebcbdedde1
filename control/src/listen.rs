//! Opens the ports of the process.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result};
use tokio::net::{TcpListener, TcpSocket};

use crate::config::flags::ListenAddr;

/// Opens a listener. `AllInterfaces` uses both IP families if the host has IPv6.
pub(crate) fn bind(addr: ListenAddr) -> Result<(TcpListener, SocketAddr)> {
    let bound = match addr {
        ListenAddr::Socket(addr) => listen(addr),
        ListenAddr::AllInterfaces(port) => {
            listen((Ipv6Addr::UNSPECIFIED, port).into()).or_else(|_| listen((Ipv4Addr::UNSPECIFIED, port).into()))
        }
    };
    let listener = bound.with_context(|| format!("listening on {addr}"))?;
    let bound = listener.local_addr().context("reading a listener's address")?;
    Ok((listener, bound))
}

fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = match addr {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(ACCEPT_QUEUE_LENGTH)
}

/// Maximum length of the accept queue. When the queue is full, a client is delayed by a second, because the kernel drops its SYN
/// and the client retransmits it.
const ACCEPT_QUEUE_LENGTH: u32 = 4096;
