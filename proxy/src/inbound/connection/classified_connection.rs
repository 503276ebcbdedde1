//! A connection whose protocol is known, before it is served.

use std::sync::Arc;

use bytes::Bytes;
use tulle_core::addr::NameAddr;

use crate::{
    http::client::HttpVersion,
    inbound::{connection_addrs::ConnectionAddrs, policy::PortPolicy},
    net::io::Io,
    tls::{client_chains::ClientChain, status::ServerTls},
};

/// The client of a connection, by its addresses and TLS, and the policy of the port that it connects to.
pub(super) struct ClientAndPortPolicy {
    pub(super) addrs: ConnectionAddrs,
    pub(super) tls: ServerTls,
    /// `None` if the client has no certificate.
    pub(super) chain: Option<Arc<ClientChain>>,
    pub(super) port_policy: Arc<PortPolicy>,
}

impl ClientAndPortPolicy {
    /// Whether the current policy permits the client at least one request.
    pub(super) fn is_authorized(&self) -> bool {
        let (client_ip, tls) = (self.addrs.client.0.ip(), self.tls.to_connection_tls());
        self.port_policy
            .current()
            .server_policy
            .permits_some_request(client_ip, tls)
    }
}

/// A connection whose protocol is known.
pub(super) enum ClassifiedConnection {
    Http(ClassifiedHttp),
    Opaque(ClassifiedOpaque),
}

impl ClassifiedConnection {
    /// An opaque connection from which no byte was read.
    pub(super) fn opaque(io: Io, client: ClientAndPortPolicy) -> Self {
        Self::Opaque(ClassifiedOpaque {
            io,
            upstream_io: None,
            client_prefix: Bytes::new(),
            client,
            gateway_name: None,
        })
    }
}

/// An opaque connection.
pub(super) struct ClassifiedOpaque {
    pub(super) io: Io,
    /// The connection to the application, or through the gateway, if it is open already.
    pub(super) upstream_io: Option<Io>,
    /// Bytes already read from the client.
    pub(super) client_prefix: Bytes,
    pub(super) client: ClientAndPortPolicy,
    /// The service in the transport header, if this proxy is a gateway.
    pub(super) gateway_name: Option<NameAddr>,
}

pub(super) struct ClassifiedHttp {
    pub(super) io: Io,
    pub(super) protocol: HttpVersion,
    pub(super) client: ClientAndPortPolicy,
    /// The service in the transport header, if this proxy is a gateway.
    pub(super) gateway_name: Option<NameAddr>,
}
