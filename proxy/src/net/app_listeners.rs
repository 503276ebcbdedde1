//! Finds the listening sockets of the application in this network namespace. They show a draining proxy whether the application
//! still accepts traffic, and show the inbound side whether a port is used or clients only scan it.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Once,
};

use tulle_core::addr::canonical;

use crate::net::peer_socket;

/// Kernel tables of the TCP sockets in this namespace.
const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];
/// `TCP_LISTEN` as the tables print it.
const TCP_LISTEN_STATE: &str = "0A";

/// Whether a socket in this network namespace listens on a port other than `own_ports`. False if the tables cannot be read, so
/// that a drain always ends.
pub(crate) fn has_application_listener(own_ports: &[u16]) -> bool {
    TABLES
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .any(|text| listening_ports(&text).any(|port| !own_ports.contains(&port)))
}

/// Whether a program listens on `addr`, or on its port at all addresses. True if the kernel gives no answer: otherwise the
/// ports of an application could be mistaken for ports that clients scan.
pub(crate) fn is_listening(addr: SocketAddr) -> bool {
    let addr = canonical(addr);
    let any_ip = match addr {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    // No connection has the remote address `[any]:0`, so the kernel finds only listening sockets.
    has_listener(peer_socket::query_inode(addr, SocketAddr::new(any_ip, 0)))
}

/// Interprets the kernel's answer: the inode of a listening socket, or an error.
fn has_listener(inode: io::Result<Option<u32>>) -> bool {
    inode.map(|inode| inode.is_some()).unwrap_or_else(|error| {
        static WARNING: Once = Once::new();
        WARNING.call_once(|| {
            tracing::warn!(%error, "the kernel does not report the ports of applications, so port scans are not limited");
        });
        true
    })
}

/// The ports of the listening sockets in a kernel table; invalid lines are skipped.
fn listening_ports(table: &str) -> impl Iterator<Item = u16> + '_ {
    table.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let local = fields.next()?;
        let state = fields.nth(1)?;
        if state != TCP_LISTEN_STATE {
            return None;
        }
        u16::from_str_radix(local.rsplit(':').next()?, 16).ok()
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    const TABLE: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n   \
        0: 00000000:102F 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n   \
        1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n   \
        2: 0100007F:0050 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n";

    #[test]
    fn only_listening_sockets_count() {
        assert_eq!(listening_ports(TABLE).collect::<Vec<_>>(), [0x102F, 0x1F90]);
    }

    #[test]
    fn a_listener_is_found_at_its_address_and_a_wildcard_listener_at_every_address() {
        for (listen_addr, is_found) in [
            ("127.0.0.1:0", [true, false]),
            ("0.0.0.0:0", [true, true]),
            ("[::]:0", [true, true]),
        ] {
            let Ok(listener) = TcpListener::bind(listen_addr) else {
                continue; // a machine without IPv6
            };
            let port = listener.local_addr().unwrap().port();
            let addrs = [[127, 0, 0, 1], [127, 0, 0, 2]].map(|ip| SocketAddr::from((ip, port)));
            assert_eq!(addrs.map(is_listening), is_found, "{listen_addr}");
            let _open_connection = TcpStream::connect(addrs[0]).unwrap();
            drop(listener);
            assert!(!is_listening(addrs[0]), "{listen_addr}");
        }
    }

    #[test]
    fn a_port_counts_as_in_use_if_the_kernel_gives_no_answer() {
        let unsupported = io::Error::from(io::ErrorKind::Unsupported);
        assert_eq!(
            [Ok(Some(7)), Ok(None), Err(unsupported)].map(has_listener),
            [true, false, true]
        );
    }

    #[test]
    fn invalid_lines_of_the_table_are_skipped() {
        assert_eq!(listening_ports("head\nx\n 1: zz 0 0A\n\u{1F600} y:z q 0A").count(), 0);
    }
}
