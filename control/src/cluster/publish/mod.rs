//! Publication: the current values, their subscribers, and cached encodings.

pub mod published_value;
pub(super) mod table;
