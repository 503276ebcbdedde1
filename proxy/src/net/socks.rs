//! SOCKS5 without authentication: the `CONNECT` command to an address or a name.
//!
//! Source: RFC 1928.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use tulle_core::addr::{Addr, ParseAddrError};

/// First byte of every message.
pub(crate) const VERSION: u8 = 5;
/// Selects "no authentication".
pub(crate) const METHOD_NO_AUTHENTICATION: [u8; 2] = [VERSION, 0];

/// The reply code to a client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Succeeded = 0,
    GeneralFailure = 1,
    NotAllowed = 2,
    HostUnreachable = 4,
    ConnectionRefused = 5,
    CommandNotSupported = 7,
    AddressTypeNotSupported = 8,
}

/// Why a client is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SocksError {
    #[error("SOCKS version {0} is not supported, expected 5")]
    Version(u8),
    #[error("the client does not offer method 0 (no authentication)")]
    Methods,
    #[error("command {0} is not supported, expected 1 (CONNECT)")]
    Command(u8),
    #[error("address type {0} is not supported, expected 1 (IPv4), 3 (a name) or 4 (IPv6)")]
    AddressType(u8),
    #[error(transparent)]
    Target(#[from] ParseAddrError),
}

impl Reply {
    /// The encoded reply. Its bound address is always 0.0.0.0:0, so it does not reveal the address that the proxy dials from.
    pub(crate) fn encode(self) -> [u8; 10] {
        [VERSION, self as u8, 0, IPV4, 0, 0, 0, 0, 0, 0]
    }
}

impl SocksError {
    /// The bytes to send to the client before the connection is closed.
    pub(crate) fn reply(&self) -> Vec<u8> {
        match self {
            Self::Version(_) => Vec::new(),
            Self::Methods => vec![VERSION, 0xff],
            Self::Command(_) => Reply::CommandNotSupported.encode().into(),
            Self::AddressType(_) => Reply::AddressTypeNotSupported.encode().into(),
            Self::Target(_) => Reply::HostUnreachable.encode().into(),
        }
    }
}

/// The length of an acceptable greeting; `None` while it is incomplete.
///
/// # Errors
/// The greeting is not SOCKS5, or the client requires authentication.
pub(crate) fn parse_greeting(bytes: &[u8]) -> Result<Option<usize>, SocksError> {
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

/// The target of a request, and the length of the request; `None` while it is incomplete.
///
/// # Errors
/// The request has another command, or its address is invalid.
pub(crate) fn parse_request(bytes: &[u8]) -> Result<Option<(Addr, usize)>, SocksError> {
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
        DOMAIN_NAME => match rest
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
    let target = parse_target(&host, u16::from_be_bytes(*port))?;
    Ok(Some((target, bytes.len() - rest.len())))
}

/// Combines host and port; the host may be an IP address.
fn parse_target(host: &str, port: u16) -> Result<Addr, ParseAddrError> {
    match host.parse() {
        Ok(ip) => SocketAddr::new(ip, port).to_string().parse(),
        Err(_) => format!("{host}:{port}").parse(),
    }
}

const NO_AUTHENTICATION: u8 = 0;
const CONNECT: u8 = 1;
const IPV4: u8 = 1;
const DOMAIN_NAME: u8 = 3;
const IPV6: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_are_accepted_if_they_offer_the_method_without_authentication() {
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
            assert_eq!(parse_greeting(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn targets_can_be_addresses_or_host_names() {
        let v6 = [&b"\x05\x01\x00\x04"[..], &[0xfd], &[0; 14], &[1], b"\x00\x50"].concat();
        for (bytes, expected) in [
            (&b"\x05\x01\x00\x01\x0a\x00\x00\x01\x1f\x90"[..], "10.0.0.1:8080"),
            (&v6, "[fd00::1]:80"),
            (b"\x05\x01\x00\x03\x08Web.shop\x00\x50", "web.shop:80"),
            (b"\x05\x01\x00\x03\x0810.0.0.1\x00\x50", "10.0.0.1:80"),
            (b"\x05\x01\x00\x03\x07fd00::1\x00\x50", "[fd00::1]:80"),
        ] {
            let expected: Addr = expected.parse().unwrap();
            assert_eq!(
                parse_request(bytes),
                Ok(Some((expected.clone(), bytes.len()))),
                "{bytes:?}"
            );
            let more = [bytes, b"GET /"].concat();
            assert_eq!(parse_request(&more), Ok(Some((expected, bytes.len()))), "{more:?}");
            for n in 0..bytes.len() {
                assert_eq!(parse_request(&bytes[..n]), Ok(None), "{n} of {bytes:?}");
            }
        }
    }

    #[test]
    fn refused_requests_get_the_reply_code_of_the_reason() {
        for (bytes, code) in [
            (&b"\x05\x02\x00\x01\x0a\x00\x00\x01\x1f\x90"[..], Some(7)),
            (b"\x05\x03\x00\x01\x0a\x00\x00\x01\x1f\x90", Some(7)),
            (b"\x05\x01\x00\x02\x0a\x00\x00\x01\x1f\x90", Some(8)),
            (b"\x05\x01\x00\x03\x00\x00\x50", Some(4)),
            (b"\x05\x01\x00\x03\x03a b\x00\x50", Some(4)),
            (b"\x05\x01\x00\x03\x03web\x00\x00", Some(4)),
            (b"\x04\x01\x00\x01\x0a\x00\x00\x01\x1f\x90", None),
        ] {
            let reply = parse_request(bytes).unwrap_err().reply();
            assert_eq!(reply.get(1).copied(), code, "{bytes:?}");
        }
    }
}
