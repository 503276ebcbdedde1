//! The addresses of the client and the target of a connection.

use std::net::SocketAddr;

use tulle_core::addr::ClientAddr;

/// The client of a connection, and the address that the connection is for.
#[derive(Clone, Copy, Debug)]
pub(in crate::inbound) struct ConnectionAddrs {
    pub(in crate::inbound) client: ClientAddr,
    /// The address that the client connects to. For a redirected connection, the dialled address. For a direct connection, the
    /// dialled address with the port of the transport header; until the header is read, and for a gateway, the dialled address
    /// itself.
    pub(in crate::inbound) target: SocketAddr,
}
