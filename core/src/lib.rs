//! The few things that every tulle binary needs.
//!
//! Code enters this crate when a second crate needs it, not before.
//! It knows nothing of proxying, of policies or of Kubernetes: values and small servers only.
//! Nothing here reads the environment; the binaries do that and pass values in.

pub mod addr;
pub mod admin;
pub mod authority;
pub mod backoff;
#[cfg(target_os = "linux")]
pub mod caps;
pub mod causes;
pub mod connections;
pub mod descriptors;
pub mod drain;
pub mod due;
pub mod duration;
pub mod identity;
pub mod listener;
pub mod log_limit;
pub mod memory;
pub mod metrics;
pub mod names;
#[cfg(target_os = "linux")]
pub mod netns;
pub mod nets;
pub mod ports;
pub mod probes;
pub mod ready;
pub mod retry;
pub mod telemetry;
