//! `/probes/CONTAINER/KIND`: probes of the application that the proxy makes in the kubelet's place.
//!
//! The kubelet's own connection would end at the proxy, which accepts it whether the application listens or not, and cannot
//! know a `grpc` or HTTPS probe from other requests where a policy denies them. So the injector points those probes here.
//! Only declared probes are made, at the address at which the kubelet asks, within the probe's own time limit; the answer is
//! what the probe found. Requests that arrive while the same probe is under way share its result, so that asking often
//! costs the application one probe at a time.

mod check;
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

use self::check::ProbeError;
pub(crate) use self::check::{Probe, ProbeRefused};
use super::{Answer, only};

/// A probe that is served: its runs, and what is told of them.
struct Served {
    probe: Arc<Probe>,
    /// The run under way, for each address of this machine at which it was asked for.
    running: Mutex<HashMap<IpAddr, WeakShared<Run>>>,
    told: Mutex<Told>,
    succeeded: Arc<Counter>,
    failed: Arc<Counter>,
}

type Run = Pin<Box<dyn Future<Output = Found> + Send>>;

/// What a probe found.
#[derive(Clone, Debug)]
struct Found {
    /// What the application answered an HTTPS probe; 200 or 503 for others.
    status: StatusCode,
    text: Arc<str>,
}

/// What the log says of a probe.
#[derive(Default)]
struct Told {
    is_failing: bool,
    at: Option<Instant>,
}

/// Adds a route for each probe.
pub(super) fn routes(admin: Admin, probes: Vec<Probe>, registry: &Registry) -> Admin {
    if probes.is_empty() {
        return admin;
    }
    let made = registry.counter(
        "tulle_probes_total",
        "Probes of the application that were made in the kubelet's place",
    );
    probes.into_iter().fold(admin, |admin, probe| {
        let labels = Labels::new()
            .with("container", &probe.container)
            .with("probe", probe.kind);
        let served = Arc::new(Served {
            running: Mutex::default(),
            told: Mutex::default(),
            succeeded: made.get(&labels.clone().with("outcome", "success")),
            failed: made.get(&labels.with("outcome", "failure")),
            probe: Arc::new(probe),
        });
        admin.probe(served.probe.path.clone(), move |req| answer(served.clone(), req))
    })
}

async fn answer(served: Arc<Served>, req: AdminRequest) -> Answer {
    if req.method != Method::GET {
        return only("GET");
    }
    let user_agent = req.headers.get(USER_AGENT).filter(|agent| is_kubelet(agent));
    let user_agent = user_agent.map_or(DEFAULT_USER_AGENT, HeaderValue::clone);
    let found = served.join(req.local.ip(), user_agent).await;
    text(found.status, format!("{}\n", found.text))
}

fn is_kubelet(user_agent: &HeaderValue) -> bool {
    user_agent.as_bytes().starts_with(b"kube-probe/")
}

impl Served {
    /// The result of the run under way, or of a new one.
    fn join(self: &Arc<Self>, at: IpAddr, user_agent: HeaderValue) -> Shared<Run> {
        let mut running = self.running.lock();
        let under_way = running.get(&at).and_then(WeakShared::upgrade);
        if let Some(run) = under_way.filter(|run| run.peek().is_none()) {
            return run;
        }
        let run: Run = Box::pin(self.clone().run(at, user_agent));
        let run = run.shared();
        running.retain(|_, run| run.upgrade().is_some());
        running.extend(run.downgrade().map(|run| (at, run)));
        run
    }

    async fn run(self: Arc<Self>, at: IpAddr, user_agent: HeaderValue) -> Found {
        let probe = &self.probe;
        let addr = SocketAddr::new(at, probe.port);
        let result = match tokio::time::timeout(probe.limit, probe.check(addr, &user_agent)).await {
            Ok(result) => result,
            Err(_) => Err(ProbeError::Timeout {
                addr,
                limit: probe.limit,
            }),
        };
        let found = match result {
            Ok(status) => Found {
                status,
                text: format!("{addr}: {status}").into(),
            },
            Err(error) => Found {
                status: StatusCode::SERVICE_UNAVAILABLE,
                text: format!("{:#}", anyhow::Error::new(error)).into(),
            },
        };
        self.record(&found);
        found
    }

    /// Counts, and logs when the outcome changes, once a minute at most.
    fn record(&self, found: &Found) {
        let Probe { container, kind, .. } = &*self.probe;
        let is_failing = !is_success(found.status);
        match is_failing {
            true => self.failed.inc(),
            false => self.succeeded.inc(),
        }
        debug!(%container, probe = %kind, found = %found.text, "made a probe");
        let mut told = self.told.lock();
        let is_new = told.is_failing != is_failing;
        if !is_new || told.at.is_some_and(|at| at.elapsed() < LOG_INTERVAL) {
            return;
        }
        *told = Told {
            is_failing,
            at: Some(Instant::now()),
        };
        match is_failing {
            true => info!(%container, probe = %kind, reason = %found.text, "a probe of the application fails"),
            false => info!(%container, probe = %kind, "a probe of the application succeeds again"),
        }
    }
}

/// What the kubelet takes for a success, redirects to other hosts among it.
fn is_success(status: StatusCode) -> bool {
    status.is_success() || status.is_redirection()
}

/// Least time between two lines about one probe.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
const DEFAULT_USER_AGENT: HeaderValue = HeaderValue::from_static("kube-probe/");

#[cfg(test)]
mod tests;
