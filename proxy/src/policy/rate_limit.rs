//! Local rate limits: token buckets in total and per client identity (GCRA, the generic cell rate algorithm).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ahash::HashMap;
use parking_lot::RwLock;
use tokio::time::Instant;
use tulle_core::identity::Identity;

use crate::policy::meta::Meta;

/// The limits of one server, in requests per second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RateLimit {
    pub(crate) meta: Arc<Meta>,
    pub(crate) total: Option<u32>,
    /// The limit of each client identity. Clients without an identity share one bucket.
    pub(crate) per_identity: Option<u32>,
    pub(crate) overrides: Vec<RateLimitOverride>,
}

/// Another limit for some client identities. Each of these identities has its own bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RateLimitOverride {
    pub(crate) requests_per_second: u32,
    pub(crate) clients: Vec<Box<str>>,
}

/// The limit that a request exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RateLimited {
    #[error("total rate limit exceeded")]
    Total,
    #[error("rate limit of the client identity exceeded")]
    Identity,
    #[error("rate limit override of the client identity exceeded")]
    Override,
}

/// The buckets behind a [`RateLimit`], shared by all workers.
///
/// Times are nanoseconds since the limiter was created.
#[derive(Debug)]
pub(crate) struct Limiter {
    start: Instant,
    total: Option<Bucket>,
    overrides: HashMap<Box<str>, Bucket>,
    identity: Option<IdentityBuckets>,
}

#[derive(Debug)]
struct IdentityBuckets {
    requests_per_second: u32,
    capacity: usize,
    anonymous: Bucket,
    buckets: RwLock<HashMap<Identity, Bucket>>,
    /// Shared by the identities beyond [`MAX_IDENTITIES`].
    overflow: Bucket,
}

/// A token bucket. It holds the requests of one second, and starts full.
///
/// The state is one atomic number: the time at which the bucket is full again.
#[derive(Debug)]
struct Bucket {
    requests_per_second: u32,
    full_at: AtomicU64,
}

impl Limiter {
    pub(crate) fn new(limit: &RateLimit, now: Instant) -> Self {
        Self::with_capacity(limit, now, MAX_IDENTITIES)
    }

    fn with_capacity(limit: &RateLimit, now: Instant, capacity: usize) -> Self {
        let mut overrides = HashMap::default();
        for entry in &limit.overrides {
            for client in &entry.clients {
                overrides
                    .entry(client.clone())
                    .or_insert_with(|| Bucket::new(entry.requests_per_second));
            }
        }
        Self {
            start: now,
            total: limit.total.map(Bucket::new),
            overrides,
            identity: limit.per_identity.map(|requests_per_second| IdentityBuckets {
                requests_per_second,
                capacity,
                anonymous: Bucket::new(requests_per_second),
                buckets: RwLock::default(),
                overflow: Bucket::new(requests_per_second),
            }),
        }
    }

    /// Takes a token for one request. The client's own bucket is checked first, so that a client over its limit takes nothing
    /// from the total.
    ///
    /// # Errors
    /// The first limit that the request exceeds: the client's, then the total.
    pub(crate) fn check(&self, client: Option<&Identity>, now: Instant) -> Result<(), RateLimited> {
        let now = u64::try_from(now.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX);
        if let Some(bucket) = client.and_then(|client| self.overrides.get(client.as_str())) {
            bucket.take(now).ok_or(RateLimited::Override)?;
        } else if let Some(identity) = &self.identity {
            identity.take(client, now).ok_or(RateLimited::Identity)?;
        }
        match &self.total {
            Some(total) => total.take(now).ok_or(RateLimited::Total),
            None => Ok(()),
        }
    }
}

impl IdentityBuckets {
    fn take(&self, client: Option<&Identity>, now: u64) -> Option<()> {
        let Some(client) = client else {
            return self.anonymous.take(now);
        };
        if let Some(bucket) = self.buckets.read().get(client) {
            return bucket.take(now);
        }
        let mut buckets = self.buckets.write();
        if buckets.len() >= self.capacity && !buckets.contains_key(client) {
            // Removing a full bucket changes no limit, because a new bucket starts full.
            buckets.retain(|_, bucket| bucket.full_at.load(Ordering::Relaxed) > now);
            if buckets.len() >= self.capacity {
                return self.overflow.take(now);
            }
        }
        buckets
            .entry(client.clone())
            .or_insert_with(|| Bucket::new(self.requests_per_second))
            .take(now)
    }
}

impl Bucket {
    fn new(requests_per_second: u32) -> Self {
        Self {
            requests_per_second,
            full_at: AtomicU64::new(0),
        }
    }

    fn take(&self, now: u64) -> Option<()> {
        // Zero requests per second means that none is allowed.
        let nanos_per_token = NANOS_PER_SECOND.checked_div(self.requests_per_second.into())?;
        let next = |full_at: u64| {
            let full_at = full_at.max(now) + nanos_per_token;
            (full_at - now <= NANOS_PER_SECOND).then_some(full_at)
        };
        self.full_at
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .ok()
            .map(drop)
    }
}

const NANOS_PER_SECOND: u64 = Duration::from_secs(1).as_nanos() as u64;

/// Maximum number of identities with a bucket of their own; each takes about 100 bytes.
const MAX_IDENTITIES: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn limit() -> RateLimit {
        RateLimit {
            meta: Meta::default_named("test"),
            total: None,
            per_identity: None,
            overrides: Vec::new(),
        }
    }

    fn id(name: &str) -> Identity {
        name.parse().unwrap()
    }

    #[test]
    fn a_bucket_holds_the_requests_of_one_second_and_refills_steadily() {
        let start = Instant::now();
        let limiter = Limiter::new(
            &RateLimit {
                total: Some(10),
                ..limit()
            },
            start,
        );
        for _ in 0..10 {
            assert_eq!(limiter.check(None, start), Ok(()));
        }
        assert_eq!(limiter.check(None, start), Err(RateLimited::Total));
        let later = start + Duration::from_millis(200);
        assert_eq!(limiter.check(None, later), Ok(()));
        assert_eq!(limiter.check(None, later), Ok(()));
        assert_eq!(limiter.check(None, later), Err(RateLimited::Total));
    }

    #[test]
    fn each_identity_has_a_bucket_and_anonymous_clients_share_one() {
        let now = Instant::now();
        let limiter = Limiter::new(
            &RateLimit {
                per_identity: Some(1),
                ..limit()
            },
            now,
        );
        let (a, b) = (id("a.test"), id("spiffe://test/b"));
        for client in [Some(&a), Some(&b), None] {
            assert_eq!(limiter.check(client, now), Ok(()));
            assert_eq!(limiter.check(client, now), Err(RateLimited::Identity));
        }
    }

    #[test]
    fn an_override_takes_the_place_of_the_identity_limit() {
        let now = Instant::now();
        let overrides = vec![RateLimitOverride {
            requests_per_second: 2,
            clients: vec!["a.test".into()],
        }];
        let limiter = Limiter::new(
            &RateLimit {
                per_identity: Some(1),
                overrides,
                ..limit()
            },
            now,
        );
        let a = id("a.test");
        assert_eq!(limiter.check(Some(&a), now), Ok(()));
        assert_eq!(limiter.check(Some(&a), now), Ok(()));
        assert_eq!(limiter.check(Some(&a), now), Err(RateLimited::Override));
        assert_eq!(limiter.check(Some(&id("b.test")), now), Ok(()));
    }

    #[test]
    fn a_client_over_its_limit_uses_no_shared_token() {
        let now = Instant::now();
        let limiter = Limiter::new(
            &RateLimit {
                total: Some(10),
                per_identity: Some(1),
                overrides: vec![RateLimitOverride {
                    requests_per_second: 2,
                    clients: vec!["c.test".into()],
                }],
                ..limit()
            },
            now,
        );
        let (greedy, other, overridden) = (id("a.test"), id("b.test"), id("c.test"));
        let taken = |client, n: usize| (0..n).filter(|_| limiter.check(client, now).is_ok()).count();
        assert_eq!(taken(Some(&greedy), 100), 1);
        assert_eq!(taken(Some(&overridden), 100), 2);
        assert_eq!(taken(None, 100), 1);
        assert_eq!(taken(Some(&other), 1), 1);
    }

    #[test]
    fn a_limit_of_zero_permits_no_request() {
        let now = Instant::now();
        let limiter = Limiter::new(
            &RateLimit {
                total: Some(0),
                ..limit()
            },
            now,
        );
        assert_eq!(limiter.check(None, now), Err(RateLimited::Total));
    }

    #[test]
    fn identities_are_limited_and_idle_ones_are_removed() {
        let now = Instant::now();
        let limiter = Limiter::with_capacity(
            &RateLimit {
                per_identity: Some(1),
                ..limit()
            },
            now,
            2,
        );
        assert_eq!(limiter.check(Some(&id("a.test")), now), Ok(()));
        assert_eq!(limiter.check(Some(&id("b.test")), now), Ok(()));
        assert_eq!(
            limiter.check(Some(&id("c.test")), now),
            Ok(()),
            "the shared bucket of further identities"
        );
        assert_eq!(limiter.check(Some(&id("d.test")), now), Err(RateLimited::Identity));
        let later = now + Duration::from_secs(2);
        assert_eq!(limiter.check(Some(&id("d.test")), later), Ok(()));
        assert_eq!(limiter.identity.unwrap().buckets.read().len(), 1);
    }
}
