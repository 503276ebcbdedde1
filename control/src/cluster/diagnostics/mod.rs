//! Diagnostics: the numbers of stored objects, and their unserved or unreadable parts, as metrics and for the log.

pub(super) mod ineffective_references;
pub(super) mod object_metrics;
pub(super) mod server_port_names;
