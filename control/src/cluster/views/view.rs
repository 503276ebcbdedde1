//! The trait of views.

use std::hash::Hash;

use crate::cluster::config::Config;
use crate::cluster::metrics::{EntryMetrics, Metrics};
use crate::cluster::store::reader::Reader;

/// A pure function from the store to the value of a key.
pub(in crate::cluster) trait View: Sized + 'static {
    type Key: Clone + Eq + Hash + Send + Sync + 'static;
    type Value: PartialEq + Send + Sync + 'static;

    fn compute(reader: &Reader<'_>, config: &Config, key: &Self::Key) -> Self::Value;

    /// The metrics of the key while it has subscribers; `value` is the first value.
    fn metrics(metrics: &Metrics, key: &Self::Key, value: &Self::Value) -> EntryMetrics;

    /// Updates the metrics with a new value.
    fn update_metrics(_metrics: &EntryMetrics, _value: &Self::Value) {}

    /// Replaces the unchanged parts of the new value by those of the old value, so that both values share memory.
    fn reuse_unchanged(_old: &Self::Value, _new: &mut Self::Value) {}
}
