//! Echo servers, a load generator, and measurements of tulle and other proxies.

pub mod cli;
pub mod conformance;
pub mod control_scale;
pub mod load;
pub mod mirror_scale;
pub mod run;
mod scale;
pub mod serve;

/// The echo service of `proto/echo.proto`.
#[allow(clippy::all, clippy::too_many_lines, unreachable_pub, unused_qualifications)]
mod echo {
    tonic::include_proto!("tulle.bench");
}
