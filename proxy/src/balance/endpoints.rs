//! Discovery's changes, applied: what stays the same keeps its connections, load and history.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::balance::balancer::Discovered;
use crate::policy::endpoint::{EndpointSpec, EndpointUpdate};

/// The endpoints of one service, as the updates so far describe them.
#[derive(Debug)]
pub(crate) struct Endpoints<E> {
    known: BTreeMap<SocketAddr, Known<E>>,
    state: State,
}

#[derive(Debug)]
struct Known<E> {
    spec: Arc<EndpointSpec>,
    endpoint: Arc<E>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The next addition tells all there is: a new stream starts with the full set.
    Resync,
    Following,
    NoEndpoints,
}

impl<E> Default for Endpoints<E> {
    fn default() -> Self {
        Self {
            known: BTreeMap::new(),
            state: State::Resync,
        }
    }
}

impl<E> Endpoints<E> {
    /// Notes that the stream was opened anew, so that endpoints that went away meanwhile go with the next addition.
    ///
    /// Until then the last known ones stay.
    pub(crate) fn resync(&mut self) {
        self.state = State::Resync;
    }

    /// Applies an update; `build` makes an endpoint that is new or described anew.
    ///
    /// Returns the list to publish, or nothing when all stays as it was.
    pub(crate) fn apply(
        &mut self,
        update: EndpointUpdate,
        mut build: impl FnMut(&Arc<EndpointSpec>) -> Arc<E>,
    ) -> Option<Discovered<E>> {
        let before = std::mem::replace(&mut self.state, State::Following);
        let changed = match update {
            EndpointUpdate::Add(specs) => {
                let mut gone = before == State::Resync && self.keep(&specs);
                for spec in specs {
                    gone |= self.add(spec, &mut build);
                }
                // The first list counts even if it is empty: now we know.
                gone || before != State::Following
            }
            EndpointUpdate::Remove(addrs) => {
                self.state = before;
                let before = self.known.len();
                for addr in &addrs {
                    self.known.remove(addr);
                }
                self.known.len() < before
            }
            EndpointUpdate::NoEndpoints => {
                self.state = State::NoEndpoints;
                self.known.clear();
                if before == State::NoEndpoints {
                    return None;
                }
                return Some(Discovered::NoEndpoints);
            }
        };
        changed.then(|| Discovered::Endpoints(self.known.values().map(|known| known.endpoint.clone()).collect()))
    }

    /// Drops what is not in the list, and tells whether there was any.
    fn keep(&mut self, specs: &[EndpointSpec]) -> bool {
        let before = self.known.len();
        let mut addrs: Vec<_> = specs.iter().map(|spec| spec.addr).collect();
        addrs.sort_unstable();
        self.known.retain(|addr, _| addrs.binary_search(addr).is_ok());
        self.known.len() < before
    }

    fn add(&mut self, spec: EndpointSpec, build: &mut impl FnMut(&Arc<EndpointSpec>) -> Arc<E>) -> bool {
        if self.known.get(&spec.addr).is_some_and(|known| *known.spec == spec) {
            return false;
        }
        let spec = Arc::new(spec);
        let endpoint = build(&spec);
        self.known.insert(spec.addr, Known { spec, endpoint });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(port: u16, weight: u32) -> EndpointSpec {
        EndpointSpec {
            weight,
            ..EndpointSpec::plain(([10, 0, 0, 1], port).into())
        }
    }

    fn addr(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    /// Applies updates to endpoints that are numbered as they are built.
    struct Bench {
        endpoints: Endpoints<u32>,
        built: u32,
    }

    impl Bench {
        fn new() -> Self {
            Self {
                endpoints: Endpoints::default(),
                built: 0,
            }
        }

        fn apply(&mut self, update: EndpointUpdate) -> Option<Discovered<u32>> {
            let built = &mut self.built;
            self.endpoints.apply(update, |_| {
                *built += 1;
                Arc::new(*built)
            })
        }

        fn list(&mut self, update: EndpointUpdate) -> Option<Vec<u32>> {
            match self.apply(update)? {
                Discovered::Endpoints(list) => Some(list.iter().map(|endpoint| **endpoint).collect()),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn unchanged_endpoints_are_kept_and_changed_ones_replaced() {
        let mut bench = Bench::new();
        assert_eq!(
            bench.list(EndpointUpdate::Add(vec![spec(1, 1), spec(2, 1)])),
            Some(vec![1, 2])
        );
        assert_eq!(bench.list(EndpointUpdate::Add(vec![spec(1, 1)])), None);
        assert_eq!(
            bench.list(EndpointUpdate::Add(vec![spec(1, 5), spec(3, 1)])),
            Some(vec![3, 2, 4])
        );
        assert_eq!(
            bench.list(EndpointUpdate::Remove(vec![addr(2), addr(9)])),
            Some(vec![3, 4])
        );
        assert_eq!(bench.list(EndpointUpdate::Remove(vec![addr(9)])), None);
    }

    #[test]
    fn no_endpoints_is_told_once() {
        let mut bench = Bench::new();
        assert!(matches!(
            bench.apply(EndpointUpdate::NoEndpoints),
            Some(Discovered::NoEndpoints)
        ));
        assert!(bench.apply(EndpointUpdate::NoEndpoints).is_none());
        assert_eq!(bench.list(EndpointUpdate::Add(vec![spec(1, 1)])), Some(vec![1]));
        assert!(matches!(
            bench.apply(EndpointUpdate::NoEndpoints),
            Some(Discovered::NoEndpoints)
        ));
    }

    #[test]
    fn an_empty_first_list_is_an_answer() {
        let mut bench = Bench::new();
        assert_eq!(bench.list(EndpointUpdate::Add(vec![])), Some(vec![]));
        assert_eq!(bench.list(EndpointUpdate::Add(vec![])), None);
    }

    #[test]
    fn a_new_stream_starts_with_the_full_set() {
        let mut bench = Bench::new();
        bench.list(EndpointUpdate::Add(vec![spec(1, 1), spec(2, 1)]));
        bench.endpoints.resync();
        assert_eq!(
            bench.list(EndpointUpdate::Add(vec![spec(2, 1), spec(3, 1)])),
            Some(vec![2, 3])
        );
        assert_eq!(bench.list(EndpointUpdate::Add(vec![spec(4, 1)])), Some(vec![2, 3, 4]));
    }
}
