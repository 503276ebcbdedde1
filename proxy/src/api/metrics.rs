//! `control_*`: requests to the control plane and their results.

use std::sync::Arc;

use tulle_core::metrics::{Counter, Family, Histogram, Labels, Registry};

use crate::metrics::balancers;

/// Families shared by all channels; clones share them.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub(super) requests: Family<Counter>,
    pub(super) responses: Family<Counter>,
    pub(super) latency: Family<Histogram>,
    pub(super) resolutions: Family<Counter>,
    registry: Registry,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry) -> Self {
        Self {
            requests: registry.counter("control_request_total", "Requests to the control plane."),
            responses: registry.counter(
                "control_response_total",
                "Responses of the control plane, by their head.",
            ),
            latency: registry.histogram(
                "control_response_latency_ms",
                "Milliseconds from a request to the control plane to the head of its response.",
                LATENCY_BUCKETS_MS,
            ),
            resolutions: registry.counter(
                "control_dns_resolutions_total",
                "DNS lookups of control plane addresses, and of names for applications.",
            ),
            registry: registry.clone(),
        }
    }

    /// The series of a channel: the replicas of its service, and the calls that wait for a connection.
    pub(super) fn balancer(&self, metrics_prefix: &str, labels: &Labels) -> Arc<balancers::BalancerSeries> {
        balancers::Families::without_fail_fast(&self.registry, metrics_prefix).series(labels)
    }
}

/// Bucket upper bounds, in milliseconds; those of Linkerd's latency histograms.
const LATENCY_BUCKETS_MS: &[f64] = &[
    1., 2., 3., 4., 5., 10., 20., 30., 40., 50., 100., 200., 300., 400., 500., 1_000., 2_000., 3_000., 4_000., 5_000.,
    10_000., 20_000., 30_000., 40_000., 50_000.,
];
