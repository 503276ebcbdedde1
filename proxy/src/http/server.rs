//! Serving HTTP/1 and HTTP/2 on an `Io` with hyper: the seam behind which other servers can stand.

use std::{
    pin::{Pin, pin},
    sync::Arc,
};

use http::{Request, Response};
use hyper::{body::Incoming, server::conn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::Notify;
use tower::Service;
use tulle_core::drain;

use crate::{
    http::{body::Body, client::Protocol, error::Error, h2},
    net::io::Io,
};

/// Bytes hyper buffers of an HTTP/1 connection; it caps request heads, too. 32 KiB pieces cost half the CPU of its
/// default in bulk.
const MAX_BUFFER: usize = 32 * 1024;

/// Asks for a graceful end of one client connection: finish what is in flight, take nothing new.
pub(crate) type Closer = Arc<Notify>;

/// How clients of one direction are served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) http2: h2::Params,
}

/// Serves one connection until it ends, gracefully once `drain` or `closer` asks.
///
/// Every request is answered by `service`; where that fails, HTTP/2 streams are reset with the error's reason and
/// HTTP/1 connections close.
pub(crate) async fn serve<S>(
    io: Io,
    protocol: Protocol,
    service: S,
    config: &Config,
    closer: Closer,
    drain: &drain::Watch,
) -> Result<(), hyper::Error>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error> + Clone + Send + 'static,
    S::Future: Send,
{
    let service = Adapter(service);
    match protocol {
        Protocol::Http1 => {
            let mut builder = conn::http1::Builder::new();
            // What the application did not say, the proxy does not add.
            builder.max_buf_size(MAX_BUFFER).auto_date_header(false);
            let connection = builder.serve_connection(TokioIo::new(io), service).with_upgrades();
            drive(connection, |connection| connection.graceful_shutdown(), &closer, drain).await
        }
        Protocol::Http2 => {
            let mut builder = conn::http2::Builder::new(TokioExecutor::new());
            let params = &config.http2;
            builder
                .timer(TokioTimer::new())
                .auto_date_header(false)
                .initial_stream_window_size(params.stream_window)
                .initial_connection_window_size(params.connection_window)
                .max_header_list_size(params.max_header_list)
                .max_concurrent_streams(params.max_concurrent_streams)
                .keep_alive_interval(params.keep_alive.map(|pings| pings.interval));
            if let Some(pings) = params.keep_alive {
                builder.keep_alive_timeout(pings.timeout);
            }
            if let Some(size) = params.max_frame_size {
                builder.max_frame_size(size);
            }
            if let Some(size) = params.max_send_buffer {
                builder.max_send_buf_size(size);
            }
            let connection = builder.serve_connection(TokioIo::new(io), service);
            // Boxed: clients that keep a connection idle speak HTTP/1, and need not pay for what HTTP/2 holds.
            Box::pin(drive(
                connection,
                |connection| connection.graceful_shutdown(),
                &closer,
                drain,
            ))
            .await
        }
    }
}

/// Serves a connection; once asked, `end` makes it end gracefully.
async fn drive<C>(
    connection: C,
    end: impl FnOnce(Pin<&mut C>),
    closer: &Closer,
    drain: &drain::Watch,
) -> Result<(), hyper::Error>
where
    C: Future<Output = Result<(), hyper::Error>>,
{
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        ended = &mut connection => return ended,
        () = asked_to_end(closer, drain) => end(connection.as_mut()),
    }
    connection.await
}

async fn asked_to_end(closer: &Closer, drain: &drain::Watch) {
    tokio::select! {
        () = closer.notified() => {}
        () = drain.signaled() => {}
    }
}

/// A tower service as hyper wants it. Ours are always ready, so a clone answers each request.
#[derive(Clone)]
struct Adapter<S>(S);

impl<S> hyper::service::Service<Request<Incoming>> for Adapter<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error> + Clone,
{
    type Response = Response<Body>;
    type Error = Error;
    type Future = S::Future;

    fn call(&self, req: Request<Incoming>) -> Self::Future {
        self.0.clone().call(req.map(Body::from))
    }
}
