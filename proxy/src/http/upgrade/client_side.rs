//! What the HTTP server of a request has for it besides the body: the tunnel of an upgrade, and interim responses.

use tokio::sync::oneshot;

use crate::http::upgrade::{interim::InterimSender, tunnel::TunnelEnd};

/// The client's side of a request. The body of a request carries it, until a service takes it.
#[derive(Default)]
pub(crate) struct ClientSide {
    /// For an upgrade request: receives the client's side of the tunnel after the upgrade response is sent.
    pub(crate) upgrade: Option<oneshot::Receiver<TunnelEnd>>,
    /// Receives interim responses. Without it, they are discarded.
    pub(crate) interims: Option<InterimSender>,
}
