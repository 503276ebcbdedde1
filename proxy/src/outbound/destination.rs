//! Profile and policy of a destination, compiled into one snapshot that requests read.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tulle_core::{addr::Addr, metrics::Counter};

use crate::{
    balance::weighted::Weights,
    metrics::routes::Kind,
    net::{counts::Counts, detected, first::Learned},
    outbound::{
        backend::{Backend, Backends, Choice, Factory, View},
        metrics::{
            RouteSeries,
            connections::{self, Protocol},
        },
        profile::ProfilePlan,
        resolved::Resolved,
        tries::Allowed,
    },
    policy::{
        client::{
            ClientHttp, ClientPolicy, ClientProtocol, FailureAccrual, HttpTarget, OpaqueFilter, OpaqueRoute, Queue,
            TlsRoute,
        },
        filter::Filter,
        matches::RequestMatch,
        meta::Meta,
        profile::{Budget, Profile},
        route::Route,
    },
};

/// All we know about one address that applications dial, or one name that they ask for.
pub(crate) struct Destination {
    pub(super) target: Addr,
    /// What holds now, once it is known; the last one stays when the control plane goes.
    snapshot: OnceLock<ArcSwap<Snapshot>>,
    /// Whether there is one.
    pub(super) known: watch::Sender<bool>,
    pub(super) learned: Learned,
    pub(super) unread: Arc<Unread>,
    /// Addresses of a name that is of no service.
    pub(super) resolved: Resolved,
    /// Connections of applications, from the first on.
    pub(super) counts: OnceLock<Arc<Counts>>,
    /// When a connection last came, or was last seen.
    pub(super) used_at: Mutex<Instant>,
    /// Told when it makes room for another.
    pub(super) forgotten: Notify,
}

/// Why the last policy and the last profile that came cannot be read, where that is so.
#[derive(Debug, Default)]
pub(super) struct Unread {
    pub(super) policy: Mutex<Option<String>>,
    pub(super) profile: Mutex<Option<String>>,
}

/// What holds for a destination at a time.
pub(crate) struct Snapshot {
    pub(super) plan: Plan,
    /// Connections that are carried so.
    pub(super) connections: Arc<Counter>,
    /// Whether this is a name that the control plane does not know.
    pub(super) is_foreign: bool,
    /// What it was made of.
    pub(super) policy: ClientPolicy,
    pub(super) profile: Option<Profile>,
}

/// How connections to a destination are carried.
pub(crate) enum Plan {
    /// Look at the first bytes.
    Detect {
        /// How long at most.
        timeout: Duration,
        detected: detected::Series,
        http1: Arc<Router>,
        http2: Arc<Router>,
        opaque: Arc<OpaquePlan>,
    },
    Http1(Arc<Router>),
    Http2(Arc<Router>),
    Opaque(Arc<OpaquePlan>),
    /// TLS that stays closed, by its server name.
    Tls {
        routes: Arc<[TlsRoute]>,
        /// One for each route.
        plans: Vec<Arc<OpaquePlan>>,
    },
}

/// Who says what happens to HTTP requests.
pub(crate) enum Router {
    /// Routes of a policy.
    Routes(Vec<Route<HttpPlan>>),
    Profile(Box<ProfilePlan>),
}

/// What happens to a request that a rule has chosen.
pub(crate) struct HttpPlan {
    pub(super) backends: Backends<Filter>,
    /// Time and further tries, where a policy speaks of them.
    pub(super) allowed: Option<Allowed>,
    pub(super) series: Arc<RouteSeries>,
}

/// Where bytes go.
pub(crate) struct OpaquePlan {
    pub(super) refusal: Option<Refusal>,
    pub(super) backends: Backends<OpaqueFilter>,
    pub(super) series: connections::RouteSeries,
}

impl Destination {
    pub(super) fn new(target: Addr) -> Self {
        Self {
            target,
            snapshot: OnceLock::new(),
            known: watch::Sender::new(false),
            learned: Learned::default(),
            unread: Arc::default(),
            resolved: Resolved::default(),
            counts: OnceLock::new(),
            used_at: Mutex::new(Instant::now()),
            forgotten: Notify::new(),
        }
    }

    /// What holds now, if that is known.
    pub(super) fn known_snapshot(&self) -> Option<Arc<Snapshot>> {
        Some(self.snapshot.get()?.load_full())
    }

    /// What holds now.
    pub(super) fn snapshot(&self) -> Arc<Snapshot> {
        self.known_snapshot()
            .expect("nobody gets a destination before it is known")
    }

    /// Lets something hold from now on.
    pub(super) fn publish(&self, snapshot: Snapshot) {
        let snapshot = Arc::new(snapshot);
        let mut first = Some(snapshot.clone());
        let current = self
            .snapshot
            .get_or_init(|| ArcSwap::new(first.take().expect("called once")));
        if first.is_some() {
            current.store(snapshot);
        }
        self.known.send_replace(true);
    }
}

/// Why no connection passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Forbidden,
    Invalid,
}

impl Refusal {
    /// What it is called in `tulle_failures_total`.
    pub(super) fn cause(self) -> &'static str {
        match self {
            Self::Forbidden => "forbidden",
            Self::Invalid => "invalid-policy",
        }
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Forbidden => "forbidden",
            Self::Invalid => "invalid_policy",
        }
    }
}

/// Compiles what the control plane said of `dst`; backends that stay the same keep their endpoints and connections, and rules
/// that were in `before` what is left of their budgets.
pub(super) fn compile(
    factory: &Factory,
    policy: ClientPolicy,
    profile: Option<&Profile>,
    queue: Queue,
    dst: &Addr,
    before: Option<&Snapshot>,
) -> Snapshot {
    let compiler = Compiler {
        before,
        factory,
        policy: &policy,
        profile,
        queue,
        dst,
    };
    let plan = compiler.plan();
    let families = &factory.common.families.connections;
    Snapshot {
        connections: families.carried(plan.protocol(), &policy.meta),
        plan,
        profile: profile.cloned(),
        is_foreign: false,
        policy,
    }
}

/// What plans are made of.
struct Compiler<'a> {
    factory: &'a Factory,
    policy: &'a ClientPolicy,
    profile: Option<&'a Profile>,
    queue: Queue,
    /// What applications dial or name.
    dst: &'a Addr,
    /// What this takes the place of.
    before: Option<&'a Snapshot>,
}

impl Compiler<'_> {
    fn plan(&self) -> Plan {
        let protocol = &self.policy.protocol;
        if let Some(profile) = self.profile.filter(|profile| profile.is_opaque) {
            return Plan::Opaque(match protocol {
                ClientProtocol::Opaque(route) | ClientProtocol::Detect { opaque: route, .. } => {
                    self.opaque(route.as_ref(), Protocol::Opaque)
                }
                // The policy says what the server speaks, and the profile that nobody should look.
                _ if profile.rules_opaque() => self.opaque(None, Protocol::Opaque),
                _ => {
                    let target = self.profile_target(profile, None, Protocol::Opaque);
                    self.opaque_plan(None, None, Backends::only(target), Protocol::Opaque)
                }
            });
        }
        let http = |routes| Arc::new(self.router(Kind::Http, routes));
        match protocol {
            ClientProtocol::Detect {
                timeout,
                http1,
                http2,
                opaque,
            } => {
                let first = http(http1);
                Plan::Detect {
                    timeout: *timeout,
                    detected: self.factory.common.families.connections.detected(&self.policy.meta),
                    http2: if http1 == http2 { first.clone() } else { http(http2) },
                    http1: first,
                    opaque: self.opaque(opaque.as_ref(), Protocol::Opaque),
                }
            }
            ClientProtocol::Http1(routes) => Plan::Http1(http(routes)),
            ClientProtocol::Http2(routes) => Plan::Http2(http(routes)),
            ClientProtocol::Grpc(routes) => Plan::Http2(Arc::new(self.router(Kind::Grpc, routes))),
            ClientProtocol::Opaque(route) => Plan::Opaque(self.opaque(route.as_ref(), Protocol::Opaque)),
            ClientProtocol::Tls(routes) => Plan::Tls {
                routes: routes.clone(),
                plans: routes
                    .iter()
                    .map(|route| self.opaque(Some(&route.route), Protocol::Tls))
                    .collect(),
            },
        }
    }

    fn router(&self, kind: Kind, http: &ClientHttp) -> Router {
        if let Some(profile) = self.profile.filter(|profile| profile.rules_http()) {
            return self.profile_router(profile, http.failure_accrual);
        }
        let parent = &self.policy.meta;
        let view = self.view(parent, Protocol::Http1);
        let compiled = |route: &Route<HttpTarget>| {
            let series = self.factory.common.families.route(kind, parent, &route.meta);
            route.map(|rule| HttpPlan {
                backends: self
                    .factory
                    .backends(&rule.payload.backends, http.failure_accrual, &view, |meta| {
                        Some(series.backend(meta))
                    }),
                allowed: Allowed::of(&rule.payload, || self.budget(&route.meta, &rule.matches)),
                series: series.clone(),
            })
        };
        Router::Routes(http.routes.iter().map(compiled).collect())
    }

    /// What a ServiceProfile makes of a service: the routes of a policy do not count then, as their filters and backends would
    /// contradict it.
    fn profile_router(&self, profile: &Profile, accrual: Option<FailureAccrual>) -> Router {
        let dst = format!("{}:{}", profile.name.as_deref().unwrap_or_default(), self.dst.port());
        let backends = match profile.overrides.is_empty() {
            true => Backends::only(self.profile_target(profile, accrual, Protocol::Http1)),
            false => self.profile_backends(profile, accrual, Protocol::Http1),
        };
        let families = &self.factory.common.families.profiles;
        let before = self.routers_before().find_map(|router| match router {
            Router::Profile(before) => Some(&**before),
            Router::Routes(_) => None,
        });
        Router::Profile(Box::new(ProfilePlan::new(families, profile, &dst, backends, before)))
    }

    fn routers_before(&self) -> impl Iterator<Item = &Router> {
        self.before.into_iter().flat_map(|before| before.plan.routers())
    }

    /// The budget that a rule had before.
    fn budget(&self, route: &Arc<Meta>, matches: &[RequestMatch]) -> Option<Arc<Budget>> {
        let routes = self.routers_before().filter_map(|router| match router {
            Router::Routes(routes) => Some(routes),
            Router::Profile(_) => None,
        });
        let same = routes.flatten().filter(|before| before.meta == *route);
        let mut rules = same.flat_map(|before| &before.rules);
        let same = rules.find(|rule| rule.matches == matches)?;
        Some(same.payload.allowed.as_ref()?.budget().clone())
    }

    /// Where bytes go by their route, or by the profile.
    fn opaque(&self, route: Option<&OpaqueRoute>, protocol: Protocol) -> Arc<OpaquePlan> {
        let refused = route.and_then(|route| refusal(&route.filters));
        let (refusal, backends) = match (self.profile.filter(|profile| profile.rules_opaque()), route) {
            (Some(profile), _) => (refused, self.profile_backends(profile, None, protocol)),
            (None, Some(route)) => {
                let view = self.view(&self.policy.meta, protocol);
                (refused, self.factory.backends(&route.backends, None, &view, |_| None))
            }
            (None, None) => (Some(Refusal::Invalid), Backends::None),
        };
        self.opaque_plan(route, refusal, backends, protocol)
    }

    fn opaque_plan(
        &self,
        route: Option<&OpaqueRoute>,
        refusal: Option<Refusal>,
        backends: Backends<OpaqueFilter>,
        protocol: Protocol,
    ) -> Arc<OpaquePlan> {
        let families = &self.factory.common.families.connections;
        let parent = &self.policy.meta;
        let meta = route.map_or(parent, |route| &route.meta);
        Arc::new(OpaquePlan {
            refusal,
            backends,
            series: match protocol {
                Protocol::Tls => families.tls_route(parent, meta),
                _ => families.tcp_route(parent, meta, self.dst),
            },
        })
    }

    /// What a profile is for, where it says nothing of others: its service, or its one endpoint.
    fn profile_target(&self, profile: &Profile, accrual: Option<FailureAccrual>, protocol: Protocol) -> Backend {
        match (&profile.name, &profile.endpoint) {
            (Some(name), _) => self.service(&format!("{name}:{}", self.dst.port()), accrual, protocol),
            (None, Some(endpoint)) => Backend::Forward(self.factory.forward(endpoint)),
            (None, None) => Backend::Fail,
        }
    }

    /// A profile's traffic split.
    fn profile_backends<F>(
        &self,
        profile: &Profile,
        accrual: Option<FailureAccrual>,
        protocol: Protocol,
    ) -> Backends<F> {
        let choices = profile.overrides.iter().map(|destination| Choice {
            filters: Vec::new(),
            series: None,
            backend: self.service(&destination.destination.to_string(), accrual, protocol),
        });
        match Weights::new(profile.overrides.iter().map(|destination| destination.weight)) {
            Some(weights) => Backends::ByWeight(weights, choices.collect()),
            None => Backends::None,
        }
    }

    fn service(&self, path: &str, accrual: Option<FailureAccrual>, protocol: Protocol) -> Backend {
        let view = self.view(&self.policy.meta, protocol);
        self.factory.service(&path.into(), self.queue, accrual, &view)
    }

    fn view<'a>(&'a self, parent: &'a Meta, protocol: Protocol) -> View<'a> {
        View {
            protocol,
            parent,
            dst: self.dst,
        }
    }
}

impl Plan {
    /// Who says what happens to HTTP requests, of either version.
    fn routers(&self) -> impl Iterator<Item = &Router> {
        let [first, second] = match self {
            Self::Detect { http1, http2, .. } => [Some(http1), Some(http2)],
            Self::Http1(router) | Self::Http2(router) => [Some(router), None],
            Self::Opaque(_) | Self::Tls { .. } => [None, None],
        };
        first.into_iter().chain(second).map(|router| &**router)
    }

    pub(super) fn protocol(&self) -> Protocol {
        match self {
            Self::Detect { .. } => Protocol::Detect,
            Self::Http1(_) => Protocol::Http1,
            Self::Http2(_) => Protocol::Http2,
            Self::Opaque(_) => Protocol::Opaque,
            Self::Tls { .. } => Protocol::Tls,
        }
    }
}

/// What filters of byte streams say: they only ever refuse.
pub(super) fn refusal(filters: &[OpaqueFilter]) -> Option<Refusal> {
    filters.first().map(|filter| match filter {
        OpaqueFilter::Forbidden => Refusal::Forbidden,
        OpaqueFilter::Invalid(_) | OpaqueFilter::Unknown => Refusal::Invalid,
    })
}
