//! Builds both directions from the configuration.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tulle_core::{
    connections::{ConnectionLimiter, SameAddressEviction},
    log_limit::LogLimiter,
    metrics::{Labels, Registry},
};

use crate::{
    api::{
        self,
        channel::{self, ClientCertificate},
        destination::Destinations,
        dns::Resolver,
        policies::Policies,
    },
    app::context::{ProcessContext, Tracers},
    balance::balancer::Strategy,
    config::{self, Config, DirectionSettings, InboundMode, IngressMode, LoadBalancing, Visibility},
    gateway::OutboundGateway,
    http::{
        h1::pool::{PoolConfig, ResendPolicy},
        h2,
        server_config::{HttpLimits, ServerConfig},
        stack::access_log::AccessLog,
        stack::admission::Admission,
        stack::error_response::ErrorDetail,
        stack::head_memory::HeadMemory,
        stack::layers::{CountLayer, ErrorMetrics, ServiceStack},
    },
    identity::IdentitySource,
    inbound::{
        Inbound,
        app_clients::{AppClients, SourceAddress},
        gateway::Gateway,
        http_server_configs::HttpServerConfigs,
        metrics as inbound_metrics,
        policy::{ActivePolicy, DefaultPolicies, InitialPolicy, PortPolicies, PortPoliciesConfig},
        port_labels::PortLabels,
        profiles::{self, Profiles},
    },
    metrics::{
        failures::Failures,
        hosts::{HostMap, HostSource},
        http as http_metrics, invalid_updates,
    },
    net::{
        app_listeners,
        connect::{self, SocketOptions},
        memory::MemoryPressure,
        orig_dst, tcp_metrics,
    },
    outbound::{
        Mode, Outbound, backend::BackendFactory, connector::ConnectorConfig, destination::discovery::Discovery,
        endpoint::EndpointContext, metrics as outbound_metrics,
    },
    policy::client::{LocalPolicyConfig, Queue},
    tap::TapRegistry,
    tls::credentials::Credentials,
};

/// Clients of the control plane's services, and channels to them and to the collector of trace spans.
pub(super) struct ControlPlaneClients {
    pub(super) identity: Option<channel::Channel>,
    /// The collector of trace spans.
    pub(super) collector: Option<channel::Channel>,
    destinations: Destinations,
    policies: Policies,
    resolver: Resolver,
    runtime: Handle,
}

impl ControlPlaneClients {
    pub(super) fn new(config: &Config, creds: &Credentials, registry: &Registry, runtime: &Handle) -> Self {
        let control = &config.control;
        let metrics = api::metrics::Metrics::new(registry);
        let resolver = Resolver::new(control.dns.clone(), metrics.clone());
        let connector = channel::Connector {
            creds: creds.clone(),
            resolver: resolver.clone(),
            metrics,
            runtime: runtime.clone(),
        };
        let new_channel = |metrics_prefix, target: &channel::ControlAddr, client_certificate| {
            // As in Linkerd's proxy, services on this host are dialled with the inbound settings, others with the outbound ones.
            let connect_settings = match channel::is_loopback(&target.addr) {
                true => &config.inbound.direction.connect,
                false => &config.outbound.direction.connect,
            };
            connector.channel(
                target.clone(),
                channel::Config {
                    metrics_prefix,
                    connect_timeout: connect_settings.timeout,
                    backoff: connect_settings.backoff,
                    connection_wait_timeout: channel::CONNECTION_WAIT_TIMEOUT,
                    client_certificate,
                },
            )
        };
        let destinations = Destinations::new(
            new_channel("control_destination", &control.destination, ClientCertificate::Required),
            runtime.clone(),
            api::destination::Config {
                context_token: control.context_token.clone(),
                profiles: control.profiles.clone(),
                limits: control.stream_limits,
                backoff: config.outbound.direction.connect.backoff,
            },
        );
        let policies = Policies::new(
            new_channel("control_policy", &control.policy, ClientCertificate::Required),
            runtime.clone(),
            api::policies::Config {
                workload: control.workload.clone(),
                limits: control.stream_limits,
                inbound_backoff: config.inbound.direction.connect.backoff,
                outbound_backoff: config.outbound.direction.connect.backoff,
            },
        );
        Self {
            identity: match &config.identity.source {
                IdentitySource::ControlPlane { certify, .. } => Some(new_channel(
                    "control_identity",
                    &certify.service,
                    ClientCertificate::Optional,
                )),
                IdentitySource::WorkloadApi { .. } => None,
            },
            collector: config
                .trace
                .as_ref()
                .map(|trace| new_channel("opentelemetry", &trace.collector, ClientCertificate::Optional)),
            destinations,
            policies,
            resolver,
            runtime: runtime.clone(),
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct ProxyBuilder<'a> {
    pub(super) config: &'a Config,
    pub(super) context: &'a ProcessContext,
    pub(super) workers: usize,
    pub(super) creds: &'a Credentials,
    pub(super) control: &'a ControlPlaneClients,
    pub(super) registry: &'a Registry,
    pub(super) http: &'a http_metrics::Families,
    pub(super) tcp: &'a tcp_metrics::Families,
    pub(super) access_log: Option<&'a AccessLog>,
    pub(super) taps: &'a Arc<TapRegistry>,
    pub(super) memory_pressure: &'a MemoryPressure,
    pub(super) head_memory: &'a Arc<HeadMemory>,
    /// Maximum number of accepted connections of each direction.
    pub(super) max_connections: usize,
    pub(super) tracers: &'a Tracers,
}

impl ProxyBuilder<'_> {
    pub(super) fn outbound(&self) -> Arc<Outbound> {
        let Self { config, registry, .. } = *self;
        let direction = &config.outbound.direction;
        let mode = match config.outbound.ingress_mode {
            IngressMode::Off => Mode::Sidecar,
            IngressMode::On => Mode::Ingress,
        };
        let hostname_source = (config.outbound.hostname_labels == Visibility::Shown).then_some(match mode {
            Mode::Sidecar => HostSource::Trusted,
            Mode::Ingress => HostSource::Untrusted,
        });
        let families = outbound_metrics::Families::new(registry, self.http.clone(), self.tcp.clone(), hostname_source);
        let target_log_limiter = Arc::<LogLimiter<_>>::default();
        let endpoint_context = EndpointContext {
            creds: self.creds.clone(),
            connector: ConnectorConfig {
                connect: connect_config(direction, None),
                log_limiter: target_log_limiter.clone(),
            },
            http2: http2_client_config(direction),
            pool: pool_config(direction),
            families: families.clone(),
            local_ips: config.inbound.local_ips.clone(),
            workers: self.workers,
            taps: self.taps.clone(),
            tracer: self.tracers.outbound.clone(),
            mode,
        };
        let discovery = self.discovery(direction, endpoint_context);
        let is_logged = config.log.access_log_directions.includes_outbound();
        Arc::new(Outbound {
            orig_dst_lookup: self.context.orig_dst.clone(),
            own_listeners: config
                .outbound
                .listen
                .iter()
                .copied()
                .chain(config.outbound.explicit_listen)
                .collect(),
            discovery,
            detect_timeout: direction.accept.detect_timeout,
            server: ServerConfig {
                limits: http_limits(direction),
                http2: http2_server_config(direction),
            },
            service_stack: self.service_stack("outbound", direction, is_logged),
            error_detail: match config.outbound.informational_headers {
                Visibility::Shown => ErrorDetail::Include,
                Visibility::Hidden => ErrorDetail::Omit,
            },
            families,
            tracer: self.tracers.outbound.clone(),
            mode,
            identity_name: self.creds.id().as_str().into(),
            log_limiter: LogLimiter::default(),
            target_log_limiter,
        })
    }

    /// Builds the discovery of destinations, which also updates the gauges of their endpoints.
    fn discovery(&self, direction: &DirectionSettings, endpoint_context: EndpointContext) -> Arc<Discovery> {
        let log_limiter = endpoint_context.connector.log_limiter.clone();
        let invalid_update_families = invalid_updates::Families::new(self.registry);
        let factory = BackendFactory {
            endpoint_context: Arc::new(endpoint_context),
            destinations: self.control.destinations.clone(),
            strategy: match self.config.outbound.load_balancing {
                LoadBalancing::PeakEwma => Strategy::PeakEwma,
                LoadBalancing::RoundRobin => Strategy::RoundRobin,
            },
            min_queue_capacity: self.config.outbound.http_queue_capacity,
            invalid_updates: invalid_update_families.clone(),
            services: Mutex::default(),
            fixed_endpoints: Mutex::default(),
        };
        let queue = Queue {
            capacity: self.config.outbound.http_queue_capacity,
            failfast_timeout: self.config.outbound.http_failfast_timeout,
        };
        let discovery = Discovery {
            destinations: self.control.destinations.clone(),
            policies: self.control.policies.clone(),
            resolver: self.control.resolver.clone(),
            factory,
            invalid_updates: invalid_update_families,
            local_policy_config: LocalPolicyConfig {
                detect_timeout: direction.accept.detect_timeout,
                queue,
            },
            idle_timeout: direction.discovery_idle_timeout,
            runtime: self.control.runtime.clone(),
            cache: Mutex::default(),
            log_limiter,
        };
        let discovery = Arc::new(discovery);
        let weak_discovery = Arc::downgrade(&discovery);
        self.registry.before_render(move || {
            if let Some(discovery) = weak_discovery.upgrade() {
                discovery.factory.update_gauges();
            }
        });
        discovery
    }

    /// Builds the inbound side. If this proxy is a gateway, `outbound` sends the requests of the gateway.
    pub(super) fn inbound(&self, outbound: &Arc<Outbound>) -> Arc<Inbound> {
        let Self { config, registry, .. } = *self;
        let suffixes = config.inbound.gateway_suffixes.clone();
        let gateway = (!suffixes.is_empty()).then(|| {
            let outbound = outbound.clone();
            Arc::new(OutboundGateway { outbound, suffixes }) as Arc<dyn Gateway>
        });
        let direction = &config.inbound.direction;
        let is_logged = config.log.access_log_directions.includes_inbound();
        let detect_timeout = direction.accept.detect_timeout;
        let initial_policy = self.initial_policy(detect_timeout);
        let own_port = config.inbound.listen.port();
        let mut watched_ports = config.inbound.watched_ports.clone();
        if gateway.is_some() {
            watched_ports.insert(own_port); // the policy of this port authorizes clients of the gateway
        }
        if !config.admin.listen.ip().is_loopback() {
            watched_ports.insert(config.admin.listen.port()); // so that scrapes do not wait for the policy
        }
        let mut labelled_ports = watched_ports.clone();
        labelled_ports.insert(own_port);
        labelled_ports.insert(config.admin.listen.port());
        let families = inbound_metrics::Families::new(
            registry,
            self.http.clone(),
            self.tcp.clone(),
            PortLabels::new(labelled_ports, app_listeners::is_listening),
        );
        let (orig_dst, source_address) = match config.inbound.mode {
            InboundMode::Redirect => (self.context.orig_dst.clone(), SourceAddress::Proxy),
            InboundMode::Tproxy => (orig_dst::local_addr_lookup(own_port), SourceAddress::Client),
        };
        Arc::new(Inbound {
            own_port,
            local_ips: config.inbound.local_ips.clone(),
            orig_dst_lookup: orig_dst,
            creds: self.creds.clone(),
            port_policies: Arc::new(PortPolicies::new(
                self.control.policies.clone(),
                PortPoliciesConfig {
                    initial_policy,
                    detect_timeout,
                    always_watched: watched_ports,
                    idle_timeout: direction.discovery_idle_timeout,
                    is_listening: app_listeners::is_listening,
                },
                invalid_updates::Families::new(registry),
            )),
            profiles: Profiles::new(
                registry,
                self.control.destinations.clone(),
                profiles::ProfileTimeouts {
                    wait_timeout: config.inbound.profile_timeout,
                    idle_timeout: direction.discovery_idle_timeout,
                },
                self.control.runtime.clone(),
            ),
            detect_timeout,
            server_configs: HttpServerConfigs::new(ServerConfig {
                limits: http_limits(direction),
                http2: http2_server_config(direction),
            }),
            service_stack: self.service_stack("inbound", direction, is_logged),
            families: families.clone(),
            taps: self.taps.clone(),
            tracer: self.tracers.inbound.clone(),
            identity_name: self.creds.id().as_str().into(),
            server_name_labels: HostMap::default(),
            log_limiter: LogLimiter::default(),
            audit_log_limiter: LogLimiter::default(),
            authority_labels: (config.inbound.authority_labels == Visibility::Shown).then(HostMap::default),
            gateway,
            app_clients: AppClients {
                connect: connect_config(direction, Some(own_port)),
                source_address,
                http2: http2_client_config(direction),
                pool: pool_config(direction),
                families,
                by_worker: (0..self.workers).map(|_| Mutex::new(HashMap::new())).collect(),
            },
        })
    }

    /// The policy of a port until the control plane sends one.
    fn initial_policy(&self, detect_timeout: Duration) -> InitialPolicy {
        let config = self.config;
        let policy = config.inbound.default_policy;
        let networks = &config.control.cluster_networks;
        match config.inbound.missing_policy_action {
            config::MissingPolicyAction::Refuse => InitialPolicy::Refuse,
            config::MissingPolicyAction::Default => InitialPolicy::Default(DefaultPolicies {
                detect: ActivePolicy::new(policy.policy_for_detected_port(detect_timeout, networks)),
                opaque: ActivePolicy::new(policy.policy_for_opaque_port(networks)),
                opaque_ports: config.inbound.opaque_ports.clone(),
            }),
        }
    }

    fn service_stack(&self, name: &'static str, direction: &DirectionSettings, is_logged: bool) -> ServiceStack {
        let connections = ConnectionLimiter::new(
            name,
            self.max_connections,
            SameAddressEviction::UnusedOnly,
            self.registry,
        );
        let failures = Failures::new(self.registry, name);
        ServiceStack {
            access_log: self.access_log.filter(|_| is_logged).cloned(),
            admission: Admission::new(
                direction.max_in_flight_requests,
                connections,
                self.memory_pressure.clone(),
                failures,
            ),
            head_memory: self.head_memory.clone(),
            count_layer: CountLayer::new(self.registry, name),
            error_metrics: error_metrics(self.registry, name),
        }
    }
}

fn error_metrics(registry: &Registry, direction: &'static str) -> ErrorMetrics {
    let name = format!("{direction}_http_errors_total");
    ErrorMetrics::new(
        registry.counter(&name, "HTTP requests that the proxy answered itself, by kind of error"),
        Failures::new(registry, direction),
        Labels::new().with("direction", direction),
    )
}

pub(super) fn accept_options(direction: &DirectionSettings) -> SocketOptions {
    SocketOptions {
        keepalive: direction.accept.keepalive,
        user_timeout: direction.accept.user_timeout,
    }
}

fn connect_config(direction: &DirectionSettings, own_port: Option<u16>) -> connect::Config {
    let config = &direction.connect;
    let options = SocketOptions {
        keepalive: config.keepalive,
        user_timeout: config.user_timeout,
    };
    connect::Config {
        timeout: config.timeout,
        options,
        own_port,
    }
}

fn pool_config(direction: &DirectionSettings) -> PoolConfig {
    let pool = &direction.http1_pool;
    PoolConfig {
        idle_timeout: pool.idle_timeout,
        max_idle: pool.max_idle_per_endpoint,
        resend: match direction.resend_policy {
            config::ResendPolicy::Never => ResendPolicy::Never,
            config::ResendPolicy::SafeMethods => ResendPolicy::SafeMethods,
            config::ResendPolicy::IdempotentMethods => ResendPolicy::IdempotentMethods,
        },
    }
}

fn http_limits(direction: &DirectionSettings) -> HttpLimits {
    let server = &direction.http_server;
    HttpLimits {
        max_header_bytes: server.max_header_bytes,
        header_read_timeout: server.header_read_timeout,
        idle_timeout: server.idle_timeout,
    }
}

fn http2_client_config(direction: &DirectionSettings) -> h2::Http2Config {
    let windows = direction.http2_client;
    h2::Http2Config {
        stream_window: windows.stream,
        connection_window: windows.connection,
        ..h2::Http2Config::default()
    }
}

fn http2_server_config(direction: &DirectionSettings) -> h2::Http2Config {
    let server = &direction.http2_server;
    h2::Http2Config {
        stream_window: server.windows.stream,
        connection_window: server.windows.connection,
        keep_alive: server.keep_alive.map(|pings| h2::KeepAlive {
            interval: pings.interval,
            timeout: pings.timeout,
        }),
        max_frame_size: server.max_frame_size,
        max_concurrent_streams: Some(server.max_concurrent_streams),
        max_send_buffer_bytes: server.max_send_buffer_bytes,
        max_pending_reset_streams: server.max_pending_reset_streams,
        max_reset_streams: None,
        max_header_list_bytes: server
            .max_header_list_bytes
            .unwrap_or_else(|| h2::Http2Config::header_list_limit(direction.http_server.max_header_bytes)),
        max_total_header_list_bytes: h2::Http2Config::DEFAULT_TOTAL_HEADER_LIST_BYTES,
    }
}
