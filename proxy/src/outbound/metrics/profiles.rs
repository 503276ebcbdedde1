//! Metrics of the routes of ServiceProfiles.

use std::sync::Arc;

use tulle_core::metrics::{Counter, Family, Registry};

use crate::{
    metrics::http::{self as http_metrics, Series},
    policy::profile::{self, ProfileRoute},
};

/// The `route_*` families.
#[derive(Clone)]
pub(crate) struct Families {
    logical: http_metrics::Families,
    attempts: http_metrics::Families,
    retryable: Family<Counter>,
}

/// The series of one route.
pub(in crate::outbound) struct ProfileRouteMetrics {
    /// Counts each request once, however many attempts it has.
    pub(in crate::outbound) logical: Arc<Series>,
    pub(in crate::outbound) attempts: Arc<Series>,
    pub(in crate::outbound) no_budget: Arc<Counter>,
}

impl Families {
    pub(crate) fn new(registry: &Registry) -> Self {
        Self {
            logical: http_metrics::Families::with_prefix(
                registry,
                "route_",
                ", by route of the ServiceProfile, each request counted once",
            ),
            attempts: http_metrics::Families::with_prefix(
                registry,
                "route_actual_",
                ", by route of the ServiceProfile, each attempt counted",
            ),
            retryable: registry.counter(
                "route_retryable_total",
                "Retries that were not made because the retry budget was empty, by route of the ServiceProfile",
            ),
        }
    }

    pub(in crate::outbound) fn route(&self, dst: &str, route: Option<&ProfileRoute>) -> ProfileRouteMetrics {
        let labels = profile::route_labels("outbound", dst, route);
        ProfileRouteMetrics {
            no_budget: self.retryable.get(&labels.clone().with("skipped", "no_budget")),
            attempts: self.attempts.series(labels.clone()),
            logical: self.logical.series(labels),
        }
    }
}
