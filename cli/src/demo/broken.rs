//! What is broken in the running mesh: how it is done, mended, and noticed to work again.

use std::time::Duration;

use anyhow::Context as _;
use tokio::time::Instant;
use tulle_core::metrics::samples::Samples;

use super::faults::{Answer, Fault, Request};
use super::run::Demo;
use super::topology::App;

/// A fault that is in force.
pub(super) struct Broken {
    pub(super) what: Target,
    pub(super) since: Instant,
    /// When it is to be repaired; none once it has been and we wait for it to work again.
    repair_at: Option<Instant>,
    /// Failures on permitted edges before it began.
    failed_before: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Target {
    ControlPlane,
    /// The application of this workload.
    Replica(String),
    /// The issuer, replaced at this time in seconds since 1970.
    Certificate {
        replaced_at: f64,
    },
}

impl Demo {
    /// Breaks something, or says why not.
    pub(super) async fn break_now(&mut self, request: Request) -> Answer {
        match self.try_break(request).await {
            Ok(what) => {
                self.event(&what);
                Answer::Done(what)
            }
            Err(err) => Answer::Refused(format!("{err:#}")),
        }
    }

    async fn try_break(&mut self, request: Request) -> anyhow::Result<String> {
        let length = Duration::try_from_secs_f64(request.seconds).context("for how long?")?;
        let what = match request.fault {
            Fault::ControlPlane => Target::ControlPlane,
            Fault::Replica => Target::Replica(self.victim().context("web has no replica to break")?),
            Fault::Certificate => Target::Certificate {
                replaced_at: unix_time(),
            },
        };
        if let Some(broken) = self.broken.iter().find(|broken| broken.what.name() == what.name()) {
            anyhow::bail!("{} is broken already", broken.what.name());
        }
        let (said, repair_at) = match &what {
            Target::ControlPlane => {
                self.stage.control.process.kill().await;
                (
                    format!("control plane killed; back in {length:?}"),
                    Some(Instant::now() + length),
                )
            }
            Target::Replica(name) => {
                let app = self
                    .stage
                    .apps
                    .get_mut(name)
                    .context("this replica has no application")?;
                app.process.kill().await;
                (
                    format!("{name}'s application killed; back in {length:?}"),
                    Some(Instant::now() + length),
                )
            }
            Target::Certificate { .. } => {
                self.stage.credentials.issue(&self.stage.topology)?;
                (
                    "issuer replaced; sidecars take certificates of the new one as they renew theirs".to_owned(),
                    None,
                )
            }
        };
        self.broken.push(Broken {
            what,
            since: Instant::now(),
            repair_at,
            failed_before: self.failed(),
        });
        Ok(said)
    }

    /// The replica to break: a fast one, which traffic would miss.
    fn victim(&self) -> Option<String> {
        let web = self.stage.topology.workloads.iter();
        web.filter_map(|workload| match workload.app {
            App::Web(delay) => Some((delay, workload.name.clone())),
            _ => None,
        })
        .min()
        .map(|(_, name)| name)
    }

    /// Starts again what was broken long enough, and says when it works.
    pub(super) async fn repair(&mut self) -> anyhow::Result<()> {
        let now = Instant::now();
        let logs = self.stage.dir.logs();
        let mut events = Vec::new();
        let mut still_broken = Vec::new();
        for mut broken in std::mem::take(&mut self.broken) {
            if let Some(at) = broken.repair_at {
                if at <= now {
                    let service = match &broken.what {
                        Target::ControlPlane => Some(&mut self.stage.control),
                        Target::Replica(name) => self.stage.apps.get_mut(name),
                        Target::Certificate { .. } => None,
                    };
                    if let Some(service) = service {
                        service.restart(&logs)?;
                    }
                    broken.repair_at = None;
                }
                still_broken.push(broken);
                continue;
            }
            let works = match &broken.what {
                Target::ControlPlane => self.stage.control.is_ready().await,
                Target::Replica(_) => true,
                Target::Certificate { replaced_at } => self.all_renewed_since(*replaced_at),
            };
            if works {
                let failed = self.failed() - broken.failed_before;
                let took = broken.since.elapsed().as_secs();
                events.push(format!(
                    "{} after {took} s; {failed} requests failed meanwhile",
                    broken.what.mended()
                ));
            } else {
                still_broken.push(broken);
            }
        }
        self.broken = still_broken;
        for event in events {
            self.event(&event);
        }
        Ok(())
    }

    fn all_renewed_since(&self, unix_time: f64) -> bool {
        let renewed = |samples: &Samples| {
            samples
                .of(REFRESHED_AT, &[])
                .any(|sample| sample.value > unix_time + ISSUER_SETTLES.as_secs_f64())
        };
        !self.scrapes.is_empty() && self.scrapes.values().all(renewed)
    }
}

impl Target {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::ControlPlane => "the control plane",
            Self::Replica(name) => name,
            Self::Certificate { .. } => "the issuer",
        }
    }

    /// The log name of the process that is down.
    pub(super) fn process(&self) -> String {
        match self {
            Self::ControlPlane => "control".to_owned(),
            Self::Replica(name) => format!("{name}-app"),
            Self::Certificate { .. } => String::new(),
        }
    }

    fn mended(&self) -> String {
        match self {
            Self::ControlPlane => "control plane ready again".to_owned(),
            Self::Replica(name) => format!("{name}'s application started again"),
            Self::Certificate { .. } => "all sidecars hold certificates of the new issuer".to_owned(),
        }
    }
}

fn unix_time() -> f64 {
    std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// How long the identity service takes to notice a new issuer.
const ISSUER_SETTLES: Duration = Duration::from_secs(1);
const REFRESHED_AT: &str = "control_identity_cert_refresh_timestamp_seconds";
