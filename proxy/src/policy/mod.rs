//! The policies of ports and destinations that the control plane sends, as plain values, and the queries on them.
//!
//! Protobuf enters through `decode/`, which refuses incomplete messages with a reason; everything after it is valid. Nothing
//! here does I/O or reads a clock: times and random numbers are arguments. Policies with the same content compare equal, so
//! that a repeated update can be dropped.

pub(crate) mod authz;
pub(crate) mod client;
pub(crate) mod cors;
pub(crate) mod decode;
pub(crate) mod endpoint;
pub(crate) mod filter;
pub(crate) mod matches;
pub(crate) mod meta;
pub(crate) mod profile;
pub(crate) mod rate_limit;
pub(crate) mod route;
pub(crate) mod server;
