//! Caches the series of a few label values. It is read without a lock.

use std::sync::OnceLock;

/// A map for a few keys. It only grows, so reading needs no lock, and its size is limited: some keys (status codes) come from
/// servers, so their number has no other bound. Further keys are looked up in the metric family each time.
pub(super) struct AppendOnlyMap<K, V> {
    first: Slot<K, V>,
}

type Slot<K, V> = OnceLock<Box<Node<K, V>>>;

struct Node<K, V> {
    key: K,
    value: V,
    next: Slot<K, V>,
}

impl<K: Copy + PartialEq, V> AppendOnlyMap<K, V> {
    /// Calls `then` with the value of a key, which is looked up on first use.
    pub(super) fn with_or_insert(&self, key: K, look_up: impl Fn() -> V, then: impl FnOnce(&V)) {
        let mut slot = &self.first;
        for _ in 0..MAX_ENTRIES {
            // Of several concurrent insertions at the end, one wins, and the others continue after it.
            let node = slot.get_or_init(|| {
                Box::new(Node {
                    key,
                    value: look_up(),
                    next: OnceLock::new(),
                })
            });
            if node.key == key {
                return then(&node.value);
            }
            slot = &node.next;
        }
        then(&look_up());
    }
}

impl<K, V> Default for AppendOnlyMap<K, V> {
    fn default() -> Self {
        Self { first: OnceLock::new() }
    }
}

/// Up to this size, searching is faster than locking, and the nested drops do not overflow the stack.
const MAX_ENTRIES: usize = 64;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn many_keys_are_all_found_and_some_are_remembered() {
        let (known, n_looked_up) = (AppendOnlyMap::default(), Cell::new(0));
        for round in 1..=2 {
            for key in 0..1_000 {
                let look_up = || {
                    n_looked_up.set(n_looked_up.get() + 1);
                    key.to_string()
                };
                known.with_or_insert(key, look_up, |value| assert_eq!(*value, key.to_string()));
            }
            assert_eq!(n_looked_up.get(), 1_000 * round - MAX_ENTRIES * (round - 1));
        }
    }
}
