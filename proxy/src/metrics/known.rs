//! What was looked up before, found again without a lock.

use std::sync::OnceLock;

/// Values by key, for few keys. It only grows, so that who reads it locks nothing, and not without end: whose keys are many,
/// as those that servers choose can be, has the rest of them looked up each time.
pub(super) struct Known<K, V> {
    first: Slot<K, V>,
}

type Slot<K, V> = OnceLock<Box<Node<K, V>>>;

struct Node<K, V> {
    key: K,
    value: V,
    next: Slot<K, V>,
}

impl<K: Copy + PartialEq, V> Known<K, V> {
    /// Lets `then` have the value of a key, which is looked up on first use.
    pub(super) fn with(&self, key: K, look_up: impl Fn() -> V, then: impl FnOnce(&V)) {
        let mut slot = &self.first;
        for _ in 0..MOST {
            // Of several who come to the end at once, one is first, and the others look on behind it.
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

impl<K, V> Default for Known<K, V> {
    fn default() -> Self {
        Self { first: OnceLock::new() }
    }
}

/// So many are found sooner than under a lock, and are dropped one within the other.
const MOST: usize = 64;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn many_keys_are_all_found_and_some_are_remembered() {
        let (known, n_looked_up) = (Known::default(), Cell::new(0));
        for round in 1..=2 {
            for key in 0..1_000 {
                let look_up = || {
                    n_looked_up.set(n_looked_up.get() + 1);
                    key.to_string()
                };
                known.with(key, look_up, |value| assert_eq!(*value, key.to_string()));
            }
            assert_eq!(n_looked_up.get(), 1_000 * round - MOST * (round - 1));
        }
    }
}
