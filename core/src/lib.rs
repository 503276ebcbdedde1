//! Code that several tulle binaries share: value types, names, limits, and the admin server.
//!
//! Code moves into this crate when a second crate needs it, not before. The crate has no logic of the proxy or the control plane;
//! names, probes and failure causes are here because several binaries share them. It does not read the environment: the binaries
//! do, and pass values in.

pub mod addr;
pub mod admin;
pub mod backoff;
#[cfg(target_os = "linux")]
pub mod capabilities;
pub mod causes;
pub mod connections;
pub mod descriptors;
pub mod dns_names;
pub mod drain;
pub mod duration;
pub mod error_chain;
pub mod fair_budget;
pub mod identity;
pub mod issuer_constraints;
pub mod listener;
pub mod log_capture;
pub mod log_limit;
pub mod logging;
pub mod memory;
pub mod metrics;
pub mod names;
#[cfg(target_os = "linux")]
pub mod netns;
pub mod networks;
pub mod open_responses;
pub mod per_client_limiter;
pub mod ports;
pub mod probes;
pub mod readiness;
pub mod request_body;
pub mod retry;
pub mod wall_clock;
