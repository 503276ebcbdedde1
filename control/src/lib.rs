//! The control plane of tulle: destination, policy and identity services over one source of objects.

pub mod cluster;
pub mod destination;
pub mod identity;
pub mod model;
pub mod policy;
pub mod resources;
pub mod serving;
pub mod source;
pub mod tls;
pub mod trust;
mod wire;
