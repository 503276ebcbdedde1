use std::net::SocketAddr;

use tulle_core::addr::ClientAddr;

/// The two ends of a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::inbound) struct ConnectionAddrs {
    pub(in crate::inbound) client: ClientAddr,
    /// The address that the client dialled: the application's, or the proxy's own for direct connections to a gateway.
    pub(in crate::inbound) target: SocketAddr,
}
