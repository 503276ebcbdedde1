//! Metrics of the write-back controllers.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tulle_core::metrics::{Counter, Gauge, Histogram, Labels, Registry};

/// The `workqueue_*` metrics of one queue with one worker.
#[derive(Clone)]
pub(super) struct QueueMetrics {
    pub(super) depth: Arc<Gauge>,
    pub(super) adds: Arc<Counter>,
    pub(super) retries: Arc<Counter>,
    /// Names that are dropped after too many retries.
    pub(super) drops: Arc<Counter>,
    queue_duration: Arc<Histogram>,
    work_duration: Arc<Histogram>,
    working_since: Arc<Mutex<Option<Instant>>>,
}

impl QueueMetrics {
    pub(super) fn new(registry: &Registry, queue: &'static str) -> Self {
        let labels = Labels::new().with("name", queue);
        let counter = |name: &str, help: &str| registry.counter(name, help).get(&labels);
        let histogram = |name: &str, help: &str| registry.histogram(name, help, QUEUE_BUCKETS).get(&labels);
        let working_since: Arc<Mutex<Option<Instant>>> = Arc::default();
        let since = working_since.clone();
        registry.add_collector(move |page| {
            let seconds = since.lock().map_or(0.0, |since| since.elapsed().as_secs_f64());
            for (name, help) in [
                ("workqueue_unfinished_work_seconds", "Time spent on work in progress."),
                (
                    "workqueue_longest_running_processor_seconds",
                    "Time spent on the oldest work in progress.",
                ),
            ] {
                // Writing to a string cannot fail.
                let _ = writeln!(
                    page,
                    "# HELP {name} {help}\n# TYPE {name} gauge\n{name}{{name=\"{queue}\"}} {seconds}"
                );
            }
        });
        Self {
            depth: registry
                .gauge("workqueue_depth", "Names waiting in the queue.")
                .get(&labels),
            adds: counter("workqueue_adds_total", "Names added to the queue."),
            retries: counter("workqueue_retries_total", "Names added again after a failure."),
            drops: counter("workqueue_drops_total", "Names dropped after too many failures."),
            queue_duration: histogram(
                "workqueue_queue_duration_seconds",
                "Time that names waited in the queue.",
            ),
            work_duration: histogram("workqueue_work_duration_seconds", "Duration of the work on a name."),
            working_since,
        }
    }

    pub(super) fn record_start(&self, waited: Duration) {
        self.queue_duration.observe(waited.as_secs_f64());
        *self.working_since.lock() = Some(Instant::now());
    }

    pub(super) fn record_end(&self) {
        if let Some(since) = self.working_since.lock().take() {
            self.work_duration.observe(since.elapsed().as_secs_f64());
        }
    }
}

/// The `resource_status_*` metrics of status patches.
#[derive(Clone)]
pub(super) struct StatusMetrics {
    pub(super) patches: Arc<Counter>,
    pub(super) api_errors: Arc<Counter>,
    pub(super) timeouts: Arc<Counter>,
    pub(super) dequeues: Arc<Counter>,
    pub(super) drops: Arc<Counter>,
    pub(super) enqueues: Arc<Counter>,
    pub(super) overflows: Arc<Counter>,
    pub(super) duration: Arc<Histogram>,
}

impl StatusMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let counter = |name: &str, help: &str| registry.counter(name, help).get(&Labels::new());
        Self {
            patches: counter("resource_status_patches_total", "Statuses written."),
            api_errors: counter(
                "resource_status_patch_api_errors_total",
                "Status patches that failed, other than by a timeout.",
            ),
            timeouts: counter("resource_status_patch_timeouts_total", "Status patches that timed out."),
            dequeues: counter("resource_status_patch_dequeues_total", "Objects taken from the queue."),
            drops: counter(
                "resource_status_patch_drops_total",
                "Objects dropped because another process leads.",
            ),
            enqueues: counter(
                "resource_status_patch_enqueues_total",
                "Objects added to the queue because their status has to change.",
            ),
            overflows: counter(
                "resource_status_patch_enqueue_overflows_total",
                "Objects dropped because the queue was full.",
            ),
            duration: registry
                .histogram(
                    "resource_status_patch_duration_seconds",
                    "Time to write a status.",
                    PATCH_BUCKETS,
                )
                .get(&Labels::new()),
        }
    }
}

/// The buckets of Kubernetes' work queues.
const QUEUE_BUCKETS: &[f64] = &[1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0];

const PATCH_BUCKETS: &[f64] = &[0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
