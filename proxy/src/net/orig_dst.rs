//! The original destination: the address that the client dialled before a redirect rule sent the connection to the proxy.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use nix::{
    errno::Errno,
    sys::socket::{getsockopt, sockopt},
};
use tokio::net::TcpStream;
use tulle_core::addr::{self, OrigDst};

/// Looks up the original destination of an accepted connection, given its socket and its peer's address. The lookup is passed
/// as a value, because it differs by mode: in tproxy mode and in tests, the address does not come from the kernel's connection
/// tracking.
pub type OrigDstLookup = Arc<dyn Fn(&TcpStream, SocketAddr) -> io::Result<OrigDst> + Send + Sync>;

/// Asks the kernel's connection tracking for the address that the peer dialled. A connection without an entry was not
/// redirected, so its local address is the one that was dialled.
///
/// # Errors
/// The kernel returns an error.
///
/// Source: `SO_ORIGINAL_DST` (IPv4) and `IP6T_SO_ORIGINAL_DST` (IPv6). A dual-stack socket answers only the option of the
/// family that the peer used, so an IPv4-mapped peer address is converted to IPv4 first, and its family decides.
pub(crate) fn lookup(stream: &TcpStream, peer: SocketAddr) -> io::Result<OrigDst> {
    let tracked = match addr::canonical(peer) {
        SocketAddr::V4(_) => getsockopt(stream, sockopt::OriginalDst).map(|raw| {
            let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
            SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)))
        }),
        SocketAddr::V6(_) => getsockopt(stream, sockopt::Ip6tOriginalDst).map(|raw| {
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            SocketAddr::V6(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), 0, 0))
        }),
    };
    match tracked {
        // The connection has no entry, or connection tracking is not loaded.
        Err(Errno::ENOENT | Errno::ENOPROTOOPT) => Ok(OrigDst(addr::canonical(stream.local_addr()?))),
        tracked => Ok(OrigDst(tracked?)),
    }
}

/// Returns a lookup that uses the socket's local address, for modes in which no rule rewrites the address of a connection.
///
/// # Errors
/// The lookup fails if a redirect rule has rewritten the address to `own_port`: the rules are those of another mode. It logs
/// this once.
pub(crate) fn local_addr_lookup(own_port: u16) -> OrigDstLookup {
    let warned = AtomicBool::new(false);
    Arc::new(move |stream, peer| {
        let local = addr::canonical(stream.local_addr()?);
        // A connection to the proxy's own port was dialled by a peer, or redirected by a rule.
        if local.port() == own_port && lookup(stream, peer).is_ok_and(|OrigDst(dialled)| dialled != local) {
            if !warned.swap(true, Ordering::Relaxed) {
                tracing::warn!("refusing connections: {WRONG_MODE_ERROR}");
            }
            return Err(io::Error::other(WRONG_MODE_ERROR));
        }
        Ok(OrigDst(local))
    })
}

const WRONG_MODE_ERROR: &str = "redirect rules send connections here, but TULLE_PROXY_INBOUND_MODE is tproxy; \
     run tulle-init with --inbound-mode tproxy, or unset the variable";

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn the_original_destination_without_a_redirect_is_the_local_address() {
        for (listen_ip, dialled) in [("127.0.0.1", "127.0.0.1"), ("[::]", "127.0.0.1"), ("[::1]", "[::1]")] {
            let Ok(listener) = TcpListener::bind(format!("{listen_ip}:0")).await else {
                continue; // a machine without IPv6
            };
            let port = listener.local_addr().unwrap().port();
            let dialled: SocketAddr = format!("{dialled}:{port}").parse().unwrap();
            let (client, accepted) = tokio::join!(TcpStream::connect(dialled), listener.accept());
            let (stream, peer) = accepted.unwrap();
            assert_eq!(lookup(&stream, peer).unwrap().0, dialled, "{listen_ip}");
            drop(client);
        }
    }
}
