//! The values that the services return. They do not depend on Kubernetes types, protobuf or time.

pub mod endpoints;
pub mod inbound;
pub mod outbound;
pub mod profile;
pub mod reference;
pub mod remote_discovery;
pub mod route;
