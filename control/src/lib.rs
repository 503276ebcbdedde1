//! The control plane of tulle: destination, policy and identity services over one source of objects.

pub mod identity;
pub mod serving;
pub mod tls;
pub mod trust;
