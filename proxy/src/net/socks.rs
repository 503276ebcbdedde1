//! SOCKS5 without authentication, as far as a connection to an address or a name needs it.
//!
//! Source: RFC 1928.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use tulle_core::addr::{Addr, ParseAddrError};

/// First byte of everything that either side says.
pub(crate) const VERSION: u8 = 5;
/// Says that no authentication is wanted.
pub(crate) const ACCEPTED: [u8; 2] = [VERSION, 0];

/// What a client is told of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Succeeded = 0,
    Failed = 1,
    Forbidden = 2,
    HostUnreachable = 4,
    Refused = 5,
    NoSuchCommand = 7,
    NoSuchAddressType = 8,
}

/// Why a client is sent away.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SocksError {
    #[error("SOCKS version {0} is not spoken here; expected 5")]
    Version(u8),
    #[error("it offers no way to go on without authentication")]
    Methods,
    #[error("command {0} is not carried out here; expected 1, CONNECT")]
    Command(u8),
    #[error("address type {0} is not known; expected 1 (IPv4), 3 (a name) or 4 (IPv6)")]
    AddressType(u8),
    #[error(transparent)]
    Target(#[from] ParseAddrError),
}

impl Reply {
    /// Which address we connected from is nobody's business.
    pub(crate) fn bytes(self) -> [u8; 10] {
        [VERSION, self as u8, 0, IPV4, 0, 0, 0, 0, 0, 0]
    }
}

impl SocksError {
    /// What the client is sent before the connection closes.
    pub(crate) fn answer(&self) -> Vec<u8> {
        match self {
            Self::Version(_) => Vec::new(),
            Self::Methods => vec![VERSION, 0xff],
            Self::Command(_) => Reply::NoSuchCommand.bytes().into(),
            Self::AddressType(_) => Reply::NoSuchAddressType.bytes().into(),
            Self::Target(_) => Reply::HostUnreachable.bytes().into(),
        }
    }
}

/// The length of a greeting that we can accept; `None` while it is not complete.
///
/// # Errors
/// It is not SOCKS5, or the client wants to authenticate itself.
pub(crate) fn greeting(bytes: &[u8]) -> Result<Option<usize>, SocksError> {
    let Some((&version, rest)) = bytes.split_first() else {
        return Ok(None);
    };
    if version != VERSION {
        return Err(SocksError::Version(version));
    }
    let Some((&n_methods, rest)) = rest.split_first() else {
        return Ok(None);
    };
    let Some(methods) = rest.get(..usize::from(n_methods)) else {
        return Ok(None);
    };
    match methods.contains(&NO_AUTHENTICATION) {
        true => Ok(Some(2 + methods.len())),
        false => Err(SocksError::Methods),
    }
}

/// Where a request wants to connect to, and its length; `None` while it is not complete.
///
/// # Errors
/// It wants something else, or its address is none.
pub(crate) fn request(bytes: &[u8]) -> Result<Option<(Addr, usize)>, SocksError> {
    let Some((&[version, command, _, kind], rest)) = bytes.split_first_chunk() else {
        return Ok(None);
    };
    if version != VERSION {
        return Err(SocksError::Version(version));
    }
    if command != CONNECT {
        return Err(SocksError::Command(command));
    }
    let (host, rest) = match kind {
        IPV4 => match rest.split_first_chunk::<4>() {
            Some((ip, rest)) => (Ipv4Addr::from(*ip).to_string(), rest),
            None => return Ok(None),
        },
        IPV6 => match rest.split_first_chunk::<16>() {
            Some((ip, rest)) => (Ipv6Addr::from(*ip).to_string(), rest),
            None => return Ok(None),
        },
        NAME => match rest
            .split_first()
            .and_then(|(n, rest)| rest.split_at_checked((*n).into()))
        {
            Some((name, rest)) => (String::from_utf8_lossy(name).into_owned(), rest),
            None => return Ok(None),
        },
        other => return Err(SocksError::AddressType(other)),
    };
    let Some((port, rest)) = rest.split_first_chunk() else {
        return Ok(None);
    };
    let target = target(&host, u16::from_be_bytes(*port))?;
    Ok(Some((target, bytes.len() - rest.len())))
}

/// A host and a port as one; addresses may be written as names.
fn target(host: &str, port: u16) -> Result<Addr, ParseAddrError> {
    match host.parse() {
        Ok(ip) => SocketAddr::new(ip, port).to_string().parse(),
        Err(_) => format!("{host}:{port}").parse(),
    }
}

const NO_AUTHENTICATION: u8 = 0;
const CONNECT: u8 = 1;
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_are_accepted_where_nobody_has_to_authenticate_himself() {
        for (bytes, expected) in [
            (&b"\x05\x01\x00"[..], Ok(Some(3))),
            (b"\x05\x03\x02\x01\x00\x05\x01", Ok(Some(5))),
            (b"", Ok(None)),
            (b"\x05", Ok(None)),
            (b"\x05\x02\x00", Ok(None)),
            (b"\x05\x01\x02", Err(SocksError::Methods)),
            (b"\x05\x00", Err(SocksError::Methods)),
            (b"\x04\x01\x00\x50", Err(SocksError::Version(4))),
        ] {
            assert_eq!(greeting(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn requests_name_addresses_and_names() {
        let v6 = [&b"\x05\x01\x00\x04"[..], &[0xfd], &[0; 14], &[1], b"\x00\x50"].concat();
        for (bytes, expected) in [
            (&b"\x05\x01\x00\x01\x0a\x00\x00\x01\x1f\x90"[..], "10.0.0.1:8080"),
            (&v6, "[fd00::1]:80"),
            (b"\x05\x01\x00\x03\x08Web.shop\x00\x50", "web.shop:80"),
            (b"\x05\x01\x00\x03\x0810.0.0.1\x00\x50", "10.0.0.1:80"),
            (b"\x05\x01\x00\x03\x07fd00::1\x00\x50", "[fd00::1]:80"),
        ] {
            let expected: Addr = expected.parse().unwrap();
            assert_eq!(request(bytes), Ok(Some((expected.clone(), bytes.len()))), "{bytes:?}");
            let more = [bytes, b"GET /"].concat();
            assert_eq!(request(&more), Ok(Some((expected, bytes.len()))), "{more:?}");
            for n in 0..bytes.len() {
                assert_eq!(request(&bytes[..n]), Ok(None), "{n} of {bytes:?}");
            }
        }
    }

    #[test]
    fn what_cannot_be_done_is_told_as_the_protocol_has_it() {
        for (bytes, code) in [
            (&b"\x05\x02\x00\x01\x0a\x00\x00\x01\x1f\x90"[..], Some(7)),
            (b"\x05\x03\x00\x01\x0a\x00\x00\x01\x1f\x90", Some(7)),
            (b"\x05\x01\x00\x02\x0a\x00\x00\x01\x1f\x90", Some(8)),
            (b"\x05\x01\x00\x03\x00\x00\x50", Some(4)),
            (b"\x05\x01\x00\x03\x03a b\x00\x50", Some(4)),
            (b"\x05\x01\x00\x03\x03web\x00\x00", Some(4)),
            (b"\x04\x01\x00\x01\x0a\x00\x00\x01\x1f\x90", None),
        ] {
            let answer = request(bytes).unwrap_err().answer();
            assert_eq!(answer.get(1).copied(), code, "{bytes:?}");
        }
    }
}
