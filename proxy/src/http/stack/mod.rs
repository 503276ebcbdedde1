//! The services around each request: admission, memory of heads, counters, error responses, filters and the access log.

pub(crate) mod access_log;
pub(crate) mod admission;
pub(crate) mod error_response;
pub(crate) mod filters;
pub(crate) mod head_memory;
pub(crate) mod layers;
