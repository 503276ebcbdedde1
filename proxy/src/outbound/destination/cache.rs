//! The cache of destinations. The number of addresses and the number of names are limited. At a limit, an unused destination is
//! evicted for a new one.

use std::{collections::HashMap, sync::Arc};

use tulle_core::addr::Addr;

use crate::{http::error::Error, outbound::destination::snapshot::Destination};

/// Destinations of two kinds: addresses that clients dial, and names that clients request. Each kind has its own limit, so that
/// neither evicts the other.
#[derive(Default)]
pub(crate) struct DestinationCache {
    destinations: HashMap<Addr, Arc<Destination>>,
    n_names: usize,
}

impl DestinationCache {
    pub(in crate::outbound) fn get(&self, target: &Addr) -> Option<&Arc<Destination>> {
        self.destinations.get(target)
    }

    pub(in crate::outbound) fn iter(&self) -> impl Iterator<Item = &Arc<Destination>> {
        self.destinations.values()
    }

    /// Inserts a destination. At the limit of its kind, evicts the least recently used one that is not in use and that
    /// `may_evict` accepts.
    ///
    /// # Errors
    /// The destination is a name, the limit is reached, and no other name can be evicted. Addresses are always inserted: each has a
    /// connection, and the number of connections is limited elsewhere.
    pub(in crate::outbound) fn insert(
        &mut self,
        destination: Arc<Destination>,
        may_evict: impl Fn(&Destination) -> bool,
    ) -> Result<(), Error> {
        let is_name = is_name(&destination);
        let n = match is_name {
            true => self.n_names,
            false => self.destinations.len() - self.n_names,
        };
        if n >= MAX_DESTINATIONS_PER_KIND {
            let same_kind = self
                .destinations
                .values()
                .filter(|other| self::is_name(other) == is_name);
            let evictable = same_kind.filter(|other| !is_in_use(other) && may_evict(other));
            match evictable.min_by_key(|other| *other.used_at.lock()).cloned() {
                Some(other) => {
                    self.remove(&other);
                    other.evicted.notify_one();
                }
                None if is_name => {
                    return Err(Error::TooManyNames {
                        limit: MAX_DESTINATIONS_PER_KIND,
                    });
                }
                None => {}
            }
        }
        self.n_names += usize::from(is_name);
        self.destinations.insert(destination.target.clone(), destination);
        Ok(())
    }

    /// Removes this destination, but not a later one of the same target.
    pub(in crate::outbound) fn remove(&mut self, destination: &Arc<Destination>) {
        let cached = self.destinations.get(&destination.target);
        if cached.is_some_and(|cached| Arc::ptr_eq(cached, destination)) {
            self.destinations.remove(&destination.target);
            self.n_names -= usize::from(is_name(destination));
        }
    }
}

/// Whether anything other than the cache and the watch task references the destination.
pub(in crate::outbound) fn is_in_use(destination: &Arc<Destination>) -> bool {
    const INTERNAL_REFERENCES: usize = 2;
    Arc::strong_count(destination) > INTERNAL_REFERENCES
}

fn is_name(destination: &Destination) -> bool {
    matches!(destination.target, Addr::Name(_))
}

/// Maximum number of names, and maximum number of addresses. The addresses in use may be more.
const MAX_DESTINATIONS_PER_KIND: usize = 4096;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A cache, and the references that the watch tasks would hold.
    #[derive(Default)]
    struct TestCache {
        destinations: DestinationCache,
        watched: Vec<Arc<Destination>>,
    }

    impl TestCache {
        fn add(&mut self, target: &str) -> Result<(), Error> {
            let destination = Arc::new(Destination::new(target.parse().unwrap()));
            self.watched.push(destination.clone());
            self.destinations.insert(destination, |_| true)
        }

        fn has(&self, target: &str) -> bool {
            self.destinations.get(&target.parse().unwrap()).is_some()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_and_names_are_evicted_separately() {
        let mut cache = TestCache::default();
        cache.add("web.shop:80").unwrap();
        for n in 0..=MAX_DESTINATIONS_PER_KIND {
            cache.add(&format!("10.0.{}.{}:80", n / 256, n % 256)).unwrap();
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(cache.destinations.iter().count(), MAX_DESTINATIONS_PER_KIND + 1);
        assert!(cache.has("web.shop:80") && cache.has("10.0.0.1:80"));
        assert!(!cache.has("10.0.0.0:80"), "the least recently used");
        cache.watched[1].evicted.notified().await; // its watch task ends
        cache.add("10.0.0.0:80").unwrap();
        let evicted = cache.watched[1].clone();
        cache.destinations.remove(&evicted);
        assert!(cache.has("10.0.0.0:80"), "inserted again");
    }

    #[tokio::test(start_paused = true)]
    async fn destinations_in_use_are_not_evicted() {
        let mut cache = TestCache::default();
        let mut users = Vec::new();
        for n in 0..MAX_DESTINATIONS_PER_KIND {
            cache.add(&format!("web-{n}.shop:80")).unwrap();
            users.extend(cache.watched.last().cloned());
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(matches!(cache.add("one.too.many:80"), Err(Error::TooManyNames { .. })));
        cache.watched.pop();
        drop(users.remove(7));
        cache.add("one.more:80").unwrap();
        assert!(!cache.has("web-7.shop:80") && cache.has("web-0.shop:80"));
        let mut addresses = TestCache::default();
        for n in 0..=MAX_DESTINATIONS_PER_KIND {
            addresses.add(&format!("10.0.{}.{}:80", n / 256, n % 256)).unwrap();
            users.extend(addresses.watched.last().cloned());
        }
        assert_eq!(
            addresses.destinations.iter().count(),
            MAX_DESTINATIONS_PER_KIND + 1,
            "addresses are never refused"
        );
    }
}
