//! Current values of a view by key, each in a `watch::Sender`. A value is computed again when a dependency changes.

use std::hash::Hash;
use std::sync::Arc;

use ahash::{AHashMap, AHashSet};
use smallvec::SmallVec;
use tokio::sync::watch;

use crate::cluster::config::Config;
use crate::cluster::metrics::{EntryMetrics, Metrics};
use crate::cluster::publish::published_value::PublishedValue;
use crate::cluster::store::objects::{LookupKey, Store};
use crate::cluster::store::reader::Reader;
use crate::cluster::views::view::View;

pub(in crate::cluster) struct ViewTable<V: View> {
    entries: AHashMap<Arc<V::Key>, Entry<V::Value>>,
    /// For each lookup key, the keys whose values were computed from its objects.
    dependents: Dependents<V::Key>,
}

type Dependents<K> = AHashMap<LookupKey, KeySet<K>>;

/// Distinct keys, in no order. Most lookup keys have one or two.
struct KeySet<K> {
    first: SmallVec<[Arc<K>; 2]>,
    /// All further keys.
    others: Option<Box<AHashSet<Arc<K>>>>,
}

impl<K> Default for KeySet<K> {
    fn default() -> Self {
        Self {
            first: SmallVec::new(),
            others: None,
        }
    }
}

impl<K: Eq + Hash> KeySet<K> {
    /// Adds a key that the set does not have.
    fn insert(&mut self, key: Arc<K>) {
        if self.first.len() < MAX_LISTED_KEYS {
            self.first.push(key);
        } else {
            self.others.get_or_insert_default().insert(key);
        }
    }

    fn remove(&mut self, key: &K) {
        if let Some(at) = self.first.iter().position(|listed| **listed == *key) {
            self.first.swap_remove(at);
        } else if let Some(others) = &mut self.others {
            others.remove(key);
            if others.is_empty() {
                self.others = None;
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Arc<K>> {
        self.first
            .iter()
            .chain(self.others.iter().flat_map(|others| others.iter()))
    }

    fn is_empty(&self) -> bool {
        self.first.is_empty() && self.others.is_none()
    }
}

/// Maximum length of `KeySet::first`. Longer lists are slower to search than a set.
const MAX_LISTED_KEYS: usize = 16;

/// Receives the values of one key.
pub(in crate::cluster) type ValueReceiver<T> = watch::Receiver<Arc<PublishedValue<T>>>;

struct Entry<T> {
    value: watch::Sender<Arc<PublishedValue<T>>>,
    /// The lookup keys that the value was computed from, sorted.
    dependencies: Vec<LookupKey>,
    metrics: EntryMetrics,
}

impl<V: View> Default for ViewTable<V> {
    fn default() -> Self {
        Self {
            entries: AHashMap::new(),
            dependents: AHashMap::new(),
        }
    }
}

impl<V: View> ViewTable<V> {
    /// Adds a subscriber. The first subscriber of a key computes the value. Also returns the table's shared copy of `key`.
    pub(in crate::cluster) fn subscribe(
        &mut self,
        store: &Store,
        config: &Config,
        metrics: &Metrics,
        key: &V::Key,
    ) -> (Arc<V::Key>, ValueReceiver<V::Value>) {
        if let Some((key, entry)) = self.entries.get_key_value(key) {
            entry.metrics.add_subscriber();
            return (key.clone(), entry.value.subscribe());
        }
        let (value, dependencies) = compute::<V>(store, config, key);
        let metrics = V::metrics(metrics, key, &value);
        let key = Arc::new(key.clone());
        for dependency in &dependencies {
            self.dependents
                .entry(dependency.clone())
                .or_default()
                .insert(key.clone());
        }
        V::update_metrics(&metrics, &value);
        metrics.add_subscriber();
        let (sender, receiver) = watch::channel(Arc::new(PublishedValue::new(value)));
        self.entries.insert(
            key.clone(),
            Entry {
                value: sender,
                dependencies,
                metrics,
            },
        );
        (key, receiver)
    }

    /// Computes the values that depend on changed objects again. Equal values are not sent.
    pub(in crate::cluster) fn refresh(&mut self, store: &Store, config: &Config, changed_keys: &AHashSet<LookupKey>) {
        let stale: AHashSet<Arc<V::Key>> = changed_keys
            .iter()
            .filter_map(|dependency| self.dependents.get(dependency))
            .flat_map(KeySet::iter)
            .cloned()
            .collect();
        for key in stale {
            let Some(entry) = self.entries.get_mut(&key) else {
                continue;
            };
            let (mut value, dependencies) = compute::<V>(store, config, &key);
            let old = std::mem::replace(&mut entry.dependencies, dependencies);
            for dependency in difference(&old, &entry.dependencies) {
                remove_dependent(&mut self.dependents, dependency, &key);
            }
            for dependency in difference(&entry.dependencies, &old) {
                self.dependents
                    .entry(dependency.clone())
                    .or_default()
                    .insert(key.clone());
            }
            let changed = {
                let old = entry.value.borrow();
                let changed = ***old != value;
                if changed {
                    V::reuse_unchanged(&old, &mut value);
                }
                changed
            };
            if changed {
                V::update_metrics(&entry.metrics, &value);
                entry.metrics.count_update();
                entry.value.send_replace(Arc::new(PublishedValue::new(value)));
            }
        }
    }

    /// Removes a subscriber after its receiver was dropped. If it was the last subscriber of the key, removes the value too.
    pub(in crate::cluster) fn release(&mut self, key: &V::Key) {
        let Some(entry) = self.entries.get(key) else { return };
        entry.metrics.remove_subscriber();
        if entry.value.receiver_count() == 0
            && let Some(entry) = self.entries.remove(key)
        {
            for dependency in &entry.dependencies {
                remove_dependent(&mut self.dependents, dependency, key);
            }
        }
    }

    #[cfg(test)]
    pub(in crate::cluster) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.dependents.is_empty()
    }
}

fn compute<V: View>(store: &Store, config: &Config, key: &V::Key) -> (V::Value, Vec<LookupKey>) {
    let reader = Reader::new(store);
    let value = V::compute(&reader, config, key);
    let mut dependencies: Vec<_> = reader.into_dependencies().into_iter().collect();
    dependencies.sort_unstable();
    (value, dependencies)
}

/// Keys of the first list that are not in the second. Both lists are sorted.
fn difference<'a>(dependencies: &'a [LookupKey], others: &'a [LookupKey]) -> impl Iterator<Item = &'a LookupKey> {
    dependencies
        .iter()
        .filter(|dependency| others.binary_search(dependency).is_err())
}

fn remove_dependent<K: Eq + Hash>(dependents: &mut Dependents<K>, dependency: &LookupKey, key: &K) {
    if let Some(keys) = dependents.get_mut(dependency) {
        keys.remove(key);
        if keys.is_empty() {
            dependents.remove(dependency);
        }
    }
}
