//! From what was dialled or named to what is known of it: looked up once, followed while in use.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::watch, time::Instant};
use tulle_core::addr::{Addr, NameAddr};

use crate::{
    api::{
        destination::Destinations,
        dns::Resolver,
        policies::Policies,
        watch::{Refusal, Watched},
    },
    http::error::Error,
    metrics::unreadable::{self, Message},
    outbound::{
        backend::Factory,
        destination::{self, Destination, Snapshot},
        known::{Known, is_used},
    },
    policy::{
        client::{ClientPolicy, ForwardParams},
        decode,
        endpoint::EndpointSpec,
        meta::Meta,
        profile::Profile,
    },
};

/// What is known of all addresses and names in use.
pub(crate) struct Discover {
    pub(crate) destinations: Destinations,
    pub(crate) policies: Policies,
    pub(crate) resolver: Resolver,
    pub(crate) factory: Factory,
    /// Where updates are counted that cannot be read.
    pub(crate) unreadable: unreadable::Families,
    pub(crate) forward: ForwardParams,
    /// How long a target stays known that nobody uses.
    pub(crate) idle: Duration,
    /// Where the followers run.
    pub(crate) runtime: Handle,
    pub(crate) known: Mutex<Known>,
}

/// What is known of a target, and where else it is: addresses to turn to where nobody can be reached.
pub(super) type Found = (Arc<Destination>, Vec<SocketAddr>);

impl Discover {
    /// What is known of a target; waits for the first answer, but no longer than `limit` and [`MAX_WAIT`].
    ///
    /// # Errors
    /// The control plane did not say anything in time, or too much is known for one more name.
    pub(super) async fn get(self: &Arc<Self>, target: Addr, limit: Duration) -> Result<Arc<Destination>, Error> {
        let found = self.join_or_follow(target)?;
        if *found.known.borrow() {
            return Ok(found);
        }
        // Rare, and larger than the rest of a connection's start.
        let mut known = found.known.subscribe();
        let limit = limit.min(MAX_WAIT);
        match Box::pin(tokio::time::timeout(limit, known.wait_for(|known| *known))).await {
            Ok(Ok(_)) => {}
            _ => return Err(Error::Undiscovered(found.target.clone())),
        }
        drop(known);
        Ok(found)
    }

    /// What is known of a name: of its service, or else of one of its addresses in DNS; and the others.
    ///
    /// # Errors
    /// As of [`Self::get`], or it has no address.
    pub(super) async fn named(self: &Arc<Self>, name: NameAddr, limit: Duration) -> Result<Found, Error> {
        let found = self.get(Addr::Name(name.clone()), limit).await?;
        if !found.snapshot().is_foreign {
            return Ok((found, Vec::new()));
        }
        let look_up = |limit| self.resolver.addresses(&name.name, limit);
        let mut addrs = found.resolved.addrs(&name, look_up).await?;
        let first = addrs.remove(0);
        Ok((self.get(Addr::Socket(first), limit).await?, addrs))
    }

    fn join_or_follow(self: &Arc<Self>, target: Addr) -> Result<Arc<Destination>, Error> {
        let mut known = self.known.lock();
        if let Some(found) = known.get(&target) {
            *found.used_at.lock() = Instant::now();
            return Ok(found.clone());
        }
        let made = Arc::new(Destination::new(target));
        known.insert(made.clone(), |other| !self.must_keep(other))?;
        self.runtime.spawn(follow(self.clone(), made.clone()));
        Ok(made)
    }

    /// Whether what is known of a destination could not be found out again: the control plane cannot be asked.
    fn must_keep(&self, destination: &Destination) -> bool {
        *destination.known.borrow() && !self.policies.can_answer()
    }
}

/// How long anybody waits for the control plane, whatever it may take to find out what a connection speaks.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Keeps a destination's plan up to date until nobody has used it for a while.
async fn follow(discover: Arc<Discover>, destination: Arc<Destination>) {
    let mut profile = watch_profile(&discover.destinations, &discover.unreadable, &destination);
    let mut policy = watch_policy(&discover, &destination);
    loop {
        let unknown = matches!(&*policy.borrow(), Watched::Refused(refusal) if unknown_there(refusal));
        if let Some(snapshot) = snapshot(&discover, &destination, profile.as_ref(), &policy) {
            destination.publish(snapshot);
        }
        let profile_changed = async {
            let changed = match &mut profile {
                Some(profile) => profile.changed().await.is_ok(),
                None => false,
            };
            if !changed {
                std::future::pending::<()>().await;
            }
        };
        let policy_changed = async {
            if policy.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = profile_changed => {
                if unknown {
                    // What appears there is known sooner than the policy is asked for again. Until it is, the plan stays.
                    policy = watch_policy(&discover, &destination);
                }
            }
            () = policy_changed => {}
            () = unused(&discover, &destination) => return,
            () = destination.forgotten.notified() => return,
        }
    }
}

/// The profile of a destination; `None` for one that cannot be read and comes after none that could.
type WatchedProfile = watch::Receiver<Watched<Option<Profile>>>;

fn watch_profile(
    destinations: &Destinations,
    unreadable: &unreadable::Families,
    destination: &Destination,
) -> Option<WatchedProfile> {
    let target = &destination.target;
    let mut reporter = unreadable.reporter(Message::Profile, target.to_string());
    let (unread, mut last) = (destination.unread.clone(), None);
    destinations.profile(target, move |message| {
        match decode::profile::profile(message) {
            Ok(profile) => {
                *unread.profile.lock() = None;
                last = Some(profile);
            }
            Err(error) => *unread.profile.lock() = Some(reporter.report(&error)),
        }
        last.clone()
    })
}

/// The policy of a destination; where none could be read, the one that refuses everything.
fn watch_policy(discover: &Discover, destination: &Destination) -> watch::Receiver<Watched<ClientPolicy>> {
    let (target, timeout) = (&destination.target, discover.forward.detect_timeout);
    let mut reporter = discover
        .unreadable
        .reporter(Message::OutboundPolicy, target.to_string());
    let (unread, mut last) = (destination.unread.clone(), ClientPolicy::invalid(timeout));
    discover.policies.outbound(target, move |message| {
        match decode::outbound::client_policy(message) {
            Ok(policy) => {
                *unread.policy.lock() = None;
                last = policy;
            }
            Err(error) => *unread.policy.lock() = Some(reporter.report(&error)),
        }
        last.clone()
    })
}

/// What follows from what has been said so far; nothing while an answer is outstanding.
fn snapshot(
    discover: &Discover,
    destination: &Destination,
    profile: Option<&WatchedProfile>,
    policy: &watch::Receiver<Watched<ClientPolicy>>,
) -> Option<Snapshot> {
    let profile = profile.map(|profile| profile.borrow());
    let mut is_ambiguous = false;
    let profile = match profile.as_deref() {
        Some(Watched::Pending) => return None,
        Some(Watched::Known(Some(profile))) => Some(profile),
        Some(Watched::Known(None)) => {
            let invalid = ClientPolicy::invalid(discover.forward.detect_timeout);
            return Some(compiled(discover, destination, invalid, None));
        }
        Some(Watched::Refused(refusal)) => {
            is_ambiguous = refusal.code == tonic::Code::FailedPrecondition;
            None
        }
        None => None,
    };
    let policy = policy.borrow();
    let target = &destination.target;
    let forward =
        |name: &str, spec: Arc<EndpointSpec>| ClientPolicy::forward(Meta::default_named(name), spec, discover.forward);
    let mut is_foreign = false;
    let policy = match &*policy {
        Watched::Pending => return None,
        Watched::Known(policy) => policy.clone(),
        // Several workloads have the address, for as long as the control plane has not heard that one is gone. To whom
        // connections lead must not be guessed: whoever it is may want mTLS.
        Watched::Refused(refusal) if unknown_there(refusal) && is_ambiguous => return None,
        // Names come from clients: what is no name of a service is unknown, and not worth a warning.
        Watched::Refused(refusal) if unknown_there(refusal) || matches!(target, Addr::Name(_)) => {
            match (profile.and_then(|profile| profile.endpoint.clone()), target) {
                (Some(endpoint), _) => forward("endpoint", endpoint),
                (None, Addr::Socket(dst)) => forward("fallback", Arc::new(EndpointSpec::plain(*dst))),
                (None, Addr::Name(_)) => {
                    is_foreign = true;
                    ClientPolicy::nowhere(discover.forward.detect_timeout)
                }
            }
        }
        Watched::Refused(refusal) => {
            tracing::warn!(dst = %target, code = ?refusal.code, message = refusal.message, "destination is refused");
            ClientPolicy::invalid(discover.forward.detect_timeout)
        }
    };
    let compiled = compiled(discover, destination, policy, profile);
    Some(Snapshot { is_foreign, ..compiled })
}

fn compiled(
    discover: &Discover,
    destination: &Destination,
    policy: ClientPolicy,
    profile: Option<&Profile>,
) -> Snapshot {
    destination::compile(
        &discover.factory,
        policy,
        profile,
        discover.forward.queue,
        &destination.target,
        destination.known_snapshot().as_deref(),
    )
}

/// Whether the control plane has no policy for a destination, so that traffic goes where it was dialled.
fn unknown_there(refusal: &Refusal) -> bool {
    matches!(refusal.code, tonic::Code::NotFound | tonic::Code::Unimplemented)
}

/// Waits until the destination has been unused for the idle time, and forgets it.
///
/// Short connections may all be over whenever this looks, so what counts is when the last one came or was still there.
/// While the control plane cannot be asked again, what it has said is kept.
async fn unused(discover: &Discover, destination: &Arc<Destination>) {
    loop {
        let due = *destination.used_at.lock() + discover.idle;
        tokio::time::sleep_until(due).await;
        let mut known = discover.known.lock();
        let mut used_at = destination.used_at.lock();
        if discover.must_keep(destination) || is_used(destination) {
            *used_at = Instant::now();
        } else if *used_at + discover.idle <= Instant::now() {
            known.remove(destination);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use tulle_core::metrics::Registry;
    use tulle_proto::destination::{DestinationProfile, WeightedDst};

    use super::*;
    use crate::api::tests::{profiles_of, soon};

    fn named(name: &str, authority: &str) -> DestinationProfile {
        DestinationProfile {
            fully_qualified_name: name.to_owned(),
            dst_overrides: vec![WeightedDst {
                authority: authority.to_owned(),
                weight: 1,
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[tokio::test]
    async fn the_last_profile_that_could_be_read_stays() {
        let (good, bad) = (|name| named(name, "other.test:80"), |name| named(name, "no name"));
        let (said, _server, destinations) = profiles_of(bad("zero")).await;
        let registry = Registry::new();
        let destination = Destination::new("10.0.0.1:80".parse().unwrap());
        let unreadable = unreadable::Families::new(&registry);
        let mut watched = watch_profile(&destinations, &unreadable, &destination).unwrap();
        let n_unreadable = || {
            registry
                .render()
                .contains("tulle_unreadable_updates_total{kind=\"profile\"} 2")
        };
        let mut becomes = async |expected: Option<&str>| {
            soon(watched.wait_for(|known| {
                let Watched::Known(known) = known else { return false };
                known.as_ref().map(|known| known.name.as_deref().unwrap()) == expected
            }))
            .await
            .unwrap();
        };
        becomes(None).await; // there was none before it
        assert!(destination.unread.profile.lock().as_ref().unwrap().contains("no name"));
        said.send_replace(good("one"));
        becomes(Some("one")).await;
        assert_eq!(*destination.unread.profile.lock(), None);
        said.send_replace(bad("two"));
        soon(async {
            while !n_unreadable() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        becomes(Some("one")).await;
        assert!(destination.unread.profile.lock().is_some());
        said.send_replace(good("three"));
        becomes(Some("three")).await;
    }
}
