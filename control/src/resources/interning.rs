//! Interns strings that many objects share: names of nodes and ports, labels, service accounts.
//!
//! A cluster has as many of these strings as pods, but few distinct values.

use std::sync::{Arc, LazyLock};

use ahash::AHashSet;
use parking_lot::Mutex;

/// The interned strings, including some that are no longer referenced.
#[derive(Default)]
struct Interner {
    entries: AHashSet<Arc<str>>,
    /// Number of entries at which unreferenced strings are removed.
    sweep_threshold: usize,
}

/// Returns the shared copy of a string.
pub fn intern(text: &str) -> Arc<str> {
    INTERNER.lock().get_or_insert(text)
}

/// Like [`intern`], for an optional string.
pub fn intern_opt(text: Option<String>) -> Option<Arc<str>> {
    text.map(|text| intern(&text))
}

impl Interner {
    fn get_or_insert(&mut self, text: &str) -> Arc<str> {
        if let Some(found) = self.entries.get(text) {
            return found.clone();
        }
        if self.entries.len() >= self.sweep_threshold {
            self.entries.retain(|text| Arc::strong_count(text) > 1);
            self.sweep_threshold = MIN_SWEEP_THRESHOLD.max(2 * self.entries.len());
        }
        let text: Arc<str> = text.into();
        self.entries.insert(text.clone());
        text
    }
}

static INTERNER: LazyLock<Mutex<Interner>> = LazyLock::new(Mutex::default);

/// Smallest number of entries that is worth a sweep.
const MIN_SWEEP_THRESHOLD: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_strings_share_one_allocation() {
        assert!(Arc::ptr_eq(&intern("a text"), &intern("a text")));
        assert_eq!(&*intern("a text"), "a text");
    }

    #[test]
    fn unreferenced_strings_are_removed() {
        let mut texts = Interner::default();
        let kept: Vec<_> = (0..100).map(|n| texts.get_or_insert(&format!("kept {n}"))).collect();
        for n in 0..100_000 {
            texts.get_or_insert(&format!("dropped {n}"));
        }
        assert!(texts.entries.len() <= MIN_SWEEP_THRESHOLD, "{}", texts.entries.len());
        assert!(kept.iter().all(|text| Arc::ptr_eq(text, &texts.get_or_insert(text))));
    }
}
