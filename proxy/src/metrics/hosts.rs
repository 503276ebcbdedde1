//! Hosts that are told apart on metrics: clients choose them, so there is an end to their number and their length.

use std::{borrow::Cow, collections::HashMap};

use parking_lot::Mutex;

/// What is counted of each host.
pub(crate) struct Hosts<T>(Mutex<HashMap<Box<str>, T>>);

impl<T: Clone> Hosts<T> {
    /// What is counted of `host`, made on first use; nothing where no host is as long, or others have taken all places.
    pub(crate) fn get(&self, host: &str, make: impl FnOnce(&str) -> T) -> Option<T> {
        if host.len() > LONGEST {
            return None;
        }
        let host = match host.bytes().any(|byte| byte.is_ascii_uppercase()) {
            true => Cow::Owned(host.to_ascii_lowercase()),
            false => Cow::Borrowed(host),
        };
        let mut known = self.0.lock();
        if let Some(found) = known.get(&*host) {
            return Some(found.clone());
        }
        if known.len() >= MOST {
            return None;
        }
        let made = make(&host);
        known.insert(host.into(), made.clone());
        Some(made)
    }
}

impl<T> Default for Hosts<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// Bytes in a name of DNS.
const LONGEST: usize = 253;
const MOST: usize = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_told_apart_whatever_their_case_until_there_are_too_many() {
        let hosts = Hosts::default();
        let of = |host: &str| hosts.get(host, str::to_owned);
        assert_eq!(of("Web.test").as_deref(), Some("web.test"));
        assert_eq!(of(&"x".repeat(LONGEST)).map(|host| host.len()), Some(LONGEST));
        assert_eq!(of(&"x".repeat(LONGEST + 1)), None);
        for n in 0..MOST - 2 {
            assert!(of(&n.to_string()).is_some());
        }
        assert_eq!(of("one.more"), None);
        assert_eq!(of("WEB.TEST").as_deref(), Some("web.test"));
    }
}
