//! The settings of one pod: its annotations and ports.

pub(super) mod overrides;
pub(super) mod ports;
