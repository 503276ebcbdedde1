//! Follows one cluster: reads its credentials, lists its objects, and starts again when the credentials change.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::{Client, ResourceExt as _};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tracing::{info, warn};
use tulle_core::drain::Watch;
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::{Gauge, Registry};
use tulle_core::names::{annotation, label};

use crate::cluster::Cluster;
use crate::cluster::remote_clusters::{LinkedClusters, RemoteCluster};
use crate::kubernetes::request_layer::RequestRate;
use crate::kubernetes::watches::SecretWatch;
use crate::kubernetes::{self, remote_credentials};
use crate::source::kubernetes::{SourceError, run_remote};

pub(super) struct Follower {
    /// The cluster's name in labels and annotations.
    pub(super) name: Arc<str>,
    pub(super) clusters: LinkedClusters,
    /// Of the API server here.
    pub(super) client: Client,
    pub(super) registry: Registry,
    pub(super) n_listed: Arc<Gauge>,
    pub(super) drain: Watch,
}

/// The objects of the other cluster and their watches, which end when it is dropped.
struct Connection {
    cluster: Cluster,
    watches: JoinSet<Result<(), SourceError>>,
}

/// Adds 1 to the number of clusters until it is dropped.
struct Listed(Arc<Gauge>);

impl Listed {
    fn new(gauge: &Arc<Gauge>) -> Self {
        gauge.add(1);
        Self(gauge.clone())
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

impl Follower {
    pub(super) async fn run(self) -> Infallible {
        let namespace = &self.clusters.local.config().controller_namespace;
        let watch = SecretWatch::new(self.client.clone(), namespace, &secret_name(&self.name));
        // Stays until new credentials have given a complete list.
        let mut current: Option<(Connection, Listed)> = None;
        let mut reported = None;
        loop {
            let secret = watch.current();
            let failure = watch.failure();
            if failure.is_some() && failure != reported {
                let (cluster, secret) = (&self.name, secret_name(&self.name));
                warn!(
                    %cluster, namespace, secret,
                    "the Secret cannot be read; the chart tulle-multicluster permits it for the links in `controllers`"
                );
            }
            reported = failure;
            if watch.is_absent() {
                drop(current.take());
                self.set(RemoteCluster::Unlinked);
            }
            let connect = async {
                let Some(secret) = &secret else {
                    return std::future::pending().await;
                };
                match self.connect(secret).await {
                    Ok(connection) => connection,
                    Err(cause) => {
                        let (cluster, secret) = (&self.name, secret.name_any());
                        warn!(%cluster, secret, cause, "the Secret gives no access to the cluster; its last endpoints stay");
                        std::future::pending().await
                    }
                }
            };
            tokio::select! {
                () = watch.changed_from(secret.as_ref()) => continue,
                connection = connect => {
                    info!(cluster = %self.name, "the endpoints in the cluster are known");
                    self.set(RemoteCluster::Listed(connection.cluster.clone()));
                    current = Some((connection, Listed::new(&self.n_listed)));
                }
            }
            if let Some((connection, _)) = &mut current {
                tokio::select! {
                    () = watch.changed_from(secret.as_ref()) => {}
                    Some(ended) = connection.watches.join_next() => {
                        let cause = ended.map_err(|err| err.to_string()).map(|ended| ended.err().map(|err| err.to_string()));
                        warn!(cluster = %self.name, ?cause, "the watches of the cluster have ended; connecting again");
                        sleep(RECONNECT_PAUSE).await;
                    }
                }
            }
        }
    }

    fn set(&self, state: RemoteCluster) {
        self.clusters.remote.set(&self.name, state);
    }

    /// Connects to the cluster, and waits until all its objects are listed.
    async fn connect(&self, secret: &Secret) -> Result<Connection, String> {
        let annotation = |key: &str| {
            let value = secret.annotations().get(key).filter(|value| !value.is_empty());
            value.ok_or_else(|| format!("it has no annotation {key}"))
        };
        let labelled = secret.labels().get(label::CREDENTIALS_OF_CLUSTER);
        if labelled.is_none_or(|name| **name != *self.name) {
            let key = label::CREDENTIALS_OF_CLUSTER;
            return Err(format!("it does not have the label {key}={}", self.name));
        }
        let trust_domain = annotation(annotation::TRUST_DOMAIN)?;
        let cluster_domain = annotation(annotation::CLUSTER_DOMAIN)?;
        let access = remote_credentials::read(secret)
            .await
            .map_err(|err| ErrorChain(&err).to_string())?;
        let server = access.config.cluster_url.to_string();
        let client = kubernetes::client_with(access.config, REQUEST_RATE, &self.registry)
            .map_err(|err| ErrorChain(&err).to_string())?;
        info!(cluster = %self.name, server, "watching the endpoints in a cluster");
        let config = self.clusters.local.config();
        let cluster = Cluster::new(
            config.for_remote(&self.name, trust_domain, cluster_domain),
            &self.registry,
        );
        let mut watches = JoinSet::new();
        watches.spawn(run_remote(
            client,
            self.name.clone(),
            config.endpoints_source,
            cluster.sink(),
            self.drain.clone(),
        ));
        cluster.synced().await;
        Ok(Connection { cluster, watches })
    }
}

/// The Secret with the credentials for a cluster.
fn secret_name(cluster: &str) -> String {
    format!("cluster-credentials-{cluster}")
}

/// Lists and watches of a few kinds.
const REQUEST_RATE: RequestRate = RequestRate { qps: 50.0, burst: 100 };
const RECONNECT_PAUSE: Duration = Duration::from_secs(10);
