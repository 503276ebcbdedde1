//! A tiny HTTP server for operators: metrics, probes, and what else a binary adds.
//!
//! It speaks HTTP/1 and HTTP/2 in the clear, and its requests and responses fit into memory.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use crate::addr::canonical;
use crate::drain::Watch;
use crate::metrics::Registry;
use crate::ready::Readiness;

/// The server, until it is served.
pub struct Admin {
    routes: Routes,
}

/// What a handler gets.
#[derive(Clone, Debug)]
pub struct AdminRequest {
    pub client: SocketAddr,
    pub method: Method,
    pub query: Option<String>,
    pub headers: HeaderMap,
    pub body: Bytes,
}

type Routes = HashMap<&'static str, Handler>;
type Handler = Arc<dyn Fn(AdminRequest) -> HandlerFuture + Send + Sync>;
type HandlerFuture = Pin<Box<dyn Future<Output = Response<Full<Bytes>>> + Send>>;

/// A response of plain text.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut rsp = Response::new(Full::new(body.into()));
    *rsp.status_mut() = status;
    rsp.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    rsp
}

impl AdminRequest {
    /// Whether the client is on this machine; v4-mapped loopback addresses count.
    pub fn is_loopback(&self) -> bool {
        canonical(self.client).ip().is_loopback()
    }
}

impl Admin {
    /// A server of `/metrics`, `/live` and `/ready`.
    pub fn new(registry: Registry, readiness: Readiness) -> Self {
        Self { routes: Routes::new() }
            .route("/metrics", move |req| {
                std::future::ready(metrics(&registry, &req.headers))
            })
            .route("/live", |_| std::future::ready(text(StatusCode::OK, "live\n")))
            .route("/ready", move |_| {
                std::future::ready(match readiness.is_ready() {
                    true => text(StatusCode::OK, "ready\n"),
                    false => text(StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
                })
            })
    }

    /// Serves this path, whatever the method, by this handler.
    pub fn route<F>(mut self, path: &'static str, handler: impl Fn(AdminRequest) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        self.routes.insert(path, Arc::new(move |req| Box::pin(handler(req))));
        self
    }

    /// Serves until the drain, then lets the requests in flight end, bounded.
    pub async fn serve(self, listener: TcpListener, drain: Watch) {
        let _guard = drain.guard();
        let routes = Arc::new(self.routes);
        let mut connections = JoinSet::new();
        loop {
            // All branches only wait; an accepted connection is never lost, because `accept` is cancel-safe.
            tokio::select! {
                biased;
                () = drain.signaled() => break,
                Some(_) = connections.join_next() => {}
                accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                    Ok((stream, client)) => {
                        connections.spawn(serve_connection(stream, client, routes.clone(), drain.clone()));
                    }
                    Err(err) => {
                        warn!(%err, "accepting an admin connection failed");
                        // Out of descriptors, most likely: trying again at once would only burn the CPU.
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        drop(listener);
        if timeout(DRAIN_LIMIT, async { while connections.join_next().await.is_some() {} })
            .await
            .is_err()
        {
            warn!(
                n_connections = connections.len(),
                "cutting admin connections that did not end"
            );
        }
    }
}

async fn serve_connection(stream: TcpStream, client: SocketAddr, routes: Arc<Routes>, drain: Watch) {
    let served = match timeout(HEAD_LIMIT, is_http2(&stream)).await {
        Ok(Ok(true)) => serve_http2(stream, client, routes, drain).await,
        Ok(Ok(false)) => serve_http1(stream, client, routes, drain).await,
        Ok(Err(err)) => return debug!(%client, %err, "reading an admin connection failed"),
        Err(_) => return debug!(%client, "an admin connection said nothing"),
    };
    if let Err(err) = served {
        debug!(%client, %err, "serving an admin connection failed");
    }
}

/// Whether the client starts with the HTTP/2 preface; no HTTP/1 method begins like it.
///
/// A preface that comes in pieces of one or two bytes is taken for HTTP/1 and refused there.
async fn is_http2(stream: &TcpStream) -> io::Result<bool> {
    let mut start = [0; 3];
    let n = stream.peek(&mut start).await?;
    Ok(n == start.len() && start == *b"PRI")
}

async fn serve_http1(
    stream: TcpStream,
    client: SocketAddr,
    routes: Arc<Routes>,
    drain: Watch,
) -> Result<(), hyper::Error> {
    let service = service_fn(move |req| respond(req, client, routes.clone()));
    let conn = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .serve_connection(TokioIo::new(stream), service);
    let mut conn = std::pin::pin!(conn);
    tokio::select! {
        served = conn.as_mut() => return served,
        () = drain.signaled() => conn.as_mut().graceful_shutdown(),
    }
    conn.await
}

async fn serve_http2(
    stream: TcpStream,
    client: SocketAddr,
    routes: Arc<Routes>,
    drain: Watch,
) -> Result<(), hyper::Error> {
    let service = service_fn(move |req| respond(req, client, routes.clone()));
    let conn = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(HEAD_LIMIT)
        .serve_connection(TokioIo::new(stream), service);
    let mut conn = std::pin::pin!(conn);
    tokio::select! {
        served = conn.as_mut() => return served,
        () = drain.signaled() => conn.as_mut().graceful_shutdown(),
    }
    conn.await
}

async fn respond(
    req: Request<Incoming>,
    client: SocketAddr,
    routes: Arc<Routes>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = req.into_parts();
    let Some(handler) = routes.get(head.uri.path()) else {
        return Ok(text(StatusCode::NOT_FOUND, "not found\n"));
    };
    let body = match timeout(BODY_LIMIT, Limited::new(body, MAX_BODY).collect()).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(_)) => {
            return Ok(text(
                StatusCode::PAYLOAD_TOO_LARGE,
                "the body is broken or longer than 64 KiB\n",
            ));
        }
        Err(_) => return Ok(text(StatusCode::REQUEST_TIMEOUT, "the body took too long\n")),
    };
    let query = head.uri.query().map(str::to_owned);
    Ok(handler(AdminRequest {
        client,
        method: head.method,
        query,
        headers: head.headers,
        body,
    })
    .await)
}

fn metrics(registry: &Registry, headers: &HeaderMap) -> Response<Full<Bytes>> {
    let plain = registry.render();
    let mut rsp = match accepts_gzip(headers).then(|| gzip(plain.as_bytes())) {
        Some(Ok(packed)) => {
            let mut rsp = text(StatusCode::OK, packed);
            rsp.headers_mut()
                .insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            rsp
        }
        Some(Err(_)) | None => text(StatusCode::OK, plain),
    };
    rsp.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4"));
    rsp
}

fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers
        .get_all(ACCEPT_ENCODING)
        .iter()
        .filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(','))
        .any(|coding| coding.split(';').next().unwrap_or("").trim() == "gzip")
}

fn gzip(plain: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(plain)?;
    encoder.finish()
}

/// More than any monitoring needs; keeps a leak on the other side from taking our descriptors.
const MAX_CONNECTIONS: usize = 256;
const MAX_BODY: usize = 64 * 1024;
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const HEAD_LIMIT: Duration = Duration::from_secs(60);
const BODY_LIMIT: Duration = Duration::from_secs(10);
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
