//! What a connection is found to be, before it is served.

use std::sync::Arc;

use bytes::Bytes;
use tulle_core::addr::NameAddr;

use crate::{
    http::client::Protocol,
    inbound::{Peer, policy::Port},
    net::io::Io,
    tls::status::ServerTls,
};

/// What a connection is found to be.
pub(super) enum Start {
    Http(HttpStart),
    Bytes(BytesStart),
}

impl Start {
    /// Bytes of which none have been seen.
    pub(super) fn bytes(io: Io, peer: Peer, tls: ServerTls, port: Arc<Port>) -> Self {
        Self::Bytes(BytesStart {
            io,
            app: None,
            first: Bytes::new(),
            peer,
            tls,
            port,
        })
    }
}

/// Bytes that nobody looks into.
pub(super) struct BytesStart {
    pub(super) io: Io,
    /// The application's side where it was dialled before.
    pub(super) app: Option<Io>,
    /// What the client said meanwhile.
    pub(super) first: Bytes,
    pub(super) peer: Peer,
    pub(super) tls: ServerTls,
    pub(super) port: Arc<Port>,
}

/// HTTP.
pub(super) struct HttpStart {
    pub(super) io: Io,
    pub(super) protocol: Protocol,
    pub(super) peer: Peer,
    pub(super) tls: ServerTls,
    pub(super) port: Arc<Port>,
    /// The name that it is for, at a gateway.
    pub(super) name: Option<NameAddr>,
}
