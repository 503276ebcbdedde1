//! Reference to the object that a policy comes from, for metric labels and logs of proxies.

use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reference {
    /// The name of a built-in default.
    Default(&'static str),
    Object(ObjectRef),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectRef {
    pub group: &'static str,
    pub kind: &'static str,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
    /// `None` if the reference is to the whole object.
    pub port: Option<u16>,
}
