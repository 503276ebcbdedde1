use std::sync::Arc;

use tokio::sync::Notify;
use tulle_core::drain;

/// Starts the graceful shutdown of one HTTP/2 connection of a client. HTTP/1 connections close after a response with
/// [`CloseAfterResponse`] instead.
pub(crate) type ConnectionCloser = Arc<Notify>;

/// Extension of a response after which the client's HTTP/1 connection closes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CloseAfterResponse;

/// The signals that start the graceful shutdown of a connection: `drain` of any, `closer` of an HTTP/2 connection only.
pub(crate) struct CloseSignals<'a> {
    pub(crate) closer: ConnectionCloser,
    pub(crate) drain: &'a drain::Watch,
}
