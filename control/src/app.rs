//! Builds the source, the cluster and the services, runs them, and stops them together.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use http::StatusCode;
use kube::Client;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;
use tonic::service::Routes;
use tracing::{info, warn};
use tulle_core::admin::{Admin, AdminRequest, text};
use tulle_core::descriptors;
use tulle_core::drain::{self, Signal, Watch};
use tulle_core::memory;
use tulle_core::metrics::{Gauge, Registry, register_process_metrics, register_runtime_metrics};
use tulle_core::readiness::{Latch, Readiness};

use crate::admission::{PolicyValidator, ProfileValidator};
use crate::cluster::Cluster;
use crate::cluster::remote_clusters::AllClusters;
use crate::config::flags::ListenAddr;
use crate::config::{
    Admission, Certificates, Config, ListenFailure, ObjectSource, TokenVerification, unsupported_flags,
};
use crate::identity::own_certificate::CertificateRenewer;
use crate::identity::reviewer::{JoinTokenKeys, Reviewer};
use crate::identity::server::IdentityService;
use crate::identity::token_review::TokenReviews;
use crate::kubernetes::event_recorder::{self, EventRecorder, Reporter};
use crate::listen::bind;
use crate::mirror::ServiceMirror;
use crate::mirror::config::Clients;
use crate::remote::RemoteWatches;
use crate::remote::references::ReferencedClusters;
use crate::resources::event::EventSink;
use crate::serving::Server;
use crate::serving::limits::{CallKind, Limits};
use crate::serving::metrics::GrpcMetrics;
use crate::source::kubernetes::kinds::WatchRequirements;
use crate::source::{self, directory_source};
use crate::threads::{Heartbeat, MAX_HEARTBEAT_AGE, Threads};
use crate::tls::mesh_credentials::{ClientCertificates, MeshCredentials};
use crate::webhook::certificate_controller::{self, CertificateController, UnreadyWhenUntrusted};
use crate::webhook::https::{HttpServer, Transport};
use crate::webhook::mounted_certificate::MountedCertificate;
use crate::webhook::server_credentials::ServerCredentials;
use crate::webhook::{self, ReviewHandler};
use crate::{destination, injector_webhook, kubernetes, policy, telemetry, writeback};

pub struct App {
    addrs: Addrs,
    metrics: Registry,
    signal: Signal,
    tasks: JoinSet<(&'static str, Result<()>)>,
    _threads: Threads,
    _unsupported_flags: Vec<Arc<Gauge>>,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Addrs {
    pub destination: Option<SocketAddr>,
    pub identity: Option<SocketAddr>,
    pub policy: Option<SocketAddr>,
    pub policy_validator: Option<SocketAddr>,
    pub sp_validator: Option<SocketAddr>,
    pub destination_admin: Option<SocketAddr>,
    pub admin: Option<SocketAddr>,
    pub proxy_injector: Option<SocketAddr>,
    pub sp_validator_admin: Option<SocketAddr>,
    pub proxy_injector_admin: Option<SocketAddr>,
    pub mirror_admin: Option<SocketAddr>,
    pub telemetry: Option<SocketAddr>,
}

/// An [`App`] under construction.
struct Builder {
    config: Config,
    /// Set if this process needs the API server.
    client: Option<Client>,
    threads: Threads,
    heartbeat: Heartbeat,
    /// Set if the injector runs.
    audit_report: Option<injector_webhook::audit::AuditReport>,
    registry: Registry,
    readiness: Readiness,
    /// A latch for each stale kind. They do not affect `readiness`: while the API server fails, the last known state is served.
    stale_kinds: Readiness,
    grpc: GrpcMetrics,
    webhooks: webhook::SharedResources,
    addrs: Addrs,
    drain: Watch,
    tasks: JoinSet<(&'static str, Result<()>)>,
}

/// A gRPC port that proxies connect to.
struct GrpcPort {
    service: &'static str,
    addr: ListenAddr,
    call_kind: CallKind,
}

/// Waits for SIGTERM or SIGINT.
///
/// # Errors
/// Fails if the signal handlers cannot be installed.
pub async fn shutdown_signal() -> Result<()> {
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
    /// Opens all ports and starts all tasks.
    ///
    /// # Errors
    /// Fails if a port cannot be opened or a file cannot be read. The error names the port or the file.
    pub async fn build(config: Config) -> Result<Self> {
        let registry = Registry::new();
        register_process_metrics(&registry);
        register_runtime_metrics(&registry, vec![Handle::current().metrics()]);
        let unsupported_flags = unsupported_flags::register(&registry, &config.unsupported_flags);
        let (signal, drain) = drain::channel();
        let client = match config.needs_kubernetes() {
            true => Some(kubernetes::client(&config.kubernetes, &registry).await?),
            false => None,
        };
        let mut builder = Builder {
            grpc: GrpcMetrics::new(&registry),
            webhooks: webhook::SharedResources::new(memory::limit(), &registry),
            readiness: Readiness::new(),
            stale_kinds: Readiness::new(),
            addrs: Addrs::default(),
            tasks: JoinSet::new(),
            config,
            client,
            threads: Threads::default(),
            heartbeat: Heartbeat::new(),
            audit_report: None,
            registry,
            drain,
        };
        let identity = builder.start_identity().await?;
        let report = builder.start_object_services(identity.as_ref()).await?;
        builder.start_webhooks().await?;
        builder.start_service_mirror().await?;
        builder.start_heartbeat();
        builder.start_admin_servers(report.as_ref()).await?;
        Ok(Self {
            addrs: builder.addrs,
            metrics: builder.registry,
            signal,
            tasks: builder.tasks,
            _threads: builder.threads,
            _unsupported_flags: unsupported_flags,
        })
    }

    pub fn metrics(&self) -> &Registry {
        &self.metrics
    }

    pub fn addrs(&self) -> Addrs {
        self.addrs
    }

    /// Runs until `end` completes.
    ///
    /// # Errors
    /// Fails if `end` fails or a task ends earlier.
    pub async fn run_until(&mut self, end: impl Future<Output = Result<()>>) -> Result<()> {
        tokio::select! {
            ended = end => ended,
            Some(task) = self.tasks.join_next() => Err(unexpected_exit(task)),
        }
    }

    /// Ends streams and connections within 5 seconds.
    pub async fn drain(mut self) {
        let ended = timeout(DRAIN_LIMIT, async {
            self.signal.drain().await;
            while self.tasks.join_next().await.is_some() {}
        });
        if ended.await.is_err() {
            warn!(
                n_tasks = self.tasks.len(),
                "aborting tasks that did not end within {DRAIN_LIMIT:?}"
            );
        }
    }
}

impl Builder {
    async fn start_identity(&mut self) -> Result<Option<IdentityService>> {
        let Certificates::Local { identity, tokens } = &self.config.certificates else {
            return Ok(None);
        };
        let reviewer = match (tokens, &self.client) {
            (TokenVerification::PublicKeyDir(dir), _) => {
                Reviewer::JoinTokenKeys(JoinTokenKeys::open(dir.clone(), &self.registry).context("--token-keys")?)
            }
            (TokenVerification::TokenReview, Some(client)) => {
                Reviewer::TokenReview(Box::new(TokenReviews::new(client.clone())))
            }
            (TokenVerification::TokenReview, None) => {
                bail!("reviewing tokens needs a client of the API server")
            }
        };
        let identity = identity.clone();
        if let Reviewer::TokenReview(_) = reviewer {
            let (client, drain) = (self.client()?, self.drain.clone());
            let latch = self
                .readiness
                .latch("the permission to review tokens is not confirmed yet");
            self.start("checking the permission to review tokens", async move {
                TokenReviews::wait_for_permission(client, latch, drain.clone()).await;
                // A task that ends before the drain ends the process.
                drain.signaled().await;
                Ok(())
            });
        }
        let recorder = self.start_recorder("linkerd-identity");
        let (service, reload) = IdentityService::new(&identity, reviewer, recorder, &self.registry)
            .context("watching --issuer, --trust-anchors and --token-keys")?;
        let drain = self.drain.clone();
        self.start("reloading credentials", async move {
            reload.run(drain).await;
            Ok(())
        });
        // Proxies that request a certificate may have none yet.
        let creds = Arc::new(MeshCredentials::new(
            service.name().to_owned(),
            ClientCertificates::Optional,
        ));
        self.start_renewer(CertificateRenewer::local(creds.clone(), service.clone()));
        let routes = Routes::new(service.server());
        let port = GrpcPort {
            service: "identity",
            addr: self.config.listen.identity,
            call_kind: CallKind::Unary,
        };
        self.addrs.identity = Some(self.serve(port, creds, routes).await?);
        Ok(Some(service))
    }

    /// Starts an Event recorder for a component. Without an API server, the recorder drops all Events.
    fn start_recorder(&mut self, component: &str) -> EventRecorder {
        let Some(client) = self.client.clone() else {
            return EventRecorder::default();
        };
        let reporter = Reporter {
            controller: component.to_owned(),
            instance: self.config.pod_name.clone(),
        };
        let (recorder, publisher) = event_recorder::new_recorder(client, reporter, &self.registry);
        let drain = self.drain.clone();
        self.start("publishing events", async move {
            publisher.run(drain).await;
            Ok(())
        });
        recorder
    }

    /// Starts the source of objects, and the services that use these objects: destination, policy and telemetry.
    async fn start_object_services(
        &mut self,
        identity: Option<&IdentityService>,
    ) -> Result<Option<directory_source::ManifestReport>> {
        let Some(source) = self.config.source.clone() else {
            return Ok(None);
        };
        let name = self.config.server_name("linkerd-destination");
        let creds = Arc::new(MeshCredentials::new(name, self.config.client_certificates));
        let renewer = match (identity, &self.config.certificates) {
            (Some(service), _) => CertificateRenewer::local(creds.clone(), service.clone()),
            (None, Certificates::Remote(remote)) => {
                CertificateRenewer::remote(creds.clone(), remote.clone()).context("--trust-anchors")?
            }
            (None, Certificates::Local { .. }) => return Err(anyhow!("the identity service is missing")),
        };
        self.start_renewer(renewer);
        let cluster = Cluster::new(self.config.cluster.clone(), &self.registry);
        let clusters = AllClusters::from(cluster.clone());
        let report = self.start_source(source, &clusters)?;
        self.start_removal_of_unused_encodings(cluster.clone());
        let services = self.config.services;
        if services.destination {
            let config = self.config.destination.clone();
            let client_certificates = self.config.client_certificates;
            let routes = Routes::new(destination::server(clusters, client_certificates, config));
            let port = GrpcPort {
                service: "destination",
                addr: self.config.listen.destination,
                call_kind: CallKind::Streaming,
            };
            self.addrs.destination = Some(self.serve(port, creds.clone(), routes).await?);
        }
        if services.telemetry {
            self.start_telemetry(&cluster, creds.clone()).await?;
        }
        if services.policy {
            let client_certificates = self.config.client_certificates;
            let inbound = policy::inbound_server(cluster.clone(), client_certificates);
            let outbound = policy::outbound_server(cluster, client_certificates, self.config.policy);
            let routes = Routes::new(inbound).add_service(outbound);
            let port = GrpcPort {
                service: "policy",
                addr: self.config.listen.policy,
                call_kind: CallKind::Streaming,
            };
            self.addrs.policy = Some(self.serve(port, creds, routes).await?);
        }
        Ok(report)
    }

    /// Starts telemetry on `listen.telemetry`. On Kubernetes it serves the API server, otherwise loopback clients.
    async fn start_telemetry(&mut self, cluster: &Cluster, creds: Arc<MeshCredentials>) -> Result<()> {
        let allowed_clients = match self.config.source {
            Some(ObjectSource::Kubernetes) => telemetry::AllowedClients::ApiServer,
            _ => telemetry::AllowedClients::ThisMachine,
        };
        let telemetry::Telemetry { api, scrape_task } =
            telemetry::new(cluster.clone(), creds, allowed_clients, &self.drain);
        let scraping = self.threads.runtime("telemetry")?.spawn(scrape_task);
        self.start("scraping sidecars", async move { Ok(scraping.await?) });
        let name = "linkerd-telemetry";
        let (listener, bound) = match bind(self.config.listen.telemetry) {
            Ok(bound) => bound,
            Err(err) if self.config.telemetry_listen_failure == ListenFailure::OmitServer => {
                warn!(
                    error = &*err as &dyn std::error::Error,
                    "telemetry is not served; set another port with --telemetry-addr"
                );
                return Ok(());
            }
            Err(err) => return Err(err).with_context(|| format!("serving {name}")),
        };
        let transport = match self.config.source {
            Some(ObjectSource::Kubernetes) => Transport::Tls(self.create_api_credentials()?),
            _ => Transport::Loopback,
        };
        info!(addr = %bound, "serving telemetry");
        let server = HttpServer {
            name,
            transport,
            handler: api,
            registry: self.registry.clone(),
        };
        self.serve_on_thread("telemetry", name, listener, |listener, drain| {
            server.serve(listener, drain)
        })?;
        self.addrs.telemetry = Some(bound);
        Ok(())
    }

    /// Creates the credentials of the aggregated API, and starts the tasks that update them.
    fn create_api_credentials(&mut self) -> Result<Arc<ServerCredentials>> {
        let creds = Arc::new(ServerCredentials::for_verified_clients());
        let task = telemetry::watch_client_ca(self.client()?, creds.clone(), self.drain.clone());
        self.start("watching the client CA of the API server", async move {
            task.await;
            Ok(())
        });
        // Proxies do not need telemetry, so its certificate must not affect the readiness of the process: the latch belongs to
        // a separate `Readiness`, which no admin server shows.
        let latch = Readiness::new().latch("telemetry");
        let certificate = certificate_controller::Config::telemetry(self.config.cluster.controller_namespace.clone());
        self.manage_server_certificate(certificate, creds.clone(), latch)?;
        Ok(creds)
    }

    fn start_source(
        &mut self,
        source: ObjectSource,
        clusters: &AllClusters,
    ) -> Result<Option<directory_source::ManifestReport>> {
        let report = match source {
            ObjectSource::Directory(manifests) => Some(self.start_directory_source(manifests, &clusters.local)),
            ObjectSource::Kubernetes => {
                self.start_kubernetes_source(clusters)?;
                None
            }
        };
        let drain = self.drain.clone();
        let latch = self.readiness.latch("the objects of the cluster are not loaded yet");
        let cluster = clusters.local.clone();
        self.start("waiting for caches", async move {
            info!("waiting for caches to sync");
            tokio::select! {
                () = cluster.synced() => info!("caches synced"),
                () = drain.signaled() => return Ok(()),
            }
            drop(latch);
            // A task that ends before the drain ends the process.
            drain.signaled().await;
            Ok(())
        });
        Ok(report)
    }

    fn start_removal_of_unused_encodings(&mut self, cluster: Cluster) {
        let drain = self.drain.clone();
        self.start("removing unused encodings", async move {
            tokio::select! {
                never = cluster.remove_unused_encodings() => match never {},
                () = drain.signaled() => Ok(()),
            }
        });
    }

    fn start_directory_source(&mut self, manifests: PathBuf, cluster: &Cluster) -> directory_source::ManifestReport {
        let report = directory_source::ManifestReport::new(&self.registry);
        let sink = writeback::add_status_report(cluster, self.config.statuses_config(), cluster.sink());
        let running = directory_source::run(manifests, sink, report.clone(), self.drain.clone());
        self.start("reading manifests", async move { running.await.context("--manifests") });
        report
    }

    /// Watches the kinds that the services of this process need, and starts write-back.
    fn start_kubernetes_source(&mut self, clusters: &AllClusters) -> Result<()> {
        let (cluster, services) = (&clusters.local, self.config.services);
        let config = source::kubernetes::Config {
            requirements: WatchRequirements {
                destination: services.destination || services.telemetry,
                policy: services.policy,
                endpoints_source: self.config.cluster.endpoints_source,
            },
            log_addr: self.config.cluster.log_addr.clone(),
            stale_kinds: self.stale_kinds.clone(),
        };
        let (client, registry, drain) = (self.client()?, self.registry.clone(), self.drain.clone());
        let sink = match self.config.writeback_config().write_slices {
            true => writeback::add_undeclared_ports_report(cluster, cluster.sink()),
            false => cluster.sink(),
        };
        let sink = match services.destination {
            true => self.start_remote_watches(&client, clusters, sink),
            false => sink,
        };
        let sink = self.start_write_back(&client, sink);
        let running = source::kubernetes::run(client, config, sink, registry, drain);
        self.start("watching the API server", async move { Ok(running.await?) });
        Ok(())
    }

    /// Watches the clusters that Services refer to. Returns a sink that collects these references and passes events on to `sink`.
    fn start_remote_watches(&mut self, client: &Client, clusters: &AllClusters, sink: EventSink) -> EventSink {
        let (sink, references) = ReferencedClusters::from_events(sink);
        let watches = RemoteWatches::new(
            client.clone(),
            clusters.clone(),
            self.registry.clone(),
            self.drain.clone(),
        );
        self.start("watching other clusters", async move {
            watches.run(references).await;
            Ok(())
        });
        sink
    }

    /// Starts the write-back controllers. Returns a sink that passes events on to the controllers and to `sink`.
    fn start_write_back(&mut self, client: &Client, sink: EventSink) -> EventSink {
        let (sink, tasks) = writeback::add_controllers(
            client,
            self.config.writeback_config(),
            sink,
            &self.registry,
            &self.drain,
        );
        for task in tasks {
            self.start(task.name, async move {
                task.run.await;
                Ok(())
            });
        }
        sink
    }

    async fn start_webhooks(&mut self) -> Result<()> {
        let services = self.config.services;
        let on_kubernetes = self.config.source == Some(ObjectSource::Kubernetes);
        if services.policy && on_kubernetes && self.config.webhooks.policy_admission == Admission::Enabled {
            self.start_policy_validator().await?;
        }
        if services.sp_validator {
            self.start_sp_validator().await?;
        }
        if services.proxy_injector {
            self.start_proxy_injector().await?;
        }
        Ok(())
    }

    /// Starts the webhook for policies on `listen.policy_validator`.
    async fn start_policy_validator(&mut self) -> Result<()> {
        let certificate =
            certificate_controller::Config::policy_validator(self.config.cluster.controller_namespace.clone());
        let addr = self.config.listen.policy_validator;
        self.addrs.policy_validator = Some(self.start_webhook(PolicyValidator, addr, certificate).await?);
        Ok(())
    }

    /// Starts the webhook for ServiceProfiles on `listen.sp_validator`.
    async fn start_sp_validator(&mut self) -> Result<()> {
        let certificate =
            certificate_controller::Config::sp_validator(self.config.cluster.controller_namespace.clone());
        let addr = self.config.listen.sp_validator;
        self.addrs.sp_validator = Some(self.start_webhook(ProfileValidator, addr, certificate).await?);
        Ok(())
    }

    /// Starts the proxy injector on `listen.proxy_injector`.
    async fn start_proxy_injector(&mut self) -> Result<()> {
        let recorder = self.start_recorder("linkerd-proxy-injector");
        // The recorder has another client: with a common rate limit, many Events would delay reviews.
        let client = kubernetes::client(&self.config.kubernetes, &self.registry).await?;
        let config = self.config.webhooks.injector.clone();
        let parts = injector_webhook::open(config, &client, recorder, &self.registry)
            .await
            .context("reading the configuration of the proxy injector")?;
        let injector_webhook::InjectorParts {
            injector,
            reload,
            watches,
            audit,
            report,
        } = parts;
        let latch = self.readiness.latch("the owners of pods are not loaded yet");
        let drain = self.drain.clone();
        self.start("reloading the injector configuration", async move {
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
        let mut certificate =
            certificate_controller::Config::proxy_injector(self.config.cluster.controller_namespace.clone());
        // Proxies need the other services of this process, so after its start an untrusted certificate of the webhook must not
        // make it unready.
        if !self.config.services.is_injector_only() {
            certificate.unready_when_untrusted = UnreadyWhenUntrusted::UntilFirstTrusted;
        }
        let addr = self.config.listen.proxy_injector;
        self.addrs.proxy_injector = Some(self.start_webhook(injector, addr, certificate).await?);
        Ok(())
    }

    /// Starts a webhook that the API server calls. Its certificate is the mounted one, or one that this process manages.
    async fn start_webhook<H: ReviewHandler>(
        &mut self,
        handler: H,
        addr: ListenAddr,
        certificate: certificate_controller::Config,
    ) -> Result<SocketAddr> {
        let name = certificate.service;
        let (listener, bound) = bind(addr).with_context(|| format!("serving {name}"))?;
        info!(webhook = name, addr = %bound, "serving admission reviews");
        let creds = Arc::new(ServerCredentials::new());
        let latch = self
            .readiness
            .latch(format!("{name}: the certificate is not ready yet"));
        self.manage_server_certificate(certificate, creds.clone(), latch)?;
        let server = webhook::WebhookServer::new(name, creds, handler, self.webhooks.clone());
        self.serve_on_thread("webhooks", name, listener, |listener, drain| {
            server.serve(listener, drain)
        })?;
        Ok(bound)
    }

    /// Starts the task that updates `creds`: from a mounted certificate, or else by a controller with the settings `certificate`.
    fn manage_server_certificate(
        &mut self,
        certificate: certificate_controller::Config,
        creds: Arc<ServerCredentials>,
        latch: Latch,
    ) -> Result<()> {
        let drain = self.drain.clone();
        let paths = &self.config.webhooks.certificate_paths;
        if let Some(files) = paths.find_for_webhook(certificate.service) {
            let mounted = MountedCertificate::watch(files, creds, &self.registry).context("--server-tls-certs")?;
            self.start("reading a server certificate", async move {
                mounted.run(latch, drain).await;
                Ok(())
            });
        } else {
            let controller = CertificateController::new(self.client()?, certificate, creds);
            self.start("managing a server certificate", async move {
                controller.run(latch, drain).await;
                Ok(())
            });
        }
        Ok(())
    }

    fn client(&self) -> Result<Client> {
        self.client
            .clone()
            .context("the API server is needed but not configured")
    }

    async fn start_service_mirror(&mut self) -> Result<()> {
        let Some(config) = self.config.mirror.clone() else {
            return Ok(());
        };
        let clients = Clients {
            objects: self.client()?,
            leases: kubernetes::client(&self.config.kubernetes, &self.registry).await?,
        };
        let (mirror, drain) = (ServiceMirror::new(clients, config, &self.registry), self.drain.clone());
        self.start("mirroring Services", async move {
            Box::pin(mirror.run(drain)).await;
            Ok(())
        });
        Ok(())
    }

    /// Starts the heartbeat of the main runtime. The admin servers, which run on another thread, check it for their liveness paths.
    fn start_heartbeat(&mut self) {
        let (heartbeat, drain) = (self.heartbeat.clone(), self.drain.clone());
        self.start("heartbeat", async move {
            tokio::select! {
                never = heartbeat.run() => match never {},
                () = drain.signaled() => Ok(()),
            }
        });
    }

    async fn start_admin_servers(&mut self, report: Option<&directory_source::ManifestReport>) -> Result<()> {
        let services = self.config.services;
        if services.destination {
            self.addrs.destination_admin = Some(
                self.start_admin_server(self.config.listen.destination_admin, report)
                    .await?,
            );
        }
        if services.identity || services.policy || (services.telemetry && !services.destination) {
            self.addrs.admin = Some(self.start_admin_server(self.config.listen.admin, report).await?);
        }
        if services.sp_validator {
            self.addrs.sp_validator_admin = Some(
                self.start_admin_server(self.config.listen.sp_validator_admin, None)
                    .await?,
            );
        }
        if services.proxy_injector {
            self.addrs.proxy_injector_admin = Some(
                self.start_admin_server(self.config.listen.proxy_injector_admin, None)
                    .await?,
            );
        }
        if services.service_mirror {
            self.addrs.mirror_admin = Some(self.start_admin_server(self.config.listen.mirror_admin, None).await?);
        }
        Ok(())
    }

    /// Starts an admin server with the paths and responses that Linkerd's probes expect.
    async fn start_admin_server(
        &mut self,
        addr: ListenAddr,
        report: Option<&directory_source::ManifestReport>,
    ) -> Result<SocketAddr> {
        let (listener, bound) = bind(addr)?;
        let (readiness, stale_kinds) = (self.readiness.clone(), self.stale_kinds.clone());
        let live = |heartbeat: Heartbeat, answer: &'static str| {
            move |_: AdminRequest| {
                std::future::ready(match heartbeat.is_alive() {
                    true => text(StatusCode::OK, answer),
                    false => text(
                        StatusCode::INTERNAL_SERVER_ERROR,
                        format!("the main thread has run no task for {MAX_HEARTBEAT_AGE:?}\n"),
                    ),
                })
            }
        };
        let mut admin = Admin::new(self.registry.clone(), self.readiness.clone())
            .route("/ping", live(self.heartbeat.clone(), "pong\n"))
            .public_route("/live", live(self.heartbeat.clone(), "live\n"))
            .route("/ready", move |_| {
                let (missing, stale) = (readiness.reasons(), stale_kinds.reasons());
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
                let lines = errors.iter().map(ToString::to_string).chain(report.unsupported_kinds());
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
        self.serve_on_thread("admin", "serving admin", listener, |listener, drain| {
            admin.serve(listener, drain)
        })?;
        Ok(bound)
    }

    /// Starts a server on its own thread, so that it and the streams of proxies do not delay each other.
    fn serve_on_thread<F>(
        &mut self,
        thread: &'static str,
        name: &'static str,
        listener: TcpListener,
        serve: impl FnOnce(TcpListener, Watch) -> F + Send + 'static,
    ) -> Result<()>
    where
        F: Future<Output = ()> + Send,
    {
        let drain = self.drain.clone();
        let listener = listener.into_std().context("handing a listener to another thread")?;
        let serving = self.threads.runtime(thread)?.spawn(async move {
            serve(TcpListener::from_std(listener)?, drain).await;
            Ok(())
        });
        self.start(name, async move { serving.await? });
        Ok(())
    }

    async fn serve(&mut self, port: GrpcPort, creds: Arc<MeshCredentials>, routes: Routes) -> Result<SocketAddr> {
        let GrpcPort {
            service,
            addr,
            call_kind,
        } = port;
        let (listener, bound) = bind(addr).with_context(|| format!("serving {service}"))?;
        info!(service, addr = %bound, name = creds.name(), "serving gRPC");
        let limits = Limits::from_resources(descriptors::raise_limit(), memory::limit(), call_kind);
        let server = Server::new(creds, routes, self.grpc.clone(), limits, &self.registry);
        let drain = self.drain.clone();
        self.start(service, async move {
            server.serve(service, listener, drain).await;
            Ok(())
        });
        Ok(bound)
    }

    fn start_renewer(&mut self, renewer: CertificateRenewer) {
        let latch = self.readiness.latch("this process has no certificate yet");
        let drain = self.drain.clone();
        self.start("renewing certificates", async move {
            renewer.run(latch, drain).await;
            Ok(())
        });
    }

    fn start(&mut self, name: &'static str, task: impl Future<Output = Result<()>> + Send + 'static) {
        self.tasks.spawn(async move { (name, task.await) });
    }
}

fn unexpected_exit(task: Result<(&'static str, Result<()>), JoinError>) -> anyhow::Error {
    match task {
        Ok((name, Ok(()))) => anyhow!("{name} ended unexpectedly"),
        Ok((name, Err(err))) => err.context(name),
        Err(err) => anyhow::Error::new(err).context("a task failed"),
    }
}

const DRAIN_LIMIT: Duration = Duration::from_secs(5);
