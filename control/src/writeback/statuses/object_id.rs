//! The key of an object: its kind and its name.

use crate::resources::Kind;
use crate::resources::meta::NamespacedName;

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ObjectId {
    pub(super) kind: Kind,
    pub(super) name: NamespacedName,
}

impl ObjectId {
    pub(super) fn new(kind: Kind, name: NamespacedName) -> Self {
        Self { kind, name }
    }
}
