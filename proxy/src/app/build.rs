//! Both directions, built from the configuration.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tulle_core::{
    connections::{ConnectionLimiter, Within},
    log_limit::LogLimiter,
    metrics::{Labels, Registry},
};

use crate::{
    api::{
        self,
        channel::{self, OwnIdentity},
        destination::Destinations,
        dns::Resolver,
        policies::Policies,
    },
    app::Surroundings,
    balance::balancer::Strategy,
    config::{self, Balancing, Config, Direction, InboundMode, Ingress, Visibility},
    gateway::Through,
    http::{
        access_log::AccessLog,
        client::PoolConfig,
        h1::{self, pool::Resend},
        h2,
        layers::{Admission, Errors, Observe, Wrappers},
        respond::Reasons,
        server,
    },
    identity::Source,
    inbound::{
        DialAs, Inbound,
        gateway::Gateway,
        metrics as inbound_metrics,
        policy::{Current, Defaults, Ports, UnknownPolicy},
        profiles::{self, Profiles},
        servers::Servers,
    },
    metrics::{
        failures::Failures,
        hosts::{Hosts, SaidBy},
        http as http_metrics, unreadable,
    },
    net::{
        connect::{self, SocketOptions},
        counts,
        memory::Shortage,
        orig_dst,
    },
    outbound::{Mode, Outbound, backend::Factory, discover::Discover, endpoint::Common, metrics as outbound_metrics},
    policy::{
        client::{ForwardParams, Queue},
        server::DefaultPolicy,
    },
    tap::Taps,
    tls::creds::Credentials,
    trace::Tracer,
};

/// Clients of the control plane's services.
pub(super) struct ControlPlane {
    /// Where it certifies us.
    pub(super) identity: Option<channel::Channel>,
    /// Where spans of traces go.
    pub(super) collector: Option<channel::Channel>,
    destinations: Destinations,
    policies: Policies,
    resolver: Resolver,
    runtime: Handle,
}

impl ControlPlane {
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
        let connect = |client, target: &channel::ControlAddr, own_identity| {
            let direction = match channel::is_loopback(&target.addr) {
                true => &config.inbound.direction,
                false => &config.outbound.direction,
            };
            connector.channel(
                target.clone(),
                channel::Config {
                    client,
                    connect_timeout: direction.connect.timeout,
                    backoff: direction.connect.backoff,
                    call_wait: channel::CALL_WAIT,
                    own_identity,
                },
            )
        };
        let destinations = Destinations::new(
            connect("control_destination", &control.destination, OwnIdentity::Required),
            runtime.clone(),
            api::destination::Config {
                context_token: control.context_token.clone(),
                profiles: control.profiles.clone(),
                limits: control.stream_limits,
                backoff: config.outbound.direction.connect.backoff,
            },
        );
        let policies = Policies::new(
            connect("control_policy", &control.policy, OwnIdentity::Required),
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
                Source::ControlPlane { certify, .. } => {
                    Some(connect("control_identity", &certify.service, OwnIdentity::Optional))
                }
                Source::WorkloadApi { .. } => None,
            },
            collector: config
                .trace
                .as_ref()
                .map(|trace| connect("opentelemetry", &trace.collector, OwnIdentity::Optional)),
            destinations,
            policies,
            resolver,
            runtime: runtime.clone(),
        }
    }
}

/// What both directions are built from.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    pub(super) config: &'a Config,
    pub(super) surroundings: &'a Surroundings,
    pub(super) workers: usize,
    pub(super) creds: &'a Credentials,
    pub(super) control: &'a ControlPlane,
    pub(super) registry: &'a Registry,
    pub(super) http: &'a http_metrics::Families,
    pub(super) tcp: &'a counts::Families,
    pub(super) access_log: Option<&'a AccessLog>,
    pub(super) taps: &'a Arc<Taps>,
    pub(super) shortage: &'a Shortage,
    /// Files that the process may have open.
    pub(super) descriptors: usize,
    /// Who makes spans, inbound and outbound.
    pub(super) tracers: &'a [Option<Tracer>; 2],
}

impl Parts<'_> {
    pub(super) fn outbound(&self) -> Arc<Outbound> {
        let Self { config, registry, .. } = *self;
        let direction = &config.outbound.direction;
        let mode = match config.outbound.ingress {
            Ingress::Off => Mode::Sidecar,
            Ingress::On => Mode::Ingress,
        };
        let by_name = (config.outbound.hostname_labels == Visibility::Shown).then_some(match mode {
            Mode::Sidecar => SaidBy::Known,
            Mode::Ingress => SaidBy::Stranger,
        });
        let families = outbound_metrics::Families::new(registry, self.http.clone(), self.tcp.clone(), by_name);
        let common = Common {
            creds: self.creds.clone(),
            connect: connect_config(direction, None),
            http2: http2_client(direction),
            pool: pool(direction),
            families: families.clone(),
            ips: config.inbound.ips.clone(),
            workers: self.workers,
            taps: self.taps.clone(),
            tracer: self.tracers[1].clone(),
            mode,
        };
        let unreadable = unreadable::Families::new(registry);
        let factory = Factory {
            common: Arc::new(common),
            destinations: self.control.destinations.clone(),
            strategy: match config.outbound.balancing {
                Balancing::PeakEwma => Strategy::PeakEwma,
                Balancing::RoundRobin => Strategy::RoundRobin,
            },
            min_queue_capacity: direction.http_queue_capacity,
            unreadable: unreadable.clone(),
            balanced: Mutex::default(),
            forwards: Mutex::default(),
        };
        let queue = Queue {
            capacity: direction.http_queue_capacity,
            failfast_timeout: direction.http_failfast_timeout,
        };
        let discover = Discover {
            destinations: self.control.destinations.clone(),
            policies: self.control.policies.clone(),
            resolver: self.control.resolver.clone(),
            factory,
            unreadable,
            forward: ForwardParams {
                detect_timeout: direction.accept.detect_timeout,
                queue,
            },
            idle: direction.discovery_idle_timeout,
            runtime: self.control.runtime.clone(),
            known: Mutex::default(),
        };
        let discover = Arc::new(discover);
        let measured = Arc::downgrade(&discover);
        registry.measured(move || {
            if let Some(discover) = measured.upgrade() {
                discover.factory.measure();
            }
        });
        Arc::new(Outbound {
            orig_dst: self.surroundings.orig_dst.clone(),
            own: config
                .outbound
                .listen
                .iter()
                .copied()
                .chain(config.outbound.explicit)
                .collect(),
            discover,
            detect_timeout: direction.accept.detect_timeout,
            server: server::Config {
                http1: http1_server(direction),
                http2: http2_server(direction),
            },
            wrappers: self.wrappers("outbound", direction, config.log.access_directions.outbound()),
            reasons: match config.outbound.informational_headers {
                Visibility::Shown => Reasons::Told,
                Visibility::Hidden => Reasons::Kept,
            },
            families,
            tracer: self.tracers[1].clone(),
            mode,
            name: self.creds.id().as_str().into(),
            log: LogLimiter::default(),
        })
    }

    /// `outbound` takes on what a gateway is asked for.
    pub(super) fn inbound(&self, outbound: &Arc<Outbound>) -> Arc<Inbound> {
        let Self { config, registry, .. } = *self;
        let suffixes = config.inbound.gateway_suffixes.clone();
        let gateway = (!suffixes.is_empty()).then(|| {
            let outbound = outbound.clone();
            Arc::new(Through { outbound, suffixes }) as Arc<dyn Gateway>
        });
        let direction = &config.inbound.direction;
        let policy = match config.inbound.default_policy {
            config::DefaultPolicy::Deny => DefaultPolicy::Deny,
            config::DefaultPolicy::AllAuthenticated => DefaultPolicy::AllAuthenticated,
            config::DefaultPolicy::AllUnauthenticated => DefaultPolicy::AllUnauthenticated,
            config::DefaultPolicy::ClusterAuthenticated => DefaultPolicy::ClusterAuthenticated,
            config::DefaultPolicy::ClusterUnauthenticated => DefaultPolicy::ClusterUnauthenticated,
            config::DefaultPolicy::Audit => DefaultPolicy::Audit,
        };
        let (networks, detect_timeout) = (&config.control.cluster_networks, direction.accept.detect_timeout);
        let unknown = match config.inbound.unknown_policy {
            config::UnknownPolicy::Refuse => UnknownPolicy::Refuse,
            config::UnknownPolicy::Default => UnknownPolicy::Default(Defaults {
                detect: Current::new(policy.detect(detect_timeout, networks)),
                opaque: Current::new(policy.opaque(networks)),
                opaque_ports: config.inbound.opaque_ports.clone(),
            }),
        };
        let own_port = config.inbound.listen.port();
        let mut kept = config.inbound.ports.clone();
        if gateway.is_some() {
            kept.insert(own_port); // its policy says who may send what to others
        }
        if !config.admin.listen.ip().is_loopback() {
            kept.insert(config.admin.listen.port()); // scrapes need not wait for it
        }
        let (orig_dst, dial_as) = match config.inbound.mode {
            InboundMode::Redirect => (self.surroundings.orig_dst.clone(), DialAs::Us),
            InboundMode::Tproxy => (orig_dst::untranslated(own_port), DialAs::Client),
        };
        Arc::new(Inbound {
            own_port,
            ips: config.inbound.ips.clone(),
            orig_dst,
            creds: self.creds.clone(),
            ports: Arc::new(Ports::new(
                self.control.policies.clone(),
                unknown,
                detect_timeout,
                kept,
                direction.discovery_idle_timeout,
                unreadable::Families::new(registry),
            )),
            profiles: Profiles::new(
                registry,
                self.control.destinations.clone(),
                profiles::Terms {
                    timeout: config.inbound.profile_timeout,
                    idle: direction.discovery_idle_timeout,
                },
                self.control.runtime.clone(),
            ),
            detect_timeout,
            connect: connect_config(direction, Some(own_port)),
            dial_as,
            http2_client: http2_client(direction),
            pool: pool(direction),
            servers: Servers::new(server::Config {
                http1: http1_server(direction),
                http2: http2_server(direction),
            }),
            wrappers: self.wrappers("inbound", direction, config.log.access_directions.inbound()),
            families: inbound_metrics::Families::new(registry, self.http.clone(), self.tcp.clone()),
            taps: self.taps.clone(),
            tracer: self.tracers[0].clone(),
            name: self.creds.id().as_str().into(),
            names: Hosts::default(),
            log: LogLimiter::default(),
            authorities: (config.inbound.authority_labels == Visibility::Shown).then(Hosts::default),
            gateway,
            apps: (0..self.workers).map(|_| Mutex::new(HashMap::new())).collect(),
        })
    }

    fn wrappers(&self, name: &'static str, direction: &Direction, is_logged: bool) -> Wrappers {
        // With its other side, what one direction accepts leaves the other one half of all files.
        let connections = ConnectionLimiter::new(name, self.descriptors / 4, Within::Keep, self.registry);
        let failures = Failures::new(self.registry, name);
        Wrappers {
            access_log: self.access_log.filter(|_| is_logged).cloned(),
            admission: Admission::new(direction.max_in_flight, connections, self.shortage.clone(), failures),
            observe: Observe::new(self.registry, name),
            errors: errors(self.registry, name),
        }
    }
}

fn errors(registry: &Registry, direction: &'static str) -> Errors {
    let name = format!("{direction}_http_errors_total");
    Errors::new(
        registry.counter(&name, "HTTP requests that the proxy answered itself, by kind of error"),
        Failures::new(registry, direction),
        Labels::new().with("direction", direction),
    )
}

pub(super) fn accept_options(direction: &Direction) -> SocketOptions {
    SocketOptions {
        keepalive: direction.accept.keepalive,
        user_timeout: direction.accept.user_timeout,
    }
}

fn connect_config(direction: &Direction, own_port: Option<u16>) -> connect::Config {
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

fn pool(direction: &Direction) -> PoolConfig {
    let pool = &direction.http1_pool;
    PoolConfig {
        idle_timeout: pool.idle_timeout,
        max_idle: pool.max_idle_per_endpoint,
        resend: match direction.resend {
            config::Resend::Never => Resend::Never,
            config::Resend::Safe => Resend::Safe,
            config::Resend::Idempotent => Resend::Idempotent,
        },
    }
}

fn http1_server(direction: &Direction) -> h1::server::Config {
    let server = &direction.http1_server;
    h1::server::Config {
        max_head: server.max_head_size,
        head_timeout: server.head_timeout,
        idle_timeout: server.idle_timeout,
    }
}

fn http2_client(direction: &Direction) -> h2::Params {
    let windows = direction.http2_client;
    h2::Params {
        stream_window: windows.stream,
        connection_window: windows.connection,
        ..h2::Params::default()
    }
}

fn http2_server(direction: &Direction) -> h2::Params {
    let server = &direction.http2_server;
    h2::Params {
        stream_window: server.windows.stream,
        connection_window: server.windows.connection,
        keep_alive: server.keep_alive.map(|pings| h2::KeepAlive {
            interval: pings.interval,
            timeout: pings.timeout,
        }),
        max_frame_size: server.max_frame_size,
        max_concurrent_streams: Some(server.max_concurrent_streams),
        max_send_buffer: server.max_send_buf_size,
        max_pending_resets: server.max_pending_accept_reset_streams,
        max_resets: None,
        max_header_list: server
            .max_header_list_size
            .unwrap_or_else(|| h2::Params::list_of(direction.http1_server.max_head_size)),
        max_header_lists: h2::Params::HEADER_LISTS,
    }
}
