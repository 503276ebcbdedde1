//! Connections to the proxy's own port: mTLS with a transport header that says where they want to go.

use std::net::SocketAddr;

use bytes::BytesMut;
use tulle_core::metrics::Labels;

use crate::{
    inbound::metrics::Families,
    net::{detect, io::Io},
    tls::{
        header::{Decoded, InvalidHeader, SessionProtocol, TransportHeader},
        status::ServerTls,
    },
};

#[derive(Debug, thiserror::Error)]
pub(super) enum DirectError {
    #[error("client closed before its transport header was complete")]
    Closed,
    #[error("reading the transport header")]
    Io(#[source] std::io::Error),
    #[error(transparent)]
    Invalid(#[from] InvalidHeader),
    #[error("{name} can only be reached through a gateway, which this proxy is not")]
    NotAGateway { name: String },
}

/// Reads the transport header; what follows it stays in front of the stream.
///
/// # Errors
/// There is none, or it asks for what only a gateway can give.
pub(super) async fn header(mut io: Io) -> Result<(Io, TransportHeader), DirectError> {
    let mut bytes = BytesMut::new();
    loop {
        match TransportHeader::decode(&bytes) {
            Decoded::Header(header, used) => {
                let _ = bytes.split_to(used);
                if let Some(name) = header.name {
                    return Err(DirectError::NotAGateway { name });
                }
                return Ok((io.unread(bytes.freeze()), header));
            }
            Decoded::Invalid(reason) => return Err(reason.into()),
            Decoded::Incomplete => {}
        }
        if detect::read_some(&mut io, &mut bytes).await.map_err(DirectError::Io)? == 0 {
            return Err(DirectError::Closed);
        }
    }
}

/// Counts a direct connection by what its header says.
pub(super) fn count(families: &Families, header: &TransportHeader, tls: &ServerTls) {
    let protocol = match header.protocol {
        Some(SessionProtocol::Http1) => "http/1",
        Some(SessionProtocol::Http2) => "http/2",
        None => "",
    };
    let labels = Labels::new()
        .with("session_protocol", protocol)
        .with("target_port", header.port)
        .with("target_name", "")
        .with("client_id", tls.client_id().map_or("", |id| id.as_str()));
    families.transport_header.get(&labels).inc();
}

/// The application's address that a direct connection means: the address it came to, at the header's port.
pub(super) fn target(local: SocketAddr, header: &TransportHeader) -> SocketAddr {
    SocketAddr::new(tulle_core::addr::canonical(local).ip(), header.port.get())
}
