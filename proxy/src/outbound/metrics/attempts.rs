//! Metrics of the attempts of a request: the interface that routes and profiles implement.

use http::Response;
use tokio::time::Instant;

use crate::http::{body::Body, error::Error};

/// Metrics of the attempts of one request. An implementation omits the methods whose events are counted elsewhere. For example,
/// `RouteAttemptGuard` counts the attempts on a route of the policy.
pub(in crate::outbound) trait AttemptMetrics {
    fn attempt_started(&self) {}
    /// Counts an attempt without a response, or observes the response until its end. `started_at` is the start of the attempt.
    fn observe_attempt(
        &self,
        result: Result<Response<Body>, Error>,
        _started_at: Instant,
    ) -> Result<Response<Body>, Error> {
        result
    }
    fn retry_started(&self) {}
    fn retry_succeeded(&self) {}
    fn retry_limit_exceeded(&self) {}
    fn budget_exhausted(&self) {}
    /// No endpoint is available for a retry.
    fn endpoints_exhausted(&self) {}
}
