//! Follows one cluster: reads its credentials, lists and watches its objects, and connects again when the credentials change.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::api::core::v1::Secret;
use kube::{Client, ResourceExt as _};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};
use tulle_core::drain::Watch;
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::{Gauge, Registry};
use tulle_core::readiness::Readiness;

use crate::cluster::remote_clusters::{AllClusters, RemoteCluster};
use crate::cluster::{Cluster, GaugeGuard};
use crate::kubernetes;
use crate::kubernetes::remote_credentials::{EXPIRY_WARNING, LinkedCluster, read_linked_cluster, secret_name};
use crate::kubernetes::request_layer::RequestRate;
use crate::kubernetes::watches::{SecretState, SecretWatch};
use crate::source::kubernetes::{RemoteConfig, SourceError, run_remote};

pub(super) struct RemoteClusterWatch {
    /// The cluster's name in labels and annotations.
    pub(super) name: Arc<str>,
    pub(super) clusters: AllClusters,
    /// Client of the local API server.
    pub(super) client: Client,
    pub(super) registry: Registry,
    pub(super) gauges: Gauges,
    /// Time after the deletion of the Secret until the endpoints are removed.
    pub(super) unlink_delay: Duration,
    pub(super) drain: Watch,
}

pub(super) struct Gauges {
    /// The number of clusters whose objects are listed.
    pub(super) n_listed: Arc<Gauge>,
    /// 1 while the endpoints of this cluster are known and up to date.
    pub(super) is_up_to_date: Arc<Gauge>,
}

/// The watches of the other cluster, which end when it is dropped.
struct Connection {
    watches: JoinSet<Result<(), SourceError>>,
    _listed: GaugeGuard,
}

impl RemoteClusterWatch {
    pub(super) async fn run(self) -> Infallible {
        self.set_state(RemoteCluster::Pending { since: Instant::now() });
        let namespace = &self.clusters.local.config().controller_namespace;
        let mut watch = SecretWatch::new(self.client.clone(), namespace, &secret_name(&self.name));
        // The connection with the old credentials stays until one with the new credentials has listed all objects.
        let mut connection: Option<Connection> = None;
        loop {
            let state = watch.state();
            match &state {
                SecretState::Present(secret) => {
                    if connection.is_none()
                        && let RemoteCluster::Unlinked = self.clusters.remote.get(&self.name)
                    {
                        self.set_state(RemoteCluster::Pending { since: Instant::now() });
                    }
                    connection = tokio::select! {
                        () = watch.changed_from(&state) => continue,
                        connected = self.connect(secret) => match connected {
                            Ok(connected) => Some(connected),
                            Err(cause) => {
                                let (cluster, secret) = (&self.name, secret.name_any());
                                warn!(%cluster, secret, cause, "the Secret gives no access to the cluster; its last endpoints stay");
                                connection
                            }
                        },
                    };
                    tokio::select! {
                        () = watch.changed_from(&state) => {}
                        cause = wait_for_watch_end(&mut connection) => {
                            warn!(cluster = %self.name, cause, "the watches of the cluster have ended; connecting again");
                            sleep(RECONNECT_DELAY).await;
                        }
                    }
                    continue;
                }
                SecretState::Absent => {
                    if connection.is_some() {
                        // A tool can replace the Secret by deleting and creating it.
                        tokio::select! {
                            () = watch.changed_from(&state) => continue,
                            () = sleep(self.unlink_delay) => {}
                        }
                        info!(cluster = %self.name, "the cluster is no longer linked, because its Secret was deleted");
                        connection = None;
                        self.gauges.is_up_to_date.set(0);
                    }
                    self.set_state(RemoteCluster::Unlinked);
                }
                SecretState::Unreadable(cause) => {
                    let (cluster, secret) = (&self.name, secret_name(&self.name));
                    warn!(
                        %cluster, namespace, secret, cause,
                        "the Secret of the cluster cannot be read; if that is forbidden, name the Link in `controllers` of the chart \
                         tulle-multicluster, or the cluster in `linkedClusters` of tulle-control-plane"
                    );
                }
                SecretState::Unknown => {}
            }
            watch.changed_from(&state).await;
        }
    }

    fn set_state(&self, state: RemoteCluster) {
        self.clusters.remote.set(&self.name, state);
    }

    /// Connects to the cluster, and serves its endpoints when all its objects are listed.
    async fn connect(&self, secret: &Secret) -> Result<Connection, String> {
        let LinkedCluster {
            access,
            trust_domain,
            cluster_domain,
        } = read_linked_cluster(secret, &self.name)
            .await
            .map_err(|err| ErrorChain(&err).to_string())?;
        self.warn_if_token_expires_soon(access.expires_at);
        let server = access.config.cluster_url.to_string();
        let client = kubernetes::remote_client(access.config, REQUEST_RATE, &self.registry, &self.name)
            .map_err(|err| ErrorChain(&err).to_string())?;
        info!(cluster = %self.name, server, "watching the endpoints in a cluster");
        let local = self.clusters.local.config();
        let cluster = Cluster::new(
            local.for_remote_cluster(&self.name, &trust_domain, &cluster_domain),
            &self.registry,
        );
        // Has a reason for each stale kind, so it is ready while no kind is stale.
        let stale_kinds = Readiness::new();
        let config = RemoteConfig {
            cluster: self.name.clone(),
            endpoints_source: local.endpoints_source,
            stale_kinds: stale_kinds.clone(),
        };
        let mut watches = JoinSet::new();
        watches.spawn(run_remote(client, config, cluster.sink(), self.drain.clone()));
        tokio::select! {
            () = cluster.synced() => {}
            Some(ended) = watches.join_next() => return Err(end_cause(ended).await),
        }
        info!(cluster = %self.name, "the endpoints in the cluster are known");
        self.set_state(RemoteCluster::Listed(cluster));
        let is_up_to_date = self.gauges.is_up_to_date.clone();
        watches.spawn(async move {
            loop {
                is_up_to_date.set(i64::from(stale_kinds.is_ready()));
                sleep(GAUGE_UPDATE_INTERVAL).await;
            }
        });
        Ok(Connection {
            watches,
            _listed: GaugeGuard::new(self.gauges.n_listed.clone()),
        })
    }

    fn warn_if_token_expires_soon(&self, expires_at: Option<u64>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let left = expires_at.map(|at| at.saturating_sub(now.as_secs()));
        if let Some(left) = left.filter(|left| *left < EXPIRY_WARNING.as_secs()) {
            let (secret, hours) = (secret_name(&self.name), left / 3600);
            warn!(cluster = %self.name, secret, hours, "the token for the cluster expires soon; create the Secret again");
        }
    }
}

/// Waits until a watch ends by a panic, and returns the cause. Waits forever without a connection, and after the drain.
async fn wait_for_watch_end(connection: &mut Option<Connection>) -> String {
    match connection {
        Some(connection) => match connection.watches.join_next().await {
            Some(ended) => end_cause(ended).await,
            None => std::future::pending().await,
        },
        None => std::future::pending().await,
    }
}

async fn end_cause(ended: Result<Result<(), SourceError>, JoinError>) -> String {
    match ended {
        // The drain has ended the watch, and the process is about to end.
        Ok(Ok(())) => std::future::pending().await,
        Ok(Err(err)) => err.to_string(),
        Err(err) => err.to_string(),
    }
}

/// Rate of the requests to another cluster, which are lists and watches of a few kinds.
const REQUEST_RATE: RequestRate = RequestRate { qps: 50.0, burst: 100 };
const RECONNECT_DELAY: Duration = Duration::from_secs(10);
const GAUGE_UPDATE_INTERVAL: Duration = Duration::from_secs(5);
