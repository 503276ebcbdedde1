//! Converts responses of the control plane to JSON values, which are printed as JSON or YAML.
//!
//! Most field names are those of the API in camel case. Fields that are not set are left out.

pub(super) mod inbound;
pub(super) mod outbound;
mod parts;
pub(super) mod profile;
