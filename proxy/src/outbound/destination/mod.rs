//! Destinations (O2): discovery, the cache, and compiled snapshots of policy and profile.

pub(super) mod cache;
mod compile;
pub(crate) mod discovery;
mod dns_addresses;
pub(super) mod profile;
pub(super) mod snapshot;
pub(super) mod timeouts_and_retries;
