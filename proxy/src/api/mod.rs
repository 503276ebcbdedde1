//! Clients of the control plane: channels that reconnect, and streams that become `watch` values.
//!
//! All tasks run on the runtime whose handle is passed in, never on the runtime of a worker. This module does not interpret
//! messages: callers pass a function that decodes them.

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
