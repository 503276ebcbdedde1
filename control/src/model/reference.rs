//! Reference to the object from which a policy is made, for metrics and proxies.

use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reference {
    /// No object: the named default.
    Default(&'static str),
    Object(ObjectRef),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectRef {
    pub group: &'static str,
    pub kind: &'static str,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
    /// `None` if the reference is not to a port of the object.
    pub port: Option<u16>,
}
