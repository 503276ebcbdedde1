//! Sockets and bytes: accepting, dialling, looking at the first bytes, copying.
//!
//! Knows nothing of HTTP semantics or policy. Connections enter through [`listen`] and [`connect`] and leave as
//! [`io::Io`], the one stream type of the proxy.

pub(crate) mod awaited;
pub(crate) mod connect;
pub(crate) mod copy;
pub(crate) mod counts;
pub(crate) mod detect;
pub(crate) mod detected;
pub(crate) mod first;
pub(crate) mod io;
pub(crate) mod listen;
pub(crate) mod listeners;
pub(crate) mod memory;
pub(crate) mod orig_dst;
pub(crate) mod pause;
mod peer_socket;
pub(crate) mod socks;
pub(crate) mod transparent;
