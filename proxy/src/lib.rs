//! The data plane: a sidecar proxy that carries a workload's traffic, with identity, policy and load balancing.

mod admin;
mod api;
pub mod app;
mod balance;
pub mod config;
pub mod env;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod gateway;
mod http;
mod identity;
mod inbound;
pub mod linkerd_await;
pub mod messages;
mod metrics;
mod net;
mod outbound;
mod policy;
mod tap;
mod tls;
mod trace;
