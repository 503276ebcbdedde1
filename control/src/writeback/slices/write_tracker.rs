//! Tracks our own writes to detect a cache that does not contain them yet.

use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use tokio::time::Instant;

use crate::resources::meta::NamespacedName;

/// The expected states of slices, by Service and by the uid of the slice.
#[derive(Default)]
pub(super) struct WriteTracker(AHashMap<NamespacedName, AHashMap<String, Expectation>>);

struct Expectation {
    state: ExpectedState,
    written_at: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpectedState {
    /// The slice exists in this or a later generation.
    Generation(i64),
    Deleted,
}

impl WriteTracker {
    pub(super) fn record_write(&mut self, service: &NamespacedName, slice: &EndpointSlice) {
        self.set_expected(service, slice, ExpectedState::Generation(generation(slice)));
    }

    pub(super) fn record_delete(&mut self, service: &NamespacedName, slice: &EndpointSlice) {
        self.set_expected(service, slice, ExpectedState::Deleted);
    }

    fn set_expected(&mut self, service: &NamespacedName, slice: &EndpointSlice, expected: ExpectedState) {
        if let Some(uid) = &slice.metadata.uid {
            let slices = self.0.entry(service.clone()).or_default();
            let expectation = Expectation {
                state: expected,
                written_at: Instant::now(),
            };
            slices.insert(uid.clone(), expectation);
        }
    }

    /// Returns whether the cached slices of a Service are older than our writes. Forgets writes that are missing in the
    /// cache after [`MAX_WATCH_DELAY`].
    pub(super) fn is_stale(&mut self, service: &NamespacedName, cached: &[Arc<EndpointSlice>]) -> bool {
        let Some(expected) = self.0.get_mut(service) else {
            return false;
        };
        let find = |uid: &String| cached.iter().find(|slice| slice.metadata.uid.as_ref() == Some(uid));
        let mut is_stale = false;
        expected.retain(|uid, expectation| {
            let is_missing = match (expectation.state, find(uid)) {
                (ExpectedState::Generation(at_least), Some(slice)) => generation(slice) < at_least,
                (ExpectedState::Deleted, None) => false,
                (ExpectedState::Generation(_), None) | (ExpectedState::Deleted, Some(_)) => true,
            };
            let is_expired = is_missing && expectation.written_at.elapsed() >= MAX_WATCH_DELAY;
            is_stale |= is_missing && !is_expired;
            !is_expired
        });
        is_stale
    }

    /// Returns whether another client has changed a slice that the watch reports.
    pub(super) fn is_change_by_others(&self, service: &NamespacedName, slice: &EndpointSlice) -> bool {
        let uid = slice.metadata.uid.as_ref();
        let expected = uid.and_then(|uid| self.0.get(service)?.get(uid));
        match expected.map(|expectation| expectation.state) {
            Some(ExpectedState::Generation(ours)) => generation(slice) > ours,
            // The event was sent before we deleted the slice.
            Some(ExpectedState::Deleted) => false,
            None => true,
        }
    }

    /// Records that the watch has reported the deletion of a slice. Returns whether we deleted it.
    pub(super) fn record_observed_deletion(&mut self, service: &NamespacedName, slice: &EndpointSlice) -> bool {
        let Some(slices) = self.0.get_mut(service) else {
            return false;
        };
        let expected = slice.metadata.uid.as_ref().and_then(|uid| slices.remove(uid));
        if slices.is_empty() {
            self.0.remove(service);
        }
        expected.is_some_and(|expectation| expectation.state == ExpectedState::Deleted)
    }

    pub(super) fn remove_service(&mut self, service: &NamespacedName) {
        self.0.remove(service);
    }
}

fn generation(slice: &EndpointSlice) -> i64 {
    slice.metadata.generation.unwrap_or_default()
}

/// Maximum time that we wait for the watch to report a write. The watch needs much less, but some writes are never
/// confirmed: the slice was deleted before the watch listed it, or its deletion was reported before the write was recorded.
const MAX_WATCH_DELAY: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn slice(uid: &str, generation: i64) -> Arc<EndpointSlice> {
        let mut slice = EndpointSlice::default();
        slice.metadata.uid = Some(uid.to_owned());
        slice.metadata.generation = Some(generation);
        Arc::new(slice)
    }

    #[test]
    fn a_cache_is_stale_until_it_contains_our_writes() {
        let service = NamespacedName::new("ns", "web");
        let mut tracker = WriteTracker::default();
        assert!(!tracker.is_stale(&service, &[slice("a", 1)]), "no writes");
        tracker.record_write(&service, &slice("a", 2));
        tracker.record_write(&service, &slice("b", 1));
        assert!(
            tracker.is_stale(&service, &[slice("a", 1), slice("b", 1)]),
            "a is outdated"
        );
        assert!(tracker.is_stale(&service, &[slice("a", 2)]), "b is missing");
        assert!(!tracker.is_stale(&service, &[slice("a", 3), slice("b", 1), slice("c", 1)]));
        tracker.record_delete(&service, &slice("a", 2));
        assert!(
            tracker.is_stale(&service, &[slice("a", 2), slice("b", 1)]),
            "a still exists"
        );
        assert!(tracker.record_observed_deletion(&service, &slice("a", 2)));
        assert!(!tracker.is_stale(&service, &[slice("b", 1)]));
        tracker.remove_service(&service);
        assert!(!tracker.is_stale(&service, &[]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_the_watch_does_not_report_is_forgotten_after_a_minute() {
        let service = NamespacedName::new("ns", "web");
        let mut tracker = WriteTracker::default();
        tracker.record_write(&service, &slice("a", 1));
        tracker.record_write(&service, &slice("b", 2));
        tracker.record_delete(&service, &slice("c", 1));
        let cached = [slice("b", 2), slice("c", 1)];
        advance(MAX_WATCH_DELAY - Duration::from_millis(1)).await;
        assert!(tracker.is_stale(&service, &cached));
        advance(Duration::from_millis(1)).await;
        assert!(!tracker.is_stale(&service, &cached));
        // If the watch reports such a slice later, its Service is reconciled again.
        assert!(tracker.is_change_by_others(&service, &slice("a", 1)));
        assert!(!tracker.is_change_by_others(&service, &slice("b", 2)));
    }

    #[test]
    fn own_writes_are_not_changes_by_others() {
        let service = NamespacedName::new("ns", "web");
        let mut tracker = WriteTracker::default();
        assert!(tracker.is_change_by_others(&service, &slice("a", 1)));
        tracker.record_write(&service, &slice("a", 2));
        assert!(!tracker.is_change_by_others(&service, &slice("a", 1)), "an older state");
        assert!(!tracker.is_change_by_others(&service, &slice("a", 2)), "our own write");
        assert!(tracker.is_change_by_others(&service, &slice("a", 3)));
        assert!(
            !tracker.record_observed_deletion(&service, &slice("a", 2)),
            "deleted by another client"
        );
        tracker.record_delete(&service, &slice("a", 3));
        assert!(!tracker.is_change_by_others(&service, &slice("a", 3)));
    }
}
