//! Finds the destination of a dialled address or a requested name, and watches its policy and profile while it is cached.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::watch, time::Instant};
use tulle_core::{
    addr::{Addr, NameAddr},
    log_limit::LogLimiter,
    warn_limited,
};

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
        client::{ClientPolicy, LocalPolicyConfig},
        decode,
        endpoint::EndpointSpec,
        meta::Meta,
        profile::Profile,
    },
};

/// The cached destinations, and the clients and settings that discover others.
pub(crate) struct Discovery {
    pub(crate) destinations: Destinations,
    pub(crate) policies: Policies,
    pub(crate) resolver: Resolver,
    pub(crate) factory: BackendFactory,
    /// Counts updates that cannot be decoded.
    pub(crate) invalid_updates: invalid_updates::Families,
    pub(crate) local_policy_config: LocalPolicyConfig,
    /// Time that an unused destination stays in the cache.
    pub(crate) idle_timeout: Duration,
    /// Runs the watch tasks of destinations.
    pub(crate) runtime: Handle,
    pub(crate) cache: Mutex<DestinationCache>,
    /// Limits log lines about targets that are refused, or whose DNS lookup fails, by target and cause. Shared with the connectors.
    pub(crate) log_limiter: Arc<LogLimiter<(Addr, &'static str)>>,
}

/// A destination, and the addresses to try next if the destination cannot be reached.
pub(in crate::outbound) type ResolvedTarget = (Arc<Destination>, Vec<SocketAddr>);

impl Discovery {
    /// Returns the destination of a target. Waits for its first snapshot, at most the shorter of `limit` and
    /// [`MAX_DISCOVERY_WAIT`].
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
        let mut has_snapshot = found.has_snapshot.subscribe();
        let limit = limit.min(MAX_DISCOVERY_WAIT);
        match Box::pin(tokio::time::timeout(limit, has_snapshot.wait_for(|has| *has))).await {
            Ok(Ok(_)) => {}
            _ => return Err(Error::DiscoveryTimeout(found.target.clone())),
        }
        drop(has_snapshot);
        Ok(found)
    }

    /// Returns the destination of a name: the service if the control plane knows it. Otherwise returns the destination of one of
    /// its DNS addresses, and the other addresses.
    ///
    /// # Errors
    /// The errors of [`Self::get`], or DNS has no address for the name.
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
        let mut addrs = found.dns_addresses.addrs(&name, &self.log_limiter, look_up).await?;
        let first = addrs.remove(0);
        Ok((self.get(Addr::Socket(first), limit).await?, addrs))
    }

    fn get_or_watch(self: &Arc<Self>, target: Addr) -> Result<Arc<Destination>, Error> {
        let mut cache = self.cache.lock();
        if let Some(found) = cache.get(&target) {
            *found.used_at.lock() = Instant::now();
            return Ok(found.clone());
        }
        let destination = Arc::new(Destination::new(target));
        cache.insert(destination.clone(), |other| !self.must_retain(other))?;
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
async fn watch_destination(discovery: Arc<Discovery>, destination: Arc<Destination>) {
    let mut profile = watch_profile(&discovery.destinations, &discovery.invalid_updates, &destination);
    let mut policy = watch_policy(&discovery, &destination);
    loop {
        let is_unknown = matches!(&*policy.borrow(), WatchState::Refused(refusal) if is_unknown_destination(refusal));
        if let Some(snapshot) = build_snapshot(&discovery, &destination, profile.as_ref(), &policy) {
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
                if is_unknown {
                    // A changed profile means that the destination may exist now: request its policy now, not at the next retry.
                    // The snapshot stays until its policy arrives.
                    policy = watch_policy(&discovery, &destination);
                }
            }
            () = policy_changed => {}
            () = evict_when_idle(&discovery, &destination) => return,
            () = destination.evicted.notified() => return,
        }
    }
}

/// The last valid profile of a destination; `None` if the control plane has sent invalid ones only.
type ProfileWatch = watch::Receiver<WatchState<Option<Profile>>>;

/// Watches the profile of a destination. Returns `None` if its target cannot have one.
fn watch_profile(
    destinations: &Destinations,
    invalid_updates: &invalid_updates::Families,
    destination: &Destination,
) -> Option<ProfileWatch> {
    let target = &destination.target;
    let mut reporter = invalid_updates.reporter(UpdateKind::Profile, target.to_string());
    let (update_errors, mut last) = (destination.update_errors.clone(), None);
    destinations.profile(target, move |message| {
        match decode::profile::profile(message, |error| drop(reporter.report(&error))) {
            Ok(profile) => {
                *update_errors.profile.lock() = None;
                last = Some(profile);
            }
            Err(error) => *update_errors.profile.lock() = Some(reporter.report(&error)),
        }
        last.clone()
    })
}

/// Watches the policy of a destination. An invalid policy is replaced by the last valid one. If there is no valid one, it is
/// replaced by a policy that refuses all requests and connections.
fn watch_policy(discovery: &Discovery, destination: &Destination) -> watch::Receiver<WatchState<ClientPolicy>> {
    let (target, timeout) = (&destination.target, discovery.local_policy_config.detect_timeout);
    let mut reporter = discovery
        .invalid_updates
        .reporter(UpdateKind::OutboundPolicy, target.to_string());
    let (update_errors, mut last) = (destination.update_errors.clone(), None);
    discovery.policies.outbound(target, move |message| {
        let error = match decode::outbound::client_policy(message) {
            Ok(policy) => {
                last = Some(policy);
                None
            }
            Err(error) => Some(reporter.report(&error)),
        };
        update_errors.policy.lock().clone_from(&error);
        last.clone()
            .unwrap_or_else(|| ClientPolicy::invalid(error.unwrap_or_default(), timeout))
    })
}

/// Builds a snapshot from the latest profile and policy. Returns `None` while an answer is outstanding, or while several workloads
/// have the address and the address has no policy.
fn build_snapshot(
    discovery: &Discovery,
    destination: &Destination,
    profile_watch: Option<&ProfileWatch>,
    policy_watch: &watch::Receiver<WatchState<ClientPolicy>>,
) -> Option<Snapshot> {
    let profile_state = profile_watch.map(|profile| profile.borrow());
    let timeout = discovery.local_policy_config.detect_timeout;
    let refuse_all = |policy| Some(compile_snapshot(discovery, destination, policy, None));
    if let Some(denial) = profile_state.as_deref().and_then(WatchState::denial) {
        let reason = denial.to_string();
        let policy = ClientPolicy::denied(&reason, timeout);
        *destination.update_errors.profile.lock() = Some(reason);
        return refuse_all(policy);
    }
    if let Some(denial) = policy_watch.borrow().denial() {
        let reason = denial.to_string();
        let policy = ClientPolicy::denied(&reason, timeout);
        *destination.update_errors.policy.lock() = Some(reason);
        return refuse_all(policy);
    }
    let (profile, is_shared_address) = match profile_state.as_deref() {
        None => (None, false),
        Some(WatchState::Pending) => return None,
        Some(WatchState::Known(Some(profile))) => (Some(profile), false),
        Some(WatchState::Known(None)) => {
            let reason = destination.update_errors.profile.lock().clone().unwrap_or_default();
            return refuse_all(ClientPolicy::invalid(reason, timeout));
        }
        // Linkerd's control plane sends `FAILED_PRECONDITION` for an address that several workloads have.
        Some(WatchState::Refused(refusal)) => {
            *destination.update_errors.profile.lock() = None;
            (None, refusal.code == tonic::Code::FailedPrecondition)
        }
    };
    let target = &destination.target;
    let mut is_unknown_name = false;
    let policy = match &*policy_watch.borrow() {
        WatchState::Pending => return None,
        WatchState::Known(policy) => policy.clone(),
        // Several workloads have this address. There is no snapshot until only one of them remains, because a connection in
        // plaintext could reach a workload that requires mTLS.
        WatchState::Refused(refusal) if is_unknown_destination(refusal) && is_shared_address => return None,
        // A refused name is treated as unknown. There is no warning, because clients choose names.
        WatchState::Refused(refusal) if is_unknown_destination(refusal) || matches!(target, Addr::Name(_)) => {
            *destination.update_errors.policy.lock() = None;
            let endpoint = profile.and_then(|profile| profile.endpoint.clone());
            is_unknown_name = endpoint.is_none() && matches!(target, Addr::Name(_));
            unknown_destination_policy(target, endpoint, discovery.local_policy_config)
        }
        WatchState::Refused(refusal) => {
            let target_and_cause = (target.clone(), "invalid-policy");
            warn_limited!(
                discovery.log_limiter,
                target_and_cause,
                "the control plane refuses the policy of a destination",
                dst = %target,
                code = ?refusal.code,
                message = refusal.message
            );
            let reason = format!("the control plane refuses the destination: {}", refusal.message);
            *destination.update_errors.policy.lock() = Some(reason.clone());
            ClientPolicy::invalid(reason, timeout)
        }
    };
    let compiled = compile_snapshot(discovery, destination, policy, profile);
    Some(Snapshot {
        is_unknown_name,
        ..compiled
    })
}

/// The policy of a destination for which the control plane has none. `endpoint` is the endpoint in the profile of the destination.
fn unknown_destination_policy(
    target: &Addr,
    endpoint: Option<Arc<EndpointSpec>>,
    config: LocalPolicyConfig,
) -> ClientPolicy {
    match (endpoint, target) {
        (Some(endpoint), _) => ClientPolicy::forward(Meta::default_named("endpoint"), endpoint, config),
        (None, Addr::Socket(dst)) => {
            let endpoint = Arc::new(EndpointSpec::plain(*dst));
            ClientPolicy::forward(Meta::default_named("fallback"), endpoint, config)
        }
        (None, Addr::Name(_)) => ClientPolicy::unknown_name(config.detect_timeout),
    }
}

fn compile_snapshot(
    discovery: &Discovery,
    destination: &Destination,
    policy: ClientPolicy,
    profile: Option<&Profile>,
) -> Snapshot {
    let previous = destination.try_snapshot();
    let compiler = Compiler {
        factory: &discovery.factory,
        policy,
        profile,
        queue: discovery.local_policy_config.queue,
        dst: &destination.target,
        previous: previous.as_deref(),
    };
    compiler.compile()
}

/// Whether the control plane has no policy for a destination.
fn is_unknown_destination(refusal: &Refusal) -> bool {
    matches!(refusal.code, tonic::Code::NotFound | tonic::Code::Unimplemented)
}

/// Waits until the destination has been unused for the idle timeout, then removes it from the cache.
///
/// Each new connection restarts the timeout. Otherwise a destination with only short connections would be removed between two of
/// them. While the control plane is unreachable, destinations with a snapshot stay cached.
async fn evict_when_idle(discovery: &Discovery, destination: &Arc<Destination>) {
    loop {
        let due = *destination.used_at.lock() + discovery.idle_timeout;
        tokio::time::sleep_until(due).await;
        let mut cache = discovery.cache.lock();
        let mut used_at = destination.used_at.lock();
        if discovery.must_retain(destination) || is_in_use(destination) {
            *used_at = Instant::now();
        } else if *used_at + discovery.idle_timeout <= Instant::now() {
            cache.remove(destination);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use tulle_core::metrics::Registry;
    use tulle_proto::destination::{DestinationProfile, WeightedDst};

    use super::*;
    use crate::api::tests::{start_profile_server, with_timeout};

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

    #[test]
    fn only_a_refusal_with_permission_denied_is_a_denial() {
        use tonic::Code;
        for code in [
            Code::PermissionDenied,
            Code::NotFound,
            Code::InvalidArgument,
            Code::FailedPrecondition,
            Code::Unimplemented,
        ] {
            let refusal = Refusal {
                description: "policy of web.shop:80".to_owned(),
                code,
                message: "only clients in namespace shop".to_owned(),
            };
            let state = WatchState::<()>::Refused(refusal.clone());
            let expected = (code == Code::PermissionDenied).then_some(&refusal);
            assert_eq!(state.denial(), expected, "{code:?}");
        }
        assert_eq!(WatchState::Known(()).denial(), None);
        assert_eq!(WatchState::<()>::Pending.denial(), None);
    }

    #[tokio::test]
    async fn an_invalid_profile_keeps_the_last_valid_one() {
        let (good, bad) = (|name| named(name, "other.test:80"), |name| named(name, "no name"));
        let (updates, _server, destinations) = start_profile_server(bad("zero")).await;
        let registry = Registry::new();
        let destination = Destination::new("10.0.0.1:80".parse().unwrap());
        let invalid_updates = invalid_updates::Families::new(&registry);
        let mut watched = watch_profile(&destinations, &invalid_updates, &destination).unwrap();
        let both_are_counted = || {
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
        expect_name(None).await; // no valid profile was sent before
        assert!(
            destination
                .update_errors
                .profile
                .lock()
                .as_ref()
                .unwrap()
                .contains("no name")
        );
        updates.send_replace(good("one"));
        expect_name(Some("one")).await;
        assert_eq!(*destination.update_errors.profile.lock(), None);
        updates.send_replace(bad("two"));
        with_timeout(async {
            while !both_are_counted() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        expect_name(Some("one")).await;
        assert!(destination.update_errors.profile.lock().is_some());
        updates.send_replace(good("three"));
        expect_name(Some("three")).await;
    }
}
