//! The parts of an injected pod: containers, variables, probes and metadata.

pub(super) mod containers;
pub(super) mod env;
pub(super) mod metadata;
pub(super) mod probes;
