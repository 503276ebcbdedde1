//! The gateway of another cluster: its addresses, and whether it answers probes.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::Empty;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};
use tulle_core::backoff::Backoff;
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::{Counter, Family, Gauge, Histogram, Labels, Registry};

use super::link::{Gateway, ProbeSpec};
use super::plan::objects::PROBE_PORT_NAME;
use crate::kubernetes::connect;

/// The address to which probes are sent: the Service through which the gateway is probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProbeTarget {
    /// The name of the Service, for the `host` header.
    pub(super) host: String,
    pub(super) ip: IpAddr,
    pub(super) port: u16,
}

/// The state that the tasks of a gateway share.
pub(super) struct GatewayChannels {
    /// `None` until an address is found.
    pub(super) addresses: watch::Sender<Option<Vec<IpAddr>>>,
    pub(super) is_alive: watch::Sender<bool>,
    /// `None` while there is no Service to send probes to.
    pub(super) probe_target: watch::Sender<Option<ProbeTarget>>,
}

impl Default for GatewayChannels {
    fn default() -> Self {
        Self {
            addresses: watch::Sender::new(None),
            is_alive: watch::Sender::new(true),
            probe_target: watch::Sender::new(None),
        }
    }
}

pub(super) struct GatewayMetrics {
    enabled: Family<Gauge>,
    alive: Family<Gauge>,
    latency: Family<Gauge>,
    latencies: Family<Histogram>,
    probes: Family<Counter>,
}

/// The metrics of one gateway.
struct ProbeMetrics {
    enabled: Arc<Gauge>,
    alive: Arc<Gauge>,
    latency: Arc<Gauge>,
    latencies: Arc<Histogram>,
    successes: Arc<Counter>,
    failures: Arc<Counter>,
}

/// Resolves the names of the gateway after each `period`, or sooner if no address is found. `addresses` is `None` until an address
/// is found. If no address is found later, the last addresses stay.
pub(super) async fn resolve(
    gateway: &Gateway,
    period: Duration,
    addresses: &watch::Sender<Option<Vec<IpAddr>>>,
) -> Infallible {
    let retry_backoff = Backoff {
        min: MIN_LOOKUP_DELAY.min(period),
        max: period,
        jitter: 0.1,
    };
    let mut retries = retry_backoff.start();
    loop {
        let mut found = Vec::new();
        for host in &gateway.hosts {
            match connect::lookup(host).await {
                Ok(ips) => found.extend(ips),
                Err(error) => warn!(
                    host,
                    error = &*error as &dyn std::error::Error,
                    "resolving the name of the gateway failed"
                ),
            }
        }
        found.sort_unstable();
        found.dedup();
        if found.is_empty() {
            sleep(retries.next_delay()).await;
            continue;
        }
        addresses.send_if_modified(|known| {
            let is_new = known.as_ref() != Some(&found);
            *known = Some(found);
            is_new
        });
        retries.reset();
        sleep(period).await;
    }
}

impl GatewayMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            enabled: registry.gauge("gateway_enabled", "Whether the gateway of a linked cluster is probed."),
            alive: registry.gauge(
                "gateway_alive",
                "Whether the gateway of a linked cluster answers probes.",
            ),
            latency: registry.gauge(
                "gateway_latency",
                "Latency of the last successful probe, in milliseconds.",
            ),
            latencies: registry.histogram(
                "gateway_probe_latency_ms",
                "Latency of successful probes, in milliseconds.",
                &LATENCY_BUCKETS_MS,
            ),
            probes: registry.counter("gateway_probes", "Probes of the gateway of a linked cluster."),
        }
    }

    fn for_cluster(&self, cluster: &str) -> ProbeMetrics {
        let labels = cluster_label(cluster);
        let probes = |is_success| self.probes.get(&labels.clone().with("probe_successful", is_success));
        ProbeMetrics {
            enabled: self.enabled.get(&labels),
            alive: self.alive.get(&labels),
            latency: self.latency.get(&labels),
            latencies: self.latencies.get(&labels),
            successes: probes(true),
            failures: probes(false),
        }
    }
}

/// Probes the gateway. The gateway counts as alive until the failure threshold is reached, so mirrors work before the first probe.
pub(super) async fn probe(
    cluster: &str,
    spec: &ProbeSpec,
    channels: &GatewayChannels,
    metrics: &GatewayMetrics,
) -> Infallible {
    let is_alive = &channels.is_alive;
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new())
        // Each probe opens a connection, because it must also detect that connections cannot be opened.
        .pool_max_idle_per_host(0)
        .build(HttpConnector::new());
    let probe_metrics = metrics.for_cluster(cluster);
    probe_metrics.alive.set((*is_alive.borrow()).into());
    let (mut n_failures, mut has_warned) = (0, false);
    loop {
        sleep(spec.period.mul_f64(1.0 + fastrand::f64() * MAX_JITTER)).await;
        let target = channels.probe_target.borrow().clone();
        probe_metrics.enabled.set(target.is_some().into());
        let Some(target) = target else {
            if !std::mem::replace(&mut has_warned, true) {
                warn!(
                    cluster,
                    "the gateway is not probed: there is no Service with a port {PROBE_PORT_NAME}; see -probe-service"
                );
            }
            continue;
        };
        let started_at = Instant::now();
        let result = match timeout(spec.timeout, send_probe(&client, spec, &target)).await {
            Ok(result) => result,
            Err(_) => Err(format!("no response within {:?}", spec.timeout)),
        };
        match result {
            Ok(()) => {
                n_failures = 0;
                let latency = started_at.elapsed();
                probe_metrics.successes.inc();
                probe_metrics.latencies.observe(latency.as_secs_f64() * 1000.0);
                probe_metrics
                    .latency
                    .set(latency.as_millis().try_into().unwrap_or(i64::MAX));
                probe_metrics.alive.set(1);
                if set_if_changed(is_alive, true) {
                    info!(cluster, "the gateway answers probes again");
                }
            }
            Err(cause) => {
                n_failures += 1;
                probe_metrics.failures.inc();
                if n_failures < spec.failure_threshold {
                    continue;
                }
                probe_metrics.alive.set(0);
                if set_if_changed(is_alive, false) {
                    warn!(cluster, n_failures, "the gateway does not answer probes: {cause}");
                }
            }
        }
    }
}

/// Sets a value, and notifies the receivers if it has changed. Returns whether it has changed.
fn set_if_changed(state: &watch::Sender<bool>, value: bool) -> bool {
    state.send_if_modified(|state| std::mem::replace(state, value) != value)
}

impl Drop for ProbeMetrics {
    /// Without probes, the gateway counts as neither enabled nor alive.
    fn drop(&mut self) {
        self.enabled.set(0);
        self.alive.set(0);
    }
}

async fn send_probe(
    client: &Client<HttpConnector, Empty<Bytes>>,
    spec: &ProbeSpec,
    target: &ProbeTarget,
) -> Result<(), String> {
    let authority = SocketAddr::new(target.ip, target.port);
    let request = Request::get(format!("http://{authority}{}", spec.path))
        .header(header::HOST, format!("{}:{}", target.host, target.port))
        .body(Empty::new())
        .map_err(|err| err.to_string())?;
    let response = client.request(request).await;
    let response = response.map_err(|err| ErrorChain(&err).to_string())?;
    match response.status() {
        StatusCode::OK => Ok(()),
        status => Err(format!("status {status}")),
    }
}

/// The label of the metrics of a linked cluster.
pub(super) fn cluster_label(cluster: &str) -> Labels {
    Labels::new().with("target_cluster_name", cluster)
}

/// Minimum delay before names are resolved again, if no address was found.
const MIN_LOOKUP_DELAY: Duration = Duration::from_secs(1);

/// Maximum fraction of the probe period that is added to it at random.
const MAX_JITTER: f64 = 0.1;

static LATENCY_BUCKETS_MS: [f64; 25] = [
    1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 100.0, 200.0, 300.0, 400.0, 500.0, 1000.0, 2000.0, 3000.0,
    4000.0, 5000.0, 10_000.0, 20_000.0, 30_000.0, 40_000.0, 50_000.0,
];
