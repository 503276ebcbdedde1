//! Publication: the current values and their subscribers, cached encodings, and the metrics of stored objects.

pub(super) mod object_metrics;
pub mod shared_response;
pub(super) mod table;
pub(super) mod undeclared_port_names;
