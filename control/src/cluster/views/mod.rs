//! Views: functions that compute a value from the store for a key, such as a Service and a port.

pub mod endpoints;
pub mod inbound;
pub mod outbound;
pub mod profiles;
mod routes;
pub(super) mod view;
mod workload;
pub mod workload_list;
