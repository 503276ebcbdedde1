//! Sends spans to a collector in batches. Requests never wait for the collector.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prost::Message as _;
use tokio::{sync::mpsc, time::Instant};
use tulle_core::{
    drain,
    metrics::{Counter, Labels, Registry},
};
use tulle_proto::trace::{
    ExportTraceServiceRequest, InstrumentationScope, KeyValue, Resource, ResourceSpans, ScopeSpans, Span,
    any_value::Value, trace_service_client::TraceServiceClient,
};

use crate::{
    api::channel::{Channel, ControlAddr},
    trace::{Tracer, attribute},
};

/// The collector, and the resource attributes of this proxy.
#[derive(Clone, Debug)]
pub struct Config {
    pub collector: ControlAddr,
    /// The fraction of requests without a trace for which the proxy starts one; default 0.
    pub sampling: f64,
    /// `service.name`; default `linkerd-proxy`.
    pub service: String,
    /// `host.name`.
    pub host: Option<String>,
    /// A file of the workload's labels, one `name="value"` on each line.
    pub labels_path: Option<PathBuf>,
    /// Additional resource attributes; they override labels.
    pub attributes: BTreeMap<String, String>,
}

pub(crate) struct Exporter {
    spans: mpsc::Receiver<Span>,
    client: TraceServiceClient<Channel>,
    resource: Resource,
    metrics: Metrics,
}

struct Metrics {
    /// Counts the start and each failed batch. At these times Linkerd opens a stream, which it counts; tulle sends spans by unary
    /// calls.
    streams: Arc<Counter>,
    requests: Arc<Counter>,
    spans: Arc<Counter>,
    export_failures: Arc<Counter>,
}

impl Config {
    /// Creates the tracers, inbound and outbound, and the exporter of their spans. [`Exporter::run`] sends the spans.
    pub(crate) fn create_tracers(&self, channel: Channel, registry: &Registry) -> ([Tracer; 2], Exporter) {
        let no_labels = Labels::new();
        let counter = |name, help| registry.counter(name, help).get(&no_labels);
        let dropped = registry.counter("tulle_trace_spans_dropped_total", "Spans that were not sent, by reason");
        let dropped = |reason| dropped.get(&no_labels.clone().with("reason", reason));
        let (spans_tx, spans_rx) = mpsc::channel(MAX_QUEUE_SIZE);
        let queue_full = dropped("queue-full");
        let tracers = ["inbound", "outbound"].map(|direction| Tracer {
            direction,
            sampling: self.sampling,
            spans: spans_tx.clone(),
            dropped: queue_full.clone(),
        });
        let exporter = Exporter {
            spans: spans_rx,
            client: TraceServiceClient::new(channel),
            resource: self.resource(),
            metrics: Metrics {
                streams: counter(
                    "opentelemetry_span_export_streams",
                    "1 plus the number of failed batches. Linkerd counts the streams that it opens; tulle sends spans by unary calls",
                ),
                requests: counter("opentelemetry_span_export_requests", "Batches of spans sent"),
                spans: counter("opentelemetry_span_exports", "Spans sent"),
                export_failures: dropped("export-failed"),
            },
        };
        (tracers, exporter)
    }

    /// The resource attributes of this proxy, from all sources; later ones override earlier ones.
    fn resource(&self) -> Resource {
        let labels = self.labels_path.as_ref().map(std::fs::read_to_string).transpose();
        let labels = labels.unwrap_or_else(|error| {
            tracing::warn!(path = ?self.labels_path, %error, "reading the workload labels failed, spans are sent without them");
            None
        });
        let mut merged = BTreeMap::from([("service.name".to_owned(), self.service.clone())]);
        merged.extend(self.host.clone().map(|host| ("host.name".to_owned(), host)));
        merged.extend(labels.as_deref().map(parse_labels).unwrap_or_default());
        merged.extend(self.attributes.clone());
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut attributes: Vec<KeyValue> = [
            ("process.pid", i64::from(std::process::id())),
            (
                "process.start_timestamp",
                i64::try_from(started.as_secs()).unwrap_or(i64::MAX),
            ),
        ]
        .map(|(key, number)| attribute(key, Value::IntValue(number)))
        .into();
        attributes.extend(
            merged
                .into_iter()
                .map(|(key, text)| attribute(&key, Value::StringValue(text))),
        );
        Resource { attributes }
    }
}

impl Exporter {
    /// Sends batches until the drain begins, then the remaining spans.
    pub(crate) async fn run(mut self, drain: drain::Watch) {
        let _guard = drain.guard();
        self.metrics.streams.inc();
        let mut is_ending = false;
        while !is_ending {
            let mut batch = Batch::default();
            tokio::select! {
                biased;
                // Cancel-safe: received spans are already in the batch.
                () = batch.fill(&mut self.spans) => is_ending = batch.spans.is_empty(),
                () = drain.signaled() => is_ending = true,
            }
            while is_ending && let Ok(span) = self.spans.try_recv() {
                if batch.is_full() {
                    self.send(std::mem::take(&mut batch).spans).await;
                }
                batch.push(span);
            }
            if !batch.spans.is_empty() {
                self.send(batch.spans).await;
            }
        }
    }

    async fn send(&mut self, spans: Vec<Span>) {
        let n = spans.len() as u64;
        let scope = InstrumentationScope {
            name: env!("CARGO_PKG_NAME").to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let scope_spans = vec![ScopeSpans {
            scope: Some(scope),
            spans,
        }];
        let request = ExportTraceServiceRequest {
            resource_spans: vec![ResourceSpans {
                resource: Some(self.resource.clone()),
                scope_spans,
            }],
        };
        self.metrics.requests.inc();
        match tokio::time::timeout(EXPORT_TIMEOUT, self.client.export(request)).await {
            Ok(Ok(response)) => {
                self.metrics.spans.add(n);
                if let Some(partial) = response.into_inner().partial_success
                    && partial.rejected_spans > 0
                {
                    tracing::debug!(
                        n = partial.rejected_spans,
                        reason = partial.error_message,
                        "spans rejected"
                    );
                }
            }
            failed => {
                self.metrics.export_failures.add(n);
                self.metrics.streams.inc();
                tracing::debug!(n, failed = ?failed.map(|response| response.map(|_| ())), "sending spans failed");
            }
        }
    }
}

#[derive(Default)]
struct Batch {
    spans: Vec<Span>,
    n_bytes: usize,
}

impl Batch {
    fn push(&mut self, span: Span) {
        self.n_bytes += span.encoded_len();
        self.spans.push(span);
    }

    fn is_full(&self) -> bool {
        self.spans.len() >= MAX_EXPORT_BATCH_SIZE || self.n_bytes >= MAX_EXPORT_BATCH_BYTES
    }

    /// Adds spans until the batch is full, or its first span has waited for [`SCHEDULE_DELAY`]. The batch stays empty if all
    /// tracers were dropped.
    async fn fill(&mut self, spans: &mut mpsc::Receiver<Span>) {
        let Some(first) = spans.recv().await else { return };
        self.push(first);
        let deadline = Instant::now() + SCHEDULE_DELAY;
        while !self.is_full() {
            match tokio::time::timeout_at(deadline, spans.recv()).await {
                Ok(Some(span)) => self.push(span),
                Ok(None) | Err(_) => return,
            }
        }
    }
}

/// Parses labels in the format of a downward API volume: one `name="value"` on each line.
fn parse_labels(text: &str) -> BTreeMap<String, String> {
    let line = |line: &str| {
        let (name, value) = line.trim().split_once('=')?;
        Some((name.trim().to_owned(), value.trim().trim_matches('"').to_owned()))
    };
    text.lines().filter_map(line).collect()
}

/// Maximum number of queued spans; further ones are dropped.
const MAX_QUEUE_SIZE: usize = 1_000;
/// Maximum number of spans in one batch.
const MAX_EXPORT_BATCH_SIZE: usize = 1_000;
/// Size at which a batch is full, in bytes: collectors accept 4 MiB, and a span has a few KiB at most.
const MAX_EXPORT_BATCH_BYTES: usize = 1 << 20;
/// Maximum time that a span waits for its batch.
const SCHEDULE_DELAY: Duration = Duration::from_secs(10);
/// Maximum time for sending one batch.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn batches_are_sent_when_full_or_after_the_delay() {
        let (spans_tx, mut spans_rx) = mpsc::channel(MAX_EXPORT_BATCH_SIZE + 1);
        let start = Instant::now();
        let mut next = async || {
            let mut batch = Batch::default();
            batch.fill(&mut spans_rx).await;
            (batch.spans.len(), start.elapsed())
        };
        for _ in 0..=MAX_EXPORT_BATCH_SIZE {
            spans_tx.try_send(Span::default()).unwrap();
        }
        assert_eq!(next().await, (MAX_EXPORT_BATCH_SIZE, Duration::ZERO));
        assert_eq!(next().await, (1, SCHEDULE_DELAY));
        for _ in 0..3 {
            let name = "x".repeat(MAX_EXPORT_BATCH_BYTES / 2);
            let large = Span {
                name,
                ..Span::default()
            };
            spans_tx.try_send(large).unwrap();
        }
        assert_eq!(next().await, (2, SCHEDULE_DELAY));
        assert_eq!(next().await, (1, 2 * SCHEDULE_DELAY));
        drop(spans_tx);
        assert_eq!(next().await, (0, 2 * SCHEDULE_DELAY));
    }

    #[test]
    fn later_resource_attributes_override_earlier_ones() {
        let dir = tempfile::tempdir().unwrap();
        let labels_path = dir.path().join("labels");
        std::fs::write(&labels_path, "app=\"web\"\nservice.name=\"labelled\"\nbroken\n").unwrap();
        let mut config = Config {
            collector: ControlAddr {
                addr: "127.0.0.1:4317".parse().unwrap(),
                security: crate::api::channel::Security::Loopback,
            },
            sampling: 0.0,
            service: "linkerd-proxy".to_owned(),
            host: Some("node".to_owned()),
            labels_path: Some(labels_path),
            attributes: BTreeMap::new(),
        };
        let value_of = |config: &Config, key: &str| {
            let resource = config.resource();
            let found = resource.attributes.into_iter().find(|attribute| attribute.key == key);
            found.and_then(|found| match found.value?.value? {
                Value::StringValue(text) => Some(text),
                Value::IntValue(number) => Some(number.to_string()),
            })
        };
        assert_eq!(value_of(&config, "service.name").as_deref(), Some("labelled"));
        assert_eq!(value_of(&config, "app").as_deref(), Some("web"));
        assert_eq!(value_of(&config, "host.name").as_deref(), Some("node"));
        assert_eq!(value_of(&config, "process.pid"), Some(std::process::id().to_string()));
        config
            .attributes
            .insert("service.name".to_owned(), "configured".to_owned());
        assert_eq!(value_of(&config, "service.name").as_deref(), Some("configured"));
        config.labels_path = Some("/nowhere".into());
        assert_eq!(value_of(&config, "app"), None);
    }
}
