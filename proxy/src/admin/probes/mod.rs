//! `/probes/CONTAINER/KIND`: probes of the application that the proxy runs instead of the kubelet.
//!
//! A `tcpSocket` probe would end at the proxy, which accepts connections even if the application does not listen. If a policy
//! denies unauthenticated requests, it would deny `grpc` and HTTPS probes too, because the proxy cannot tell them from other
//! requests. Therefore the injector redirects these probes to the admin server.
//!
//! Only declared probes are run: at the address to which the kubelet sent its request, with the timeout of the probe. The
//! response is the result of the probe. Requests that arrive while the same probe is running share its result, so that the
//! application gets one probe at a time.

mod check;
mod connection;
mod grpc;
mod https;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{Shared, WeakShared};
use http::header::USER_AGENT;
use http::{HeaderValue, Method, StatusCode};
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{debug, info};
use tulle_core::admin::{Admin, AdminRequest, text};
use tulle_core::metrics::{Counter, Labels, Registry};

pub(crate) use self::check::{InvalidProbe, Probe};
use self::connection::ProbeError;
use super::response::{AdminResponse, method_not_allowed};

/// Runs one probe, and holds its current runs, log state and metrics.
struct ProbeRunner {
    probe: Arc<Probe>,
    /// The current run, by the address to which the kubelet sent its request.
    running: Mutex<HashMap<IpAddr, WeakShared<ProbeFuture>>>,
    log_state: Mutex<LogState>,
    succeeded: Arc<Counter>,
    failed: Arc<Counter>,
}

type ProbeFuture = Pin<Box<dyn Future<Output = ProbeResult> + Send>>;

#[derive(Clone, Debug)]
struct ProbeResult {
    /// 503 if the check failed with an error; otherwise the application's status for an HTTPS probe, and 200 for others.
    status: StatusCode,
    text: Arc<str>,
}

/// State of the log messages about a probe.
#[derive(Default)]
struct LogState {
    is_failing: bool,
    logged_at: Option<Instant>,
}

/// Adds a route for each probe.
pub(super) fn add_routes(admin: Admin, probes: Vec<Probe>, registry: &Registry) -> Admin {
    if probes.is_empty() {
        return admin;
    }
    let probes_total = registry.counter(
        "tulle_probes_total",
        "Probes of the application that the proxy ran instead of the kubelet",
    );
    probes.into_iter().fold(admin, |admin, probe| {
        let labels = Labels::new()
            .with("container", &probe.container)
            .with("probe", probe.kind);
        let runner = Arc::new(ProbeRunner {
            running: Mutex::default(),
            log_state: Mutex::default(),
            succeeded: probes_total.get(&labels.clone().with("outcome", "success")),
            failed: probes_total.get(&labels.with("outcome", "failure")),
            probe: Arc::new(probe),
        });
        admin.public_route(runner.probe.path.clone(), move |req| respond(runner.clone(), req))
    })
}

async fn respond(runner: Arc<ProbeRunner>, req: AdminRequest) -> AdminResponse {
    if req.method != Method::GET {
        return method_not_allowed("GET");
    }
    let user_agent = req.headers.get(USER_AGENT).filter(|agent| is_kubelet(agent));
    let user_agent = user_agent.map_or(DEFAULT_USER_AGENT, HeaderValue::clone);
    let result = runner.run_or_join(req.local.ip(), user_agent).await;
    text(result.status, format!("{}\n", result.text))
}

fn is_kubelet(user_agent: &HeaderValue) -> bool {
    user_agent.as_bytes().starts_with(b"kube-probe/")
}

impl ProbeRunner {
    /// Returns the future of the current run, or starts a run.
    fn run_or_join(self: &Arc<Self>, local_ip: IpAddr, user_agent: HeaderValue) -> Shared<ProbeFuture> {
        let mut running = self.running.lock();
        let running_probe = running.get(&local_ip).and_then(WeakShared::upgrade);
        if let Some(run) = running_probe.filter(|run| run.peek().is_none()) {
            return run;
        }
        let run: ProbeFuture = Box::pin(self.clone().run(local_ip, user_agent));
        let run = run.shared();
        running.retain(|_, run| run.upgrade().is_some());
        running.extend(run.downgrade().map(|run| (local_ip, run)));
        run
    }

    async fn run(self: Arc<Self>, local_ip: IpAddr, user_agent: HeaderValue) -> ProbeResult {
        let probe = &self.probe;
        let addr = SocketAddr::new(local_ip, probe.port);
        let outcome = match tokio::time::timeout(probe.timeout, probe.check(addr, &user_agent)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(ProbeError::Timeout {
                addr,
                limit: probe.timeout,
            }),
        };
        let result = match outcome {
            Ok(status) => ProbeResult {
                status,
                text: format!("{addr}: {status}").into(),
            },
            Err(error) => ProbeResult {
                status: StatusCode::SERVICE_UNAVAILABLE,
                text: format!("{:#}", anyhow::Error::new(error)).into(),
            },
        };
        self.record(&result);
        result
    }

    /// Counts the result; logs a changed result, at most once a minute.
    fn record(&self, result: &ProbeResult) {
        let Probe { container, kind, .. } = &*self.probe;
        let is_failing = !is_success(result.status);
        match is_failing {
            true => self.failed.inc(),
            false => self.succeeded.inc(),
        }
        debug!(%container, probe = %kind, result = %result.text, "probed the application");
        let mut log_state = self.log_state.lock();
        let is_new = log_state.is_failing != is_failing;
        if !is_new || log_state.logged_at.is_some_and(|at| at.elapsed() < LOG_INTERVAL) {
            return;
        }
        *log_state = LogState {
            is_failing,
            logged_at: Some(Instant::now()),
        };
        match is_failing {
            true => info!(%container, probe = %kind, reason = %result.text, "a probe of the application failed"),
            false => info!(%container, probe = %kind, "a probe of the application succeeds again"),
        }
    }
}

/// Whether the kubelet counts the status as a success; this includes redirects to other hosts.
fn is_success(status: StatusCode) -> bool {
    status.is_success() || status.is_redirection()
}

/// Minimum time between two log messages about one probe.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
const DEFAULT_USER_AGENT: HeaderValue = HeaderValue::from_static("kube-probe/");

#[cfg(test)]
mod tests;
