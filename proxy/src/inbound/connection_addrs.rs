use std::net::SocketAddr;

use tulle_core::addr::ClientAddr;

/// The two ends of a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::inbound) struct ConnectionAddrs {
    pub(in crate::inbound) client: ClientAddr,
    /// The application's address, as the client dialled it.
    pub(in crate::inbound) target: SocketAddr,
}
