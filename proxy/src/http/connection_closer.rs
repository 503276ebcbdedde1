//! Signals that close a connection of a client gracefully.

use std::sync::Arc;

use tokio::sync::Notify;
use tulle_core::drain;

/// Starts the graceful shutdown of a client's HTTP/2 connection. An HTTP/1 connection closes after a response with
/// [`CloseAfterResponse`] instead.
pub(crate) type ConnectionCloser = Arc<Notify>;

/// Extension of a response after which the client's HTTP/1 connection closes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CloseAfterResponse;

/// The signals that start the graceful shutdown of a connection. `closer` has an effect on HTTP/2 connections only.
pub(crate) struct CloseSignals<'a> {
    pub(crate) closer: ConnectionCloser,
    pub(crate) drain: &'a drain::Watch,
}
