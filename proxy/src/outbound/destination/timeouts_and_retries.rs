//! Timeouts and retries of a route rule, as the policy sets them.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::policy::{
    client::{HeaderOverrides, RetryPolicy, RouteAction, Timeouts},
    profile::{RetryBudget, RetryBudgetState},
};

/// Timeouts and retries of a route rule.
pub(crate) struct TimeoutsAndRetries {
    pub(in crate::outbound) timeouts: Timeouts,
    pub(in crate::outbound) retry: Option<RetryPolicy>,
    pub(in crate::outbound) header_overrides: HeaderOverrides,
    pub(in crate::outbound) budget: Arc<RetryBudgetState>,
}

impl TimeoutsAndRetries {
    /// `None` if the rule sets no timeouts and no retries, and requests cannot override them. `previous_budget` returns the budget
    /// of the same rule in the previous policy, if there is one.
    pub(in crate::outbound) fn from_action(
        action: &RouteAction,
        previous_budget: impl FnOnce() -> Option<Arc<RetryBudgetState>>,
    ) -> Option<Self> {
        let is_plain = action.timeouts == Timeouts::default()
            && action.retry.is_none()
            && action.header_overrides == HeaderOverrides::Ignore;
        (!is_plain).then(|| Self {
            timeouts: action.timeouts,
            retry: action.retry.clone(),
            header_overrides: action.header_overrides,
            budget: previous_budget()
                .unwrap_or_else(|| Arc::new(RetryBudgetState::new(DEFAULT_RETRY_BUDGET, Instant::now()))),
        })
    }

    pub(in crate::outbound) fn budget(&self) -> &Arc<RetryBudgetState> {
        &self.budget
    }
}

/// Retry budget of a rule. Besides 10 retries per second, retries can at most double the request rate, so that they do not overload
/// a failing service.
const DEFAULT_RETRY_BUDGET: RetryBudget = RetryBudget {
    ratio: 1.0,
    min_per_second: 10,
    ttl: Duration::from_secs(10),
};
