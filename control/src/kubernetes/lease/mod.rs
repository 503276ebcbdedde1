//! Leader election: of several replicas, the holder of a lease of `coordination.k8s.io/v1` writes.
//!
//! [`new_candidate`] returns a task that competes for one lease, and a [`Leadership`] that reports whether the task holds the
//! lease. Writers run only while they are the leader, and are cancelled when they lose the lease. A leader that cannot reach the
//! API server stops 10 seconds after it sent its last successful renewal (20 seconds with [`LeaseTiming::SPARSE`]). A leader whose
//! process was paused for longer stops when its task runs again, before the task sends a request. Another candidate acquires the
//! lease 27 to 30 seconds after the last renewal.
//!
//! A `LeaseReader` tells a process that does not compete whether another process holds the lease.
//!
//! RBAC: `get`, `create` and `update` on `leases` in the namespace of the lease, and `get` on `deployments` there if an
//! owner is configured.

mod election;
#[cfg(test)]
mod tests;
pub mod timing;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, PostParams};
use kube::{Client, Error, ResourceExt as _};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{debug, info, warn};
use tulle_core::drain::Watch;
use tulle_core::metrics::{Family, Gauge, Labels, Registry};

use crate::kubernetes::lease::election::{Election, LeaseDecision, Record};
use crate::kubernetes::lease::timing::LeaseTiming;

/// Settings of one candidate for a lease.
#[derive(Clone, Debug)]
pub struct Config {
    pub namespace: String,
    pub name: String,
    /// The unique identity of this candidate: the name of its pod.
    pub holder: String,
    /// The field manager of the lease's fields. Default: derived from the user agent.
    pub field_manager: Option<&'static str>,
    /// A Deployment that owns the lease, if it exists. Kubernetes deletes the lease together with the Deployment; candidates then
    /// do not create it again without the Deployment. Default none.
    pub owner: Option<String>,
    pub timing: LeaseTiming,
}

/// Whether this process is the leader. Clones share the state.
#[derive(Clone, Debug)]
pub struct Leadership(watch::Receiver<Role>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Leader,
    Follower,
}

pub struct Candidate {
    config: Config,
    leases: Api<Lease>,
    deployments: Api<Deployment>,
    election: Election,
    /// The lease as last read or written. Fields of other writers are kept.
    lease: Option<Lease>,
    /// Whether the lease had an owner when it last existed.
    had_owner: bool,
    /// Whether a write was ever sent. A write without a response may have been applied.
    has_sent_write: bool,
    role: watch::Sender<Role>,
    gauge: RoleGauge,
}

/// The metric that says whether this process holds the lease. Its series ends when this is dropped.
struct RoleGauge {
    family: Family<Gauge>,
    series: Arc<Gauge>,
    lease: String,
}

/// Reads a lease for which this process does not compete.
pub(crate) struct LeaseReader {
    leases: Api<Lease>,
    name: String,
    election: Election,
}

#[derive(Debug, thiserror::Error)]
enum LeaseError {
    #[error("no response within {0:?}")]
    Timeout(Duration),
    #[error("the Deployment {0} that owned the lease is deleted, and the lease with it")]
    OwnerDeleted(String),
    #[error(transparent)]
    Api(#[from] Error),
}

/// Creates the task that competes for a lease, and the handle to its result.
pub fn new_candidate(client: &Client, config: Config, registry: &Registry) -> (Candidate, Leadership) {
    let (role, leadership) = watch::channel(Role::Follower);
    let candidate = Candidate {
        leases: Api::namespaced(client.clone(), &config.namespace),
        deployments: Api::namespaced(client.clone(), &config.namespace),
        election: Election::new(config.holder.clone(), config.timing),
        lease: None,
        had_owner: false,
        has_sent_write: false,
        role,
        gauge: RoleGauge::new(registry, &config.name),
        config,
    };
    (candidate, Leadership(leadership))
}

impl Leadership {
    pub fn is_leader(&self) -> bool {
        *self.0.borrow() == Role::Leader
    }

    /// Returns the current role and marks it as seen.
    pub fn role(&mut self) -> Role {
        *self.0.borrow_and_update()
    }

    /// Waits for a change of the role since the last call. Never returns after the candidate has ended.
    pub async fn changed(&mut self) -> Role {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        *self.0.borrow_and_update()
    }
}

impl Candidate {
    /// Competes for the lease until the drain. Then releases it if this process holds it.
    pub async fn run(mut self, drain: Watch) {
        let (namespace, name) = (self.config.namespace.clone(), self.config.name.clone());
        info!(
            holder = self.config.holder,
            "competing for the lease {namespace}/{name}"
        );
        tokio::select! {
            // A cancelled request may still succeed, so `release` reads the lease again.
            () = drain.signaled() => {}
            () = self.run_election() => {}
        }
        if self.has_sent_write {
            self.set_role(Role::Follower);
            match timeout(RELEASE_TIMEOUT, self.release()).await {
                Ok(Ok(())) => {}
                Ok(Err(err)) => warn!(error = %err, "the lease {namespace}/{name} was not released"),
                Err(_) => warn!("the lease {namespace}/{name} was not released within {RELEASE_TIMEOUT:?}"),
            }
        }
    }

    async fn run_election(&mut self) {
        loop {
            let tried_at = Instant::now();
            let attempt = if self.election.is_leading(tried_at) {
                self.renew().await
            } else {
                // If this process was paused, leadership may have ended without a change of the role. Writers stop before the
                // response.
                self.update_role();
                self.acquire().await
            };
            if let Err(err) = attempt {
                let error: &dyn std::error::Error = &err;
                warn!(lease = self.config.name, error, "reading or renewing the lease failed");
            }
            let next_at = self
                .election
                .next_attempt_at(tried_at, fastrand::f64())
                .max(Instant::now());
            // Leadership ends on time even if the next attempt is later.
            match self.election.leadership_ends_at() {
                Some(end) if end <= next_at => {
                    self.update_role();
                    sleep_until(end).await;
                    self.update_role();
                }
                _ => self.update_role(),
            }
            sleep_until(next_at).await;
        }
    }

    async fn acquire(&mut self) -> Result<(), LeaseError> {
        match self.read_lease().await? {
            LeaseDecision::Wait => Ok(()),
            LeaseDecision::Acquire => self.write(REQUEST_TIMEOUT).await,
        }
    }

    async fn renew(&mut self) -> Result<(), LeaseError> {
        let left = self
            .election
            .leadership_ends_at()
            .map_or(Duration::ZERO, |end| end.saturating_duration_since(Instant::now()));
        match self.write(left.min(REQUEST_TIMEOUT)).await {
            // Another client changed or deleted the lease: read it again.
            Err(LeaseError::Api(Error::Api(status))) if matches!(status.code, 404 | 409) => self.acquire().await,
            ended => ended,
        }
    }

    async fn read_lease(&mut self) -> Result<LeaseDecision, LeaseError> {
        let sent_at = Instant::now();
        let lease = match with_timeout(REQUEST_TIMEOUT, self.leases.get(&self.config.name)).await {
            Ok(lease) => Some(lease),
            Err(LeaseError::Api(Error::Api(status))) if status.code == 404 => None,
            Err(err) => return Err(err),
        };
        let decision = self.election.observe(lease.as_ref().map(record), sent_at);
        self.store_lease(lease);
        self.update_role();
        Ok(decision)
    }

    /// Writes our identity into the last known version of the lease. If two candidates write the same version, the API
    /// server rejects the second write.
    async fn write(&mut self, limit: Duration) -> Result<(), LeaseError> {
        self.has_sent_write = true;
        let params = PostParams {
            field_manager: self.config.field_manager.map(str::to_owned),
            ..PostParams::default()
        };
        let sent_at;
        let lease = if let Some(lease) = &self.lease {
            let claim = self.renewed_lease(lease);
            sent_at = Instant::now();
            with_timeout(limit, self.leases.replace(&self.config.name, &params, &claim)).await?
        } else {
            let claim = self.renewed_lease(&self.new_lease().await?);
            sent_at = Instant::now();
            with_timeout(limit, self.leases.create(&params, &claim)).await?
        };
        self.election.record_write(record(&lease), sent_at);
        self.store_lease(Some(lease));
        self.update_role();
        Ok(())
    }

    fn store_lease(&mut self, lease: Option<Lease>) {
        if let Some(lease) = &lease {
            self.had_owner = !lease.owner_references().is_empty();
        }
        self.lease = lease;
    }

    fn renewed_lease(&self, lease: &Lease) -> Lease {
        let now = MicroTime(Timestamp::now());
        let before = lease.spec.clone().unwrap_or_default();
        let ours = before.holder_identity.as_deref() == Some(&self.config.holder);
        let transitions = before.lease_transitions.unwrap_or(0);
        let is_new = lease.metadata.resource_version.is_none();
        Lease {
            metadata: lease.metadata.clone(),
            spec: Some(LeaseSpec {
                holder_identity: Some(self.config.holder.clone()),
                lease_duration_seconds: i32::try_from(self.config.timing.duration.as_secs()).ok(),
                acquire_time: before.acquire_time.filter(|_| ours).or_else(|| Some(now.clone())),
                renew_time: Some(now),
                lease_transitions: Some(if ours || is_new { transitions } else { transitions + 1 }),
                ..before
            }),
        }
    }

    async fn new_lease(&self) -> Result<Lease, LeaseError> {
        let owner = match &self.config.owner {
            Some(owner) => self.owner_reference(owner).await?,
            None => None,
        };
        Ok(Lease {
            metadata: ObjectMeta {
                name: Some(self.config.name.clone()),
                namespace: Some(self.config.namespace.clone()),
                owner_references: owner.map(|owner| vec![owner]),
                ..ObjectMeta::default()
            },
            spec: None,
        })
    }

    async fn owner_reference(&self, name: &str) -> Result<Option<OwnerReference>, LeaseError> {
        let Some(deployment) = with_timeout(REQUEST_TIMEOUT, self.deployments.get_opt(name)).await? else {
            // The control plane is being uninstalled. A new lease would have no owner and would not be deleted.
            if self.had_owner {
                return Err(LeaseError::OwnerDeleted(name.to_owned()));
            }
            let lease = &self.config.name;
            warn!(
                lease,
                "Deployment {name} not found; the lease has no owner and will not be deleted when the control plane is uninstalled"
            );
            return Ok(None);
        };
        Ok(deployment.metadata.uid.map(|uid| OwnerReference {
            api_version: "apps/v1".to_owned(),
            kind: "Deployment".to_owned(),
            name: name.to_owned(),
            uid,
            controller: Some(true),
            block_owner_deletion: None,
        }))
    }

    /// Clears the holder if it is this process, so that the next leader does not have to wait.
    async fn release(&mut self) -> Result<(), LeaseError> {
        // A cancelled write may have changed the lease, so its current version is read.
        let Some(mut lease) = self.leases.get_opt(&self.config.name).await? else {
            return Ok(());
        };
        let Some(spec) = &mut lease.spec else { return Ok(()) };
        if spec.holder_identity.as_deref() != Some(&self.config.holder) {
            return Ok(());
        }
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
        spec.renew_time = Some(MicroTime(Timestamp::now()));
        let params = PostParams {
            field_manager: self.config.field_manager.map(str::to_owned),
            ..PostParams::default()
        };
        self.leases.replace(&self.config.name, &params, &lease).await?;
        info!("released the lease {}/{}", self.config.namespace, self.config.name);
        Ok(())
    }

    fn update_role(&self) {
        let leading = self.election.is_leading(Instant::now());
        self.set_role(if leading { Role::Leader } else { Role::Follower });
    }

    fn set_role(&self, role: Role) {
        let changed = self
            .role
            .send_if_modified(|current| std::mem::replace(current, role) != role);
        if changed {
            let (namespace, name) = (&self.config.namespace, &self.config.name);
            self.gauge.series.set(i64::from(role == Role::Leader));
            match role {
                Role::Leader => info!("acquired the lease {namespace}/{name}"),
                Role::Follower => info!("lost the lease {namespace}/{name}"),
            }
        } else if role == Role::Follower {
            let holder = self
                .lease
                .as_ref()
                .and_then(|lease| lease.spec.as_ref()?.holder_identity.as_deref());
            debug!(lease = self.config.name, holder, "this process does not hold the lease");
        }
    }
}

impl RoleGauge {
    fn new(registry: &Registry, lease: &str) -> Self {
        let family = registry.gauge("leader_election_master_status", "Whether this process holds the lease.");
        Self {
            series: family.get(&Labels::new().with("name", lease)),
            family,
            lease: lease.to_owned(),
        }
    }
}

impl Drop for RoleGauge {
    fn drop(&mut self) {
        self.family.remove_series("name", &self.lease);
    }
}

impl LeaseReader {
    pub(crate) fn new(client: &Client, config: &Config) -> Self {
        Self {
            leases: Api::namespaced(client.clone(), &config.namespace),
            name: config.name.clone(),
            election: Election::new(config.holder.clone(), config.timing),
        }
    }

    /// Waits until another process holds the lease.
    pub(crate) async fn wait_until_held(&mut self) {
        while self.is_held().await != Some(true) {
            sleep(READ_INTERVAL).await;
        }
    }

    /// Waits until no process holds the lease.
    pub(crate) async fn wait_until_not_held(&mut self) {
        while self.is_held().await != Some(false) {
            sleep(READ_INTERVAL).await;
        }
    }

    /// Whether another process holds the lease and renews it. `None` if the lease cannot be read.
    async fn is_held(&mut self) -> Option<bool> {
        let sent_at = Instant::now();
        match with_timeout(REQUEST_TIMEOUT, self.leases.get_opt(&self.name)).await {
            Ok(lease) => {
                let decision = self.election.observe(lease.as_ref().map(record), sent_at);
                Some(decision == LeaseDecision::Wait)
            }
            Err(err) => {
                debug!(lease = self.name, error = %err, "reading the lease failed");
                None
            }
        }
    }
}

fn record(lease: &Lease) -> Record {
    let spec = lease.spec.as_ref();
    Record {
        holder: spec.and_then(|spec| spec.holder_identity.clone()).unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
        duration: spec
            .and_then(|spec| u64::try_from(spec.lease_duration_seconds?).ok())
            .map_or(Duration::ZERO, Duration::from_secs),
    }
}

async fn with_timeout<T>(limit: Duration, call: impl Future<Output = Result<T, Error>>) -> Result<T, LeaseError> {
    match timeout(limit, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(LeaseError::Timeout(limit)),
    }
}

/// Timeout of one request. It permits two attempts before leadership ends, and is long enough for a slow API server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval at which a process that does not compete reads a lease.
const READ_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum time for which the release of the lease delays a shutdown.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
