//! Mutual TLS to a peer with an expected identity.

use std::io;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tulle_core::identity::Identity;

use crate::tls::certificate;
use crate::tls::credentials::{Alpn, Credentials};
use crate::tls::handshake_failure::HandshakeFailure;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum TlsConnectError {
    #[error("{server_name:?} cannot be a TLS server name, expected a DNS name")]
    ServerName { server_name: String },
    #[error("TLS handshake with {server_id} failed ({failure})")]
    Handshake {
        server_id: Identity,
        failure: HandshakeFailure,
        #[source]
        source: io::Error,
    },
    #[error("the peer has the identities [{}], expected {expected}", .presented.join(", "))]
    WrongIdentity { expected: Identity, presented: Vec<String> },
}

/// Encrypts `io` and verifies that the peer has the identity `server_id`.
///
/// `server_name` is sent as SNI. The peer selects its certificate by the SNI, which proves nothing. [`alpn`] returns the
/// negotiated protocol. There is no timeout: callers use one for the TCP connection and the handshake together.
pub(crate) async fn connect<IO>(
    io: IO,
    creds: &Credentials,
    server_id: &Identity,
    server_name: &str,
    alpn: Alpn,
) -> Result<TlsStream<IO>, TlsConnectError>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let name = ServerName::try_from(server_name.to_owned()).map_err(|_| TlsConnectError::ServerName {
        server_name: server_name.to_owned(),
    })?;
    let stream = TlsConnector::from(creds.client_config(alpn))
        .connect(name, io)
        .await
        .map_err(|source| {
            let failure = HandshakeFailure::from_io_error(&source);
            TlsConnectError::Handshake {
                server_id: server_id.clone(),
                failure,
                source,
            }
        })?;
    check_identity(&stream, server_id)?;
    Ok(stream)
}

/// The protocol that the handshake negotiated.
pub(crate) fn alpn<IO>(stream: &TlsStream<IO>) -> Alpn {
    Alpn::from_negotiated(stream.get_ref().1.alpn_protocol())
}

impl TlsConnectError {
    pub(crate) fn failure(&self) -> HandshakeFailure {
        match self {
            Self::ServerName { .. } => HandshakeFailure::Protocol,
            Self::Handshake { failure, .. } => *failure,
            Self::WrongIdentity { .. } => HandshakeFailure::WrongIdentity,
        }
    }
}

fn check_identity<IO>(stream: &TlsStream<IO>, expected: &Identity) -> Result<(), TlsConnectError> {
    let leaf = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let names = leaf
        .and_then(|leaf| certificate::parse(leaf).ok())
        .map(|info| info.names)
        .unwrap_or_default();
    if names.contains(expected) {
        return Ok(());
    }
    let presented = names.iter().map(ToString::to_string).collect();
    Err(TlsConnectError::WrongIdentity {
        expected: expected.clone(),
        presented,
    })
}
