//! HTTP/1 server and client: message heads (parsed with `httparse`) and body framing.
//!
//! An ambiguous request is refused, and forwarded messages are encoded anew from the parsed form. A connection holds a read
//! buffer only while it has data.

pub(crate) mod client;
mod encode;
mod framing;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(super) mod head;
pub(crate) mod pool;
mod read_buffer;
mod request_body;
pub(crate) mod server;
mod server_connection;
