//! Channels to the client of a request, in addition to the response.

use crate::http::upgrade::{interim::SharedInterimSink, tunnel::ClientTunnel};

/// The tunnel of an upgrade, and the sink for interim responses. The request body carries them until a service takes them.
#[derive(Default)]
pub(crate) struct ReplyChannels {
    /// Only for an upgrade request: the client's side of the tunnel.
    pub(crate) upgrade: Option<ClientTunnel>,
    /// The sink for interim responses; without a sink they are discarded.
    pub(crate) interims: Option<SharedInterimSink>,
}
