//! Proves that connections of this namespace reach the proxy's port, by standing in for the proxy.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{getegid, geteuid};
use socket2::{Domain, Socket, Type};

use crate::options::{InboundMode, Options};
use crate::rules::Family;

/// What one family's trial came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Redirected,
    NotRedirected(String),
    /// Nothing was proven, for this reason.
    Skipped(String),
}

/// Dials an address that nobody has, in each family, and sees who answers.
///
/// Of the inbound half, which needs somebody outside, only this is proven: what the application would answer to a client
/// that the proxy dials it as comes back.
#[must_use]
pub fn families(options: &Options) -> Vec<(Family, Verdict)> {
    let families = options.families.each();
    families
        .map(|family| {
            let verdict = trial(options, family).unwrap_or_else(|verdict| verdict);
            match (verdict, options.inbound_mode) {
                (verdict @ Verdict::NotRedirected(_), _) | (verdict, InboundMode::Redirect) => (family, verdict),
                (verdict, InboundMode::Tproxy) => (family, answers(family).err().unwrap_or(verdict)),
            }
        })
        .collect()
}

/// Dials ourselves as a client that nobody is.
fn answers(family: Family) -> Result<(), Verdict> {
    let client = addresses(family)[0];
    let failed = |what: &str, error: io::Error| Verdict::Skipped(format!("{what}: {error}"));
    // The address by which clients know us is the one that would lead to them.
    let local = UdpSocket::bind(SocketAddr::new(unspecified(family), 0)).and_then(|socket| {
        socket.connect(SocketAddr::new(client, PORTS[0]))?;
        socket.local_addr()
    });
    let local = local.map_err(|error| failed("no route", error))?.ip();
    let application = TcpListener::bind((local, 0)).map_err(|error| failed("listening", error))?;
    let listens = application.local_addr().map_err(|error| failed("listening", error))?;
    let dialled = || {
        let socket = Socket::new(Domain::for_address(listens), Type::STREAM, None)?;
        socket.set_ip_transparent_v4(true)?; // of either family
        socket.bind(&SocketAddr::new(client, 0).into())?;
        socket.connect_timeout(&listens.into(), LIMIT)
    };
    dialled().map_err(|error| {
        Verdict::NotRedirected(format!(
            "what {listens} answers to {client} does not come back: {error}"
        ))
    })
}

fn unspecified(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

fn trial(options: &Options, family: Family) -> Result<Verdict, Verdict> {
    let skipped = |reason: String| Verdict::Skipped(reason);
    if options.proxy_uid == Some(geteuid().as_raw()) || options.proxy_gid == Some(getegid().as_raw()) {
        return Err(skipped(
            "this process runs as the proxy, whose connections stay direct".to_owned(),
        ));
    }
    let target = target(options, family).ok_or_else(|| skipped("every address to try stays direct".to_owned()))?;
    let port = options.outbound_port.get();
    let loopback: IpAddr = match family {
        Family::V4 => Ipv4Addr::LOCALHOST.into(),
        Family::V6 => Ipv6Addr::LOCALHOST.into(),
    };
    let listener = TcpListener::bind((loopback, port)).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => skipped(format!("port {port} is held, by the proxy it seems")),
        _ => skipped(format!("listening on {loopback}:{port}: {error}")),
    })?;
    let dialled = match TcpStream::connect_timeout(&target, LIMIT) {
        Ok(stream) => stream
            .local_addr()
            .map_err(|error| Verdict::NotRedirected(error.to_string()))?,
        Err(error) if NO_ROUTE.contains(&error.kind()) => return Err(skipped(format!("no route: {error}"))),
        Err(error) => return Err(Verdict::NotRedirected(format!("dialling {target}: {error}"))),
    };
    // The connection is complete, so if it is ours it waits to be accepted.
    let mut ready = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    let accepted = poll(&mut ready, PollTimeout::from(ACCEPT_LIMIT_MILLIS))
        .ok()
        .filter(|ready| *ready > 0);
    let peer = accepted.and_then(|_| listener.accept().ok()).map(|(_, peer)| peer);
    match peer {
        Some(peer) if peer == dialled => Ok(Verdict::Redirected),
        _ => Err(Verdict::NotRedirected(format!(
            "{target} answered itself, not port {port} here"
        ))),
    }
}

/// Addresses of documentation, which nobody has.
fn addresses(family: Family) -> [IpAddr; 2] {
    match family {
        Family::V4 => [
            Ipv4Addr::new(192, 0, 2, 2).into(),
            Ipv4Addr::new(198, 51, 100, 2).into(),
        ],
        Family::V6 => [
            Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2).into(),
            Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 2).into(),
        ],
    }
}

/// An address that nobody has and that the rules do not leave direct.
fn target(options: &Options, family: Family) -> Option<SocketAddr> {
    let direct = |ip: &IpAddr| options.outbound_skip_nets.iter().any(|net| net.contains(ip));
    let ip = addresses(family).into_iter().find(|ip| !direct(ip))?;
    let port = PORTS
        .into_iter()
        .find(|port| !options.outbound_skip_ports.contains(*port))?;
    Some(SocketAddr::new(ip, port))
}

const PORTS: [u16; 3] = [1404, 20001, 9];
const LIMIT: Duration = Duration::from_secs(2);
const ACCEPT_LIMIT_MILLIS: u16 = 500;
const NO_ROUTE: [io::ErrorKind; 3] = [
    io::ErrorKind::NetworkUnreachable,
    io::ErrorKind::HostUnreachable,
    io::ErrorKind::AddrNotAvailable,
];
