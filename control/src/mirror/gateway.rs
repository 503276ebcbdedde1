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
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tower::BoxError;
use tracing::{info, warn};
use tulle_core::backoff::Backoff;
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::{Counter, Family, Gauge, Histogram, Labels, Registry};
use tulle_core::names::multicluster::PROBE_PORT;

use super::link::{Gateway, ProbeSpec};
use crate::kubernetes::connect;

/// The Service through which the gateway is probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ProbeService {
    /// The Services of this cluster are not listed yet.
    Unknown,
    /// There is no such Service, or it has no cluster IP or no port for probes.
    Absent,
    Present(ProbeTarget),
}

/// The address to which probes are sent.
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
    pub(super) probe_service: watch::Sender<ProbeService>,
}

impl Default for GatewayChannels {
    fn default() -> Self {
        Self {
            addresses: watch::Sender::new(None),
            is_alive: watch::Sender::new(true),
            probe_service: watch::Sender::new(ProbeService::Unknown),
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
    let lookup = |host: String| async move { connect::lookup(&host).await };
    resolve_with(lookup, gateway, period, addresses).await
}

async fn resolve_with<F>(
    lookup: impl Fn(String) -> F,
    gateway: &Gateway,
    period: Duration,
    addresses: &watch::Sender<Option<Vec<IpAddr>>>,
) -> Infallible
where
    F: Future<Output = Result<Vec<IpAddr>, BoxError>>,
{
    let retry_backoff = Backoff {
        min: MIN_LOOKUP_DELAY.min(period),
        max: period,
        jitter: 0.1,
    };
    let mut retries = retry_backoff.start();
    loop {
        let mut found = Vec::new();
        for host in &gateway.hosts {
            match lookup(host.clone()).await {
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
    let mut started_at = Instant::now();
    loop {
        // The period begins with the probe before, so that slow failures do not delay the report of a gateway that is gone.
        sleep_until(started_at + spec.period.mul_f64(1.0 + fastrand::f64() * MAX_JITTER)).await;
        started_at = Instant::now();
        let service = channels.probe_service.borrow().clone();
        probe_metrics
            .enabled
            .set(matches!(service, ProbeService::Present(_)).into());
        let target = match service {
            ProbeService::Present(target) => target,
            ProbeService::Unknown => continue,
            ProbeService::Absent => {
                if !std::mem::replace(&mut has_warned, true) {
                    warn!(
                        cluster,
                        "the gateway is not probed: there is no Service with a port {PROBE_PORT}; see -probe-service"
                    );
                }
                continue;
            }
        };
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
    /// Without probes, the gateway counts as neither enabled nor alive, and its latency is unknown.
    fn drop(&mut self) {
        self.enabled.set(0);
        self.alive.set(0);
        self.latency.set(0);
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashMap;
    use std::future::ready;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    const CLUSTER: &str = "east";

    /// A gateway on loopback whose probes the test receives, with the state that the probes change.
    struct ProbedGateway {
        port: u16,
        channels: GatewayChannels,
        registry: Registry,
        metrics: GatewayMetrics,
    }

    impl ProbedGateway {
        async fn start() -> (TcpListener, Self) {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = listener.local_addr().unwrap();
            let channels = GatewayChannels::default();
            channels.probe_service.send_replace(ProbeService::Present(ProbeTarget {
                host: "probe-east.multicluster".to_owned(),
                ip: addr.ip(),
                port: addr.port(),
            }));
            let registry = Registry::new();
            let gateway = Self {
                port: addr.port(),
                channels,
                metrics: GatewayMetrics::new(&registry),
                registry,
            };
            (listener, gateway)
        }

        fn is_alive(&self) -> bool {
            *self.channels.is_alive.borrow()
        }

        /// The number of successful and of failed probes.
        fn n_probes(&self) -> (u64, u64) {
            let count = |is_success: bool| {
                let labels = cluster_label(CLUSTER).with("probe_successful", is_success);
                self.metrics.probes.get(&labels).get()
            };
            (count(true), count(false))
        }
    }

    /// The gauges of whether the gateway is probed and alive, and of its latency.
    fn gauges(metrics: &GatewayMetrics) -> [i64; 3] {
        let labels = cluster_label(CLUSTER);
        [&metrics.enabled, &metrics.alive, &metrics.latency].map(|family| family.get(&labels).get())
    }

    fn probe_spec(response_timeout: Duration) -> ProbeSpec {
        ProbeSpec {
            path: "/ready".to_owned(),
            port: 4191,
            period: Duration::from_millis(10),
            timeout: response_timeout,
            failure_threshold: 3,
        }
    }

    /// Accepts the connection of the next probe, and reads the head of its request.
    async fn receive_probe(listener: &TcpListener) -> (TcpStream, String) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let n_bytes = stream.read_buf(&mut head).await.unwrap();
            assert!(n_bytes > 0, "the connection ended in the head of the request");
        }
        (stream, String::from_utf8(head).unwrap())
    }

    async fn respond(mut stream: TcpStream, status: &str) {
        let response = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(response.as_bytes()).await.unwrap();
    }

    #[tokio::test]
    async fn a_gateway_is_not_alive_from_the_third_failure_until_a_probe_succeeds() {
        let (listener, gateway) = ProbedGateway::start().await;
        let spec = probe_spec(Duration::from_secs(30));
        let mut alive = gateway.channels.is_alive.subscribe();
        let probed = async {
            for n_failures in 0..3 {
                // A probe is sent after the result of the one before was handled.
                let (stream, head) = receive_probe(&listener).await;
                assert!(head.starts_with("GET /ready HTTP/1.1\r\n"), "{head}");
                let host = format!("host: probe-east.multicluster:{}\r\n", gateway.port);
                assert!(head.contains(&host), "{head}");
                assert_eq!((gateway.is_alive(), gateway.n_probes()), (true, (0, n_failures)));
                assert_eq!(gauges(&gateway.metrics), [1, 1, 0]);
                respond(stream, "503 Service Unavailable").await;
            }
            alive.wait_for(|alive| !alive).await.unwrap();
            assert_eq!(gateway.n_probes(), (0, 3));
            assert_eq!(gauges(&gateway.metrics), [1, 0, 0]);

            let (stream, _) = receive_probe(&listener).await;
            respond(stream, "200 OK").await;
            alive.wait_for(|alive| *alive).await.unwrap();
            assert_eq!(gateway.n_probes(), (1, 3));
            assert_eq!(gauges(&gateway.metrics)[..2], [1, 1]);
            let page = gateway.registry.render();
            let n_latencies = "gateway_probe_latency_ms_count{target_cluster_name=\"east\"} 1\n";
            assert!(page.contains(n_latencies), "{page}");

            // Connections to the port are refused from now on.
            drop(listener);
            alive.wait_for(|alive| !alive).await.unwrap();
            assert_eq!(gateway.n_probes(), (1, 6));
            assert_eq!(gauges(&gateway.metrics)[..2], [1, 0]);
        };
        // `probed` is polled first, so that it sees each change before the next probe.
        tokio::select! {
            biased;
            () = probed => {}
            never = probe(CLUSTER, &spec, &gateway.channels, &gateway.metrics) => match never {},
        }
        assert_eq!(gauges(&gateway.metrics), [0, 0, 0], "after the last probe");
    }

    #[tokio::test]
    async fn a_probe_without_a_response_in_time_is_a_failure() {
        let (listener, gateway) = ProbedGateway::start().await;
        let spec = probe_spec(Duration::from_millis(100));
        let mut alive = gateway.channels.is_alive.subscribe();
        let probed = async {
            // The connections stay open.
            let mut unanswered = Vec::new();
            for n_failures in 0..3 {
                unanswered.push(listener.accept().await.unwrap());
                assert_eq!((gateway.is_alive(), gateway.n_probes()), (true, (0, n_failures)));
            }
            alive.wait_for(|alive| !alive).await.unwrap();
            assert_eq!(gateway.n_probes(), (0, 3));
        };
        tokio::select! {
            biased;
            () = probed => {}
            never = probe(CLUSTER, &spec, &gateway.channels, &gateway.metrics) => match never {},
        }
    }

    #[test]
    fn the_gauges_of_a_gateway_do_not_outlive_its_probes() {
        let registry = Registry::new();
        let metrics = GatewayMetrics::new(&registry);
        let probe_metrics = metrics.for_cluster(CLUSTER);
        probe_metrics.enabled.set(1);
        probe_metrics.alive.set(1);
        probe_metrics.latency.set(7);
        assert_eq!(gauges(&metrics), [1, 1, 7]);
        drop(probe_metrics);
        assert_eq!(gauges(&metrics), [0, 0, 0]);
        // Nothing holds the series any more.
        registry.retire(Duration::ZERO);
        registry.retire(Duration::ZERO);
        assert_eq!(registry.render(), "");
    }

    /// The addresses of names, separated by spaces. A name without an address cannot be resolved.
    struct NameServer {
        records: RefCell<HashMap<&'static str, &'static str>>,
        n_lookups: watch::Sender<usize>,
    }

    impl NameServer {
        fn lookup(&self, host: &str) -> Result<Vec<IpAddr>, BoxError> {
            self.n_lookups.send_modify(|n| *n += 1);
            let records = self.records.borrow();
            let found = records.get(host).copied().unwrap_or_default().split_whitespace();
            let found: Vec<IpAddr> = found.map(|ip| ip.parse().unwrap()).collect();
            match found.is_empty() {
                true => Err(format!("{host} has no address").into()),
                false => Ok(found),
            }
        }

        /// Waits until both names were looked up again.
        async fn next_round(&self) {
            let end = *self.n_lookups.borrow() + 2;
            let mut n_lookups = self.n_lookups.subscribe();
            n_lookups.wait_for(|n| *n >= end).await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_gateway_has_the_addresses_of_its_names_that_are_found_or_else_the_last_ones() {
        let names = NameServer {
            records: RefCell::default(),
            n_lookups: watch::Sender::new(0),
        };
        let gateway = Gateway {
            hosts: vec!["a.test".to_owned(), "b.test".to_owned()],
            port: 4143,
            identity: None,
        };
        let addresses = watch::Sender::new(None::<Vec<IpAddr>>);
        let changing = async {
            let (a, b) = ("192.0.2.20 192.0.2.3", "2001:db8::1 192.0.2.3");
            for (case, a, b, expected) in [
                ("no name is found", "", "", ""),
                ("two addresses of one name", a, "", "192.0.2.3 192.0.2.20"),
                (
                    "both families, and a common address",
                    a,
                    b,
                    "192.0.2.3 192.0.2.20 2001:db8::1",
                ),
                ("a changed address", "192.0.2.9", b, "192.0.2.3 192.0.2.9 2001:db8::1"),
                ("one name is no longer found", "192.0.2.9", "", "192.0.2.9"),
                ("no name is found any more", "", "", "192.0.2.9"),
                ("the other name is found again", "", b, "192.0.2.3 2001:db8::1"),
            ] {
                *names.records.borrow_mut() = [("a.test", a), ("b.test", b)].into();
                let changed_at = Instant::now();
                names.next_round().await;
                assert!(changed_at.elapsed() <= Duration::from_secs(65), "{case}");
                let known = addresses.borrow().clone();
                assert_eq!(known.is_none(), expected.is_empty(), "{case}: {known:?}");
                let known: Vec<String> = known.iter().flatten().map(IpAddr::to_string).collect();
                assert_eq!(known.join(" "), expected, "{case}");
            }
        };
        let lookup = |host: String| ready(names.lookup(&host));
        tokio::select! {
            biased;
            // Lookups end at once, so one poll handles a whole round.
            never = resolve_with(lookup, &gateway, Duration::from_secs(60), &addresses) => match never {},
            () = changing => {}
        }
    }
}
