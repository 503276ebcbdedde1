//! The policy services: what a workload's port accepts, and how clients reach a destination.
//!
//! A request names a workload and a port, or a client and a target; both become keys of the cluster that a stream
//! follows, and `translate` turns answers into messages. Nothing here reads objects.

pub mod inbound;
pub mod outbound;
mod source;
mod translate;

use tulle_core::drain;
use tulle_proto::inbound::inbound_server_policies_server::InboundServerPoliciesServer;
use tulle_proto::outbound::outbound_policies_server::OutboundPoliciesServer;

use crate::cluster::Cluster;

/// What the services add to the cluster's answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    /// Whether proxies honour `l5d-timeout` and `l5d-retry-*` of requests. Default no.
    pub request_headers: RequestHeaders,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestHeaders {
    #[default]
    Ignore,
    Honour,
}

/// Policies of workload ports; the streams end when the drain begins.
pub fn inbound_server(cluster: Cluster, drain: drain::Watch) -> InboundServerPoliciesServer<inbound::Service> {
    InboundServerPoliciesServer::new(inbound::Service::new(cluster, drain))
}

/// Policies of destinations; the streams end when the drain begins.
pub fn outbound_server(
    cluster: Cluster,
    config: Config,
    drain: drain::Watch,
) -> OutboundPoliciesServer<outbound::Service> {
    OutboundPoliciesServer::new(outbound::Service::new(cluster, config, drain))
}
