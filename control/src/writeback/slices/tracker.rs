//! What our own writes must have led to, so that a cache that has not seen them yet is not mistaken for the truth.

use std::sync::Arc;

use ahash::AHashMap;
use k8s_openapi::api::discovery::v1::EndpointSlice;

use crate::resources::meta::Name;

/// Our writes by service and by the uid of the slice.
#[derive(Default)]
pub(super) struct Tracker(AHashMap<Name, AHashMap<String, Expected>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// The slice exists, in this generation or a later one.
    Generation(i64),
    Gone,
}

impl Tracker {
    /// Notes what a create or an update was answered with.
    pub(super) fn wrote(&mut self, service: &Name, slice: &EndpointSlice) {
        self.expect(service, slice, Expected::Generation(generation(slice)));
    }

    pub(super) fn deleted(&mut self, service: &Name, slice: &EndpointSlice) {
        self.expect(service, slice, Expected::Gone);
    }

    fn expect(&mut self, service: &Name, slice: &EndpointSlice, expected: Expected) {
        if let Some(uid) = &slice.metadata.uid {
            let slices = self.0.entry(service.clone()).or_default();
            slices.insert(uid.clone(), expected);
        }
    }

    /// Whether the cached slices of a service are older than what we wrote.
    pub(super) fn is_stale(&self, service: &Name, cached: &[Arc<EndpointSlice>]) -> bool {
        let Some(expected) = self.0.get(service) else {
            return false;
        };
        let find = |uid: &String| cached.iter().find(|slice| slice.metadata.uid.as_ref() == Some(uid));
        expected.iter().any(|(uid, expected)| match (expected, find(uid)) {
            (Expected::Generation(at_least), Some(slice)) => generation(slice) < *at_least,
            (Expected::Gone, None) => false,
            (Expected::Generation(_), None) | (Expected::Gone, Some(_)) => true,
        })
    }

    /// Whether a slice that was reported is not what we wrote.
    pub(super) fn is_news(&self, service: &Name, slice: &EndpointSlice) -> bool {
        let uid = slice.metadata.uid.as_ref();
        match uid.and_then(|uid| self.0.get(service)?.get(uid)) {
            Some(Expected::Generation(ours)) => generation(slice) > *ours,
            // The report was under way when we deleted the slice.
            Some(Expected::Gone) => false,
            None => true,
        }
    }

    /// Takes note that a slice is gone, and tells whether that was our doing.
    pub(super) fn saw_deletion(&mut self, service: &Name, slice: &EndpointSlice) -> bool {
        let Some(slices) = self.0.get_mut(service) else {
            return false;
        };
        let expected = slice.metadata.uid.as_ref().and_then(|uid| slices.remove(uid));
        if slices.is_empty() {
            self.0.remove(service);
        }
        expected == Some(Expected::Gone)
    }

    pub(super) fn forget(&mut self, service: &Name) {
        self.0.remove(service);
    }
}

fn generation(slice: &EndpointSlice) -> i64 {
    slice.metadata.generation.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(uid: &str, generation: i64) -> Arc<EndpointSlice> {
        let mut slice = EndpointSlice::default();
        slice.metadata.uid = Some(uid.to_owned());
        slice.metadata.generation = Some(generation);
        Arc::new(slice)
    }

    #[test]
    fn a_cache_is_stale_until_it_has_seen_what_we_wrote() {
        let service = Name::new("ns", "web");
        let mut tracker = Tracker::default();
        assert!(!tracker.is_stale(&service, &[slice("a", 1)]), "nothing was written");
        tracker.wrote(&service, &slice("a", 2));
        tracker.wrote(&service, &slice("b", 1));
        assert!(tracker.is_stale(&service, &[slice("a", 1), slice("b", 1)]), "a is old");
        assert!(tracker.is_stale(&service, &[slice("a", 2)]), "b is missing");
        assert!(!tracker.is_stale(&service, &[slice("a", 3), slice("b", 1), slice("c", 1)]));
        tracker.deleted(&service, &slice("a", 2));
        assert!(
            tracker.is_stale(&service, &[slice("a", 2), slice("b", 1)]),
            "a is still there"
        );
        assert!(tracker.saw_deletion(&service, &slice("a", 2)));
        assert!(!tracker.is_stale(&service, &[slice("b", 1)]));
        tracker.forget(&service);
        assert!(!tracker.is_stale(&service, &[]));
    }

    #[test]
    fn only_what_others_wrote_is_news() {
        let service = Name::new("ns", "web");
        let mut tracker = Tracker::default();
        assert!(tracker.is_news(&service, &slice("a", 1)));
        tracker.wrote(&service, &slice("a", 2));
        assert!(!tracker.is_news(&service, &slice("a", 1)), "an older state");
        assert!(!tracker.is_news(&service, &slice("a", 2)), "what we wrote");
        assert!(tracker.is_news(&service, &slice("a", 3)));
        assert!(
            !tracker.saw_deletion(&service, &slice("a", 2)),
            "somebody else deleted it"
        );
        tracker.deleted(&service, &slice("a", 3));
        assert!(!tracker.is_news(&service, &slice("a", 3)));
    }
}
