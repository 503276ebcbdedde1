//! What the API answers, as JSON: for `tulle` on the one side, and the server on the other.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::counts::{Direction, Tally};

/// The answer to a question about traffic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer<Row> {
    /// Over how many seconds rates and percentiles were measured.
    pub window_seconds: f64,
    pub rows: Vec<Row>,
    /// Sidecars that did not answer, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<Silent>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Silent {
    pub workload: Named,
    pub reason: String,
}

/// A workload, or who a certificate names.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Named {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    pub kind: String,
    pub name: String,
}

/// What a workload answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Workload {
    #[serde(flatten)]
    pub named: Named,
    /// Pods with a sidecar, of all that run.
    pub meshed: usize,
    pub total: usize,
    #[serde(flatten)]
    pub golden: Golden,
    /// What its sidecars have given up in each second, by `direction/cause`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub causes: BTreeMap<String, f64>,
}

/// Who sends to whom.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Edge {
    pub source: Named,
    pub destination: Named,
    /// What the ends have proved to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_id: Option<String>,
    /// Why it is no mTLS, where it is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_plain: Option<String>,
    #[serde(flatten)]
    pub golden: Golden,
}

/// A route of a workload, or one that it sends by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Route {
    pub workload: Named,
    pub direction: Direction,
    /// The Server, Service or profile that it is of.
    pub parent: String,
    pub name: String,
    #[serde(flatten)]
    pub golden: Golden,
}

/// Success, traffic, latency, and connections.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Golden {
    /// From 0 to 1; none without requests.
    pub success_rate: Option<f64>,
    pub requests_per_second: f64,
    /// Refused by policy, in each second.
    pub denied_per_second: f64,
    pub latency_ms_p50: Option<f64>,
    pub latency_ms_p95: Option<f64>,
    pub latency_ms_p99: Option<f64>,
    pub tcp_connections: f64,
    pub read_bytes_per_second: f64,
    pub write_bytes_per_second: f64,
}

impl From<&Tally> for Golden {
    fn from(tally: &Tally) -> Self {
        Self {
            success_rate: tally.success_rate(),
            requests_per_second: tally.requests(),
            denied_per_second: tally.denied,
            latency_ms_p50: tally.quantile_ms(0.5),
            latency_ms_p95: tally.quantile_ms(0.95),
            latency_ms_p99: tally.quantile_ms(0.99),
            tcp_connections: tally.connections,
            read_bytes_per_second: tally.read_bytes,
            write_bytes_per_second: tally.written_bytes,
        }
    }
}
