//! Texts that many objects have, kept once: names of nodes and ports, labels, service accounts.
//!
//! A cluster has as many of them as it has pods, and few that differ.

use std::sync::{Arc, LazyLock};

use ahash::AHashSet;
use parking_lot::Mutex;

/// All texts in use, and some that were.
#[derive(Default)]
struct Texts {
    all: AHashSet<Arc<str>>,
    /// Grown to this, it is searched for texts that nobody has any more.
    full: usize,
}

/// The text as all have it who ask for the same.
pub fn shared(text: &str) -> Arc<str> {
    TEXTS.lock().get(text)
}

/// As [`shared`], where there is a text.
pub fn maybe_shared(text: Option<String>) -> Option<Arc<str>> {
    text.map(|text| shared(&text))
}

impl Texts {
    fn get(&mut self, text: &str) -> Arc<str> {
        if let Some(found) = self.all.get(text) {
            return found.clone();
        }
        if self.all.len() >= self.full {
            self.all.retain(|text| Arc::strong_count(text) > 1);
            self.full = SEARCHED_FROM.max(2 * self.all.len());
        }
        let text: Arc<str> = text.into();
        self.all.insert(text.clone());
        text
    }
}

static TEXTS: LazyLock<Mutex<Texts>> = LazyLock::new(Mutex::default);

/// Below this many there is little to be found.
const SEARCHED_FROM: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_are_kept_once() {
        assert!(Arc::ptr_eq(&shared("a text"), &shared("a text")));
        assert_eq!(&*shared("a text"), "a text");
    }

    #[test]
    fn texts_that_nobody_has_are_forgotten() {
        let mut texts = Texts::default();
        let kept: Vec<_> = (0..100).map(|n| texts.get(&format!("kept {n}"))).collect();
        for n in 0..100_000 {
            texts.get(&format!("dropped {n}"));
        }
        assert!(texts.all.len() <= SEARCHED_FROM, "{}", texts.all.len());
        assert!(kept.iter().all(|text| Arc::ptr_eq(text, &texts.get(text))));
    }
}
