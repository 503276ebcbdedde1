//! The ways back to the client of a request, besides the response.

use tokio::sync::oneshot;

use crate::http::upgrade::{interim::SharedInterimSink, tunnel::TunnelSide};

/// The ways back to the client of a request, besides the response: the tunnel of an upgrade, and interim responses. The body of the
/// request carries them, until a service takes them.
#[derive(Default)]
pub(crate) struct ReplyChannels {
    /// For an upgrade request: receives the client's side of the tunnel after the upgrade response is sent.
    pub(crate) upgrade: Option<oneshot::Receiver<TunnelSide>>,
    /// Where interim responses go; without it they are discarded.
    pub(crate) interims: Option<SharedInterimSink>,
}
