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
use crate::tls::sessions::EndpointSessions;

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

/// The server of a handshake.
#[derive(Clone, Copy)]
pub(crate) struct Server<'a> {
    /// The identity that it must have.
    pub(crate) id: &'a Identity,
    pub(crate) name: &'a str,
    pub(crate) alpn: Alpn,
    /// `None`: each handshake is a full one.
    pub(crate) sessions: Option<&'a EndpointSessions>,
}

/// Encrypts `io` and verifies the identity of the peer.
///
/// The name of the server is sent as SNI, by which the peer selects its certificate. It is not compared with the certificate; only
/// the identity is. [`alpn`] returns the negotiated protocol. There is no timeout: callers use one for the TCP connection and the
/// handshake together.
pub(crate) async fn connect<IO>(
    io: IO,
    creds: &Credentials,
    server: Server<'_>,
) -> Result<TlsStream<IO>, TlsConnectError>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let Server {
        id,
        name,
        alpn,
        sessions,
    } = server;
    let server_name = ServerName::try_from(name.to_owned()).map_err(|_| TlsConnectError::ServerName {
        server_name: name.to_owned(),
    })?;
    let failed = |source| TlsConnectError::Handshake {
        server_id: id.clone(),
        failure: HandshakeFailure::from_io_error(&source),
        source,
    };
    let connector = TlsConnector::from(creds.client_config(alpn, sessions));
    let stream = connector.connect(server_name, io).await.map_err(failed)?;
    let (_, session) = stream.get_ref();
    certificate::check_resumed(session, &creds.anchors().roots()).map_err(failed)?;
    check_identity(&stream, id)?;
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
