//! Builds source, cluster and services once, runs them, and ends them together.

use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use http::StatusCode;
use kube::Client;
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::{Builder, Handle};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;
use tonic::service::Routes;
use tracing::{info, warn};
use tulle_core::admin::{Admin, text};
use tulle_core::descriptors;
use tulle_core::drain::{self, Signal, Watch};
use tulle_core::memory;
use tulle_core::metrics::{Registry, process_metrics};
use tulle_core::ready::{Latch, Readiness};
use tulle_core::telemetry as logging;

use crate::admission::{PolicyValidator, ProfileValidator};
use crate::cluster::{Cluster, EndpointsFrom};
use crate::config::{Admission, Certificates, Config, ListenAddr, Logs, Source, Tokens};
use crate::identity::leaf::LeafKeeper;
use crate::identity::server::IdentityService;
use crate::identity::token_review::TokenReviews;
use crate::identity::tokens::{Reviewer, StaticKeys};
use crate::kubernetes::recorder::{self, Recorder, Reporter};
use crate::resources::event::Writer;
use crate::serving::metrics::GrpcMetrics;
use crate::serving::{self, Server};
use crate::source::kubernetes::kinds::{Drives, Needs};
use crate::source::{self, dir};
use crate::tls::creds::{ClientCertificates, ServerCreds};
use crate::webhook::creds::Creds;
use crate::webhook::https::{Port, Transport};
use crate::webhook::keeper::{self, Keeper};
use crate::webhook::metrics::HttpMetrics;
use crate::webhook::mounted::Mounted;
use crate::webhook::{self, Handler};
use crate::{destination, injector, kubernetes, logs, policy, telemetry, writeback};

/// A running control plane.
pub struct App {
    addrs: Addrs,
    signal: Signal,
    tasks: JoinSet<(&'static str, Result<()>)>,
    _webhook_thread: Option<WebhookThread>,
}

/// Where the services listen, as far as they run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Addrs {
    pub destination: Option<SocketAddr>,
    pub identity: Option<SocketAddr>,
    pub policy: Option<SocketAddr>,
    pub policy_validator: Option<SocketAddr>,
    pub sp_validator: Option<SocketAddr>,
    pub metrics: Option<SocketAddr>,
    pub admin: Option<SocketAddr>,
    pub proxy_injector: Option<SocketAddr>,
    pub sp_validator_admin: Option<SocketAddr>,
    pub proxy_injector_admin: Option<SocketAddr>,
    pub telemetry: Option<SocketAddr>,
}

/// A thread with a runtime, until it is dropped.
struct WebhookThread {
    runtime: Handle,
    _end: oneshot::Sender<()>,
}

/// What is on its way to become an [`App`].
struct Parts {
    config: Config,
    /// Present where anything asks the API server.
    client: Option<Client>,
    /// Present where webhooks are served.
    webhook_thread: Option<WebhookThread>,
    /// Present where the injector runs.
    audit_report: Option<injector::audit::Report>,
    registry: Registry,
    readiness: Readiness,
    /// Why kinds are not known as the API server has them. It does not hold back readiness: whatever the API server
    /// does, the last good state is served.
    kinds: Readiness,
    grpc: GrpcMetrics,
    http: HttpMetrics,
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
        logging::Format::Plain => logs::init(&filter),
        logging::Format::Json => logging::init(&filter, logging::Format::Json)
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
        let client = match config.needs_kubernetes() {
            true => Some(kubernetes::client(&config.kubernetes, &registry).await?),
            false => None,
        };
        let mut builder = Parts {
            grpc: GrpcMetrics::new(&registry),
            http: HttpMetrics::new(&registry),
            readiness: Readiness::new(),
            kinds: Readiness::new(),
            addrs: Addrs::default(),
            tasks: JoinSet::new(),
            config,
            client,
            webhook_thread: None,
            audit_report: None,
            registry,
            drain,
        };
        let identity = builder.identity().await?;
        let report = builder.answers(identity.as_ref()).await?;
        builder.webhooks().await?;
        builder.admins(report.as_ref()).await?;
        Ok(Self {
            addrs: builder.addrs,
            signal,
            tasks: builder.tasks,
            _webhook_thread: builder.webhook_thread,
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

impl Parts {
    /// The identity service, if it runs here.
    async fn identity(&mut self) -> Result<Option<IdentityService>> {
        let Certificates::Here { identity, tokens } = &self.config.certificates else {
            return Ok(None);
        };
        let reviewer = match (tokens, &self.client) {
            (Tokens::Keys(dir), _) => Reviewer::StaticKeys(StaticKeys::open(dir.clone()).context("--token-keys")?),
            (Tokens::TokenReview, Some(client)) => Reviewer::TokenReview(Box::new(TokenReviews::new(client.clone()))),
            (Tokens::TokenReview, None) => bail!("there is no client of the API server to review tokens with"),
        };
        let identity = identity.clone();
        if let Reviewer::TokenReview(_) = reviewer {
            let (client, drain) = (self.client()?, self.drain.clone());
            let latch = self.readiness.latch("the right to review tokens");
            self.start("asking for the right to review tokens", async move {
                TokenReviews::until_permitted(client, latch, drain.clone()).await;
                // Ending would be an early end.
                drain.signaled().await;
                Ok(())
            });
        }
        let recorder = self.recorder("linkerd-identity");
        let (service, reload) = IdentityService::new(&identity, reviewer, recorder, &self.registry)
            .context("opening --issuer, --trust-anchors and --token-keys")?;
        let drain = self.drain.clone();
        self.start("reloading credentials", async move {
            reload.run(drain).await;
            Ok(())
        });
        // Who comes for a certificate has none yet.
        let creds = Arc::new(ServerCreds::new(
            service.name().to_owned(),
            ClientCertificates::Optional,
        ));
        self.keep(LeafKeeper::here(creds.clone(), service.clone()));
        let routes = Routes::new(service.server());
        self.addrs.identity = Some(
            self.serve("identity", self.config.listen.identity, creds, routes)
                .await?,
        );
        Ok(Some(service))
    }

    /// Tells the readers of objects what a component does about them, where there are objects.
    fn recorder(&mut self, component: &str) -> Recorder {
        let Some(client) = self.client.clone() else {
            return Recorder::default();
        };
        let reporter = Reporter {
            controller: component.to_owned(),
            instance: self.config.pod_name.clone(),
        };
        let (recorder, publisher) = recorder::recorder(client, reporter, &self.registry);
        let drain = self.drain.clone();
        self.start("publishing events", async move {
            publisher.run(drain).await;
            Ok(())
        });
        recorder
    }

    /// Destination and policy over the objects of the source.
    async fn answers(&mut self, identity: Option<&IdentityService>) -> Result<Option<dir::Report>> {
        let Some(source) = self.config.source.clone() else {
            return Ok(None);
        };
        let name = self.config.server_name("linkerd-destination");
        let creds = Arc::new(ServerCreds::new(name, self.config.client_certificates));
        let keeper = match (identity, &self.config.certificates) {
            (Some(service), _) => LeafKeeper::here(creds.clone(), service.clone()),
            (None, Certificates::Remote(remote)) => {
                LeafKeeper::remote(creds.clone(), remote.clone()).context("--trust-anchors")?
            }
            (None, Certificates::Here { .. }) => return Err(anyhow!("the identity service is missing")),
        };
        self.keep(keeper);
        let cluster = Cluster::new(self.config.cluster.clone(), &self.registry);
        let report = self.source(source, &cluster)?;
        let services = self.config.services;
        if services.destination {
            let config = self.config.destination.clone();
            let routes = Routes::new(destination::server(cluster.clone(), config, self.drain.clone()));
            let addr = self.serve("destination", self.config.listen.destination, creds.clone(), routes);
            self.addrs.destination = Some(addr.await?);
        }
        if services.telemetry {
            self.telemetry(&cluster, creds.clone()).await?;
        }
        if services.policy {
            let clients = self.config.client_certificates;
            let inbound = policy::inbound_server(cluster.clone(), clients, self.drain.clone());
            let outbound = policy::outbound_server(cluster, self.config.policy, self.drain.clone());
            let routes = Routes::new(inbound).add_service(outbound);
            self.addrs.policy = Some(self.serve("policy", self.config.listen.policy, creds, routes).await?);
        }
        Ok(report)
    }

    /// Telemetry, on `listen.telemetry`: for the API server on Kubernetes, and for this machine without it.
    async fn telemetry(&mut self, cluster: &Cluster, creds: Arc<ServerCreds>) -> Result<()> {
        let askers = match self.config.source {
            Some(Source::Kubernetes) => telemetry::Askers::ApiServer,
            _ => telemetry::Askers::ThisMachine,
        };
        let telemetry::Parts { api, record } = telemetry::open(cluster.clone(), creds, askers, &self.drain);
        self.start("looking at sidecars", async move {
            record.await;
            Ok(())
        });
        let name = "linkerd-telemetry";
        let (listener, bound) = match bind(self.config.listen.telemetry) {
            Ok(bound) => bound,
            // On a machine, others may have the port, and what traffic depends on is not to wait for it.
            Err(err) if self.config.source != Some(Source::Kubernetes) => {
                warn!(%err, "telemetry is not served; --telemetry-addr names another port");
                return Ok(());
            }
            Err(err) => return Err(err).with_context(|| format!("serving {name}")),
        };
        let transport = match self.config.source {
            Some(Source::Kubernetes) => Transport::Tls(self.aggregated_api()?),
            _ => Transport::Loopback,
        };
        info!(addr = %bound, "serving telemetry");
        let port = Port {
            name,
            transport,
            respond: api,
            registry: self.registry.clone(),
        };
        let drain = self.drain.clone();
        self.start(name, async move {
            port.serve(listener, drain).await;
            Ok(())
        });
        self.addrs.telemetry = Some(bound);
        Ok(())
    }

    /// Credentials for an API that the API server serves as one of its own.
    fn aggregated_api(&mut self) -> Result<Arc<Creds>> {
        let creds = Arc::new(Creds::for_verified_clients());
        let believing = telemetry::believe_the_api_server(self.client()?, creds.clone(), self.drain.clone());
        self.start("watching whom the API server is", async move {
            believing.await;
            Ok(())
        });
        // Proxies need no telemetry, so nothing that is missing for it keeps this process from being ready.
        let latch = Readiness::new().latch("telemetry");
        let certificate = keeper::Config::telemetry(self.config.cluster.controller_namespace.clone());
        self.keep_certificate(certificate, creds.clone(), latch)?;
        Ok(creds)
    }

    fn source(&mut self, source: Source, cluster: &Cluster) -> Result<Option<dir::Report>> {
        let report = match source {
            Source::Directory(manifests) => Some(self.directory(manifests, cluster)),
            Source::Kubernetes => {
                self.watch(cluster)?;
                None
            }
        };
        let drain = self.drain.clone();
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
        Ok(report)
    }

    fn directory(&mut self, manifests: PathBuf, cluster: &Cluster) -> dir::Report {
        let report = dir::Report::new(&self.registry);
        let running = dir::run(manifests, cluster.writer(), report.clone(), self.drain.clone());
        self.start("reading manifests", async move { running.await.context("--manifests") });
        report
    }

    /// Watches the kinds that the services of this process need.
    fn watch(&mut self, cluster: &Cluster) -> Result<()> {
        let services = self.config.services;
        let config = source::kubernetes::Config {
            needs: Needs {
                destination: services.destination || services.telemetry,
                policy: services.policy,
                drives: match self.config.cluster.endpoints_from {
                    EndpointsFrom::Slices => Drives::Slices,
                    EndpointsFrom::Endpoints => Drives::Endpoints,
                },
            },
            addr: self.config.cluster.addr.clone(),
            kinds: self.kinds.clone(),
        };
        let (client, registry, drain) = (self.client()?, self.registry.clone(), self.drain.clone());
        let writer = self.write_back(&client, cluster.writer());
        let running = source::kubernetes::run(client, config, writer, registry, drain);
        self.start("watching the API server", async move { Ok(running.await?) });
        Ok(())
    }

    /// Starts what writes into the cluster; it hears of objects through what is returned.
    fn write_back(&mut self, client: &Client, writer: Writer) -> Writer {
        let (writer, tasks) = writeback::attach(client, self.config.writeback(), writer, &self.registry, &self.drain);
        for task in tasks {
            self.start(task.name, async move {
                task.run.await;
                Ok(())
            });
        }
        writer
    }

    /// What the API server asks before it stores an object.
    async fn webhooks(&mut self) -> Result<()> {
        let services = self.config.services;
        let on_kubernetes = self.config.source == Some(Source::Kubernetes);
        if services.policy && on_kubernetes && self.config.webhooks.policy_admission == Admission::Check {
            self.policy_validator().await?;
        }
        if services.sp_validator {
            self.sp_validator().await?;
        }
        if services.proxy_injector {
            self.proxy_injector().await?;
        }
        Ok(())
    }

    /// Admission of policies, on `listen.policy_validator`.
    async fn policy_validator(&mut self) -> Result<()> {
        let certificate = keeper::Config::policy_validator(self.config.cluster.controller_namespace.clone());
        let addr = self.config.listen.policy_validator;
        self.addrs.policy_validator = Some(self.webhook(PolicyValidator, addr, certificate).await?);
        Ok(())
    }

    /// Admission of ServiceProfiles, on `listen.sp_validator`.
    async fn sp_validator(&mut self) -> Result<()> {
        let certificate = keeper::Config::sp_validator(self.config.cluster.controller_namespace.clone());
        let addr = self.config.listen.sp_validator;
        self.addrs.sp_validator = Some(self.webhook(ProfileValidator, addr, certificate).await?);
        Ok(())
    }

    /// Injection of proxies, on `listen.proxy_injector`.
    async fn proxy_injector(&mut self) -> Result<()> {
        // Events go by a client of their own: reviews must not wait until many of them are told.
        let recorder = self.recorder("linkerd-proxy-injector");
        let client = kubernetes::client(&self.config.kubernetes, &self.registry).await?;
        let config = self.config.webhooks.injector.clone();
        let parts = injector::open(config, &client, recorder, &self.registry)
            .await
            .context("reading the configuration of the proxy injector")?;
        let injector::Parts {
            injector,
            reload,
            watches,
            audit,
            report,
        } = parts;
        let latch = self.readiness.latch("caches");
        let drain = self.drain.clone();
        self.start("reading the configuration of injection", async move {
            reload.run(drain).await;
            Ok(())
        });
        let drain = self.drain.clone();
        self.start("watching owners of pods", async move {
            watches.run(latch, drain).await;
            Ok(())
        });
        let drain = self.drain.clone();
        self.start("looking for pods without a proxy", async move {
            audit.run(drain).await;
            Ok(())
        });
        self.audit_report = Some(report);
        let certificate = keeper::Config::proxy_injector(self.config.cluster.controller_namespace.clone());
        let addr = self.config.listen.proxy_injector;
        self.addrs.proxy_injector = Some(self.webhook(injector, addr, certificate).await?);
        Ok(())
    }

    /// Serves a handler to the API server, with the certificate that is mounted, or one of its own where none is.
    async fn webhook<H: Handler>(
        &mut self,
        handler: H,
        addr: ListenAddr,
        certificate: keeper::Config,
    ) -> Result<SocketAddr> {
        let name = certificate.service;
        let (listener, bound) = bind(addr).with_context(|| format!("serving {name}"))?;
        info!(webhook = name, addr = %bound, "serving admission reviews");
        let creds = Arc::new(Creds::new());
        let latch = self.readiness.latch(name);
        self.keep_certificate(certificate, creds.clone(), latch)?;
        let server = webhook::Server::new(name, creds, handler, self.http.clone(), &self.registry);
        let drain = self.drain.clone();
        let listener = listener.into_std().context("handing a listener to the webhooks")?;
        let serving = self.webhook_thread()?.spawn(async move {
            server.serve(TcpListener::from_std(listener)?, drain).await;
            Ok(())
        });
        self.start(name, async move { serving.await? });
        Ok(bound)
    }

    /// The thread of the webhooks: reviews of megabytes are decoded there, while others answer proxies and probes.
    fn webhook_thread(&mut self) -> Result<Handle> {
        if let Some(thread) = &self.webhook_thread {
            return Ok(thread.runtime.clone());
        }
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("starting the runtime of webhooks")?;
        let (end, ended) = oneshot::channel::<()>();
        let thread = WebhookThread {
            runtime: runtime.handle().clone(),
            _end: end,
        };
        thread::Builder::new()
            .name("webhooks".to_owned())
            .spawn(move || {
                // An error is the other side dropped, which is the end.
                let _ = runtime.block_on(ended);
            })
            .context("starting the thread of webhooks")?;
        Ok(self.webhook_thread.insert(thread).runtime.clone())
    }

    /// Shows the API server the certificate that is mounted, or one of our own where none is.
    fn keep_certificate(&mut self, certificate: keeper::Config, creds: Arc<Creds>, latch: Latch) -> Result<()> {
        let drain = self.drain.clone();
        if let Some(files) = self.config.webhooks.files.of(certificate.service) {
            let mounted = Mounted::watch(files, creds).context("--server-tls-certs")?;
            self.start("reading a webhook's certificate", async move {
                mounted.run(latch, drain).await;
                Ok(())
            });
        } else {
            let keeper = Keeper::new(self.client()?, certificate, creds);
            self.start("keeping a webhook's certificate", async move {
                keeper.run(latch, drain).await;
                Ok(())
            });
        }
        Ok(())
    }

    /// The API server, where anything needs it.
    fn client(&self) -> Result<Client> {
        self.client
            .clone()
            .context("nothing was expected to need the API server")
    }

    async fn admins(&mut self, report: Option<&dir::Report>) -> Result<()> {
        let services = self.config.services;
        if services.destination {
            self.addrs.metrics = Some(self.admin(self.config.listen.metrics, report).await?);
        }
        if services.identity || services.policy || (services.telemetry && !services.destination) {
            self.addrs.admin = Some(self.admin(self.config.listen.admin, report).await?);
        }
        if services.sp_validator {
            self.addrs.sp_validator_admin = Some(self.admin(self.config.listen.sp_validator_admin, None).await?);
        }
        if services.proxy_injector {
            self.addrs.proxy_injector_admin = Some(self.admin(self.config.listen.proxy_injector_admin, None).await?);
        }
        Ok(())
    }

    /// An admin server with the paths and answers that Linkerd's probes expect.
    async fn admin(&mut self, addr: ListenAddr, report: Option<&dir::Report>) -> Result<SocketAddr> {
        let (listener, bound) = bind(addr)?;
        let (readiness, kinds) = (self.readiness.clone(), self.kinds.clone());
        let mut admin = Admin::new(self.registry.clone(), self.readiness.clone())
            .route("/ping", |_| std::future::ready(text(StatusCode::OK, "pong\n")))
            .route("/ready", move |_| {
                let (missing, stale) = (readiness.reasons(), kinds.reasons());
                let (status, first) = match missing.is_empty() {
                    true => (StatusCode::OK, "ok"),
                    false => (StatusCode::INTERNAL_SERVER_ERROR, "not ready"),
                };
                let lines = [first]
                    .into_iter()
                    .chain(missing.iter().chain(&stale).map(String::as_str));
                std::future::ready(text(status, lines.map(|line| format!("{line}\n")).collect::<String>()))
            });
        if let Some(report) = report.cloned() {
            admin = admin.route("/manifest-errors", move |_| {
                let errors = report.errors();
                let lines = errors.iter().map(ToString::to_string).chain(report.unread_kinds());
                let lines: String = lines.map(|line| format!("{line}\n")).collect();
                std::future::ready(text(StatusCode::OK, lines))
            });
        }
        if let Some(report) = self.audit_report.clone() {
            admin = admin.route("/injection-audit", move |_| {
                std::future::ready(match serde_json::to_string(&*report.findings()) {
                    Ok(json) => text(StatusCode::OK, json + "\n"),
                    Err(err) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{err}\n")),
                })
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
        let (listener, bound) = bind(addr).with_context(|| format!("serving {service}"))?;
        info!(service, addr = %bound, name = creds.name(), "serving gRPC");
        let limits = serving::Limits::within(descriptors::limit(), memory::limit());
        let server = Server::new(creds, routes, self.grpc.clone(), limits, &self.registry);
        let drain = self.drain.clone();
        self.start(service, async move {
            server.serve(service, listener, drain).await;
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
fn bind(addr: ListenAddr) -> Result<(TcpListener, SocketAddr)> {
    let bound = match addr {
        ListenAddr::At(addr) => listen(addr),
        ListenAddr::All(port) => {
            listen((Ipv6Addr::UNSPECIFIED, port).into()).or_else(|_| listen((Ipv4Addr::UNSPECIFIED, port).into()))
        }
    };
    let listener = bound.with_context(|| format!("listening on {addr}"))?;
    let bound = listener.local_addr().context("reading a listener's address")?;
    Ok((listener, bound))
}

fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = match addr {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

fn early_end(task: Result<(&'static str, Result<()>), JoinError>) -> anyhow::Error {
    match task {
        Ok((name, Ok(()))) => anyhow!("{name} ended by itself"),
        Ok((name, Err(err))) => err.context(name),
        Err(err) => anyhow::Error::new(err).context("a task failed"),
    }
}

const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// Connections that may wait to be accepted. Where they are too few, a flood keeps others waiting for a second.
const BACKLOG: u32 = 4096;
