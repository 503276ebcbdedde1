//! Clients of the control plane: channels that heal themselves, and streams that become `watch` values.
//!
//! Everything runs on the runtime whose handle is passed in, never on that of the traffic.
//! What messages mean is not known here: callers bring a function that decodes them.

pub mod channel;
pub mod destination;
pub mod dns;
pub mod metrics;
pub mod policies;
pub mod watch;

#[cfg(test)]
mod tests;
