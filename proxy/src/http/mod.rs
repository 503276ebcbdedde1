//! One request type and one response type for both directions and both versions.
//!
//! Servers and clients, the body, header hygiene, errors and the responses made of them. Nothing here decides where a
//! request goes or who may send it.

pub(crate) mod access_log;
pub(crate) mod body;
pub(crate) mod classify;
pub(crate) mod client;
pub(crate) mod error;
pub(crate) mod filters;
pub(crate) mod h1;
pub(crate) mod h2;
pub(crate) mod headers;
pub(crate) mod interim;
pub(crate) mod layers;
pub(crate) mod limits;
mod linger;
pub(crate) mod orig_proto;
pub(crate) mod replay;
pub(crate) mod respond;
pub(crate) mod server;
mod spare;
mod timer;
pub(crate) mod tunnel;
pub(crate) mod upload;
pub(crate) mod websocket;
