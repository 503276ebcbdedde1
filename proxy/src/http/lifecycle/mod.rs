//! State of a request until its end: deadlines, replay buffer, timing, and outcome.

pub(crate) mod classify;
pub(crate) mod deadlines;
pub(crate) mod replay;
pub(crate) mod request_timing;
pub(crate) mod tee;
