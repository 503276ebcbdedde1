//! Metric handles that requests only increment. They are looked up when a route or an endpoint is built, or for the first request
//! with a label value; only the counters of failures are looked up each time.

mod append_map;
pub(crate) mod balancers;
pub(crate) mod failures;
pub(crate) mod hosts;
pub(crate) mod http;
pub(crate) mod invalid_updates;
pub(crate) mod routes;
