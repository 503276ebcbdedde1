//! Publication: the current values and their subscribers, cached encodings, and the metrics of stored objects.

pub(super) mod object_metrics;
pub mod published_value;
pub(super) mod table;
pub(super) mod undeclared_port_names;
pub(super) mod unresolved_references;
