//! Handles that are only incremented. Looked up when a route or an endpoint is built, never by a request.

pub(crate) mod balancers;
pub(crate) mod failures;
pub(crate) mod hosts;
pub(crate) mod http;
mod known;
pub(crate) mod routes;
pub(crate) mod unreadable;
