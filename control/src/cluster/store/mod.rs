//! The objects of a cluster, and the access to them by key.

pub(super) mod objects;
pub(super) mod reader;
