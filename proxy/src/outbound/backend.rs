//! The backends of a route: a balancer, a fixed endpoint, or a refusal. This module creates backends from [`BackendSpec`], and
//! selects one of several.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::{
    api::{
        destination::Destinations,
        watch::{Position, WatchState},
    },
    balance::{
        balancer::{Balancer, PickError, Strategy, UnavailableReason},
        breaker::{Breaker, BreakerGroup},
        endpoint_set::EndpointSet,
        load::Load,
        weighted::{self, Weights},
    },
    http::error::{self, Error},
    metrics::{
        balancers::{self, UpdateOp},
        invalid_updates::{self, UpdateKind},
    },
    outbound::{
        endpoint::{Endpoint, EndpointContext},
        metrics::{BackendSeries, MetricScope},
    },
    policy::{
        client::{BackendSpec, BackendTarget, Distribution, FailureAccrual, LoadParams, Queue, RouteBackend},
        decode,
        endpoint::{EndpointSpec, EndpointUpdate},
        meta::Meta,
    },
};

/// The backends of a route; `F` is the type of the filters of each backend.
pub(crate) enum Backends<F> {
    None,
    FirstAvailable(Vec<BackendChoice<F>>),
    ByWeight(Weights, Vec<BackendChoice<F>>),
}

/// One of the backends of a route.
pub(crate) struct BackendChoice<F> {
    pub(super) filters: Vec<F>,
    pub(super) backend: Backend,
    /// Series of the route for this backend.
    pub(super) series: Option<Arc<BackendSeries>>,
}

impl<F> Backends<F> {
    /// The endpoint of the only backend, if that is an endpoint at a fixed address.
    pub(super) fn fixed_endpoint(&self) -> Option<&Arc<Endpoint>> {
        let (Self::FirstAvailable(choices) | Self::ByWeight(_, choices)) = self else {
            return None;
        };
        match &choices[..] {
            [
                BackendChoice {
                    backend: Backend::Forward(endpoint),
                    ..
                },
            ] => Some(endpoint),
            _ => None,
        }
    }
}

#[derive(Clone)]
pub(crate) enum Backend {
    /// A service, and the balancer series of the route.
    Balanced(Arc<BalancedService>, Arc<balancers::BalancerSeries>),
    /// One endpoint at a fixed address.
    Forward(Arc<Endpoint>),
    /// No known target: every request fails.
    Fail,
}

/// A service with its balancer. Its endpoints are watched until the last reference is dropped.
pub(crate) struct BalancedService {
    /// Name and port of the service, such as `web.shop.svc.cluster.local:80`.
    pub(super) authority: Arc<str>,
    pub(super) balancer: Arc<Balancer<Endpoint>>,
    params: BalancerParams,
    endpoint_watch: watch::Receiver<WatchState<()>>,
}

#[derive(Clone, Copy, PartialEq)]
struct BalancerParams {
    load: LoadParams,
    queue: Queue,
    accrual: Option<FailureAccrual>,
}

/// Creates backends. Backends with the same service and settings share one balancer.
pub(crate) struct BackendFactory {
    pub(crate) endpoint_context: Arc<EndpointContext>,
    pub(crate) destinations: Destinations,
    pub(crate) strategy: Strategy,
    /// Minimum capacity of a queue, from `LINKERD2_PROXY_OUTBOUND_HTTP_QUEUE_CAPACITY`. A smaller capacity from the policy is
    /// raised to it.
    ///
    /// Linkerd's control plane always sends a capacity of 100, and its proxies ignore it.
    pub(crate) min_queue_capacity: usize,
    /// Counts endpoints that cannot be decoded.
    pub(crate) invalid_updates: invalid_updates::Families,
    pub(crate) services: Mutex<HashMap<Arc<str>, Vec<Weak<BalancedService>>>>,
    pub(crate) fixed_endpoints: Mutex<FixedEndpointCache>,
}

/// Endpoints at fixed addresses. A new policy with the same endpoints keeps their connections.
#[derive(Default)]
pub(crate) struct FixedEndpointCache {
    endpoints: HashMap<SocketAddr, Vec<FixedEndpointEntry>>,
    /// Number of addresses above which unused endpoints are removed.
    sweep_threshold: usize,
}

/// Specification of an endpoint, and the endpoint while it is in use.
type FixedEndpointEntry = (Arc<EndpointSpec>, Weak<Endpoint>);

impl FixedEndpointCache {
    fn sweep(&mut self) {
        if self.endpoints.len() > self.sweep_threshold {
            let in_use = |(_, endpoint): &FixedEndpointEntry| endpoint.strong_count() > 0;
            self.endpoints.retain(|_, list| list.iter().any(in_use));
            self.sweep_threshold = 2 * self.endpoints.len();
        }
    }
}

impl BackendFactory {
    pub(super) fn backends<F: Clone>(
        &self,
        distribution: &Distribution<F>,
        accrual: Option<FailureAccrual>,
        scope: &MetricScope<'_>,
        series: impl Fn(&Meta) -> Option<Arc<BackendSeries>>,
    ) -> Backends<F> {
        let choice = |route_backend: &RouteBackend<F>| BackendChoice {
            filters: route_backend.filters.clone(),
            series: series(&route_backend.backend.meta),
            backend: self.backend(&route_backend.backend, accrual, scope),
        };
        match distribution {
            Distribution::Empty => Backends::None,
            Distribution::FirstAvailable(list) => Backends::FirstAvailable(list.iter().map(choice).collect()),
            Distribution::RandomAvailable(list) => match Weights::new(list.iter().map(|(_, weight)| *weight)) {
                Some(weights) => Backends::ByWeight(weights, list.iter().map(|(backend, _)| choice(backend)).collect()),
                None => Backends::None,
            },
        }
    }

    pub(super) fn backend(
        &self,
        spec: &BackendSpec,
        accrual: Option<FailureAccrual>,
        scope: &MetricScope<'_>,
    ) -> Backend {
        match &spec.target {
            BackendTarget::Fail => Backend::Fail,
            BackendTarget::Forward(endpoint) => Backend::Forward(self.fixed_endpoint(endpoint)),
            BackendTarget::Balance { authority, load } => {
                let params = BalancerParams {
                    load: *load,
                    queue: Queue {
                        capacity: spec.queue.capacity.max(self.min_queue_capacity),
                        ..spec.queue
                    },
                    accrual,
                };
                self.balanced_backend(authority, params, scope, &spec.meta)
            }
        }
    }

    /// Returns the endpoint at a fixed address. An endpoint that is still in use is returned again, with its connections.
    pub(super) fn fixed_endpoint(&self, spec: &Arc<EndpointSpec>) -> Arc<Endpoint> {
        let mut cache = self.fixed_endpoints.lock();
        let list = cache.endpoints.entry(spec.addr).or_default();
        list.retain(|(_, endpoint)| endpoint.strong_count() > 0);
        let existing = list.iter().find(|(other, _)| other == spec);
        if let Some(endpoint) = existing.and_then(|(_, endpoint)| endpoint.upgrade()) {
            return endpoint;
        }
        let load = Load::new(DEFAULT_LOAD_PARAMS, Instant::now());
        let breaker = Breaker::new(None, BreakerGroup::default(), Instant::now());
        let endpoint = Arc::new(Endpoint::new(&self.endpoint_context, None, spec.clone(), load, breaker));
        list.push((spec.clone(), Arc::downgrade(&endpoint)));
        cache.sweep();
        endpoint
    }

    /// Creates a backend with the balancer of a service and default load parameters. `authority` is the service's name and port.
    pub(super) fn service_backend(
        &self,
        authority: &Arc<str>,
        queue: Queue,
        accrual: Option<FailureAccrual>,
        scope: &MetricScope<'_>,
    ) -> Backend {
        let params = BalancerParams {
            load: DEFAULT_LOAD_PARAMS,
            queue,
            accrual,
        };
        self.balanced_backend(authority, params, scope, &Meta::from_service_authority(authority))
    }

    fn balanced_backend(
        &self,
        authority: &Arc<str>,
        params: BalancerParams,
        scope: &MetricScope<'_>,
        backend_meta: &Meta,
    ) -> Backend {
        let families = &self.endpoint_context.families;
        let series = families.balancer(scope, backend_meta, authority);
        let balanced = self.get_or_create_service(authority, params);
        balanced.balancer.register_series(&series);
        Backend::Balanced(balanced, series)
    }

    pub(crate) fn update_gauges(&self) {
        let now = Instant::now();
        for balanced in self.services.lock().values().flatten().filter_map(Weak::upgrade) {
            balanced.balancer.update_gauges(now);
        }
    }

    fn get_or_create_service(&self, authority: &Arc<str>, params: BalancerParams) -> Arc<BalancedService> {
        let mut services = self.services.lock();
        services.retain(|_, list| {
            list.retain(|balanced| balanced.strong_count() > 0);
            !list.is_empty()
        });
        let list = services.entry(authority.clone()).or_default();
        if let Some(found) = list
            .iter()
            .filter_map(Weak::upgrade)
            .find(|balanced| balanced.params == params)
        {
            return found;
        }
        let created = Arc::new(self.create_service(authority, params));
        list.push(Arc::downgrade(&created));
        created
    }

    fn create_service(&self, authority: &Arc<str>, params: BalancerParams) -> BalancedService {
        let balancer = Arc::new(Balancer::new(self.strategy, params.queue));
        let (context, watched_balancer) = (self.endpoint_context.clone(), balancer.clone());
        let logical_authority = authority.clone();
        let mut endpoints = EndpointSet::default();
        let mut reporter = self
            .invalid_updates
            .reporter(UpdateKind::Endpoint, authority.to_string());
        let endpoint_watch = self.destinations.endpoints(authority, move |position, update| {
            if position == Position::First {
                endpoints.resync();
            }
            let report_skipped = |error| drop(reporter.report(&error));
            let changed = decode::endpoint::endpoint_update(update, report_skipped).map(|update| {
                watched_balancer.record_update(match update {
                    EndpointUpdate::Add(_) if position != Position::First => UpdateOp::Add,
                    EndpointUpdate::Remove(_) => UpdateOp::Remove,
                    EndpointUpdate::Add(_) | EndpointUpdate::NoEndpoints => UpdateOp::Reset,
                });
                endpoints.apply(update, |spec| {
                    let now = Instant::now();
                    let breaker = Breaker::new(params.accrual, watched_balancer.breaker_group(), now);
                    let load = Load::new(params.load, now);
                    Arc::new(Endpoint::new(
                        &context,
                        Some(&logical_authority),
                        spec.clone(),
                        load,
                        breaker,
                    ))
                })
            });
            match changed {
                Ok(Some(discovered)) => watched_balancer.publish(discovered),
                Ok(None) => {}
                Err(error) => drop(reporter.report(&error)),
            }
        });
        BalancedService {
            authority: authority.clone(),
            balancer,
            params,
            endpoint_watch,
        }
    }
}

impl BalancedService {
    /// The error of requests if the control plane denies this proxy the endpoints and has never sent any.
    pub(super) fn denial(&self) -> Option<Error> {
        let state = self.endpoint_watch.borrow();
        let denial = state.denial()?;
        Some(Error::DiscoveryDenied(denial.to_string()))
    }
}

impl<F> Backends<F> {
    pub(super) fn single(backend: Backend) -> Self {
        Self::FirstAvailable(vec![BackendChoice {
            filters: Vec::new(),
            backend,
            series: None,
        }])
    }

    /// Selects the backend for a new request or connection.
    ///
    /// # Errors
    /// There is no backend.
    pub(super) fn choose(&self) -> Result<&BackendChoice<F>, Error> {
        let chosen = match self {
            Self::None => None,
            Self::FirstAvailable(list) if list.len() == 1 => list.first(),
            Self::FirstAvailable(list) => {
                let now = Instant::now();
                list.get(weighted::first_available(list.len(), |index| {
                    list[index].backend.is_available(now)
                }))
            }
            Self::ByWeight(weights, list) => {
                let (now, random) = (Instant::now(), fastrand::u32(..));
                let available = weights.choose_available(random, |index| list[index].backend.is_available(now));
                list.get(available.unwrap_or_else(|| weights.choose(random)))
            }
        };
        chosen.ok_or(Error::NoBackends)
    }

    /// Whether one of the backends is available now. A backend with weight 0 does not count.
    pub(super) fn is_available(&self, now: Instant) -> bool {
        match self {
            Self::None => false,
            Self::FirstAvailable(list) => list.iter().any(|choice| choice.backend.is_available(now)),
            Self::ByWeight(weights, list) => {
                let is_available = |index: usize| list[index].backend.is_available(now);
                weights.choose_available(0, is_available).is_some()
            }
        }
    }
}

impl Backend {
    /// Whether an endpoint can be picked now; `Forward` and `Fail` are always available.
    fn is_available(&self, now: Instant) -> bool {
        match self {
            Self::Balanced(balanced, _) => balanced.balancer.can_pick(now),
            // They are available even if they fail: their share of the requests then fails and does not go to other backends.
            Self::Forward(_) | Self::Fail => true,
        }
    }

    /// Picks an endpoint, preferably one that is not in `tried`.
    ///
    /// # Errors
    /// No endpoint becomes available in time, or the backend has none.
    pub(super) async fn pick(&self, tried: &[Arc<Endpoint>]) -> Result<Arc<Endpoint>, Error> {
        match self {
            Self::Balanced(balanced, series) => balanced
                .balancer
                .pick(tried, series)
                .await
                .map_err(|error| balanced.denial().unwrap_or_else(|| pick_error(error))),
            Self::Forward(endpoint) => Ok(endpoint.clone()),
            Self::Fail => Err(Error::InvalidBackend("it names neither a Service nor an address")),
        }
    }

    /// Picks an endpoint of a service that `is_allowed` accepts, if one can be picked now. Returns `None` for backends that are not
    /// services.
    pub(super) fn pick_where(&self, is_allowed: impl Fn(&Arc<Endpoint>) -> bool) -> Option<Arc<Endpoint>> {
        match self {
            Self::Balanced(balanced, _) => balanced.balancer.pick_where(Instant::now(), is_allowed),
            Self::Forward(_) | Self::Fail => None,
        }
    }
}

fn pick_error(error: PickError) -> Error {
    match error {
        PickError::NoEndpoints => Error::NoEndpoints,
        PickError::QueueTimeout(waited, reason) => Error::QueueTimeout(waited, unavailable_cause(reason)),
        PickError::FailingFast(reason) => Error::FailingFast(unavailable_cause(reason)),
        PickError::QueueFull(_) => Error::QueueFull,
    }
}

fn unavailable_cause(reason: UnavailableReason) -> error::UnavailableCause {
    match reason {
        UnavailableReason::Unreachable(cause) => error::UnavailableCause::Unreachable { after: cause },
        UnavailableReason::Ejected => error::UnavailableCause::Ejected,
    }
}

/// Load parameters of endpoints for which the policy sets none.
const DEFAULT_LOAD_PARAMS: LoadParams = LoadParams::PeakEwma {
    default_rtt: std::time::Duration::from_millis(30),
    decay: std::time::Duration::from_secs(10),
};

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tulle_core::metrics::{Labels, Registry};

    use super::*;
    use crate::{api::watch::Refusal, balance::endpoint_set::DiscoveryState};

    impl Backend {
        /// A service with these endpoints.
        pub(in crate::outbound) fn with_endpoints(endpoints: &[Arc<Endpoint>]) -> Self {
            Self::with_discovery(DiscoveryState::with_endpoints(endpoints, &[]), WatchState::Known(()))
        }

        fn with_discovery(discovered: DiscoveryState<Endpoint>, watch_state: WatchState<()>) -> Self {
            let queue = Queue {
                capacity: 1,
                failfast_timeout: Duration::from_secs(1),
            };
            let balancer = Balancer::new(Strategy::PeakEwma, queue);
            balancer.publish(discovered);
            let service = BalancedService {
                authority: "web.test:80".into(),
                balancer: Arc::new(balancer),
                params: BalancerParams {
                    load: DEFAULT_LOAD_PARAMS,
                    queue,
                    accrual: None,
                },
                endpoint_watch: watch::channel(watch_state).1,
            };
            let series = balancers::Families::new(&Registry::new(), "http").series(&Labels::new());
            Self::Balanced(Arc::new(service), series)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_fails_with_the_denial_of_its_endpoints() {
        let refusal = |code| {
            WatchState::Refused(Refusal {
                description: "endpoints of web.test:80".to_owned(),
                code,
                message: "only clients in namespace shop".to_owned(),
            })
        };
        for (watch_state, cause) in [
            (refusal(tonic::Code::PermissionDenied), "discovery-denied"),
            (refusal(tonic::Code::FailedPrecondition), "endpoints-unready"),
            (WatchState::Pending, "endpoints-unready"),
        ] {
            let backend = Backend::with_discovery(DiscoveryState::Unknown, watch_state);
            let error = backend.pick(&[]).await.err().expect("no endpoint is known");
            assert_eq!(error.cause(), cause, "{error}");
        }
    }
}
