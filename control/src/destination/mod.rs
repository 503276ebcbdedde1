//! The destination service: endpoints of services, and profiles of names and addresses.
//!
//! A request names its target as `host:port`. `target` turns it into a key of the cluster, the stream subscribes to
//! that key, and `translate` converts the values to messages. This module does not read objects.

pub mod config;
pub mod http2;
pub mod server;
mod target;
mod translate;

use crate::cluster::remote_clusters::AllClusters;
use crate::destination::config::Config;
use crate::destination::server::Service;
use crate::grpc;
use crate::tls::mesh_credentials::ClientCertificates;

/// Creates the gRPC service. It never ends a stream: a stream lasts as long as its connection. If client certificates are
/// required, the context token of a client can name only the client's own namespace.
pub fn server(
    clusters: impl Into<AllClusters>,
    client_certificates: ClientCertificates,
    config: Config,
) -> grpc::Service<Service> {
    grpc::Service(Service::new(clusters.into(), client_certificates, config))
}
