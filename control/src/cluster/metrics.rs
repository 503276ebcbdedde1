//! Metrics of values and their subscribers, and the metric families of stored objects.

use std::sync::Arc;

use parking_lot::Mutex;
use tulle_core::metrics::{Counter, Family, Gauge, Histogram, Labels, Registry};

use crate::resources::Kind;
use crate::resources::meta::NamespacedName;
use crate::resources::unserved;

pub(super) struct Metrics {
    pub(super) registry: Registry,
    /// Value of the label `cluster`.
    pub(super) cluster: Arc<str>,
    /// Times for which the state was locked.
    pub(super) lock_seconds: Arc<Histogram>,
    endpoints: EndpointFamilies,
    workload_subscribers: Family<Gauge>,
    workload_updates: Family<Counter>,
    profile_subscribers: Family<Gauge>,
    profile_updates: Family<Counter>,
    pub(super) invalid_context_tokens: Arc<Counter>,
    service_subscribers: Family<Gauge>,
    policy_subscribers: Family<Gauge>,
    policy_updates: Family<Counter>,
    /// Exported as `unserved_configuration`.
    unserved: Family<Gauge>,
    pub(super) unreadable: Family<Gauge>,
    overridden: Family<Gauge>,
    pub(super) service_addresses: Arc<Gauge>,
    pub(super) services: Arc<Gauge>,
    pub(super) routed_services: Family<Gauge>,
    subscribed_service_ports: Family<Gauge>,
    policy_objects: [(Kind, Family<Gauge>); POLICY_INDEX_METRICS.len()],
}

/// The metrics of the endpoints of Service ports.
struct EndpointFamilies {
    subscribers: Family<Gauge>,
    updates: Family<Counter>,
    count: Family<Gauge>,
    service_exists: Family<Gauge>,
}

impl EndpointFamilies {
    fn new(registry: &Registry) -> Self {
        Self {
            subscribers: registry.gauge(
                "endpoints_subscribers",
                "Streams that follow the endpoints of a service port.",
            ),
            updates: registry.counter("endpoints_updates", "Changes of the endpoints of a service port."),
            count: registry.gauge("endpoints_pods", "Endpoints of a service port."),
            service_exists: registry.gauge("endpoints_exists", "1 if the service exists."),
        }
    }
}

impl Metrics {
    /// Counts one unserved part of an object until the guard is dropped.
    pub(super) fn unserved_guard(&self, kind: Kind, name: &NamespacedName, field: &str) -> GaugeGuard {
        let labels = Labels::new()
            .with("kind", kind.info().name)
            .with("namespace", &name.namespace)
            .with("name", &name.name)
            .with("field", field);
        GaugeGuard::new(self.unserved.get(&labels))
    }

    /// The metrics of another cluster. Only the metrics of endpoints and the counts of stored objects by kind
    /// (`<prefix>_cache_size`) are exported; the control plane of that cluster exports the others.
    pub(super) fn for_remote_cluster(registry: &Registry, cluster: Arc<str>) -> Self {
        Self {
            registry: registry.clone(),
            cluster,
            endpoints: EndpointFamilies::new(registry),
            ..Self::new(&Registry::new())
        }
    }

    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            cluster: "local".into(),
            lock_seconds: registry
                .histogram(
                    "tulle_state_lock_seconds",
                    "Time for which the store is locked, by a batch of changes or by a stream that begins or ends.",
                    LOCK_BUCKETS,
                )
                .get(&Labels::new()),
            endpoints: EndpointFamilies::new(registry),
            workload_subscribers: registry
                .gauge("workload_subscribers", "Streams that follow the profile of an address."),
            workload_updates: registry.counter("workload_updates", "Changes of the profile of an address."),
            profile_subscribers: registry.gauge("profile_subscribers", "Streams that follow the profile of a service."),
            profile_updates: registry.counter("profile_updates", "Changes of the profile of a service."),
            invalid_context_tokens: registry
                .counter(
                    "tulle_invalid_context_tokens_total",
                    "Requests to the destination service with an invalid context token. They are served as if they had none: namespace and zone of the client are unknown.",
                )
                .get(&Labels::new()),
            service_subscribers: registry.gauge(
                "service_subscribers",
                "Streams that follow the profile of a service, by the name of the Service.",
            ),
            policy_subscribers: registry.gauge("policy_subscribers", "Streams that follow policies, by direction."),
            policy_updates: registry.counter(
                "policy_updates",
                "Changes of policies that streams follow, by direction.",
            ),
            unserved: unserved::metric_family(registry),
            unreadable: registry.gauge(
                "tulle_unreadable_objects",
                "1 for each unreadable object. Its last readable version applies; without one, traffic that it could restrict is denied.",
            ),
            overridden: registry.gauge(
                "tulle_overridden_servers",
                "Ports on which a Server has no effect, because an older Server (label `by`) selects them too. Only ports that proxies watch are counted.",
            ),
            service_addresses: registry
                .gauge("outbound_index_service_index_size", "Addresses of Services.")
                .get(&Labels::new()),
            services: registry
                .gauge("outbound_index_service_info_index_size", "Services.")
                .get(&Labels::new()),
            routed_services: registry.gauge(
                "outbound_index_service_route_index_size",
                "Services with routes, by namespace.",
            ),
            subscribed_service_ports: registry.gauge(
                "outbound_index_service_port_route_index_size",
                "Policies of Service ports that streams follow, by the namespace of the Service.",
            ),
            policy_objects: POLICY_INDEX_METRICS
                .map(|(kind, name)| (kind, registry.gauge(name, "Objects of this kind, by namespace."))),
            registry: registry.clone(),
        }
    }

    /// The number of objects of this kind in a namespace, if the kind has an index metric.
    pub(super) fn policy_objects(&self, kind: Kind, namespace: &str) -> Option<Arc<Gauge>> {
        let (_, family) = self.policy_objects.iter().find(|(indexed, _)| *indexed == kind)?;
        Some(family.get(&Labels::new().with("namespace", namespace)))
    }

    pub(super) fn endpoints(&self, service: &NamespacedName, port: u16, hostname: Option<&str>) -> EntryMetrics {
        let labels = Labels::new()
            .with("cluster", &self.cluster)
            .with("namespace", &service.namespace)
            .with("service", &service.name)
            .with("port", port)
            .with("hostname", hostname.unwrap_or_default())
            // Clients on all nodes share one value.
            .with("nodename", "");
        EntryMetrics {
            subscribers: self.endpoints.subscribers.get(&labels),
            updates: self.endpoints.updates.get(&labels),
            endpoints: Some(EndpointGauges {
                count: self.endpoints.count.get(&labels),
                service_exists: self.endpoints.service_exists.get(&labels),
            }),
            _service_port_guard: None,
            overridden: None,
        }
    }

    pub(super) fn workload(&self, addr: std::net::SocketAddr) -> EntryMetrics {
        let labels = Labels::new().with("ip", addr.ip()).with("port", addr.port());
        EntryMetrics {
            subscribers: self.workload_subscribers.get(&labels),
            updates: self.workload_updates.get(&labels),
            endpoints: None,
            _service_port_guard: None,
            overridden: None,
        }
    }

    pub(super) fn profile(&self, namespace: &str, profile: &str) -> EntryMetrics {
        let labels = Labels::new().with("namespace", namespace).with("profile", profile);
        EntryMetrics {
            subscribers: self.profile_subscribers.get(&labels),
            updates: self.profile_updates.get(&labels),
            endpoints: None,
            _service_port_guard: None,
            overridden: None,
        }
    }

    pub(super) fn service_subscribers(&self, namespace: &str, name: &str) -> Arc<Gauge> {
        let labels = Labels::new().with("namespace", namespace).with("name", name);
        self.service_subscribers.get(&labels)
    }

    /// `namespace` is the namespace of the workload and its Servers.
    pub(super) fn inbound(&self, namespace: &Arc<str>) -> EntryMetrics {
        EntryMetrics {
            overridden: Some(OverriddenServers {
                family: self.overridden.clone(),
                namespace: namespace.clone(),
                gauge_guards: Mutex::default(),
            }),
            ..self.policy("inbound", None)
        }
    }

    /// `service_namespace` is the namespace of the Service that the policy applies to.
    pub(super) fn outbound(&self, service_namespace: Option<&str>) -> EntryMetrics {
        let counted = service_namespace.map(|namespace| {
            let labels = Labels::new().with("namespace", namespace);
            GaugeGuard::new(self.subscribed_service_ports.get(&labels))
        });
        self.policy("outbound", counted)
    }

    fn policy(&self, direction: &str, service_port: Option<GaugeGuard>) -> EntryMetrics {
        let labels = Labels::new().with("direction", direction);
        EntryMetrics {
            subscribers: self.policy_subscribers.get(&labels),
            updates: self.policy_updates.get(&labels),
            endpoints: None,
            _service_port_guard: service_port,
            overridden: None,
        }
    }
}

/// The metrics of one key. They are no longer exported after the key is removed from its table.
pub(super) struct EntryMetrics {
    subscribers: Arc<Gauge>,
    updates: Arc<Counter>,
    /// Present for the endpoints of a Service port.
    endpoints: Option<EndpointGauges>,
    /// Counts the key in `subscribed_service_ports`. Present for the policy of a Service port.
    _service_port_guard: Option<GaugeGuard>,
    /// Present for the policy of a workload's port.
    overridden: Option<OverriddenServers>,
}

struct EndpointGauges {
    count: Arc<Gauge>,
    /// 1 if the Service exists, otherwise 0.
    service_exists: Arc<Gauge>,
}

/// The metric of Servers that select the port but are overridden by an older Server.
struct OverriddenServers {
    family: Family<Gauge>,
    namespace: Arc<str>,
    gauge_guards: Mutex<Vec<GaugeGuard>>,
}

impl EntryMetrics {
    pub(super) fn add_subscriber(&self) {
        self.subscribers.add(1);
    }

    pub(super) fn remove_subscriber(&self) {
        self.subscribers.add(-1);
    }

    pub(super) fn count_update(&self) {
        self.updates.inc();
    }

    /// Counts the Servers that select the port but are overridden by the Server `by`.
    pub(super) fn set_overridden_servers(&self, servers: &[Arc<str>], by: &str) {
        let Some(overridden) = &self.overridden else { return };
        let counted = servers.iter().map(|name| {
            let labels = Labels::new()
                .with("namespace", &overridden.namespace)
                .with("name", name)
                .with("by", by);
            GaugeGuard::new(overridden.family.get(&labels))
        });
        *overridden.gauge_guards.lock() = counted.collect();
    }

    pub(super) fn set_endpoints(&self, n_endpoints: usize, exists: bool) {
        if let Some(gauges) = &self.endpoints {
            gauges.count.set(i64::try_from(n_endpoints).unwrap_or(i64::MAX));
            gauges.service_exists.set(i64::from(exists));
        }
    }
}

/// Adds 1 to a gauge until it is dropped.
pub struct GaugeGuard(Arc<Gauge>);

impl GaugeGuard {
    pub(crate) fn new(gauge: Arc<Gauge>) -> Self {
        gauge.add(1);
        Self(gauge)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

/// Buckets of `tulle_state_lock_seconds`, in seconds.
const LOCK_BUCKETS: &[f64] = &[
    0.000_1, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0,
];

/// The kinds whose objects are also counted by namespace, each with the name of its metric.
const POLICY_INDEX_METRICS: [(Kind, &str); 8] = [
    (
        Kind::MeshTlsAuthentication,
        "inbound_index_meshtls_authentication_index_size",
    ),
    (
        Kind::NetworkAuthentication,
        "inbound_index_network_authentication_index_size",
    ),
    (Kind::Pod, "inbound_index_pod_index_size"),
    (Kind::ExternalWorkload, "inbound_index_external_workload_index_size"),
    (Kind::Server, "inbound_index_server_index_size"),
    (
        Kind::ServerAuthorization,
        "inbound_index_server_authorization_index_size",
    ),
    (
        Kind::AuthorizationPolicy,
        "inbound_index_authorization_policy_index_size",
    ),
    (Kind::PolicyHttpRoute, "inbound_index_http_route_index_size"),
];
