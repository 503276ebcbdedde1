//! Workloads and measurements: echo servers, an open-loop load generator, and the reference scenario against other proxies.

pub mod conformance;
pub mod control_scale;
pub mod load;
pub mod run;
pub mod serve;

/// The echo service of `proto/echo.proto`.
#[allow(clippy::all, unreachable_pub, unused_qualifications)]
mod echo {
    tonic::include_proto!("tulle.bench");
}
