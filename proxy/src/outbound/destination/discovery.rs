//! Finds the destination of a dialled address or a requested name, and watches its policy and profile while it is in use.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::watch, time::Instant};
use tulle_core::addr::{Addr, NameAddr};

use crate::{
    api::{
        destination::Destinations,
        dns::Resolver,
        policies::Policies,
        watch::{Refusal, WatchState},
    },
    http::error::Error,
    metrics::invalid_updates::{self, UpdateKind},
    outbound::{
        backend::BackendFactory,
        destination::{
            cache::{DestinationCache, is_in_use},
            compile::Compiler,
            snapshot::{Destination, Snapshot},
        },
    },
    policy::{
        client::{ClientPolicy, ForwardParams},
        decode,
        endpoint::EndpointSpec,
        meta::Meta,
        profile::Profile,
    },
};

/// All destinations in use, and what is needed to find others.
pub(crate) struct Discovery {
    pub(crate) destinations: Destinations,
    pub(crate) policies: Policies,
    pub(crate) resolver: Resolver,
    pub(crate) factory: BackendFactory,
    /// Counts updates that cannot be decoded.
    pub(crate) invalid_updates: invalid_updates::Families,
    pub(crate) forward_params: ForwardParams,
    /// How long an unused destination stays in the cache.
    pub(crate) idle_timeout: Duration,
    /// Runs the watch tasks of destinations.
    pub(crate) runtime: Handle,
    pub(crate) cache: Mutex<DestinationCache>,
}

/// A destination, and the other addresses to try if it cannot be reached.
pub(in crate::outbound) type ResolvedTarget = (Arc<Destination>, Vec<SocketAddr>);

impl Discovery {
    /// Returns the destination of a target. Waits for its first snapshot, at most `limit` and [`MAX_DISCOVERY_WAIT`].
    ///
    /// # Errors
    /// The control plane did not answer in time, or the cache is full of names in use.
    pub(in crate::outbound) async fn get(
        self: &Arc<Self>,
        target: Addr,
        limit: Duration,
    ) -> Result<Arc<Destination>, Error> {
        let found = self.get_or_watch(target)?;
        if *found.has_snapshot.borrow() {
            return Ok(found);
        }
        // Boxed because it is rare and larger than the rest of connection setup.
        let mut known = found.has_snapshot.subscribe();
        let limit = limit.min(MAX_DISCOVERY_WAIT);
        match Box::pin(tokio::time::timeout(limit, known.wait_for(|known| *known))).await {
            Ok(Ok(_)) => {}
            _ => return Err(Error::DiscoveryTimeout(found.target.clone())),
        }
        drop(known);
        Ok(found)
    }

    /// Returns the destination of a name: the service, or else one of its DNS addresses together with the other addresses.
    ///
    /// # Errors
    /// As [`Self::get`], or DNS has no address for the name.
    pub(in crate::outbound) async fn resolve_name(
        self: &Arc<Self>,
        name: NameAddr,
        limit: Duration,
    ) -> Result<ResolvedTarget, Error> {
        let found = self.get(Addr::Name(name.clone()), limit).await?;
        if !found.snapshot().is_unknown_name {
            return Ok((found, Vec::new()));
        }
        let look_up = |limit| self.resolver.resolve_ips(&name.name, limit);
        let mut addrs = found.dns_addresses.addrs(&name, look_up).await?;
        let first = addrs.remove(0);
        Ok((self.get(Addr::Socket(first), limit).await?, addrs))
    }

    fn get_or_watch(self: &Arc<Self>, target: Addr) -> Result<Arc<Destination>, Error> {
        let mut known = self.cache.lock();
        if let Some(found) = known.get(&target) {
            *found.used_at.lock() = Instant::now();
            return Ok(found.clone());
        }
        let destination = Arc::new(Destination::new(target));
        known.insert(destination.clone(), |other| !self.must_retain(other))?;
        self.runtime.spawn(watch_destination(self.clone(), destination.clone()));
        Ok(destination)
    }

    /// Whether a destination must stay cached: the control plane is unreachable, so it could not be discovered again.
    fn must_retain(&self, destination: &Destination) -> bool {
        *destination.has_snapshot.borrow() && !self.policies.is_reachable()
    }
}

/// Maximum time to wait for the control plane, even if the timeout of protocol detection is longer.
const MAX_DISCOVERY_WAIT: Duration = Duration::from_secs(10);

/// Keeps the snapshot of a destination up to date until the destination is evicted.
async fn watch_destination(discover: Arc<Discovery>, destination: Arc<Destination>) {
    let mut profile = watch_profile(&discover.destinations, &discover.invalid_updates, &destination);
    let mut policy = watch_policy(&discover, &destination);
    loop {
        let unknown = matches!(&*policy.borrow(), WatchState::Refused(refusal) if is_unknown_destination(refusal));
        if let Some(snapshot) = build_snapshot(&discover, &destination, profile.as_ref(), &policy) {
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
                    // A changed profile means that the destination may exist now: request its policy now, not at the next retry.
                    // The snapshot stays until then.
                    policy = watch_policy(&discover, &destination);
                }
            }
            () = policy_changed => {}
            () = evict_when_idle(&discover, &destination) => return,
            () = destination.evicted.notified() => return,
        }
    }
}

/// The profile of a destination; `None` while no profile could be decoded.
type ProfileWatch = watch::Receiver<WatchState<Option<Profile>>>;

fn watch_profile(
    destinations: &Destinations,
    unreadable: &invalid_updates::Families,
    destination: &Destination,
) -> Option<ProfileWatch> {
    let target = &destination.target;
    let mut reporter = unreadable.reporter(UpdateKind::Profile, target.to_string());
    let (decode_errors, mut last) = (destination.decode_errors.clone(), None);
    destinations.profile(target, move |message| {
        match decode::profile::profile(message) {
            Ok(profile) => {
                *decode_errors.profile.lock() = None;
                last = Some(profile);
            }
            Err(error) => *decode_errors.profile.lock() = Some(reporter.report(&error)),
        }
        last.clone()
    })
}

/// Watches the policy of a destination. While none could be decoded, it is a policy that refuses everything.
fn watch_policy(discover: &Discovery, destination: &Destination) -> watch::Receiver<WatchState<ClientPolicy>> {
    let (target, timeout) = (&destination.target, discover.forward_params.detect_timeout);
    let mut reporter = discover
        .invalid_updates
        .reporter(UpdateKind::OutboundPolicy, target.to_string());
    let (decode_errors, mut last) = (destination.decode_errors.clone(), ClientPolicy::invalid(timeout));
    discover.policies.outbound(target, move |message| {
        match decode::outbound::client_policy(message) {
            Ok(policy) => {
                *decode_errors.policy.lock() = None;
                last = policy;
            }
            Err(error) => *decode_errors.policy.lock() = Some(reporter.report(&error)),
        }
        last.clone()
    })
}

/// Builds a snapshot from the latest profile and policy; `None` while an answer is outstanding.
fn build_snapshot(
    discover: &Discovery,
    destination: &Destination,
    profile: Option<&ProfileWatch>,
    policy: &watch::Receiver<WatchState<ClientPolicy>>,
) -> Option<Snapshot> {
    let profile = profile.map(|profile| profile.borrow());
    let mut is_ambiguous = false;
    let profile = match profile.as_deref() {
        Some(WatchState::Pending) => return None,
        Some(WatchState::Known(Some(profile))) => Some(profile),
        Some(WatchState::Known(None)) => {
            let invalid = ClientPolicy::invalid(discover.forward_params.detect_timeout);
            return Some(compile_snapshot(discover, destination, invalid, None));
        }
        Some(WatchState::Refused(refusal)) => {
            is_ambiguous = refusal.code == tonic::Code::FailedPrecondition;
            None
        }
        None => None,
    };
    let policy = policy.borrow();
    let target = &destination.target;
    let forward = |name: &str, spec: Arc<EndpointSpec>| {
        ClientPolicy::forward(Meta::default_named(name), spec, discover.forward_params)
    };
    let mut is_unknown_name = false;
    let policy = match &*policy {
        WatchState::Pending => return None,
        WatchState::Known(policy) => policy.clone(),
        // Several workloads have the address, until the control plane learns that one is gone. Do not dial in plaintext: the
        // workload may require mTLS.
        WatchState::Refused(refusal) if is_unknown_destination(refusal) && is_ambiguous => return None,
        // Clients choose names. A refused name is treated as unknown, without a warning.
        WatchState::Refused(refusal) if is_unknown_destination(refusal) || matches!(target, Addr::Name(_)) => {
            match (profile.and_then(|profile| profile.endpoint.clone()), target) {
                (Some(endpoint), _) => forward("endpoint", endpoint),
                (None, Addr::Socket(dst)) => forward("fallback", Arc::new(EndpointSpec::plain(*dst))),
                (None, Addr::Name(_)) => {
                    is_unknown_name = true;
                    ClientPolicy::unknown_name(discover.forward_params.detect_timeout)
                }
            }
        }
        WatchState::Refused(refusal) => {
            tracing::warn!(dst = %target, code = ?refusal.code, message = refusal.message, "refused by the control plane");
            ClientPolicy::invalid(discover.forward_params.detect_timeout)
        }
    };
    let compiled = compile_snapshot(discover, destination, policy, profile);
    Some(Snapshot {
        is_unknown_name,
        ..compiled
    })
}

fn compile_snapshot(
    discover: &Discovery,
    destination: &Destination,
    policy: ClientPolicy,
    profile: Option<&Profile>,
) -> Snapshot {
    let previous = destination.try_snapshot();
    let compiler = Compiler {
        factory: &discover.factory,
        policy,
        profile,
        queue: discover.forward_params.queue,
        dst: &destination.target,
        previous: previous.as_deref(),
    };
    compiler.compile()
}

/// Whether the control plane has no policy for a destination, so that traffic goes to the dialled address.
fn is_unknown_destination(refusal: &Refusal) -> bool {
    matches!(refusal.code, tonic::Code::NotFound | tonic::Code::Unimplemented)
}

/// Waits until the destination has been unused for the idle timeout, then removes it from the cache.
///
/// The time of the last use counts, because short connections may all have ended at the time of each check. While the
/// control plane is unreachable, destinations with a snapshot stay cached.
async fn evict_when_idle(discover: &Discovery, destination: &Arc<Destination>) {
    loop {
        let due = *destination.used_at.lock() + discover.idle_timeout;
        tokio::time::sleep_until(due).await;
        let mut known = discover.cache.lock();
        let mut used_at = destination.used_at.lock();
        if discover.must_retain(destination) || is_in_use(destination) {
            *used_at = Instant::now();
        } else if *used_at + discover.idle_timeout <= Instant::now() {
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
    use crate::api::tests::{profiles_of, with_timeout};

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
    async fn an_invalid_profile_keeps_the_last_valid_one() {
        let (good, bad) = (|name| named(name, "other.test:80"), |name| named(name, "no name"));
        let (updates, _server, destinations) = profiles_of(bad("zero")).await;
        let registry = Registry::new();
        let destination = Destination::new("10.0.0.1:80".parse().unwrap());
        let unreadable = invalid_updates::Families::new(&registry);
        let mut watched = watch_profile(&destinations, &unreadable, &destination).unwrap();
        let n_unreadable = || {
            registry
                .render()
                .contains("tulle_unreadable_updates_total{kind=\"profile\"} 2")
        };
        let mut expect_name = async |expected: Option<&str>| {
            with_timeout(watched.wait_for(|known| {
                let WatchState::Known(known) = known else { return false };
                known.as_ref().map(|known| known.name.as_deref().unwrap()) == expected
            }))
            .await
            .unwrap();
        };
        expect_name(None).await; // there was none before it
        assert!(
            destination
                .decode_errors
                .profile
                .lock()
                .as_ref()
                .unwrap()
                .contains("no name")
        );
        updates.send_replace(good("one"));
        expect_name(Some("one")).await;
        assert_eq!(*destination.decode_errors.profile.lock(), None);
        updates.send_replace(bad("two"));
        with_timeout(async {
            while !n_unreadable() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        expect_name(Some("one")).await;
        assert!(destination.decode_errors.profile.lock().is_some());
        updates.send_replace(good("three"));
        expect_name(Some("three")).await;
    }
}
