//! Connections to the proxy's own port: mTLS with a transport header that says where they want to go.

use std::{net::SocketAddr, num::NonZeroU16};

use bytes::BytesMut;
use tulle_core::{
    addr::{self, NameAddr, ParseAddrError},
    metrics::Labels,
};

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
    NotAGateway { name: NameAddr },
    #[error(transparent)]
    Name(#[from] ParseAddrError),
}

/// What a transport header asks for.
pub(super) struct Asked {
    /// The name of a service, which only a gateway can serve.
    pub(super) name: Option<NameAddr>,
    port: NonZeroU16,
    pub(super) protocol: Option<SessionProtocol>,
}

impl Asked {
    fn from(header: TransportHeader) -> Result<Self, ParseAddrError> {
        let TransportHeader { name, port, protocol } = header;
        let name = name.map(|name| format!("{name}:{port}").parse()).transpose()?;
        Ok(Self { name, port, protocol })
    }
}

/// Reads the transport header; what follows it stays in front of the stream.
///
/// # Errors
/// There is none, or it asks for what only a gateway can give.
pub(super) async fn header(mut io: Io, is_gateway: bool) -> Result<(Io, Asked), DirectError> {
    let mut bytes = BytesMut::new();
    loop {
        match TransportHeader::decode(&bytes) {
            Decoded::Header(header, used) => {
                let _ = bytes.split_to(used);
                let asked = Asked::from(header)?;
                match asked.name {
                    Some(name) if !is_gateway => return Err(DirectError::NotAGateway { name }),
                    _ => return Ok((io.unread(bytes.freeze()), asked)),
                }
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
pub(super) fn count(families: &Families, asked: &Asked, name: Option<&NameAddr>, tls: &ServerTls) {
    let protocol = match asked.protocol {
        Some(SessionProtocol::Http1) => "http/1",
        Some(SessionProtocol::Http2) => "http/2",
        None => "",
    };
    let labels = Labels::new()
        .with("session_protocol", protocol)
        .with("target_port", asked.port)
        .with("target_name", name.map_or("", |name| &name.name))
        .with("client_id", tls.client_id().map_or("", |id| id.as_str()));
    families.transport_header.get(&labels).inc();
}

/// The application's address that a direct connection means: the address it came to, at the header's port.
pub(super) fn target(local: SocketAddr, asked: &Asked) -> SocketAddr {
    SocketAddr::new(addr::canonical(local).ip(), asked.port.get())
}
