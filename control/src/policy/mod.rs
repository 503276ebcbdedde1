//! The policy services: server policies of workload ports, and client policies of destinations.
//!
//! A request names a workload and a port, or a client and a target. Both become keys of the cluster, to which the
//! stream subscribes, and `translate` converts the values to messages. This module does not read objects.

pub mod config;
pub mod inbound;
mod messages;
pub mod outbound;
mod translate;
mod workload;

use crate::cluster::Cluster;
use crate::grpc::Service;
use crate::policy::config::Config;
use crate::tls::mesh_credentials::ClientCertificates;

/// Creates the service for server policies. If client certificates are required, a workload can read only the policies of its own
/// ports.
pub fn inbound_server(
    cluster: Cluster,
    client_certificates: ClientCertificates,
) -> Service<inbound::InboundPolicyService> {
    Service(inbound::InboundPolicyService::new(cluster, client_certificates))
}

/// Creates the service for client policies. If client certificates are required, a client can read only the policies for clients
/// in its own namespace.
pub fn outbound_server(
    cluster: Cluster,
    client_certificates: ClientCertificates,
    config: Config,
) -> Service<outbound::OutboundPolicyService> {
    Service(outbound::OutboundPolicyService::new(
        cluster,
        client_certificates,
        config,
    ))
}
