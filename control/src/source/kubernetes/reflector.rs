//! One kind: list, watch from there, list anew when that is no longer possible.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;

use ahash::{AHashMap, AHashSet, RandomState};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use kube::Client;
use kube::client::Body;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::{debug, info, warn};
use tulle_core::backoff::Backoff;

use crate::resources::Kind;
use crate::resources::event::{Event, Writer};
use crate::resources::meta::Name;
use crate::source::kubernetes::answer::{Change, ChangeType, Groups, Head, Item, Lines, Page, Refusal, Resources};
use crate::source::kubernetes::freshness::Freshness;
use crate::source::kubernetes::kinds::Watched;
use crate::source::kubernetes::metrics::Lag;
use crate::source::kubernetes::request;

pub(super) struct Reflector {
    client: Client,
    watched: Watched,
    writer: Writer,
    lag: Lag,
    freshness: Freshness,
    /// Told of the first list, and gone afterwards.
    listed: Option<mpsc::Sender<Kind>>,
    /// Consecutive rounds in which discovery did not have the kind.
    absent_rounds: u32,
    /// What has been reported, and a hash of its version.
    known: AHashMap<Name, u64>,
    hasher: RandomState,
    /// They are few and objects many, so that their names are shared.
    namespaces: AHashSet<Arc<str>>,
    /// The version of the API that is served.
    api_version: &'static str,
    presence: Presence,
}

/// Whether the API server knows the kind, as far as was logged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Unknown,
    Served,
    Absent,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("making a request")]
    Request(#[source] http::Error),
    #[error("sending a request")]
    Send(#[source] Box<kube::Error>),
    #[error("reading the answer")]
    Read(#[source] Box<dyn StdError + Send + Sync>),
    #[error("the API server said nothing for {0:?}")]
    Silent(Duration),
    #[error("the API server did not end the watch within {0:?}")]
    Overdue(Duration),
    #[error("the API server answered {status}: {message}")]
    Refused { status: StatusCode, message: String },
    #[error("the answer is not what was asked for")]
    Shape(#[source] serde_json::Error),
    #[error("discovery has the kind, and its list is answered 404")]
    Contradiction,
}

/// How a list ended.
enum Listed {
    /// The objects at this resource version are known.
    At(String),
    /// The list is answered 404, and discovery does not have the kind either.
    Absent,
}

/// Whether a watch was of use before the kind had to be listed anew.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Followed {
    /// Changes came, or it was open for a while.
    Something,
    Nothing,
}

/// How one watch ended.
#[derive(PartialEq, Eq)]
enum Ended {
    /// In time; the next one goes on where it stopped.
    Normally,
    /// Changes since then are forgotten, or there were none for so long that we look ourselves.
    ListAnew,
}

/// Where a watch stands.
struct Position {
    resource_version: String,
    /// When something last changed.
    changed_at: Instant,
}

impl Reflector {
    pub(super) fn new(
        client: Client,
        watched: Watched,
        writer: Writer,
        lag: Lag,
        freshness: Freshness,
        listed: mpsc::Sender<Kind>,
    ) -> Self {
        let api_version = watched.kind.info().versions[0];
        Self {
            client,
            watched,
            writer,
            lag,
            freshness,
            listed: Some(listed),
            absent_rounds: 0,
            known: AHashMap::new(),
            hasher: RandomState::new(),
            namespaces: AHashSet::new(),
            api_version,
            presence: Presence::Unknown,
        }
    }

    /// Follows the kind for ever.
    pub(super) async fn run(mut self) -> Infallible {
        let mut retries = RETRIES.steps();
        loop {
            match self.list().await {
                Ok(Listed::At(resource_version)) => {
                    self.absent_rounds = 0;
                    self.now(Presence::Served);
                    self.settled().await;
                    if self.watch(resource_version).await == Followed::Something {
                        retries.reset();
                    }
                    // All replicas and kinds lose their watches together when an API server restarts.
                    sleep(retries.next_delay()).await;
                }
                Ok(Listed::Absent) => {
                    retries.reset();
                    self.absent_rounds += 1;
                    if self.absent_rounds >= GONE_ROUNDS {
                        self.replace(AHashMap::new(), Vec::new());
                        self.now(Presence::Absent);
                        self.settled().await;
                    } else {
                        self.missing();
                    }
                    let pause = if self.listed.is_some() { ABSENT_AT_START } else { ABSENT };
                    sleep(pause.steps().next_delay()).await;
                }
                Err(err) => {
                    self.absent_rounds = 0;
                    warn!(
                        kind = self.name(),
                        error = &err as &dyn StdError,
                        "listing failed; the last state stays"
                    );
                    self.freshness.lost(err.to_string());
                    sleep(retries.next_delay()).await;
                }
            }
        }
    }

    /// What is known is what there is; the first time it is told.
    async fn settled(&mut self) {
        self.freshness.regained();
        if let Some(listed) = self.listed.take() {
            // A receiver that has gone wants no more news.
            let _ = listed.send(self.watched.kind).await;
        }
    }

    /// The API server does not have the kind, and has not said so often enough to be believed.
    fn missing(&mut self) {
        if self.absent_rounds == 1 && !self.known.is_empty() {
            warn!(
                kind = self.name(),
                n_objects = self.known.len(),
                "the API server does not have this kind any more; its last state stays until discovery has said so \
                 {GONE_ROUNDS} times"
            );
        }
        self.freshness.lost("the API server does not have this kind".to_owned());
    }

    fn name(&self) -> String {
        self.watched.kind.info().plural()
    }

    fn now(&mut self, presence: Presence) {
        let before = std::mem::replace(&mut self.presence, presence);
        match (before, presence) {
            (Presence::Absent, Presence::Served) => info!(kind = self.name(), "the kind has been installed"),
            (Presence::Served | Presence::Unknown, Presence::Absent) => {
                let group = self.watched.kind.info().group;
                info!(
                    kind = self.name(),
                    group, "the API server does not have this kind; it is watched once it has"
                );
            }
            _ => {}
        }
    }

    /// Lists in the newest version of the API that is served, and reports what differs from before, in one batch.
    async fn list(&mut self) -> Result<Listed, Error> {
        for version in self.watched.kind.info().versions {
            match self.list_version(version).await {
                Err(Error::Refused { status, .. }) if status == StatusCode::NOT_FOUND => {}
                Err(err) => return Err(err),
                Ok(resource_version) => {
                    self.api_version = version;
                    return Ok(Listed::At(resource_version));
                }
            }
        }
        match self.is_discovered().await? {
            true => Err(Error::Contradiction),
            false => Ok(Listed::Absent),
        }
    }

    /// Whether discovery has the kind in a version that we read. A 404 for the whole of discovery is a failure: only an
    /// answer that leaves the kind out says that it is gone.
    async fn is_discovered(&self) -> Result<bool, Error> {
        let info = self.watched.kind.info();
        let served = match info.group {
            "" => info.versions.iter().map(|&version| version.to_owned()).collect(),
            group => {
                let bytes = self.read(request::discovery("/apis").map_err(Error::Request)?).await?;
                let groups: Groups = serde_json::from_slice(&bytes).map_err(Error::Shape)?;
                groups.versions_of(group)
            }
        };
        for version in info
            .versions
            .iter()
            .filter(|&&version| served.iter().any(|one| one == version))
        {
            let path = request::root(info.group, version);
            let bytes = self.read(request::discovery(&path).map_err(Error::Request)?).await?;
            let resources: Resources = serde_json::from_slice(&bytes).map_err(Error::Shape)?;
            if resources.has(&info.plural()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn list_version(&mut self, version: &str) -> Result<String, Error> {
        let (mut known, mut events) = (AHashMap::new(), Vec::new());
        let mut token = String::new();
        loop {
            let page = (!token.is_empty()).then_some(token.as_str());
            let request = self.watched.list_request(version, page).map_err(Error::Request)?;
            let bytes = self.read(request).await?;
            let page: Page<'_> = serde_json::from_slice(&bytes).map_err(Error::Shape)?;
            for object in page.items.into_iter().flatten() {
                let item = match Item::read(object) {
                    Ok(item) => item,
                    Err(err) => {
                        let error = &err as &dyn StdError;
                        warn!(kind = self.name(), error, "skipping an object without metadata");
                        continue;
                    }
                };
                let Some((name, version)) = self.name_and_version(&item.head) else {
                    continue;
                };
                if self.known.get(&name) != Some(&version) {
                    events.push(self.decode(&name, &item));
                }
                known.insert(name, version);
            }
            token = page.metadata.r#continue;
            if token.is_empty() {
                self.replace(known, events);
                return Ok(page.metadata.resource_version);
            }
        }
    }

    /// Reports these changes, and that all other objects are gone.
    fn replace(&mut self, known: AHashMap<Name, u64>, mut events: Vec<Event>) {
        let gone = self.known.keys().filter(|name| !known.contains_key(*name));
        events.extend(gone.map(|name| Event::Deleted(self.watched.kind, name.clone())));
        self.known = known;
        debug!(
            kind = self.name(),
            n_objects = self.known.len(),
            n_events = events.len(),
            "listed"
        );
        if !events.is_empty() {
            self.writer.apply(events);
        }
    }

    /// Follows changes until the kind must be listed anew.
    async fn watch(&mut self, resource_version: String) -> Followed {
        let mut retries = RETRIES.steps();
        let mut failures = 0;
        let mut followed = Followed::Nothing;
        let mut position = Position {
            resource_version,
            changed_at: Instant::now(),
        };
        loop {
            let started_at = Instant::now();
            let ended = self.watch_once(&mut position).await;
            if started_at.elapsed() > SHORT_WATCH || position.changed_at > started_at {
                followed = Followed::Something;
                failures = 0;
                retries.reset();
            }
            match ended {
                Ok(Ended::ListAnew) => return followed,
                Ok(Ended::Normally) if started_at.elapsed() > SHORT_WATCH => {}
                Ok(Ended::Normally) => sleep(retries.next_delay()).await,
                Err(Error::Refused { status, .. }) if status == StatusCode::NOT_FOUND => return followed,
                Err(err) => {
                    failures += 1;
                    warn!(
                        kind = self.name(),
                        error = &err as &dyn StdError,
                        failures,
                        "watching failed; trying again"
                    );
                    // The server may refuse this resource version for ever, as after it was restored from a backup.
                    if failures >= MAX_WATCH_FAILURES {
                        return followed;
                    }
                    sleep(retries.next_delay()).await;
                }
            }
            if position.changed_at.elapsed() > RESYNC {
                return followed;
            }
        }
    }

    async fn watch_once(&mut self, position: &mut Position) -> Result<Ended, Error> {
        // As many as watch, at different times, so that they do not all come again at once.
        let seconds = fastrand::u64(WATCH_SECONDS);
        let request = self
            .watched
            .watch_request(self.api_version, &position.resource_version, seconds)
            .map_err(Error::Request)?;
        let mut body = match self.send(request).await {
            Ok(response) => response.into_body(),
            Err(Error::Refused { status, .. }) if status == StatusCode::GONE => return Ok(Ended::ListAnew),
            Err(err) => return Err(err),
        };
        let mut lines = Lines::default();
        // A kind may be quiet for as long as it likes; a server that has vanished ends the connection.
        let limit = Duration::from_secs(seconds) + ANSWER_LIMIT;
        let ends_at = Instant::now() + limit;
        loop {
            let listed_anew_at = position.changed_at + RESYNC;
            // Dropping the body ends the watch; what it has not told yet, the next one tells.
            let frame = tokio::select! {
                frame = timeout_at(ends_at, body.frame()) => frame.map_err(|_| Error::Overdue(limit))?,
                () = tokio::time::sleep_until(listed_anew_at) => return Ok(Ended::ListAnew),
            };
            let Some(frame) = frame else { return Ok(Ended::Normally) };
            let Ok(data) = frame.map_err(|err| Error::Read(err.into()))?.into_data() else {
                continue;
            };
            lines.push(&data);
            let mut events = Vec::new();
            let mut ended = None;
            lines.drain(|line| {
                if ended.is_none() && !line.is_empty() {
                    ended = self.take(line, position, &mut events).transpose();
                }
            });
            if !events.is_empty() {
                self.writer.apply(events);
            }
            if let Some(ended) = ended {
                return ended;
            }
        }
    }

    /// Turns a line of a watch into an event; some lines end the watch.
    fn take(&mut self, line: &[u8], position: &mut Position, events: &mut Vec<Event>) -> Result<Option<Ended>, Error> {
        let change: Change<'_> = serde_json::from_slice(line).map_err(Error::Shape)?;
        if change.r#type == ChangeType::Error {
            let refusal: Refusal = serde_json::from_str(change.object.get()).unwrap_or_default();
            let status = StatusCode::from_u16(refusal.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            let message = refusal.message;
            return match status {
                StatusCode::GONE => Ok(Some(Ended::ListAnew)),
                status => Err(Error::Refused { status, message }),
            };
        }
        let item = Item::read(change.object).map_err(Error::Shape)?;
        let resource_version = &*item.head.resource_version;
        if !resource_version.is_empty() {
            resource_version.clone_into(&mut position.resource_version);
        }
        if change.r#type == ChangeType::Bookmark {
            return Ok(None);
        }
        position.changed_at = Instant::now();
        let Some((name, version)) = self.name_and_version(&item.head) else {
            return Ok(None);
        };
        if change.r#type == ChangeType::Deleted {
            if self.known.remove(&name).is_some() {
                events.push(Event::Deleted(self.watched.kind, name));
            }
            return Ok(None);
        }
        if self.lag.is_measured()
            && let Some(changed_at) = item.changed_at()
        {
            self.lag.observe(changed_at);
        }
        events.push(self.decode(&name, &item));
        self.known.insert(name, version);
        Ok(None)
    }

    /// The name of an object and a hash of its version; one without a name is no object.
    fn name_and_version(&mut self, head: &Head<'_>) -> Option<(Name, u64)> {
        if head.name.is_empty() {
            return None;
        }
        let namespace = match self.namespaces.get(&*head.namespace) {
            Some(namespace) => namespace.clone(),
            None => {
                let namespace: Arc<str> = head.namespace.as_ref().into();
                self.namespaces.insert(namespace.clone());
                namespace
            }
        };
        let name = match self.known.get_key_value(&Name::new(namespace.clone(), &*head.name)) {
            Some((name, _)) => name.clone(),
            None => Name::new(namespace, &*head.name),
        };
        Some((name, self.hasher.hash_one(&*head.resource_version)))
    }

    /// The object, which shares its name with what is known here, or what can be told of one that cannot be read.
    fn decode(&self, name: &Name, item: &Item<'_>) -> Event {
        match item.decode(self.watched.kind, self.watched.part) {
            Ok(mut decoded) => {
                decoded.meta_mut().name = name.clone();
                Event::Applied(decoded)
            }
            Err(err) => match item.unreadable(self.watched.kind, &err.to_string()) {
                Some(unreadable) => Event::Unreadable(Arc::new(unreadable)),
                None => {
                    let error = &err as &dyn StdError;
                    debug!(kind = self.name(), %name, error, "a route of others cannot be read");
                    Event::Deleted(self.watched.kind, name.clone())
                }
            },
        }
    }

    async fn read(&self, request: Request<Body>) -> Result<Bytes, Error> {
        let reading = async {
            let body = self.send(request).await?.into_body();
            let bytes = body.collect().await.map_err(|err| Error::Read(err.into()))?;
            Ok(bytes.to_bytes())
        };
        timeout(LIST_LIMIT, reading)
            .await
            .map_err(|_| Error::Silent(LIST_LIMIT))?
    }

    /// Sends a request and turns refusals into errors.
    async fn send(&self, request: Request<Body>) -> Result<Response<Body>, Error> {
        let sending = self.client.send(request);
        let response = timeout(ANSWER_LIMIT, sending)
            .await
            .map_err(|_| Error::Silent(ANSWER_LIMIT))?
            .map_err(|err| Error::Send(Box::new(err)))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = timeout(ANSWER_LIMIT, Limited::new(response.into_body(), REFUSAL_SIZE).collect()).await;
        let bytes = body
            .ok()
            .and_then(Result::ok)
            .map(|body| body.to_bytes())
            .unwrap_or_default();
        let refusal: Refusal = serde_json::from_slice(&bytes).unwrap_or_default();
        let message = refusal.message;
        Err(Error::Refused { status, message })
    }
}

const RETRIES: Backoff = Backoff {
    min: Duration::from_millis(200),
    max: Duration::from_secs(15),
    jitter: 0.5,
};

/// How soon a kind is noticed that has just been installed; and the time between two rounds of those that have gone.
const ABSENT: Backoff = Backoff {
    min: Duration::from_secs(5),
    max: Duration::from_secs(5),
    jitter: 1.0,
};

/// The time between two rounds before the first list, for which everything waits.
const ABSENT_AT_START: Backoff = Backoff {
    min: Duration::from_millis(250),
    max: Duration::from_millis(250),
    jitter: 1.0,
};

/// Consecutive rounds in which discovery must leave a kind out before its objects count as deleted: half a minute at
/// least. Who deletes a definition deletes its objects first, and the watch reports each of them.
pub(super) const GONE_ROUNDS: u32 = 6;

/// Consecutive failures of a watch before the kind is listed anew.
const MAX_WATCH_FAILURES: u32 = 4;

/// Below the 295 seconds that the kube crate allows.
const WATCH_SECONDS: std::ops::Range<u64> = 150..295;

/// A kind without a change for so long is listed anew.
const RESYNC: Duration = Duration::from_secs(600);

/// A watch that ends sooner was cut, and is not begun again at once.
const SHORT_WATCH: Duration = Duration::from_secs(5);
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
const LIST_LIMIT: Duration = Duration::from_secs(60);
const REFUSAL_SIZE: usize = 64 * 1024;
