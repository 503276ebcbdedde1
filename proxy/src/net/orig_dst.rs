//! What the application dialled, before a redirect rule sent the connection to us.

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

/// How to learn what was dialled; a value, because connections need not come through redirect rules.
pub(crate) type Of = Arc<dyn Fn(&TcpStream, SocketAddr) -> io::Result<OrigDst> + Send + Sync>;

/// Asks the kernel's connection tracking for the address the peer dialled. A connection that is not tracked has been
/// translated by no rule, so that it came to the address that was dialled.
///
/// # Errors
/// The kernel does not say.
///
/// Source: `SO_ORIGINAL_DST` (IPv4) and `IP6T_SO_ORIGINAL_DST` (IPv6). A dual-stack socket answers only the option of
/// the family the peer really used, so the family is taken from the unmapped peer address.
pub(crate) fn of(stream: &TcpStream, peer: SocketAddr) -> io::Result<OrigDst> {
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
        // Nothing is known of this connection, or there is no tracking at all.
        Err(Errno::ENOENT | Errno::ENOPROTOOPT) => Ok(OrigDst(addr::canonical(stream.local_addr()?))),
        tracked => Ok(OrigDst(tracked?)),
    }
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

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn what_no_rule_redirects_has_come_where_it_was_dialled() {
        for (listens, dialled) in [("127.0.0.1", "127.0.0.1"), ("[::]", "127.0.0.1"), ("[::1]", "[::1]")] {
            let Ok(listener) = TcpListener::bind(format!("{listens}:0")).await else {
                continue; // a machine without IPv6
            };
            let port = listener.local_addr().unwrap().port();
            let dialled: SocketAddr = format!("{dialled}:{port}").parse().unwrap();
            let (client, accepted) = tokio::join!(TcpStream::connect(dialled), listener.accept());
            let (stream, peer) = accepted.unwrap();
            assert_eq!(of(&stream, peer).unwrap().0, dialled, "{listens}");
            drop(client);
        }
    }
}
