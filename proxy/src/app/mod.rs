//! Builds the proxy and runs it: sockets first, then identity, then traffic, then the drain.

mod admin;
mod build;
mod context;
mod info;
mod worker;
mod worker_balancer;

use std::{net::SocketAddr, sync::Arc, thread};

use anyhow::Context;
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::{Notify, watch},
};
use tulle_core::{
    descriptors, drain,
    metrics::{self, Registry},
    readiness::Readiness,
};

pub use context::{OrigDstLookup, ProcessContext};

use self::{
    admin::{AdminThread, IdentityTask, Shutdown, bind_exclusive, debug_pages},
    build::{ControlPlaneClients, ProxyBuilder},
    context::Tracers,
    worker::{Worker, WorkerBalancers, WorkerListeners, bind_workers},
    worker_balancer::WorkerBalancer,
};
use crate::{
    admin::AdminParams,
    config::Config,
    http::stack::{access_log::AccessLog, head_memory::HeadMemory},
    inbound::{self, Inbound},
    metrics::http as http_metrics,
    net::{
        memory::{MemoryMonitor, MemoryPressure},
        tcp_metrics,
    },
    outbound::Outbound,
    tap::{TapRegistry, server::TapServer},
    tls::credentials::Credentials,
    trace::export::Exporter,
};

/// A proxy whose sockets are bound, ready to run.
pub struct App {
    config: Config,
    registry: Registry,
    readiness: Readiness,
    creds: Credentials,
    outbound: Arc<Outbound>,
    inbound: Arc<Inbound>,
    sockets: Vec<WorkerListeners>,
    admin_runtime: Runtime,
    admin: AdminThread,
    shutdown: Arc<Notify>,
    access_log: Option<AccessLog>,
    /// Held so that the info metrics stay registered.
    _info: Vec<Arc<metrics::Gauge>>,
}

impl App {
    /// Binds all sockets and builds both directions. Nothing is accepted yet: connections wait in the kernel.
    ///
    /// # Errors
    /// An address cannot be bound, or credentials cannot be read.
    pub fn build(mut config: Config, context: ProcessContext) -> anyhow::Result<Self> {
        let workers = config
            .workers
            .count(thread::available_parallelism().map_or(1, usize::from));
        let sockets = bind_workers(&mut config, workers)?;
        let admin_listener = bind_exclusive(&mut config.admin.listen, "admin")?;
        let tap_listener = config.tap.as_mut().map(|tap| bind_exclusive(&mut tap.listen, "tap"));
        let tap_listener = tap_listener.transpose()?;
        let taps = Arc::new(TapRegistry::default());
        let registry = Registry::new();
        metrics::register_process_metrics(&registry);
        let info = info::register(&registry, &config.unsupported_variables);
        let readiness = Readiness::new();
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .context("starting the admin runtime")?;

        let creds = credentials(&config)?;
        let control = ControlPlaneClients::new(&config, &creds, &registry, runtime.handle());
        let identity = IdentityTask::build(&config, &control, &creds, &registry)?;
        let http = http_metrics::Families::new(&registry);
        let tcp = tcp_metrics::Families::new(&registry);
        let access_log = start_access_log(&config, &registry)?;
        let memory_pressure = MemoryPressure::default();
        let memory = MemoryMonitor::new(config.memory_limit_bytes, memory_pressure.clone(), &registry);
        let head_memory = HeadMemory::new(memory.as_ref().map(MemoryMonitor::limit), memory_pressure.clone());
        let (tracers, exporter) = start_tracing(&config, &control, &registry);
        let builder = ProxyBuilder {
            config: &config,
            context: &context,
            workers,
            creds: &creds,
            control: &control,
            registry: &registry,
            http: &http,
            tcp: &tcp,
            access_log: access_log.as_ref(),
            taps: &taps,
            memory_pressure: &memory_pressure,
            head_memory: &head_memory,
            max_connections: max_connections(memory.as_ref()),
            tracers: &tracers,
        };
        let outbound = builder.outbound();
        let inbound = builder.inbound(&outbound);
        let shutdown = Arc::new(Notify::new());
        let params = AdminParams {
            registry: registry.clone(),
            readiness: readiness.clone(),
            log: context.log,
            env: context.env,
            shutdown: shutdown.clone(),
            creds: creds.clone(),
            authorize: inbound::admin::authorize_fn(&inbound),
            pages: debug_pages(&outbound, &inbound, &tcp, &creds),
        };
        let server = crate::admin::server(&config.admin, params);
        let tap_clients = config.tap.as_ref().map(|tap| tap.clients.clone()).unwrap_or_default();
        let tap_server = TapServer::new(tap_clients, taps, creds.clone());
        let admin = AdminThread {
            server,
            listener: admin_listener,
            identity,
            tap: tap_listener.map(|listener| (listener, tap_server)),
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
            admin_runtime: runtime,
            admin,
            shutdown,
            access_log,
            _info: info,
        })
    }

    pub fn metrics(&self) -> &Registry {
        &self.registry
    }

    /// The listening addresses: outbound, inbound, admin.
    pub fn addrs(&self) -> (Vec<SocketAddr>, SocketAddr, SocketAddr) {
        (
            self.config.outbound.listen.clone(),
            self.config.inbound.listen,
            self.config.admin.listen,
        )
    }

    /// The handle that shuts the proxy down gracefully when it is notified, as `/shutdown` of the admin server does.
    pub fn shutdown_handle(&self) -> Arc<Notify> {
        self.shutdown.clone()
    }

    /// Serves until a signal or the admin server shuts it down, and then until all requests in flight have ended or the grace
    /// period is over.
    ///
    /// # Errors
    /// A runtime could not be started.
    pub fn run(self) -> anyhow::Result<()> {
        let (drain_signal, drain_watch) = drain::channel();
        let (shutdown_done_tx, shutdown_done_rx) = watch::channel(false);
        let certificate_latch = self.readiness.latch("waiting for the first certificate");
        let shutdown = Shutdown {
            drain: drain_signal,
            done_tx: shutdown_done_tx,
            requested: self.shutdown.clone(),
            grace_period: self.config.shutdown_grace_period,
            own_ports: self.own_ports(),
        };
        let (registry, metrics_retain_idle) = (self.registry.clone(), self.config.metrics_retain_idle);
        let (runtime, admin) = (self.admin_runtime, self.admin);
        let run_admin = move || runtime.block_on(admin.run(certificate_latch, registry, metrics_retain_idle, shutdown));
        thread::Builder::new().name("admin".into()).spawn(run_admin)?;
        let new_runtime = |_: &WorkerListeners| Builder::new_current_thread().enable_all().build();
        let runtimes: Vec<Runtime> = self
            .sockets
            .iter()
            .map(new_runtime)
            .collect::<Result<_, _>>()
            .context("starting a worker")?;
        metrics::register_runtime_metrics(&self.registry, runtimes.iter().map(Runtime::metrics).collect());
        let handles: Vec<Handle> = runtimes.iter().map(|runtime| runtime.handle().clone()).collect();
        let worker_balancers = WorkerBalancers {
            outbound: WorkerBalancer::new(&handles),
            inbound: WorkerBalancer::new(&handles),
        };
        let mut threads = Vec::new();
        for (index, (sockets, runtime)) in self.sockets.into_iter().zip(runtimes).enumerate() {
            let worker = Worker {
                index,
                outbound: self.outbound.clone(),
                inbound: self.inbound.clone(),
                creds: self.creds.clone(),
                balancers: worker_balancers.clone(),
                drain: drain_watch.clone(),
                shutdown_done: shutdown_done_rx.clone(),
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
        ports.extend(config.outbound.explicit_listen.map(|addr| addr.port()));
        ports.extend(config.tap.as_ref().map(|tap| tap.listen.port()));
        ports
    }
}

/// Maximum number of accepted connections of one direction in this process.
fn max_connections(memory: Option<&MemoryMonitor>) -> usize {
    connection_limit(descriptors::raise_limit(), memory.map(MemoryMonitor::limit))
}

/// Maximum number of accepted connections of one direction in a process that can open `files` files and use `memory` bytes.
fn connection_limit(files: usize, memory: Option<u64>) -> usize {
    // Half of the memory is for the connections of both directions, the other half for the requests on them. `HeadMemory` limits
    // the part that incomplete request heads use.
    let max_by_memory = memory.map_or(u64::MAX, |memory| memory / 4 / BYTES_PER_CONNECTION);
    let max_by_memory = usize::try_from(max_by_memory).unwrap_or(usize::MAX);
    // An accepted connection needs two descriptors: its own, and that of the connection to the application or peer. There are two
    // directions.
    (files / 4).min(max_by_memory).max(1)
}

/// Memory that the connection limit reserves for each connection. An idle connection with both sides takes from 6 KiB (HTTP/1) to
/// 13 KiB (opaque traffic), see `docs/reference/benchmarks.md`; this value is between the two. At the limit, idle opaque
/// connections take about 81 % of the memory, in addition to the memory of the process itself. [`MemoryPressure`] begins at 90 %.
const BYTES_PER_CONNECTION: u64 = 8 << 10;

fn credentials(config: &Config) -> anyhow::Result<Credentials> {
    let identity = &config.identity;
    let anchors = identity.source.anchors().context("reading trust anchors")?;
    Credentials::new(identity.id.clone(), &identity.server_name, anchors).context("using trust anchors")
}

fn start_access_log(config: &Config, registry: &Registry) -> anyhow::Result<Option<AccessLog>> {
    let Some(format) = config.log.access_log_format else {
        return Ok(None);
    };
    let dropped = registry.counter(
        "tulle_access_log_dropped_total",
        "Lines of the access log dropped because the log was not read in time",
    );
    let dropped = dropped.get(&metrics::Labels::new());
    let log = AccessLog::start(format, std::io::stderr(), dropped).context("starting the access log")?;
    Ok(Some(log))
}

/// Starts tracing for inbound and outbound requests, if a collector is configured.
fn start_tracing(config: &Config, control: &ControlPlaneClients, registry: &Registry) -> (Tracers, Option<Exporter>) {
    match (&config.trace, &control.collector) {
        (Some(trace), Some(channel)) => {
            let ([inbound, outbound], exporter) = trace.create_tracers(channel.clone(), registry);
            let tracers = Tracers {
                inbound: Some(inbound),
                outbound: Some(outbound),
            };
            (tracers, Some(exporter))
        }
        _ => (Tracers::default(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_bounded_by_files_and_by_memory() {
        assert_eq!(connection_limit(1000, None), 250);
        assert_eq!(connection_limit(1 << 20, Some(250 << 20)), 8000);
        assert_eq!(connection_limit(1000, Some(u64::MAX)), 250);
        assert_eq!(connection_limit(1000, Some(0)), 1);
    }
}
