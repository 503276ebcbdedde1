//! Metrics of the attempts of a request: the interface that routes and profiles implement.

use http::Response;

use crate::http::{body::Body, error::Error};

/// Metrics of the attempts of one request. An implementation leaves out what is counted elsewhere: for a route of the policy,
/// `RouteAttemptGuard` counts attempts.
pub(in crate::outbound) trait AttemptMetrics {
    fn attempt_started(&self) {}
    /// An attempt has ended. `grpc_status` is the status of a gRPC response, if it is known.
    fn attempt_ended(&self, _result: &Result<Response<Body>, Error>, _grpc_status: Option<i32>) {}
    fn retry_started(&self) {}
    fn retry_succeeded(&self) {}
    fn retry_limit_exceeded(&self) {}
    fn budget_exhausted(&self) {}
    /// No endpoint is available for a retry.
    fn endpoints_exhausted(&self) {}
}
