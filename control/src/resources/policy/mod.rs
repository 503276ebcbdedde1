//! Policy custom resources, one file a kind. Decoding applies the CRD's defaults and refuses what admission refuses,
//! so that nothing deeper validates again.

pub mod authentication;
pub mod authorization;
pub mod egress_network;
pub mod rate_limit;
pub mod reference;
pub mod server;
