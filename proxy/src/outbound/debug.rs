//! The destinations in use, as `/debug/destinations` shows them.

use std::{collections::BTreeMap, sync::Arc};

use serde::Serialize;
use tokio::time::Instant;

use crate::{
    balance::balancer::{Candidate as _, Discovered},
    outbound::{
        backend::{Backend, Backends, Balanced},
        destination::{Destination, Plan, Router},
        discover::Discover,
        endpoint::Endpoint,
    },
    policy::endpoint::Locality,
};

/// One address that applications dial, or name that they ask for.
#[derive(Serialize)]
pub(crate) struct Shown {
    address: String,
    /// Absent while the control plane has not answered.
    policy: Option<String>,
    protocol: Option<&'static str>,
    /// Why the last policy that came could not be read; the one before it holds.
    policy_error: Option<String>,
    /// The ServiceProfile of the service, or what else the control plane knows it as.
    profile: Option<Arc<str>>,
    profile_error: Option<String>,
    /// Those of the policy, or the number of a ServiceProfile's.
    routes: Vec<String>,
    idle_seconds: u64,
    open_connections: i64,
    services: Vec<Service>,
    /// Endpoints at fixed addresses.
    forwards: Vec<Peer>,
}

/// A service behind a destination.
#[derive(Serialize)]
struct Service {
    name: Arc<str>,
    /// Whether discovery has answered, and whether requests fail at once.
    discovery: &'static str,
    fails_fast: bool,
    endpoints: Vec<Peer>,
}

#[derive(Serialize)]
struct Peer {
    address: String,
    /// Absent where nobody proves it.
    identity: Option<String>,
    weight: u32,
    zone: &'static str,
    labels: BTreeMap<String, String>,
    rtt_ms: f64,
    requests_in_flight: u32,
    open_connections: i64,
    /// `available`, `unreachable` or `ejected`.
    state: &'static str,
    /// Until it may be tried again.
    retry_in_ms: Option<u64>,
}

impl Discover {
    /// All destinations in use, by address.
    pub(crate) fn shown(&self) -> Vec<Shown> {
        let mut all: Vec<_> = self.known.lock().all().cloned().collect();
        all.sort_unstable_by(|a, b| a.target.cmp(&b.target));
        let now = Instant::now();
        all.iter().map(|destination| Shown::of(destination, now)).collect()
    }
}

impl Shown {
    fn of(destination: &Destination, now: Instant) -> Self {
        let snapshot = destination.known_snapshot();
        let snapshot = snapshot.as_deref();
        let mut found = Found::default();
        if let Some(snapshot) = snapshot {
            found.plan(&snapshot.plan);
        }
        let idle = now.saturating_duration_since(*destination.used_at.lock());
        Self {
            address: destination.target.to_string(),
            policy: snapshot.map(|snapshot| snapshot.policy.meta.to_string()),
            policy_error: destination.unread.policy.lock().clone(),
            profile_error: destination.unread.profile.lock().clone(),
            protocol: snapshot.map(|snapshot| snapshot.plan.protocol().name()),
            profile: snapshot.and_then(|snapshot| snapshot.profile.as_ref()?.name.clone()),
            idle_seconds: idle.as_secs(),
            open_connections: destination.counts.get().map_or(0, |counts| counts.n_open()),
            services: found.services.iter().map(|service| Service::of(service, now)).collect(),
            forwards: found.forwards.iter().map(|endpoint| Peer::of(endpoint, now)).collect(),
            routes: found.routes,
        }
    }
}

/// What a plan leads to, each once.
#[derive(Default)]
struct Found {
    routes: Vec<String>,
    services: Vec<Arc<Balanced>>,
    forwards: Vec<Arc<Endpoint>>,
}

impl Found {
    fn plan(&mut self, plan: &Plan) {
        match plan {
            Plan::Detect {
                http1, http2, opaque, ..
            } => {
                self.router(http1);
                if !Arc::ptr_eq(http1, http2) {
                    self.router(http2);
                }
                self.backends(&opaque.backends);
            }
            Plan::Http1(router) | Plan::Http2(router) => self.router(router),
            Plan::Opaque(opaque) => self.backends(&opaque.backends),
            Plan::Tls { plans, .. } => plans.iter().for_each(|plan| self.backends(&plan.backends)),
        }
    }

    fn router(&mut self, router: &Router) {
        match router {
            Router::Profile(profile) => {
                self.routes
                    .push(format!("{} of the ServiceProfile", profile.routes().len()));
                self.backends(&profile.backends);
            }
            Router::Routes(routes) => {
                for route in routes {
                    self.routes.push(route.meta.to_string());
                    route
                        .rules
                        .iter()
                        .for_each(|rule| self.backends(&rule.payload.backends));
                }
            }
        }
    }

    fn backends<F>(&mut self, backends: &Backends<F>) {
        let choices = match backends {
            Backends::None => return,
            Backends::FirstAvailable(choices) | Backends::ByWeight(_, choices) => choices,
        };
        for choice in choices {
            match &choice.backend {
                Backend::Balanced(balanced, _) => once(&mut self.services, balanced),
                Backend::Forward(endpoint) => once(&mut self.forwards, endpoint),
                Backend::Fail => {}
            }
        }
    }
}

fn once<T>(all: &mut Vec<Arc<T>>, one: &Arc<T>) {
    if !all.iter().any(|other| Arc::ptr_eq(other, one)) {
        all.push(one.clone());
    }
}

impl Service {
    fn of(balanced: &Balanced, now: Instant) -> Self {
        let (discovered, fails_fast) = balanced.balancer.shown();
        let (discovery, endpoints) = match &*discovered {
            Discovered::Unknown => ("no answer yet", &[][..]),
            Discovered::NoEndpoints => ("no endpoints", &[][..]),
            Discovered::Endpoints(endpoints) => ("followed", &**endpoints),
        };
        Self {
            name: balanced.path.clone(),
            discovery,
            fails_fast,
            endpoints: endpoints.iter().map(|endpoint| Peer::of(endpoint, now)).collect(),
        }
    }
}

impl Peer {
    fn of(endpoint: &Endpoint, now: Instant) -> Self {
        let (spec, load, breaker) = (&endpoint.spec, endpoint.load(), endpoint.breaker());
        let retry_at = breaker.available_at().filter(|at| *at > now);
        Self {
            address: spec.addr.to_string(),
            identity: endpoint.identity().map(ToString::to_string),
            weight: spec.weight,
            zone: match spec.locality {
                Locality::Unknown => "unknown",
                Locality::Local => "local",
                Locality::Remote => "remote",
            },
            labels: spec.labels.clone(),
            rtt_ms: load.rtt(now).as_secs_f64() * 1e3,
            requests_in_flight: load.pending(),
            open_connections: endpoint.connector.counts().n_open(),
            state: match (breaker.available(now), breaker.is_ejected()) {
                (true, _) => "available",
                (false, true) => "ejected",
                (false, false) => "unreachable",
            },
            retry_in_ms: retry_at.and_then(|at| u64::try_from((at - now).as_millis()).ok()),
        }
    }
}
