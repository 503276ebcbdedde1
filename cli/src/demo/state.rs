//! The running demo: the mesh, its traffic and its events.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::active_fault::ActiveFault;
use super::edges::{Client, Edge};
use super::faults::Listener;
use super::load_reports::Reports;
use super::mesh::DemoMesh;
use super::options::Balancer;
use super::process::Process;
use super::rows::Scrapes;

pub(super) struct Demo {
    pub(super) mesh: DemoMesh,
    pub(super) edges: Vec<Edge>,
    pub(super) reports: Vec<Reports>,
    pub(super) generators: Vec<Process>,
    /// The tasks that read the reports of the load generators. Dropping the set ends them.
    pub(super) _readers: JoinSet<()>,
    /// The lines that the load generators print, each with the index of its edge.
    pub(super) lines: mpsc::Receiver<(usize, String)>,
    pub(super) scrapes: Scrapes,
    pub(super) listener: Listener,
    pub(super) started_at: Instant,
    pub(super) events: Vec<String>,
    pub(super) active_faults: Vec<ActiveFault>,
    /// Failures that no injected fault explains.
    pub(super) unexpected_failures: Vec<String>,
    pub(super) balancer: Balancer,
}

impl Demo {
    /// Number of failures on permitted edges so far.
    pub(super) fn failed(&self) -> u64 {
        let permitted = self
            .edges
            .iter()
            .zip(&self.reports)
            .filter(|(edge, _)| edge.client == Client::Load);
        permitted.map(|(_, reports)| reports.failed).sum()
    }

    pub(super) fn record_event(&mut self, description: &str) {
        self.events
            .push(format!("{}  {description}", format_clock(self.started_at.elapsed())));
    }
}

pub(super) fn format_clock(elapsed: Duration) -> String {
    let seconds = elapsed.as_secs();
    format!("{:02}:{:02}", seconds / 60, seconds % 60)
}
