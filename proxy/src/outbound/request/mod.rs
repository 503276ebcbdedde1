//! The path of one request (O6–O12). Each of these steps contains the next one:
//!
//! - [`route::route_and_send`], once for each request: finds its route, applies the filters of the route, and starts copies for
//!   its mirrors ([`mirror::send_copies`]).
//! - [`retry::send_by_rule`] if the rule has timeouts or retries or lets requests override them, or [`profile::send_by_profile`] if
//!   a ServiceProfile replaces the routes: sends attempts, until the result of one is not retried. Other requests have one attempt.
//! - [`attempt::AttemptSender::send_attempt`], once for each attempt: selects a backend.
//! - [`backend_attempt::BackendAttempt::run`]: sends the attempt to endpoints of this backend, until one of them processes it.
//! - [`connect::RequestConnector::connect_endpoint`]: picks an endpoint and a connection to it.

mod attempt;
mod backend_attempt;
mod connect;
pub(super) mod context;
mod mirror;
mod observe;
mod profile;
mod retry;
pub(super) mod route;
