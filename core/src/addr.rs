//! Socket addresses, DNS names with a port, and types that keep them apart.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use crate::identity::check_dns;

/// The address that an application connected to, before redirection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OrigDst(pub SocketAddr);

/// The address that a connection came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientAddr(pub SocketAddr);

/// A DNS name and a port. The name is in lower case. A trailing dot is kept, because resolvers treat such names as
/// absolute.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NameAddr {
    pub name: Arc<str>,
    pub port: u16,
}

/// The target of a connection: a socket address, or a name that is resolved first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Addr {
    Socket(SocketAddr),
    Name(NameAddr),
}

/// The text is not an [`Addr`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an address: {reason}; expected <ip>:<port>, [<ipv6>]:<port> or <name>:<port>")]
pub struct ParseAddrError {
    text: String,
    reason: &'static str,
}

/// Converts an IPv4-mapped IPv6 address (`::ffff:10.0.0.1`) to IPv4.
///
/// A listener on `[::]` sees mapped addresses of IPv4 peers; policies and labels use the IPv4 form.
pub fn canonical(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip().to_canonical(), addr.port())
}

/// Whether the address is link-local, such as that of a cloud's metadata server (169.254.169.254).
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Whether the address is loopback, unspecified, link-local, multicast or broadcast. The proxy refuses to forward to such an
/// address if a client asks for it by address or by name.
pub fn is_local_or_multicast(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || is_broadcast || is_link_local(ip)
}

impl fmt::Display for OrigDst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ClientAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for NameAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.port)
    }
}

impl FromStr for NameAddr {
    type Err = ParseAddrError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = |reason| ParseAddrError {
            text: text.to_owned(),
            reason,
        };
        let (name, port) = text.rsplit_once(':').ok_or_else(|| fail("it has no port"))?;
        let port = parse_port(port).ok_or_else(|| fail("the port is not a number from 1 to 65535"))?;
        check_dns(name.strip_suffix('.').unwrap_or(name)).map_err(fail)?;
        Ok(Self {
            name: name.to_ascii_lowercase().into(),
            port,
        })
    }
}

impl Addr {
    pub fn port(&self) -> u16 {
        match self {
            Self::Socket(addr) => addr.port(),
            Self::Name(name) => name.port,
        }
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(addr) => addr.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

impl FromStr for Addr {
    type Err = ParseAddrError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse::<SocketAddr>() {
            Ok(addr) if addr.port() == 0 => Err(ParseAddrError {
                text: text.to_owned(),
                reason: "it is not possible to connect to port 0",
            }),
            Ok(addr) => Ok(Self::Socket(addr)),
            Err(_) => text.parse().map(Self::Name),
        }
    }
}

/// Parses a port from 1 to 65535 in plain digits. `u16::from_str` alone also accepts `+80`.
pub(crate) fn parse_port(text: &str) -> Option<u16> {
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_and_multicast_addresses_are_recognized() {
        for (ip, is_local) in [
            ("127.0.0.1", true),
            ("127.1.2.3", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("0.0.0.0", true),
            ("::", true),
            ("169.254.169.254", true),
            ("::ffff:169.254.169.254", true),
            ("fe80::1", true),
            ("224.0.0.1", true),
            ("ff02::1", true),
            ("255.255.255.255", true),
            ("10.0.0.1", false),
            ("192.0.2.1", false),
            ("fd00::1", false),
            ("2001:db8::1", false),
        ] {
            assert_eq!(is_local_or_multicast(ip.parse().unwrap()), is_local, "{ip}");
        }
    }

    #[test]
    fn addresses_and_names_are_distinguished() {
        assert_eq!("10.0.0.1:80".parse(), Ok(Addr::Socket(([10, 0, 0, 1], 80).into())));
        assert_eq!("[::1]:80".parse::<Addr>().unwrap().to_string(), "[::1]:80");
        let name: Addr = "Web.shop.svc.cluster.local.:8086".parse().unwrap();
        assert_eq!(
            name,
            Addr::Name(NameAddr {
                name: "web.shop.svc.cluster.local.".into(),
                port: 8086
            })
        );
        assert_eq!(name.port(), 8086);
    }

    #[test]
    fn a_bad_address_is_refused_with_the_reason() {
        for (text, reason) in [
            ("web", "it has no port"),
            ("web:http", "the port is not a number"),
            ("web:0", "the port is not a number"),
            ("web:+80", "the port is not a number"),
            ("10.0.0.1:0", "port 0"),
            ("10.0.0.300:80", "the last DNS label is a number"),
            ("::1:80", "letters, digits"),
            (":80", "it is empty"),
        ] {
            let err = text.parse::<Addr>().unwrap_err().to_string();
            assert!(err.contains(reason), "{text}: {err}");
        }
    }

    #[test]
    fn mapped_addresses_become_ipv4() {
        let mapped: SocketAddr = "[::ffff:10.0.0.1]:80".parse().unwrap();
        assert_eq!(canonical(mapped), "10.0.0.1:80".parse().unwrap());
        let v6: SocketAddr = "[fd00::1]:80".parse().unwrap();
        assert_eq!(canonical(v6), v6);
    }
}
