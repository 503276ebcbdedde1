//! The destination service: endpoints of services, and profiles of names and addresses.
//!
//! A request names its target as `host:port`. `target` turns it into a key of the cluster, the stream subscribes to
//! that key, and `translate` converts the values to messages. This module does not read objects.

pub mod config;
pub mod http2;
pub mod server;
mod target;
mod translate;

use crate::cluster::Cluster;
use crate::destination::config::Config;
use crate::destination::server::Service;
use crate::grpc;

/// Creates the service. Its streams end with their connections.
pub fn server(cluster: Cluster, config: Config) -> grpc::Service<Service> {
    grpc::Service(Service::new(cluster, config))
}
