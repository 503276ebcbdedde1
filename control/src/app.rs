//! Builds source, cluster and services once, runs them, and ends them together.

use std::future::Future;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use http::StatusCode;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;
use tonic::service::Routes;
use tracing::{info, warn};
use tulle_core::admin::{Admin, text};
use tulle_core::drain::{self, Signal, Watch};
use tulle_core::metrics::{Registry, process_metrics};
use tulle_core::ready::Readiness;
use tulle_core::telemetry;

use crate::cluster::Cluster;
use crate::config::{Certificates, Config, ListenAddr, Logs};
use crate::identity::leaf::LeafKeeper;
use crate::identity::server::IdentityService;
use crate::identity::tokens::{Reviewer, StaticKeys};
use crate::serving::Server;
use crate::serving::metrics::GrpcMetrics;
use crate::source::dir;
use crate::tls::creds::ServerCreds;
use crate::{destination, logs, policy};

/// A running control plane.
pub struct App {
    addrs: Addrs,
    signal: Signal,
    tasks: JoinSet<(&'static str, Result<()>)>,
}

/// Where the services listen, as far as they run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Addrs {
    pub destination: Option<SocketAddr>,
    pub identity: Option<SocketAddr>,
    pub policy: Option<SocketAddr>,
    pub metrics: Option<SocketAddr>,
    pub admin: Option<SocketAddr>,
}

/// What is on its way to become an [`App`].
struct Builder {
    config: Config,
    registry: Registry,
    readiness: Readiness,
    grpc: GrpcMetrics,
    addrs: Addrs,
    drain: Watch,
    tasks: JoinSet<(&'static str, Result<()>)>,
}

/// Sends the logs of this process to standard error.
///
/// # Errors
/// A level that is none.
pub fn start_logs(config: &Logs) -> Result<()> {
    let filter = logs::filter(&config.level);
    match config.format {
        telemetry::Format::Plain => logs::init(&filter),
        telemetry::Format::Json => telemetry::init(&filter, telemetry::Format::Json)
            .map(drop)
            .context("starting logs"),
    }
}

/// Waits until somebody asks this process to end.
///
/// # Errors
/// A process that cannot receive signals.
pub async fn asked_to_end() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("receiving SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("receiving SIGINT")?;
    let name = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    };
    info!(signal = name, "shutting down");
    Ok(())
}

impl App {
    /// Opens all ports and starts everything behind them.
    ///
    /// # Errors
    /// Whatever cannot be opened or read, with its name.
    pub async fn build(config: Config) -> Result<Self> {
        let registry = Registry::new();
        process_metrics(&registry);
        let (signal, drain) = drain::channel();
        let mut builder = Builder {
            grpc: GrpcMetrics::new(&registry),
            readiness: Readiness::new(),
            addrs: Addrs::default(),
            tasks: JoinSet::new(),
            config,
            registry,
            drain,
        };
        let identity = builder.identity().await?;
        let report = builder.answers(identity.as_ref()).await?;
        builder.admins(report.as_ref()).await?;
        Ok(Self {
            addrs: builder.addrs,
            signal,
            tasks: builder.tasks,
        })
    }

    pub fn addrs(&self) -> Addrs {
        self.addrs
    }

    /// Runs until this future ends, which is the normal end.
    ///
    /// # Errors
    /// A part that ended by itself; the process is of no use without it.
    pub async fn run_until(&mut self, end: impl Future<Output = Result<()>>) -> Result<()> {
        tokio::select! {
            ended = end => ended,
            Some(task) = self.tasks.join_next() => Err(early_end(task)),
        }
    }

    /// Ends streams and connections, within 5 seconds.
    pub async fn drain(mut self) {
        let ended = timeout(DRAIN_LIMIT, async {
            self.signal.drain().await;
            while self.tasks.join_next().await.is_some() {}
        });
        if ended.await.is_err() {
            warn!(
                n_tasks = self.tasks.len(),
                "ending what did not end within {DRAIN_LIMIT:?}"
            );
        }
    }
}

impl Builder {
    /// The identity service, if it runs here.
    async fn identity(&mut self) -> Result<Option<IdentityService>> {
        let Certificates::Here { identity, token_keys } = &self.config.certificates else {
            return Ok(None);
        };
        let keys = StaticKeys::open(token_keys.clone()).context("--token-keys")?;
        let (service, reload) = IdentityService::new(identity, Reviewer::StaticKeys(keys), &self.registry)
            .context("opening --issuer, --trust-anchors and --token-keys")?;
        let drain = self.drain.clone();
        self.start("reloading credentials", async move {
            reload.run(drain).await;
            Ok(())
        });
        let creds = Arc::new(ServerCreds::new(service.name().to_owned()));
        self.keep(LeafKeeper::here(creds.clone(), service.clone()));
        let routes = Routes::new(service.server());
        self.addrs.identity = Some(
            self.serve("identity", self.config.listen.identity, creds, routes)
                .await?,
        );
        Ok(Some(service))
    }

    /// Destination and policy over the cluster that the manifests describe.
    async fn answers(&mut self, identity: Option<&IdentityService>) -> Result<Option<dir::Report>> {
        let Some(manifests) = self.config.manifests.clone() else {
            return Ok(None);
        };
        let creds = Arc::new(ServerCreds::new(self.config.server_name("linkerd-destination")));
        let keeper = match (identity, &self.config.certificates) {
            (Some(service), _) => LeafKeeper::here(creds.clone(), service.clone()),
            (None, Certificates::Remote(remote)) => {
                LeafKeeper::remote(creds.clone(), remote.clone()).context("--trust-anchors")?
            }
            (None, Certificates::Here { .. }) => return Err(anyhow!("the identity service is missing")),
        };
        self.keep(keeper);
        let cluster = Cluster::new(self.config.cluster.clone(), &self.registry);
        let report = self.source(manifests, &cluster);
        let services = self.config.services;
        if services.destination {
            let config = self.config.destination.clone();
            let routes = Routes::new(destination::server(cluster.clone(), config, self.drain.clone()));
            let addr = self.serve("destination", self.config.listen.destination, creds.clone(), routes);
            self.addrs.destination = Some(addr.await?);
        }
        if services.policy {
            let inbound = policy::inbound_server(cluster.clone(), self.drain.clone());
            let outbound = policy::outbound_server(cluster, self.config.policy, self.drain.clone());
            let routes = Routes::new(inbound).add_service(outbound);
            self.addrs.policy = Some(self.serve("policy", self.config.listen.policy, creds, routes).await?);
        }
        Ok(Some(report))
    }

    fn source(&mut self, manifests: PathBuf, cluster: &Cluster) -> dir::Report {
        let report = dir::Report::new(&self.registry);
        let (writer, drain) = (cluster.writer(), self.drain.clone());
        let running = dir::run(manifests, writer, report.clone(), drain.clone());
        self.start("reading manifests", async move { running.await.context("--manifests") });
        let latch = self.readiness.latch("caches");
        let cluster = cluster.clone();
        self.start("waiting for caches", async move {
            info!("waiting for caches to sync");
            tokio::select! {
                () = cluster.synced() => info!("caches synced"),
                () = drain.signaled() => return Ok(()),
            }
            drop(latch);
            // Ending would be an early end.
            drain.signaled().await;
            Ok(())
        });
        report
    }

    async fn admins(&mut self, report: Option<&dir::Report>) -> Result<()> {
        let services = self.config.services;
        if services.destination {
            self.addrs.metrics = Some(self.admin(self.config.listen.metrics, report).await?);
        }
        if services.identity || services.policy {
            self.addrs.admin = Some(self.admin(self.config.listen.admin, report).await?);
        }
        Ok(())
    }

    /// An admin server with the paths and answers that Linkerd's probes expect.
    async fn admin(&mut self, addr: ListenAddr, report: Option<&dir::Report>) -> Result<SocketAddr> {
        let (listener, bound) = bind(addr).await?;
        let readiness = self.readiness.clone();
        let mut admin = Admin::new(self.registry.clone(), self.readiness.clone())
            .route("/ping", |_| std::future::ready(text(StatusCode::OK, "pong\n")))
            .route("/ready", move |_| {
                std::future::ready(match readiness.is_ready() {
                    true => text(StatusCode::OK, "ok\n"),
                    false => text(StatusCode::INTERNAL_SERVER_ERROR, "not ready\n"),
                })
            });
        if let Some(report) = report.cloned() {
            admin = admin.route("/manifest-errors", move |_| {
                let lines: String = report.errors().iter().map(|err| format!("{err}\n")).collect();
                std::future::ready(text(StatusCode::OK, lines))
            });
        }
        info!(addr = %bound, "serving admin");
        let drain = self.drain.clone();
        self.start("serving admin", async move {
            admin.serve(listener, drain).await;
            Ok(())
        });
        Ok(bound)
    }

    async fn serve(
        &mut self,
        service: &'static str,
        addr: ListenAddr,
        creds: Arc<ServerCreds>,
        routes: Routes,
    ) -> Result<SocketAddr> {
        let (listener, bound) = bind(addr).await.with_context(|| format!("serving {service}"))?;
        info!(service, addr = %bound, name = creds.name(), "serving gRPC");
        let server = Server {
            creds,
            routes: routes.prepare(),
            metrics: self.grpc.clone(),
        };
        let drain = self.drain.clone();
        self.start(service, async move {
            server.serve(listener, drain).await;
            Ok(())
        });
        Ok(bound)
    }

    fn keep(&mut self, keeper: LeafKeeper) {
        let latch = self.readiness.latch("certificate");
        let drain = self.drain.clone();
        self.start("renewing certificates", async move {
            keeper.run(latch, drain).await;
            Ok(())
        });
    }

    fn start(&mut self, name: &'static str, task: impl Future<Output = Result<()>> + Send + 'static) {
        self.tasks.spawn(async move { (name, task.await) });
    }
}

/// Binds; all addresses are those of both families where the machine has both.
async fn bind(addr: ListenAddr) -> Result<(TcpListener, SocketAddr)> {
    let bound = match addr {
        ListenAddr::At(addr) => TcpListener::bind(addr).await,
        ListenAddr::All(port) => match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
            Ok(listener) => Ok(listener),
            Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await,
        },
    };
    let listener = bound.with_context(|| format!("listening on {addr}"))?;
    let bound = listener.local_addr().context("reading a listener's address")?;
    Ok((listener, bound))
}

fn early_end(task: Result<(&'static str, Result<()>), JoinError>) -> anyhow::Error {
    match task {
        Ok((name, Ok(()))) => anyhow!("{name} ended by itself"),
        Ok((name, Err(err))) => err.context(name),
        Err(err) => anyhow::Error::new(err).context("a task failed"),
    }
}

const DRAIN_LIMIT: Duration = Duration::from_secs(5);
