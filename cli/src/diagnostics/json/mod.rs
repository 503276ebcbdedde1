//! Answers of the control plane as JSON values, which are printed as JSON or as YAML.
//!
//! Names are those of the API, in camel case; what is not set is left out.

pub(super) mod inbound;
pub(super) mod outbound;
mod parts;
pub(super) mod profile;
