//! `outbound_*_balancer_*`, `control_*_balancer_*` and `opentelemetry_balancer_*`: the endpoints of a service, and the requests
//! that wait for one.

use std::{sync::Arc, time::SystemTime};

use tokio::time::Instant;
use tulle_core::metrics::{Counter, Family, FloatGauge, Gauge, Histogram, Labels, Registry};

/// Bucket upper bounds of waits, in seconds.
const WAIT_SECONDS_BUCKETS: &[f64] = &[0.0005, 0.005, 0.05, 0.5, 1., 3.];

/// The families of balancers of one kind.
#[derive(Clone)]
pub(crate) struct Families {
    endpoints: Family<Gauge>,
    known: Family<Gauge>,
    updates: Family<Counter>,
    queue_length: Family<Gauge>,
    queued_total: Family<Counter>,
    queue_latency: Family<Histogram>,
    queue_mode: Option<QueueModeFamilies>,
}

/// `queue_gate_*`: the gate is open unless requests fail fast.
#[derive(Clone)]
struct QueueModeFamilies {
    opened: Family<Counter>,
    shut: Family<Counter>,
    opened_at: Family<FloatGauge>,
    shut_at: Family<FloatGauge>,
    timeout: Family<FloatGauge>,
}

/// The series of a balancer with one set of labels: those of a parent and backend, or of a control plane client.
#[derive(Debug)]
pub(crate) struct BalancerSeries {
    ready: Arc<Gauge>,
    pending: Arc<Gauge>,
    known: Arc<Gauge>,
    updates: [Arc<Counter>; 3],
    queue_length: Arc<Gauge>,
    queued_total: Arc<Counter>,
    queue_latency: Arc<Histogram>,
    queue_mode: Option<QueueModeSeries>,
}

#[derive(Debug)]
struct QueueModeSeries {
    opened: Arc<Counter>,
    shut: Arc<Counter>,
    opened_at: Arc<FloatGauge>,
    shut_at: Arc<FloatGauge>,
    timeout: Arc<FloatGauge>,
}

/// The kind of a discovery update, for the label `op`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateOp {
    /// The update replaces the whole set.
    Reset,
    Add,
    Remove,
}

/// How requests are handled while no endpoint is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueMode {
    Waiting,
    /// Requests fail immediately, because an earlier request has timed out in the queue.
    FailingFast,
}

/// Counts a request in the queue. On drop, the wait has ended, and its duration is recorded.
pub(crate) struct QueueGuard<'a> {
    series: &'a BalancerSeries,
    queued_at: Instant,
}

impl Families {
    /// The families of the outbound balancers for `protocol`. These balancers fail fast.
    pub(crate) fn new(registry: &Registry, protocol: &str) -> Self {
        let prefix = format!("outbound_{protocol}");
        Self {
            queue_mode: Some(QueueModeFamilies::new(registry, &prefix)),
            ..Self::without_fail_fast(registry, &prefix)
        }
    }

    /// The families of balancers without fail-fast; their names begin with `prefix`.
    pub(crate) fn without_fail_fast(registry: &Registry, prefix: &str) -> Self {
        let name = |name: &str| format!("{prefix}_balancer_{name}");
        let counter = |suffix, help| registry.counter(&name(suffix), help);
        let gauge = |suffix, help| registry.gauge(&name(suffix), help);
        Self {
            endpoints: gauge("endpoints", "Endpoints, by whether they can get a request now"),
            known: gauge("p2c_endpoints", "Endpoints from discovery"),
            updates: counter("p2c_updates_total", "Endpoint updates from discovery"),
            queue_length: gauge("queue_length", "Requests or connections that wait for an endpoint now"),
            queued_total: counter(
                "queue_requests_total",
                "Requests or connections that had to wait because no endpoint was available",
            ),
            queue_latency: registry.histogram(
                &name("queue_latency_seconds"),
                "Seconds that requests or connections waited, whether or not an endpoint became available",
                WAIT_SECONDS_BUCKETS,
            ),
            queue_mode: None,
        }
    }

    pub(crate) fn series(&self, labels: &Labels) -> Arc<BalancerSeries> {
        let endpoints = |state| self.endpoints.get(&labels.clone().with("endpoint_state", state));
        let updates = |op| self.updates.get(&labels.clone().with("op", op));
        Arc::new(BalancerSeries {
            ready: endpoints("ready"),
            pending: endpoints("pending"),
            known: self.known.get(labels),
            updates: ["Reset", "Add", "Remove"].map(updates),
            queue_length: self.queue_length.get(labels),
            queued_total: self.queued_total.get(labels),
            queue_latency: self.queue_latency.get(labels),
            queue_mode: self.queue_mode.as_ref().map(|families| families.series(labels)),
        })
    }
}

impl QueueModeFamilies {
    fn new(registry: &Registry, prefix: &str) -> Self {
        let name = |name: &str| format!("{prefix}_balancer_{name}");
        let counter = |suffix, help| registry.counter(&name(suffix), help);
        let seconds = |suffix, help| registry.float_gauge(&name(suffix), help);
        Self {
            opened: counter("queue_gate_open_total", "Times that the queue began to accept requests"),
            shut: counter(
                "queue_gate_shut_total",
                "Times that a request timed out in the queue, so that later ones fail fast",
            ),
            opened_at: seconds(
                "queue_gate_open_time_seconds",
                "Time at which the queue started to accept requests, as Unix time; 0 while requests fail fast",
            ),
            shut_at: seconds(
                "queue_gate_shut_time_seconds",
                "Time at which requests started to fail fast, as Unix time; 0 while the queue accepts requests",
            ),
            timeout: seconds("queue_gate_timeout_seconds", "Maximum seconds to wait for an endpoint"),
        }
    }

    fn series(&self, labels: &Labels) -> QueueModeSeries {
        QueueModeSeries {
            opened: self.opened.get(labels),
            shut: self.shut.get(labels),
            opened_at: self.opened_at.get(labels),
            shut_at: self.shut_at.get(labels),
            timeout: self.timeout.get(labels),
        }
    }
}

impl BalancerSeries {
    pub(crate) fn has_same_labels(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.queued_total, &other.queued_total)
    }

    pub(crate) fn set_queue_timeout(&self, seconds: f64) {
        if let Some(queue_mode) = &self.queue_mode {
            queue_mode.timeout.set(seconds);
        }
    }

    pub(crate) fn set_endpoints(&self, ready: usize, pending: usize) {
        let number = |n| i64::try_from(n).unwrap_or(i64::MAX);
        self.ready.set(number(ready));
        self.pending.set(number(pending));
        self.known.set(number(ready + pending));
    }

    pub(crate) fn record_update(&self, op: UpdateOp) {
        self.updates[op as usize].inc();
    }

    pub(crate) fn record_queue_mode(&self, mode: QueueMode) {
        let Some(series) = &self.queue_mode else { return };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.unwrap_or_default().as_secs_f64();
        let (counter, started_at, other_started_at) = match mode {
            QueueMode::Waiting => (&series.opened, &series.opened_at, &series.shut_at),
            QueueMode::FailingFast => (&series.shut, &series.shut_at, &series.opened_at),
        };
        counter.inc();
        started_at.set(now);
        other_started_at.set(0.0);
    }

    pub(crate) fn enter_queue(&self) -> QueueGuard<'_> {
        self.queued_total.inc();
        self.queue_length.add(1);
        QueueGuard {
            series: self,
            queued_at: Instant::now(),
        }
    }
}

impl Drop for QueueGuard<'_> {
    fn drop(&mut self) {
        self.series.queue_length.add(-1);
        self.series
            .queue_latency
            .observe(self.queued_at.elapsed().as_secs_f64());
    }
}
