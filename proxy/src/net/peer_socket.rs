//! Asks the kernel whether the peer of a connection has closed its socket. Works only for peers on this host.
//!
//! On the wire, closing a connection and closing only its write side (`shutdown`) look the same. The kernel knows the
//! difference: a closed socket belongs to no file. It is queried by its addresses (`NETLINK_SOCK_DIAG`), which needs no
//! privileges.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd as _,
};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};
use tokio::net::TcpStream;
use tulle_core::addr::canonical;

use crate::net::orig_dst;

/// Whether the peer has closed its socket; `None` if it is on another host and has sent no reset, or if the kernel returns no
/// answer.
pub(super) fn is_closed(stream: &TcpStream) -> Option<bool> {
    let peer = match stream.peer_addr() {
        Ok(peer) => canonical(peer),
        // The peer closed its socket with unread data and so sent a reset. If the reset follows a FIN, a read does not report
        // it; only this error does.
        Err(error) if error.kind() == io::ErrorKind::NotConnected => return Some(true),
        Err(_) => return None,
    };
    let local = canonical(stream.local_addr().ok()?);
    // If a redirect rule applies, the remote address of the peer's socket is not the local address of this one.
    let dialled = || orig_dst::lookup(stream, peer).ok().map(|dialled| canonical(dialled.0));
    let query = |to: SocketAddr| {
        let inode = query_inode(peer, to);
        inode.unwrap_or_else(|error| {
            tracing::debug!(%error, "querying the socket of a client failed");
            None
        })
    };
    let inode = query(local).or_else(|| query(dialled().filter(|to| *to != local)?))?;
    Some(inode == 0)
}

/// The inode of a TCP socket of this host, 0 if it is closed; `None` if there is no such socket.
pub(super) fn query_inode(from: SocketAddr, to: SocketAddr) -> io::Result<Option<u32>> {
    let netlink = socket(
        AddressFamily::Netlink,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        SockProtocol::NetlinkSockDiag,
    )?;
    let fd = netlink.as_raw_fd();
    send(fd, &encode_request(from, to), MsgFlags::empty())?;
    // The kernel answers before `send` returns.
    let mut response = [0; 512];
    let n = recv(fd, &mut response, MsgFlags::empty())?;
    parse_response(&response[..n])
}

/// Encodes the query for the socket with these addresses.
///
/// Source: `linux/netlink.h` and `linux/inet_diag.h`, `struct nlmsghdr` and `struct inet_diag_req_v2`.
fn encode_request(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(REQUEST_BYTES);
    bytes.extend((REQUEST_BYTES as u32).to_ne_bytes());
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

/// Returns the inode in a response; `None` if there is no such socket.
///
/// Source: the headers of [`encode_request`], `struct nlmsgerr` and `struct inet_diag_msg`.
fn parse_response(response: &[u8]) -> io::Result<Option<u32>> {
    let invalid_data = || io::Error::from(io::ErrorKind::InvalidData);
    let kind = response
        .get(4..6)
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(invalid_data)?;
    let u32_at = |offset: usize| {
        let bytes = response.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.ok_or_else(invalid_data)
    };
    match u16::from_ne_bytes(kind) {
        SOCK_DIAG_BY_FAMILY => Ok(Some(u32::from_ne_bytes(u32_at(INODE_OFFSET)?))),
        NLMSG_ERROR => match i32::from_ne_bytes(u32_at(ERROR_OFFSET)?).saturating_neg() {
            libc::ENOENT => Ok(None),
            errno => Err(io::Error::from_raw_os_error(errno)),
        },
        _ => Err(invalid_data()),
    }
}

/// Length of a request: its header and `struct inet_diag_req_v2`.
const REQUEST_BYTES: usize = 16 + 56;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
/// Offset of the error in a response: after the header.
const ERROR_OFFSET: usize = 16;
/// Offset of the inode in a response: after the header, four one-byte fields, addresses, and four 32-bit fields.
const INODE_OFFSET: usize = 16 + 4 + 48 + 16;

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
        net::TcpListener,
    };

    use super::*;

    #[tokio::test]
    async fn a_half_close_is_distinguished_from_a_close() {
        for listen_addr in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(listen_addr).await else {
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
    async fn a_close_with_unread_data_is_detected() {
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
    fn parsing_never_panics() {
        for n in 0..100 {
            assert!(parse_response(&vec![20; n]).is_err() || n >= INODE_OFFSET + 4, "{n}");
            let _ = parse_response(&vec![0; n]);
        }
    }
}
