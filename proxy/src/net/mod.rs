//! Sockets and bytes: accepting, dialling, protocol detection, copying.
//!
//! Contains no HTTP semantics and no policy. Connections enter through [`listen`] and [`connect`] and leave as [`io::Io`], the
//! one stream type of the proxy.

pub(crate) mod app_listeners;
pub(crate) mod connect;
pub(crate) mod copy;
pub(crate) mod detect;
pub(crate) mod detect_metrics;
pub(crate) mod first_bytes;
pub(crate) mod io;
pub(crate) mod listen;
pub(crate) mod memory;
pub(crate) mod orig_dst;
mod peer_socket;
pub(crate) mod retirement;
pub(crate) mod socks;
pub(crate) mod tcp_metrics;
pub(crate) mod transparent;
