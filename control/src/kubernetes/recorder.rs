//! Tells an object's readers what was done about it: Events of `events.k8s.io/v1`.
//!
//! Whoever records never waits and never fails: notes go through a bounded queue to one task, and what does not fit
//! is counted and dropped. Notes of one kind about one object become one event whose series is counted up, so that a
//! thousand of them cost a thousand additions and a request every few seconds.

use std::collections::HashMap;
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

/// Takes notes; clones share the queue. Where there is no cluster, notes go nowhere.
#[derive(Clone, Default)]
pub struct Recorder {
    queue: Option<mpsc::Sender<Note>>,
    dropped: Arc<Counter>,
}

/// Sends what was recorded.
pub struct Publisher {
    queue: mpsc::Receiver<Note>,
    client: Client,
    reporter: Reporter,
    series: HashMap<Kind, Series>,
    metrics: Metrics,
}

/// Who reports.
#[derive(Clone, Debug)]
pub struct Reporter {
    /// The component, such as `linkerd-identity`.
    pub controller: String,
    /// The name of its pod.
    pub instance: String,
}

/// Something worth knowing about an object.
#[derive(Clone, Debug)]
pub struct Note {
    /// Kind, API version, name and namespace; with its uid where it is known, because `kubectl describe` looks for it.
    pub about: ObjectReference,
    pub severity: Severity,
    /// One word, such as `IssuerUpdated`.
    pub reason: &'static str,
    /// What was being done, one word.
    pub action: &'static str,
    /// For people; what is beyond 1024 bytes is cut.
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    Normal,
    Warning,
}

/// What notes have in common that become one event.
#[derive(PartialEq, Eq, Hash)]
struct Kind {
    /// Kind, namespace, name and uid.
    about: [Option<String>; 4],
    severity: Severity,
    reason: &'static str,
    action: &'static str,
}

/// An event that can still be counted up.
struct Series {
    name: String,
    namespace: String,
    count: i32,
    seen_at: Instant,
    latest: Timestamp,
    /// Whether the API server knows this count.
    told: bool,
}

struct Metrics {
    published: Arc<Counter>,
    aggregated: Arc<Counter>,
    failed: Arc<Counter>,
}

/// A recorder, and the task that publishes what it is given.
pub fn recorder(client: Client, reporter: Reporter, registry: &Registry) -> (Recorder, Publisher) {
    let (sender, queue) = mpsc::channel(QUEUE);
    let family = registry.counter("recorder_events_total", "Events about objects, by what became of them.");
    let outcome = |outcome| family.get(&Labels::new().with("outcome", outcome));
    let publisher = Publisher {
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
    let recorder = Recorder {
        queue: Some(sender),
        dropped: outcome("dropped"),
    };
    (recorder, publisher)
}

impl Recorder {
    /// Takes a note; returns at once.
    pub fn record(&self, note: Note) {
        let Some(queue) = &self.queue else { return };
        if queue.try_send(note).is_err() {
            self.dropped.inc();
        }
    }
}

impl Publisher {
    /// Publishes until the drain, and then what is left, at most for a second.
    pub async fn run(mut self, drain: Watch) {
        tokio::select! {
            () = drain.signaled() => {}
            () = self.publish() => {}
        }
        // Whoever reads events can do without the last ones.
        let _ = timeout(LAST_WORDS, async {
            while let Ok(note) = self.queue.try_recv() {
                self.take(note).await;
            }
            self.tell_counts().await;
        })
        .await;
    }

    async fn publish(&mut self) {
        let mut ticks = interval_at(Instant::now() + TELL_INTERVAL, TELL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                note = self.queue.recv() => match note {
                    Some(note) => self.take(note).await,
                    // Nobody is left to record; the drain comes later.
                    None => pending().await,
                },
                _ = ticks.tick() => self.tell_counts().await,
            }
        }
    }

    async fn take(&mut self, note: Note) {
        let kind = Kind::of(&note);
        if let Some(series) = self.series.get_mut(&kind) {
            series.count = series.count.saturating_add(1);
            series.seen_at = Instant::now();
            series.latest = Timestamp::now();
            series.told = false;
            self.metrics.aggregated.inc();
            return;
        }
        let event = self.reporter.event(note);
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let events: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let (reason, params) = (event.reason.clone(), PostParams::default());
        if let Err(err) = attempts(|| events.create(&params, &event)).await {
            debug!(
                namespace,
                reason,
                error = &err as &dyn std::error::Error,
                "an event is lost"
            );
            self.metrics.failed.inc();
            return;
        }
        self.metrics.published.inc();
        if self.series.len() >= MAX_SERIES {
            self.series.clear();
        }
        let series = Series {
            name: event.metadata.name.unwrap_or_default(),
            namespace,
            count: 1,
            seen_at: Instant::now(),
            latest: Timestamp::now(),
            told: true,
        };
        self.series.insert(kind, series);
    }

    /// Counts up the events that were repeated, and forgets those that were not for long.
    async fn tell_counts(&mut self) {
        let params = PatchParams::default();
        for series in self.series.values_mut().filter(|series| !series.told) {
            let events: Api<Event> = Api::namespaced(self.client.clone(), &series.namespace);
            let count = json!({ "series": { "count": series.count, "lastObservedTime": MicroTime(series.latest) } });
            let patch = Patch::Merge(&count);
            match attempts(|| events.patch(&series.name, &params, &patch)).await {
                Ok(_) => series.told = true,
                Err(err) => {
                    debug!(
                        event = series.name,
                        error = &err as &dyn std::error::Error,
                        "an event is not counted up"
                    );
                    self.metrics.failed.inc();
                    // It may have expired at the API server: the next note begins a new one.
                    series.seen_at -= SERIES_TTL;
                }
            }
        }
        self.series.retain(|_, series| series.seen_at.elapsed() < SERIES_TTL);
    }
}

impl Reporter {
    fn event(&self, note: Note) -> Event {
        let now = Timestamp::now();
        let about = note.about;
        let of = cut(about.name.as_deref().unwrap_or(&self.controller), MAX_NAME - 17);
        let of = of.trim_end_matches(['.', '-']);
        let severity = match note.severity {
            Severity::Normal => "Normal",
            Severity::Warning => "Warning",
        };
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{of}.{:016x}", now.as_nanosecond())),
                // Events about objects without a namespace are kept in this one.
                namespace: Some(about.namespace.clone().unwrap_or_else(|| "default".to_owned())),
                ..ObjectMeta::default()
            },
            action: Some(note.action.to_owned()),
            event_time: Some(MicroTime(now)),
            note: Some(cut(&note.text, MAX_NOTE).to_owned()),
            reason: Some(note.reason.to_owned()),
            regarding: Some(about),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(cut(&self.instance, MAX_INSTANCE).to_owned()),
            type_: Some(severity.to_owned()),
            ..Event::default()
        }
    }
}

impl Kind {
    fn of(note: &Note) -> Self {
        let about = &note.about;
        Self {
            about: [&about.kind, &about.namespace, &about.name, &about.uid].map(Clone::clone),
            severity: note.severity,
            reason: note.reason,
            action: note.action,
        }
    }
}

/// Tries again what may work later; an answer that says no is taken.
async fn attempts<T, F: Future<Output = Result<T, Error>>>(mut call: impl FnMut() -> F) -> Result<T, Error> {
    let mut delays = RETRIES.steps();
    for _ in 1..MAX_ATTEMPTS {
        match timeout(CALL_LIMIT, call()).await {
            Ok(Err(Error::Api(status))) if (400..500).contains(&status.code) && status.code != 429 => {
                return Err(Error::Api(status));
            }
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(_)) | Err(_) => sleep(delays.next_delay()).await,
        }
    }
    call().await
}

/// The longest start of a text that has so many bytes at most.
fn cut(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// More wait than an API server takes in a second; a note is some hundred bytes.
const QUEUE: usize = 1024;
const MAX_SERIES: usize = 4096;
/// A note that comes later begins a new event, as with other components of Kubernetes.
const SERIES_TTL: Duration = Duration::from_secs(360);
/// How old the count of an event is at most.
const TELL_INTERVAL: Duration = Duration::from_secs(5);
const LAST_WORDS: Duration = Duration::from_secs(1);
const CALL_LIMIT: Duration = Duration::from_secs(10);
const MAX_ATTEMPTS: usize = 4;
const RETRIES: Backoff = Backoff {
    min: Duration::from_millis(250),
    max: Duration::from_secs(5),
    jitter: 0.2,
};
/// Bounds of the API: a name is a DNS name, a note and an instance have so many bytes.
const MAX_NAME: usize = 253;
const MAX_NOTE: usize = 1024;
const MAX_INSTANCE: usize = 128;

#[cfg(test)]
mod tests {
    use http::{Request, Response, StatusCode};
    use http_body_util::BodyExt;
    use kube::client::Body;
    use serde_json::Value;
    use tulle_core::drain;

    use super::*;

    fn note(name: &str, text: &str) -> Note {
        Note {
            about: ObjectReference {
                kind: Some("ServiceAccount".to_owned()),
                api_version: Some("v1".to_owned()),
                namespace: Some("shop".to_owned()),
                name: Some(name.to_owned()),
                ..ObjectReference::default()
            },
            severity: Severity::Normal,
            reason: "IssuedLeafCertificate",
            action: "Certify",
            text: text.to_owned(),
        }
    }

    fn reporter() -> Reporter {
        Reporter {
            controller: "linkerd-identity".to_owned(),
            instance: "linkerd-identity-0".to_owned(),
        }
    }

    /// An API server that answers each request as it is told, and what it was asked.
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
                Ok::<_, std::convert::Infallible>(rsp)
            }
        });
        (Client::new(service, "default"), requests)
    }

    #[tokio::test(start_paused = true)]
    async fn notes_of_one_kind_become_one_event_that_is_counted_up() {
        let (client, mut requests) = api_server(|_| StatusCode::OK);
        let (recorder, publisher) = recorder(client, reporter(), &Registry::new());
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
            "the drain tells the rest"
        );
        assert!(requests.recv().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stuck_api_server_costs_notes_and_no_time() {
        let stuck = tower::service_fn(|_: Request<Body>| pending::<Result<Response<Body>, std::convert::Infallible>>());
        let registry = Registry::new();
        let (recorder, publisher) = recorder(Client::new(stuck, "default"), reporter(), &registry);
        let (_signal, drain) = drain::channel();
        let _task = tokio::spawn(publisher.run(drain));
        let before = Instant::now();
        for n in 0..QUEUE + 10 {
            recorder.record(note(&n.to_string(), "x"));
        }
        assert_eq!(before.elapsed(), Duration::ZERO);
        let metrics = registry.render();
        assert!(metrics.contains("outcome=\"dropped\"} 10"), "{metrics}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_may_work_later_is_tried_again_and_what_is_forbidden_is_not() {
        let (client, mut requests) = api_server(|n| match n {
            1 | 2 => StatusCode::SERVICE_UNAVAILABLE,
            3 => StatusCode::OK,
            _ => StatusCode::FORBIDDEN,
        });
        let registry = Registry::new();
        let (recorder, publisher) = recorder(client, reporter(), &registry);
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
    fn an_event_keeps_the_bounds_of_the_api() {
        let long = format!("{}-{}", "a".repeat(235), "b".repeat(17));
        let event = reporter().event(note(&long, &"ä".repeat(1000)));
        let name = event.metadata.name.unwrap();
        assert!(
            name.len() <= 253 && name.starts_with("aaa") && !name.contains("-."),
            "{name}"
        );
        assert_eq!(event.note.unwrap().len(), 1024);
        let node = Note {
            about: ObjectReference::default(),
            ..note("", "x")
        };
        assert_eq!(reporter().event(node).metadata.namespace.unwrap(), "default");
    }
}
