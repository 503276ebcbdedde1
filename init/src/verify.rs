//! Checks that connections of this namespace reach the proxy's port, by listening there in place of the proxy.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{getegid, geteuid};
use socket2::{Domain, Socket, Type};

use crate::options::{Family, InboundMode, Options};

/// The result for one family.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Redirected,
    NotRedirected(String),
    /// The check could not run, for this reason.
    Skipped(String),
}

/// Connects to an unused address in each family, and checks that a listener of this process accepts.
///
/// The inbound direction would need a client outside. Only one part of it is checked, in tproxy mode: the replies of the
/// application to a connection from a client's address are routed back.
#[must_use]
pub fn verify_families(options: &Options) -> Vec<(Family, Verdict)> {
    let verify = |family| {
        let outbound = verify_outbound(options, family);
        if options.inbound_mode == InboundMode::Redirect || matches!(outbound, Verdict::NotRedirected(_)) {
            return (family, outbound);
        }
        match verify_replies(family) {
            Verdict::Redirected => (family, outbound),
            failed => (family, failed),
        }
    };
    options.families.redirected().map(verify).collect()
}

/// Connects to a local listener from an unused client address. This succeeds only if the listener's replies are routed back.
fn verify_replies(family: Family) -> Verdict {
    let client = unused_addresses(family)[0];
    // The local address that would be used towards the client.
    let local = UdpSocket::bind(SocketAddr::new(unspecified(family), 0)).and_then(|socket| {
        socket.connect(SocketAddr::new(client, TEST_PORTS[0]))?;
        socket.local_addr()
    });
    let local = match local {
        Ok(addr) => addr.ip(),
        Err(error) => return Verdict::Skipped(format!("no route: {error}")),
    };
    let application = TcpListener::bind((local, 0)).and_then(|listener| Ok((listener.local_addr()?, listener)));
    let (application_addr, _listener) = match application {
        Ok(application) => application,
        Err(error) => return Verdict::Skipped(format!("listening: {error}")),
    };
    let connect = || {
        let socket = Socket::new(Domain::for_address(application_addr), Type::STREAM, None)?;
        socket.set_ip_transparent_v4(true)?; // applies to both families
        socket.bind(&SocketAddr::new(client, 0).into())?;
        socket.connect_timeout(&application_addr.into(), CONNECT_TIMEOUT)
    };
    match connect() {
        Ok(()) => Verdict::Redirected,
        Err(error) => Verdict::NotRedirected(format!(
            "replies of {application_addr} to {client} are not routed back: {error}"
        )),
    }
}

fn unspecified(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Connects to an unused address while listening on the proxy's outbound port.
fn verify_outbound(options: &Options, family: Family) -> Verdict {
    if options.proxy_uid == Some(geteuid().as_raw()) || options.proxy_gid == Some(getegid().as_raw()) {
        return Verdict::Skipped(
            "this process runs as the proxy's user or group, whose connections are not redirected".to_owned(),
        );
    }
    let Some(target) = target(options, family) else {
        return Verdict::Skipped("every test address is skipped by the rules".to_owned());
    };
    let port = options.outbound_port.get();
    let loopback: IpAddr = match family {
        Family::V4 => Ipv4Addr::LOCALHOST.into(),
        Family::V6 => Ipv6Addr::LOCALHOST.into(),
    };
    let listen_addr = SocketAddr::new(loopback, port);
    let listener = match TcpListener::bind(listen_addr) {
        Ok(listener) => listener,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            return Verdict::Skipped(format!("port {port} is in use, probably by the proxy"));
        }
        Err(error) => return Verdict::Skipped(format!("listening on {listen_addr}: {error}")),
    };
    let client = match TcpStream::connect_timeout(&target, CONNECT_TIMEOUT) {
        Ok(stream) => stream.local_addr(),
        Err(error) if NO_ROUTE.contains(&error.kind()) => return Verdict::Skipped(format!("no route: {error}")),
        Err(error) => return Verdict::NotRedirected(format!("dialling {target}: {error}")),
    };
    // The handshake is complete, so a redirected connection is already in the accept queue.
    let mut ready = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    let accepted = poll(&mut ready, PollTimeout::from(ACCEPT_TIMEOUT_MILLIS))
        .ok()
        .filter(|ready| *ready > 0);
    let peer = accepted.and_then(|_| listener.accept().ok()).map(|(_, peer)| peer);
    match (client, peer) {
        (Ok(client), Some(peer)) if peer == client => Verdict::Redirected,
        (Err(error), _) => Verdict::NotRedirected(error.to_string()),
        _ => Verdict::NotRedirected(format!(
            "the connection to {target} did not arrive at port {port} of this namespace"
        )),
    }
}

/// Addresses for documentation (RFC 5737, RFC 3849, RFC 9637), which are not in use.
fn unused_addresses(family: Family) -> [IpAddr; 2] {
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

/// An unused address that the rules redirect.
fn target(options: &Options, family: Family) -> Option<SocketAddr> {
    let is_skipped = |ip: &IpAddr| options.outbound_skip_nets.iter().any(|net| net.contains(ip));
    let ip = unused_addresses(family).into_iter().find(|ip| !is_skipped(ip))?;
    let port = TEST_PORTS
        .into_iter()
        .find(|port| !options.outbound_skip_ports.contains(*port))?;
    Some(SocketAddr::new(ip, port))
}

/// Destination ports of the test; the first that the options do not skip is used. 1404 is the default of the validator, 20001 the
/// port that the injector gives it, and 9 the port of the discard protocol.
const TEST_PORTS: [u16; 3] = [1404, 20001, 9];
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const ACCEPT_TIMEOUT_MILLIS: u16 = 500;
const NO_ROUTE: [io::ErrorKind; 3] = [
    io::ErrorKind::NetworkUnreachable,
    io::ErrorKind::HostUnreachable,
    io::ErrorKind::AddrNotAvailable,
];
