//! Watches the metadata of namespaces, ReplicaSets and Jobs for injection.
//!
//! An object that the watch has not delivered yet is fetched: the first pod of a Deployment is created milliseconds
//! after its ReplicaSet.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::IpAddr;
use std::sync::Arc;

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
use tulle_core::dns_names::is_dns_subdomain;
use tulle_core::drain::Watch;
use tulle_core::log_limit::LogLimiter;
use tulle_core::metrics::{Gauge, Labels, Registry};
use tulle_core::readiness::Latch;
use tulle_core::warn_limited;

use super::lookups::{LOOKUP_TIMEOUT, LookupError, LookupLimiter};
use crate::injection::PodOwner;

/// Cached metadata. Clones share it.
#[derive(Clone)]
pub(super) struct MetadataCache {
    client: Client,
    namespaces: Store<PartialObjectMeta<Namespace>>,
    replica_sets: Store<PartialObjectMeta<ReplicaSet>>,
    jobs: Store<PartialObjectMeta<Job>>,
    synced: watch::Receiver<bool>,
    lookups: Arc<LookupLimiter>,
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

/// The top-level owner of a pod, with its reference for Events.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Owner {
    pub(super) top_owner: PodOwner,
    /// The object that Events are about; `None` for a pod without a name, and for a ReplicaSet or Job that cannot be found or has
    /// another uid.
    pub(super) reference: Option<ObjectReference>,
    /// Whether the object of the reference is known to exist. This is known only for ReplicaSets and Jobs, which are watched or
    /// looked up, and for the owner that the ownerReferences of a ReplicaSet or Job name.
    pub(super) is_verified: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("getting namespace {name}")]
pub(super) struct MetadataError {
    name: String,
    source: LookupError,
}

impl MetadataCache {
    /// Creates the watches. No request is sent before they run.
    pub(super) fn create_watches(client: &Client, registry: &Registry) -> Watches {
        let mut streams = Vec::new();
        let (sender, synced) = watch::channel(false);
        let metadata = Self {
            client: client.clone(),
            // Labels and annotations are needed only for namespaces.
            namespaces: watch_kind(client, registry, &mut streams, |_| {}),
            replica_sets: watch_kind(client, registry, &mut streams, drop_labels_and_annotations),
            jobs: watch_kind(client, registry, &mut streams, drop_labels_and_annotations),
            synced,
            lookups: Arc::new(LookupLimiter::new()),
            log_limiter: Arc::default(),
        };
        Watches {
            metadata,
            synced: sender,
            streams,
        }
    }

    /// The metadata of a namespace. `client` is the client whose review names the namespace, because lookups are limited by client
    /// network. It is `None` for lookups of this process, which are not limited.
    pub(super) async fn namespace(&self, name: &str, client: Option<IpAddr>) -> Result<NamespaceMeta, MetadataError> {
        if let Some(known) = self.namespaces.get(&ObjectRef::new(name)) {
            return Ok(NamespaceMeta::from_object_meta(&known.metadata));
        }
        let api = Api::<Namespace>::all(self.client.clone());
        match self.get(api, name, client).await {
            Ok(found) => Ok(NamespaceMeta::from_object_meta(&found)),
            Err(source) => Err(MetadataError {
                name: name.to_owned(),
                source,
            }),
        }
    }

    /// Waits until the cache is complete.
    pub(super) async fn synced(&self) {
        // An error means that the watches have ended, so the cache will not become complete.
        let _ = self.synced.clone().wait_for(|synced| *synced).await;
    }

    /// The top-level owner of a pod with this metadata, in a namespace that exists.
    ///
    /// A pod with no owner or with several owners is its own owner. A ReplicaSet is replaced by its owner if this is a Deployment,
    /// StatefulSet, DaemonSet or Job. A Job is replaced by its owner of any kind, such as a CronJob.
    pub(super) async fn owner(&self, namespace: &str, pod: &ObjectMeta, client: Option<IpAddr>) -> Owner {
        let Some(owner) = single_owner(pod) else {
            return Owner::from_pod(namespace, pod);
        };
        let group = owner.api_version.split_once('/').map_or("", |(group, _)| group);
        let found = match (group, owner.kind.as_str()) {
            ("apps", "ReplicaSet") => {
                self.find::<ReplicaSet>(&self.replica_sets, namespace, &owner.name, client)
                    .await
            }
            ("batch", "Job") => self.find::<Job>(&self.jobs, namespace, &owner.name, client).await,
            _ => return Owner::from_reference(namespace, owner),
        };
        let Some(found) = found else {
            return Owner {
                reference: None,
                ..Owner::from_reference(namespace, owner)
            };
        };
        let is_top_level = |parent: &&OwnerReference| match owner.kind.as_str() {
            "ReplicaSet" => ["Job", "StatefulSet", "DaemonSet", "Deployment"].contains(&parent.kind.as_str()),
            _ => true,
        };
        let parent = single_owner(&found).filter(is_top_level);
        let top_owner = Owner::from_reference(namespace, parent.unwrap_or(owner));
        // A client can send any uid, so it is compared with the uid of the object.
        match found.uid.as_ref() == Some(&owner.uid) {
            true => Owner {
                is_verified: true,
                ..top_owner
            },
            false => Owner {
                reference: None,
                ..top_owner
            },
        }
    }

    async fn find<K>(
        &self,
        store: &Store<PartialObjectMeta<K>>,
        namespace: &str,
        name: &str,
        client: Option<IpAddr>,
    ) -> Option<ObjectMeta>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    {
        if let Some(known) = store.get(&ObjectRef::new(name).within(namespace)) {
            return Some(known.metadata.clone());
        }
        let api = Api::<K>::namespaced(self.client.clone(), namespace);
        match self.get(api, name, client).await {
            Ok(found) => Some(found),
            // Injection continues with the direct owner. The label then names this owner, and no Event is recorded.
            Err(err) => {
                let (kind, name) = (K::kind(&()), truncate(name));
                let error: &dyn std::error::Error = &err;
                // Every client that reaches the webhook can send names of objects that do not exist.
                warn_limited!(self.log_limiter, (), "getting the owner of a pod failed", namespace, name, %kind, error);
                None
            }
        }
    }

    /// Gets the metadata of an object that the watch has not delivered.
    async fn get<K>(&self, api: Api<K>, name: &str, client: Option<IpAddr>) -> Result<ObjectMeta, LookupError>
    where
        K: Clone + Debug + DeserializeOwned,
    {
        // A text that is not a name could change the path of the request, for example to the list `shop/pods`.
        if !is_dns_subdomain(name) {
            return Err(LookupError::InvalidName);
        }
        let getting = async {
            let found = api.get_metadata(name).await;
            found
                .map(|found| found.metadata)
                .map_err(|err| LookupError::Api(Box::new(err)))
        };
        let getting = async {
            match client {
                Some(client) => self.lookups.run(client, getting).await,
                None => getting.await,
            }
        };
        timeout(LOOKUP_TIMEOUT, getting)
            .await
            .unwrap_or(Err(LookupError::Timeout))
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
            // A store wakes only one waiter, so only this task waits for the stores, and all others wait for `synced`. An error
            // would mean that a watch has ended, but the watches run as long as this future.
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
        self.source.is_not_found()
    }
}

impl NamespaceMeta {
    fn from_object_meta(meta: &ObjectMeta) -> Self {
        Self {
            labels: meta.labels.clone().unwrap_or_default(),
            annotations: meta.annotations.clone().unwrap_or_default(),
        }
    }
}

impl Owner {
    fn from_pod(namespace: &str, pod: &ObjectMeta) -> Self {
        let reference = pod.name.as_ref().map(|name| ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(name.clone()),
            namespace: Some(namespace.to_owned()),
            uid: pod.uid.clone(),
            ..ObjectReference::default()
        });
        Self {
            top_owner: PodOwner {
                kind: "pod".to_owned(),
                name: pod.name.clone().unwrap_or_default(),
            },
            reference,
            is_verified: false,
        }
    }

    fn from_reference(namespace: &str, owner: &OwnerReference) -> Self {
        Self {
            top_owner: PodOwner {
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
            is_verified: false,
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

/// Shortens a name for a log line. The name can have any length.
fn truncate(name: &str) -> &str {
    &name[..name.floor_char_boundary(MAX_NAME_BYTES)]
}

const MAX_NAME_BYTES: usize = 253;

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::net::Ipv4Addr;

    use http::{Request, Response, StatusCode};
    use kube::client::Body;
    use parking_lot::Mutex;
    use serde_json::json;

    use super::*;
    use crate::injector_webhook::lookups::UNSUCCESSFUL_LOOKUP_RATE;

    const OTHER_CLIENT: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
    const API_SERVER: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)));

    /// Returns an empty metadata cache of an API server that has the namespace `shop` and the ReplicaSet `web-1` of the Deployment
    /// `web`, and the paths of the requests.
    fn metadata() -> (MetadataCache, Arc<Mutex<Vec<String>>>) {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        let service = tower::service_fn(move |req: Request<Body>| {
            let path = req.uri().path().to_owned();
            let (status, body) = match &*path {
                "/api/v1/namespaces/shop" => (StatusCode::OK, json!({"metadata": {"name": "shop"}})),
                "/apis/apps/v1/namespaces/shop/replicasets/web-1" => {
                    let owner = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "2"});
                    let meta = json!({"name": "web-1", "uid": "1", "ownerReferences": [owner]});
                    (StatusCode::OK, json!({"metadata": meta}))
                }
                _ => (
                    StatusCode::NOT_FOUND,
                    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}),
                ),
            };
            seen.lock().push(path);
            let rsp = Response::builder().status(status);
            let rsp = rsp.body(Body::from(body.to_string().into_bytes()));
            std::future::ready(Ok::<_, Infallible>(rsp.unwrap()))
        });
        let client = Client::new(service, "default");
        let watches = MetadataCache::create_watches(&client, &Registry::new());
        (watches.metadata(), requests)
    }

    fn owned_by(api_version: &str, kind: &str, name: &str, uid: &str) -> ObjectMeta {
        let owner = json!({"apiVersion": api_version, "kind": kind, "name": name, "uid": uid});
        serde_json::from_value(json!({"name": "web-1-x", "ownerReferences": [owner]})).unwrap()
    }

    #[tokio::test]
    async fn no_event_is_about_an_owner_that_was_not_found() {
        let (metadata, requests) = metadata();
        let check = async |owner: [&str; 4], expected: Option<(&str, bool)>, n_requests: usize| {
            let [api_version, kind, name, uid] = owner;
            let found = metadata
                .owner("shop", &owned_by(api_version, kind, name, uid), API_SERVER)
                .await;
            let reference = found.reference.as_ref().and_then(|object| object.kind.as_deref());
            let event = reference.map(|kind| (kind, found.is_verified));
            assert_eq!(event, expected, "{owner:?}");
            assert_eq!(requests.lock().drain(..).count(), n_requests, "{owner:?}");
        };
        check(["apps/v1", "ReplicaSet", "web-1", "1"], Some(("Deployment", true)), 1).await;
        check(["apps/v1", "ReplicaSet", "web-1", "other"], None, 1).await;
        check(["apps/v1", "ReplicaSet", "web-2", "1"], None, 1).await;
        check(["batch/v1", "Job", "web-1", "1"], None, 1).await;
        check(["apps/v1", "StatefulSet", "web", "1"], Some(("StatefulSet", false)), 0).await;
        check(["batch.volcano.sh/v1", "Job", "web", "1"], Some(("Job", false)), 0).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_can_name_few_objects_that_do_not_exist() {
        let (metadata, requests) = metadata();
        for n in 0..100 {
            let pod = owned_by("apps/v1", "ReplicaSet", &format!("none-{n}"), "1");
            metadata.owner("shop", &pod, OTHER_CLIENT).await;
            metadata
                .namespace(&format!("none-{n}"), OTHER_CLIENT)
                .await
                .unwrap_err();
        }
        let n_requests = requests.lock().len();
        assert_eq!(n_requests, UNSUCCESSFUL_LOOKUP_RATE.burst as usize);
        // The unsuccessful lookups of a client do not limit other clients. Successful lookups are not limited.
        let pod = owned_by("apps/v1", "ReplicaSet", "web-1", "1");
        for _ in 0..100 {
            metadata.namespace("shop", API_SERVER).await.unwrap();
            assert!(metadata.owner("shop", &pod, API_SERVER).await.is_verified);
        }
    }

    #[tokio::test]
    async fn only_names_of_objects_are_requested() {
        let (metadata, requests) = metadata();
        for name in ["shop/pods", "..", "?watch=1", "", &"a".repeat(300)] {
            let refused = metadata.namespace(name, API_SERVER).await.unwrap_err();
            assert!(matches!(refused.source, LookupError::InvalidName), "{refused:?}");
            metadata
                .owner("shop", &owned_by("apps/v1", "ReplicaSet", name, "1"), API_SERVER)
                .await;
        }
        assert!(requests.lock().is_empty(), "{requests:?}");
    }
}
