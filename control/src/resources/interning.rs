//! Interns values that many objects share: names of nodes and ports, labels, service accounts, the ports of pods.
//!
//! A cluster has as many of these values as pods, but few distinct ones.

use std::borrow::Borrow;
use std::hash::Hash;
use std::sync::{Arc, LazyLock};

use ahash::AHashSet;
use parking_lot::Mutex;

/// Keeps one copy of each value.
pub struct Interner<T: ?Sized + 'static>(LazyLock<Mutex<Table<T>>>);

/// The interned values, including some that are no longer referenced.
struct Table<T: ?Sized> {
    entries: AHashSet<Arc<T>>,
    /// Number of entries at which unreferenced values are removed.
    sweep_threshold: usize,
}

impl<T: Eq + Hash + ?Sized> Interner<T> {
    pub const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }

    /// Returns the shared copy of a value.
    pub fn intern(&self, value: impl Borrow<T> + Into<Arc<T>>) -> Arc<T> {
        self.0.lock().get_or_insert(value)
    }
}

impl<T: Eq + Hash + ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the shared copy of a string.
pub fn intern(text: &str) -> Arc<str> {
    STRINGS.intern(text)
}

/// Like [`intern`], for an optional string.
pub fn intern_opt(text: Option<String>) -> Option<Arc<str>> {
    text.map(|text| intern(&text))
}

impl<T: ?Sized> Default for Table<T> {
    fn default() -> Self {
        Self {
            entries: AHashSet::new(),
            sweep_threshold: MIN_SWEEP_THRESHOLD,
        }
    }
}

impl<T: Eq + Hash + ?Sized> Table<T> {
    fn get_or_insert(&mut self, value: impl Borrow<T> + Into<Arc<T>>) -> Arc<T> {
        if let Some(found) = self.entries.get(value.borrow()) {
            return found.clone();
        }
        if self.entries.len() >= self.sweep_threshold {
            self.entries.retain(|value| Arc::strong_count(value) > 1);
            self.sweep_threshold = MIN_SWEEP_THRESHOLD.max(2 * self.entries.len());
        }
        let value = value.into();
        self.entries.insert(value.clone());
        value
    }
}

static STRINGS: Interner<str> = Interner::new();

/// Minimum number of entries at which unreferenced values are removed.
const MIN_SWEEP_THRESHOLD: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_share_one_allocation() {
        assert!(Arc::ptr_eq(&intern("a text"), &intern("a text")));
        assert_eq!(&*intern("a text"), "a text");
        let lists: Interner<[u16]> = Interner::new();
        assert!(Arc::ptr_eq(&lists.intern(vec![1, 2]), &lists.intern(vec![1, 2])));
        assert_eq!(*lists.intern(vec![2]), [2]);
    }

    #[test]
    fn unreferenced_strings_are_removed() {
        let mut texts: Table<str> = Table::default();
        let kept: Vec<_> = (0..100).map(|n| texts.get_or_insert(&*format!("kept {n}"))).collect();
        for n in 0..100_000 {
            texts.get_or_insert(&*format!("dropped {n}"));
        }
        assert!(texts.entries.len() <= MIN_SWEEP_THRESHOLD, "{}", texts.entries.len());
        assert!(kept.iter().all(|text| Arc::ptr_eq(text, &texts.get_or_insert(&**text))));
    }
}
