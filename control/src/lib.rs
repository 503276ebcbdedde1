//! The control plane of tulle: destination, policy and identity services over one source of objects.

pub mod cluster;
pub mod model;
pub mod resources;
