//! Builds all of the proxy once and runs it: sockets first, then identity, then traffic, then the drain.

mod build;
mod crew;
mod info;

use std::{
    collections::BTreeMap,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread,
    time::{Duration, SystemTime},
};

use anyhow::Context;
use futures_util::FutureExt as _;
use tokio::{
    net::TcpStream,
    runtime::{Builder, Handle, Runtime},
    signal::unix::{SignalKind, signal},
    sync::{Notify, watch},
    task::JoinSet,
};
use tulle_core::{
    addr::{ClientAddr, OrigDst},
    caps,
    connections::Place,
    descriptors, drain,
    metrics::{self, Registry},
    ready::{Latch, Readiness},
    telemetry::LogHandle,
};

use crate::{
    admin,
    app::{
        build::{ControlPlane, Parts, accept_options},
        crew::Crew,
    },
    config::{Config, Direction, InboundMode},
    http::{access_log::AccessLog, layers::Admission},
    identity::{Source, certify::Certifier, key::Key, workload_api::Workload},
    inbound::{self, Inbound},
    metrics::http as http_metrics,
    net::{
        connect::SocketOptions,
        copy::Carrying,
        counts,
        io::Tcp,
        listen::{self, Sharing},
        listeners,
        memory::{self, Shortage},
        orig_dst,
        pause::Pause,
        transparent,
    },
    outbound::Outbound,
    tap::{self, Taps},
    tls::creds::Credentials,
    trace::export::Exporter,
};

/// How long a proxy that was asked to end goes on accepting for an application that still listens.
const LAME_DUCK: Duration = Duration::from_secs(10);
/// How often it looks whether the application still does.
const LAME_DUCK_LOOK: Duration = Duration::from_millis(100);
/// How long the last spans of traces may take to be sent.
const LAST_SPANS: Duration = Duration::from_secs(2);
/// What a proxy that keeps its clients' addresses does not start without.
const NO_NET_RAW: &str = "TULLE_PROXY_INBOUND_MODE=tproxy needs the capability NET_RAW: add it to the proxy's container \
     (securityContext.capabilities.add), or to its service (AmbientCapabilities=CAP_NET_RAW), or unset the variable";
/// How often series without an owner are looked for.
const METRICS_SWEEP: Duration = Duration::from_secs(60);
/// Sockets that a worker serves before it looks for others. What they have for the same peer leaves together, and the peer idles
/// until then: more of them save system calls, and fewer keep every processor busy. Requests a second at 64 connections, as
/// multiples of HAProxy's in the same runs: 0.81 to 0.87 without a limit, 0.91 to 0.98 with 16, 0.89 to 0.94 with 8, 12, 20, 24 and 32.
const EVENTS_AT_ONCE: usize = 16;

/// Learns what an accepted connection dialled, from its socket and its peer's address.
pub type OrigDstOf = Arc<dyn Fn(&TcpStream, SocketAddr) -> std::io::Result<OrigDst> + Send + Sync>;

/// What surrounds the process besides its configuration.
pub struct Surroundings {
    pub log: Option<LogHandle>,
    /// Variables that the admin server may show.
    pub env: BTreeMap<String, String>,
    /// Learns what accepted connections dialled; the kernel knows where redirect rules are in force.
    pub orig_dst: OrigDstOf,
}

impl Surroundings {
    /// Those of a sidecar behind redirect rules.
    pub fn redirected(log: Option<LogHandle>, env: BTreeMap<String, String>) -> Self {
        Self {
            log,
            env,
            orig_dst: Arc::new(orig_dst::of),
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
    access_log: Option<AccessLog>,
    /// Held so that it is always told.
    _info: Vec<Arc<metrics::Gauge>>,
}

/// What runs beside the traffic, on a thread of its own.
struct Admin {
    runtime: Runtime,
    server: tulle_core::admin::Admin,
    listener: TcpListener,
    identity: Identity,
    tap: Option<(TcpListener, Arc<Taps>)>,
    memory: Option<memory::Watch>,
    exporter: Option<Exporter>,
}

/// What keeps our credentials current.
enum Identity {
    Certifier(Box<Certifier>),
    Workload(Workload),
}

/// The listeners of one worker.
struct Sockets {
    outbound: Vec<TcpListener>,
    explicit: Option<TcpListener>,
    inbound: TcpListener,
}

impl App {
    /// Binds all sockets and builds both directions. Nothing is accepted yet: what arrives waits in the kernel.
    ///
    /// # Errors
    /// An address cannot be bound, or credentials cannot be read.
    pub fn build(mut config: Config, surroundings: Surroundings) -> anyhow::Result<Self> {
        let workers = config
            .workers
            .count(thread::available_parallelism().map_or(1, usize::from));
        let sockets = bind_all(&mut config, workers)?;
        let admin_listener = bind_alone(&mut config.admin.listen, "admin")?;
        let tap_listener = config.tap.as_mut().map(|tap| bind_alone(&mut tap.listen, "tap"));
        let tap_listener = tap_listener.transpose()?;
        let taps = Arc::new(Taps::default());
        let registry = Registry::new();
        metrics::process_metrics(&registry);
        let info = info::register(&registry, &config.ignored);
        let readiness = Readiness::new();
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .context("starting the admin runtime")?;

        let anchors = config.identity.source.anchors().context("reading trust anchors")?;
        let creds = Credentials::new(config.identity.id.clone(), &config.identity.server_name, anchors)
            .context("using trust anchors")?;
        let control = ControlPlane::new(&config, &creds, &registry, runtime.handle());
        let identity = Identity::build(&config, &control, &creds, &registry)?;
        let (http, tcp) = (
            http_metrics::Families::with_prefix(&registry, ""),
            counts::Families::new(&registry),
        );
        let dropped = registry.counter(
            "tulle_access_log_dropped_total",
            "Lines of the access log that nobody read in time",
        );
        let access_log = config.log.access.map(|format| {
            let dropped = dropped.get(&metrics::Labels::new());
            AccessLog::start(format, std::io::stderr(), dropped).context("starting the access log")
        });
        let access_log = access_log.transpose()?;
        let shortage = Shortage::default();
        let memory = memory::Watch::new(config.memory_limit, shortage.clone(), &registry);
        let (tracers, exporter) = match (&config.trace, &control.collector) {
            (Some(trace), Some(channel)) => {
                let (tracers, exporter) = trace.start(channel.clone(), &registry);
                (tracers.map(Some), Some(exporter))
            }
            _ => ([None, None], None),
        };
        let parts = Parts {
            config: &config,
            surroundings: &surroundings,
            workers,
            creds: &creds,
            control: &control,
            registry: &registry,
            http: &http,
            tcp: &tcp,
            access_log: access_log.as_ref(),
            taps: &taps,
            shortage: &shortage,
            descriptors: descriptors::limit(),
            tracers: &tracers,
        };
        let outbound = parts.outbound();
        let inbound = parts.inbound(&outbound);
        let shutdown = Arc::new(Notify::new());
        let subjects = admin::Subjects {
            registry: registry.clone(),
            readiness: readiness.clone(),
            log: surroundings.log,
            env: surroundings.env,
            shutdown: shutdown.clone(),
            creds: creds.clone(),
            guard: inbound::admin::guard(&inbound),
            pages: pages(&outbound, &inbound, &tcp, &creds),
        };
        let server = admin::server(&config.admin, subjects);
        let admin = Admin {
            runtime,
            server,
            listener: admin_listener,
            identity,
            tap: tap_listener.map(|listener| (listener, taps)),
            memory,
            exporter,
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
            access_log,
            _info: info,
        })
    }

    /// Where the proxy listens: outbound, inbound, admin.
    pub fn addrs(&self) -> (Vec<SocketAddr>, SocketAddr, SocketAddr) {
        (
            self.config.outbound.listen.clone(),
            self.config.inbound.listen,
            self.config.admin.listen,
        )
    }

    /// Ends the proxy gracefully once notified, as `/shutdown` of the admin server does.
    pub fn shutdown(&self) -> Arc<Notify> {
        self.shutdown.clone()
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
            identity,
            tap,
            memory,
            exporter,
        } = self.admin;
        let tap_clients = self.config.tap.map(|tap| tap.clients).unwrap_or_default();
        let tap_creds = self.creds.clone();
        let (registry, retain) = (self.registry.clone(), self.config.metrics_retain_idle);
        let (grace, shutdown) = (self.config.shutdown_grace_period, self.shutdown.clone());
        let (admin_drain, admin_ends) = drain::channel();
        let (last_spans, spans_end) = drain::channel();
        thread::Builder::new().name("admin".into()).spawn(move || {
            runtime.block_on(async {
                tokio::spawn(identity.run(uncertified));
                if let Some(memory) = memory {
                    tokio::spawn(memory.run());
                }
                if let Some(exporter) = exporter {
                    tokio::spawn(exporter.run(spans_end));
                }
                if let Some((listener, taps)) = tap {
                    let (ends, registry) = (admin_ends.clone(), registry.clone());
                    tokio::spawn(async move {
                        let serving = tap::server::serve(listener, tap_clients, taps, tap_creds, &registry, ends);
                        if let Err(error) = serving.await {
                            tracing::error!(%error, "the tap server cannot run");
                        }
                    });
                }
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
                if tokio::time::timeout(LAST_SPANS, last_spans.drain()).await.is_err() {
                    tracing::warn!("the last spans of traces could not be sent");
                }
                // Probes and scrapes are answered to the end.
                drop(admin_drain);
                ended.send_replace(true);
                std::future::pending::<()>().await;
            });
        })?;
        let build = |_: &Sockets| {
            let mut builder = Builder::new_current_thread();
            builder.enable_all().max_io_events_per_tick(EVENTS_AT_ONCE).build()
        };
        let runtimes: Vec<Runtime> = self
            .sockets
            .iter()
            .map(build)
            .collect::<Result<_, _>>()
            .context("starting a worker")?;
        metrics::runtime_metrics(&self.registry, runtimes.iter().map(Runtime::metrics).collect());
        let handles: Vec<Handle> = runtimes.iter().map(|runtime| runtime.handle().clone()).collect();
        let crews = Crews {
            outbound: Crew::new(&handles),
            inbound: Crew::new(&handles),
        };
        let mut threads = Vec::new();
        for (index, (sockets, runtime)) in self.sockets.into_iter().zip(runtimes).enumerate() {
            let worker = Worker {
                index,
                outbound: self.outbound.clone(),
                inbound: self.inbound.clone(),
                creds: self.creds.clone(),
                crews: crews.clone(),
                drain: drain.clone(),
                ends: ends.clone(),
            };
            let run = move || runtime.block_on(worker.run(sockets));
            threads.push(thread::Builder::new().name(format!("proxy-{index}")).spawn(run)?);
        }
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
        if let Some(log) = self.access_log {
            log.flush();
        }
        Ok(())
    }

    fn own_ports(&self) -> Vec<u16> {
        let config = &self.config;
        let mut ports: Vec<_> = config.outbound.listen.iter().map(SocketAddr::port).collect();
        ports.extend([config.inbound.listen.port(), config.admin.listen.port()]);
        ports.extend(config.outbound.explicit.map(|addr| addr.port()));
        ports.extend(config.tap.as_ref().map(|tap| tap.listen.port()));
        ports
    }
}

impl Identity {
    fn build(
        config: &Config,
        control: &ControlPlane,
        creds: &Credentials,
        registry: &Registry,
    ) -> anyhow::Result<Self> {
        match (&config.identity.source, &control.identity) {
            (Source::ControlPlane { anchors, certify }, Some(channel)) => {
                // Making the key also draws the first random bytes, which take 24 ms once.
                let key =
                    Key::load(certify.dir.as_deref(), &config.identity.id).context("loading the identity's key")?;
                let (certify, anchors) = (certify.clone(), anchors.clone());
                let certifier = Certifier::new(
                    certify,
                    anchors,
                    key,
                    creds.clone(),
                    channel.clone(),
                    registry,
                    SystemTime::now,
                );
                Ok(Self::Certifier(Box::new(certifier)))
            }
            (Source::ControlPlane { .. }, None) => anyhow::bail!("there is no channel to the identity service"),
            (Source::WorkloadApi { socket, anchors }, _) => {
                let workload = Workload::new(socket.clone(), anchors.clone(), creds.clone(), registry);
                Ok(Self::Workload(workload))
            }
        }
    }

    async fn run(self, uncertified: Latch) {
        match self {
            Self::Certifier(certifier) => certifier.run(uncertified).await,
            Self::Workload(workload) => workload.run(uncertified).await,
        }
    }
}

/// One worker: a thread with a runtime of its own, its own listeners and connections.
struct Worker {
    index: usize,
    outbound: Arc<Outbound>,
    inbound: Arc<Inbound>,
    creds: Credentials,
    crews: Crews,
    drain: drain::Watch,
    ends: watch::Receiver<bool>,
}

/// Between whom connections are shared, by direction.
#[derive(Clone)]
struct Crews {
    outbound: Arc<Crew>,
    inbound: Arc<Crew>,
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
        let mut loops = JoinSet::new();
        for listener in sockets.outbound {
            let outbound = self.outbound.clone();
            let serve = move |worker, stream, client, drain| outbound.clone().serve(worker, stream, client, drain);
            self.accept_on(
                &mut loops,
                listener,
                &self.crews.outbound,
                &self.outbound.wrappers.admission,
                serve,
            )?;
        }
        if let Some(listener) = sockets.explicit {
            let outbound = self.outbound.clone();
            let serve =
                move |worker, stream, client, drain| outbound.clone().serve_explicit(worker, stream, client, drain);
            self.accept_on(
                &mut loops,
                listener,
                &self.crews.outbound,
                &self.outbound.wrappers.admission,
                serve,
            )?;
        }
        let inbound = self.inbound.clone();
        let serve = move |worker, stream, client, drain| inbound.clone().serve(worker, stream, client, drain);
        self.accept_on(
            &mut loops,
            sockets.inbound,
            &self.crews.inbound,
            &self.inbound.wrappers.admission,
            serve,
        )?;
        while loops.join_next().await.is_some() {}
        Ok(())
    }

    /// Accepts on one listener; each connection holds the drain open to its end, and counts in `admission` until then.
    fn accept_on<F>(
        &self,
        loops: &mut JoinSet<()>,
        listener: TcpListener,
        crew: &Arc<Crew>,
        admission: &Arc<Admission>,
        serve: impl Fn(usize, Tcp, ClientAddr, drain::Watch) -> F + Send + Sync + 'static,
    ) -> std::io::Result<()>
    where
        F: Future<Output = Option<Carrying>> + Send + 'static,
    {
        let pause = Pause::new(listen::TOGETHER)?;
        let (index, crew, drain, admission) = (self.index, crew.clone(), self.drain.clone(), admission.clone());
        let (stop, until_all_are_served) = (drain.clone(), drain.guard());
        loops.spawn(async move {
            let spawn = |client, addr| {
                let place = admission.accept(addr);
                let (seat, stream) = match crew.seat(index, client) {
                    Ok(seated) => seated,
                    Err(error) => return tracing::warn!(%error, "a connection cannot be served"),
                };
                let runtime = seat.runtime().clone();
                let activity = place.as_ref().map(Place::activity);
                let serving = serve(seat.worker, stream.placed(place), addr, drain.clone());
                let held = (drain.guard(), seat);
                let going_on = activity.clone();
                // An async block would hold the future twice. What only carries bytes goes on by itself, in less memory.
                let served = runtime.spawn(serving.map(move |carrying| {
                    let Some(carrying) = carrying else { return drop(held) };
                    let carried = tokio::spawn(carrying.map(move |()| drop(held)));
                    if let Some(activity) = going_on {
                        activity.handed_to(carried.abort_handle());
                    }
                }));
                if let Some(activity) = activity {
                    activity.served_by(served.abort_handle());
                }
            };
            listen::accept_loop(listener, pause, stop.signaled(), spawn).await;
            drop(until_all_are_served);
        });
        Ok(())
    }
}

/// What `/debug` shows.
fn pages(
    outbound: &Arc<Outbound>,
    inbound: &Arc<Inbound>,
    tcp: &counts::Families,
    creds: &Credentials,
) -> Vec<admin::Page> {
    let (discover, ports) = (outbound.discover.clone(), inbound.ports.clone());
    let (tcp, creds) = (tcp.clone(), creds.clone());
    vec![
        admin::Page::new(
            "/debug/destinations",
            "what was dialled: policies, profiles, services, and the endpoints behind them",
            move || discover.shown(),
        ),
        admin::Page::new(
            "/debug/policies",
            "who may use which port of this workload",
            move || ports.shown(),
        ),
        admin::Page::new(
            "/debug/connections",
            "open connections, by who talks to whom",
            move || tcp.shown(),
        ),
        admin::Page::new(
            "/debug/certificates",
            "who this proxy is, until when, and whom it believes",
            move || creds.shown(),
        ),
    ]
}

/// Binds a listener that no worker shares; `addr` becomes the address that it has.
fn bind_alone(addr: &mut SocketAddr, what: &str) -> anyhow::Result<TcpListener> {
    let listener = listen::bind(*addr, None, Sharing::Alone, SocketOptions::default())
        .with_context(|| format!("listening on {addr} ({what})"))?;
    *addr = listener.local_addr()?;
    Ok(listener)
}

/// Binds the listeners of all workers; where any port will do, the configuration learns which it is.
fn bind_all(config: &mut Config, workers: usize) -> anyhow::Result<Vec<Sockets>> {
    let sharing = if workers > 1 { Sharing::Workers } else { Sharing::Alone };
    if config.inbound.mode == InboundMode::Tproxy {
        caps::use_net_raw(); // workers are started by this thread, and have it too
    }
    let bind = |addr: SocketAddr, direction: &Direction, what: &str| {
        listen::bind(addr, direction.accept.backlog, sharing, accept_options(direction))
            .with_context(|| format!("listening on {addr} ({what})"))
    };
    // Charts name the loopback addresses of both families, also to machines that have one.
    if config.outbound.listen.len() > 1 {
        let is_here = |addr: &&SocketAddr| addr.is_ipv4() || listen::is_here(addr.ip());
        let (here, others): (Vec<_>, Vec<SocketAddr>) = config.outbound.listen.iter().partition(is_here);
        if !here.is_empty() {
            for addr in others {
                tracing::warn!(%addr, "not listening: this machine has no IPv6");
            }
            config.outbound.listen = here;
        }
    }
    let mut all = Vec::new();
    for _ in 0..workers {
        let mut outbound = Vec::new();
        for addr in &mut config.outbound.listen {
            let listener = bind(*addr, &config.outbound.direction, "outbound")?;
            *addr = listener.local_addr()?;
            listen::acknowledge_with_answer(&listener);
            outbound.push(listener);
        }
        let mut explicit = None;
        if let Some(addr) = &mut config.outbound.explicit {
            let listener = bind(*addr, &config.outbound.direction, "TULLE_PROXY_EXPLICIT_LISTEN_ADDR")?;
            *addr = listener.local_addr()?;
            explicit = Some(listener);
        }
        let inbound = bind(config.inbound.listen, &config.inbound.direction, "inbound")?;
        if config.inbound.mode == InboundMode::Tproxy {
            transparent::allow(&inbound).context(NO_NET_RAW)?;
        }
        config.inbound.listen = inbound.local_addr()?;
        all.push(Sockets {
            outbound,
            explicit,
            inbound,
        });
    }
    Ok(all)
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
