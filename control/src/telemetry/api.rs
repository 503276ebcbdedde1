//! JSON types of the API, shared by the server and the `tulle` CLI.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::counts::{Direction, TrafficValues};

/// The response to a query for golden metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueryResponse<Row> {
    /// Length of the interval over which rates and percentiles were measured, in seconds.
    pub window_seconds: f64,
    pub rows: Vec<Row>,
    /// Sidecars that could not be scraped, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreachable: Vec<UnreachableSidecar>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnreachableSidecar {
    /// The pod or external workload, not its owner.
    pub workload: ResourceName,
    pub reason: String,
}

/// What a row is about: a workload, owner, service, namespace or address, or the service account or identity of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ResourceName {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    pub kind: String,
    pub name: String,
}

/// Golden metrics of the inbound traffic of a group of workloads, which the API calls a workload. The query selects how workloads
/// are grouped: by owner, Service or namespace, or each pod for itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadMetrics {
    #[serde(flatten)]
    pub resource: ResourceName,
    /// The other cluster that the group is in; empty for this cluster. The traffic of another cluster is what the observed clients in
    /// this cluster send there, and `meshed` and `total` are 0.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cluster: String,
    /// Number of running pods and external workloads with a sidecar; `total` also counts those without.
    pub meshed: usize,
    pub total: usize,
    #[serde(flatten)]
    pub golden: GoldenMetrics,
    /// Failures per second of its sidecars, by `direction/cause`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub causes: BTreeMap<String, f64>,
}

/// Traffic from the workloads of one owner to those of another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeMetrics {
    pub source: ResourceName,
    pub destination: ResourceName,
    /// The cluster of the destination, if it is not that of the client.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub destination_cluster: String,
    /// TLS identity of the client; `server_id` is that of the server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_id: Option<String>,
    /// Reason why the connection is not mTLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_tls_reason: Option<String>,
    #[serde(flatten)]
    pub golden: GoldenMetrics,
}

/// A route that the workloads of a group serve, or use for their outbound requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteMetrics {
    /// The group: an owner, unless the query names another kind.
    pub workload: ResourceName,
    pub direction: Direction,
    /// The Server, Service or ServiceProfile of the route.
    pub parent: String,
    pub name: String,
    #[serde(flatten)]
    pub golden: GoldenMetrics,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GoldenMetrics {
    /// From 0 to 1; absent without requests.
    pub success_rate: Option<f64>,
    pub requests_per_second: f64,
    /// Requests and TCP connections denied by policy, per second.
    pub denied_per_second: f64,
    pub latency_ms_p50: Option<f64>,
    pub latency_ms_p95: Option<f64>,
    pub latency_ms_p99: Option<f64>,
    pub tcp_connections: f64,
    pub read_bytes_per_second: f64,
    pub write_bytes_per_second: f64,
}

impl From<&TrafficValues> for GoldenMetrics {
    fn from(rates: &TrafficValues) -> Self {
        Self {
            success_rate: rates.success_rate(),
            requests_per_second: rates.requests(),
            denied_per_second: rates.denied,
            latency_ms_p50: rates.quantile_ms(0.5),
            latency_ms_p95: rates.quantile_ms(0.95),
            latency_ms_p99: rates.quantile_ms(0.99),
            tcp_connections: rates.connections,
            read_bytes_per_second: rates.read_bytes,
            write_bytes_per_second: rates.written_bytes,
        }
    }
}
