//! Records Events of `events.k8s.io/v1`.
//!
//! Recording never blocks or fails: notes go through a bounded queue to one task, and notes that do not fit are counted
//! and dropped. Notes about one object with the same severity, reason and action become one Event. It has the message of the
//! first note, and a series count that is updated every few seconds. Notes that were recorded per message become one
//! Event for each message.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, Error};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};
use tracing::debug;
use tulle_core::backoff::Backoff;
use tulle_core::drain::Watch;
use tulle_core::metrics::{Counter, Labels, Registry};

/// Queues notes. Clones share the queue. The default recorder, for use without an API server, drops all notes.
#[derive(Clone, Default)]
pub struct EventRecorder {
    queue: Option<mpsc::Sender<QueuedNote>>,
    dropped: Arc<Counter>,
}

/// The task that sends the queued notes.
pub struct EventPublisher {
    queue: mpsc::Receiver<QueuedNote>,
    client: Client,
    reporter: Reporter,
    series: HashMap<SeriesKey, EventSeries>,
    metrics: Metrics,
}

#[derive(Clone, Debug)]
pub struct Reporter {
    /// The component, such as `linkerd-identity`.
    pub controller: String,
    /// The name of the component's pod.
    pub instance: String,
}

/// A note about an object, from which an Event is made.
#[derive(Clone, Debug)]
pub struct EventNote {
    /// Kind, API version, name and namespace. Also the uid if it is known, because `kubectl describe` selects by it.
    pub regarding: ObjectReference,
    pub severity: Severity,
    /// One word, such as `IssuerUpdated`.
    pub reason: &'static str,
    /// The action that led to the note, in one word.
    pub action: &'static str,
    /// Human-readable text, truncated to 1024 bytes.
    pub message: String,
}

/// A note in the queue.
struct QueuedNote {
    note: EventNote,
    /// Whether each message becomes its own Event.
    is_per_message: bool,
}

impl EventNote {
    /// Limits the memory of the message, which can be from a client.
    fn truncate_message(&mut self) {
        if self.message.len() > MAX_EVENT_NOTE_BYTES {
            self.message = truncate_bytes(&self.message, MAX_EVENT_NOTE_BYTES).to_owned();
        }
    }

    /// Returns whether the names are not too long for an object. They can come from a client.
    fn has_valid_name_lengths(&self) -> bool {
        let ObjectReference {
            api_version,
            kind,
            name,
            namespace,
            uid,
            ..
        } = &self.regarding;
        let names = [api_version, kind, name, namespace, uid];
        names
            .into_iter()
            .flatten()
            .all(|name| name.len() <= MAX_EVENT_NAME_BYTES)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    Normal,
    Warning,
}

/// The key of a series: notes with equal keys become one Event.
#[derive(Clone, PartialEq, Eq, Hash)]
struct SeriesKey {
    /// Kind, namespace, name and uid.
    regarding: [Option<String>; 4],
    severity: Severity,
    reason: &'static str,
    action: &'static str,
    /// `None` if notes with other messages become the same Event.
    message: Option<String>,
}

/// An Event whose count can still increase.
struct EventSeries {
    name: String,
    namespace: String,
    count: i32,
    last_seen_at: Instant,
    last_observed_time: Timestamp,
    /// Whether the API server has the current count.
    is_published: bool,
    /// Whether the next note creates a new Event.
    is_expired: bool,
}

/// Why an Event could not be written.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Api(Box<Error>),
    #[error("the API server did not respond within {0:?}")]
    Timeout(Duration),
}

struct Metrics {
    published: Arc<Counter>,
    aggregated: Arc<Counter>,
    failed: Arc<Counter>,
}

/// Creates a recorder, and the task that publishes its notes.
pub fn new_recorder(client: Client, reporter: Reporter, registry: &Registry) -> (EventRecorder, EventPublisher) {
    let (sender, queue) = mpsc::channel(EVENT_QUEUE_CAPACITY);
    let family = registry.counter("recorder_events_total", "Events about objects, by outcome.");
    let outcome = |outcome| family.get(&Labels::new().with("outcome", outcome));
    let publisher = EventPublisher {
        queue,
        client,
        reporter,
        series: HashMap::new(),
        metrics: Metrics {
            published: outcome("published"),
            aggregated: outcome("aggregated"),
            failed: outcome("failed"),
        },
    };
    let recorder = EventRecorder {
        queue: Some(sender),
        dropped: outcome("dropped"),
    };
    (recorder, publisher)
}

impl EventRecorder {
    /// Queues a note. Never blocks.
    pub fn record(&self, note: EventNote) {
        self.enqueue(QueuedNote {
            note,
            is_per_message: false,
        });
    }

    /// Like [`record`](Self::record), but notes with different messages become different Events.
    pub fn record_per_message(&self, note: EventNote) {
        self.enqueue(QueuedNote {
            note,
            is_per_message: true,
        });
    }

    fn enqueue(&self, mut queued: QueuedNote) {
        let Some(queue) = &self.queue else { return };
        queued.note.truncate_message();
        if !queued.note.has_valid_name_lengths() || queue.try_send(queued).is_err() {
            self.count_dropped();
        }
    }

    /// Counts a note that the caller drops because there are too many.
    pub fn count_dropped(&self) {
        self.dropped.inc();
    }
}

impl EventPublisher {
    /// Publishes until the drain, then publishes the remaining notes for at most a second.
    pub async fn run(mut self, drain: Watch) {
        tokio::select! {
            () = drain.signaled() => {}
            never = self.publish() => match never {},
        }
        // Events that do not fit into the shutdown timeout are dropped.
        let _ = timeout(SHUTDOWN_FLUSH_TIMEOUT, async {
            while let Ok(note) = self.queue.try_recv() {
                self.handle_note(note).await;
            }
            self.flush_counts().await;
        })
        .await;
    }

    /// Publishes until the future is dropped.
    pub async fn publish(&mut self) -> Infallible {
        let mut ticks = interval_at(Instant::now() + FLUSH_INTERVAL, FLUSH_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                note = self.queue.recv() => match note {
                    Some(note) => self.handle_note(note).await,
                    // All recorders were dropped, so the task only waits for the drain.
                    None => pending().await,
                },
                _ = ticks.tick() => self.flush_counts().await,
            }
        }
    }

    async fn handle_note(&mut self, queued: QueuedNote) {
        let key = SeriesKey::new(&queued);
        if let Some(series) = self.series.get_mut(&key) {
            series.count = series.count.saturating_add(1);
            series.last_seen_at = Instant::now();
            series.last_observed_time = Timestamp::now();
            series.is_published = false;
            self.metrics.aggregated.inc();
            return;
        }
        let event = self.reporter.build_event(queued.note);
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let events: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let (reason, params) = (event.reason.clone(), PostParams::default());
        if let Err(err) = with_retries(|| events.create(&params, &event)).await {
            debug!(
                namespace,
                reason,
                error = &err as &dyn std::error::Error,
                "creating an event failed"
            );
            self.metrics.failed.inc();
            return;
        }
        self.metrics.published.inc();
        if self.series.len() >= MAX_SERIES {
            self.remove_oldest_series().await;
        }
        let series = EventSeries {
            name: event.metadata.name.unwrap_or_default(),
            namespace,
            count: 1,
            last_seen_at: Instant::now(),
            last_observed_time: Timestamp::now(),
            is_published: true,
            is_expired: false,
        };
        self.series.insert(key, series);
    }

    /// Removes the series whose last note is the oldest. If its count has changed, publishes the count before.
    async fn remove_oldest_series(&mut self) {
        let oldest = self.series.iter_mut().min_by_key(|(_, series)| series.last_seen_at);
        let Some((key, series)) = oldest else { return };
        let key = key.clone();
        // If the drain interrupts this, the series is still there, and the last flush publishes its count.
        if !series.is_published {
            series.publish_count(&self.client, &self.metrics).await;
        }
        self.series.remove(&key);
    }

    /// Publishes changed counts, and removes series without recent notes.
    async fn flush_counts(&mut self) {
        for series in self.series.values_mut().filter(|series| !series.is_published) {
            series.publish_count(&self.client, &self.metrics).await;
        }
        self.series
            .retain(|_, series| !series.is_expired && series.last_seen_at.elapsed() < SERIES_TTL);
    }
}

impl EventSeries {
    async fn publish_count(&mut self, client: &Client, metrics: &Metrics) {
        let events: Api<Event> = Api::namespaced(client.clone(), &self.namespace);
        let count =
            json!({ "series": { "count": self.count, "lastObservedTime": MicroTime(self.last_observed_time) } });
        let (params, patch) = (PatchParams::default(), Patch::Merge(&count));
        match with_retries(|| events.patch(&self.name, &params, &patch)).await {
            Ok(_) => self.is_published = true,
            Err(err) => {
                debug!(
                    event = self.name,
                    error = &err as &dyn std::error::Error,
                    "updating the count of an event failed"
                );
                metrics.failed.inc();
                // The Event can have expired at the API server. The next note creates a new one.
                self.is_expired = true;
            }
        }
    }
}

impl Reporter {
    fn build_event(&self, note: EventNote) -> Event {
        let now = Timestamp::now();
        let regarding = note.regarding;
        let base_name = truncate_bytes(
            regarding.name.as_deref().unwrap_or(&self.controller),
            MAX_EVENT_NAME_BYTES - 17,
        );
        let base_name = base_name.trim_end_matches(['.', '-']);
        let severity = match note.severity {
            Severity::Normal => "Normal",
            Severity::Warning => "Warning",
        };
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{base_name}.{:016x}", now.as_nanosecond())),
                // Events about cluster-scoped objects are stored in this namespace.
                namespace: Some(regarding.namespace.clone().unwrap_or_else(|| "default".to_owned())),
                ..ObjectMeta::default()
            },
            action: Some(note.action.to_owned()),
            event_time: Some(MicroTime(now)),
            note: Some(truncate_bytes(&note.message, MAX_EVENT_NOTE_BYTES).to_owned()),
            reason: Some(note.reason.to_owned()),
            regarding: Some(regarding),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(truncate_bytes(&self.instance, MAX_REPORTING_INSTANCE_BYTES).to_owned()),
            type_: Some(severity.to_owned()),
            ..Event::default()
        }
    }
}

impl SeriesKey {
    fn new(queued: &QueuedNote) -> Self {
        let QueuedNote { note, is_per_message } = queued;
        let regarding = &note.regarding;
        Self {
            regarding: [&regarding.kind, &regarding.namespace, &regarding.name, &regarding.uid].map(Clone::clone),
            severity: note.severity,
            reason: note.reason,
            action: note.action,
            message: is_per_message.then(|| note.message.clone()),
        }
    }
}

/// Retries transient errors, up to [`MAX_ATTEMPTS`].
async fn with_retries<T, F: Future<Output = Result<T, Error>>>(mut call: impl FnMut() -> F) -> Result<T, WriteError> {
    let mut delays = PUBLISH_BACKOFF.start();
    let mut n_attempts = 0;
    loop {
        let err = match timeout(REQUEST_TIMEOUT, call()).await {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(err)) => WriteError::Api(Box::new(err)),
            Err(_) => WriteError::Timeout(REQUEST_TIMEOUT),
        };
        n_attempts += 1;
        if n_attempts == MAX_ATTEMPTS || !err.is_transient() {
            return Err(err);
        }
        sleep(delays.next_delay()).await;
    }
}

impl WriteError {
    /// Whether another attempt can succeed. It cannot after a 4xx response, except 429.
    fn is_transient(&self) -> bool {
        match self {
            Self::Api(err) => match &**err {
                Error::Api(status) => !(400..500).contains(&status.code) || status.code == 429,
                _ => true,
            },
            Self::Timeout(_) => true,
        }
    }
}

/// Returns the longest prefix of at most `max` bytes that ends at a character boundary.
fn truncate_bytes(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// Maximum number of queued notes; further notes are dropped. A note takes some hundred bytes, and at most three kilobytes.
const EVENT_QUEUE_CAPACITY: usize = 1024;
/// Maximum number of series whose counts can still increase. A further series replaces the series whose last note is the oldest.
const MAX_SERIES: usize = 4096;
/// Time after its last note for which a series is kept. A later note creates a new Event, as in other Kubernetes components.
const SERIES_TTL: Duration = Duration::from_secs(360);
/// Interval at which changed counts of Events are published.
const FLUSH_INTERVAL: Duration = Duration::from_secs(5);
const SHUTDOWN_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_ATTEMPTS: usize = 4;
const PUBLISH_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(250),
    max: Duration::from_secs(5),
    jitter: 0.2,
};
/// Limits of the Event API: the name of an Event is a DNS name, and its note and its reporting instance are limited.
const MAX_EVENT_NAME_BYTES: usize = 253;
const MAX_EVENT_NOTE_BYTES: usize = 1024;
const MAX_REPORTING_INSTANCE_BYTES: usize = 128;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{Request, Response, StatusCode};
    use http_body_util::BodyExt;
    use kube::client::Body;
    use serde_json::Value;
    use tulle_core::drain;

    use super::*;

    fn note(name: &str, text: &str) -> EventNote {
        EventNote {
            regarding: ObjectReference {
                kind: Some("ServiceAccount".to_owned()),
                api_version: Some("v1".to_owned()),
                namespace: Some("shop".to_owned()),
                name: Some(name.to_owned()),
                ..ObjectReference::default()
            },
            severity: Severity::Normal,
            reason: "IssuedLeafCertificate",
            action: "Certify",
            message: text.to_owned(),
        }
    }

    fn queued(name: &str) -> QueuedNote {
        QueuedNote {
            note: note(name, "x"),
            is_per_message: false,
        }
    }

    fn reporter() -> Reporter {
        Reporter {
            controller: "linkerd-identity".to_owned(),
            instance: "linkerd-identity-0".to_owned(),
        }
    }

    /// Returns a client whose API server responds with the statuses from `answer`, and a receiver of its requests.
    fn api_server(
        answer: impl Fn(usize) -> StatusCode + Clone + Send + 'static,
    ) -> (Client, mpsc::UnboundedReceiver<(String, Value)>) {
        let (seen, requests) = mpsc::unbounded_channel();
        let n = Arc::new(Counter::default());
        let service = tower::service_fn(move |req: Request<Body>| {
            let (seen, n, answer) = (seen.clone(), n.clone(), answer.clone());
            async move {
                let line = format!("{} {}", req.method(), req.uri().path());
                let body = req.into_body().collect().await.unwrap().to_bytes();
                let _ = seen.send((line, serde_json::from_slice(&body).unwrap()));
                n.inc();
                let status = answer(usize::try_from(n.get()).unwrap());
                let text = match status {
                    StatusCode::OK => body.to_vec(),
                    status => {
                        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status.as_u16()})
                            .to_string()
                            .into_bytes()
                    }
                };
                let rsp = Response::builder().status(status).body(Body::from(text)).unwrap();
                Ok::<_, Infallible>(rsp)
            }
        });
        (Client::new(service, "default"), requests)
    }

    #[tokio::test(start_paused = true)]
    async fn equal_notes_become_one_event_series() {
        let (client, mut requests) = api_server(|_| StatusCode::OK);
        let (recorder, publisher) = new_recorder(client, reporter(), &Registry::new());
        let (signal, drain) = drain::channel();
        let task = tokio::spawn(publisher.run(drain));
        for n in 0..300 {
            recorder.record(note("web", &format!("number {n}")));
        }
        recorder.record(note("api", "alone"));
        let (line, event) = requests.recv().await.unwrap();
        assert_eq!(line, "POST /apis/events.k8s.io/v1/namespaces/shop/events");
        assert_eq!(event["regarding"]["name"], "web");
        assert_eq!(event["note"], "number 0");
        assert_eq!(event["type"], "Normal");
        assert_eq!(event["reportingController"], "linkerd-identity");
        assert_eq!(requests.recv().await.unwrap().1["regarding"]["name"], "api");
        let (line, patch) = requests.recv().await.unwrap();
        let name = event["metadata"]["name"].as_str().unwrap();
        assert_eq!(
            line,
            format!("PATCH /apis/events.k8s.io/v1/namespaces/shop/events/{name}")
        );
        assert_eq!(patch["series"]["count"], 300);

        recorder.record(note("web", "again"));
        tokio::task::yield_now().await;
        signal.drain().await;
        task.await.unwrap();
        assert_eq!(
            requests.recv().await.unwrap().1["series"]["count"],
            301,
            "the drain publishes the remaining counts"
        );
        assert!(requests.recv().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn changes_with_other_messages_become_other_events() {
        let (client, mut requests) = api_server(|_| StatusCode::OK);
        let (recorder, publisher) = new_recorder(client, reporter(), &Registry::new());
        let (signal, drain) = drain::channel();
        let task = tokio::spawn(publisher.run(drain));
        for text in ["one", "two", "one"] {
            recorder.record_per_message(note("web", text));
        }
        for expected in ["one", "two"] {
            assert_eq!(requests.recv().await.unwrap().1["note"], expected);
        }
        assert_eq!(requests.recv().await.unwrap().1["series"]["count"], 2);
        signal.drain().await;
        task.await.unwrap();
        assert!(requests.recv().await.is_none());
    }

    #[tokio::test]
    async fn the_memory_of_a_note_is_limited() {
        let (client, _requests) = api_server(|_| StatusCode::OK);
        let (recorder, mut publisher) = new_recorder(client, reporter(), &Registry::new());
        let long = "x".repeat(1 << 20);
        recorder.record(note("web", &long));
        recorder.record(note(&long, "x"));
        let queued = publisher.queue.try_recv().unwrap();
        assert_eq!(queued.note.message.capacity(), MAX_EVENT_NOTE_BYTES);
        assert!(publisher.queue.try_recv().is_err());
        assert_eq!(recorder.dropped.get(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_further_series_replaces_the_oldest_and_no_count_is_lost() {
        let (client, mut requests) = api_server(|_| StatusCode::OK);
        let (_recorder, mut publisher) = new_recorder(client, reporter(), &Registry::new());
        let mut sent_requests = || -> Vec<_> { std::iter::from_fn(|| requests.try_recv().ok()).collect() };
        for name in ["first", "first", "second", "second"] {
            publisher.handle_note(queued(name)).await;
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        for n in 2..MAX_SERIES {
            publisher.handle_note(queued(&n.to_string())).await;
        }
        let created = sent_requests();
        assert_eq!(created.len(), MAX_SERIES);
        publisher.handle_note(queued("further")).await;
        let sent = sent_requests();
        let [(_, further), (line, patch)] = &sent[..] else {
            panic!("{sent:?}");
        };
        assert_eq!(further["regarding"]["name"], "further");
        let first = created[0].1["metadata"]["name"].as_str().unwrap();
        assert!(line.starts_with("PATCH ") && line.ends_with(first), "{line}");
        assert_eq!(patch["series"]["count"], 2);
        assert_eq!(publisher.series.len(), MAX_SERIES);

        publisher.flush_counts().await;
        let sent = sent_requests();
        let [(line, patch)] = &sent[..] else {
            panic!("{sent:?}");
        };
        let second = created[1].1["metadata"]["name"].as_str().unwrap();
        assert!(line.ends_with(second), "{line}");
        assert_eq!(patch["series"]["count"], 2);
    }

    #[tokio::test(start_paused = true)]
    async fn an_unresponsive_api_server_drops_notes_without_blocking() {
        let stuck = tower::service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>());
        let registry = Registry::new();
        let (recorder, publisher) = new_recorder(Client::new(stuck, "default"), reporter(), &registry);
        let (_signal, drain) = drain::channel();
        let _task = tokio::spawn(publisher.run(drain));
        let before = Instant::now();
        for n in 0..EVENT_QUEUE_CAPACITY + 10 {
            recorder.record(note(&n.to_string(), "x"));
        }
        assert_eq!(before.elapsed(), Duration::ZERO);
        let metrics = registry.render();
        assert!(metrics.contains("outcome=\"dropped\"} 10"), "{metrics}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_note_is_dropped_if_no_attempt_gets_a_response() {
        let (answered, mut answers) = mpsc::unbounded_channel();
        let n_requests = Arc::new(AtomicUsize::new(0));
        let service = tower::service_fn(move |req: Request<Body>| {
            let (answered, n) = (answered.clone(), n_requests.fetch_add(1, Ordering::Relaxed));
            async move {
                if n < MAX_ATTEMPTS {
                    pending::<()>().await;
                }
                let body = req.into_body().collect().await.unwrap().to_bytes();
                let event: Value = serde_json::from_slice(&body).unwrap();
                let _ = answered.send(event["regarding"]["name"].clone());
                Ok::<_, Infallible>(Response::new(Body::from(body.to_vec())))
            }
        });
        let registry = Registry::new();
        let (recorder, publisher) = new_recorder(Client::new(service, "default"), reporter(), &registry);
        let (_signal, drain) = drain::channel();
        let _task = tokio::spawn(publisher.run(drain));
        recorder.record(note("web", "one"));
        recorder.record(note("api", "two"));
        let answer = timeout(Duration::from_secs(600), answers.recv()).await;
        assert_eq!(answer.expect("the second note is published"), Some(json!("api")));
        let metrics = registry.render();
        assert!(metrics.contains("outcome=\"failed\"} 1"), "{metrics}");
    }

    #[tokio::test(start_paused = true)]
    async fn transient_errors_are_retried_and_forbidden_is_not() {
        let (client, mut requests) = api_server(|n| match n {
            1 | 2 => StatusCode::SERVICE_UNAVAILABLE,
            3 => StatusCode::OK,
            _ => StatusCode::FORBIDDEN,
        });
        let registry = Registry::new();
        let (recorder, publisher) = new_recorder(client, reporter(), &registry);
        let (_signal, drain) = drain::channel();
        let _task = tokio::spawn(publisher.run(drain));
        recorder.record(note("web", "one"));
        recorder.record(note("api", "two"));
        recorder.record(note("third", "three"));
        for expected in ["web", "web", "web", "api", "third"] {
            assert_eq!(requests.recv().await.unwrap().1["regarding"]["name"], expected);
        }
    }

    #[test]
    fn an_event_is_within_the_limits_of_the_api() {
        let long = format!("{}-{}", "a".repeat(235), "b".repeat(17));
        let event = reporter().build_event(note(&long, &"ä".repeat(1000)));
        let name = event.metadata.name.unwrap();
        assert!(
            name.len() <= 253 && name.starts_with("aaa") && !name.contains("-."),
            "{name}"
        );
        assert_eq!(event.note.unwrap().len(), 1024);
        let cluster_scoped = EventNote {
            regarding: ObjectReference::default(),
            ..note("", "x")
        };
        let event = reporter().build_event(cluster_scoped);
        assert_eq!(event.metadata.namespace.unwrap(), "default");
    }
}
