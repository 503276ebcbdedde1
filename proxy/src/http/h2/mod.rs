//! HTTP/2 server and client, directly on the `h2` crate: the future of a request calls it without a channel. One task per
//! connection does the I/O.

pub(super) mod body;
pub(crate) mod client;
mod config;
pub(crate) mod flow_control;
mod header_block;
mod idle_tracker;
pub(crate) mod keep_alive;
mod send_body;
pub(crate) mod server;
pub(crate) mod upgraded_stream;
mod write_batch;

pub(crate) use config::{Http2Config, KeepAlive};
