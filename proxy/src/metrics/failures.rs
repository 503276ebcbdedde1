//! `tulle_failures_total`: whatever fails, by its cause.

use tulle_core::metrics::{Counter, Family, Labels, Registry};

/// The failures of one direction.
#[derive(Clone)]
pub(crate) struct Failures {
    family: Family<Counter>,
    direction: &'static str,
}

impl Failures {
    pub(crate) fn new(registry: &Registry, direction: &'static str) -> Self {
        Self {
            family: registry.counter(
                "tulle_failures_total",
                "Requests and connections that the proxy gave up, by cause; docs/errors.md explains each",
            ),
            direction,
        }
    }

    pub(crate) fn count(&self, cause: &'static str) {
        let labels = Labels::new().with("direction", self.direction).with("cause", cause);
        self.family.get(&labels).inc();
    }
}
