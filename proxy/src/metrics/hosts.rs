//! A map with host names as keys, for series and labels. Clients choose the names, so their number and length are limited.

use std::{borrow::Cow, collections::HashMap};

use parking_lot::Mutex;

/// A value for each host, such as its series.
pub(crate) struct HostMap<T>(Mutex<HostTable<T>>);

struct HostTable<T> {
    hosts: HashMap<Box<str>, T>,
    n_untrusted: usize,
}

/// The origin of a host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostSource {
    /// The local application, or a peer with an identity.
    Trusted,
    /// Other clients. Their hosts have a separate limit, so that they cannot use up the limit of trusted clients.
    Untrusted,
}

impl<T: Clone> HostMap<T> {
    /// The value of `host`, which `make` creates on first use; `None` if the name is too long or the limit is reached.
    pub(crate) fn get(&self, host: &str, source: HostSource, make: impl FnOnce(&str) -> T) -> Option<T> {
        if host.len() > MAX_HOST_BYTES {
            return None;
        }
        let host = match host.bytes().any(|byte| byte.is_ascii_uppercase()) {
            true => Cow::Owned(host.to_ascii_lowercase()),
            false => Cow::Borrowed(host),
        };
        let mut table = self.0.lock();
        if let Some(found) = table.hosts.get(&*host) {
            return Some(found.clone());
        }
        let (n_hosts, max_hosts) = match source {
            HostSource::Trusted => (table.hosts.len() - table.n_untrusted, MAX_TRUSTED_HOSTS),
            HostSource::Untrusted => (table.n_untrusted, MAX_UNTRUSTED_HOSTS),
        };
        if n_hosts >= max_hosts {
            return None;
        }
        let made = make(&host);
        table.hosts.insert(host.into(), made.clone());
        table.n_untrusted += usize::from(source == HostSource::Untrusted);
        Some(made)
    }
}

impl HostMap<()> {
    /// Adds `host`; false if the name is too long or the limit is reached.
    pub(crate) fn add(&self, host: &str, source: HostSource) -> bool {
        self.get(host, source, |_| ()).is_some()
    }
}

impl<T> Default for HostMap<T> {
    fn default() -> Self {
        Self(Mutex::new(HostTable {
            hosts: HashMap::new(),
            n_untrusted: 0,
        }))
    }
}

/// Maximum length of a DNS name, in bytes.
const MAX_HOST_BYTES: usize = 253;
const MAX_TRUSTED_HOSTS: usize = 1_000;
const MAX_UNTRUSTED_HOSTS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_case_insensitive_and_limited_in_number() {
        let hosts = HostMap::default();
        let get = |host: &str| hosts.get(host, HostSource::Trusted, str::to_owned);
        assert_eq!(get("Web.test").as_deref(), Some("web.test"));
        assert_eq!(
            get(&"x".repeat(MAX_HOST_BYTES)).map(|host| host.len()),
            Some(MAX_HOST_BYTES)
        );
        assert_eq!(get(&"x".repeat(MAX_HOST_BYTES + 1)), None);
        for n in 0..MAX_TRUSTED_HOSTS - 2 {
            assert!(get(&n.to_string()).is_some());
        }
        assert_eq!(get("one.more"), None);
        assert_eq!(get("WEB.TEST").as_deref(), Some("web.test"));
    }

    #[test]
    fn untrusted_hosts_do_not_use_up_the_limit_of_trusted_ones() {
        let hosts = HostMap::default();
        let n_found = |source, names: std::ops::Range<usize>| {
            let get = |n: usize| hosts.get(&n.to_string(), source, str::to_owned);
            names.filter(|n| get(*n).is_some()).count()
        };
        assert_eq!(n_found(HostSource::Untrusted, 0..10_000), MAX_UNTRUSTED_HOSTS);
        assert_eq!(n_found(HostSource::Trusted, 10_000..20_000), MAX_TRUSTED_HOSTS);
        assert_eq!(
            n_found(HostSource::Untrusted, 10_000..20_000),
            MAX_TRUSTED_HOSTS,
            "hosts of trusted clients are also found for untrusted ones"
        );
    }
}
