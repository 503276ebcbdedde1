//! Watches that keep their objects in memory, and report why they fail.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::{self, watcher};
use kube::{Client, Resource, ResourceExt};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};
use tulle_core::backoff::Backoff;
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::Gauge;

/// The watches of one API server. They end when this is dropped.
pub(crate) struct Watches {
    tasks: JoinSet<()>,
    /// The name of the cluster, for logs.
    cluster: String,
    shared: Arc<Shared>,
}

/// The parameters of one watch.
pub(crate) struct WatchParams<K: Resource> {
    pub(crate) api: Api<K>,
    pub(crate) kind: K::DynamicType,
    pub(crate) config: watcher::Config,
    /// Removes the fields of an object that are not needed, to save memory.
    pub(crate) prune: fn(&mut K),
}

struct Shared {
    /// Incremented after each event and each failure.
    changes: watch::Sender<u64>,
    failures: Mutex<BTreeMap<String, Failure>>,
}

struct Failure {
    since: Instant,
    cause: String,
    /// Whether the account may not list or watch the objects.
    is_forbidden: bool,
}

/// Reports the changes and the failures of one watch.
struct WatchReporter {
    /// The plural name of the kind.
    kind: String,
    cluster: String,
    /// The number of known objects.
    size: Arc<Gauge>,
    shared: Arc<Shared>,
}

impl Watches {
    pub(crate) fn new(cluster: &str) -> Self {
        Self {
            tasks: JoinSet::new(),
            cluster: cluster.to_owned(),
            shared: Arc::new(Shared {
                changes: watch::Sender::new(0),
                failures: Mutex::default(),
            }),
        }
    }

    /// Watches objects, and keeps them in the returned store. Sets `size` to their number.
    pub(crate) fn watch<K>(&mut self, params: WatchParams<K>, size: Arc<Gauge>) -> Store<K>
    where
        K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
        K::DynamicType: Clone + Debug + Eq + Hash + Send + Sync + Unpin + 'static,
    {
        let reporter = self.reporter(&params, size);
        reporter.record_first_list();
        let writer = Writer::new(params.kind.clone());
        let store = writer.as_reader();
        self.tasks.spawn(run_watch(params, writer, reporter));
        store
    }

    /// Watches all objects of a kind, or the objects of `fallback` if the account may not list and watch the first. Until the API
    /// server says whether it may, neither is watched. Only one of the returned stores is ever listed.
    pub(crate) fn watch_permitted<K, L>(
        &mut self,
        client: Client,
        (params, size): (WatchParams<K>, Arc<Gauge>),
        (fallback, fallback_size): (WatchParams<L>, Arc<Gauge>),
    ) -> (Store<K>, Store<L>)
    where
        K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
        K::DynamicType: Clone + Debug + Eq + Hash + Send + Sync + Unpin + 'static,
        L: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
        L::DynamicType: Clone + Debug + Eq + Hash + Send + Sync + Unpin + 'static,
    {
        let reporter = self.reporter(&params, size);
        let fallback_reporter = self.reporter(&fallback, fallback_size);
        reporter.record_first_list();
        let (writer, fallback_writer) = (
            Writer::<K>::new(params.kind.clone()),
            Writer::<L>::new(fallback.kind.clone()),
        );
        let stores = (writer.as_reader(), fallback_writer.as_reader());
        let kind = ResourceAttributes {
            group: Some(K::group(&params.kind).into_owned()),
            resource: Some(reporter.kind.clone()),
            ..ResourceAttributes::default()
        };
        self.tasks.spawn(async move {
            if may_watch(&client, &kind, &reporter).await {
                Box::pin(run_watch(params, writer, reporter)).await;
            } else {
                let (cluster, kind, fallback_url) = (&reporter.cluster, &reporter.kind, fallback.api.resource_url());
                info!(
                    cluster,
                    "the account may not list and watch all {kind}, so {fallback_url} is read instead"
                );
                // Both can be of one kind.
                reporter.shared.record_success(kind);
                fallback_reporter.record_first_list();
                Box::pin(run_watch(fallback, fallback_writer, fallback_reporter)).await;
            }
        });
        stores
    }

    fn reporter<K: Resource>(&self, params: &WatchParams<K>, size: Arc<Gauge>) -> WatchReporter {
        WatchReporter {
            kind: K::plural(&params.kind).into_owned(),
            cluster: self.cluster.clone(),
            size,
            shared: self.shared.clone(),
        }
    }

    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    /// The cause of a failure that has lasted for at least `MIN_FAILURE_TIME`: a watch fails, or its first list does not end. The
    /// last known objects stay.
    pub(crate) fn failure(&self) -> Option<String> {
        self.first_lasting_failure(|_| true)
    }

    /// Like [`failure`](Self::failure), but only if the account may not list or watch the objects.
    fn forbidden_cause(&self) -> Option<String> {
        self.first_lasting_failure(|failure| failure.is_forbidden)
    }

    fn first_lasting_failure(&self, is_wanted: fn(&Failure) -> bool) -> Option<String> {
        let failures = self.shared.failures.lock();
        let is_lasting = |failure: &&Failure| is_wanted(failure) && failure.reported_from() <= Instant::now();
        failures.values().find(is_lasting).map(|failure| failure.cause.clone())
    }

    /// The next time at which a current failure has lasted long enough for [`failure`](Self::failure) to report it.
    pub(crate) fn next_failure_report_at(&self) -> Option<Instant> {
        let failures = self.shared.failures.lock();
        let times = failures.values().map(Failure::reported_from);
        times.filter(|at| *at > Instant::now()).min()
    }
}

impl Shared {
    fn record_failure(&self, kind: &str, cause: String, is_forbidden: bool) {
        let mut failures = self.failures.lock();
        let known = failures.get(kind);
        if known.is_none_or(|known| known.cause != cause) {
            warn!("{cause}; retrying");
        }
        let since = known.map_or_else(Instant::now, |known| known.since);
        let failure = Failure {
            since,
            cause,
            is_forbidden,
        };
        failures.insert(kind.to_owned(), failure);
    }

    fn record_success(&self, kind: &str) {
        self.failures.lock().remove(kind);
    }

    fn notify(&self) {
        self.changes.send_modify(|n| *n = n.wrapping_add(1));
    }
}

impl WatchReporter {
    /// Records a failure until the objects are listed: a list that never ends has no error.
    fn record_first_list(&self) {
        let (kind, cluster) = (&self.kind, &self.cluster);
        let failure = Failure {
            since: Instant::now(),
            cause: format!("the first list of {kind} of the cluster {cluster} is not complete"),
            is_forbidden: false,
        };
        self.shared.failures.lock().insert(kind.clone(), failure);
    }
}

impl Failure {
    fn reported_from(&self) -> Instant {
        self.since + MIN_FAILURE_TIME
    }
}

impl<K: Resource<DynamicType = ()>> WatchParams<K> {
    pub(crate) fn new(api: Api<K>, config: watcher::Config, prune: fn(&mut K)) -> Self {
        Self {
            api,
            kind: (),
            config,
            prune,
        }
    }
}

/// Watches objects, and keeps them in the store of `writer`. Never returns.
async fn run_watch<K>(params: WatchParams<K>, mut writer: Writer<K>, reporter: WatchReporter)
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    K::DynamicType: Clone + Debug + Eq + Hash + Send + Sync + Unpin + 'static,
{
    let WatchReporter {
        kind,
        cluster,
        size,
        shared,
    } = reporter;
    let (known, prune) = (writer.as_reader(), params.prune);
    let mut retries = RETRY_BACKOFF.start();
    loop {
        let changes = watcher(params.api.clone(), params.config.clone()).modify(move |object| {
            object.managed_fields_mut().clear();
            prune(object);
        });
        // Lists all objects again now and then: an API server that was restored from a backup does not report the deletion of the
        // objects that it has lost.
        let mut changes = pin!(changes.take_until(sleep(RELIST_INTERVAL)));
        let mut failed = false;
        while let Some(change) = changes.next().await {
            match change {
                Ok(event) => {
                    writer.apply_watcher_event(&event);
                    match event {
                        // The list is not complete yet.
                        watcher::Event::Init | watcher::Event::InitApply(_) => continue,
                        watcher::Event::InitDone => {
                            retries.reset();
                            shared.record_success(&kind);
                        }
                        watcher::Event::Apply(_) | watcher::Event::Delete(_) => {}
                    }
                }
                Err(err) => {
                    let cause = format!("watching {kind} of the cluster {cluster}: {}", ErrorChain(&err));
                    shared.record_failure(&kind, cause, is_forbidden(&err));
                    failed = true;
                }
            }
            size.set(i64::try_from(known.len()).unwrap_or(i64::MAX));
            shared.notify();
            if failed {
                break;
            }
        }
        if failed {
            // The next watch lists all objects again, which shows whether they can be read.
            sleep(retries.next_delay()).await;
        }
    }
}

/// Whether the API server has answered that the account may not list or watch the objects.
fn is_forbidden(err: &watcher::Error) -> bool {
    match err {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => status.code == 403,
        _ => false,
    }
}

/// Asks until the API server says whether the account may list and watch all objects of a kind.
async fn may_watch(client: &Client, kind: &ResourceAttributes, reporter: &WatchReporter) -> bool {
    let mut retries = RETRY_BACKOFF.start();
    loop {
        let list = is_permitted(client, kind, "list");
        let watch = is_permitted(client, kind, "watch");
        match tokio::try_join!(list, watch) {
            Ok((list, watch)) => return list && watch,
            Err(err) => {
                let (kind, cluster) = (&reporter.kind, &reporter.cluster);
                let cause = format!(
                    "asking whether {kind} of the cluster {cluster} can be watched: {}",
                    ErrorChain(&err)
                );
                reporter.shared.record_failure(kind, cause, false);
                reporter.shared.notify();
                sleep(retries.next_delay()).await;
            }
        }
    }
}

/// Whether the account may do this with all objects of a kind. An account that may not ask counts as one that may not.
///
/// # Errors
/// Fails if the API server does not answer.
async fn is_permitted(client: &Client, kind: &ResourceAttributes, verb: &str) -> Result<bool, kube::Error> {
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                verb: Some(verb.to_owned()),
                ..kind.clone()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let reviews = Api::<SelfSubjectAccessReview>::all(client.clone());
    match reviews.create(&PostParams::default(), &review).await {
        Ok(review) => Ok(review.status.is_some_and(|status| status.allowed)),
        Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => Ok(false),
        Err(err) => Err(err),
    }
}

/// A watch of one Secret.
pub(crate) struct SecretWatch {
    watches: Watches,
    changes: watch::Receiver<u64>,
    store: Store<Secret>,
    key: ObjectRef<Secret>,
}

/// The known state of a Secret.
#[derive(Clone, Debug)]
pub(crate) enum SecretState {
    Unknown,
    /// The Secret could not be read for some time, for this reason.
    Unreadable(String),
    Absent,
    Present(Arc<Secret>),
}

impl SecretState {
    /// Whether both states have the same content. Labels and annotations of other tools are not compared.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Unknown, Self::Unknown) | (Self::Absent, Self::Absent) => true,
            (Self::Unreadable(cause), Self::Unreadable(other)) => cause == other,
            (Self::Present(secret), Self::Present(other)) => {
                let is_own = |(key, _): &(&String, &String)| key.starts_with(LINK_METADATA_PREFIX);
                let own = |all: &Option<BTreeMap<String, String>>| -> BTreeMap<String, String> {
                    let own = all.iter().flatten().filter(is_own);
                    own.map(|(key, value)| (key.clone(), value.clone())).collect()
                };
                secret.data == other.data
                    && own(&secret.metadata.labels) == own(&other.metadata.labels)
                    && own(&secret.metadata.annotations) == own(&other.metadata.annotations)
            }
            _ => false,
        }
    }
}

impl SecretWatch {
    pub(crate) fn new(client: Client, namespace: &str, name: &str) -> Self {
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let mut watches = Watches::new("local");
        let changes = watches.changes();
        let store = watches.watch(
            WatchParams::new(Api::namespaced(client, namespace), config, |_| {}),
            Arc::default(),
        );
        Self {
            watches,
            changes,
            store,
            key: ObjectRef::new(name).within(namespace),
        }
    }

    pub(crate) fn state(&mut self) -> SecretState {
        // Changes are marked as seen before the store is read, so that no later change is missed.
        self.changes.borrow_and_update();
        match self.store.get(&self.key) {
            Some(secret) => SecretState::Present(secret),
            None if is_listed(&self.store) => SecretState::Absent,
            None => self
                .watches
                .failure()
                .map_or(SecretState::Unknown, SecretState::Unreadable),
        }
    }

    /// The error if the account may not read the Secret. If the Secret was known before, [`state`](Self::state) does not change.
    pub(crate) fn forbidden_cause(&self) -> Option<String> {
        self.watches.forbidden_cause()
    }

    /// Waits until the state differs from `seen`.
    pub(crate) async fn changed_from(&mut self, seen: &SecretState) {
        while self.state().is_same(seen) {
            self.changed().await;
        }
    }

    /// Waits until something has changed since the last call of [`state`](Self::state): the Secret, or whether it can be read.
    pub(crate) async fn changed(&mut self) {
        let failure = self.watches.next_failure_report_at();
        tokio::select! {
            changed = self.changes.changed() => if changed.is_err() {
                // Does not happen, because the watches keep the sender.
                std::future::pending::<()>().await;
            },
            () = sleep_until(failure.unwrap_or_else(Instant::now)), if failure.is_some() => {}
        }
    }
}

/// Whether all objects were listed once.
pub(crate) fn is_listed<K>(store: &Store<K>) -> bool
where
    K: Resource + Clone + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    store
        .wait_until_ready()
        .now_or_never()
        .is_some_and(|ready| ready.is_ok())
}

/// Prefix of the labels and annotations of a Secret that belong to its Link.
const LINK_METADATA_PREFIX: &str = "multicluster.linkerd.io/";
const RETRY_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(500),
    max: Duration::from_secs(30),
    jitter: 0.5,
};
const RELIST_INTERVAL: Duration = Duration::from_secs(600);
/// Minimum time for which a watch must fail before the failure is reported. A watch often ends, and is started again. Also the time
/// after which a first list that has not ended is reported.
const MIN_FAILURE_TIME: Duration = Duration::from_secs(5);
