//! Channels to the client of a request, in addition to the response.

use tokio::sync::oneshot;

use crate::http::upgrade::{interim::SharedInterimSink, tunnel::TunnelSide};

/// Channels to the client of a request, in addition to the response: the tunnel of an upgrade, and interim responses. The
/// request body carries them until a service takes them.
#[derive(Default)]
pub(crate) struct ReplyChannels {
    /// Only for an upgrade request: receives the client's side of the tunnel after the upgrade response was sent.
    pub(crate) upgrade: Option<oneshot::Receiver<TunnelSide>>,
    /// The sink for interim responses; without a sink they are discarded.
    pub(crate) interims: Option<SharedInterimSink>,
}
