//! A compiled ServiceProfile.

use std::sync::Arc;

use http::HeaderValue;
use tokio::time::Instant;

use crate::{
    outbound::{
        backend::Backends,
        metrics::profiles::{Families, ProfileRouteMetrics},
    },
    policy::{
        filter::Filter,
        profile::{Profile, ProfileRoute, RetryBudgetState},
    },
};

/// A compiled ServiceProfile.
pub(crate) struct CompiledProfile {
    pub(in crate::outbound) profile: Profile,
    /// The traffic split, or the service itself.
    pub(in crate::outbound) backends: Backends<Filter>,
    /// The metrics of each route, in the profile's order. The last ones are those of requests that match no route.
    pub(in crate::outbound) route_metrics: Vec<ProfileRouteMetrics>,
    pub(in crate::outbound) budget: Option<Arc<RetryBudgetState>>,
    /// Value of `l5d-dst-canonical` in every request.
    pub(in crate::outbound) canonical: Option<HeaderValue>,
}

impl CompiledProfile {
    /// `dst` is the logical name with the dialled port. `previous` is the compiled profile that this one replaces.
    pub(in crate::outbound) fn new(
        families: &Families,
        profile: &Profile,
        dst: &str,
        backends: Backends<Filter>,
        previous: Option<&Self>,
    ) -> Self {
        // A budget with the same parameters keeps its state.
        let reused = previous.filter(|previous| previous.profile.retry_budget == profile.retry_budget);
        let new_budget = |config| Arc::new(RetryBudgetState::new(config, Instant::now()));
        let routes = profile.routes.iter().map(Some).chain([None]);
        Self {
            route_metrics: routes.map(|route| families.route(dst, route)).collect(),
            budget: reused.map_or_else(|| profile.retry_budget.map(new_budget), |reused| reused.budget.clone()),
            canonical: HeaderValue::from_str(dst).ok(),
            profile: profile.clone(),
            backends,
        }
    }

    pub(in crate::outbound) fn routes(&self) -> &[ProfileRoute] {
        &self.profile.routes
    }
}
