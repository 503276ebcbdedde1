//! Hosts that are told apart on metrics: clients choose them, so there is an end to their number and their length.

use std::{borrow::Cow, collections::HashMap};

use parking_lot::Mutex;

/// What is counted of each host.
pub(crate) struct Hosts<T>(Mutex<Known<T>>);

struct Known<T> {
    hosts: HashMap<Box<str>, T>,
    n_of_strangers: usize,
}

/// Who says the name of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SaidBy {
    /// Our application, or a peer with an identity.
    Known,
    /// Anybody: they have places of their own, so that they cannot use up those of others.
    Stranger,
}

impl<T: Clone> Hosts<T> {
    /// What is counted of `host`, made on first use; nothing where no host is as long, or others have taken all places.
    pub(crate) fn get(&self, host: &str, said_by: SaidBy, make: impl FnOnce(&str) -> T) -> Option<T> {
        if host.len() > LONGEST {
            return None;
        }
        let host = match host.bytes().any(|byte| byte.is_ascii_uppercase()) {
            true => Cow::Owned(host.to_ascii_lowercase()),
            false => Cow::Borrowed(host),
        };
        let mut known = self.0.lock();
        if let Some(found) = known.hosts.get(&*host) {
            return Some(found.clone());
        }
        let (taken, most) = match said_by {
            SaidBy::Known => (known.hosts.len() - known.n_of_strangers, MOST),
            SaidBy::Stranger => (known.n_of_strangers, MOST_OF_STRANGERS),
        };
        if taken >= most {
            return None;
        }
        let made = make(&host);
        known.hosts.insert(host.into(), made.clone());
        known.n_of_strangers += usize::from(said_by == SaidBy::Stranger);
        Some(made)
    }
}

impl<T> Default for Hosts<T> {
    fn default() -> Self {
        Self(Mutex::new(Known {
            hosts: HashMap::new(),
            n_of_strangers: 0,
        }))
    }
}

/// Bytes in a name of DNS.
const LONGEST: usize = 253;
const MOST: usize = 1_000;
const MOST_OF_STRANGERS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_told_apart_whatever_their_case_until_there_are_too_many() {
        let hosts = Hosts::default();
        let of = |host: &str| hosts.get(host, SaidBy::Known, str::to_owned);
        assert_eq!(of("Web.test").as_deref(), Some("web.test"));
        assert_eq!(of(&"x".repeat(LONGEST)).map(|host| host.len()), Some(LONGEST));
        assert_eq!(of(&"x".repeat(LONGEST + 1)), None);
        for n in 0..MOST - 2 {
            assert!(of(&n.to_string()).is_some());
        }
        assert_eq!(of("one.more"), None);
        assert_eq!(of("WEB.TEST").as_deref(), Some("web.test"));
    }

    #[test]
    fn strangers_do_not_use_up_the_places_of_others() {
        let hosts = Hosts::default();
        let told_apart = |said_by, names: std::ops::Range<usize>| {
            let of = |n: usize| hosts.get(&n.to_string(), said_by, str::to_owned);
            names.filter(|n| of(*n).is_some()).count()
        };
        assert_eq!(told_apart(SaidBy::Stranger, 0..10_000), MOST_OF_STRANGERS);
        assert_eq!(told_apart(SaidBy::Known, 10_000..20_000), MOST);
        assert_eq!(
            told_apart(SaidBy::Stranger, 10_000..20_000),
            MOST,
            "what is known is found"
        );
    }
}
