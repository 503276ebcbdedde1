//! Measures the age of changes on arrival.

use std::sync::Arc;

use time::OffsetDateTime;
use tulle_core::metrics::{Histogram, Labels, Registry};

use crate::resources::Kind;

/// Age of the changes of one kind. `None` for kinds without this metric.
pub(super) struct InformerLag(Option<Arc<Histogram>>);

impl InformerLag {
    pub(super) fn new(registry: &Registry, kind: Kind) -> Self {
        let name = match kind {
            Kind::Endpoints => "endpoints_informer_lag_seconds",
            Kind::EndpointSlice => "endpointslices_informer_lag_seconds",
            Kind::Service => "services_informer_lag_seconds",
            Kind::Server => "servers_informer_lag_seconds",
            Kind::Pod => "pods_informer_lag_seconds",
            Kind::ExternalWorkload => "externalworkload_informer_lag_seconds",
            Kind::ServiceProfile => "serviceprofiles_informer_lag_seconds",
            _ => return Self(None),
        };
        let help = "Time from the newest `Update` in the object's managed fields, which have whole seconds, until the change arrives.";
        Self(Some(registry.histogram(name, help, BUCKETS).get(&Labels::new())))
    }

    pub(super) fn is_measured(&self) -> bool {
        self.0.is_some()
    }

    /// Records a change that was made at this time.
    pub(super) fn observe(&self, changed_at: OffsetDateTime) {
        if let Some(histogram) = &self.0 {
            let age = OffsetDateTime::now_utc() - changed_at;
            histogram.observe(age.as_seconds_f64().max(0.0));
        }
    }
}

const BUCKETS: &[f64] = &[0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0];
