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
    net::{counts::Counts, first::Learned},
    outbound::{
        backend::{Backends, Choice, Factory},
        profile::ProfilePlan,
    },
    policy::{
        client::{ClientHttp, ClientPolicy, ClientProtocol, HttpTarget, OpaqueFilter, OpaqueRoute, Queue, TlsRoute},
        filter::Filter,
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
        timeout: Duration,
        http1: Arc<Router>,
        http2: Arc<Router>,
        opaque: Arc<OpaquePlan>,
    },
    Http1(Arc<Router>),
    Http2(Arc<Router>),
    Opaque(Arc<OpaquePlan>),
    /// TLS that stays closed, by its server name.
    Tls(Vec<(TlsRoute, Arc<OpaquePlan>)>),
}

/// The routes of HTTP requests.
pub(crate) struct Router {
    /// What rules instead of the policy, where a ServiceProfile does.
    pub(super) profile: Option<Arc<ProfilePlan>>,
    pub(super) routes: Vec<Route<HttpPlan>>,
}

/// What happens to a request that a rule has chosen.
pub(crate) struct HttpPlan {
    pub(super) backends: Backends<Filter>,
    /// From the request's head to the response's.
    pub(super) timeout: Option<Duration>,
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
            refusal: None,
            backends: profile_backends(factory, profile, queue),
        }),
        _ => Arc::new(opaque(factory, route)),
    };
    if profile.is_some_and(|profile| profile.is_opaque) {
        return Plan::Opaque(opaque_of(match &policy.protocol {
            ClientProtocol::Opaque(route) | ClientProtocol::Detect { opaque: route, .. } => route.as_ref(),
            _ => None,
        }));
    }
    let profile_plan = profile.filter(|profile| profile.rules_http()).map(|profile| {
        let overrides = profile
            .rules_opaque()
            .then(|| profile_backends(factory, profile, queue));
        Arc::new(ProfilePlan::new(
            &factory.common.families.profiles,
            profile,
            port,
            overrides,
        ))
    });
    let http = |http: &ClientHttp| Arc::new(router(factory, http, profile_plan.clone()));
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
        ClientProtocol::Http2(routes) | ClientProtocol::Grpc(routes) => Plan::Http2(http(routes)),
        ClientProtocol::Opaque(route) => Plan::Opaque(opaque_of(route.as_ref())),
        ClientProtocol::Tls(routes) => Plan::Tls(
            routes
                .iter()
                .map(|route| (route.clone(), opaque_of(Some(&route.route))))
                .collect(),
        ),
    }
}

fn router(factory: &Factory, http: &ClientHttp, profile: Option<Arc<ProfilePlan>>) -> Router {
    let compiled = |route: &Route<HttpTarget>| {
        route.map(|rule| HttpPlan {
            backends: factory.backends(&rule.payload.backends, http.failure_accrual),
            timeout: rule.payload.timeouts.request,
        })
    };
    Router {
        profile,
        routes: http.routes.iter().map(compiled).collect(),
    }
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
        backends: factory.backends(&route.backends, None),
    }
}

/// What filters of byte streams say: they only ever refuse.
pub(super) fn refusal(filters: &[OpaqueFilter]) -> Option<Refusal> {
    filters.first().map(|filter| match filter {
        OpaqueFilter::Forbidden => Refusal::Forbidden,
        OpaqueFilter::Invalid(_) | OpaqueFilter::Unknown => Refusal::Invalid,
    })
}

/// A profile's traffic split.
fn profile_backends<F>(factory: &Factory, profile: &Profile, queue: Queue) -> Backends<F> {
    let choices = profile.overrides.iter().map(|destination| Choice {
        filters: Vec::new(),
        backend: factory.service(&destination.destination.to_string().into(), queue),
    });
    match Weights::new(profile.overrides.iter().map(|destination| destination.weight)) {
        Some(weights) => Backends::ByWeight(weights, choices.collect()),
        None => Backends::None,
    }
}
