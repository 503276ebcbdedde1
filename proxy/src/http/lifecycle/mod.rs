//! What is kept for each request until its end: deadlines, the replay buffer, timing, and the outcome.

pub(crate) mod classify;
pub(crate) mod deadlines;
pub(crate) mod replay;
pub(crate) mod request_timing;
