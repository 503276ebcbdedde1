//! Connections (O1–O4): of applications, redirected or to an explicit proxy; and of the gateway, to a service by name.

mod by_name;
pub(super) mod context;
mod explicit;
mod http;
mod opaque;
mod redirected;
