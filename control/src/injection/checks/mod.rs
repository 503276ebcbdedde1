//! Checks of pods whose sidecar would not work as required.

pub(super) mod proxy_user;
pub(super) mod service_account;
