//! Builds all of the proxy once and runs it: sockets first, then identity, then traffic, then the drain.

use std::{
    collections::{BTreeMap, HashMap},
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::Context;
use parking_lot::Mutex;
use tokio::{
    net::TcpStream,
    runtime::{Builder, Handle, Runtime},
    signal::unix::{SignalKind, signal},
    sync::{Notify, watch},
};
use tulle_core::{
    addr::OrigDst,
    drain,
    metrics::{self, Labels, Registry},
    ready::Readiness,
    telemetry::LogHandle,
};

use crate::{
    admin,
    api::{self, channel, destination::Destinations, dns::Resolver, policies::Policies},
    balance::balancer::Strategy,
    config::{self, Balancing, Config, Direction, Visibility},
    http::{
        client::PoolConfig,
        h2,
        layers::{Admission, Errors, Observe},
        respond::Reasons,
        server,
    },
    identity::{certify::Certifier, key::Key},
    inbound::{
        Inbound, metrics as inbound_metrics,
        policy::{Current, Defaults, Ports},
    },
    metrics::http as http_metrics,
    net::{
        connect::{self, SocketOptions},
        counts, listen, listeners, orig_dst,
    },
    outbound::{Outbound, backend::Factory, discover::Discover, endpoint::Common, metrics as outbound_metrics},
    policy::{
        client::{ForwardParams, Queue},
        server::DefaultPolicy,
    },
    tls::creds::Credentials,
};

/// How long a proxy that was asked to end goes on accepting for an application that still listens.
const LAME_DUCK: Duration = Duration::from_secs(10);
/// How often it looks whether the application still does.
const LAME_DUCK_LOOK: Duration = Duration::from_millis(100);
/// How often series without an owner are looked for.
const METRICS_SWEEP: Duration = Duration::from_secs(60);

/// What surrounds the process besides its configuration.
pub struct Surroundings {
    pub log: Option<LogHandle>,
    /// Variables that the admin server may show.
    pub env: BTreeMap<String, String>,
    /// Learns what accepted connections dialled; the kernel knows where redirect rules are in force.
    pub orig_dst: fn(&TcpStream, SocketAddr) -> std::io::Result<OrigDst>,
}

impl Surroundings {
    /// Those of a sidecar behind redirect rules.
    pub fn redirected(log: Option<LogHandle>, env: BTreeMap<String, String>) -> Self {
        Self {
            log,
            env,
            orig_dst: orig_dst::of,
        }
    }
}

/// A proxy whose sockets are bound, ready to run.
pub struct App {
    config: Config,
    registry: Registry,
    readiness: Readiness,
    creds: Credentials,
    outbound: Arc<Outbound>,
    inbound: Arc<Inbound>,
    sockets: Vec<Sockets>,
    admin: Admin,
    shutdown: Arc<Notify>,
}

/// What runs beside the traffic, on a thread of its own.
struct Admin {
    runtime: Runtime,
    server: tulle_core::admin::Admin,
    listener: TcpListener,
    certifier: Certifier,
}

/// The listeners of one worker.
struct Sockets {
    outbound: Vec<TcpListener>,
    inbound: TcpListener,
}

impl App {
    /// Binds all sockets and builds both directions. Nothing is accepted yet: what arrives waits in the kernel.
    ///
    /// # Errors
    /// An address cannot be bound, or credentials cannot be read.
    pub fn build(config: Config, surroundings: Surroundings) -> anyhow::Result<Self> {
        let registry = Registry::new();
        metrics::process_metrics(&registry);
        let readiness = Readiness::new();
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .context("starting the admin runtime")?;
        let workers = config
            .workers
            .count(thread::available_parallelism().map_or(1, usize::from));

        let anchors = config.identity.anchors.read().context("reading trust anchors")?;
        let creds = Credentials::new(config.identity.id.clone(), &config.identity.server_name, anchors)
            .context("using trust anchors")?;
        // Making the key also draws the first random bytes, which take 24 ms once.
        let key =
            Key::load(config.identity.dir.as_deref(), &config.identity.id).context("loading the identity's key")?;

        let control = ControlPlane::new(&config, &creds, &registry, runtime.handle());
        let certifier = Certifier::new(
            config.identity.clone(),
            key,
            creds.clone(),
            control.identity.clone(),
            &registry,
        );
        let http = http_metrics::Families::new(&registry);
        let tcp = counts::Families::new(&registry);
        let outbound = outbound(
            &config,
            &surroundings,
            workers,
            &creds,
            &control,
            &registry,
            &http,
            &tcp,
        );
        let inbound = inbound(
            &config,
            &surroundings,
            workers,
            &creds,
            &control,
            &registry,
            &http,
            &tcp,
        );

        let sockets = (0..workers)
            .map(|_| Sockets::bind(&config))
            .collect::<anyhow::Result<_>>()?;
        let admin_listener = listen::bind(config.admin.listen, None)
            .with_context(|| format!("listening on {} (admin)", config.admin.listen))?;
        let shutdown = Arc::new(Notify::new());
        let subjects = admin::Subjects {
            registry: registry.clone(),
            readiness: readiness.clone(),
            log: surroundings.log,
            env: surroundings.env,
            shutdown: shutdown.clone(),
        };
        let server = admin::server(&config.admin, subjects);
        let admin = Admin {
            runtime,
            server,
            listener: admin_listener,
            certifier,
        };
        Ok(Self {
            config,
            registry,
            readiness,
            creds,
            outbound,
            inbound,
            sockets,
            admin,
            shutdown,
        })
    }

    /// Serves until a signal or the admin server ends it, and every request in flight has.
    ///
    /// # Errors
    /// A runtime could not be started.
    pub fn run(self) -> anyhow::Result<()> {
        let (signal, drain) = drain::channel();
        let (ended, ends) = watch::channel(false);
        let uncertified = self.readiness.latch("waiting for a certificate of our own");
        let own_ports = self.own_ports();
        let Admin {
            runtime,
            server,
            listener,
            certifier,
        } = self.admin;
        let (registry, retain) = (self.registry.clone(), self.config.metrics_retain_idle);
        let (grace, shutdown) = (self.config.shutdown_grace_period, self.shutdown.clone());
        let (admin_drain, admin_ends) = drain::channel();
        thread::Builder::new().name("admin".into()).spawn(move || {
            runtime.block_on(async {
                tokio::spawn(certifier.run(uncertified));
                tokio::spawn(async move {
                    match tokio::net::TcpListener::from_std(listener) {
                        Ok(listener) => server.serve(listener, admin_ends).await,
                        Err(error) => tracing::error!(%error, "the admin server cannot run"),
                    }
                });
                tokio::spawn(async move {
                    loop {
                        tokio::time::sleep(METRICS_SWEEP).await;
                        registry.retire(retain);
                    }
                });
                lame_duck(&shutdown, &own_ports).await;
                if tokio::time::timeout(grace, signal.drain()).await.is_err() {
                    tracing::warn!(?grace, "requests were still in flight at the end of the grace period");
                }
                // Probes and scrapes are answered to the end.
                drop(admin_drain);
                ended.send_replace(true);
                std::future::pending::<()>().await;
            });
        })?;
        let mut threads = Vec::new();
        for (index, sockets) in self.sockets.into_iter().enumerate() {
            let worker = Worker {
                index,
                outbound: self.outbound.clone(),
                inbound: self.inbound.clone(),
                accept: [&self.config.outbound.direction, &self.config.inbound.direction].map(accept_options),
                creds: self.creds.clone(),
                drain: drain.clone(),
                ends: ends.clone(),
            };
            let runtime = Builder::new_current_thread()
                .enable_all()
                .build()
                .context("starting a worker")?;
            let run = move || runtime.block_on(worker.run(sockets));
            threads.push(thread::Builder::new().name(format!("proxy-{index}")).spawn(run)?);
        }
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
        Ok(())
    }

    fn own_ports(&self) -> Vec<u16> {
        let config = &self.config;
        let mut ports: Vec<_> = config.outbound.listen.iter().map(SocketAddr::port).collect();
        ports.extend([config.inbound.listen.port(), config.admin.listen.port()]);
        ports
    }
}

/// One worker: a thread with a runtime of its own, its own listeners and connections.
struct Worker {
    index: usize,
    outbound: Arc<Outbound>,
    inbound: Arc<Inbound>,
    /// Of outbound and inbound connections.
    accept: [SocketOptions; 2],
    creds: Credentials,
    drain: drain::Watch,
    ends: watch::Receiver<bool>,
}

impl Worker {
    async fn run(mut self, sockets: Sockets) {
        let certified = async {
            tokio::select! {
                () = self.creds.certified() => true,
                () = self.drain.signaled() => false,
            }
        };
        if certified.await
            && let Err(error) = self.accept(sockets).await
        {
            tracing::error!(%error, "a worker cannot accept connections");
        }
        // Connections go on until all have ended, or their time is up.
        let _ = self.ends.wait_for(|ended| *ended).await;
    }

    async fn accept(&self, sockets: Sockets) -> std::io::Result<()> {
        let mut loops = tokio::task::JoinSet::new();
        for listener in sockets.outbound {
            let (outbound, index, drain) = (self.outbound.clone(), self.index, self.drain.clone());
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let (options, stop) = (self.accept[0], self.drain.clone());
            loops.spawn(async move {
                let serve = |stream, client| {
                    let (guard, serving) = (
                        drain.guard(),
                        outbound.clone().serve(index, stream, client, drain.clone()),
                    );
                    tokio::spawn(async move {
                        let _guard = guard;
                        serving.await;
                    });
                };
                listen::accept_loop(listener, options, stop.signaled(), serve).await;
            });
        }
        let (inbound, index, drain) = (self.inbound.clone(), self.index, self.drain.clone());
        let listener = tokio::net::TcpListener::from_std(sockets.inbound)?;
        let (options, stop) = (self.accept[1], self.drain.clone());
        loops.spawn(async move {
            let serve = |stream, client| {
                let (guard, serving) = (
                    drain.guard(),
                    inbound.clone().serve(index, stream, client, drain.clone()),
                );
                tokio::spawn(async move {
                    let _guard = guard;
                    serving.await;
                });
            };
            listen::accept_loop(listener, options, stop.signaled(), serve).await;
        });
        while loops.join_next().await.is_some() {}
        Ok(())
    }
}

impl Sockets {
    fn bind(config: &Config) -> anyhow::Result<Self> {
        let bind = |addr: SocketAddr, backlog, what: &str| {
            listen::bind(addr, backlog).with_context(|| format!("listening on {addr} ({what})"))
        };
        let outbound = &config.outbound;
        Ok(Self {
            outbound: outbound
                .listen
                .iter()
                .map(|addr| bind(*addr, outbound.direction.accept.backlog, "outbound"))
                .collect::<anyhow::Result<_>>()?,
            inbound: bind(
                config.inbound.listen,
                config.inbound.direction.accept.backlog,
                "inbound",
            )?,
        })
    }
}

/// Waits to be asked to end, then for as long as the application may still be sent to.
///
/// A second signal, or a request to the admin server, means at once.
async fn lame_duck(shutdown: &Notify, own_ports: &[u16]) {
    let (Ok(mut term), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        tracing::error!("signals cannot be received; only the admin server ends this process");
        return shutdown.notified().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        () = shutdown.notified() => return,
    }
    tracing::info!("asked to end");
    let application_gone = async {
        while listeners::others_listen(own_ports) {
            tokio::time::sleep(LAME_DUCK_LOOK).await;
        }
    };
    tokio::select! {
        _ = tokio::time::timeout(LAME_DUCK, application_gone) => {}
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        () = shutdown.notified() => {}
    }
}

/// Clients of the control plane's services.
struct ControlPlane {
    identity: channel::Channel,
    destinations: Destinations,
    policies: Policies,
    runtime: Handle,
}

impl ControlPlane {
    fn new(config: &Config, creds: &Credentials, registry: &Registry, runtime: &Handle) -> Self {
        let control = &config.control;
        let metrics = api::metrics::Metrics::new(registry);
        let connector = channel::Connector {
            creds: creds.clone(),
            resolver: Resolver::new(control.dns.clone(), metrics.clone()),
            metrics,
            runtime: runtime.clone(),
        };
        let connect = |target: &channel::ControlAddr| {
            let direction = match channel::is_loopback(&target.addr) {
                true => &config.inbound.direction,
                false => &config.outbound.direction,
            };
            connector.channel(
                target.clone(),
                channel::Config {
                    connect_timeout: direction.connect.timeout,
                    backoff: direction.connect.backoff,
                    call_wait: channel::CALL_WAIT,
                },
            )
        };
        let destinations = Destinations::new(
            connect(&control.destination),
            runtime.clone(),
            api::destination::Config {
                context_token: control.context_token.clone(),
                profiles: control.profiles.clone(),
                limits: control.stream_limits,
                backoff: config.outbound.direction.connect.backoff,
            },
        );
        let policies = Policies::new(
            connect(&control.policy),
            runtime.clone(),
            api::policies::Config {
                workload: control.workload.clone(),
                limits: control.stream_limits,
                inbound_backoff: config.inbound.direction.connect.backoff,
                outbound_backoff: config.outbound.direction.connect.backoff,
            },
        );
        Self {
            identity: connect(&control.identity),
            destinations,
            policies,
            runtime: runtime.clone(),
        }
    }
}

fn outbound(
    config: &Config,
    surroundings: &Surroundings,
    workers: usize,
    creds: &Credentials,
    control: &ControlPlane,
    registry: &Registry,
    http: &http_metrics::Families,
    tcp: &counts::Families,
) -> Arc<Outbound> {
    let direction = &config.outbound.direction;
    let families = outbound_metrics::Families::new(registry, http.clone(), tcp.clone());
    let common = Common {
        creds: creds.clone(),
        connect: connect_config(direction, None),
        http2: http2_client(direction),
        pool: pool(direction),
        families: families.clone(),
        ips: config.inbound.ips.clone(),
        workers,
    };
    let factory = Factory {
        common: Arc::new(common),
        destinations: control.destinations.clone(),
        strategy: match config.outbound.balancing {
            Balancing::PeakEwma => Strategy::PeakEwma,
            Balancing::RoundRobin => Strategy::RoundRobin,
        },
        balanced: Mutex::default(),
    };
    let queue = Queue {
        capacity: direction.http_queue_capacity,
        failfast_timeout: direction.http_failfast_timeout,
    };
    let discover = Discover {
        destinations: control.destinations.clone(),
        policies: control.policies.clone(),
        factory,
        forward: ForwardParams {
            detect_timeout: direction.accept.detect_timeout,
            queue,
        },
        idle: direction.discovery_idle_timeout,
        runtime: control.runtime.clone(),
        known: Mutex::default(),
    };
    Arc::new(Outbound {
        orig_dst: surroundings.orig_dst,
        own: config.outbound.listen.clone(),
        discover: Arc::new(discover),
        detect_timeout: direction.accept.detect_timeout,
        server: server::Config {
            http2: http2_server(direction),
        },
        admission: Admission::new(direction.max_in_flight),
        observe: Observe::new(registry, "outbound"),
        errors: errors(registry, "outbound"),
        reasons: match config.outbound.informational_headers {
            Visibility::Shown => Reasons::Told,
            Visibility::Hidden => Reasons::Kept,
        },
        families,
    })
}

fn inbound(
    config: &Config,
    surroundings: &Surroundings,
    workers: usize,
    creds: &Credentials,
    control: &ControlPlane,
    registry: &Registry,
    http: &http_metrics::Families,
    tcp: &counts::Families,
) -> Arc<Inbound> {
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
    let defaults = Defaults {
        detect: Current::new(policy.detect(detect_timeout, networks)),
        opaque: Current::new(policy.opaque(networks)),
        opaque_ports: config.inbound.opaque_ports.clone(),
        detect_timeout,
    };
    let kept = config.inbound.ports.clone();
    Arc::new(Inbound {
        own_port: config.inbound.listen.port(),
        ips: config.inbound.ips.clone(),
        orig_dst: surroundings.orig_dst,
        creds: creds.clone(),
        ports: Ports::new(
            control.policies.clone(),
            defaults,
            kept,
            direction.discovery_idle_timeout,
        ),
        detect_timeout,
        connect: connect_config(direction, Some(config.inbound.listen.port())),
        http2_client: http2_client(direction),
        pool: pool(direction),
        server: server::Config {
            http2: http2_server(direction),
        },
        admission: Admission::new(direction.max_in_flight),
        observe: Observe::new(registry, "inbound"),
        errors: errors(registry, "inbound"),
        families: inbound_metrics::Families::new(registry, http.clone(), tcp.clone()),
        apps: (0..workers).map(|_| Mutex::new(HashMap::new())).collect(),
    })
}

fn errors(registry: &Registry, direction: &str) -> Errors {
    let name = format!("{direction}_http_errors_total");
    Errors::new(
        registry.counter(&name, "HTTP requests that the proxy answered itself, by kind of error"),
        registry.counter(
            "tulle_http_failures_total",
            "HTTP requests that the proxy answered itself, by cause",
        ),
        Labels::new().with("direction", direction),
    )
}

fn accept_options(direction: &Direction) -> SocketOptions {
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
        max_concurrent_streams: server.max_concurrent_streams,
        max_send_buffer: server.max_send_buf_size,
        max_header_list: server
            .max_header_list_size
            .unwrap_or(h2::Params::default().max_header_list),
    }
}
