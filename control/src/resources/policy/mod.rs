//! Policy custom resources, one file per kind or pair of kinds, and `reference.rs` for their references. Decoding applies the
//! defaults of the CRD and rejects what admission rejects, so that later code need not validate.

pub mod authentication;
pub mod authorization;
pub mod egress_network;
pub mod rate_limit;
pub mod reference;
pub mod server;
