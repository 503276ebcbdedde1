//! Fault injection: injects faults into the running mesh, repairs them and detects recovery.

use std::time::Duration;

use anyhow::Context as _;
use tokio::time::Instant;
use tulle_core::metrics::samples::Samples;

use super::active_fault::{ActiveFault, FaultTarget};
use super::faults::{Fault, FaultRequest, FaultResponse};
use super::state::Demo;
use super::topology::App;

impl Demo {
    /// Injects a fault. The response says what was done, or why it is not possible.
    pub(super) async fn inject_fault(&mut self, request: FaultRequest) -> FaultResponse {
        match self.try_inject_fault(request).await {
            Ok(description) => {
                self.record_event(&description);
                FaultResponse::Done(description)
            }
            Err(err) => FaultResponse::Refused(format!("{err:#}")),
        }
    }

    async fn try_inject_fault(&mut self, request: FaultRequest) -> anyhow::Result<String> {
        let length = Duration::try_from_secs_f64(request.seconds).context("the duration of the fault is invalid")?;
        let target = match request.fault {
            Fault::ControlPlane => FaultTarget::ControlPlane,
            Fault::Replica => FaultTarget::Replica(self.select_replica().context("web has no replica to break")?),
            Fault::Issuer => FaultTarget::Issuer {
                replaced_at: unix_time(),
            },
        };
        if let Some(fault) = self
            .active_faults
            .iter()
            .find(|fault| fault.target.name() == target.name())
        {
            anyhow::bail!("this fault is active already: {}", fault.target.problem());
        }
        let (description, repair_at) = match &target {
            FaultTarget::ControlPlane => {
                self.mesh.control.process.kill().await;
                (
                    format!("control plane killed; back in {length:?}"),
                    Some(Instant::now() + length),
                )
            }
            FaultTarget::Replica(name) => {
                let app = self
                    .mesh
                    .apps
                    .get_mut(name)
                    .context("this replica has no application")?;
                app.process.kill().await;
                (
                    format!("{name}'s application killed; back in {length:?}"),
                    Some(Instant::now() + length),
                )
            }
            FaultTarget::Issuer { .. } => {
                self.mesh.credentials.rotate_issuer(&self.mesh.topology)?;
                (
                    "issuer replaced; each sidecar gets a certificate of the new issuer at its next renewal".to_owned(),
                    None,
                )
            }
        };
        self.active_faults.push(ActiveFault {
            target,
            injected_at: Instant::now(),
            repair_at,
            failed_before: self.failed(),
        });
        Ok(description)
    }

    /// Selects the replica to stop: a fast one, because it serves most of the traffic.
    fn select_replica(&self) -> Option<String> {
        let web = self.mesh.topology.workloads.iter();
        web.filter_map(|workload| match workload.app {
            App::Web(delay) => Some((delay, workload.name.clone())),
            _ => None,
        })
        .min()
        .map(|(_, name)| name)
    }

    /// Repairs faults whose time is over, and reports recovery.
    pub(super) async fn repair(&mut self) -> anyhow::Result<()> {
        let now = Instant::now();
        let logs = self.mesh.dir.logs();
        let mut events = Vec::new();
        let mut active_faults = Vec::new();
        for mut fault in std::mem::take(&mut self.active_faults) {
            if let Some(at) = fault.repair_at {
                if at <= now {
                    let stopped = match &fault.target {
                        FaultTarget::ControlPlane => Some(&mut self.mesh.control),
                        FaultTarget::Replica(name) => self.mesh.apps.get_mut(name),
                        FaultTarget::Issuer { .. } => None,
                    };
                    if let Some(process) = stopped {
                        process.restart(&logs)?;
                    }
                    fault.repair_at = None;
                }
                active_faults.push(fault);
                continue;
            }
            let has_recovered = match &fault.target {
                FaultTarget::ControlPlane => self.mesh.control.is_ready().await,
                FaultTarget::Replica(_) => true,
                FaultTarget::Issuer { replaced_at } => self.all_renewed_since(*replaced_at),
            };
            if has_recovered {
                let failed = self.failed() - fault.failed_before;
                let recovery_seconds = fault.injected_at.elapsed().as_secs();
                events.push(format!(
                    "{} after {recovery_seconds} s; {failed} requests failed meanwhile",
                    fault.target.recovery_message()
                ));
            } else {
                active_faults.push(fault);
            }
        }
        self.active_faults = active_faults;
        for event in events {
            self.record_event(&event);
        }
        Ok(())
    }

    fn all_renewed_since(&self, unix_time: f64) -> bool {
        let renewed = |samples: &Samples| {
            samples
                .named(CERT_REFRESH_TIME_METRIC, &[])
                .any(|sample| sample.value > unix_time + ISSUER_RELOAD_DELAY.as_secs_f64())
        };
        !self.scrapes.is_empty() && self.scrapes.values().all(renewed)
    }
}

fn unix_time() -> f64 {
    std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// Maximum time until the identity service uses a new issuer.
const ISSUER_RELOAD_DELAY: Duration = Duration::from_secs(1);
const CERT_REFRESH_TIME_METRIC: &str = "control_identity_cert_refresh_timestamp_seconds";
