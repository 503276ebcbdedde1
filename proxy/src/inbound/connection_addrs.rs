use std::net::SocketAddr;

use tulle_core::addr::ClientAddr;

/// The two ends of a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::inbound) struct ConnectionAddrs {
    pub(in crate::inbound) client: ClientAddr,
    /// The address that the connection is for. Redirected connections: the dialled one. Direct connections: the dialled one
    /// with the port of the transport header; unchanged for a gateway, and until the header is read.
    pub(in crate::inbound) target: SocketAddr,
}
