//! ServiceProfiles of requests that arrive: what their routes count, and which responses these call failures.
//!
//! The proxy of a peer names the profile that it went by in `l5d-dst-canonical`; other requests go by that of the name that they
//! are addressed to. Nothing but metrics depends on it, so a request never waits long for one, and goes on without.

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
    api::{destination::Destinations, watch::Watched},
    http::{
        body::Body,
        classify::{self, Classified},
        error::Error,
    },
    metrics::{
        http::{self as http_metrics, Series},
        unreadable::{self, Message},
    },
    policy::{
        decode,
        matches::Head,
        profile::{self, Class, Profile, ProfileRoute},
    },
};

/// The profiles of all names in use.
pub(crate) struct Profiles {
    destinations: Destinations,
    families: http_metrics::Families,
    unreadable: unreadable::Families,
    terms: Terms,
    /// Where what is unused is forgotten.
    runtime: Handle,
    /// By names as peers write them.
    known: Mutex<HashMap<Box<[u8]>, Arc<Named>>>,
}

/// How long things last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// What requests wait for the first answer about a name, all together.
    pub(crate) timeout: Duration,
    /// How long a name stays known that nobody uses.
    pub(crate) idle: Duration,
}

/// What is known of a name, for as long as somebody uses it.
pub(super) struct Named {
    profile: watch::Receiver<Watched<Arc<Routes>>>,
    /// Until when requests wait for the first answer.
    deadline: Instant,
    used_at: Mutex<Instant>,
}

/// Who names what is to be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// Who has an identity.
    Peers,
    Strangers,
}

/// The routes of a profile.
pub(super) struct Routes {
    routes: Arc<[ProfileRoute]>,
    /// In their order; the last one is for requests that no route matches.
    series: Vec<Arc<Series>>,
}

/// One request, as its route counts it.
pub(super) struct Routed {
    routes: Arc<Routes>,
    /// Its route, if any matches.
    index: Option<usize>,
    is_over: bool,
}

impl Profiles {
    pub(crate) fn new(registry: &Registry, destinations: Destinations, terms: Terms, runtime: Handle) -> Arc<Self> {
        Arc::new(Self {
            destinations,
            families: http_metrics::Families::with_prefix(registry, "route_"),
            unreadable: unreadable::Families::new(registry),
            terms,
            runtime,
            known: Mutex::default(),
        })
    }

    /// What is known of a name, watched from now on; nothing where there can be no profile, or too much is watched.
    pub(super) fn named(self: &Arc<Self>, name: &[u8], by: By) -> Option<Arc<Named>> {
        let now = Instant::now();
        let mut known = self.known.lock();
        if let Some(found) = known.get(name) {
            *found.used_at.lock() = now;
            return Some(found.clone());
        }
        let most = match by {
            By::Peers => MOST,
            By::Strangers => MOST_WITH_STRANGERS,
        };
        if known.len() >= most {
            return None;
        }
        let patience = match self.destinations.can_answer() {
            true => self.terms.timeout,
            false => Duration::ZERO,
        };
        let made = Arc::new(Named {
            profile: self.ask(str::from_utf8(name).ok()?.parse().ok()?)?,
            deadline: now + patience,
            used_at: Mutex::new(now),
        });
        known.insert(name.into(), made.clone());
        self.runtime.spawn(forget(self.clone(), name.into()));
        Some(made)
    }

    fn ask(&self, name: NameAddr) -> Option<watch::Receiver<Watched<Arc<Routes>>>> {
        let (families, dst) = (self.families.clone(), name.to_string());
        let mut reporter = self.unreadable.reporter(Message::Profile, dst.clone());
        let mut last = Arc::new(Routes::new(&families, &dst, Profile::default()));
        self.destinations.profile(&Addr::Name(name), move |message| {
            match decode::profile::profile(message) {
                Ok(profile) => last = Arc::new(Routes::new(&families, &dst, profile)),
                Err(error) => drop(reporter.report(&error)),
            }
            last.clone()
        })
    }
}

impl Named {
    /// The routes of the profile; nothing where there is none, or the control plane has not told it in time.
    pub(super) async fn routes(&self) -> Option<Arc<Routes>> {
        if matches!(&*self.profile.borrow(), Watched::Pending) {
            // Rare, and larger than the rest.
            Box::pin(self.told()).await;
        }
        match &*self.profile.borrow() {
            Watched::Known(routes) => Some(routes.clone()),
            Watched::Pending | Watched::Refused(_) => None,
        }
    }

    async fn told(&self) {
        let mut profile = self.profile.clone();
        let told = profile.wait_for(|profile| !matches!(profile, Watched::Pending));
        let _ = tokio::time::timeout_at(self.deadline, told).await;
    }
}

/// Waits until nobody has used a name for the idle time, and forgets it.
async fn forget(profiles: Arc<Profiles>, name: Box<[u8]>) {
    let mut due = Instant::now() + profiles.terms.idle;
    loop {
        tokio::time::sleep_until(due).await;
        let (now, mut known) = (Instant::now(), profiles.known.lock());
        let Some(found) = known.get(&name) else { return };
        let is_held = Arc::strong_count(found) > 1;
        let used_at = if is_held { now } else { *found.used_at.lock() };
        due = used_at + profiles.terms.idle;
        if due <= now {
            known.remove(&name);
            return;
        }
    }
}

impl Routes {
    fn new(families: &http_metrics::Families, dst: &str, profile: Profile) -> Self {
        let routes = profile.routes.iter().map(Some).chain([None]);
        let labels = routes.map(|route| profile::labels("inbound", dst, route));
        Self {
            series: labels.map(|labels| families.series(labels)).collect(),
            routes: profile.routes,
        }
    }

    /// Whether there are none, and nothing to tell apart.
    pub(super) fn is_empty(&self) -> bool {
        self.routes.is_empty()
    }

    /// Counts a request by the first route that it matches.
    pub(super) fn count(self: Arc<Self>, head: &Head<'_>) -> Routed {
        let routed = Routed {
            index: profile::find(&self.routes, head),
            routes: self,
            is_over: false,
        };
        routed.series().request();
        routed
    }
}

impl Routed {
    fn series(&self) -> &Arc<Series> {
        &self.routes.series[self.index.unwrap_or(self.routes.routes.len())]
    }

    /// What an observer of the request is told of its route.
    pub(super) fn told(&self) -> BTreeMap<String, String> {
        let route = self.index.map(|index| &self.routes.routes[index]);
        route.map(|route| route.labels.clone()).unwrap_or_default()
    }

    /// What a status means on this route; `None` where it does not say so.
    pub(super) fn class(&self, status: StatusCode) -> Option<Class> {
        self.routes.routes[self.index?].classify(status)
    }

    /// It brought a response.
    pub(super) fn answered(mut self, rsp: Response<Body>, started: Instant) -> Response<Body> {
        self.is_over = true;
        let (series, class) = (self.series().clone(), self.class(rsp.status()));
        classify::observe(rsp, started, Classified { series, class })
    }

    /// It brought none.
    pub(super) fn failed(&mut self, error: &Error) {
        self.is_over = true;
        self.series().response(classify::failed(error));
    }
}

/// The client has left.
impl Drop for Routed {
    fn drop(&mut self) {
        if !self.is_over {
            self.failed(&Error::Left);
        }
    }
}

/// Names that are known at a time; each costs the control plane a stream.
const MOST: usize = 256;
/// With so many known, no further one is watched because a stranger says it.
const MOST_WITH_STRANGERS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::{
            channel::{ControlAddr, Security},
            destination::{self, ProfileScope},
            tests::{CLIENT, connector, quick},
            watch::StreamLimits,
        },
        tls::tests::Authority,
    };

    /// Profiles of a control plane that is not there.
    fn profiles() -> Arc<Profiles> {
        let (registry, config) = (Registry::new(), quick());
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
        let channel = connector(Authority::new().credentials(CLIENT), &registry).channel(nowhere, quick());
        let destinations = Destinations::new(channel, Handle::current(), config);
        let terms = Terms {
            timeout: Duration::from_millis(500),
            idle: Duration::from_secs(90),
        };
        Profiles::new(&registry, destinations, terms, Handle::current())
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wait_once_for_a_control_plane_that_says_nothing_and_never_for_names_out_of_scope() {
        let profiles = profiles();
        let waited = async |name: &str| {
            let start = Instant::now();
            if let Some(named) = profiles.named(name.as_bytes(), By::Peers) {
                assert!(named.routes().await.is_none());
            }
            start.elapsed()
        };
        let (least, most) = (Duration::from_millis(500), Duration::from_millis(510));
        let first = waited("web.shop.svc.cluster.local:80").await;
        assert!((least..most).contains(&first), "{first:?}");
        for other in [
            "web.shop.svc.cluster.local:80",
            "late.shop.svc.cluster.local:80", // by now it is known that nobody answers
            "example.com:80",
            "10.0.0.1:80",
            "web",
        ] {
            let waited = waited(other).await;
            assert!(waited < Duration::from_millis(5), "{other}: {waited:?}");
        }
        for n in 2..=MOST {
            let name = format!("n{n}.shop.svc.cluster.local:80");
            let by_stranger = profiles.named(name.as_bytes(), By::Strangers);
            assert_eq!(by_stranger.is_some(), n < MOST_WITH_STRANGERS, "{n}");
            assert_eq!(profiles.named(name.as_bytes(), By::Peers).is_some(), n < MOST, "{n}");
        }
        let held = profiles.named(b"web.shop.svc.cluster.local:80", By::Strangers);
        tokio::time::sleep(profiles.terms.idle * 2).await;
        assert_eq!(profiles.known.lock().len(), 1);
        drop(held);
        tokio::time::sleep(profiles.terms.idle * 2).await;
        assert!(profiles.known.lock().is_empty());
    }
}
