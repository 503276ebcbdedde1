//! Metrics of a measurement.

use std::collections::BTreeMap;

/// The metrics of one measurement.
pub(super) type Sample = BTreeMap<Metric, f64>;

/// The metrics. Their names are used in the JSON and in `budgets.toml`.
#[derive(serde::Serialize, serde::Deserialize, Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[serde(rename_all = "snake_case")]
pub(super) enum Metric {
    RequestsPerSecond,
    /// Requests per second, in percent of the requests per second that were measured directly before, without the slow clients of
    /// the row.
    SpeedPercent,
    P50Us,
    P99Us,
    /// The p99 latency, as a multiple of the p99 latency that was measured directly before, without the attack of the row.
    #[serde(rename = "p99_times")]
    P99Factor,
    /// Payload of one direction.
    MibPerSecond,
    /// CPU time of the client's sidecar per request, in microseconds. Rows with messages count messages instead of requests.
    ClientCpuUs,
    ServerCpuUs,
    /// Share of the kernel in the CPU time of the client's sidecar, in percent.
    ClientKernelPercent,
    ServerKernelPercent,
    /// Resident memory after the load; in the row `hostile`, the maximum during the load.
    ClientRssMib,
    ServerRssMib,
    /// Growth of the resident memory per idle client; in the row `slow-heads`, per slow client.
    #[serde(rename = "client_idle_kib")]
    ClientKibPerConnection,
    #[serde(rename = "server_idle_kib")]
    ServerKibPerConnection,
    /// Allocations per request.
    ClientAllocations,
    ServerAllocations,
    /// Allocated bytes per request.
    ClientAllocatedBytes,
    ServerAllocatedBytes,
    /// Requests without a successful response.
    Failed,
}
