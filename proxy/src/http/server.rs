//! Serves HTTP/1 or HTTP/2 on a client's connection.

use futures_util::future::Either;
use http::{Request, Response};
use tower::Service;

use crate::{
    http::{
        body::Body, client::HttpVersion, connection_closer::CloseSignals, error::Error, h1, h2,
        server_config::ServerConfig, stack::layers::RequestService,
    },
    net::io::Io,
};

/// Serves one connection until it ends. A drain shuts it down gracefully; `closer` shuts down HTTP/2 connections only.
///
/// If `service` fails, an HTTP/2 stream is reset with the error's reason, and an HTTP/1 connection is closed.
///
/// # Errors
/// The connection fails, or the client closes it during a request; in HTTP/1 also if `service` or a response body fails.
pub(crate) fn serve<S>(
    io: Io,
    protocol: HttpVersion,
    service: RequestService<S>,
    config: &ServerConfig,
    CloseSignals { closer, drain }: CloseSignals<'_>,
) -> impl Future<Output = Result<(), Error>>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error> + Clone + Send + 'static,
    S::Future: Send,
{
    match protocol {
        HttpVersion::Http1 => Either::Left(h1::server::serve(io, service, &config.limits, drain)),
        // Boxed: most idle connections are HTTP/1, and this keeps their future small.
        HttpVersion::Http2 => Either::Right(Box::pin(h2::server::serve(io, service, config, closer, drain))),
    }
}
