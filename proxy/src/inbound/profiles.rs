//! ServiceProfiles of inbound requests: metrics by route, and response classes.
//!
//! A meshed client names its profile in `l5d-dst-canonical`. For other requests, the authority selects the profile. Profiles
//! only affect metrics, so a request waits a bounded time for its profile and is then served without it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use http::{Response, StatusCode};
use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::watch, time::Instant};
use tulle_core::{
    addr::{Addr, NameAddr},
    metrics::Registry,
};

use crate::{
    api::{destination::Destinations, watch::WatchState},
    http::{
        body::Body,
        error::Error,
        lifecycle::classify::{self, ProfileResponseObserver},
    },
    metrics::{
        http::{self as http_metrics, Series},
        invalid_updates::{self, UpdateKind},
    },
    policy::{
        decode,
        matches::RequestAttributes,
        profile::{self, Class, Profile, ProfileRoute},
    },
};

/// The profiles of all names in use.
pub(crate) struct Profiles {
    destinations: Destinations,
    families: http_metrics::Families,
    invalid_updates: invalid_updates::Families,
    timeouts: ProfileTimeouts,
    /// The runtime of the tasks that evict idle profiles.
    runtime: Handle,
    /// The key is a name with its port: as written in `l5d-dst-canonical`, or in lower case if it comes from the authority.
    entries: Mutex<HashMap<Box<[u8]>, Arc<ProfileEntry>>>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ProfileTimeouts {
    /// Maximum time that requests wait for the first answer, from the first request for a name. Later requests wait for the rest of
    /// this time.
    pub(crate) wait_timeout: Duration,
    /// Time after which the watch of an unused name ends.
    pub(crate) idle_timeout: Duration,
}

/// The watch of one profile.
pub(super) struct ProfileEntry {
    profile: watch::Receiver<WatchState<Arc<ProfileRoutes>>>,
    wait_deadline: Instant,
    used_at: Mutex<Instant>,
}

/// Whether a client that names a profile is meshed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientTrust {
    /// The client has an identity.
    Trusted,
    Untrusted,
}

/// The limit of watched profiles is reached. No further one is watched until an unused one is evicted.
#[derive(Debug)]
pub(super) struct ProfileLimitReached;

pub(super) struct ProfileRoutes {
    routes: Arc<[ProfileRoute]>,
    /// In the order of the routes; the last one is for requests that match no route.
    series: Vec<Arc<Series>>,
}

/// Records one request in the metrics of its route. If it is dropped without a result, it records that the client disconnected.
pub(super) struct ProfileRequestGuard {
    routes: Arc<ProfileRoutes>,
    /// `None` if no route matches.
    route_index: Option<usize>,
    is_recorded: bool,
}

impl Profiles {
    pub(crate) fn new(
        registry: &Registry,
        destinations: Destinations,
        timeouts: ProfileTimeouts,
        runtime: Handle,
    ) -> Arc<Self> {
        Arc::new(Self {
            destinations,
            families: http_metrics::Families::with_prefix(
                registry,
                "route_",
                ", by route of the ServiceProfile, each request counted once",
            ),
            invalid_updates: invalid_updates::Families::new(registry),
            timeouts,
            runtime,
            entries: Mutex::default(),
        })
    }

    /// Returns the watch of a name, and starts it on first use; `None` if the name cannot have a profile.
    ///
    /// # Errors
    /// The name is not watched yet, and the limit is reached.
    pub(super) fn get_or_watch(
        self: &Arc<Self>,
        name: &[u8],
        trust: ClientTrust,
    ) -> Result<Option<Arc<ProfileEntry>>, ProfileLimitReached> {
        let now = Instant::now();
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.get(name) {
            *entry.used_at.lock() = now;
            return Ok(Some(entry.clone()));
        }
        let parsed = str::from_utf8(name).ok().and_then(|name| name.parse().ok());
        let Some(target) =
            parsed.filter(|name: &NameAddr| self.destinations.may_have_profile(&Addr::Name(name.clone())))
        else {
            return Ok(None);
        };
        let max_profiles = match trust {
            ClientTrust::Trusted => MAX_PROFILES,
            ClientTrust::Untrusted => MAX_UNTRUSTED_PROFILES,
        };
        if entries.len() >= max_profiles {
            return Err(ProfileLimitReached);
        }
        let wait_timeout = match self.destinations.is_reachable() {
            true => self.timeouts.wait_timeout,
            false => Duration::ZERO,
        };
        let Some(profile) = self.watch_profile(target) else {
            return Ok(None);
        };
        let entry = Arc::new(ProfileEntry {
            profile,
            wait_deadline: now + wait_timeout,
            used_at: Mutex::new(now),
        });
        entries.insert(name.into(), entry.clone());
        self.runtime.spawn(evict_when_idle(self.clone(), name.into()));
        Ok(Some(entry))
    }

    fn watch_profile(&self, name: NameAddr) -> Option<watch::Receiver<WatchState<Arc<ProfileRoutes>>>> {
        let (families, dst) = (self.families.clone(), name.to_string());
        let mut reporter = self.invalid_updates.reporter(UpdateKind::Profile, dst.clone());
        let mut last = Arc::new(ProfileRoutes::new(&families, &dst, Profile::default()));
        self.destinations.profile(&Addr::Name(name), move |message| {
            match decode::profile::profile(message, |error| drop(reporter.report(&error))) {
                Ok(profile) => last = Arc::new(ProfileRoutes::new(&families, &dst, profile)),
                Err(error) => drop(reporter.report(&error)),
            }
            last.clone()
        })
    }
}

impl ProfileEntry {
    /// The routes of the profile. Returns `None` if there is none, or if the control plane has not answered in time.
    pub(super) async fn routes(&self) -> Option<Arc<ProfileRoutes>> {
        if matches!(&*self.profile.borrow(), WatchState::Pending) {
            // Boxed: rare, and larger than the rest of this future.
            Box::pin(self.wait_until_known()).await;
        }
        match &*self.profile.borrow() {
            WatchState::Known(routes) => Some(routes.clone()),
            WatchState::Pending | WatchState::Refused(_) => None,
        }
    }

    async fn wait_until_known(&self) {
        let mut profile = self.profile.clone();
        let first_answer = profile.wait_for(|profile| !matches!(profile, WatchState::Pending));
        let _ = tokio::time::timeout_at(self.wait_deadline, first_answer).await;
    }
}

/// Removes a name that has been unused for the idle timeout.
async fn evict_when_idle(profiles: Arc<Profiles>, name: Box<[u8]>) {
    let mut evict_at = Instant::now() + profiles.timeouts.idle_timeout;
    loop {
        tokio::time::sleep_until(evict_at).await;
        let (now, mut entries) = (Instant::now(), profiles.entries.lock());
        let Some(entry) = entries.get(&name) else { return };
        let is_held = Arc::strong_count(entry) > 1;
        let used_at = if is_held { now } else { *entry.used_at.lock() };
        evict_at = used_at + profiles.timeouts.idle_timeout;
        if evict_at <= now {
            entries.remove(&name);
            return;
        }
    }
}

impl ProfileRoutes {
    fn new(families: &http_metrics::Families, dst: &str, profile: Profile) -> Self {
        let routes = profile.routes.iter().map(Some).chain([None]);
        let labels = routes.map(|route| profile::route_labels("inbound", dst, route));
        Self {
            series: labels.map(|labels| families.series(labels)).collect(),
            routes: profile.routes,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.routes.is_empty()
    }

    /// Counts a request for the first route that matches it.
    pub(super) fn begin_request(self: Arc<Self>, attributes: &RequestAttributes<'_>) -> ProfileRequestGuard {
        let guard = ProfileRequestGuard {
            route_index: profile::find_route(&self.routes, attributes),
            routes: self,
            is_recorded: false,
        };
        guard.series().record_request();
        guard
    }
}

impl ProfileRequestGuard {
    fn series(&self) -> &Arc<Series> {
        &self.routes.series[self.route_index.unwrap_or(self.routes.routes.len())]
    }

    /// Labels of the route, for tap.
    pub(super) fn route_labels(&self) -> BTreeMap<String, String> {
        let route = self.route_index.map(|index| &self.routes.routes[index]);
        route.map(|route| route.labels.clone()).unwrap_or_default()
    }

    /// The class of a status on this route; `None` if the route does not define one.
    pub(super) fn classify(&self, status: StatusCode) -> Option<Class> {
        self.routes.routes[self.route_index?].classify(status)
    }

    /// Records the response.
    pub(super) fn observe_response(mut self, rsp: Response<Body>, started_at: Instant) -> Response<Body> {
        self.is_recorded = true;
        let (series, class) = (self.series().clone(), self.classify(rsp.status()));
        classify::observe(rsp, started_at, ProfileResponseObserver { series, class })
    }

    /// Records that there is no response.
    pub(super) fn record_error(&mut self, error: &Error) {
        self.is_recorded = true;
        self.series().record_response(classify::failed_outcome(error));
    }
}

/// Records that the client disconnected, if no result was recorded.
impl Drop for ProfileRequestGuard {
    fn drop(&mut self) {
        if !self.is_recorded {
            self.record_error(&Error::ClientClosed);
        }
    }
}

/// Maximum number of watched profiles; each is one stream from the control plane.
const MAX_PROFILES: usize = 256;
/// If this many profiles are watched, an unmeshed client cannot add one.
const MAX_UNTRUSTED_PROFILES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::{
            channel::{ControlAddr, Security},
            destination::{self, ProfileScope},
            tests::{CLIENT, connector, test_config},
            watch::StreamLimits,
        },
        tls::tests::Authority,
    };

    /// Profiles of a control plane that is unreachable.
    fn profiles() -> Arc<Profiles> {
        let (registry, config) = (Registry::new(), test_config());
        let config = destination::Config {
            context_token: String::new(),
            profiles: ProfileScope {
                suffixes: "svc.cluster.local".parse().unwrap(),
                networks: Vec::new(),
            },
            limits: StreamLimits::default(),
            backoff: config.backoff,
        };
        let nowhere = ControlAddr {
            addr: "127.0.0.1:1".parse().unwrap(),
            security: Security::Loopback,
        };
        let channel = connector(Authority::new().credentials(CLIENT), &registry).channel(nowhere, test_config());
        let destinations = Destinations::new(channel, Handle::current(), config);
        let timeouts = ProfileTimeouts {
            wait_timeout: Duration::from_millis(500),
            idle_timeout: Duration::from_secs(90),
        };
        Profiles::new(&registry, destinations, timeouts, Handle::current())
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wait_once_for_an_unreachable_control_plane_and_never_for_names_out_of_scope() {
        let profiles = profiles();
        let waited = async |name: &str| {
            let start = Instant::now();
            if let Ok(Some(entry)) = profiles.get_or_watch(name.as_bytes(), ClientTrust::Trusted) {
                assert!(entry.routes().await.is_none());
            }
            start.elapsed()
        };
        let (least, most) = (Duration::from_millis(500), Duration::from_millis(510));
        let first = waited("web.shop.svc.cluster.local:80").await;
        assert!((least..most).contains(&first), "{first:?}");
        for other in [
            "web.shop.svc.cluster.local:80",
            "late.shop.svc.cluster.local:80", // the control plane is known to be unreachable, so this name does not wait
            "example.com:80",
            "10.0.0.1:80",
            "web",
        ] {
            let waited = waited(other).await;
            assert!(waited < Duration::from_millis(5), "{other}: {waited:?}");
        }
        for n in 2..=MAX_PROFILES {
            let name = format!("n{n}.shop.svc.cluster.local:80");
            let untrusted = profiles.get_or_watch(name.as_bytes(), ClientTrust::Untrusted);
            assert_eq!(untrusted.is_ok(), n < MAX_UNTRUSTED_PROFILES, "{n}");
            assert_eq!(
                profiles.get_or_watch(name.as_bytes(), ClientTrust::Trusted).is_ok(),
                n < MAX_PROFILES,
                "{n}"
            );
        }
        // At the limit, a name that cannot have a profile is still reported as such, not as `ProfileLimitReached`.
        let out_of_scope = profiles.get_or_watch(b"example.com:80", ClientTrust::Trusted);
        assert!(matches!(out_of_scope, Ok(None)));
        let held = profiles.get_or_watch(b"web.shop.svc.cluster.local:80", ClientTrust::Untrusted);
        tokio::time::sleep(profiles.timeouts.idle_timeout * 2).await;
        assert_eq!(profiles.entries.lock().len(), 1);
        drop(held);
        tokio::time::sleep(profiles.timeouts.idle_timeout * 2).await;
        assert!(profiles.entries.lock().is_empty());
    }
}
