//! `tulle_failures_total`: failures by cause.

use tulle_core::metrics::{Counter, Family, Labels, Registry};

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
                "Failed requests and connections, by cause; docs/reference/errors.md explains each",
            ),
            direction,
        }
    }

    pub(crate) fn count(&self, cause: &'static str) {
        let labels = Labels::new().with("direction", self.direction).with("cause", cause);
        self.family.get(&labels).inc();
    }
}
