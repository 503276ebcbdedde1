//! What has become of the other end of a connection, where that is a socket of this host.
//!
//! Who closes a connection and who ends only its own side of it (`shutdown`) look alike on the wire. The kernel knows: a socket that
//! is closed belongs to no file any more. It is asked by its addresses (`NETLINK_SOCK_DIAG`), which takes no privileges.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd as _,
};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};
use tokio::net::TcpStream;
use tulle_core::addr::canonical;

use crate::net::orig_dst;

/// Whether the peer has closed its socket; `None` where that is on another host and has sent no reset, or the kernel does not say.
pub(super) fn is_closed(stream: &TcpStream) -> Option<bool> {
    let peer = match stream.peer_addr() {
        Ok(peer) => canonical(peer),
        // A socket that is closed with something unread sends a reset, and the kernel no longer knows a peer of ours then. Behind
        // an end, reading does not tell of it.
        Err(error) if error.kind() == io::ErrorKind::NotConnected => return Some(true),
        Err(_) => return None,
    };
    let local = canonical(stream.local_addr().ok()?);
    // Behind a redirect rule, the peer's socket has another address for us than ours has.
    let dialled = || orig_dst::of(stream, peer).ok().map(|dialled| canonical(dialled.0));
    let asked = |to: SocketAddr| {
        let inode = inode(peer, to);
        inode.unwrap_or_else(|error| {
            tracing::debug!(%error, "the kernel does not say what has become of a client's socket");
            None
        })
    };
    let inode = asked(local).or_else(|| asked(dialled().filter(|to| *to != local)?))?;
    Some(inode == 0)
}

/// The file that a TCP socket of this host belongs to, 0 if it is closed; `None` if there is no such socket.
fn inode(from: SocketAddr, to: SocketAddr) -> io::Result<Option<u32>> {
    let netlink = socket(
        AddressFamily::Netlink,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        SockProtocol::NetlinkSockDiag,
    )?;
    let fd = netlink.as_raw_fd();
    send(fd, &request(from, to), MsgFlags::empty())?;
    // The kernel answers before `send` returns.
    let mut answer = [0; 512];
    let n = recv(fd, &mut answer, MsgFlags::empty())?;
    parsed(&answer[..n])
}

/// Source: `linux/netlink.h` and `linux/inet_diag.h`, `struct nlmsghdr` and `struct inet_diag_req_v2`.
fn request(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(LENGTH);
    bytes.extend((LENGTH as u32).to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    bytes.extend([0; 8]); // sequence number and port
    let family = if from.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    bytes.extend([family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes()); // any state
    bytes.extend(from.port().to_be_bytes());
    bytes.extend(to.port().to_be_bytes());
    for ip in [from.ip(), to.ip()] {
        let mut space = [0; 16];
        match ip {
            IpAddr::V4(ip) => space[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => space.copy_from_slice(&ip.octets()),
        }
        bytes.extend(space);
    }
    bytes.extend([0; 4]); // any interface
    bytes.extend([0xff; 8]); // no cookie
    bytes
}

/// Source: as of [`request`], `struct nlmsgerr` and `struct inet_diag_msg`.
fn parsed(answer: &[u8]) -> io::Result<Option<u32>> {
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    let kind = answer
        .get(4..6)
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(bad)?;
    let number = |at: usize| {
        let bytes = answer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.ok_or_else(bad)
    };
    match u16::from_ne_bytes(kind) {
        SOCK_DIAG_BY_FAMILY => Ok(Some(u32::from_ne_bytes(number(INODE_AT)?))),
        NLMSG_ERROR => match i32::from_ne_bytes(number(ERROR_AT)?).saturating_neg() {
            libc::ENOENT => Ok(None),
            errno => Err(io::Error::from_raw_os_error(errno)),
        },
        _ => Err(bad()),
    }
}

/// Of a request: its header, and what it is about.
const LENGTH: usize = 16 + 56;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
/// Where in an answer the error is: behind the header.
const ERROR_AT: usize = 16;
/// Where in an answer the inode is: behind the header, four numbers of one byte, addresses, and four numbers.
const INODE_AT: usize = 16 + 4 + 48 + 16;

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
        net::TcpListener,
    };

    use super::*;

    #[tokio::test]
    async fn who_ends_one_side_is_told_from_who_closes() {
        for listens in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(listens).await else {
                continue; // a machine without IPv6
            };
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (mut ours, _) = listener.accept().await.unwrap();
            assert_eq!(is_closed(&ours), Some(false));
            client.shutdown().await.unwrap();
            assert_eq!(ours.read(&mut [0]).await.unwrap(), 0);
            assert_eq!(is_closed(&ours), Some(false));
            drop(client);
            assert_eq!(is_closed(&ours), Some(true));
        }
    }

    #[tokio::test]
    async fn who_closes_with_something_unread_has_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut ours, _) = listener.accept().await.unwrap();
        client.shutdown().await.unwrap();
        assert_eq!(ours.read(&mut [0]).await.unwrap(), 0);
        ours.write_all(b"unread").await.unwrap();
        client.readable().await.unwrap();
        drop(client);
        ours.ready(Interest::ERROR).await.unwrap();
        assert_eq!(is_closed(&ours), Some(true));
    }

    #[test]
    fn no_answer_panics() {
        for n in 0..100 {
            assert!(parsed(&vec![20; n]).is_err() || n >= INODE_AT + 4, "{n}");
            let _ = parsed(&vec![0; n]);
        }
    }
}
