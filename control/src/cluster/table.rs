//! The answers somebody is asking for: key to `watch::Sender`, computed again when a fact under it changes.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use tokio::sync::watch;

use crate::cluster::answer::Answer;
use crate::cluster::lookup::Reader;
use crate::cluster::metrics::{Metrics, SlotMetrics};
use crate::cluster::store::{Fact, Store};
use crate::cluster::{Config, State};

/// A pure function from the store to one answer.
pub(super) trait View: Sized + 'static {
    type Key: Clone + Eq + Hash + Send + Sync + 'static;
    type Value: PartialEq + Send + Sync + 'static;

    fn compute(reader: &Reader<'_>, config: &Config, key: &Self::Key) -> Self::Value;

    /// The series that belong to the key while somebody asks; `value` is the first answer.
    fn metrics(metrics: &Metrics, key: &Self::Key, value: &Self::Value) -> SlotMetrics;

    /// Notes a new answer in them.
    fn observe(_metrics: &SlotMetrics, _value: &Self::Value) {}

    /// Takes over the parts of the old answer that stay, so that those who hold them share them.
    fn share(_old: &Self::Value, _new: &mut Self::Value) {}

    fn table(state: &mut State) -> &mut Table<Self>;
}

pub(super) struct Table<V: View> {
    slots: HashMap<Arc<V::Key>, Slot<V::Value>>,
    readers: HashMap<Fact, HashSet<Arc<V::Key>>>,
}

struct Slot<T> {
    value: watch::Sender<Arc<Answer<T>>>,
    /// In their order.
    facts: Vec<Fact>,
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
    ) -> watch::Receiver<Arc<Answer<V::Value>>> {
        if let Some(slot) = self.slots.get(key) {
            slot.metrics.joined();
            return slot.value.subscribe();
        }
        let (value, facts) = compute::<V>(store, config, key);
        let metrics = V::metrics(metrics, key, &value);
        let key = Arc::new(key.clone());
        for fact in &facts {
            self.readers.entry(fact.clone()).or_default().insert(key.clone());
        }
        V::observe(&metrics, &value);
        metrics.joined();
        let (sender, receiver) = watch::channel(Arc::new(Answer::new(value)));
        self.slots.insert(
            key,
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
        let stale: HashSet<Arc<V::Key>> = touched
            .iter()
            .filter_map(|fact| self.readers.get(fact))
            .flatten()
            .cloned()
            .collect();
        for key in stale {
            let Some(slot) = self.slots.get_mut(&key) else { continue };
            let (mut value, facts) = compute::<V>(store, config, &key);
            let old = std::mem::replace(&mut slot.facts, facts);
            for fact in missing(&old, &slot.facts) {
                forget(&mut self.readers, fact, &key);
            }
            for fact in missing(&slot.facts, &old) {
                self.readers.entry(fact.clone()).or_default().insert(key.clone());
            }
            let changed = {
                let old = slot.value.borrow();
                let changed = ***old != value;
                if changed {
                    V::share(&old, &mut value);
                }
                changed
            };
            if changed {
                V::observe(&slot.metrics, &value);
                slot.metrics.updated();
                slot.value.send_replace(Arc::new(Answer::new(value)));
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

fn compute<V: View>(store: &Store, config: &Config, key: &V::Key) -> (V::Value, Vec<Fact>) {
    let reader = Reader::new(store);
    let value = V::compute(&reader, config, key);
    let mut facts: Vec<_> = reader.into_facts().into_iter().collect();
    facts.sort_unstable();
    (value, facts)
}

/// Facts of the first list that the second does not have; both are in order.
fn missing<'a>(facts: &'a [Fact], others: &'a [Fact]) -> impl Iterator<Item = &'a Fact> {
    facts.iter().filter(|fact| others.binary_search(fact).is_err())
}

fn forget<K: Eq + Hash>(readers: &mut HashMap<Fact, HashSet<Arc<K>>>, fact: &Fact, key: &K) {
    if let Some(keys) = readers.get_mut(fact) {
        keys.remove(key);
        if keys.is_empty() {
            readers.remove(fact);
        }
    }
}
