//! What was looked up before, found again without a lock.

use std::sync::OnceLock;

/// Values by key, for few keys. It only grows, so that who reads it locks nothing.
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
    /// The value of a key, made on first use.
    pub(super) fn get(&self, key: K, make: impl Fn() -> V) -> &V {
        let mut slot = &self.first;
        loop {
            // Of several who come to the end at once, one is first, and the others look on behind it.
            let node = slot.get_or_init(|| {
                Box::new(Node {
                    key,
                    value: make(),
                    next: OnceLock::new(),
                })
            });
            if node.key == key {
                return &node.value;
            }
            slot = &node.next;
        }
    }
}

impl<K, V> Default for Known<K, V> {
    fn default() -> Self {
        Self { first: OnceLock::new() }
    }
}
