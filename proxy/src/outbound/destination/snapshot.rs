//! A destination, and the snapshot of its policy and profile that requests read.

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
    net::{detect_metrics, first_bytes::LearnedSpeaker, tcp_metrics::ConnectionMetrics},
    outbound::{
        backend::Backends,
        destination::{
            dns_addresses::DnsAddresses, profile::CompiledProfile, timeouts_and_retries::TimeoutsAndRetries,
        },
        metrics::{
            RouteSeries,
            connections::{self, DestinationProtocol},
        },
        mirror::Mirror,
    },
    policy::{
        client::{ClientPolicy, OpaqueFilter, TlsRoute},
        filter::Filter,
        profile::Profile,
        route::Route,
    },
};

/// One destination: an address that applications dial, or a name that they request.
pub(crate) struct Destination {
    pub(in crate::outbound) target: Addr,
    /// The current snapshot, once there is one. It stays while the control plane is unreachable.
    snapshot: OnceLock<ArcSwap<Snapshot>>,
    pub(in crate::outbound) has_snapshot: watch::Sender<bool>,
    /// Which side has sent the first bytes on earlier connections.
    pub(in crate::outbound) learned_speaker: LearnedSpeaker,
    pub(in crate::outbound) update_errors: Arc<UpdateErrors>,
    /// DNS addresses, for a name that is not a service.
    pub(in crate::outbound) dns_addresses: DnsAddresses,
    /// Metrics of client connections, created with the first connection.
    pub(in crate::outbound) connection_metrics: OnceLock<Arc<ConnectionMetrics>>,
    /// The time at which the destination was last requested, or last found in use.
    pub(in crate::outbound) used_at: Mutex<Instant>,
    /// Notified when the cache evicts this destination for another one.
    pub(in crate::outbound) evicted: Notify,
}

/// The reasons why the last policy and the last profile cannot be used; `None` if they can.
#[derive(Debug, Default)]
pub(in crate::outbound) struct UpdateErrors {
    pub(in crate::outbound) policy: Mutex<Option<String>>,
    pub(in crate::outbound) profile: Mutex<Option<String>>,
}

/// State of a destination at one time. A request uses one snapshot until its end.
pub(crate) struct Snapshot {
    pub(in crate::outbound) plan: Plan,
    /// Counts connections with the plan's protocol.
    pub(in crate::outbound) connection_counter: Arc<Counter>,
    /// Whether this is a name that the control plane does not know.
    pub(in crate::outbound) is_unknown_name: bool,
    /// The plan was compiled from `policy` and `profile`.
    pub(in crate::outbound) policy: ClientPolicy,
    pub(in crate::outbound) profile: Option<Profile>,
}

/// How connections to a destination are handled, by the protocol of the destination.
pub(crate) enum Plan {
    Detect {
        /// Maximum time for the first bytes.
        timeout: Duration,
        detect_series: detect_metrics::Series,
        http1: Arc<Router>,
        http2: Arc<Router>,
        opaque: Arc<CompiledOpaqueRoute>,
    },
    Http1(Arc<Router>),
    Http2(Arc<Router>),
    Opaque(Arc<CompiledOpaqueRoute>),
    /// TLS that is not terminated, routed by server name (SNI).
    Tls {
        routes: Arc<[TlsRoute]>,
        /// The compiled routes, in the order of `routes`.
        compiled: Vec<Arc<CompiledOpaqueRoute>>,
    },
}

/// The routes of HTTP requests, from the policy or from a ServiceProfile.
pub(crate) enum Router {
    Routes(Vec<Route<CompiledAction>>),
    Profile(Box<CompiledProfile>),
}

/// The action of a route rule: the compiled [`RouteAction`](crate::policy::client::RouteAction).
pub(crate) struct CompiledAction {
    pub(in crate::outbound) backends: Backends<Filter>,
    pub(in crate::outbound) mirrors: Vec<Arc<Mirror>>,
    /// `None` if the rule sets no timeouts and no retries, and requests cannot override them.
    pub(in crate::outbound) timeouts_and_retries: Option<TimeoutsAndRetries>,
    pub(in crate::outbound) series: Arc<RouteSeries>,
}

/// A compiled opaque or TLS route.
pub(crate) struct CompiledOpaqueRoute {
    pub(in crate::outbound) refusal: Option<PolicyRefusal>,
    pub(in crate::outbound) backends: Backends<OpaqueFilter>,
    pub(in crate::outbound) series: connections::OpaqueRouteSeries,
}

impl Destination {
    pub(in crate::outbound) fn new(target: Addr) -> Self {
        Self {
            target,
            snapshot: OnceLock::new(),
            has_snapshot: watch::Sender::new(false),
            learned_speaker: LearnedSpeaker::default(),
            update_errors: Arc::default(),
            dns_addresses: DnsAddresses::default(),
            connection_metrics: OnceLock::new(),
            used_at: Mutex::new(Instant::now()),
            evicted: Notify::new(),
        }
    }

    pub(in crate::outbound) fn try_snapshot(&self) -> Option<Arc<Snapshot>> {
        Some(self.snapshot.get()?.load_full())
    }

    pub(in crate::outbound) fn snapshot(&self) -> Arc<Snapshot> {
        self.try_snapshot()
            .expect("discovery returns a destination only once it has a snapshot")
    }

    pub(in crate::outbound) fn publish(&self, snapshot: Snapshot) {
        let snapshot = Arc::new(snapshot);
        let mut is_first = false;
        let current = self.snapshot.get_or_init(|| {
            is_first = true;
            ArcSwap::new(snapshot.clone())
        });
        if !is_first {
            current.store(snapshot);
        }
        self.has_snapshot.send_replace(true);
    }
}

/// The reason why the policy refuses an opaque connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PolicyRefusal {
    #[error("the policy forbids the connection")]
    Forbidden,
    #[error("the policy is invalid: {0}")]
    Invalid(Arc<str>),
    #[error("{0}")]
    DiscoveryDenied(Arc<str>),
}

impl PolicyRefusal {
    /// The cause in `tulle_failures_total`.
    pub(in crate::outbound) fn cause(&self) -> &'static str {
        match self {
            Self::Forbidden => "forbidden",
            Self::Invalid(_) => "invalid-policy",
            Self::DiscoveryDenied(_) => "discovery-denied",
        }
    }

    /// Value of the `error` label in the metrics of connections.
    pub(in crate::outbound) fn label(&self) -> &'static str {
        match self {
            Self::Forbidden => "forbidden",
            Self::Invalid(_) => "invalid_policy",
            Self::DiscoveryDenied(_) => "discovery_denied",
        }
    }
}

impl Plan {
    /// Routers of HTTP/1 and HTTP/2 requests.
    pub(super) fn routers(&self) -> impl Iterator<Item = &Router> {
        let [first, second] = match self {
            Self::Detect { http1, http2, .. } => [Some(http1), Some(http2)],
            Self::Http1(router) | Self::Http2(router) => [Some(router), None],
            Self::Opaque(_) | Self::Tls { .. } => [None, None],
        };
        first.into_iter().chain(second).map(|router| &**router)
    }

    pub(in crate::outbound) fn protocol(&self) -> DestinationProtocol {
        match self {
            Self::Detect { .. } => DestinationProtocol::Detect,
            Self::Http1(_) => DestinationProtocol::Http1,
            Self::Http2(_) => DestinationProtocol::Http2,
            Self::Opaque(_) => DestinationProtocol::Opaque,
            Self::Tls { .. } => DestinationProtocol::Tls,
        }
    }
}

/// The refusal of the first filter, if there is one. Every filter of an opaque route is a refusal.
pub(in crate::outbound) fn policy_refusal(filters: &[OpaqueFilter]) -> Option<PolicyRefusal> {
    filters.first().map(|filter| match filter {
        OpaqueFilter::Forbidden => PolicyRefusal::Forbidden,
        OpaqueFilter::Invalid(reason) => PolicyRefusal::Invalid(reason.clone()),
        OpaqueFilter::DiscoveryDenied(reason) => PolicyRefusal::DiscoveryDenied(reason.clone()),
    })
}
