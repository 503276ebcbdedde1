//! What the control plane told us: policies of ports and destinations as plain values, and the questions one may ask them.
//!
//! Protobuf enters through `decode/`, which refuses what is incomplete and says why; everything behind it is already valid.
//! Nothing here does I/O or reads a clock: who needs the time or a random number is given it.
//! Policies compare equal when they say the same, so that a repeated update can be dropped.

pub mod authz;
pub mod client;
pub mod decode;
pub mod endpoint;
pub mod filter;
pub mod matches;
pub mod meta;
pub mod profile;
pub mod rate_limit;
pub mod route;
pub mod server;
