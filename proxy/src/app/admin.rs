//! The admin thread: the task that renews the certificate, the admin and tap servers, and the shutdown of the process.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Context;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{Notify, watch},
};
use tulle_core::{drain, metrics::Registry, readiness::Latch};

use crate::{
    admin,
    app::build::ControlPlaneClients,
    config::Config,
    identity::{
        IdentitySource,
        certify::{Certifier, CertifierParams},
        key::Key,
        workload_api::WorkloadApiClient,
    },
    inbound::Inbound,
    net::{
        app_listeners,
        connect::SocketOptions,
        listen::{self, PortSharing},
        memory, tcp_metrics,
    },
    outbound::Outbound,
    tap::server::TapServer,
    tls::credentials::Credentials,
    trace::export::Exporter,
};

/// The tasks outside of the workers, on a thread of their own.
pub(super) struct AdminThread {
    pub(super) server: tulle_core::admin::Admin,
    pub(super) listener: TcpListener,
    pub(super) identity: IdentityTask,
    pub(super) tap: Option<(TcpListener, TapServer)>,
    pub(super) memory: Option<memory::MemoryMonitor>,
    pub(super) exporter: Option<Exporter>,
}

/// The signals and settings of the shutdown of the process.
pub(super) struct Shutdown {
    /// Starts the drain of the workers.
    pub(super) drain: drain::Signal,
    /// Tells the workers that the drain is over.
    pub(super) done_tx: watch::Sender<bool>,
    /// Notified by the admin server.
    pub(super) requested: Arc<Notify>,
    pub(super) grace_period: Duration,
    /// Ports of this process, which are not ports of the application.
    pub(super) own_ports: Vec<u16>,
}

impl AdminThread {
    /// Runs until the process ends: after a shutdown request, it drains the workers.
    pub(super) async fn run(
        self,
        certificate_latch: Latch,
        registry: Registry,
        metrics_retain_idle: Duration,
        shutdown: Shutdown,
    ) {
        // This drain never starts: the admin server and the tap server run until the process ends.
        let (_admin_drain, admin_drain_watch) = drain::channel();
        let (span_drain, span_drain_watch) = drain::channel();
        tokio::spawn(self.identity.run(certificate_latch));
        if let Some(memory) = self.memory {
            tokio::spawn(memory.run());
        }
        if let Some(exporter) = self.exporter {
            tokio::spawn(exporter.run(span_drain_watch));
        }
        if let Some((listener, tap)) = self.tap {
            let (drain_watch, registry) = (admin_drain_watch.clone(), registry.clone());
            tokio::spawn(async move {
                if let Err(error) = tap.serve(listener, &registry, drain_watch).await {
                    tracing::error!(%error, "the tap server cannot run");
                }
            });
        }
        let (server, listener) = (self.server, self.listener);
        tokio::spawn(async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => server.serve(listener, admin_drain_watch).await,
                Err(error) => tracing::error!(%error, "the admin server cannot run"),
            }
        });
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(METRICS_RETIRE_INTERVAL).await;
                registry.retire(metrics_retain_idle);
            }
        });
        wait_for_shutdown(&shutdown.requested, &shutdown.own_ports).await;
        let grace = shutdown.grace_period;
        if tokio::time::timeout(grace, shutdown.drain.drain()).await.is_err() {
            tracing::warn!(?grace, "requests were still in flight at the end of the grace period");
        }
        if tokio::time::timeout(SPAN_FLUSH_TIMEOUT, span_drain.drain())
            .await
            .is_err()
        {
            tracing::warn!("sending the last trace spans failed");
        }
        shutdown.done_tx.send_replace(true);
        std::future::pending::<()>().await;
    }
}

/// The task that keeps the credentials up to date.
pub(super) enum IdentityTask {
    Certifier(Box<Certifier>),
    WorkloadApi(WorkloadApiClient),
}

impl IdentityTask {
    pub(super) fn build(
        config: &Config,
        control: &ControlPlaneClients,
        creds: &Credentials,
        registry: &Registry,
    ) -> anyhow::Result<Self> {
        match (&config.identity.source, &control.identity) {
            (IdentitySource::ControlPlane { anchors, certify }, Some(channel)) => {
                // The key is created here, before the thread runs tasks: the first random bytes take 24 ms, which would block the
                // other tasks.
                let key =
                    Key::load(certify.dir.as_deref(), &config.identity.id).context("loading the identity's key")?;
                let (certify, anchors) = (certify.clone(), anchors.clone());
                let params = CertifierParams {
                    config: certify,
                    anchors,
                    key,
                    creds: creds.clone(),
                    channel: channel.clone(),
                    clock: SystemTime::now,
                };
                let certifier = Certifier::new(params, registry);
                Ok(Self::Certifier(Box::new(certifier)))
            }
            (IdentitySource::ControlPlane { .. }, None) => anyhow::bail!("no channel to the identity service"),
            (IdentitySource::WorkloadApi { socket, anchors }, _) => {
                let workload = WorkloadApiClient::new(socket.clone(), anchors.clone(), creds.clone(), registry);
                Ok(Self::WorkloadApi(workload))
            }
        }
    }

    async fn run(self, certificate_latch: Latch) {
        match self {
            Self::Certifier(certifier) => certifier.run(certificate_latch).await,
            Self::WorkloadApi(workload) => workload.run(certificate_latch).await,
        }
    }
}

/// The pages of `/debug`.
pub(super) fn debug_pages(
    outbound: &Arc<Outbound>,
    inbound: &Arc<Inbound>,
    tcp: &tcp_metrics::Families,
    creds: &Credentials,
) -> Vec<admin::DebugPage> {
    let (discovery, ports) = (outbound.discovery.clone(), inbound.port_policies.clone());
    let (tcp, creds) = (tcp.clone(), creds.clone());
    vec![
        admin::DebugPage::new(
            "/debug/destinations",
            "dialled addresses and requested names: policies, profiles, services and their endpoints",
            move || discovery.destination_statuses(),
        ),
        admin::DebugPage::new(
            "/debug/policies",
            "policies and authorizations of the ports of this workload",
            move || ports.port_statuses(),
        ),
        admin::DebugPage::new(
            "/debug/connections",
            "open connections, by client and server",
            move || tcp.snapshot(),
        ),
        admin::DebugPage::new(
            "/debug/certificates",
            "the identity, certificate chain and trust anchors of this proxy",
            move || creds.certificate_status(),
        ),
    ]
}

/// Binds a listener that workers do not share; `addr` becomes the bound address.
pub(super) fn bind_exclusive(addr: &mut SocketAddr, what: &str) -> anyhow::Result<TcpListener> {
    let listener = listen::bind(*addr, None, PortSharing::Exclusive, SocketOptions::default())
        .with_context(|| format!("listening on {addr} ({what})"))?;
    *addr = listener.local_addr()?;
    Ok(listener)
}

/// Waits for a shutdown request. Then waits until the application no longer listens, for at most [`APPLICATION_EXIT_TIMEOUT`].
///
/// A second signal, or a request to the admin server, ends the wait immediately.
async fn wait_for_shutdown(shutdown: &Notify, own_ports: &[u16]) {
    let (Ok(mut term), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        tracing::error!("installing the signal handlers failed, only the admin server can end this process");
        return shutdown.notified().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        () = shutdown.notified() => return,
    }
    tracing::info!("shutdown requested");
    let application_gone = async {
        while app_listeners::has_application_listener(own_ports) {
            tokio::time::sleep(APPLICATION_POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        _ = tokio::time::timeout(APPLICATION_EXIT_TIMEOUT, application_gone) => {}
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        () = shutdown.notified() => {}
    }
}

/// Maximum time from the first signal to the drain, while the application still listens.
const APPLICATION_EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the proxy checks whether the application still listens.
const APPLICATION_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time for sending the last trace spans.
const SPAN_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which metric series without an owner are removed.
const METRICS_RETIRE_INTERVAL: Duration = Duration::from_secs(60);
