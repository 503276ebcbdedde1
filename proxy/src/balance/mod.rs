//! Selects an endpoint for each request: one that is available, with a low load.
//!
//! Discovery updates enter through [`endpoint_set`], which keeps unchanged endpoints. A [`balancer::Balancer`] publishes the result
//! as a snapshot that every worker reads. A request picks an endpoint, holds a [`candidate::InFlightGuard`] until the response, and
//! records its outcome in the endpoint's [`breaker::Breaker`].
//! This module opens no sockets; callers dial. Only [`balancer`] waits.

pub(crate) mod balancer;
pub(crate) mod breaker;
pub(crate) mod candidate;
pub(crate) mod endpoint_set;
pub(crate) mod load;
pub(crate) mod p2c;
pub(crate) mod weighted;
