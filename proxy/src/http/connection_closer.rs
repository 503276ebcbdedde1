use std::sync::Arc;

use tokio::sync::Notify;
use tulle_core::drain;

/// Starts the graceful shutdown of one HTTP/2 connection of a client. HTTP/1 connections close by their `connection`
/// header instead.
pub(crate) type ConnectionCloser = Arc<Notify>;

/// The signals that start the graceful shutdown of a connection.
pub(crate) struct CloseSignals<'a> {
    pub(crate) closer: ConnectionCloser,
    pub(crate) drain: &'a drain::Watch,
}
