//! Follows one cluster: reads its credentials, lists and watches its objects, and connects again when the credentials change.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::{Client, ResourceExt as _};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};
use tulle_core::drain::Watch;
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::{Family, Gauge, Labels, Registry};
use tulle_core::readiness::Readiness;

use crate::cluster::remote_clusters::{AllClusters, RemoteCluster};
use crate::cluster::{Cluster, GaugeGuard};
use crate::kubernetes;
use crate::kubernetes::credentials_expiry::ExpiryReport;
use crate::kubernetes::remote_credentials::{LinkedCluster, read_linked_cluster, secret_name};
use crate::kubernetes::request_layer::RequestRate;
use crate::kubernetes::watches::{SecretState, SecretWatch};
use crate::resources::unserved;
use crate::source::kubernetes::{RemoteConfig, SourceError, run_remote};

pub(super) struct RemoteClusterWatch {
    /// The cluster's name in labels and annotations.
    pub(super) name: Arc<str>,
    pub(super) secret: watch::Sender<SecretPresence>,
    pub(super) clusters: AllClusters,
    /// Client of the local API server.
    pub(super) client: Client,
    pub(super) registry: Registry,
    pub(super) gauges: Gauges,
    /// Time after the deletion of the Secret until the endpoints are removed.
    pub(super) unlink_delay: Duration,
    pub(super) drain: Watch,
}

/// Whether the Secret with the credentials for a cluster exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SecretPresence {
    /// Not known yet.
    Unknown,
    /// It does not exist, or cannot be read.
    Absent,
    /// It exists, or the endpoints are still served after its deletion.
    Present,
}

pub(super) struct Gauges {
    /// The number of clusters whose objects are listed.
    pub(super) n_listed: Arc<Gauge>,
    /// 1 while the endpoints of this cluster are known and up to date.
    pub(super) is_up_to_date: Arc<Gauge>,
    /// Seconds until the credentials for each cluster expire.
    pub(super) credentials_expiry: Family<Gauge>,
}

/// The watches of the other cluster, which end when it is dropped.
struct Connection {
    watches: JoinSet<Result<(), SourceError>>,
    /// `None` if the credentials do not expire.
    expiry: Option<ExpiryReport>,
    _listed: GaugeGuard,
}

impl RemoteClusterWatch {
    pub(super) async fn run(self) -> Infallible {
        let namespace = &self.clusters.local.config().controller_namespace;
        let mut secret_watch = SecretWatch::new(self.client.clone(), namespace, &secret_name(&self.name));
        // The connection with the old credentials stays until one with the new credentials has listed all objects.
        let mut connection: Option<Connection> = None;
        // Counts a Secret that gives no access. The credentials of an earlier version can still be in use.
        let mut refused: Option<GaugeGuard> = None;
        loop {
            let state = secret_watch.state();
            match &state {
                SecretState::Present(secret) => {
                    self.secret.send_replace(SecretPresence::Present);
                    if connection.is_none()
                        && let RemoteCluster::Unlinked = self.clusters.remote.get(&self.name)
                    {
                        self.set_state(RemoteCluster::Pending { since: Instant::now() });
                    }
                    connection = tokio::select! {
                        () = secret_watch.changed_from(&state) => continue,
                        connected = self.connect(secret) => match connected {
                            Ok(connected) => {
                                drop(refused.take());
                                Some(connected)
                            }
                            Err(cause) => {
                                let (cluster, secret) = (&self.name, secret.name_any());
                                warn!(%cluster, secret, cause, "the Secret gives no access to the cluster; its last endpoints stay");
                                refused = Some(self.count_refused(namespace, &secret));
                                connection
                            }
                        },
                    };
                    tokio::select! {
                        () = secret_watch.changed_from(&state) => {}
                        cause = self.wait_for_watch_end(&mut connection) => {
                            warn!(cluster = %self.name, cause, "the watches of the cluster have ended; connecting again");
                            sleep(RECONNECT_DELAY).await;
                        }
                    }
                    continue;
                }
                SecretState::Absent => {
                    drop(refused.take());
                    if connection.is_some() {
                        // A tool can replace the Secret by deleting and creating it.
                        tokio::select! {
                            () = secret_watch.changed_from(&state) => continue,
                            () = sleep(self.unlink_delay) => {}
                            never = self.report_expiry_of(&mut connection) => match never {},
                        }
                        info!(cluster = %self.name, "the cluster is no longer linked, because its Secret was deleted");
                        connection = None;
                        self.gauges.is_up_to_date.set(0);
                    }
                    self.set_state(RemoteCluster::Unlinked);
                    self.secret.send_replace(SecretPresence::Absent);
                }
                SecretState::Unreadable(cause) => {
                    let (cluster, secret) = (&self.name, secret_name(&self.name));
                    warn!(
                        %cluster, namespace, secret, cause,
                        "the Secret of the cluster cannot be read; if that is forbidden, name the Link in `controllers` of the chart \
                         tulle-multicluster, or the cluster in `linkedClusters` of tulle-control-plane"
                    );
                    if connection.is_none() {
                        self.secret.send_replace(SecretPresence::Absent);
                    }
                }
                SecretState::Unknown => {}
            }
            tokio::select! {
                () = secret_watch.changed_from(&state) => {}
                never = self.report_expiry_of(&mut connection) => match never {},
            }
        }
    }

    /// Counts a Secret in the metric `unserved_configuration` until the guard is dropped.
    fn count_refused(&self, namespace: &str, secret: &str) -> GaugeGuard {
        let labels = Labels::new()
            .with("kind", "Secret")
            .with("namespace", namespace)
            .with("name", secret)
            .with("field", "credentials");
        GaugeGuard::new(unserved::metric_family(&self.registry).get(&labels))
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
        let mut expiry = access.expires_at.map(|expires_at| self.expiry_report(expires_at));
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
            never = self.report_expiry(&mut expiry) => match never {},
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
            expiry,
            _listed: GaugeGuard::new(self.gauges.n_listed.clone()),
        })
    }

    fn expiry_report(&self, expires_at: u64) -> ExpiryReport {
        let seconds_left = self.gauges.credentials_expiry.clone();
        ExpiryReport::new(expires_at, seconds_left, ("cluster", self.name.to_string()))
    }

    /// Exports the time until the credentials expire, and logs a warning a week before.
    async fn report_expiry(&self, expiry: &mut Option<ExpiryReport>) -> Infallible {
        let Some(expiry) = expiry else {
            return std::future::pending().await;
        };
        let warn = |hours: u64| {
            let secret = secret_name(&self.name);
            warn!(cluster = %self.name, secret, hours, "the credentials for the cluster expire soon; create the Secret again");
        };
        expiry.run(warn).await
    }

    /// Like [`report_expiry`](Self::report_expiry), for the credentials of the connection. It is called again after each attempt to
    /// connect with newer credentials, because an attempt that fails removes the series.
    async fn report_expiry_of(&self, connection: &mut Option<Connection>) -> Infallible {
        match connection {
            Some(connection) => self.report_expiry(&mut connection.expiry).await,
            None => std::future::pending().await,
        }
    }

    /// Waits until a watch ends by a panic, and returns the cause. Waits forever without a connection, and after the drain.
    async fn wait_for_watch_end(&self, connection: &mut Option<Connection>) -> String {
        let Some(Connection { watches, expiry, .. }) = connection else {
            return std::future::pending().await;
        };
        let ended = tokio::select! {
            ended = watches.join_next() => ended,
            never = self.report_expiry(expiry) => match never {},
        };
        match ended {
            Some(ended) => end_cause(ended).await,
            None => std::future::pending().await,
        }
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

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures_util::{StreamExt as _, stream};
    use http::{Request, Response};
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use k8s_openapi::ByteString;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::sync::mpsc;
    use tulle_core::drain;
    use tulle_core::log_capture::LogCapture;

    use super::*;
    use crate::cluster::Config;

    /// Returns a client of an API server that has no Secret, and a sender of the lines of its watch.
    fn client_and_watch() -> (Client, mpsc::UnboundedSender<String>) {
        let (sender, lines) = mpsc::unbounded_channel();
        let mut lines = Some(lines);
        let service = tower::service_fn(move |req: Request<Body>| {
            let is_watch = req.uri().query().is_some_and(|query| query.contains("watch=true"));
            let chunks = match lines.take_if(|_| is_watch) {
                Some(mut lines) => stream::poll_fn(move |context| lines.poll_recv(context)).boxed(),
                None => stream::iter([r#"{"metadata": {"resourceVersion": "1"}, "items": []}"#.to_owned()]).boxed(),
            };
            let frames = chunks.map(|chunk: String| Ok::<_, Infallible>(Frame::data(Bytes::from(chunk))));
            std::future::ready(Ok::<_, Infallible>(Response::new(StreamBody::new(frames))))
        });
        (Client::new(service, "default"), sender)
    }

    /// A value of a Secret: a kubeconfig with these fields of the cluster and of the user.
    fn kubeconfig(cluster: &Value, user: &Value) -> Value {
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
        });
        json!(ByteString(text.to_string().into_bytes()))
    }

    /// The Secret that `link-gen` creates for the cluster `east`.
    fn linked_secret() -> Value {
        json!({
            "apiVersion": "v1", "kind": "Secret", "type": "mirror.linkerd.io/remote-kubeconfig",
            "metadata": {
                "name": "cluster-credentials-east", "namespace": "linkerd",
                "labels": {"multicluster.linkerd.io/cluster-name": "east"},
                "annotations": {
                    "multicluster.linkerd.io/trust-domain": "east.id",
                    "multicluster.linkerd.io/cluster-domain": "east.test",
                },
            },
            "data": {"kubeconfig": kubeconfig(&json!({"server": "https://192.0.2.1:6443"}), &json!({"token": "t"}))},
        })
    }

    /// Changes of the Secret, each as the path of a field and its value, with the reason why the Secret is then refused.
    fn refused_changes() -> [(&'static str, Value, &'static str); 8] {
        let server = json!({"server": "https://192.0.2.1:6443"});
        let program = kubeconfig(&server, &json!({"exec": {"command": "id"}}));
        let file = json!({"server": "https://192.0.2.1:6443", "certificate-authority": "/etc/ca.crt"});
        let file = kubeconfig(&file, &json!({"token": "t"}));
        let without_domain = json!({"multicluster.linkerd.io/trust-domain": "east.id"});
        let without_trust_domain = json!({"multicluster.linkerd.io/cluster-domain": "east.test"});
        let other_cluster = json!({"multicluster.linkerd.io/cluster-name": "west"});
        let no_label = "it does not have the label multicluster.linkerd.io/cluster-name=east";
        [
            ("/metadata/labels", json!({}), no_label),
            ("/metadata/labels", other_cluster, no_label),
            (
                "/metadata/annotations",
                without_trust_domain,
                "it has no annotation multicluster.linkerd.io/trust-domain",
            ),
            (
                "/metadata/annotations",
                without_domain,
                "it has no annotation multicluster.linkerd.io/cluster-domain",
            ),
            ("/data", json!({}), "it has no key kubeconfig"),
            ("/data/kubeconfig", json!(ByteString(b"users: [".to_vec())), "not YAML"),
            ("/data/kubeconfig", program, "the field exec,"),
            ("/data/kubeconfig", file, "the field certificate-authority,"),
        ]
    }

    #[tokio::test(start_paused = true)]
    async fn each_secret_that_gives_no_access_is_logged_once_with_the_reason() {
        let log = LogCapture::start();
        let registry = Registry::new();
        let gauge = |name: &str| registry.gauge(name, "A gauge.").get(&Labels::new());
        let n_listed = gauge("cluster_store_size");
        let clusters = AllClusters::from(Cluster::new(Config::default(), &registry));
        let (client, watch_lines) = client_and_watch();
        let (_signal, drain) = drain::channel();
        let watch = RemoteClusterWatch {
            name: "east".into(),
            secret: watch::Sender::new(SecretPresence::Unknown),
            clusters: clusters.clone(),
            client,
            registry: registry.clone(),
            gauges: Gauges {
                n_listed: n_listed.clone(),
                is_up_to_date: gauge("tulle_remote_cluster_up_to_date"),
                credentials_expiry: registry.gauge("tulle_remote_cluster_credentials_expiry_seconds", "A gauge."),
            },
            unlink_delay: Duration::from_secs(60),
            drain,
        };
        let _running = tokio::spawn(watch.run());
        for (n, (path, value, reason)) in refused_changes().into_iter().enumerate() {
            let mut secret = linked_secret();
            *secret.pointer_mut(path).unwrap() = value;
            // In the second version, only an annotation of another tool differs.
            for version in [2 * n + 2, 2 * n + 3] {
                secret["metadata"]["resourceVersion"] = json!(version.to_string());
                secret["metadata"]["annotations"]["example.com/version"] = json!(version.to_string());
                let line = json!({"type": "MODIFIED", "object": secret});
                watch_lines.send(format!("{line}\n")).unwrap();
                // The clock is paused, so this is not a wait: all tasks run until nothing is left to do before the time passes.
                sleep(Duration::from_secs(1)).await;
            }
            let refused = log.lines_with("the Secret gives no access to the cluster");
            assert_eq!(refused.len(), n + 1, "{path}: {refused:#?}");
            assert!(refused[n].contains(reason), "{reason}: {}", refused[n]);
            let counted = unserved::counted_parts(&registry);
            assert_eq!(counted, ["cluster-credentials-east credentials"], "{path}");
        }
        assert_eq!(n_listed.get(), 0);
        assert!(matches!(clusters.remote.get("east"), RemoteCluster::Pending { .. }));
    }
}
