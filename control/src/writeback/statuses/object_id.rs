//! The key of an object: its kind and its name.

use crate::resources::Kind;
use crate::resources::meta::Name;

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ObjectId {
    pub(super) kind: Kind,
    pub(super) name: Name,
}

impl ObjectId {
    pub(super) fn new(kind: Kind, name: Name) -> Self {
        Self { kind, name }
    }
}
