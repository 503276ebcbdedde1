//! Choosing an endpoint: who is there, who is well, and who is quickest.
//!
//! Discovery's changes enter through [`endpoints`], which keeps what stays; a [`balancer::Balancer`] publishes the result
//! as a snapshot that every worker reads. A request takes an endpoint from it, holds a [`load::Pending`] until it is
//! answered, and tells the endpoint's [`breaker::Breaker`] how it ended.
//! No sockets here: dialling is the business of who asked. Only [`balancer`] ever waits.

pub(crate) mod balancer;
pub(crate) mod breaker;
pub(crate) mod endpoints;
pub(crate) mod load;
pub(crate) mod p2c;
pub(crate) mod weighted;
