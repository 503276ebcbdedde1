//! Labels and annotations of objects.

use std::sync::Arc;

use crate::resources::interning::{Interner, intern};

/// Names with their values, sorted by name. The list is interned, because most pods have the same labels as other pods.
/// A `BTreeMap` would take about 500 bytes per object, even with one entry or after its last entry was removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StringMap(Arc<[Entry]>);

/// Name and value, both interned.
pub type Entry = (Arc<str>, Arc<str>);

impl StringMap {
    pub fn get(&self, key: &str) -> Option<&str> {
        let found = self.0.binary_search_by(|(other, _)| (**other).cmp(key));
        found.ok().map(|at| &*self.0[at].1)
    }

    pub fn contains_key(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the entries in the order of their names.
    pub fn entries(&self) -> &[Entry] {
        &self.0
    }

    /// Returns names and values in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }
}

/// If a name occurs twice, the later value counts.
impl<K: AsRef<str>, V: AsRef<str>> FromIterator<(K, V)> for StringMap {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let interned = |(key, value): (K, V)| (intern(key.as_ref()), intern(value.as_ref()));
        let mut list: Vec<_> = entries.into_iter().map(interned).collect();
        list.sort_by(|(a, _), (b, _)| a.cmp(b));
        list.dedup_by(|later, earlier| {
            let is_same = later.0 == earlier.0;
            if is_same {
                std::mem::swap(later, earlier);
            }
            is_same
        });
        Self(MAPS.intern(list))
    }
}

static MAPS: Interner<[Entry]> = Interner::new();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_name() {
        let map: StringMap = [("tier", "x"), ("app", "api"), ("app", "web")].into_iter().collect();
        assert_eq!((map.get("app"), map.get("tier")), (Some("web"), Some("x")));
        assert_eq!(map.get("none"), None);
        assert_eq!(map.iter().collect::<Vec<_>>(), [("app", "web"), ("tier", "x")]);
    }
}
