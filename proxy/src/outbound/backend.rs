//! What stands behind a route: a balancer, a fixed endpoint, or a refusal; and the choice among several.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};
use tulle_core::addr::Addr;

use crate::{
    api::{
        destination::Destinations,
        watch::{Position, Watched},
    },
    balance::{
        balancer::{Balancer, Missing, PickError, Strategy},
        breaker::{Breaker, Fleet},
        endpoints::Endpoints,
        load::Load,
        weighted::{self, Weights},
    },
    http::error::{Error, Unready},
    metrics::{
        balancers::{self, Op},
        unreadable::{self, Message},
    },
    outbound::{
        endpoint::{Common, Endpoint},
        metrics::{BackendSeries, connections::Protocol},
    },
    policy::{
        client::{self, BackendTarget, Distribution, FailureAccrual, LoadParams, Queue},
        decode,
        endpoint::{EndpointSpec, EndpointUpdate},
        meta::Meta,
    },
};

/// Where requests or connections of a route go; `F` is what filters those of one backend.
pub(crate) enum Backends<F> {
    /// Nowhere.
    None,
    FirstAvailable(Vec<Choice<F>>),
    ByWeight(Weights, Vec<Choice<F>>),
}

pub(crate) struct Choice<F> {
    pub(super) filters: Vec<F>,
    pub(super) backend: Backend,
    /// What the route counts of its requests.
    pub(super) series: Option<Arc<BackendSeries>>,
}

#[derive(Clone)]
pub(crate) enum Backend {
    /// The endpoints of a service, and what is counted of this way to them.
    Balanced(Arc<Balanced>, Arc<balancers::Series>),
    Forward(Arc<Endpoint>),
    Fail,
}

/// The endpoints of one service, followed for as long as somebody holds this.
pub(crate) struct Balanced {
    /// The service's name.
    pub(super) path: Arc<str>,
    pub(super) balancer: Arc<Balancer<Endpoint>>,
    params: Params,
    _followed: watch::Receiver<Watched<()>>,
}

#[derive(Clone, Copy, PartialEq)]
struct Params {
    load: LoadParams,
    queue: Queue,
    accrual: Option<FailureAccrual>,
}

/// Whence a balancer is reached, for metrics.
pub(super) struct View<'a> {
    pub(super) protocol: Protocol,
    pub(super) parent: &'a Meta,
    /// What applications dial or name.
    pub(super) dst: &'a Addr,
}

/// Makes backends; those for the same service and settings are one.
pub(crate) struct Factory {
    pub(crate) common: Arc<Common>,
    pub(crate) destinations: Destinations,
    pub(crate) strategy: Strategy,
    /// Minimum number of requests that may wait for an endpoint of a service, `LINKERD2_PROXY_OUTBOUND_HTTP_QUEUE_CAPACITY`.
    ///
    /// Linkerd's control plane tells every proxy 100, which nobody can change and its proxies do not use.
    pub(crate) min_queue_capacity: usize,
    /// Where endpoints are counted that cannot be read.
    pub(crate) unreadable: unreadable::Families,
    pub(crate) balanced: Mutex<HashMap<Arc<str>, Vec<Weak<Balanced>>>>,
    pub(crate) forwards: Mutex<Forwards>,
}

/// Endpoints at fixed addresses, so that a new policy that says the same keeps their connections.
#[derive(Default)]
pub(crate) struct Forwards {
    known: HashMap<SocketAddr, Vec<Forward>>,
    /// As many addresses call for a look at which are still used.
    full_at: usize,
}

/// How an endpoint was described, and the endpoint for as long as it is used.
type Forward = (Arc<EndpointSpec>, Weak<Endpoint>);

impl Forwards {
    fn sweep(&mut self) {
        if self.known.len() > self.full_at {
            let in_use = |(_, endpoint): &Forward| endpoint.strong_count() > 0;
            self.known.retain(|_, list| list.iter().any(in_use));
            self.full_at = 2 * self.known.len();
        }
    }
}

impl Factory {
    pub(super) fn backends<F: Clone>(
        &self,
        distribution: &Distribution<F>,
        accrual: Option<FailureAccrual>,
        view: &View<'_>,
        series: impl Fn(&Meta) -> Option<Arc<BackendSeries>>,
    ) -> Backends<F> {
        let choice = |route: &client::RouteBackend<F>| Choice {
            filters: route.filters.clone(),
            series: series(&route.backend.meta),
            backend: self.backend(&route.backend, accrual, view),
        };
        match distribution {
            Distribution::Empty => Backends::None,
            Distribution::FirstAvailable(list) => Backends::FirstAvailable(list.iter().map(choice).collect()),
            Distribution::RandomAvailable(list) => match Weights::new(list.iter().map(|(_, weight)| *weight)) {
                Some(weights) => Backends::ByWeight(weights, list.iter().map(|(route, _)| choice(route)).collect()),
                None => Backends::None,
            },
        }
    }

    fn backend(&self, backend: &client::Backend, accrual: Option<FailureAccrual>, view: &View<'_>) -> Backend {
        match &backend.target {
            BackendTarget::Fail => Backend::Fail,
            BackendTarget::Forward(spec) => Backend::Forward(self.forward(spec)),
            BackendTarget::Balance { path, load } => {
                let params = Params {
                    load: *load,
                    queue: Queue {
                        capacity: backend.queue.capacity.max(self.min_queue_capacity),
                        ..backend.queue
                    },
                    accrual,
                };
                self.viewed(path, params, view, &backend.meta)
            }
        }
    }

    /// The endpoint at a fixed address, with the connections that it has if somebody uses it already.
    pub(super) fn forward(&self, spec: &Arc<EndpointSpec>) -> Arc<Endpoint> {
        let mut forwards = self.forwards.lock();
        let list = forwards.known.entry(spec.addr).or_default();
        list.retain(|(_, endpoint)| endpoint.strong_count() > 0);
        let same = list.iter().find(|(of, _)| of == spec);
        if let Some(endpoint) = same.and_then(|(_, endpoint)| endpoint.upgrade()) {
            return endpoint;
        }
        let load = Load::new(UNMEASURED, Instant::now());
        let breaker = Breaker::new(None, Fleet::default(), Instant::now());
        let endpoint = Arc::new(Endpoint::new(&self.common, None, spec.clone(), load, breaker));
        list.push((spec.clone(), Arc::downgrade(&endpoint)));
        forwards.sweep();
        endpoint
    }

    /// The balancer of a service by its name, with the load parameters that services have without a policy.
    pub(super) fn service(
        &self,
        path: &Arc<str>,
        queue: Queue,
        accrual: Option<FailureAccrual>,
        view: &View<'_>,
    ) -> Backend {
        let params = Params {
            load: UNMEASURED,
            queue,
            accrual,
        };
        self.viewed(path, params, view, &Meta::of_service(path))
    }

    fn viewed(&self, path: &Arc<str>, params: Params, view: &View<'_>, backend: &Meta) -> Backend {
        let families = &self.common.families;
        let series = families.balancer(view.protocol, view.parent, backend, view.dst, path);
        let balanced = self.balanced(path, params);
        balanced.balancer.counted(&series);
        Backend::Balanced(balanced, series)
    }

    /// Counts the endpoints of all balancers, as they are now.
    pub(crate) fn measure(&self) {
        let now = Instant::now();
        for balanced in self.balanced.lock().values().flatten().filter_map(Weak::upgrade) {
            balanced.balancer.measure(now);
        }
    }

    fn balanced(&self, path: &Arc<str>, params: Params) -> Arc<Balanced> {
        let mut known = self.balanced.lock();
        known.retain(|_, list| {
            list.retain(|balanced| balanced.strong_count() > 0);
            !list.is_empty()
        });
        let list = known.entry(path.clone()).or_default();
        if let Some(found) = list
            .iter()
            .filter_map(Weak::upgrade)
            .find(|balanced| balanced.params == params)
        {
            return found;
        }
        let made = Arc::new(self.follow(path, params));
        list.push(Arc::downgrade(&made));
        made
    }

    fn follow(&self, path: &Arc<str>, params: Params) -> Balanced {
        let balancer = Arc::new(Balancer::new(self.strategy, params.queue));
        let (common, authority, fed) = (self.common.clone(), path.clone(), balancer.clone());
        let mut endpoints = Endpoints::default();
        let mut reporter = self.unreadable.reporter(Message::Endpoint, path.to_string());
        let followed = self.destinations.endpoints(path, move |position, update| {
            if position == Position::First {
                endpoints.resync();
            }
            let left_out = |error| drop(reporter.report(&error));
            let changed = decode::endpoint::endpoint_update(update, left_out).map(|update| {
                fed.told(match update {
                    EndpointUpdate::Add(_) if position != Position::First => Op::Add,
                    EndpointUpdate::Remove(_) => Op::Remove,
                    EndpointUpdate::Add(_) | EndpointUpdate::NoEndpoints => Op::Reset,
                });
                endpoints.apply(update, |spec| {
                    let now = Instant::now();
                    let breaker = Breaker::new(params.accrual, fed.fleet(), now);
                    let load = Load::new(params.load, now);
                    Arc::new(Endpoint::new(&common, Some(&authority), spec.clone(), load, breaker))
                })
            });
            match changed {
                Ok(Some(discovered)) => fed.update(discovered),
                Ok(None) => {}
                Err(error) => drop(reporter.report(&error)),
            }
        });
        Balanced {
            path: path.clone(),
            balancer,
            params,
            _followed: followed,
        }
    }
}

impl<F> Backends<F> {
    /// Everything to one.
    pub(super) fn only(backend: Backend) -> Self {
        Self::FirstAvailable(vec![Choice {
            filters: Vec::new(),
            backend,
            series: None,
        }])
    }

    /// The backend for a request or connection that comes now.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn choose(&self) -> Result<&Choice<F>, Error> {
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

    /// Whether one of them would take a request at once.
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
    fn is_available(&self, now: Instant) -> bool {
        match self {
            Self::Balanced(balanced, _) => balanced.balancer.is_available(now),
            // Its share of requests fails, and goes to nobody else.
            Self::Forward(_) | Self::Fail => true,
        }
    }

    /// An endpoint to try, rather one that has not been tried.
    ///
    /// # Errors
    /// None is available, or becomes so in time.
    pub(super) async fn pick(&self, tried: &[Arc<Endpoint>]) -> Result<Arc<Endpoint>, Error> {
        match self {
            Self::Balanced(balanced, series) => {
                balanced
                    .balancer
                    .pick(tried, series)
                    .await
                    .map_err(|error| match error {
                        PickError::NoEndpoints => Error::NoEndpoints,
                        PickError::FailFast(limit, missing) => Error::FailFast(limit, unready(missing)),
                        PickError::Unavailable(missing) => Error::Unavailable(unready(missing)),
                        PickError::QueueFull(_) => Error::QueueFull,
                    })
            }
            Self::Forward(endpoint) => Ok(endpoint.clone()),
            Self::Fail => Err(Error::NoBackend("it has no dispatcher")),
        }
    }

    /// An endpoint of which this holds, if there is one to be had at once.
    pub(super) fn pick_where(&self, may: impl Fn(&Arc<Endpoint>) -> bool) -> Option<Arc<Endpoint>> {
        match self {
            Self::Balanced(balanced, _) => balanced.balancer.pick_where(Instant::now(), may),
            Self::Forward(_) | Self::Fail => None,
        }
    }
}

fn unready(missing: Missing) -> Unready {
    match missing {
        Missing::Unready(after) => Unready::Unreached { after },
        Missing::Ejected => Unready::Ejected,
    }
}

/// What an endpoint is believed to take before it has answered.
const UNMEASURED: LoadParams = LoadParams::PeakEwma {
    default_rtt: std::time::Duration::from_millis(30),
    decay: std::time::Duration::from_secs(10),
};
