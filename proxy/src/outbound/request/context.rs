//! A request, and the properties of its client's connection.

use std::net::SocketAddr;

use http::Request;
use tulle_core::drain;

use crate::{
    http::{body::Body, upgrade::reply_channels::ReplyChannels},
    outbound::{endpoint::LocalEndpoints, metrics::Families},
};

/// The properties of the client's connection that its requests need.
#[derive(Clone, Copy)]
pub(in crate::outbound) struct ClientContext<'a> {
    pub(in crate::outbound) worker: usize,
    pub(in crate::outbound) client_addr: SocketAddr,
    pub(in crate::outbound) families: &'a Families,
    pub(in crate::outbound) drain: &'a drain::Watch,
    pub(in crate::outbound) local_endpoints: LocalEndpoints,
}

/// A request on its way to a backend.
pub(in crate::outbound) struct OutgoingRequest<'a> {
    pub(in crate::outbound) req: &'a mut Request<Body>,
    /// The channels to the client. The upgrade channel is taken when an upgrade succeeds.
    pub(in crate::outbound) reply_channels: ReplyChannels,
    /// Whether the copies for mirrors were started. Each mirror gets only one copy, even if the request is then sent to another
    /// address.
    pub(in crate::outbound) mirrors_started: bool,
}
