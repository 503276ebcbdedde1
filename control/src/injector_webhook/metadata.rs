//! Watches the metadata of namespaces, ReplicaSets and Jobs for injection.
//!
//! An object that the watch has not delivered yet is fetched: the first pod of a Deployment is created milliseconds
//! after its ReplicaSet.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Namespace, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{debug, warn};
use tulle_core::drain::Watch;
use tulle_core::log_limit::LogLimiter;
use tulle_core::metrics::{Gauge, Labels, Registry};
use tulle_core::readiness::Latch;
use tulle_core::warn_limited;

use crate::injection::PodOwner;

/// Cached metadata. Clones share it.
#[derive(Clone)]
pub(super) struct MetadataCache {
    client: Client,
    namespaces: Store<PartialObjectMeta<Namespace>>,
    replica_sets: Store<PartialObjectMeta<ReplicaSet>>,
    jobs: Store<PartialObjectMeta<Job>>,
    synced: watch::Receiver<bool>,
    log_limiter: Arc<LogLimiter<()>>,
}

/// The watches that fill the cache.
pub struct Watches {
    metadata: MetadataCache,
    synced: watch::Sender<bool>,
    streams: Vec<futures_util::stream::BoxStream<'static, ()>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NamespaceMeta {
    pub(super) labels: BTreeMap<String, String>,
    pub(super) annotations: BTreeMap<String, String>,
}

/// The top-level workload of a pod.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Owner {
    pub(super) workload: PodOwner,
    /// The object that Events are about; `None` for a pod without a name.
    pub(super) reference: Option<ObjectReference>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum MetadataError {
    #[error("getting namespace {name}")]
    Namespace {
        name: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("getting namespace {name} took longer than {LOOKUP_TIMEOUT:?}")]
    Timeout { name: String },
}

impl MetadataCache {
    /// Creates the watches. No request is sent before they run.
    pub(super) fn watches(client: &Client, registry: &Registry) -> Watches {
        let mut streams = Vec::new();
        let (sender, synced) = watch::channel(false);
        let metadata = Self {
            client: client.clone(),
            // Labels and annotations are needed of namespaces only.
            namespaces: watch_kind(client, registry, &mut streams, |_| {}),
            replica_sets: watch_kind(client, registry, &mut streams, drop_labels_and_annotations),
            jobs: watch_kind(client, registry, &mut streams, drop_labels_and_annotations),
            synced,
            log_limiter: Arc::default(),
        };
        Watches {
            metadata,
            synced: sender,
            streams,
        }
    }

    pub(super) async fn namespace(&self, name: &str) -> Result<NamespaceMeta, MetadataError> {
        if let Some(known) = self.namespaces.get(&ObjectRef::new(name)) {
            return Ok(NamespaceMeta::of(&known.metadata));
        }
        let api = Api::<Namespace>::all(self.client.clone());
        match timeout(LOOKUP_TIMEOUT, api.get_metadata(name)).await {
            Ok(Ok(found)) => Ok(NamespaceMeta::of(&found.metadata)),
            Ok(Err(source)) => Err(MetadataError::Namespace {
                name: name.to_owned(),
                source: Box::new(source),
            }),
            Err(_) => Err(MetadataError::Timeout { name: name.to_owned() }),
        }
    }

    /// Waits until the cache is complete.
    pub(super) async fn synced(&self) {
        // An error means that the watches have ended; then there is nothing to wait for.
        let _ = self.synced.clone().wait_for(|synced| *synced).await;
    }

    /// The workload of a pod with this metadata.
    ///
    /// Pods without an owner or with several are their own workload. A ReplicaSet is replaced by its owner, a Job by
    /// its CronJob.
    pub(super) async fn owner(&self, namespace: &str, pod: &ObjectMeta) -> Owner {
        let Some(owner) = single_owner(pod) else {
            return Owner::pod(namespace, pod);
        };
        let parent = match owner.kind.as_str() {
            "ReplicaSet" => {
                self.parent::<ReplicaSet>(&self.replica_sets, namespace, &owner.name)
                    .await
            }
            "Job" => self.parent::<Job>(&self.jobs, namespace, &owner.name).await,
            _ => None,
        };
        let is_top_level = |parent: &OwnerReference| match owner.kind.as_str() {
            "ReplicaSet" => ["Job", "StatefulSet", "DaemonSet", "Deployment"].contains(&parent.kind.as_str()),
            _ => true,
        };
        let parent = parent.filter(is_top_level);
        Owner::of(namespace, parent.as_ref().unwrap_or(owner))
    }

    async fn parent<K>(
        &self,
        store: &Store<PartialObjectMeta<K>>,
        namespace: &str,
        name: &str,
    ) -> Option<OwnerReference>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    {
        if let Some(known) = store.get(&ObjectRef::new(name).within(namespace)) {
            return single_owner(&known.metadata).cloned();
        }
        if name.len() > MAX_NAME_BYTES {
            return None; // no object has this name
        }
        let kind = K::kind(&());
        let api = Api::<K>::namespaced(self.client.clone(), namespace);
        match timeout(LOOKUP_TIMEOUT, api.get_metadata(name)).await {
            Ok(Ok(found)) => single_owner(&found.metadata).cloned(),
            // Injection continues with the direct owner; only a label is less precise.
            Ok(Err(err)) => {
                let error: &dyn std::error::Error = &err;
                // Every client that reaches the webhook can send names of objects that do not exist.
                warn_limited!(self.log_limiter, (), "getting the owner of a pod's owner failed", namespace, name, %kind, error);
                None
            }
            Err(_) => {
                warn_limited!(
                    self.log_limiter,
                    (),
                    "getting the owner of a pod's owner took too long",
                    namespace,
                    name,
                    %kind,
                    limit = ?LOOKUP_TIMEOUT
                );
                None
            }
        }
    }
}

impl Watches {
    pub(super) fn metadata(&self) -> MetadataCache {
        self.metadata.clone()
    }

    /// Watches until the drain. The latch is released when the cache is complete.
    pub async fn run(self, latch: Latch, drain: Watch) {
        let mut events = futures_util::stream::select_all(self.streams);
        let metadata = self.metadata;
        let report_synced = async move {
            // A store wakes only one waiter, and this is the only one; all others wait for `synced`. Errors would mean that a
            // watch has ended, and the watches run as long as this future.
            let _ = metadata.namespaces.wait_until_ready().await;
            let _ = metadata.replica_sets.wait_until_ready().await;
            let _ = metadata.jobs.wait_until_ready().await;
            self.synced.send_replace(true);
            debug!("caches synced");
            drop(latch);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = drain.signaled() => {}
            () = async { while events.next().await.is_some() {} } => {}
            () = report_synced => {}
        }
    }
}

impl MetadataError {
    /// Returns whether the namespace does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        match self {
            Self::Namespace { source, .. } => matches!(&**source, kube::Error::Api(status) if status.is_not_found()),
            Self::Timeout { .. } => false,
        }
    }
}

impl NamespaceMeta {
    fn of(meta: &ObjectMeta) -> Self {
        Self {
            labels: meta.labels.clone().unwrap_or_default(),
            annotations: meta.annotations.clone().unwrap_or_default(),
        }
    }
}

impl Owner {
    fn pod(namespace: &str, pod: &ObjectMeta) -> Self {
        let reference = pod.name.as_ref().map(|name| ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(name.clone()),
            namespace: Some(namespace.to_owned()),
            uid: pod.uid.clone(),
            ..ObjectReference::default()
        });
        Self {
            workload: PodOwner {
                kind: "pod".to_owned(),
                name: pod.name.clone().unwrap_or_default(),
            },
            reference,
        }
    }

    fn of(namespace: &str, owner: &OwnerReference) -> Self {
        Self {
            workload: PodOwner {
                kind: owner.kind.to_lowercase(),
                name: owner.name.clone(),
            },
            reference: Some(ObjectReference {
                api_version: Some(owner.api_version.clone()),
                kind: Some(owner.kind.clone()),
                name: Some(owner.name.clone()),
                namespace: Some(namespace.to_owned()),
                uid: Some(owner.uid.clone()),
                ..ObjectReference::default()
            }),
        }
    }
}

/// The owner, if there is exactly one.
fn single_owner(meta: &ObjectMeta) -> Option<&OwnerReference> {
    match meta.owner_references.as_deref() {
        Some([owner]) => Some(owner),
        _ => None,
    }
}

/// Creates the store of a kind and adds the stream that fills it to `all`.
fn watch_kind<K>(
    client: &Client,
    registry: &Registry,
    all: &mut Vec<futures_util::stream::BoxStream<'static, ()>>,
    prune: fn(&mut PartialObjectMeta<K>),
) -> Store<PartialObjectMeta<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let kind = K::kind(&()).to_lowercase();
    let size = registry
        .gauge(&format!("{kind}_cache_size"), "Objects of this kind that are known.")
        .get(&Labels::new().with("cluster", "local"));
    let (store, writer) = reflector::store();
    let api = Api::<PartialObjectMeta<K>>::all(client.clone());
    let config = watcher::Config::default();
    let changes = watcher(api, config).modify(move |object| {
        object.metadata.managed_fields = None;
        prune(object);
    });
    let changes = changes.default_backoff().reflect(writer);
    all.push(with_cache_size(changes, store.clone(), size, kind).boxed());
    store
}

fn with_cache_size<K>(
    changes: impl Stream<Item = Result<watcher::Event<PartialObjectMeta<K>>, watcher::Error>>,
    store: Store<PartialObjectMeta<K>>,
    size: Arc<Gauge>,
    kind: String,
) -> impl Stream<Item = ()>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    changes.map(move |change| match change {
        Ok(_) => size.set(i64::try_from(store.len()).unwrap_or(i64::MAX)),
        Err(err) => {
            let error: &dyn std::error::Error = &err;
            warn!(kind, error, "watching failed; retrying");
        }
    })
}

fn drop_labels_and_annotations<K>(object: &mut PartialObjectMeta<K>) {
    object.metadata.labels = None;
    object.metadata.annotations = None;
}

const MAX_NAME_BYTES: usize = 253;
/// The API server's webhook timeout is 10 seconds; the lookups of namespace and owner must not use it up.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(3);
