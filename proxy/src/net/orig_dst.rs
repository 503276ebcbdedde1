//! What the application dialled, before a redirect rule sent the connection to us.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use nix::sys::socket::{getsockopt, sockopt};
use tokio::net::TcpStream;
use tulle_core::addr::{self, OrigDst};

/// How to learn what was dialled; a value, because connections need not come through redirect rules.
pub(crate) type Of = Arc<dyn Fn(&TcpStream, SocketAddr) -> io::Result<OrigDst> + Send + Sync>;

/// Asks the kernel's connection tracking for the address the peer dialled.
///
/// # Errors
/// The socket has no tracked connection: it was not redirected and conntrack is off.
///
/// Source: `SO_ORIGINAL_DST` (IPv4) and `IP6T_SO_ORIGINAL_DST` (IPv6). A dual-stack socket answers only the option of
/// the family the peer really used, so the family is taken from the unmapped peer address.
pub(crate) fn of(stream: &TcpStream, peer: SocketAddr) -> io::Result<OrigDst> {
    let dialled = match addr::canonical(peer) {
        SocketAddr::V4(_) => {
            let raw = getsockopt(stream, sockopt::OriginalDst)?;
            let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
            SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)))
        }
        SocketAddr::V6(_) => {
            let raw = getsockopt(stream, sockopt::Ip6tOriginalDst)?;
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            SocketAddr::V6(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), 0, 0))
        }
    };
    Ok(OrigDst(dialled))
}

/// Takes the address of the socket for what was dialled, as it is where connections are not translated.
///
/// # Errors
/// The connection was translated to `own_port` all the same: the rules are those of the other mode. Told once.
pub(crate) fn untranslated(own_port: u16) -> Of {
    let told = AtomicBool::new(false);
    Arc::new(move |stream, peer| {
        let local = addr::canonical(stream.local_addr()?);
        // What is for our own port was sent there by a peer, or by rules.
        if local.port() == own_port && of(stream, peer).is_ok_and(|OrigDst(dialled)| dialled != local) {
            if !told.swap(true, Ordering::Relaxed) {
                tracing::warn!("refusing connections: {REDIRECTED}");
            }
            return Err(io::Error::other(REDIRECTED));
        }
        Ok(OrigDst(local))
    })
}

const REDIRECTED: &str = "rules redirect here, but TULLE_PROXY_INBOUND_MODE is tproxy; \
     run tulle-init with --inbound-mode tproxy, or unset the variable";
