//! Clients of the control plane: channels that heal themselves, and streams that become `watch` values.
//!
//! Everything runs on the runtime whose handle is passed in, never on that of the traffic.
//! What messages mean is not known here: callers bring a function that decodes them.

mod attempts;
pub(crate) mod channel;
pub(crate) mod destination;
pub(crate) mod dns;
pub(crate) mod metrics;
pub(crate) mod policies;
pub(crate) mod retry;
pub(crate) mod watch;

#[cfg(test)]
pub(crate) mod tests;
