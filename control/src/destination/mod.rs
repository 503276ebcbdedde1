//! The destination service: endpoints of services, and profiles of names and addresses.
//!
//! A request names its target as `host:port`; `target` turns it into a key of the cluster, the stream follows that key,
//! and `translate` turns answers into messages. Nothing here reads objects.

pub mod http2;
pub mod server;
mod target;
mod translate;

use tulle_core::drain;
use tulle_proto::destination::Http2ClientParams;

use crate::cluster::Cluster;
use crate::destination::server::Service;
use crate::grpc;

/// What the service adds to the cluster's answers.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// HTTP/2 settings for clients of meshed endpoints. Default none: clients keep their own.
    pub http2: Option<Http2ClientParams>,
    /// Whether endpoints in the client's zone weigh more. Default no.
    pub zone_weights: ZoneWeights,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZoneWeights {
    #[default]
    Equal,
    /// Ten times the weight in the client's own zone.
    PreferLocal,
}

/// The service, ready to be added to a server; its streams end when the drain begins.
pub fn server(cluster: Cluster, config: Config, drain: drain::Watch) -> grpc::Service<Service> {
    grpc::Service(Service::new(cluster, config, drain))
}
