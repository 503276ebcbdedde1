//! The answers somebody is asking for: key to `watch::Sender`, computed again when a fact under it changes.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use tokio::sync::watch;

use crate::cluster::lookup::Reader;
use crate::cluster::metrics::{Metrics, SlotMetrics};
use crate::cluster::store::{Fact, Store};
use crate::cluster::{Config, State};

/// A pure function from the store to one answer.
pub(super) trait View: Sized + 'static {
    type Key: Clone + Eq + Hash + Send + Sync + 'static;
    type Value: PartialEq + Send + Sync + 'static;

    fn compute(reader: &Reader<'_>, config: &Config, key: &Self::Key) -> Self::Value;

    /// The series that belong to the key while somebody asks.
    fn metrics(metrics: &Metrics, key: &Self::Key) -> SlotMetrics;

    /// Notes a new answer in them.
    fn observe(_metrics: &SlotMetrics, _value: &Self::Value) {}

    fn table(state: &mut State) -> &mut Table<Self>;
}

pub(super) struct Table<V: View> {
    slots: HashMap<V::Key, Slot<V::Value>>,
    readers: HashMap<Fact, HashSet<V::Key>>,
}

struct Slot<T> {
    value: watch::Sender<Arc<T>>,
    facts: HashSet<Fact>,
    metrics: SlotMetrics,
}

impl<V: View> Default for Table<V> {
    fn default() -> Self {
        Self {
            slots: HashMap::new(),
            readers: HashMap::new(),
        }
    }
}

impl<V: View> Table<V> {
    /// Joins those who ask for the key; the first computes the answer.
    pub(super) fn subscribe(
        &mut self,
        store: &Store,
        config: &Config,
        metrics: &Metrics,
        key: &V::Key,
    ) -> watch::Receiver<Arc<V::Value>> {
        if let Some(slot) = self.slots.get(key) {
            slot.metrics.joined();
            return slot.value.subscribe();
        }
        let (value, facts) = compute::<V>(store, config, key);
        for fact in &facts {
            self.readers.entry(fact.clone()).or_default().insert(key.clone());
        }
        let metrics = V::metrics(metrics, key);
        V::observe(&metrics, &value);
        metrics.joined();
        let (sender, receiver) = watch::channel(Arc::new(value));
        self.slots.insert(
            key.clone(),
            Slot {
                value: sender,
                facts,
                metrics,
            },
        );
        receiver
    }

    /// Computes again what depends on the touched facts; equal answers are not sent.
    pub(super) fn refresh(&mut self, store: &Store, config: &Config, touched: &HashSet<Fact>) {
        let stale: HashSet<V::Key> = touched
            .iter()
            .filter_map(|fact| self.readers.get(fact))
            .flatten()
            .cloned()
            .collect();
        for key in stale {
            let Some(slot) = self.slots.get_mut(&key) else { continue };
            let (value, facts) = compute::<V>(store, config, &key);
            let old = std::mem::replace(&mut slot.facts, facts);
            for fact in old.difference(&slot.facts) {
                forget(&mut self.readers, fact, &key);
            }
            for fact in slot.facts.difference(&old) {
                self.readers.entry(fact.clone()).or_default().insert(key.clone());
            }
            if **slot.value.borrow() != value {
                V::observe(&slot.metrics, &value);
                slot.metrics.updated();
                slot.value.send_replace(Arc::new(value));
            }
        }
    }

    /// Called after a receiver has gone: the last one takes the answer with it.
    pub(super) fn release(&mut self, key: &V::Key) {
        let Some(slot) = self.slots.get(key) else { return };
        slot.metrics.left();
        if slot.value.receiver_count() == 0
            && let Some(slot) = self.slots.remove(key)
        {
            for fact in &slot.facts {
                forget(&mut self.readers, fact, key);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty() && self.readers.is_empty()
    }
}

fn compute<V: View>(store: &Store, config: &Config, key: &V::Key) -> (V::Value, HashSet<Fact>) {
    let reader = Reader::new(store);
    let value = V::compute(&reader, config, key);
    (value, reader.into_facts())
}

fn forget<K: Eq + Hash>(readers: &mut HashMap<Fact, HashSet<K>>, fact: &Fact, key: &K) {
    if let Some(keys) = readers.get_mut(fact) {
        keys.remove(key);
        if keys.is_empty() {
            readers.remove(fact);
        }
    }
}
