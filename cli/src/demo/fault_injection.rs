//! Fault injection: injects faults into the running mesh, repairs them and detects recovery.

use std::time::Duration;

use anyhow::Context as _;
use tokio::time::Instant;
use tulle_core::metrics::samples::Samples;

use super::active_fault::{ActiveFault, Target};
use super::faults::{Fault, FaultRequest, FaultResponse};
use super::state::Demo;
use super::topology::App;

impl Demo {
    /// Injects a fault, or returns why it cannot.
    pub(super) async fn inject_fault(&mut self, request: FaultRequest) -> FaultResponse {
        match self.try_inject_fault(request).await {
            Ok(what) => {
                self.record_event(&what);
                FaultResponse::Done(what)
            }
            Err(err) => FaultResponse::Refused(format!("{err:#}")),
        }
    }

    async fn try_inject_fault(&mut self, request: FaultRequest) -> anyhow::Result<String> {
        let length = Duration::try_from_secs_f64(request.seconds).context("the duration of the fault is invalid")?;
        let what = match request.fault {
            Fault::ControlPlane => Target::ControlPlane,
            Fault::Replica => Target::Replica(self.select_replica().context("web has no replica to break")?),
            Fault::Issuer => Target::Issuer {
                replaced_at: unix_time(),
            },
        };
        if let Some(broken) = self
            .active_faults
            .iter()
            .find(|broken| broken.target.name() == what.name())
        {
            anyhow::bail!("this fault is active already: {}", broken.target.problem());
        }
        let (description, repair_at) = match &what {
            Target::ControlPlane => {
                self.mesh.control.process.kill().await;
                (
                    format!("control plane killed; back in {length:?}"),
                    Some(Instant::now() + length),
                )
            }
            Target::Replica(name) => {
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
            Target::Issuer { .. } => {
                self.mesh.credentials.rotate_issuer(&self.mesh.topology)?;
                (
                    "issuer replaced; each sidecar gets a certificate of the new issuer at its next renewal".to_owned(),
                    None,
                )
            }
        };
        self.active_faults.push(ActiveFault {
            target: what,
            since: Instant::now(),
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
        let mut still_broken = Vec::new();
        for mut broken in std::mem::take(&mut self.active_faults) {
            if let Some(at) = broken.repair_at {
                if at <= now {
                    let stopped = match &broken.target {
                        Target::ControlPlane => Some(&mut self.mesh.control),
                        Target::Replica(name) => self.mesh.apps.get_mut(name),
                        Target::Issuer { .. } => None,
                    };
                    if let Some(process) = stopped {
                        process.restart(&logs)?;
                    }
                    broken.repair_at = None;
                }
                still_broken.push(broken);
                continue;
            }
            let works = match &broken.target {
                Target::ControlPlane => self.mesh.control.is_ready().await,
                Target::Replica(_) => true,
                Target::Issuer { replaced_at } => self.all_renewed_since(*replaced_at),
            };
            if works {
                let failed = self.failed() - broken.failed_before;
                let took = broken.since.elapsed().as_secs();
                events.push(format!(
                    "{} after {took} s; {failed} requests failed meanwhile",
                    broken.target.recovery_message()
                ));
            } else {
                still_broken.push(broken);
            }
        }
        self.active_faults = still_broken;
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

/// Time within which the identity service detects a new issuer.
const ISSUER_RELOAD_DELAY: Duration = Duration::from_secs(1);
const CERT_REFRESH_TIME_METRIC: &str = "control_identity_cert_refresh_timestamp_seconds";
