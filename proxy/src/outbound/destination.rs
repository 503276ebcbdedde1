//! Profile and policy of a destination, compiled into one snapshot that requests read.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::{
    balance::weighted::Weights,
    metrics::routes::Kind,
    net::{counts::Counts, first::Learned},
    outbound::{
        backend::{Backend, Backends, Choice, Factory},
        metrics::RouteSeries,
        profile::ProfilePlan,
        tries::Allowed,
    },
    policy::{
        client::{
            ClientHttp, ClientPolicy, ClientProtocol, FailureAccrual, HttpTarget, OpaqueFilter, OpaqueRoute, Queue,
            TlsRoute,
        },
        filter::Filter,
        meta::Meta,
        profile::Profile,
        route::Route,
    },
};

/// All we know about one address that applications dial.
pub(crate) struct Destination {
    pub(super) orig_dst: SocketAddr,
    /// What holds now; the last one stays when the control plane goes.
    pub(super) plan: ArcSwap<Plan>,
    /// Whether `plan` is more than a placeholder.
    pub(super) known: watch::Sender<bool>,
    pub(super) learned: Learned,
    /// Connections of applications, from the first on.
    pub(super) counts: OnceLock<Arc<Counts>>,
    /// When a connection last came, or was last seen.
    pub(super) used_at: Mutex<Instant>,
}

/// How connections to a destination are carried.
pub(crate) enum Plan {
    /// Look at the first bytes.
    Detect {
        /// How long at most.
        timeout: Duration,
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

/// Compiles what the control plane said; backends that stay the same keep their endpoints and connections.
///
/// `port` is the one that applications dial.
pub(super) fn compile(
    factory: &Factory,
    policy: &ClientPolicy,
    profile: Option<&Profile>,
    queue: Queue,
    port: u16,
) -> Plan {
    let opaque_of = |route: Option<&OpaqueRoute>| match profile {
        Some(profile) if profile.rules_opaque() => Arc::new(OpaquePlan {
            refusal: route.and_then(|route| refusal(&route.filters)),
            backends: profile_backends(factory, profile, queue, None),
        }),
        _ => Arc::new(opaque(factory, route)),
    };
    if let Some(profile) = profile.filter(|profile| profile.is_opaque) {
        return Plan::Opaque(match &policy.protocol {
            ClientProtocol::Opaque(route) | ClientProtocol::Detect { opaque: route, .. } => opaque_of(route.as_ref()),
            // The policy says what the server speaks, and the profile that nobody should look.
            _ if profile.rules_opaque() => opaque_of(None),
            _ => Arc::new(OpaquePlan {
                refusal: None,
                backends: Backends::only(profile_target(factory, profile, queue, None, port)),
            }),
        });
    }
    let profile = profile.filter(|profile| profile.rules_http());
    let router = |kind, http: &ClientHttp| {
        Arc::new(match profile {
            Some(profile) => profile_router(factory, profile, http.failure_accrual, queue, port),
            None => router(factory, kind, &policy.meta, http),
        })
    };
    let http = |routes| router(Kind::Http, routes);
    match &policy.protocol {
        ClientProtocol::Detect {
            timeout,
            http1,
            http2,
            opaque,
        } => {
            let first = http(http1);
            Plan::Detect {
                timeout: *timeout,
                http2: if http1 == http2 { first.clone() } else { http(http2) },
                http1: first,
                opaque: opaque_of(opaque.as_ref()),
            }
        }
        ClientProtocol::Http1(routes) => Plan::Http1(http(routes)),
        ClientProtocol::Http2(routes) => Plan::Http2(http(routes)),
        ClientProtocol::Grpc(routes) => Plan::Http2(router(Kind::Grpc, routes)),
        ClientProtocol::Opaque(route) => Plan::Opaque(opaque_of(route.as_ref())),
        ClientProtocol::Tls(routes) => Plan::Tls {
            routes: routes.clone(),
            plans: routes.iter().map(|route| opaque_of(Some(&route.route))).collect(),
        },
    }
}

fn router(factory: &Factory, kind: Kind, parent: &Meta, http: &ClientHttp) -> Router {
    let compiled = |route: &Route<HttpTarget>| {
        let series = factory.common.families.route(kind, parent, &route.meta);
        route.map(|rule| HttpPlan {
            backends: factory.backends(&rule.payload.backends, http.failure_accrual, |meta| {
                Some(series.backend(meta))
            }),
            allowed: Allowed::of(&rule.payload),
            series: series.clone(),
        })
    };
    Router::Routes(http.routes.iter().map(compiled).collect())
}

/// What a ServiceProfile makes of a service: the routes of a policy do not count then, as their filters and backends would
/// contradict it.
fn profile_router(
    factory: &Factory,
    profile: &Profile,
    accrual: Option<FailureAccrual>,
    queue: Queue,
    port: u16,
) -> Router {
    let dst = format!("{}:{port}", profile.name.as_deref().unwrap_or_default());
    let backends = match profile.overrides.is_empty() {
        true => Backends::only(profile_target(factory, profile, queue, accrual, port)),
        false => profile_backends(factory, profile, queue, accrual),
    };
    let families = &factory.common.families.profiles;
    Router::Profile(Box::new(ProfilePlan::new(families, profile, &dst, backends)))
}

fn opaque(factory: &Factory, route: Option<&OpaqueRoute>) -> OpaquePlan {
    let Some(route) = route else {
        return OpaquePlan {
            refusal: Some(Refusal::Invalid),
            backends: Backends::None,
        };
    };
    OpaquePlan {
        refusal: refusal(&route.filters),
        backends: factory.backends(&route.backends, None, |_| None),
    }
}

/// What filters of byte streams say: they only ever refuse.
pub(super) fn refusal(filters: &[OpaqueFilter]) -> Option<Refusal> {
    filters.first().map(|filter| match filter {
        OpaqueFilter::Forbidden => Refusal::Forbidden,
        OpaqueFilter::Invalid(_) | OpaqueFilter::Unknown => Refusal::Invalid,
    })
}

/// What a profile is for, where it says nothing of others: its service, or its one endpoint.
fn profile_target(
    factory: &Factory,
    profile: &Profile,
    queue: Queue,
    accrual: Option<FailureAccrual>,
    port: u16,
) -> Backend {
    match (&profile.name, &profile.endpoint) {
        (Some(name), _) => factory.service(&format!("{name}:{port}").into(), queue, accrual),
        (None, Some(endpoint)) => Backend::Forward(factory.forward(endpoint)),
        (None, None) => Backend::Fail,
    }
}

/// A profile's traffic split.
fn profile_backends<F>(
    factory: &Factory,
    profile: &Profile,
    queue: Queue,
    accrual: Option<FailureAccrual>,
) -> Backends<F> {
    let choices = profile.overrides.iter().map(|destination| Choice {
        filters: Vec::new(),
        series: None,
        backend: factory.service(&destination.destination.to_string().into(), queue, accrual),
    });
    match Weights::new(profile.overrides.iter().map(|destination| destination.weight)) {
        Some(weights) => Backends::ByWeight(weights, choices.collect()),
        None => Backends::None,
    }
}
