//! A map that is read without a lock. It caches the series of a few label values.

use std::sync::OnceLock;

/// A map with at most [`MAX_ENTRIES`] entries. It only grows, so reading needs no lock. The size is limited because servers
/// choose some keys, such as status codes. The values of further keys are looked up in the metric family each time.
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
    /// Calls `use_value` with the value of a key. If the map has no entry for the key, `look_up` creates the value, which is added
    /// unless the map is full.
    pub(super) fn with_or_insert(&self, key: K, look_up: impl Fn() -> V, use_value: impl FnOnce(&V)) {
        let mut slot = &self.first;
        for _ in 0..MAX_ENTRIES {
            // If several threads insert here, one of them succeeds, and the others continue with the next slot.
            let node = slot.get_or_init(|| {
                Box::new(Node {
                    key,
                    value: look_up(),
                    next: OnceLock::new(),
                })
            });
            if node.key == key {
                return use_value(&node.value);
            }
            slot = &node.next;
        }
        use_value(&look_up());
    }
}

impl<K, V> Default for AppendOnlyMap<K, V> {
    fn default() -> Self {
        Self { first: OnceLock::new() }
    }
}

/// Maximum number of entries: up to this size, a search is faster than a lock, and nested drops do not overflow the stack.
const MAX_ENTRIES: usize = 64;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn the_first_keys_are_stored_and_the_values_of_others_are_looked_up_each_time() {
        let (map, n_looked_up) = (AppendOnlyMap::default(), Cell::new(0));
        for round in 1..=2 {
            for key in 0..1_000 {
                let look_up = || {
                    n_looked_up.set(n_looked_up.get() + 1);
                    key.to_string()
                };
                map.with_or_insert(key, look_up, |value| assert_eq!(*value, key.to_string()));
            }
            assert_eq!(n_looked_up.get(), 1_000 * round - MAX_ENTRIES * (round - 1));
        }
    }
}
