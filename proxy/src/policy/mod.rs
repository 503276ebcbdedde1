//! What the control plane told us: policies of ports and destinations as plain values, and the questions one may ask them.
//!
//! Protobuf enters through `decode/`, which refuses what is incomplete and says why; everything behind it is already valid.
//! Nothing here does I/O or reads a clock: who needs the time or a random number is given it.
//! Policies compare equal when they say the same, so that a repeated update can be dropped.

pub(crate) mod authz;
pub(crate) mod client;
pub(crate) mod decode;
pub(crate) mod endpoint;
pub(crate) mod filter;
pub(crate) mod matches;
pub(crate) mod meta;
pub(crate) mod profile;
pub(crate) mod rate_limit;
pub(crate) mod route;
pub(crate) mod server;
