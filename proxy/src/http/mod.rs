//! HTTP servers and clients, with one request type and one response type for both directions and both versions.
//!
//! Also the body, header sanitizing, and errors as responses. Routing and authorization are in `outbound` and `inbound`.

pub(crate) mod body;
pub(crate) mod client;
pub(crate) mod connection_closer;
pub(crate) mod error;
pub(crate) mod h1;
pub(crate) mod h2;
mod header_map_pool;
pub(crate) mod headers;
pub(crate) mod lifecycle;
mod linger;
pub(crate) mod server;
pub(crate) mod server_config;
pub(crate) mod stack;
mod timer;
pub(crate) mod upgrade;
