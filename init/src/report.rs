//! The result of a run, as one JSON object.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// `applied`, `unchanged`, `equal`, `different`, `absent`, `removed`, `simulated`, or `failed`.
    pub result: &'static str,
    /// The backend that holds the rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub families: Vec<&'static str>,
    /// The hash that identifies the wanted rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counts: Option<Counts>,
    /// The result for each family: `redirected`, `not redirected: <reason>`, or `skipped: <reason>`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub verified: BTreeMap<&'static str, String>,
    /// What was removed: names of backends and tables that had rules of tulle or Linkerd, routing rules, and routes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<String>,
    /// Duration of each step, in milliseconds.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub durations_ms: BTreeMap<&'static str, f64>,
    pub warnings: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct Counts {
    pub rules: usize,
    pub inbound_skip_ports: usize,
    pub outbound_skip_ports: usize,
    pub inbound_skip_subnets: usize,
    pub outbound_skip_subnets: usize,
}

impl Report {
    /// Logs a warning and adds it to the report.
    pub fn warn(&mut self, warning: String) {
        tracing::warn!("{warning}");
        self.warnings.push(warning);
    }

    pub fn record_duration(&mut self, step: &'static str, time: Duration) {
        self.durations_ms.insert(step, time.as_secs_f64() * 1e3);
    }
}
