//! Applies discovery updates. Unchanged endpoints keep their connections, load and breaker state.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

use crate::policy::endpoint::{EndpointSpec, EndpointUpdate};

/// Discovery state of a service.
#[derive(Debug)]
pub(crate) enum DiscoveryState<E> {
    /// Discovery has not answered yet: requests wait.
    Unknown,
    /// The discovered endpoints. While the list is empty, requests wait.
    Endpoints(EndpointList<E>),
    /// The control plane has reported that there are none ([`EndpointUpdate::NoEndpoints`]): requests fail immediately.
    NoEndpoints,
}

impl<E> DiscoveryState<E> {
    pub(super) fn endpoints(&self) -> &[Arc<E>] {
        match self {
            Self::Endpoints(endpoints) => endpoints,
            Self::Unknown | Self::NoEndpoints => &[],
        }
    }
}

/// Endpoints in the order of preference. Dereferences to all of them.
#[derive(Debug)]
pub(crate) struct EndpointList<E> {
    /// The preferred endpoints, then the fallback endpoints.
    endpoints: Box<[Arc<E>]>,
    n_preferred: usize,
}

impl<E> EndpointList<E> {
    /// The preferred endpoints, and the fallback endpoints ([`EndpointSpec::is_fallback`]).
    ///
    /// They are separate slices, because a pick from one list in which most endpoints are excluded would search the whole list.
    pub(super) fn by_preference(&self) -> (&[Arc<E>], &[Arc<E>]) {
        self.endpoints.split_at(self.n_preferred)
    }
}

impl<E> Deref for EndpointList<E> {
    type Target = [Arc<E>];

    fn deref(&self) -> &Self::Target {
        &self.endpoints
    }
}

/// The endpoints of one service after all updates so far.
#[derive(Debug)]
pub(crate) struct EndpointSet<E> {
    entries: BTreeMap<SocketAddr, EndpointEntry<E>>,
    state: SyncState,
}

#[derive(Debug)]
struct EndpointEntry<E> {
    spec: Arc<EndpointSpec>,
    endpoint: Arc<E>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SyncState {
    /// A new stream has started. Its first `Add` update lists all endpoints.
    AwaitingFullSet,
    Synced,
    NoEndpoints,
}

impl<E> Default for EndpointSet<E> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            state: SyncState::AwaitingFullSet,
        }
    }
}

impl<E> EndpointSet<E> {
    /// Marks the start of a new stream, whose first `Add` update lists all endpoints. The known endpoints stay until then;
    /// those that are not listed are removed.
    pub(crate) fn resync(&mut self) {
        self.state = SyncState::AwaitingFullSet;
    }

    /// Applies an update; `build` creates an endpoint that is new or whose specification has changed.
    ///
    /// Returns the state to publish, or `None` if nothing has changed.
    pub(crate) fn apply(
        &mut self,
        update: EndpointUpdate,
        mut build: impl FnMut(&Arc<EndpointSpec>) -> Arc<E>,
    ) -> Option<DiscoveryState<E>> {
        let previous_state = self.state;
        let changed = match update {
            EndpointUpdate::Add(specs) => {
                self.state = SyncState::Synced;
                let mut is_changed = previous_state == SyncState::AwaitingFullSet && self.retain_listed(&specs);
                for spec in specs {
                    is_changed |= self.add(spec, &mut build);
                }
                // The first list is published even if it is empty: it ends the unknown state.
                is_changed || previous_state != SyncState::Synced
            }
            EndpointUpdate::Remove(addrs) => {
                let n_before = self.entries.len();
                for addr in &addrs {
                    self.entries.remove(addr);
                }
                self.entries.len() < n_before
            }
            EndpointUpdate::NoEndpoints => {
                self.state = SyncState::NoEndpoints;
                self.entries.clear();
                if previous_state == SyncState::NoEndpoints {
                    return None;
                }
                return Some(DiscoveryState::NoEndpoints);
            }
        };
        changed.then(|| DiscoveryState::Endpoints(self.list()))
    }

    fn list(&self) -> EndpointList<E> {
        let preferred = self.entries.values().filter(|entry| !entry.spec.is_fallback.get());
        let fallback = self.entries.values().filter(|entry| entry.spec.is_fallback.get());
        EndpointList {
            n_preferred: preferred.clone().count(),
            endpoints: preferred.chain(fallback).map(|entry| entry.endpoint.clone()).collect(),
        }
    }

    /// Removes the endpoints that are not in `specs`. Returns whether one was removed.
    fn retain_listed(&mut self, specs: &[EndpointSpec]) -> bool {
        let n_before = self.entries.len();
        let mut addrs: Vec<_> = specs.iter().map(|spec| spec.addr).collect();
        addrs.sort_unstable();
        self.entries.retain(|addr, _| addrs.binary_search(addr).is_ok());
        self.entries.len() < n_before
    }

    /// Adds or replaces an endpoint. An endpoint of which only the weight or [`EndpointSpec::is_fallback`] has changed is kept.
    /// Returns false if nothing has changed except a weight.
    fn add(&mut self, spec: EndpointSpec, build: &mut impl FnMut(&Arc<EndpointSpec>) -> Arc<E>) -> bool {
        if let Some(known) = self.entries.get(&spec.addr)
            && *known.spec == spec
        {
            known.spec.weight.set(spec.weight.get());
            return known.spec.is_fallback.set(spec.is_fallback.get());
        }
        let spec = Arc::new(spec);
        let endpoint = build(&spec);
        self.entries.insert(spec.addr, EndpointEntry { spec, endpoint });
        true
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use super::*;
    use crate::policy::endpoint::{FallbackFlag, Weight};

    impl<E> DiscoveryState<E> {
        pub(crate) fn with_endpoints(preferred: &[Arc<E>], fallback: &[Arc<E>]) -> Self {
            Self::Endpoints(EndpointList {
                endpoints: preferred.iter().chain(fallback).cloned().collect(),
                n_preferred: preferred.len(),
            })
        }
    }

    fn spec(port: u16, proxy_port: u16) -> EndpointSpec {
        EndpointSpec {
            opaque_transport: NonZeroU16::new(proxy_port),
            ..EndpointSpec::plain(([10, 0, 0, 1], port).into())
        }
    }

    fn addr(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    /// Applies updates. Endpoints are numbered in the order in which they are built.
    struct TestSet {
        endpoints: EndpointSet<u32>,
        built: u32,
    }

    impl TestSet {
        fn new() -> Self {
            Self {
                endpoints: EndpointSet::default(),
                built: 0,
            }
        }

        fn apply(&mut self, update: EndpointUpdate) -> Option<DiscoveryState<u32>> {
            let built = &mut self.built;
            self.endpoints.apply(update, |_| {
                *built += 1;
                Arc::new(*built)
            })
        }

        /// Applies an update and returns the published endpoints.
        fn list(&mut self, update: EndpointUpdate) -> Option<Vec<u32>> {
            match self.apply(update)? {
                DiscoveryState::Endpoints(list) => Some(list.iter().map(|endpoint| **endpoint).collect()),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn unchanged_endpoints_are_kept_and_changed_ones_replaced() {
        let mut set = TestSet::new();
        assert_eq!(
            set.list(EndpointUpdate::Add(vec![spec(1, 1), spec(2, 1)])),
            Some(vec![1, 2])
        );
        assert_eq!(set.list(EndpointUpdate::Add(vec![spec(1, 1)])), None);
        assert_eq!(
            set.list(EndpointUpdate::Add(vec![spec(1, 5), spec(3, 1)])),
            Some(vec![3, 2, 4])
        );
        assert_eq!(
            set.list(EndpointUpdate::Remove(vec![addr(2), addr(9)])),
            Some(vec![3, 4])
        );
        assert_eq!(set.list(EndpointUpdate::Remove(vec![addr(9)])), None);
    }

    #[test]
    fn an_endpoint_whose_weight_changes_is_kept_with_the_new_weight() {
        let mut set = TestSet::new();
        set.list(EndpointUpdate::Add(vec![spec(1, 1)]));
        let heavier = EndpointSpec {
            weight: Weight::new(5),
            ..spec(1, 1)
        };
        assert_eq!(set.list(EndpointUpdate::Add(vec![heavier])), None);
        assert_eq!(set.endpoints.entries[&addr(1)].spec.weight.get(), 5);
    }

    #[test]
    fn preferred_endpoints_come_before_fallback_endpoints() {
        let mut set = TestSet::new();
        let fallback = |port| EndpointSpec {
            is_fallback: FallbackFlag::new(true),
            ..spec(port, 1)
        };
        let mut lists = |update| match set.apply(update)? {
            DiscoveryState::Endpoints(list) => {
                let (preferred, fallback) = list.by_preference();
                let built = |endpoints: &[Arc<u32>]| endpoints.iter().map(|endpoint| **endpoint).collect::<Vec<_>>();
                Some((built(preferred), built(fallback)))
            }
            other => panic!("{other:?}"),
        };
        let added = EndpointUpdate::Add(vec![fallback(1), spec(2, 1), fallback(3), spec(4, 1)]);
        assert_eq!(lists(added), Some((vec![2, 4], vec![1, 3])));
        assert_eq!(lists(EndpointUpdate::Add(vec![fallback(1)])), None);
        // After a change of only the preference, the endpoints keep their connections and their load.
        let changed = || EndpointUpdate::Add(vec![spec(1, 1), fallback(2)]);
        assert_eq!(lists(changed()), Some((vec![1, 4], vec![2, 3])));
        assert_eq!(lists(changed()), None);
        let removed = EndpointUpdate::Remove(vec![addr(1), addr(4)]);
        assert_eq!(lists(removed), Some((vec![], vec![2, 3])));
    }

    #[test]
    fn no_endpoints_is_published_once() {
        let mut set = TestSet::new();
        assert!(matches!(
            set.apply(EndpointUpdate::NoEndpoints),
            Some(DiscoveryState::NoEndpoints)
        ));
        assert!(set.apply(EndpointUpdate::NoEndpoints).is_none());
        assert_eq!(set.list(EndpointUpdate::Add(vec![spec(1, 1)])), Some(vec![1]));
        assert!(matches!(
            set.apply(EndpointUpdate::NoEndpoints),
            Some(DiscoveryState::NoEndpoints)
        ));
    }

    #[test]
    fn an_empty_first_list_is_published() {
        let mut set = TestSet::new();
        assert_eq!(set.list(EndpointUpdate::Add(vec![])), Some(vec![]));
        assert_eq!(set.list(EndpointUpdate::Add(vec![])), None);
    }

    #[test]
    fn the_first_list_of_a_new_stream_replaces_all_endpoints() {
        let mut set = TestSet::new();
        set.list(EndpointUpdate::Add(vec![spec(1, 1), spec(2, 1)]));
        set.endpoints.resync();
        assert_eq!(
            set.list(EndpointUpdate::Add(vec![spec(2, 1), spec(3, 1)])),
            Some(vec![2, 3])
        );
        assert_eq!(set.list(EndpointUpdate::Add(vec![spec(4, 1)])), Some(vec![2, 3, 4]));
    }
}
