//! The targets that are known: so many addresses and so many names, of which those that nobody uses make room for others.

use std::{collections::HashMap, sync::Arc};

use tulle_core::addr::Addr;

use crate::{http::error::Error, outbound::destination::Destination};

/// Addresses are what applications dial, and names what clients ask for: neither makes room for the other.
#[derive(Default)]
pub(crate) struct Known {
    all: HashMap<Addr, Arc<Destination>>,
    n_names: usize,
}

impl Known {
    pub(super) fn get(&self, target: &Addr) -> Option<&Arc<Destination>> {
        self.all.get(target)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Destination>> {
        self.all.values()
    }

    /// Adds a target. Where there are as many of its kind as there may be, the one that was not used for longest is forgotten of
    /// those that nobody uses and that `may_forget` permits.
    ///
    /// # Errors
    /// All of them are in use, and this is a name. An address has a connection already, which is bounded elsewhere.
    pub(super) fn insert(
        &mut self,
        made: Arc<Destination>,
        may_forget: impl Fn(&Destination) -> bool,
    ) -> Result<(), Error> {
        let is_name = is_name(&made);
        let n = match is_name {
            true => self.n_names,
            false => self.all.len() - self.n_names,
        };
        if n >= MAX_OF_A_KIND {
            let same_kind = self.all.values().filter(|other| self::is_name(other) == is_name);
            let free = same_kind.filter(|other| !is_used(other) && may_forget(other));
            match free.min_by_key(|other| *other.used_at.lock()).cloned() {
                Some(other) => {
                    self.remove(&other);
                    other.forgotten.notify_one();
                }
                None if is_name => return Err(Error::TooManyNames { limit: MAX_OF_A_KIND }),
                None => {}
            }
        }
        self.n_names += usize::from(is_name);
        self.all.insert(made.target.clone(), made);
        Ok(())
    }

    /// Forgets this destination, and no other of the same target that has come after it.
    pub(super) fn remove(&mut self, destination: &Arc<Destination>) {
        let known = self.all.get(&destination.target);
        if known.is_some_and(|known| Arc::ptr_eq(known, destination)) {
            self.all.remove(&destination.target);
            self.n_names -= usize::from(is_name(destination));
        }
    }
}

/// Whether anybody else than the map and the follower holds it.
pub(super) fn is_used(destination: &Arc<Destination>) -> bool {
    const OURS: usize = 2;
    Arc::strong_count(destination) > OURS
}

fn is_name(destination: &Destination) -> bool {
    matches!(destination.target, Addr::Name(_))
}

/// Addresses that are known at a time while others are not in use, and names that are known at all.
const MAX_OF_A_KIND: usize = 4096;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// With what a follower holds of each.
    #[derive(Default)]
    struct Followed {
        known: Known,
        followers: Vec<Arc<Destination>>,
    }

    impl Followed {
        fn add(&mut self, target: &str) -> Result<(), Error> {
            let made = Arc::new(Destination::new(target.parse().unwrap()));
            self.followers.push(made.clone());
            self.known.insert(made, |_| true)
        }

        fn has(&self, target: &str) -> bool {
            self.known.get(&target.parse().unwrap()).is_some()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_and_names_make_no_room_for_each_other() {
        let mut followed = Followed::default();
        followed.add("web.shop:80").unwrap();
        for n in 0..=MAX_OF_A_KIND {
            followed.add(&format!("10.0.{}.{}:80", n / 256, n % 256)).unwrap();
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(followed.known.all().count(), MAX_OF_A_KIND + 1);
        assert!(followed.has("web.shop:80") && followed.has("10.0.0.1:80"));
        assert!(!followed.has("10.0.0.0:80"), "the least recently used");
        followed.followers[1].forgotten.notified().await; // its follower ends
        followed.add("10.0.0.0:80").unwrap();
        let forgotten = followed.followers[1].clone();
        followed.known.remove(&forgotten);
        assert!(followed.has("10.0.0.0:80"), "known anew");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_in_use_is_not_forgotten() {
        let mut followed = Followed::default();
        let mut users = Vec::new();
        for n in 0..MAX_OF_A_KIND {
            followed.add(&format!("web-{n}.shop:80")).unwrap();
            users.extend(followed.followers.last().cloned());
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(matches!(
            followed.add("one.too.many:80"),
            Err(Error::TooManyNames { .. })
        ));
        followed.followers.pop();
        drop(users.remove(7));
        followed.add("one.more:80").unwrap();
        assert!(!followed.has("web-7.shop:80") && followed.has("web-0.shop:80"));
        let mut address = Followed::default();
        for n in 0..=MAX_OF_A_KIND {
            address.add(&format!("10.0.{}.{}:80", n / 256, n % 256)).unwrap();
            users.extend(address.followers.last().cloned());
        }
        assert_eq!(
            address.known.all().count(),
            MAX_OF_A_KIND + 1,
            "what was dialled is not refused"
        );
    }
}
