//! Answers of the control plane as JSON values, which are printed as JSON or as YAML.
//!
//! Names are those of the API, in camel case; what is not set is left out.

mod inbound;
mod outbound;
mod parts;
mod profile;

pub(super) use inbound::server;
pub(super) use outbound::policy as outbound;
pub(super) use profile::profile;
