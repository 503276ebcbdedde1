//! Credentials and handshakes: the proxy's identity, the peers it accepts, and the verified identity of each peer.
//!
//! A certificate enters through [`credentials::Credentials`], which replaces leaf, key and trust anchors together; a handshake
//! uses one snapshot. Authorization is not decided here, but by policy.
//!
//! Sessions are resumed only on connections with a transport header. After the credentials of either side are replaced, its old
//! sessions cannot be resumed. At each resumption, the validity period of the peer's certificates is checked again.
//!
//! Open connections: [`client_chains`] has the certificates of clients, and tells when the trust anchors no longer verify them;
//! [`lifetime`] limits the use of connections to servers.

mod certificate;
mod chain;
pub(crate) mod client;
pub(crate) mod client_chains;
pub(crate) mod credentials;
mod debug;
pub(crate) mod handshake_failure;
pub(crate) mod header;
pub(crate) mod lifetime;
pub(crate) mod server;
pub(crate) mod sessions;
pub(crate) mod status;

#[cfg(test)]
pub(crate) mod tests;
