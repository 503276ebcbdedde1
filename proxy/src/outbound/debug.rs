//! The cached destinations, as `/debug/destinations` shows them.

use std::{collections::BTreeMap, sync::Arc};

use serde::Serialize;
use tokio::time::Instant;

use crate::{
    balance::{candidate::Candidate as _, endpoint_set::DiscoveryState},
    outbound::{
        backend::{Backend, Backends, BalancedService},
        destination::{
            discovery::Discovery,
            snapshot::{Destination, Plan, Router},
        },
        endpoint::Endpoint,
    },
    policy::endpoint::Locality,
};

/// The status of one destination: an address that applications dial, or a name that they request.
#[derive(Serialize)]
pub(crate) struct DestinationStatus {
    address: String,
    /// Absent until the control plane has answered.
    policy: Option<String>,
    protocol: Option<&'static str>,
    /// The reason if the last policy cannot be used: it cannot be decoded, or the control plane refuses the destination.
    policy_error: Option<String>,
    /// Name of the service, from the profile.
    profile: Option<Arc<str>>,
    profile_error: Option<String>,
    /// Names of the policy's routes, or the number of routes of the ServiceProfile.
    routes: Vec<String>,
    idle_seconds: u64,
    open_connections: i64,
    services: Vec<ServiceStatus>,
    /// Endpoints at fixed addresses.
    fixed_endpoints: Vec<EndpointStatus>,
}

#[derive(Serialize)]
struct ServiceStatus {
    name: Arc<str>,
    /// `no answer yet`, `denied by the control plane`, `no endpoints` or `has endpoints`.
    discovery: &'static str,
    fails_fast: bool,
    endpoints: Vec<EndpointStatus>,
}

#[derive(Serialize)]
struct EndpointStatus {
    address: String,
    /// Absent if the endpoint is not meshed.
    identity: Option<String>,
    weight: u32,
    /// Whether the endpoint is used only while no other endpoint can take the request.
    is_fallback: bool,
    zone: &'static str,
    labels: BTreeMap<String, String>,
    rtt_ms: f64,
    requests_in_flight: u32,
    open_connections: i64,
    /// `available` (also if a probe is due, or if `min_ready_endpoints` requires the endpoint), `unreachable` or `ejected`.
    state: &'static str,
    /// Milliseconds until the next probe is due.
    retry_in_ms: Option<u64>,
}

impl Discovery {
    /// All cached destinations, sorted by address.
    pub(crate) fn destination_statuses(&self) -> Vec<DestinationStatus> {
        let mut all: Vec<_> = self.cache.lock().iter().cloned().collect();
        all.sort_unstable_by(|a, b| a.target.cmp(&b.target));
        let now = Instant::now();
        all.iter()
            .map(|destination| DestinationStatus::from_destination(destination, now))
            .collect()
    }
}

impl DestinationStatus {
    fn from_destination(destination: &Destination, now: Instant) -> Self {
        let snapshot = destination.try_snapshot();
        let snapshot = snapshot.as_deref();
        let mut summary = PlanSummary::default();
        if let Some(snapshot) = snapshot {
            summary.add_plan(&snapshot.plan);
        }
        let idle = now.saturating_duration_since(*destination.used_at.lock());
        Self {
            address: destination.target.to_string(),
            policy: snapshot.map(|snapshot| snapshot.policy.meta.to_string()),
            policy_error: destination.update_errors.policy.lock().clone(),
            profile_error: destination.update_errors.profile.lock().clone(),
            protocol: snapshot.map(|snapshot| snapshot.plan.protocol().name()),
            profile: snapshot.and_then(|snapshot| snapshot.profile.as_ref()?.name.clone()),
            idle_seconds: idle.as_secs(),
            open_connections: destination.connection_metrics.get().map_or(0, |counts| counts.n_open()),
            services: summary
                .services
                .iter()
                .map(|service| ServiceStatus::from_balanced(service, now))
                .collect(),
            fixed_endpoints: summary
                .fixed_endpoints
                .iter()
                .map(|endpoint| EndpointStatus::from_endpoint(endpoint, now))
                .collect(),
            routes: summary.routes,
        }
    }
}

/// The routes and backends of a plan, each backend once.
#[derive(Default)]
struct PlanSummary {
    routes: Vec<String>,
    services: Vec<Arc<BalancedService>>,
    fixed_endpoints: Vec<Arc<Endpoint>>,
}

impl PlanSummary {
    fn add_plan(&mut self, plan: &Plan) {
        match plan {
            Plan::Detect {
                http1, http2, opaque, ..
            } => {
                self.add_router(http1);
                if !Arc::ptr_eq(http1, http2) {
                    self.add_router(http2);
                }
                self.add_backends(&opaque.backends);
            }
            Plan::Http1(router) | Plan::Http2(router) => self.add_router(router),
            Plan::Opaque(opaque) => self.add_backends(&opaque.backends),
            Plan::Tls { compiled, .. } => compiled.iter().for_each(|route| self.add_backends(&route.backends)),
        }
    }

    fn add_router(&mut self, router: &Router) {
        match router {
            Router::Profile(profile) => {
                self.routes
                    .push(format!("{} of the ServiceProfile", profile.routes().len()));
                self.add_backends(&profile.backends);
            }
            Router::Routes(routes) => {
                for route in routes {
                    self.routes.push(route.meta.to_string());
                    for rule in &route.rules {
                        self.add_backends(&rule.action.backends);
                        for mirror in &rule.action.mirrors {
                            self.add_backends(&mirror.backends);
                        }
                    }
                }
            }
        }
    }

    fn add_backends<F>(&mut self, backends: &Backends<F>) {
        let choices = match backends {
            Backends::None => return,
            Backends::FirstAvailable(choices) | Backends::ByWeight(_, choices) => choices,
        };
        for choice in choices {
            match &choice.backend {
                Backend::Balanced(balanced, _) => push_unique(&mut self.services, balanced),
                Backend::Forward(endpoint) => push_unique(&mut self.fixed_endpoints, endpoint),
                Backend::Fail => {}
            }
        }
    }
}

fn push_unique<T>(all: &mut Vec<Arc<T>>, one: &Arc<T>) {
    if !all.iter().any(|other| Arc::ptr_eq(other, one)) {
        all.push(one.clone());
    }
}

impl ServiceStatus {
    fn from_balanced(balanced: &BalancedService, now: Instant) -> Self {
        let (discovered, fails_fast) = balanced.balancer.status();
        let (discovery, endpoints) = match &*discovered {
            DiscoveryState::Unknown if balanced.denial().is_some() => ("denied by the control plane", &[][..]),
            DiscoveryState::Unknown => ("no answer yet", &[][..]),
            DiscoveryState::NoEndpoints => ("no endpoints", &[][..]),
            DiscoveryState::Endpoints(endpoints) => ("has endpoints", &**endpoints),
        };
        Self {
            name: balanced.authority.clone(),
            discovery,
            fails_fast,
            endpoints: endpoints
                .iter()
                .map(|endpoint| EndpointStatus::from_endpoint(endpoint, now))
                .collect(),
        }
    }
}

impl EndpointStatus {
    fn from_endpoint(endpoint: &Endpoint, now: Instant) -> Self {
        let (spec, load, breaker) = (&endpoint.spec, endpoint.load(), endpoint.breaker());
        let retry_at = breaker.next_probe_at().filter(|at| *at > now);
        Self {
            address: spec.addr.to_string(),
            identity: endpoint.identity().map(ToString::to_string),
            weight: spec.weight.get(),
            is_fallback: spec.is_fallback.get(),
            zone: match spec.locality {
                Locality::Unknown => "unknown",
                Locality::Local => "local",
                Locality::Remote => "remote",
            },
            labels: spec.labels.clone(),
            rtt_ms: load.rtt(now).as_secs_f64() * 1e3,
            requests_in_flight: load.in_flight(),
            open_connections: endpoint.connector.metrics().n_open(),
            state: match (breaker.can_be_picked(now), breaker.is_ejected()) {
                (true, _) => "available",
                (false, true) => "ejected",
                (false, false) => "unreachable",
            },
            retry_in_ms: retry_at.and_then(|at| u64::try_from((at - now).as_millis()).ok()),
        }
    }
}
