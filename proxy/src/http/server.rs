//! Serving HTTP on an `Io`, whichever version it speaks.

use std::sync::Arc;

use futures_util::future::Either;
use http::{Request, Response};
use tokio::sync::Notify;
use tower::Service;
use tulle_core::drain;

use crate::{
    http::{body::Body, client::Protocol, error::Error, h1, h2, layers::Rescued},
    net::io::Io,
};

/// Asks for a graceful end of one client connection: finish what is in flight, take nothing new. HTTP/1 has a header
/// for that.
pub(crate) type Closer = Arc<Notify>;

/// How clients of one direction are served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) http1: h1::server::Config,
    pub(crate) http2: h2::Params,
}

/// Serves one connection until it ends, gracefully once `drain` or `closer` asks.
///
/// Every request is answered by `service`; where that fails, HTTP/2 streams are reset with the error's reason and
/// HTTP/1 connections close.
///
/// # Errors
/// The connection broke, or its client left amid a request.
pub(crate) fn serve<S>(
    io: Io,
    protocol: Protocol,
    service: Rescued<S>,
    config: &Config,
    closer: Closer,
    drain: &drain::Watch,
) -> impl Future<Output = Result<(), Error>>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error> + Clone + Send + 'static,
    S::Future: Send,
{
    match protocol {
        Protocol::Http1 => Either::Left(h1::server::serve(io, service, &config.http1, drain)),
        // Boxed: clients that keep a connection idle speak HTTP/1, and need not pay for what HTTP/2 holds.
        Protocol::Http2 => Either::Right(Box::pin(h2::server::serve(io, service, config, closer, drain))),
    }
}
