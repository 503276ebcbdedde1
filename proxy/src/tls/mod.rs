//! Credentials and handshakes: who we are, whom we accept, and what a connection learned about its peer.
//!
//! A certificate comes in through [`creds::Credentials`], which swaps leaf, key and trust anchors as one; handshakes
//! read one snapshot of it. Nothing here decides whether a peer may do something: that is policy.
//! There is no session resumption, because a resumed session would outlive the certificate it was checked with.

mod chain;
pub(crate) mod client;
pub(crate) mod creds;
pub(crate) mod header;
pub(crate) mod server;
mod shown;
pub(crate) mod status;
pub(crate) mod verify;

#[cfg(test)]
pub(crate) mod tests;
