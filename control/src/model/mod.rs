//! What we serve, as plain values: no Kubernetes types, no protobuf, no clock.

pub mod endpoints;
pub mod inbound;
pub mod outbound;
pub mod profile;
pub mod reference;
pub mod route;
