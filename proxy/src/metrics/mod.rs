//! Metric handles that a request only increments. A handle is looked up when its route or endpoint is built, or by the first
//! request with a new label value. Only the counters of failures are looked up each time.

mod append_map;
pub(crate) mod balancers;
pub(crate) mod failures;
pub(crate) mod hosts;
pub(crate) mod http;
pub(crate) mod invalid_updates;
pub(crate) mod routes;
