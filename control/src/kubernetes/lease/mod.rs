//! Leader election: of several replicas, the one that holds a lease of `coordination.k8s.io/v1` writes.
//!
//! [`candidate`] makes a task that campaigns for one lease, and a [`Leadership`] that says whether it holds it. What
//! depends on leadership looks there before each write. A candidate whose API server is out of reach stops leading 10
//! seconds after the last renewal it sent (20, where renewals are sparse), and others take the lease 30 seconds after
//! they saw it change.
//!
//! Needs `get`, `create` and `update` on `leases` in the namespace of the lease, and `get` on `deployments` there if an
//! owner is named.

mod election;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, PostParams};
use kube::{Client, Error, ResourceExt as _};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};
use tulle_core::drain::Watch;
use tulle_core::metrics::{Gauge, Labels, Registry};

use crate::kubernetes::lease::election::{Election, Record, Verdict};

/// Which lease, and who campaigns for it.
#[derive(Clone, Debug)]
pub struct Config {
    pub namespace: String,
    pub name: &'static str,
    /// The name of this candidate, different from all others': the name of its pod.
    pub holder: String,
    /// Recorded as the writer of the lease's fields. Default: derived from the user agent.
    pub field_manager: Option<&'static str>,
    /// A Deployment that the lease is deleted with, and not made again without. Default none.
    pub owner: Option<String>,
    pub timing: Timing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long candidates wait after the last renewal they saw.
    pub duration: Duration,
    /// How often the holder renews.
    pub renew_interval: Duration,
    /// How long the holder leads after the last renewal it sent.
    pub renew_deadline: Duration,
    /// How often candidates look, and how soon a failed renewal is tried again.
    pub retry_interval: Duration,
}

/// Whether this process leads; clones see the same.
#[derive(Clone, Debug)]
pub struct Leadership(watch::Receiver<Role>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Leader,
    Follower,
}

/// Campaigns for a lease.
pub struct Candidate {
    config: Config,
    leases: Api<Lease>,
    deployments: Api<Deployment>,
    election: Election,
    /// The lease as it was read or written last; what others wrote into it is kept.
    lease: Option<Lease>,
    /// Whether the lease, when it was there last, had an owner.
    was_owned: bool,
    role: watch::Sender<Role>,
    gauge: Arc<Gauge>,
}

#[derive(Debug, thiserror::Error)]
enum LeaseError {
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("the Deployment {0} that owned the lease is gone, and the lease with it")]
    Orphaned(String),
    #[error(transparent)]
    Api(#[from] Error),
}

impl Timing {
    /// 30 s, renewed every 2 s, given up after 10 s, retried after 2 s.
    pub const FREQUENT: Self = Self {
        duration: Duration::from_secs(30),
        renew_interval: Duration::from_secs(2),
        renew_deadline: Duration::from_secs(10),
        retry_interval: Duration::from_secs(2),
    };

    /// As [`FREQUENT`](Self::FREQUENT) for candidates, with a fifth of the renewals.
    pub const SPARSE: Self = Self {
        renew_interval: Duration::from_secs(10),
        renew_deadline: Duration::from_secs(20),
        ..Self::FREQUENT
    };
}

/// A task that campaigns for a lease, and what it comes to.
pub fn candidate(client: &Client, config: Config, registry: &Registry) -> (Candidate, Leadership) {
    let (role, leadership) = watch::channel(Role::Follower);
    let gauge = registry.gauge("leader_election_master_status", "Whether this process holds the lease.");
    let candidate = Candidate {
        leases: Api::namespaced(client.clone(), &config.namespace),
        deployments: Api::namespaced(client.clone(), &config.namespace),
        election: Election::new(config.holder.clone(), config.timing),
        lease: None,
        was_owned: false,
        role,
        gauge: gauge.get(&Labels::new().with("name", config.name)),
        config,
    };
    (candidate, Leadership(leadership))
}

impl Leadership {
    pub fn is_leader(&self) -> bool {
        *self.0.borrow() == Role::Leader
    }

    /// The role as it is now, which counts as seen.
    pub fn role(&mut self) -> Role {
        *self.0.borrow_and_update()
    }

    /// Waits for a role that has not been seen; never ends once the campaign is over.
    pub async fn changed(&mut self) -> Role {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        *self.0.borrow_and_update()
    }
}

impl Candidate {
    /// Campaigns until the drain, and then gives the lease back if it holds it.
    pub async fn run(mut self, drain: Watch) {
        let (namespace, name) = (self.config.namespace.clone(), self.config.name);
        info!(
            holder = self.config.holder,
            "campaigning for the lease {namespace}/{name}"
        );
        tokio::select! {
            // A request that is cut here may still be carried out; the release asks anew.
            () = drain.signaled() => {}
            () = self.campaign() => {}
        }
        if self.election.is_leading(Instant::now()) {
            self.tell(Role::Follower);
            match timeout(RELEASE_LIMIT, self.release()).await {
                Ok(Ok(())) => info!("released the lease {namespace}/{name}"),
                Ok(Err(err)) => warn!(error = %err, "the lease {namespace}/{name} was not released"),
                Err(_) => warn!("the lease {namespace}/{name} was not released within {RELEASE_LIMIT:?}"),
            }
        }
    }

    async fn campaign(&mut self) {
        loop {
            let tried_at = Instant::now();
            let attempt = if self.election.is_leading(tried_at) {
                self.renew().await
            } else {
                self.acquire().await
            };
            if let Err(err) = attempt {
                let error: &dyn std::error::Error = &err;
                warn!(lease = self.config.name, error, "asking for the lease failed");
            }
            let next_at = self.election.next_at(tried_at, fastrand::f64()).max(Instant::now());
            // Leadership ends on time even if the next attempt is later.
            match self.election.leads_until() {
                Some(end) if end <= next_at => {
                    self.tell_role();
                    sleep_until(end).await;
                    self.tell_role();
                }
                _ => self.tell_role(),
            }
            sleep_until(next_at).await;
        }
    }

    async fn acquire(&mut self) -> Result<(), LeaseError> {
        match self.look().await? {
            Verdict::Wait => Ok(()),
            Verdict::Take => self.write(REQUEST_LIMIT).await,
        }
    }

    async fn renew(&mut self) -> Result<(), LeaseError> {
        let left = self
            .election
            .leads_until()
            .map_or(Duration::ZERO, |end| end.saturating_duration_since(Instant::now()));
        match self.write(left.min(REQUEST_LIMIT)).await {
            // Somebody changed the lease: who holds it now?
            Err(LeaseError::Api(Error::Api(status))) if matches!(status.code, 404 | 409) => self.acquire().await,
            ended => ended,
        }
    }

    /// Reads the lease.
    async fn look(&mut self) -> Result<Verdict, LeaseError> {
        let asked_at = Instant::now();
        let lease = match within(REQUEST_LIMIT, self.leases.get(self.config.name)).await {
            Ok(lease) => Some(lease),
            Err(LeaseError::Api(Error::Api(status))) if status.code == 404 => None,
            Err(err) => return Err(err),
        };
        let verdict = self.election.observe(lease.as_ref().map(record), asked_at);
        self.keep(lease);
        self.tell_role();
        Ok(verdict)
    }

    /// Writes our name into the lease as it was seen last. Of two who saw the same, the API server refuses the second.
    async fn write(&mut self, limit: Duration) -> Result<(), LeaseError> {
        let params = PostParams {
            field_manager: self.config.field_manager.map(str::to_owned),
            ..PostParams::default()
        };
        let sent_at;
        let lease = if let Some(lease) = &self.lease {
            let claim = self.claim(lease);
            sent_at = Instant::now();
            within(limit, self.leases.replace(self.config.name, &params, &claim)).await?
        } else {
            let claim = self.claim(&self.new_lease().await?);
            sent_at = Instant::now();
            within(limit, self.leases.create(&params, &claim)).await?
        };
        self.election.wrote(record(&lease), sent_at);
        self.keep(Some(lease));
        self.tell_role();
        Ok(())
    }

    fn keep(&mut self, lease: Option<Lease>) {
        if let Some(lease) = &lease {
            self.was_owned = !lease.owner_references().is_empty();
        }
        self.lease = lease;
    }

    fn claim(&self, lease: &Lease) -> Lease {
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
            Some(owner) => self.owner(owner).await?,
            None => None,
        };
        Ok(Lease {
            metadata: ObjectMeta {
                name: Some(self.config.name.to_owned()),
                namespace: Some(self.config.namespace.clone()),
                owner_references: owner.map(|owner| vec![owner]),
                ..ObjectMeta::default()
            },
            spec: None,
        })
    }

    async fn owner(&self, name: &str) -> Result<Option<OwnerReference>, LeaseError> {
        let Some(deployment) = within(REQUEST_LIMIT, self.deployments.get_opt(name)).await? else {
            // This is being uninstalled, and what we made now would stay.
            if self.was_owned {
                return Err(LeaseError::Orphaned(name.to_owned()));
            }
            let lease = self.config.name;
            warn!(
                lease,
                "there is no Deployment {name} to own the lease, so it will stay when this is uninstalled"
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

    /// Empties the holder, so that the next leader need not wait.
    async fn release(&mut self) -> Result<(), LeaseError> {
        // A renewal may have been under way, so that only the API server knows the version.
        let mut lease = self.leases.get(self.config.name).await?;
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
        self.leases.replace(self.config.name, &params, &lease).await?;
        Ok(())
    }

    fn tell_role(&self) {
        let leading = self.election.is_leading(Instant::now());
        self.tell(if leading { Role::Leader } else { Role::Follower });
    }

    fn tell(&self, role: Role) {
        let changed = self.role.send_if_modified(|told| std::mem::replace(told, role) != role);
        if changed {
            let (namespace, name) = (&self.config.namespace, self.config.name);
            self.gauge.set(i64::from(role == Role::Leader));
            match role {
                Role::Leader => info!("leading by the lease {namespace}/{name}"),
                Role::Follower => info!("no longer leading by the lease {namespace}/{name}"),
            }
        } else if role == Role::Follower {
            let holder = self
                .lease
                .as_ref()
                .and_then(|lease| lease.spec.as_ref()?.holder_identity.as_deref());
            debug!(lease = self.config.name, holder, "following");
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

async fn within<T>(limit: Duration, call: impl Future<Output = Result<T, Error>>) -> Result<T, LeaseError> {
    match timeout(limit, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(LeaseError::Timeout(limit)),
    }
}

/// Long enough for a busy API server, short enough for two attempts before leadership ends.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// What a shutdown waits for at most.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);
