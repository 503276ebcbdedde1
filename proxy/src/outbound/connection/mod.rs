//! Connections of applications (O1–O4): redirected, to an explicit proxy, and to a service by name.

mod by_name;
pub(super) mod context;
mod explicit;
mod http;
mod opaque;
mod redirected;
