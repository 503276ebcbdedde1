//! Golden metrics of one sidecar: counters parsed from its metrics page, and the rates between two pages.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tulle_core::metrics::samples::{self, Sample};

/// Values of one sidecar: counters since it started, or increases per second in [`Rates`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SidecarValues {
    /// Inbound traffic by client.
    pub sources: BTreeMap<PeerTls, TrafficValues>,
    /// Outbound traffic.
    pub destinations: BTreeMap<Destination, TrafficValues>,
    pub routes: BTreeMap<Route, TrafficValues>,
    /// Failures by direction and cause.
    pub failures: BTreeMap<(Direction, String), f64>,
    /// Start time of the sidecar, in seconds since 1970.
    pub started_at: f64,
}

/// Increase of the counters per second between two pages. Connections are those of the later page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    pub per_second: SidecarValues,
}

/// Direction of traffic as the sidecar sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    Inbound,
    Outbound,
}

/// TLS state of the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PeerTls {
    /// Its TLS identity.
    Meshed(String),
    /// Reason why the connection is not mTLS.
    Plain(String),
}

/// The destination of outbound traffic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Destination {
    /// Another cluster; empty for destinations in the cluster of the client.
    pub cluster: String,
    pub namespace: String,
    /// Kind of its owner, as in metric labels; `service` behind the gateway of another cluster, and `address` if discovery does not
    /// know the destination.
    pub kind: String,
    pub name: String,
    pub peer: PeerTls,
}

/// A route and its parent: a Server, Service or ServiceProfile.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    pub direction: Direction,
    pub parent: String,
    pub name: String,
}

/// Requests, connections and bytes: counters since the start of the sidecar, or increases per second in [`Rates`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrafficValues {
    pub success: f64,
    pub failure: f64,
    /// Requests and TCP connections denied by policy.
    pub denied: f64,
    /// Cumulative latency histogram: number of responses by upper bound in microseconds.
    pub latency: BTreeMap<u64, f64>,
    /// Number of open connections. A gauge, so it is not subtracted.
    pub connections: f64,
    pub read_bytes: f64,
    pub written_bytes: f64,
}

impl SidecarValues {
    /// Parses a metrics page. Metric families that are not needed and invalid samples are ignored.
    pub fn parse(page: &str) -> Self {
        let mut counts = Self::default();
        for sample in samples::parse_named(page, is_needed).filter(|sample| sample.value.is_finite()) {
            counts.add_sample(&sample);
        }
        counts
    }

    fn add_sample(&mut self, sample: &Sample) {
        match sample.name.as_str() {
            "response_total" | "response_latency_ms_bucket" | "inbound_http_authz_deny_total" => {
                if let Some(route) = Route::from_server_sample(sample) {
                    count(&mut self.routes, route, sample);
                }
                self.count_traffic(sample);
            }
            "inbound_tcp_authz_deny_total" => self.count_traffic(sample),
            "tcp_open_connections" | "tcp_read_bytes_total" | "tcp_write_bytes_total" => {
                // The other value of `peer` is the connection between the sidecar and its own application.
                let side = match Direction::from_sample(sample) {
                    Some(Direction::Inbound) => "src",
                    _ => "dst",
                };
                if sample.label("peer") == Some(side) {
                    self.count_traffic(sample);
                }
            }
            "route_response_total" | "route_response_latency_ms_bucket" => {
                if let Some(route) = Route::from_profile_sample(sample) {
                    count(&mut self.routes, route, sample);
                }
            }
            "outbound_http_route_request_statuses_total"
            | "outbound_grpc_route_request_statuses_total"
            | "outbound_http_route_request_duration_seconds_bucket"
            | "outbound_grpc_route_request_duration_seconds_bucket" => {
                if let Some(route) = Route::from_service_sample(sample) {
                    count(&mut self.routes, route, sample);
                }
            }
            START_TIME => self.started_at = sample.value,
            "tulle_failures_total" if self.failures.len() < MAX_KEYS => {
                if let (Some(direction), Some(cause)) = (Direction::from_sample(sample), sample.label("cause")) {
                    *self.failures.entry((direction, cause.to_owned())).or_default() += sample.value.clamp(0.0, 1e15);
                }
            }
            _ => {}
        }
    }

    fn count_traffic(&mut self, sample: &Sample) {
        match Direction::from_sample(sample) {
            Some(Direction::Inbound) => count(&mut self.sources, PeerTls::from_sample(sample, "client_id"), sample),
            Some(Direction::Outbound) => count(&mut self.destinations, Destination::from_sample(sample), sample),
            None => {}
        }
    }

    /// Returns the increase per second since a page that was read `seconds` earlier. If the sidecar has restarted in between,
    /// the earlier page counts as 0. Otherwise a lower value means that series were removed, and counts as no increase.
    #[must_use]
    pub fn rates_since(&self, earlier: &Self, seconds: f64) -> Rates {
        fn rates<K: Ord + Clone>(
            now: &BTreeMap<K, TrafficValues>,
            before: &BTreeMap<K, TrafficValues>,
            seconds: f64,
        ) -> BTreeMap<K, TrafficValues> {
            let zero = TrafficValues::default();
            let rate = |(key, counts): (&K, &TrafficValues)| {
                let before = before.get(key).unwrap_or(&zero);
                (key.clone(), counts.per_second_since(before, seconds))
            };
            now.iter().map(rate).collect()
        }
        let zero = Self::default();
        let earlier = if self.started_at > earlier.started_at {
            &zero
        } else {
            earlier
        };
        let failures = self.failures.iter().map(|(key, now)| {
            let before = earlier.failures.get(key).copied().unwrap_or_default();
            (key.clone(), increase(*now, before) / seconds)
        });
        Rates {
            per_second: Self {
                sources: rates(&self.sources, &earlier.sources, seconds),
                destinations: rates(&self.destinations, &earlier.destinations, seconds),
                routes: rates(&self.routes, &earlier.routes, seconds),
                failures: failures.collect(),
                started_at: self.started_at,
            },
        }
    }
}

impl TrafficValues {
    fn per_second_since(&self, earlier: &Self, seconds: f64) -> Self {
        let rate = |now: f64, before: f64| increase(now, before) / seconds;
        let latency = self.latency.iter().map(|(bound, now)| {
            let before = earlier.latency.get(bound).copied().unwrap_or_default();
            (*bound, rate(*now, before))
        });
        Self {
            success: rate(self.success, earlier.success),
            failure: rate(self.failure, earlier.failure),
            denied: rate(self.denied, earlier.denied),
            latency: latency.collect(),
            connections: self.connections,
            read_bytes: rate(self.read_bytes, earlier.read_bytes),
            written_bytes: rate(self.written_bytes, earlier.written_bytes),
        }
    }

    pub fn add(&mut self, other: &Self) {
        self.success += other.success;
        self.failure += other.failure;
        self.denied += other.denied;
        self.connections += other.connections;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        for (bound, n) in &other.latency {
            *self.latency.entry(*bound).or_default() += n;
        }
    }

    pub fn is_idle(&self) -> bool {
        let totals = [
            self.success,
            self.failure,
            self.denied,
            self.read_bytes,
            self.written_bytes,
        ];
        self.connections <= 0.0 && totals.iter().all(|n| *n <= 0.0)
    }

    pub fn requests(&self) -> f64 {
        self.success + self.failure
    }

    /// Returns the success rate, from 0 to 1. `None` without requests.
    pub fn success_rate(&self) -> Option<f64> {
        let requests = self.requests();
        (requests > 0.0).then(|| self.success / requests)
    }

    /// Returns this quantile of the response latency in milliseconds, interpolated within its bucket as Prometheus does. A
    /// quantile above the largest finite bound is that bound. `None` without responses.
    pub fn quantile_ms(&self, quantile: f64) -> Option<f64> {
        let total = self.latency.get(&UNBOUNDED).copied().unwrap_or_default();
        if total <= 0.0 {
            return None;
        }
        let rank = quantile * total;
        let (mut below_bound, mut count_below) = (0, 0.0);
        for (bound, n) in &self.latency {
            if *n >= rank {
                if *bound == UNBOUNDED {
                    break;
                }
                let part = if *n > count_below {
                    (rank - count_below) / (n - count_below)
                } else {
                    1.0
                };
                return Some((below_bound as f64 + part * (bound - below_bound) as f64) / 1e3);
            }
            (below_bound, count_below) = (*bound, *n);
        }
        Some(below_bound as f64 / 1e3)
    }
}

impl Direction {
    fn from_sample(sample: &Sample) -> Option<Self> {
        match sample.label("direction")? {
            "inbound" => Some(Self::Inbound),
            "outbound" => Some(Self::Outbound),
            _ => None,
        }
    }
}

impl PeerTls {
    fn from_sample(sample: &Sample, id: &str) -> Self {
        match sample.label(id).filter(|id| !id.is_empty()) {
            Some(id) if sample.label("tls") == Some("true") => Self::Meshed(id.to_owned()),
            _ => {
                let why = sample.label("no_tls_reason").or_else(|| sample.label("tls"));
                Self::Plain(why.unwrap_or_default().to_owned())
            }
        }
    }
}

impl Destination {
    fn from_sample(sample: &Sample) -> Self {
        let label = |name: &str| sample.label(name).filter(|value| !value.is_empty());
        let owner = OWNER_LABELS
            .iter()
            .find_map(|kind| Some((*kind, label(&format!("dst_{kind}"))?, "dst_namespace")));
        // Discovery does not know the pods behind the gateway of another cluster.
        let behind_gateway = || Some(("service", label("dst_target_service")?, "dst_target_service_namespace"));
        let (kind, name, namespace) = owner.or_else(behind_gateway).unwrap_or_else(|| {
            let addr = label("target_addr").or_else(|| label("target_ip"));
            ("address", addr.unwrap_or_default(), "dst_namespace")
        });
        let owned = |value: Option<&str>| value.unwrap_or_default().to_owned();
        Self {
            cluster: owned(label("dst_target_cluster")),
            namespace: owned(label(namespace)),
            kind: kind.to_owned(),
            name: name.to_owned(),
            peer: PeerTls::from_sample(sample, "server_id"),
        }
    }
}

impl Route {
    /// Returns the route of a Server, or of a port's default policy.
    fn from_server_sample(sample: &Sample) -> Option<Self> {
        if Direction::from_sample(sample)? != Direction::Inbound {
            return None;
        }
        Some(Self {
            direction: Direction::Inbound,
            parent: qualified(sample.label("srv_kind")?, sample.label("srv_name")?),
            name: qualified(sample.label("route_kind")?, sample.label("route_name")?),
        })
    }

    /// Returns the route of a Service or another outbound parent.
    fn from_service_sample(sample: &Sample) -> Option<Self> {
        let parent = qualified(sample.label("parent_kind")?, sample.label("parent_name")?);
        let namespace = sample.label("parent_namespace").unwrap_or_default();
        Some(Self {
            direction: Direction::Outbound,
            parent: match namespace.is_empty() {
                true => parent,
                false => format!("{parent}.{namespace}"),
            },
            name: qualified(sample.label("route_kind")?, sample.label("route_name")?),
        })
    }

    /// Returns the route of a ServiceProfile.
    fn from_profile_sample(sample: &Sample) -> Option<Self> {
        Some(Self {
            direction: Direction::from_sample(sample)?,
            parent: sample.label("dst")?.to_owned(),
            name: sample.label("rt_route").unwrap_or("[default]").to_owned(),
        })
    }
}

/// Returns `kind/name`, or `default:name` for a resource that the mesh generated.
fn qualified(kind: &str, name: &str) -> String {
    match kind.is_empty() || kind == "default" {
        true => format!("default:{name}"),
        false => format!("{}/{name}", kind.to_ascii_lowercase()),
    }
}

fn is_needed(name: &str) -> bool {
    FAMILIES.contains(&name)
}

/// Adds a sample under a key. Keys beyond [`MAX_KEYS`] are ignored.
fn count<K: Ord>(counts_by_key: &mut BTreeMap<K, TrafficValues>, key: K, sample: &Sample) {
    if counts_by_key.len() < MAX_KEYS || counts_by_key.contains_key(&key) {
        add(counts_by_key.entry(key).or_default(), sample);
    }
}

fn add(counts: &mut TrafficValues, sample: &Sample) {
    // Keeps sums finite for any page.
    let value = sample.value.clamp(0.0, 1e15);
    let is_success = || match sample.label("classification") {
        Some(class) => class == "success",
        None => is_success_status(sample),
    };
    match sample.name.as_str() {
        "tcp_open_connections" => counts.connections += value,
        "tcp_read_bytes_total" => counts.read_bytes += value,
        "tcp_write_bytes_total" => counts.written_bytes += value,
        name if name.ends_with("_deny_total") => counts.denied += value,
        name if name.ends_with("_bucket") => {
            let unit = if name.ends_with("_ms_bucket") { 1e3 } else { 1e6 };
            let bound = sample.label("le").and_then(|le| le.parse::<f64>().ok());
            // `as` saturates: a float above the integer range becomes the largest integer.
            let bound = bound.map(|bound| {
                if bound.is_finite() {
                    (bound * unit) as u64
                } else {
                    UNBOUNDED
                }
            });
            if let Some(bound) = bound {
                *counts.latency.entry(bound).or_default() += value;
            }
        }
        _ if is_success() => counts.success += value,
        _ => counts.failure += value,
    }
}

/// Classifies by status when there is no `classification` label, as proxies do.
fn is_success_status(sample: &Sample) -> bool {
    if sample.label("error").is_some_and(|error| !error.is_empty()) {
        return false;
    }
    match (sample.label("grpc_status"), sample.label("http_status")) {
        (Some(code), _) => !FAILED_GRPC_CODES.contains(&code),
        (None, status) => status
            .and_then(|status| status.parse::<u16>().ok())
            .is_some_and(|status| status < 500),
    }
}

fn increase(now: f64, before: f64) -> f64 {
    (now - before).max(0.0)
}

const FAMILIES: &[&str] = &[
    "response_total",
    "response_latency_ms_bucket",
    "inbound_http_authz_deny_total",
    "inbound_tcp_authz_deny_total",
    "tcp_open_connections",
    "tcp_read_bytes_total",
    "tcp_write_bytes_total",
    "route_response_total",
    "route_response_latency_ms_bucket",
    "outbound_http_route_request_statuses_total",
    "outbound_grpc_route_request_statuses_total",
    "outbound_http_route_request_duration_seconds_bucket",
    "outbound_grpc_route_request_duration_seconds_bucket",
    "tulle_failures_total",
    START_TIME,
];
const START_TIME: &str = "process_start_time_seconds";
/// Maximum number of peers of a sidecar, and also of its destinations, of its routes and of its causes. Further ones are
/// ignored.
const MAX_KEYS: usize = 1000;
/// The bucket that contains all responses (`+Inf`).
const UNBOUNDED: u64 = u64::MAX;
/// Owner labels in order of precedence; the pod itself is last.
const OWNER_LABELS: &[&str] = &[
    "deployment",
    "statefulset",
    "daemonset",
    "cronjob",
    "k8s_job",
    "replicaset",
    "replicationcontroller",
    "external_workload",
    "pod",
];
/// gRPC status codes that count as server failures.
const FAILED_GRPC_CODES: &[&str] = &[
    "UNKNOWN",
    "DEADLINE_EXCEEDED",
    "PERMISSION_DENIED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
];

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
response_total{direction=\"inbound\",tls=\"true\",client_id=\"a.shop\",srv_kind=\"server\",srv_name=\"http\",route_kind=\"default\",route_name=\"probe\",status_code=\"200\",classification=\"success\"} 90
response_total{direction=\"inbound\",tls=\"true\",client_id=\"a.shop\",srv_kind=\"server\",srv_name=\"http\",route_kind=\"HTTPRoute\",route_name=\"read\",status_code=\"500\",classification=\"failure\"} 10
response_total{direction=\"inbound\",tls=\"no_identity\",no_tls_reason=\"no_tls_from_remote\",classification=\"success\"} 5
response_latency_ms_bucket{direction=\"inbound\",tls=\"true\",client_id=\"a.shop\",le=\"10\"} 50
response_latency_ms_bucket{direction=\"inbound\",tls=\"true\",client_id=\"a.shop\",le=\"20\"} 90
response_latency_ms_bucket{direction=\"inbound\",tls=\"true\",client_id=\"a.shop\",le=\"+Inf\"} 100
response_total{direction=\"outbound\",tls=\"true\",server_id=\"b.shop\",dst_namespace=\"shop\",dst_deployment=\"b\",dst_pod=\"b-1\",classification=\"success\"} 7
response_total{direction=\"outbound\",target_addr=\"10.0.0.9:80\",tls=\"no_identity\",no_tls_reason=\"loopback\",classification=\"success\"} 1
tcp_open_connections{direction=\"inbound\",peer=\"src\",tls=\"true\",client_id=\"a.shop\"} 3
tcp_open_connections{direction=\"inbound\",peer=\"dst\",tls=\"true\",client_id=\"a.shop\"} 300
outbound_http_route_request_statuses_total{parent_kind=\"Service\",parent_name=\"b\",parent_namespace=\"shop\",route_kind=\"default\",route_name=\"http\",http_status=\"200\",error=\"\"} 4
outbound_http_route_request_statuses_total{parent_kind=\"Service\",parent_name=\"b\",parent_namespace=\"shop\",route_kind=\"default\",route_name=\"http\",http_status=\"\",error=\"LOAD_SHED\"} 2
outbound_grpc_route_request_statuses_total{parent_kind=\"Service\",parent_name=\"b\",parent_namespace=\"shop\",route_kind=\"GRPCRoute\",route_name=\"g\",grpc_status=\"NOT_FOUND\",error=\"\"} 1
route_response_total{direction=\"outbound\",dst=\"b.shop:80\",rt_route=\"GET /\",classification=\"failure\"} 6
tulle_failures_total{direction=\"outbound\",cause=\"no-endpoints\"} 2
inbound_http_authz_deny_total{direction=\"inbound\",tls=\"true\",client_id=\"a.shop\"} 8
";

    fn client() -> PeerTls {
        PeerTls::Meshed("a.shop".to_owned())
    }

    #[test]
    fn a_page_is_grouped_by_peer_destination_and_route() {
        let counts = SidecarValues::parse(PAGE);
        let from_client = &counts.sources[&client()];
        assert_eq!(
            (from_client.success, from_client.failure, from_client.denied),
            (90.0, 10.0, 8.0)
        );
        assert_eq!((from_client.connections, from_client.success_rate()), (3.0, Some(0.9)));
        assert_eq!(
            counts.sources[&PeerTls::Plain("no_tls_from_remote".to_owned())].success,
            5.0
        );
        let destinations: Vec<_> = counts
            .destinations
            .keys()
            .map(|destination| (destination.kind.as_str(), destination.name.as_str()))
            .collect();
        assert_eq!(destinations, [("address", "10.0.0.9:80"), ("deployment", "b")]);
        let routes: Vec<_> = counts
            .routes
            .iter()
            .map(|(route, counts)| {
                let Route { parent, name, .. } = route;
                (format!("{parent} {name}"), counts.success, counts.failure)
            })
            .collect();
        let expected = [
            ("server/http default:probe", 90.0, 0.0),
            ("server/http httproute/read", 0.0, 10.0),
            ("b.shop:80 GET /", 0.0, 6.0),
            ("service/b.shop default:http", 4.0, 2.0),
            ("service/b.shop grpcroute/g", 1.0, 0.0),
        ];
        assert_eq!(routes, expected.map(|(name, ok, bad)| (name.to_owned(), ok, bad)));
        assert_eq!(counts.failures[&(Direction::Outbound, "no-endpoints".to_owned())], 2.0);
    }

    #[test]
    fn rates_are_per_second_and_a_restart_counts_from_0() {
        let earlier = SidecarValues::parse(PAGE);
        let mut later = SidecarValues::parse(&PAGE.replace("} 90\n", "} 110\n").replace("} 10\n", "} 2\n"));
        let from_client = &later.rates_since(&earlier, 10.0).per_second.sources[&client()];
        assert_eq!(
            (from_client.success, from_client.failure),
            (2.0, 0.0),
            "a removed series is no increase"
        );
        assert_eq!(from_client.connections, 3.0, "open connections are a gauge");
        later.started_at = earlier.started_at + 60.0;
        let from_client = &later.rates_since(&earlier, 10.0).per_second.sources[&client()];
        assert_eq!(
            (from_client.success, from_client.failure),
            (11.0, 0.2),
            "the earlier page does not count after a restart"
        );
        let new = later.rates_since(&SidecarValues::default(), 10.0).per_second;
        assert_eq!(new.sources[&client()].success, 11.0);
    }

    #[test]
    fn quantiles_lie_within_their_buckets() {
        let counts = &SidecarValues::parse(PAGE).sources[&client()];
        for (share, expected) in [(0.25, 5.0), (0.5, 10.0), (0.7, 15.0), (0.9, 20.0), (0.99, 20.0)] {
            assert_eq!(counts.quantile_ms(share), Some(expected), "{share}");
        }
        assert_eq!(TrafficValues::default().quantile_ms(0.5), None);
    }

    #[test]
    fn request_counts_add_up() {
        let one = SidecarValues::parse(PAGE).sources[&client()].clone();
        let mut sum = one.clone();
        sum.add(&one);
        assert_eq!((sum.success, sum.connections), (180.0, 6.0));
        assert_eq!(sum.quantile_ms(0.5), one.quantile_ms(0.5));
        assert!(!sum.is_idle() && TrafficValues::default().is_idle());
    }
}
