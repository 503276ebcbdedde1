//! Follows one kind: lists it, watches it from there, and lists it again when the watch cannot continue.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;
use std::{io, iter};

use ahash::{AHashMap, RandomState};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use kube::Client;
use kube::client::Body;
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{debug, info, warn};
use tulle_core::backoff::Backoff;
use tulle_core::error_chain::ErrorChain;

use crate::resources::Kind;
use crate::resources::event::{Event, EventSink};
use crate::resources::interning::intern;
use crate::resources::meta::NamespacedName;
use crate::source::kubernetes::freshness::{Freshness, WatchEndCause};
use crate::source::kubernetes::kinds::{Necessity, WatchedKind};
use crate::source::kubernetes::metrics::InformerLag;
use crate::source::kubernetes::request;
use crate::source::kubernetes::response::{
    ApiGroupList, ApiResourceList, DecodeError, EncodedObject, FrameBuffer, ListPage, ObjectHead, PartlyDecodedObject,
    StatusError, WatchEncoding, WatchEvent, WatchEventType,
};

/// The API server from which objects are read.
pub(super) struct ApiServer {
    pub(super) client: Client,
    /// The name of the cluster; `None` for that of this process.
    pub(super) cluster: Option<Arc<str>>,
}

pub(super) struct Reflector {
    server: ApiServer,
    watched: WatchedKind,
    sink: EventSink,
    lag: InformerLag,
    freshness: Freshness,
    /// Receives the kind after its first list. `None` afterwards.
    first_list: Option<mpsc::Sender<Kind>>,
    /// Number of consecutive rounds in which the kind was absent. A round is one list and one look at discovery.
    absent_rounds: u32,
    /// The reported objects, each with a hash of its resource version.
    known_versions: AHashMap<NamespacedName, u64>,
    hasher: RandomState,
    api_version: &'static str,
    presence: Presence,
    /// The kind is optional, and a log line has said that the account is not permitted to list it.
    is_forbidden_reported: bool,
}

/// Whether the API server has the kind, as last logged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Unknown,
    Served,
    Absent,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("building a request")]
    Request(#[source] http::Error),
    #[error("sending a request")]
    Send(#[source] Box<kube::Error>),
    #[error("reading the response")]
    Read(#[source] Box<dyn StdError + Send + Sync>),
    #[error("no response from the API server within {0:?}")]
    Timeout(Duration),
    #[error("the API server did not end the watch within {0:?}")]
    WatchTimeout(Duration),
    #[error("the API server responded with {status}: {message}")]
    Status { status: StatusCode, message: String },
    #[error("decoding the response")]
    Decode(#[source] DecodeError),
    #[error("the API server has the kind in discovery, but its list returns 404")]
    DiscoveryMismatch,
    #[error("the API server does not have the kind, and is not ready")]
    NotReady(#[source] Box<Self>),
}

impl Error {
    fn is_forbidden(&self) -> bool {
        matches!(self, Self::Status { status, .. } if *status == StatusCode::FORBIDDEN)
    }

    /// Returns whether a watch ended because the API server was unreachable, possibly for some time before the error. `Timeout` is
    /// not among these errors: it occurs before a watch is open.
    fn is_lost_connection(&self) -> bool {
        let io_timeout = |err: &(dyn StdError + 'static)| {
            err.downcast_ref::<io::Error>()
                .is_some_and(|err| err.kind() == io::ErrorKind::TimedOut)
        };
        matches!(self, Self::WatchTimeout(_)) || iter::successors(self.source(), |&err| err.source()).any(io_timeout)
    }
}

enum ListOutcome {
    /// The list is complete at this resource version.
    Complete(String),
    /// The list returns 404, and discovery omits the kind, too.
    Absent,
}

/// A list of all objects.
#[derive(Default)]
struct List {
    /// The objects, each with a hash of its resource version.
    versions: AHashMap<NamespacedName, u64>,
    /// The objects that are new or have changed.
    events: Vec<Event>,
}

/// Whether a watch made progress before the kind had to be listed again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WatchProgress {
    /// It delivered changes or was open for more than `MIN_WATCH_DURATION`.
    Progressed,
    NoProgress,
}

#[derive(PartialEq, Eq)]
enum WatchEnd {
    /// Its response has ended, usually at its timeout. The next watch continues at the same position.
    Normal,
    /// The resource version has expired, or `RELIST_INTERVAL` has passed without a change.
    Relist,
}

/// Changes that are reported together.
struct EventBatch {
    events: Vec<Event>,
    /// When the batch may be reported.
    apply_at: Instant,
}

impl Default for EventBatch {
    fn default() -> Self {
        Self {
            events: Vec::new(),
            apply_at: Instant::now(),
        }
    }
}

struct WatchPosition {
    resource_version: String,
    /// Time of the last change, or of the list until a change arrives.
    changed_at: Instant,
    /// Time of the response to the current request, if there was one.
    opened_at: Option<Instant>,
}

/// Metrics of one kind.
pub(super) struct KindMetrics {
    pub(super) lag: InformerLag,
    pub(super) freshness: Freshness,
}

impl Reflector {
    pub(super) fn new(
        server: ApiServer,
        watched: WatchedKind,
        sink: EventSink,
        metrics: KindMetrics,
        listed: mpsc::Sender<Kind>,
    ) -> Self {
        let KindMetrics { lag, freshness } = metrics;
        let api_version = watched.kind.info().versions[0];
        Self {
            server,
            watched,
            sink,
            lag,
            freshness,
            first_list: Some(listed),
            absent_rounds: 0,
            known_versions: AHashMap::new(),
            hasher: RandomState::new(),
            api_version,
            presence: Presence::Unknown,
            is_forbidden_reported: false,
        }
    }

    /// Follows the kind, and reports when it is stale. Never returns.
    pub(super) async fn run(self) -> Infallible {
        let freshness = self.freshness.clone();
        tokio::select! {
            never = self.list_and_watch() => never,
            never = freshness.mark_stale_without_watch() => never,
        }
    }

    async fn list_and_watch(mut self) -> Infallible {
        let mut retries = RETRY_BACKOFF.start();
        loop {
            let started_at = Instant::now();
            match self.list().await {
                Ok(ListOutcome::Complete(resource_version)) => {
                    self.absent_rounds = 0;
                    self.is_forbidden_reported = false;
                    self.set_presence(Presence::Served);
                    self.mark_up_to_date(started_at).await;
                    if self.watch(resource_version).await == WatchProgress::Progressed {
                        retries.reset();
                    }
                    // All replicas and kinds lose their watches at once when an API server restarts, so they wait a
                    // random delay.
                    sleep(retries.next_delay()).await;
                }
                Ok(ListOutcome::Absent) => {
                    retries.reset();
                    self.absent_rounds += 1;
                    if self.absent_rounds >= ABSENT_ROUNDS_BEFORE_DELETE {
                        self.apply_list(List::default()).await;
                        self.set_presence(Presence::Absent);
                        self.mark_up_to_date(started_at).await;
                    } else {
                        self.mark_stale_while_missing();
                    }
                    let backoff = if self.first_list.is_some() {
                        ABSENT_KIND_STARTUP_BACKOFF
                    } else {
                        ABSENT_KIND_BACKOFF
                    };
                    sleep(backoff.start().next_delay()).await;
                }
                Err(err) => {
                    self.absent_rounds = 0;
                    self.report_list_failure(&err).await;
                    sleep(retries.next_delay()).await;
                }
            }
        }
    }

    /// Marks the kind as up to date at this time: as listed, or as absent and therefore empty. The first call tells the source
    /// that the kind is listed.
    async fn mark_up_to_date(&mut self, at: Instant) {
        self.freshness.mark_up_to_date(at);
        if let Some(listed) = self.first_list.take() {
            // Fails only if the receiver is dropped. Then nothing waits for the message.
            let _ = listed.send(self.watched.kind).await;
        }
    }

    /// Marks the kind as stale. An optional kind that the account is not permitted to list counts as listed instead.
    async fn report_list_failure(&mut self, err: &Error) {
        if self.watched.necessity == Necessity::Optional && err.is_forbidden() {
            if !std::mem::replace(&mut self.is_forbidden_reported, true) {
                warn!(
                    kind = self.kind_name(),
                    error = err as &dyn StdError,
                    "the account is not permitted to list the kind; until it is, the last known state is used, or the kind counts as empty"
                );
            }
            if let Some(listed) = self.first_list.take() {
                // Fails only if the receiver is dropped. Then nothing waits for the message.
                let _ = listed.send(self.watched.kind).await;
            }
            // The permission can be missing on purpose, so the kind is not stale.
            self.freshness.mark_up_to_date(Instant::now());
        } else {
            warn!(
                kind = self.kind_name(),
                error = err as &dyn StdError,
                "list failed, the last known state stays in use"
            );
            self.freshness.mark_stale(&ErrorChain(err).to_string());
        }
    }

    /// Marks the kind as stale. Its objects stay until discovery has omitted it `ABSENT_ROUNDS_BEFORE_DELETE` times.
    fn mark_stale_while_missing(&mut self) {
        if self.absent_rounds == 1 && !self.known_versions.is_empty() {
            warn!(
                kind = self.kind_name(),
                n_objects = self.known_versions.len(),
                "the API server no longer has this kind; its last known state stays until discovery has omitted it \
                 {ABSENT_ROUNDS_BEFORE_DELETE} times"
            );
        }
        self.freshness.mark_stale("the API server does not have this kind");
    }

    fn kind_name(&self) -> String {
        let plural = self.watched.kind.info().plural();
        match &self.server.cluster {
            None => plural,
            Some(cluster) => format!("{plural} of the cluster {cluster}"),
        }
    }

    fn set_presence(&mut self, presence: Presence) {
        let previous = std::mem::replace(&mut self.presence, presence);
        match (previous, presence) {
            (Presence::Absent, Presence::Served) => info!(kind = self.kind_name(), "the kind has been installed"),
            (Presence::Served | Presence::Unknown, Presence::Absent) => {
                let group = self.watched.kind.info().group;
                info!(
                    kind = self.kind_name(),
                    group, "the API server does not have this kind; the watch starts when it is installed"
                );
            }
            _ => {}
        }
    }

    /// Lists the newest API version that is served. Reports the differences after the last page.
    async fn list(&mut self) -> Result<ListOutcome, Error> {
        for api_version in self.watched.kind.info().versions {
            match self.list_version(api_version).await {
                Err(Error::Status { status, .. }) if status == StatusCode::NOT_FOUND => {}
                Err(err) => return Err(err),
                Ok(resource_version) => {
                    self.api_version = api_version;
                    return Ok(ListOutcome::Complete(resource_version));
                }
            }
        }
        match self.is_in_discovery().await? {
            true => Err(Error::DiscoveryMismatch),
            false => {
                self.check_api_server_is_ready().await?;
                Ok(ListOutcome::Absent)
            }
        }
    }

    /// Fails while the API server is not ready: after its start, discovery omits the custom resources whose definitions it has
    /// not read yet. A client error, for example because the account is not permitted to read `/readyz`, counts
    /// as ready.
    async fn check_api_server_is_ready(&self) -> Result<(), Error> {
        let request = request::discovery_request("/readyz").map_err(Error::Request)?;
        match self.read_response(request).await {
            Err(Error::Status { status, .. }) if status.is_client_error() => Ok(()),
            result => result.map(drop).map_err(|err| Error::NotReady(Box::new(err))),
        }
    }

    /// Returns whether discovery has the kind in a supported version. A 404 for all of discovery is an error: only a
    /// successful response without the kind shows that it is absent.
    async fn is_in_discovery(&self) -> Result<bool, Error> {
        let info = self.watched.kind.info();
        let served = match info.group {
            "" => info.versions.iter().map(|&version| version.to_owned()).collect(),
            group => {
                let bytes = self
                    .read_response(request::discovery_request("/apis").map_err(Error::Request)?)
                    .await?;
                let groups: ApiGroupList = serde_json::from_slice(&bytes).map_err(|err| Error::Decode(err.into()))?;
                groups.group_versions(group)
            }
        };
        for version in info
            .versions
            .iter()
            .filter(|&&version| served.iter().any(|served| served == version))
        {
            let path = request::api_path(info.group, version);
            let bytes = self
                .read_response(request::discovery_request(&path).map_err(Error::Request)?)
                .await?;
            let resources: ApiResourceList = serde_json::from_slice(&bytes).map_err(|err| Error::Decode(err.into()))?;
            if resources.contains(&info.plural()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn list_version(&mut self, api_version: &str) -> Result<String, Error> {
        let mut list = List::default();
        let mut bytes = self.read_page(api_version, None).await?;
        loop {
            let page = ListPage::parse(&bytes).map_err(Error::Decode)?;
            let decoding = self.decode_page(page.items, &mut list);
            if page.next_page.is_empty() {
                decoding.await?;
                self.apply_list(list).await;
                return Ok(page.resource_version);
            }
            // The API server encodes the next page meanwhile.
            let next_page = self.read_page(api_version, Some(&page.next_page));
            (bytes, ()) = tokio::try_join!(next_page, decoding)?;
        }
    }

    /// Adds the objects of a page to the list. Other tasks of this thread run in between.
    ///
    /// # Errors
    /// Fails if the metadata of an object cannot be read. The object cannot be skipped, because it would then count as deleted.
    async fn decode_page(&self, items: Vec<EncodedObject<'_>>, list: &mut List) -> Result<(), Error> {
        for (i, object) in items.into_iter().enumerate() {
            if i.is_multiple_of(OBJECTS_BETWEEN_YIELDS) {
                yield_now().await;
            }
            let item = PartlyDecodedObject::parse(object).map_err(Error::Decode)?;
            let Some((name, version_hash)) = self.name_and_version_hash(&item.head) else {
                continue;
            };
            if self.known_versions.get(&name) != Some(&version_hash) {
                list.events.push(self.decode_event(&name, &item));
            }
            list.versions.insert(name, version_hash);
        }
        Ok(())
    }

    /// Reports a list: its events, and the deletion of all objects that are not in it. A long list is reported in batches, between
    /// which other tasks of this thread run.
    async fn apply_list(&mut self, list: List) {
        let List {
            versions: known,
            mut events,
        } = list;
        let deleted = self.known_versions.keys().filter(|name| !known.contains_key(*name));
        events.extend(deleted.map(|name| Event::Deleted(self.watched.kind, name.clone())));
        self.known_versions = known;
        debug!(
            kind = self.kind_name(),
            n_objects = self.known_versions.len(),
            n_events = events.len(),
            "listed"
        );
        let mut rest = events.into_iter();
        loop {
            let batch: Vec<Event> = rest.by_ref().take(MAX_EVENTS_PER_BATCH).collect();
            if batch.is_empty() {
                return;
            }
            self.sink.apply(batch);
            yield_now().await;
        }
    }

    /// Watches the kind until it must be listed again.
    async fn watch(&mut self, resource_version: String) -> WatchProgress {
        let mut retries = RETRY_BACKOFF.start();
        let mut failures = 0;
        let mut progress = WatchProgress::NoProgress;
        let mut position = WatchPosition {
            resource_version,
            changed_at: Instant::now(),
            opened_at: None,
        };
        loop {
            let started_at = Instant::now();
            position.opened_at = None;
            let ended = self.watch_once(&mut position).await;
            let was_open_long = position.opened_at.is_some_and(|at| at.elapsed() > MIN_WATCH_DURATION);
            if was_open_long || position.changed_at > started_at {
                progress = WatchProgress::Progressed;
                failures = 0;
                retries.reset();
            }
            match ended {
                Ok(WatchEnd::Relist) => return progress,
                Ok(WatchEnd::Normal) if was_open_long => {}
                Ok(WatchEnd::Normal) => sleep(retries.next_delay()).await,
                Err(Error::Status { status, .. }) if status == StatusCode::NOT_FOUND => return progress,
                Err(err) => {
                    failures += 1;
                    warn!(
                        kind = self.kind_name(),
                        error = &err as &dyn StdError,
                        failures,
                        "watch failed, retrying"
                    );
                    // The server can reject this resource version permanently, for example after a restore from a
                    // backup.
                    if failures >= MAX_WATCH_FAILURES {
                        return progress;
                    }
                    sleep(retries.next_delay()).await;
                }
            }
            if position.changed_at.elapsed() > RELIST_INTERVAL {
                return progress;
            }
        }
    }

    async fn watch_once(&mut self, position: &mut WatchPosition) -> Result<WatchEnd, Error> {
        // The timeout is random, so that watches do not reconnect at the same time.
        let seconds = fastrand::u64(WATCH_TIMEOUT_SECONDS);
        let request = self
            .watched
            .watch_request(self.api_version, &position.resource_version, seconds)
            .map_err(Error::Request)?;
        let response = match self.send(request).await {
            Ok(response) => response,
            Err(Error::Status { status, .. }) if status == StatusCode::GONE => return Ok(WatchEnd::Relist),
            Err(err) => return Err(err),
        };
        position.opened_at = Some(Instant::now());
        self.freshness.watch_opened();
        // A watch can stay without events, so only its requested timeout limits it. TCP keep-alive detects a server
        // that has failed.
        let limit = Duration::from_secs(seconds) + RESPONSE_TIMEOUT;
        let mut batch = EventBatch::default();
        let reading = timeout(limit, self.read_watch(response, position, &mut batch)).await;
        let reading = reading.unwrap_or(Err(Error::WatchTimeout(limit)));
        let is_lost_connection = reading.as_ref().is_err_and(Error::is_lost_connection);
        self.freshness.watch_ended(match is_lost_connection {
            true => WatchEndCause::ConnectionLost,
            false => WatchEndCause::Server,
        });
        // The next watch starts after these events, so they are reported even if this watch failed.
        self.apply_batch(&mut batch).await;
        reading
    }

    /// Reports the changes of a watch until it ends. Changes that arrive in quick succession are reported together.
    async fn read_watch(
        &mut self,
        response: Response<Body>,
        position: &mut WatchPosition,
        batch: &mut EventBatch,
    ) -> Result<WatchEnd, Error> {
        let encoding = WatchEncoding::from_headers(response.headers());
        let mut frames = FrameBuffer::new(encoding);
        let mut body = response.into_body();
        loop {
            let relist_at = position.changed_at + RELIST_INTERVAL;
            // Dropping the body ends the watch. The next watch continues at `position`, so no change is lost.
            let frame = tokio::select! {
                biased;
                frame = body.frame(), if batch.events.len() < MAX_EVENTS_PER_BATCH => frame,
                () = sleep_until(batch.apply_at), if !batch.events.is_empty() => {
                    self.apply_batch(batch).await;
                    continue;
                }
                () = sleep_until(relist_at) => return Ok(WatchEnd::Relist),
            };
            let Some(frame) = frame else {
                return Ok(WatchEnd::Normal);
            };
            let Ok(data) = frame.map_err(|err| Error::Read(err.into()))?.into_data() else {
                continue;
            };
            frames.push(&data);
            while let Some(frame) = frames.next_frame().map_err(Error::Decode)? {
                if frame.is_empty() {
                    continue;
                }
                let change = WatchEvent::parse(&frame, encoding).map_err(Error::Decode)?;
                if let Some(ended) = self.handle_change(change, position, &mut batch.events)? {
                    return Ok(ended);
                }
            }
        }
    }

    /// Reports the events of a batch. The next batch waits as long as this report took, but at most `MAX_BATCH_DELAY`. So
    /// reports take at most about half of the thread's time, unless one report takes longer than `MAX_BATCH_DELAY`.
    async fn apply_batch(&mut self, batch: &mut EventBatch) {
        if batch.events.is_empty() {
            return;
        }
        let started_at = Instant::now();
        self.sink.apply(std::mem::take(&mut batch.events));
        yield_now().await; // until the subscribers on this thread have sent the changes
        batch.apply_at = Instant::now() + started_at.elapsed().min(MAX_BATCH_DELAY);
    }

    /// Turns a change of a watch into an event. Returns how the watch ended if the change ends it.
    fn handle_change(
        &mut self,
        change: WatchEvent<'_>,
        position: &mut WatchPosition,
        events: &mut Vec<Event>,
    ) -> Result<Option<WatchEnd>, Error> {
        if change.r#type == WatchEventType::Error {
            let error = StatusError::from_object(change.object);
            let status = StatusCode::from_u16(error.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            let message = error.message;
            return match status {
                StatusCode::GONE => Ok(Some(WatchEnd::Relist)),
                status => Err(Error::Status { status, message }),
            };
        }
        let item = PartlyDecodedObject::parse(change.object).map_err(Error::Decode)?;
        self.freshness.mark_up_to_date(Instant::now());
        let resource_version = &*item.head.resource_version;
        if !resource_version.is_empty() {
            resource_version.clone_into(&mut position.resource_version);
        }
        if change.r#type == WatchEventType::Bookmark {
            return Ok(None);
        }
        position.changed_at = Instant::now();
        let Some((name, version)) = self.name_and_version_hash(&item.head) else {
            return Ok(None);
        };
        if change.r#type == WatchEventType::Deleted {
            if self.known_versions.remove(&name).is_some() {
                events.push(Event::Deleted(self.watched.kind, name));
            }
            return Ok(None);
        }
        if self.lag.is_measured()
            && let Some(changed_at) = item.last_updated_at()
        {
            self.lag.observe(changed_at);
        }
        events.push(self.decode_event(&name, &item));
        self.known_versions.insert(name, version);
        Ok(None)
    }

    /// Returns the name of an object and a hash of its resource version. `None` if the object has no name.
    fn name_and_version_hash(&self, head: &ObjectHead<'_>) -> Option<(NamespacedName, u64)> {
        if head.name.is_empty() {
            return None;
        }
        let namespace = intern(&head.namespace);
        let name = match self
            .known_versions
            .get_key_value(&NamespacedName::new(namespace.clone(), &*head.name))
        {
            Some((name, _)) => name.clone(),
            None => NamespacedName::new(namespace, &*head.name),
        };
        Some((name, self.hasher.hash_one(&*head.resource_version)))
    }

    /// Decodes the object, and replaces its name by the equal one in `known_versions`, so that both share memory. Reports an
    /// object that cannot be decoded as unreadable.
    fn decode_event(&self, name: &NamespacedName, item: &PartlyDecodedObject<'_>) -> Event {
        match item.decode(self.watched.kind, self.watched.detail) {
            Ok(mut decoded) => {
                decoded.meta_mut().name = name.clone();
                Event::Applied(decoded)
            }
            Err(err) => match item.unreadable(self.watched.kind, &err.to_string()) {
                Some(unreadable) => Event::Unreadable(Arc::new(unreadable)),
                None => {
                    let error = &err as &dyn StdError;
                    debug!(kind = self.kind_name(), %name, error, "ignoring an unreadable route that does not refer to the mesh");
                    Event::Deleted(self.watched.kind, name.clone())
                }
            },
        }
    }

    /// Reads a page of the list. `token` is from the previous page.
    async fn read_page(&self, api_version: &str, token: Option<&str>) -> Result<Bytes, Error> {
        let request = self.watched.list_request(api_version, token).map_err(Error::Request)?;
        self.read_response(request).await
    }

    async fn read_response(&self, request: Request<Body>) -> Result<Bytes, Error> {
        let reading = async {
            let body = self.send(request).await?.into_body();
            let bytes = body.collect().await.map_err(|err| Error::Read(err.into()))?;
            Ok(bytes.to_bytes())
        };
        timeout(LIST_TIMEOUT, reading)
            .await
            .map_err(|_| Error::Timeout(LIST_TIMEOUT))?
    }

    /// Sends a request. Responses with an error status become errors.
    async fn send(&self, request: Request<Body>) -> Result<Response<Body>, Error> {
        let sending = self.server.client.send(request);
        let response = timeout(RESPONSE_TIMEOUT, sending)
            .await
            .map_err(|_| Error::Timeout(RESPONSE_TIMEOUT))?
            .map_err(|err| Error::Send(Box::new(err)))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = timeout(
            RESPONSE_TIMEOUT,
            Limited::new(response.into_body(), MAX_ERROR_BODY_BYTES).collect(),
        )
        .await;
        let bytes = body
            .ok()
            .and_then(Result::ok)
            .map(|body| body.to_bytes())
            .unwrap_or_default();
        let message = StatusError::from_body(&bytes).message;
        Err(Error::Status { status, message })
    }
}

/// Delays between lists, and between failed watches.
const RETRY_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(200),
    max: Duration::from_secs(15),
    jitter: 0.5,
};

/// Delay until a newly installed kind is detected, and between two rounds while a kind is absent.
const ABSENT_KIND_BACKOFF: Backoff = Backoff {
    min: Duration::from_secs(5),
    max: Duration::from_secs(5),
    jitter: 1.0,
};

/// Delay between two rounds at the start, until the kind is listed or counts as absent. It is short, because the process is not
/// ready until then.
const ABSENT_KIND_STARTUP_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(250),
    max: Duration::from_millis(250),
    jitter: 1.0,
};

/// Consecutive discovery rounds without the kind before its objects are deleted, which takes at least 25 s. The deletion of a
/// CRD does not wait for this: the API server deletes its objects first, and the watch reports each of them.
pub(super) const ABSENT_ROUNDS_BEFORE_DELETE: u32 = 6;

/// Number of objects that are decoded before other tasks of the thread run. Decoding this many pods takes about two
/// milliseconds.
const OBJECTS_BETWEEN_YIELDS: usize = 50;

/// Maximum number of events that are reported together. The state of the cluster is locked meanwhile.
const MAX_EVENTS_PER_BATCH: usize = 1000;

/// Maximum time that changes wait for further ones.
const MAX_BATCH_DELAY: Duration = Duration::from_millis(100);

/// Consecutive failures of a watch before the kind is listed again.
const MAX_WATCH_FAILURES: u32 = 4;

/// Range of the random timeouts of watches, in seconds.
const WATCH_TIMEOUT_SECONDS: std::ops::Range<u64> = 150..295;

/// Time without a change after which the kind is listed again.
const RELIST_INTERVAL: Duration = Duration::from_secs(600);

/// A watch that ends earlier counts as interrupted and is retried with backoff.
const MIN_WATCH_DURATION: Duration = Duration::from_secs(5);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_ERROR_BODY_BYTES: usize = 64 * 1024;
