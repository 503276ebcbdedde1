//! TLS that ends here: find out from the first bytes whether it should, then shake hands.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tulle_core::identity::Identity;

use crate::tls::creds::{Alpn, Credentials};
use crate::tls::verify::{self, HandshakeFailure};

/// What the first bytes of a connection are.
#[derive(Clone, Debug, Eq, PartialEq)]
#[allow(clippy::enum_variant_names, reason = "ClientHello is what TLS calls this message")]
pub(crate) enum Hello {
    /// Could become a ClientHello; more bytes are needed.
    Incomplete,
    NotTls,
    /// TLS; `sni` is the host name that the client asks for.
    ClientHello {
        sni: Option<String>,
    },
}

/// What a handshake told us of the client.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct PeerTls {
    /// The first DNS or URI name of its certificate; none if it showed no certificate.
    pub client_id: Option<Identity>,
    /// What was negotiated of what we offered.
    pub alpn: Alpn,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum AcceptError {
    #[error("there is no certificate of our own yet")]
    NotCertified,
    #[error("TLS handshake with client failed ({failure})")]
    Handshake {
        failure: HandshakeFailure,
        #[source]
        source: io::Error,
    },
    #[error("certificate of client has no name that can be an identity")]
    NoIdentity,
}

/// More than this is not read in search of a ClientHello.
pub(crate) const HELLO_LIMIT: usize = 16 * 1024;

/// Looks for a ClientHello at the start of a connection, over as many records as it takes.
///
/// Answers as soon as the server name is complete. Never `Incomplete` for [`HELLO_LIMIT`] bytes or more.
pub(crate) fn sni(bytes: &[u8]) -> Hello {
    let sni = match client_hello(&mut Handshake {
        records: bytes,
        fragment: &[],
    }) {
        Ok(sni) => sni,
        Err(Stop::NotTls) => return Hello::NotTls,
        Err(Stop::Incomplete) if bytes.len() >= HELLO_LIMIT => return Hello::NotTls,
        Err(Stop::Incomplete) => return Hello::Incomplete,
    };
    Hello::ClientHello {
        sni: sni.and_then(host_name),
    }
}

/// Terminates TLS. A client may come without certificate; if it shows one, it chains to our trust anchors and has an
/// identity. The caller bounds the time this takes.
pub(crate) async fn accept<IO>(io: IO, creds: &Credentials, alpn: Alpn) -> Result<(TlsStream<IO>, PeerTls), AcceptError>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let config = creds.server_config(alpn).ok_or(AcceptError::NotCertified)?;
    let stream = TlsAcceptor::from(config).accept(io).await.map_err(|source| {
        let failure = HandshakeFailure::of(&source);
        AcceptError::Handshake { failure, source }
    })?;
    let (_, session) = stream.get_ref();
    let client_id = match session.peer_certificates().and_then(<[_]>::first) {
        None => None,
        Some(leaf) => {
            let names = verify::facts(leaf).map(|facts| facts.names).unwrap_or_default();
            Some(names.into_iter().next().ok_or(AcceptError::NoIdentity)?)
        }
    };
    let alpn = Alpn::negotiated(session.alpn_protocol());
    Ok((stream, PeerTls { client_id, alpn }))
}

impl AcceptError {
    pub(crate) fn failure(&self) -> HandshakeFailure {
        match self {
            Self::NotCertified => HandshakeFailure::NotCertified,
            Self::Handshake { failure, .. } => *failure,
            Self::NoIdentity => HandshakeFailure::NoIdentity,
        }
    }
}

/// Why no answer can be given yet, or ever.
enum Stop {
    Incomplete,
    NotTls,
}

/// The handshake messages inside TLS records, without the record headers.
struct Handshake<'a> {
    records: &'a [u8],
    fragment: &'a [u8],
}

impl Handshake<'_> {
    fn byte(&mut self) -> Result<u8, Stop> {
        self.fill()?;
        let (first, rest) = self.fragment.split_first().ok_or(Stop::Incomplete)?;
        self.fragment = rest;
        Ok(*first)
    }

    /// A big-endian number of `bytes` bytes, at most four.
    fn number(&mut self, bytes: u32) -> Result<usize, Stop> {
        let mut number = 0;
        for _ in 0..bytes {
            number = number << 8 | usize::from(self.byte()?);
        }
        Ok(number)
    }

    fn skip(&mut self, mut length: usize) -> Result<(), Stop> {
        while length > 0 {
            self.fill()?;
            let step = length.min(self.fragment.len());
            self.fragment = &self.fragment[step..];
            length -= step;
        }
        Ok(())
    }

    fn take(&mut self, length: usize) -> Result<Vec<u8>, Stop> {
        (0..length).map(|_| self.byte()).collect()
    }

    /// Makes `fragment` non-empty, from the next record if need be.
    fn fill(&mut self) -> Result<(), Stop> {
        if !self.fragment.is_empty() {
            return Ok(());
        }
        for (index, byte) in self.records.iter().take(3).enumerate() {
            let fits = match index {
                0 => *byte == CONTENT_TYPE_HANDSHAKE,
                1 => *byte == 3,
                _ => (1..=3).contains(byte),
            };
            if !fits {
                return Err(Stop::NotTls);
            }
        }
        let Some((&[_, _, _, high, low], rest)) = self.records.split_first_chunk() else {
            return Err(Stop::Incomplete);
        };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 || length > RECORD_LIMIT {
            return Err(Stop::NotTls);
        }
        (self.fragment, self.records) = rest.split_at(length.min(rest.len()));
        if self.fragment.is_empty() {
            Err(Stop::Incomplete)
        } else {
            Ok(())
        }
    }
}

/// Reads a ClientHello up to its first host name; `None` if it has none.
fn client_hello(hello: &mut Handshake<'_>) -> Result<Option<Vec<u8>>, Stop> {
    if hello.byte()? != CLIENT_HELLO {
        return Err(Stop::NotTls);
    }
    let mut left = hello.number(3)?;
    if left > HELLO_LIMIT {
        return Err(Stop::NotTls);
    }
    spend(&mut left, VERSION_AND_RANDOM)?;
    hello.skip(VERSION_AND_RANDOM)?;
    // Session id, cipher suites and compression methods are lists of bytes behind their length.
    for width in [1, 2, 1] {
        spend(&mut left, width as usize)?;
        let length = hello.number(width)?;
        spend(&mut left, length)?;
        hello.skip(length)?;
    }
    if left == 0 {
        return Ok(None);
    }
    spend(&mut left, 2)?;
    let mut extensions = hello.number(2)?;
    if extensions != left {
        return Err(Stop::NotTls);
    }
    while extensions > 0 {
        spend(&mut extensions, 4)?;
        let kind = hello.number(2)?;
        let length = hello.number(2)?;
        spend(&mut extensions, length)?;
        if kind == EXTENSION_SERVER_NAME {
            return server_name(hello, length);
        }
        hello.skip(length)?;
    }
    Ok(None)
}

/// Reads the server name extension, `left` bytes long, up to its first host name.
fn server_name(hello: &mut Handshake<'_>, mut left: usize) -> Result<Option<Vec<u8>>, Stop> {
    spend(&mut left, 2)?;
    hello.skip(2)?;
    while left > 0 {
        spend(&mut left, 3)?;
        let kind = hello.byte()?;
        let length = hello.number(2)?;
        spend(&mut left, length)?;
        if kind == NAME_TYPE_HOST_NAME {
            return hello.take(length).map(Some);
        }
        hello.skip(length)?;
    }
    Ok(None)
}

/// Takes `length` from what an enclosing length leaves.
fn spend(left: &mut usize, length: usize) -> Result<(), Stop> {
    *left = left.checked_sub(length).ok_or(Stop::NotTls)?;
    Ok(())
}

fn host_name(name: Vec<u8>) -> Option<String> {
    let plausible = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    let valid = !name.is_empty() && name.len() <= NAME_LIMIT && name.iter().all(plausible);
    if valid { String::from_utf8(name).ok() } else { None }
}

const CONTENT_TYPE_HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const VERSION_AND_RANDOM: usize = 34;
const EXTENSION_SERVER_NAME: usize = 0;
const NAME_TYPE_HOST_NAME: u8 = 0;
/// A plaintext record is at most 2^14 bytes (RFC 8446 section 5.1).
const RECORD_LIMIT: usize = 1 << 14;
/// A DNS name is at most 253 characters, and may end in a dot.
const NAME_LIMIT: usize = 254;
