//! Clients of the control plane: channels that reconnect, and streams that become `watch` values.
//!
//! Everything runs on the runtime whose handle is passed in, never on a worker's. Messages are not interpreted here: callers
//! pass a function that decodes them.

pub(crate) mod channel;
pub(crate) mod destination;
pub(crate) mod dns;
mod happy_eyeballs;
pub(crate) mod metrics;
pub(crate) mod policies;
pub(crate) mod retry_signal;
pub(crate) mod watch;

#[cfg(test)]
pub(crate) mod tests;
