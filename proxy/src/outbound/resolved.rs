//! Names that are of no service of the mesh: their addresses in DNS, one after the other.
//!
//! What happens to a connection or request is then up to what is known of the address, as if the application had looked
//! the name up and dialled it.

use std::{
    fmt::Display,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::Mutex, time::Instant};
use tulle_core::addr::{self, NameAddr};

use crate::{
    api::dns::{Addresses, DnsError},
    http::error::Error,
};

/// The addresses of one name.
#[derive(Default)]
pub(super) struct Resolved {
    /// Locked while somebody looks the name up, so that others wait for the same answer.
    answer: Mutex<Answer>,
}

#[derive(Default)]
struct Answer {
    addrs: Vec<SocketAddr>,
    /// When to ask again; a time that never was before the first answer.
    until: Option<Instant>,
    /// Why nobody has said an address, until then.
    failure: Option<Arc<str>>,
    /// Whose turn it is.
    next: usize,
}

impl Resolved {
    /// The addresses of `name`, beginning with another one each time; `look_up` is asked when the last answer has had its time, with how long it may take.
    /// Where that fails, the last answer goes on being used, and so does the failure where there is none.
    ///
    /// # Errors
    /// Nobody has ever said an address.
    pub(super) async fn addrs<F>(
        &self,
        name: &NameAddr,
        look_up: impl FnOnce(Duration) -> F,
    ) -> Result<Vec<SocketAddr>, Error>
    where
        F: Future<Output = Result<Addresses, DnsError>>,
    {
        let mut answer = self.answer.lock().await;
        if answer.until.is_none_or(|until| until <= Instant::now()) {
            // With an answer to go on with nobody has to wait for long.
            let limit = if answer.addrs.is_empty() { PATIENCE } else { HASTE };
            match look_up(limit).await {
                Ok(found) => answer.replace(name, found)?,
                Err(error) => answer.keep(name, &error)?,
            }
        } else if answer.addrs.is_empty() {
            return Err(answer.unresolved(name));
        }
        answer.next = answer.next.wrapping_add(1);
        let mut addrs = answer.addrs.clone();
        addrs.rotate_left(answer.next % answer.addrs.len());
        Ok(addrs)
    }
}

impl Answer {
    fn replace(&mut self, name: &NameAddr, found: Addresses) -> Result<(), Error> {
        let addrs = found.ips.into_iter().map(|ip| SocketAddr::new(ip, name.port));
        let mut addrs: Vec<_> = addrs.filter(may_be_dialled).collect();
        addrs.sort_unstable();
        addrs.dedup();
        if addrs.is_empty() {
            return self.keep(name, &"none of its addresses can be reached from here");
        }
        if addrs != self.addrs {
            tracing::debug!(%name, ?addrs, "looked up");
        }
        self.addrs = addrs;
        self.until = Some(found.until);
        Ok(())
    }

    /// Goes on with what there is.
    fn keep(&mut self, name: &NameAddr, source: &dyn Display) -> Result<(), Error> {
        if self.addrs.is_empty() {
            self.failure = Some(source.to_string().into());
            self.until = Some(Instant::now() + FAILURE_CACHED);
            return Err(self.unresolved(name));
        }
        tracing::warn!(%name, error = %source, "cannot be looked up again, its last addresses stay");
        self.until = Some(Instant::now() + AGAIN);
        Ok(())
    }

    fn unresolved(&self, name: &NameAddr) -> Error {
        Error::Unresolved {
            name: name.name.clone(),
            source: self.failure.as_deref().unwrap_or_default().into(),
        }
    }
}

/// Whether an address that DNS tells is one that this host has a way to. Whoever writes a record does not get to this host's
/// own ports by it, nor to what serves its link alone, such as a cloud's metadata.
fn may_be_dialled(addr: &SocketAddr) -> bool {
    if addr::is_local_or_multicast(addr.ip()) {
        return false;
    }
    // Nothing is sent: the kernel only looks for a route.
    let ours: SocketAddr = match addr {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    UdpSocket::bind(ours).is_ok_and(|socket| socket.connect(addr).is_ok())
}

/// How long the first lookup may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a lookup may take where there is a last answer.
const HASTE: Duration = Duration::from_secs(1);
/// How long a name without an address is not looked up again: those who wait for the same lookup share its failure, and who
/// comes later may find a name that has just been made.
const FAILURE_CACHED: Duration = Duration::from_secs(1);
/// When to ask again after a lookup that failed, where there is a last answer.
const AGAIN: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn name() -> NameAddr {
        "files.example:8080".parse().unwrap()
    }

    fn missing() -> Result<Addresses, DnsError> {
        Err(DnsError::Empty {
            name: "files.example".into(),
        })
    }

    fn found(ips: &[&str], for_seconds: u64) -> Result<Addresses, DnsError> {
        Ok(Addresses {
            ips: ips.iter().map(|ip| ip.parse().unwrap()).collect(),
            until: Instant::now() + Duration::from_secs(for_seconds),
        })
    }

    async fn next(resolved: &Resolved, answer: Result<Addresses, DnsError>) -> String {
        let addrs = resolved.addrs(&name(), |_| async { answer }).await;
        addrs.map_or_else(|error| error.to_string(), |addrs| addrs[0].to_string())
    }

    // Without a network there is a way to this host's own addresses only, and those are not dialled.
    fn a_route_exists() -> bool {
        may_be_dialled(&"192.0.2.1:1".parse().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn answers_hold_for_their_time_and_stay_while_nobody_knows_better() {
        if !a_route_exists() {
            return eprintln!("SKIPPED: this host has no route to anywhere");
        }
        let resolved = Resolved::default();
        let unknown = next(&resolved, missing()).await;
        assert!(unknown.contains("files.example"), "{unknown}");
        tokio::time::advance(FAILURE_CACHED).await;
        let (one, other) = ("192.0.2.1:8080", "192.0.2.2:8080");
        let both = || found(&["192.0.2.2", "127.0.0.1", "192.0.2.1"], 30);
        let turns = [next(&resolved, both()).await, next(&resolved, missing()).await];
        assert!(
            turns.contains(&one.to_owned()) && turns.contains(&other.to_owned()),
            "{turns:?}"
        );
        tokio::time::advance(Duration::from_secs(31)).await;
        for _ in 0..2 {
            assert!(turns.contains(&next(&resolved, missing()).await));
        }
        // Asked again after a while only.
        assert!(turns.contains(&next(&resolved, found(&["192.0.2.9"], 30)).await));
        tokio::time::advance(AGAIN).await;
        assert_eq!(next(&resolved, found(&["192.0.2.9"], 30)).await, "192.0.2.9:8080");
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_dns_waits_no_longer_than_it_makes_sense() {
        if !a_route_exists() {
            return eprintln!("SKIPPED: this host has no route to anywhere");
        }
        let resolved = Resolved::default();
        let ask = async |answer: Result<Addresses, DnsError>| {
            let mut given = None;
            let look_up = |limit| {
                given = Some(limit);
                async { answer }
            };
            let _ = resolved.addrs(&name(), look_up).await;
            given
        };
        assert_eq!(ask(missing()).await, Some(PATIENCE));
        tokio::time::advance(FAILURE_CACHED).await;
        assert_eq!(ask(found(&["192.0.2.1"], 30)).await, Some(PATIENCE));
        assert_eq!(ask(missing()).await, None);
        tokio::time::advance(Duration::from_secs(31)).await;
        assert_eq!(ask(missing()).await, Some(HASTE));
    }

    #[tokio::test(start_paused = true)]
    async fn all_who_wait_for_a_name_that_cannot_be_looked_up_wait_for_one_lookup() {
        let (resolved, n_lookups) = (Resolved::default(), AtomicUsize::new(0));
        let look_up = |limit| {
            n_lookups.fetch_add(1, Ordering::Relaxed);
            async move {
                tokio::time::sleep(limit).await;
                missing()
            }
        };
        let (start, name) = (Instant::now(), name());
        let all = (0..100).map(|_| resolved.addrs(&name, look_up));
        for failed in futures_util::future::join_all(all).await {
            assert!(failed.unwrap_err().to_string().contains("files.example"));
        }
        assert_eq!((n_lookups.load(Ordering::Relaxed), start.elapsed()), (1, PATIENCE));
    }

    #[test]
    fn nobody_gets_to_this_hosts_own_ports_or_its_link_by_a_record() {
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
            assert!(!may_be_dialled(&own.parse().unwrap()), "{own}");
        }
    }
}
