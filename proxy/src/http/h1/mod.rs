//! HTTP/1 on the wire, for both roles: heads on `httparse`, the framings of bodies, our server and our client.
//!
//! Framing is strict towards clients: a message is read in one way or refused, and what is passed on is written anew
//! from the parsed form. A connection holds a buffer only while there is data.

pub(crate) mod client;
mod framing;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(super) mod head;
pub(crate) mod pool;
mod read;
pub(crate) mod server;
mod write;
