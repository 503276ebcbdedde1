//! The object behind an answer, as metrics and proxies show it.

use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reference {
    /// No object: a default of ours by name.
    Default(&'static str),
    Object(ObjectRef),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectRef {
    pub group: &'static str,
    pub kind: &'static str,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
    /// None for objects that are not a port of something.
    pub port: Option<u16>,
}
