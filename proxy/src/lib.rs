//! The data plane: a sidecar that carries a workload's traffic with identity, policy and balancing.

pub mod policy;
pub mod tls;
mod http;
mod metrics;
mod net;
