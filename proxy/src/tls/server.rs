//! Server-side TLS: parses the ClientHello at the start of a connection, and runs the handshake.

use std::io;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tulle_core::identity::Identity;

use crate::net::io::Tcp;
use crate::tls::certificate;
use crate::tls::client_chains::ClientChain;
use crate::tls::credentials::{Alpn, Credentials};
use crate::tls::handshake_failure::HandshakeFailure;

/// The result of parsing the first bytes of a connection.
#[derive(Clone, Debug, Eq, PartialEq)]
#[allow(
    clippy::enum_variant_names,
    reason = "ClientHello is the name of this message in TLS"
)]
pub(crate) enum ParsedHello {
    /// May become a ClientHello; more bytes are needed.
    Incomplete,
    NotTls,
    /// A ClientHello; `sni` is its server name.
    ClientHello {
        sni: Option<String>,
    },
}

/// The properties of the client that the TLS handshake has verified or negotiated.
#[derive(Clone, Debug)]
pub(crate) struct ClientHandshake {
    /// The first DNS or URI name of its certificate that is a valid identity; `None` without a certificate.
    pub client_id: Option<Identity>,
    /// Its certificates; `None` without a certificate.
    pub chain: Option<Arc<ClientChain>>,
    /// The negotiated protocol.
    pub alpn: Alpn,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum AcceptError {
    #[error("this proxy has no certificate yet")]
    NotCertified,
    #[error("the TLS handshake with the client failed ({failure})")]
    Handshake {
        failure: HandshakeFailure,
        #[source]
        source: io::Error,
    },
    #[error("the client's certificate has no name that is a valid identity")]
    NoIdentity,
}

/// Maximum bytes that are read for a ClientHello.
pub(crate) const MAX_HELLO_BYTES: usize = 16 * 1024;

/// Parses a ClientHello at the start of a connection; it may span several records.
///
/// The result is known as soon as the server name is complete. Never `Incomplete` for [`MAX_HELLO_BYTES`] bytes or more.
pub(crate) fn parse_client_hello(bytes: &[u8]) -> ParsedHello {
    let sni = match parse_sni(&mut HandshakeReader {
        records: bytes,
        fragment: &[],
    }) {
        Ok(sni) => sni,
        Err(ParseStop::NotTls) => return ParsedHello::NotTls,
        Err(ParseStop::Incomplete) if bytes.len() >= MAX_HELLO_BYTES => return ParsedHello::NotTls,
        Err(ParseStop::Incomplete) => return ParsedHello::Incomplete,
    };
    ParsedHello::ClientHello {
        sni: sni.and_then(host_name),
    }
}

/// Terminates TLS. A client need not present a certificate. If it presents one, the certificate must chain to the trust anchors
/// and have an identity. There is no timeout; for inbound connections, the callers use `detect_timeout`.
pub(crate) async fn accept<IO>(
    io: IO,
    creds: &Credentials,
    alpn: Alpn,
) -> Result<(TlsStream<IO>, ClientHandshake), AcceptError>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let lifetime = creds.lifetime();
    let config = creds.server_config(alpn).ok_or(AcceptError::NotCertified)?;
    let failed = |source| AcceptError::Handshake {
        failure: HandshakeFailure::from_io_error(&source),
        source,
    };
    let stream = TlsAcceptor::from(config).accept(io).await.map_err(failed)?;
    let (_, session) = stream.get_ref();
    certificate::check_resumed(session, &lifetime.anchors).map_err(failed)?;
    let (client_id, chain) = match session.peer_certificates() {
        Some(certificates @ [leaf, ..]) => {
            let names = certificate::parse(leaf).map(|info| info.names).unwrap_or_default();
            let client_id = names.into_iter().next().ok_or(AcceptError::NoIdentity)?;
            let chain = creds
                .open_client_chain(certificates, &lifetime)
                .map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidData, error)))?;
            (Some(client_id), Some(chain))
        }
        _ => (None, None),
    };
    let alpn = Alpn::from_negotiated(session.alpn_protocol());
    let client_handshake = ClientHandshake { client_id, chain, alpn };
    Ok((stream, client_handshake))
}

/// As [`accept`]. If the handshake fails or is cancelled, the connection ends with a reset, which may follow a TLS alert.
pub(crate) async fn accept_or_reset(
    tcp: Tcp,
    creds: &Credentials,
    alpn: Alpn,
) -> Result<(TlsStream<Tcp>, ClientHandshake), AcceptError> {
    tcp.reset_on_drop();
    let (stream, client_handshake) = accept(tcp, creds, alpn).await?;
    stream.get_ref().0.close_on_drop();
    Ok((stream, client_handshake))
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

/// Why parsing stops without a result.
enum ParseStop {
    Incomplete,
    NotTls,
}

/// Reads the bytes of handshake messages from TLS records.
struct HandshakeReader<'a> {
    /// Records that are not read yet.
    records: &'a [u8],
    /// The rest of the current record.
    fragment: &'a [u8],
}

impl HandshakeReader<'_> {
    fn byte(&mut self) -> Result<u8, ParseStop> {
        self.fill()?;
        let (first, rest) = self.fragment.split_first().ok_or(ParseStop::Incomplete)?;
        self.fragment = rest;
        Ok(*first)
    }

    /// A big-endian number of `bytes` bytes, at most four.
    fn number(&mut self, bytes: u32) -> Result<usize, ParseStop> {
        let mut number = 0;
        for _ in 0..bytes {
            number = number << 8 | usize::from(self.byte()?);
        }
        Ok(number)
    }

    fn skip(&mut self, mut length: usize) -> Result<(), ParseStop> {
        while length > 0 {
            self.fill()?;
            let step = length.min(self.fragment.len());
            self.fragment = &self.fragment[step..];
            length -= step;
        }
        Ok(())
    }

    fn take(&mut self, length: usize) -> Result<Vec<u8>, ParseStop> {
        (0..length).map(|_| self.byte()).collect()
    }

    /// Makes `fragment` non-empty, from the next record if necessary.
    fn fill(&mut self) -> Result<(), ParseStop> {
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
                return Err(ParseStop::NotTls);
            }
        }
        let Some((&[_, _, _, high, low], rest)) = self.records.split_first_chunk() else {
            return Err(ParseStop::Incomplete);
        };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 || length > MAX_RECORD_BYTES {
            return Err(ParseStop::NotTls);
        }
        (self.fragment, self.records) = rest.split_at(length.min(rest.len()));
        if self.fragment.is_empty() {
            Err(ParseStop::Incomplete)
        } else {
            Ok(())
        }
    }
}

/// Parses a ClientHello up to its first host name; `None` if it has none.
fn parse_sni(hello: &mut HandshakeReader<'_>) -> Result<Option<Vec<u8>>, ParseStop> {
    if hello.byte()? != CLIENT_HELLO {
        return Err(ParseStop::NotTls);
    }
    let mut left = hello.number(3)?;
    if left > MAX_HELLO_BYTES {
        return Err(ParseStop::NotTls);
    }
    subtract_length(&mut left, VERSION_AND_RANDOM_BYTES)?;
    hello.skip(VERSION_AND_RANDOM_BYTES)?;
    // Session id, cipher suites and compression methods are byte strings with a length prefix.
    for width in [1, 2, 1] {
        subtract_length(&mut left, width as usize)?;
        let length = hello.number(width)?;
        subtract_length(&mut left, length)?;
        hello.skip(length)?;
    }
    if left == 0 {
        return Ok(None);
    }
    subtract_length(&mut left, 2)?;
    let mut extensions = hello.number(2)?;
    if extensions != left {
        return Err(ParseStop::NotTls);
    }
    while extensions > 0 {
        subtract_length(&mut extensions, 4)?;
        let kind = hello.number(2)?;
        let length = hello.number(2)?;
        subtract_length(&mut extensions, length)?;
        if kind == EXTENSION_SERVER_NAME {
            return parse_server_name_extension(hello, length);
        }
        hello.skip(length)?;
    }
    Ok(None)
}

/// Parses the server name extension, `left` bytes long, up to its first host name.
fn parse_server_name_extension(hello: &mut HandshakeReader<'_>, mut left: usize) -> Result<Option<Vec<u8>>, ParseStop> {
    subtract_length(&mut left, 2)?;
    hello.skip(2)?;
    while left > 0 {
        subtract_length(&mut left, 3)?;
        let kind = hello.byte()?;
        let length = hello.number(2)?;
        subtract_length(&mut left, length)?;
        if kind == NAME_TYPE_HOST_NAME {
            return hello.take(length).map(Some);
        }
        hello.skip(length)?;
    }
    Ok(None)
}

/// Subtracts `length`, the number of bytes that the caller reads next, from the bytes `left` in the enclosing structure.
fn subtract_length(left: &mut usize, length: usize) -> Result<(), ParseStop> {
    *left = left.checked_sub(length).ok_or(ParseStop::NotTls)?;
    Ok(())
}

/// The server name as text; `None` if it cannot be a DNS name.
fn host_name(name: Vec<u8>) -> Option<String> {
    let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    let valid = !name.is_empty() && name.len() <= MAX_NAME_BYTES && name.iter().all(is_allowed);
    if valid { String::from_utf8(name).ok() } else { None }
}

const CONTENT_TYPE_HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const VERSION_AND_RANDOM_BYTES: usize = 34;
const EXTENSION_SERVER_NAME: usize = 0;
const NAME_TYPE_HOST_NAME: u8 = 0;
/// A plaintext record is at most 2^14 bytes (RFC 8446 section 5.1).
const MAX_RECORD_BYTES: usize = 1 << 14;
/// A DNS name has at most 253 characters, and may end in a dot.
const MAX_NAME_BYTES: usize = 254;
