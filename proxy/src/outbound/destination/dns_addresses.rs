//! DNS addresses of names that are not services of the mesh. Requests use the addresses of a name in turn.
//!
//! This module only resolves names. The policy, routes and endpoints of the address apply, as if the application had resolved the
//! name and dialled the address itself.

use std::{
    fmt::Display,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::Mutex, time::Instant};
use tulle_core::{
    addr::{self, Addr, NameAddr},
    log_limit::LogLimiter,
    warn_limited,
};

use crate::{
    api::dns::{Addresses, DnsError},
    http::error::Error,
};

/// Limits log lines by target and cause.
type TargetLogLimiter = LogLimiter<(Addr, &'static str)>;

#[derive(Default)]
pub(in crate::outbound) struct DnsAddresses {
    /// Locked during a lookup, so that concurrent requests wait for the same answer.
    answer: Mutex<DnsAnswer>,
}

#[derive(Default)]
struct DnsAnswer {
    addrs: Vec<SocketAddr>,
    /// When to look up again; `None` before the first lookup.
    expires_at: Option<Instant>,
    /// Error of the last lookup, if there are no addresses.
    failure: Option<Arc<str>>,
    next_index: usize,
}

impl DnsAddresses {
    /// Returns the addresses of `name`. Each call starts with another address.
    ///
    /// Calls `look_up` with its timeout when the last answer has expired. If the lookup fails, the last addresses stay in use.
    /// Without addresses, the failure is cached for [`NEGATIVE_CACHE_TTL`].
    ///
    /// # Errors
    /// No lookup has returned a usable address yet.
    pub(in crate::outbound) async fn addrs<F>(
        &self,
        name: &NameAddr,
        log_limiter: &TargetLogLimiter,
        look_up: impl FnOnce(Duration) -> F,
    ) -> Result<Vec<SocketAddr>, Error>
    where
        F: Future<Output = Result<Addresses, DnsError>>,
    {
        let mut answer = self.answer.lock().await;
        if answer.expires_at.is_none_or(|until| until <= Instant::now()) {
            // The timeout is short if earlier addresses can be used.
            let limit = if answer.addrs.is_empty() {
                FIRST_LOOKUP_TIMEOUT
            } else {
                REFRESH_LOOKUP_TIMEOUT
            };
            match look_up(limit).await {
                Ok(found) => answer.replace(name, log_limiter, found)?,
                Err(error) => answer.record_failed_lookup(name, log_limiter, &error)?,
            }
        } else if answer.addrs.is_empty() {
            return Err(answer.unresolved_error(name));
        }
        answer.next_index = answer.next_index.wrapping_add(1);
        let mut addrs = answer.addrs.clone();
        addrs.rotate_left(answer.next_index % answer.addrs.len());
        Ok(addrs)
    }
}

impl DnsAnswer {
    fn replace(&mut self, name: &NameAddr, log_limiter: &TargetLogLimiter, found: Addresses) -> Result<(), Error> {
        let addrs = found.ips.into_iter().map(|ip| SocketAddr::new(ip, name.port));
        let mut addrs: Vec<_> = addrs.filter(is_routable).collect();
        addrs.sort_unstable();
        addrs.dedup();
        if addrs.is_empty() {
            let source = &"none of its addresses can be reached from here";
            return self.record_failed_lookup(name, log_limiter, source);
        }
        if addrs != self.addrs {
            tracing::debug!(%name, ?addrs, "DNS addresses changed");
        }
        self.addrs = addrs;
        self.expires_at = Some(found.expires_at);
        Ok(())
    }

    /// Records a failed lookup. If there are addresses from an earlier lookup, they stay in use. Otherwise the failure is cached.
    ///
    /// # Errors
    /// There are no addresses.
    fn record_failed_lookup(
        &mut self,
        name: &NameAddr,
        log_limiter: &TargetLogLimiter,
        source: &dyn Display,
    ) -> Result<(), Error> {
        if self.addrs.is_empty() {
            self.failure = Some(source.to_string().into());
            self.expires_at = Some(Instant::now() + NEGATIVE_CACHE_TTL);
            return Err(self.unresolved_error(name));
        }
        let target_and_cause = (Addr::Name(name.clone()), "dns");
        warn_limited!(log_limiter, target_and_cause, "DNS lookup failed, the last addresses stay in use", %name, error = %source);
        self.expires_at = Some(Instant::now() + LOOKUP_RETRY_INTERVAL);
        Ok(())
    }

    fn unresolved_error(&self, name: &NameAddr) -> Error {
        Error::NameUnresolved {
            name: name.name.clone(),
            source: self.failure.as_deref().unwrap_or_default().into(),
        }
    }
}

/// Whether this host has a route to an address from DNS, and the address is not local, link-local or multicast. A DNS record must
/// not give access to ports of this host, or to services of its link such as a cloud's metadata.
fn is_routable(addr: &SocketAddr) -> bool {
    if addr::is_local_or_multicast(addr.ip()) {
        return false;
    }
    // Connecting a UDP socket sends nothing: the kernel only looks up a route.
    let unspecified: SocketAddr = match addr {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    UdpSocket::bind(unspecified).is_ok_and(|socket| socket.connect(addr).is_ok())
}

/// Timeout of a lookup if no addresses are cached.
const FIRST_LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a lookup if addresses are cached.
const REFRESH_LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that a failed lookup is cached. Requests that waited for the lookup share its failure. The time is short, so that a name
/// that is created later is found soon.
const NEGATIVE_CACHE_TTL: Duration = Duration::from_secs(1);
/// Delay before the next lookup after a failed one, if addresses are cached.
const LOOKUP_RETRY_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn name() -> NameAddr {
        "files.example:8080".parse().unwrap()
    }

    fn missing() -> Result<Addresses, DnsError> {
        Err(DnsError::NoAddresses {
            name: "files.example".into(),
        })
    }

    fn found(ips: &[&str], for_seconds: u64) -> Result<Addresses, DnsError> {
        Ok(Addresses {
            ips: ips.iter().map(|ip| ip.parse().unwrap()).collect(),
            expires_at: Instant::now() + Duration::from_secs(for_seconds),
        })
    }

    async fn next(resolved: &DnsAddresses, answer: Result<Addresses, DnsError>) -> String {
        let addrs = resolved
            .addrs(&name(), &TargetLogLimiter::default(), |_| async { answer })
            .await;
        addrs.map_or_else(|error| error.to_string(), |addrs| addrs[0].to_string())
    }

    // A host without a network has routes only to its own addresses, which `addrs` never returns.
    fn has_network_route() -> bool {
        is_routable(&"192.0.2.1:1".parse().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn expired_addresses_stay_until_a_lookup_succeeds() {
        if !has_network_route() {
            return eprintln!("SKIPPED: this host has no network route");
        }
        let resolved = DnsAddresses::default();
        let unknown = next(&resolved, missing()).await;
        assert!(unknown.contains("files.example"), "{unknown}");
        tokio::time::advance(NEGATIVE_CACHE_TTL).await;
        let (one, other) = ("192.0.2.1:8080", "192.0.2.2:8080");
        let both = || found(&["192.0.2.2", "127.0.0.1", "192.0.2.1"], 30);
        let returned = [next(&resolved, both()).await, next(&resolved, missing()).await];
        assert!(
            returned.contains(&one.to_owned()) && returned.contains(&other.to_owned()),
            "{returned:?}"
        );
        tokio::time::advance(Duration::from_secs(31)).await;
        for _ in 0..2 {
            assert!(returned.contains(&next(&resolved, missing()).await));
        }
        // The next lookup is made only after `LOOKUP_RETRY_INTERVAL`.
        assert!(returned.contains(&next(&resolved, found(&["192.0.2.9"], 30)).await));
        tokio::time::advance(LOOKUP_RETRY_INTERVAL).await;
        assert_eq!(next(&resolved, found(&["192.0.2.9"], 30)).await, "192.0.2.9:8080");
    }

    #[tokio::test(start_paused = true)]
    async fn refresh_lookups_use_the_shorter_timeout() {
        if !has_network_route() {
            return eprintln!("SKIPPED: this host has no network route");
        }
        let resolved = DnsAddresses::default();
        let lookup_timeout = async |answer: Result<Addresses, DnsError>| {
            let mut timeout = None;
            let look_up = |limit| {
                timeout = Some(limit);
                async { answer }
            };
            let _ = resolved.addrs(&name(), &TargetLogLimiter::default(), look_up).await;
            timeout
        };
        assert_eq!(lookup_timeout(missing()).await, Some(FIRST_LOOKUP_TIMEOUT));
        tokio::time::advance(NEGATIVE_CACHE_TTL).await;
        assert_eq!(
            lookup_timeout(found(&["192.0.2.1"], 30)).await,
            Some(FIRST_LOOKUP_TIMEOUT)
        );
        assert_eq!(lookup_timeout(missing()).await, None);
        tokio::time::advance(Duration::from_secs(31)).await;
        assert_eq!(lookup_timeout(missing()).await, Some(REFRESH_LOOKUP_TIMEOUT));
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_requests_for_a_failing_name_share_one_lookup() {
        let (resolved, n_lookups) = (DnsAddresses::default(), AtomicUsize::new(0));
        let look_up = |limit| {
            n_lookups.fetch_add(1, Ordering::Relaxed);
            async move {
                tokio::time::sleep(limit).await;
                missing()
            }
        };
        let (start, name) = (Instant::now(), name());
        let log_limiter = TargetLogLimiter::default();
        let all = (0..100).map(|_| resolved.addrs(&name, &log_limiter, look_up));
        for failed in futures_util::future::join_all(all).await {
            assert!(failed.unwrap_err().to_string().contains("files.example"));
        }
        assert_eq!(
            (n_lookups.load(Ordering::Relaxed), start.elapsed()),
            (1, FIRST_LOOKUP_TIMEOUT)
        );
    }

    #[test]
    fn dns_records_cannot_name_local_or_link_local_addresses() {
        for own in [
            "127.0.0.1:80",
            "0.0.0.0:80",
            "[::1]:80",
            "[::ffff:127.0.0.1]:80",
            "224.0.0.1:80",
            "169.254.169.254:80",
            "[fe80::1]:80",
            "[::ffff:169.254.169.254]:80",
        ] {
            assert!(!is_routable(&own.parse().unwrap()), "{own}");
        }
    }
}
