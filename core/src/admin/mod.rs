//! A tiny HTTP server for operators: metrics, probes, and what else a binary adds.
//!
//! It speaks HTTP/1 and HTTP/2, in the clear and over TLS where a binary brings that; its requests and responses fit into
//! memory.

pub mod access;
mod pages;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tracing::debug;

use crate::addr::canonical;
use crate::admin::access::{Caller, Guard, Tls};
use crate::admin::pages::{Coding, Pages};
use crate::descriptors;
use crate::drain::Watch;
use crate::listener::{Accepted, Listener};
use crate::metrics::Registry;
use crate::ready::Readiness;

/// The server, until it is served.
pub struct Admin {
    registry: Registry,
    routes: Routes,
    terminate: Option<Terminate>,
}

/// What a handler gets.
#[derive(Clone, Debug)]
pub struct AdminRequest {
    pub client: SocketAddr,
    /// The address of this machine at which the client asks.
    pub local: SocketAddr,
    pub method: Method,
    pub query: Option<String>,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// Which HTTP a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    Http1,
    Http2,
}

/// A connection whose bytes are HTTP.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// What is left of a connection once its TLS is off.
type Opened = (Box<dyn Stream>, Version, Tls);
type Terminate = Arc<dyn Fn(TcpStream) -> OpenedFuture + Send + Sync>;
type OpenedFuture = Pin<Box<dyn Future<Output = io::Result<Opened>> + Send>>;

#[derive(Default)]
struct Routes {
    handlers: HashMap<Cow<'static, str>, Handler>,
    /// Paths that are open to everybody, whatever the guard says.
    open: HashSet<Cow<'static, str>>,
    guard: Option<Guard>,
}

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
        let admin = Self {
            registry: registry.clone(),
            routes: Routes::default(),
            terminate: None,
        };
        let pages = Arc::new(Pages::new(registry));
        admin
            .route("/metrics", move |req| {
                let pages = pages.clone();
                async move { metrics(&pages, &req.headers).await }
            })
            .probe("/live", |_| std::future::ready(text(StatusCode::OK, "live\n")))
            .probe("/ready", move |_| std::future::ready(ready(&readiness)))
    }

    /// Serves this path, whatever the method, by this handler.
    pub fn route<F>(
        mut self,
        path: impl Into<Cow<'static, str>>,
        handler: impl Fn(AdminRequest) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        let handler: Handler = Arc::new(move |req| Box::pin(handler(req)));
        self.routes.handlers.insert(path.into(), handler);
        self
    }

    /// Serves this path as [`Self::route`] does, to everybody: the kubelet proves nothing.
    pub fn probe<F>(
        mut self,
        path: impl Into<Cow<'static, str>>,
        handler: impl Fn(AdminRequest) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        let path = path.into();
        self.routes.open.insert(path.clone());
        self.route(path, handler)
    }

    /// Has other requests than probes judged first.
    pub fn guarded_by(mut self, guard: Guard) -> Self {
        self.routes.guard = Some(guard);
        self
    }

    /// Hands connections that begin with TLS to `terminate`, unread; it says what comes out of them.
    ///
    /// It may take a minute, and is cut then; its client has said something within five seconds.
    pub fn tls<F, S>(mut self, terminate: impl Fn(TcpStream) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = io::Result<(S, Version, Tls)>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        self.terminate = Some(Arc::new(move |stream| {
            let terminating = terminate(stream);
            Box::pin(async move {
                let (stream, version, tls) = terminating.await?;
                let stream: Box<dyn Stream> = Box::new(stream);
                Ok((stream, version, tls))
            })
        }));
        self
    }

    /// Serves until the drain, then lets the requests in flight end, bounded. When all places are taken, newcomers are served,
    /// and those who have most of them lose one.
    pub async fn serve(self, listener: TcpListener, drain: Watch) {
        let _guard = drain.guard();
        let (routes, terminate) = (Arc::new(self.routes), self.terminate);
        let max = MAX_CONNECTIONS.min(descriptors::limit() / 8);
        let listener = Listener::new("admin", listener, max, &self.registry);
        let watch = drain.clone();
        let serve = move |accepted| serve_connection(accepted, terminate.clone(), routes.clone(), watch.clone());
        listener.run(drain.signaled(), serve).await;
    }
}

async fn serve_connection(accepted: Accepted, terminate: Option<Terminate>, routes: Arc<Routes>, drain: Watch) {
    let (client, is_tls) = (accepted.client, accepted.is_tls());
    let Accepted { stream, place, .. } = accepted;
    let local = match stream.local_addr() {
        Ok(local) => canonical(local),
        Err(err) => return debug!(%client, %err, "an admin connection has no address"),
    };
    let caller = |tls| Caller { client, local, tls };
    let opened = match terminate.filter(|_| is_tls) {
        Some(terminate) => timeout(HEAD_LIMIT, terminate(stream)).await,
        None => timeout(HEAD_LIMIT, open(stream)).await,
    };
    let served = match opened {
        Ok(Ok((stream, Version::Http2, tls))) => serve_http2(place.watch(stream), caller(tls), routes, drain).await,
        Ok(Ok((stream, Version::Http1, tls))) => serve_http1(place.watch(stream), caller(tls), routes, drain).await,
        Ok(Err(err)) => return debug!(%client, %err, "opening an admin connection failed"),
        Err(_) => return debug!(%client, "an admin connection was not opened in time"),
    };
    if let Err(err) = served {
        debug!(%client, %err, "serving an admin connection failed");
    }
}

/// Learns what the client speaks from the HTTP/2 preface, which no HTTP/1 method begins like.
///
/// A preface that comes in pieces of one or two bytes is taken for HTTP/1 and refused there.
async fn open(stream: TcpStream) -> io::Result<Opened> {
    let mut start = [0; 3];
    let n = stream.peek(&mut start).await?;
    let version = match start[..n] == *b"PRI" {
        true => Version::Http2,
        false => Version::Http1,
    };
    Ok((Box::new(stream), version, Tls::None))
}

async fn serve_http1(
    stream: impl Stream + 'static,
    caller: Caller,
    routes: Arc<Routes>,
    drain: Watch,
) -> Result<(), hyper::Error> {
    let service = service_fn(move |req| respond(req, caller.clone(), routes.clone()));
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
    stream: impl Stream + 'static,
    caller: Caller,
    routes: Arc<Routes>,
    drain: Watch,
) -> Result<(), hyper::Error> {
    let service = service_fn(move |req| respond(req, caller.clone(), routes.clone()));
    let conn = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(HEAD_LIMIT)
        .max_concurrent_streams(MAX_STREAMS)
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
    caller: Caller,
    routes: Arc<Routes>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = req.into_parts();
    let path = head.uri.path();
    let Some(handler) = routes.handlers.get(path) else {
        return Ok(text(StatusCode::NOT_FOUND, "not found\n"));
    };
    if let Some(guard) = &routes.guard
        && !routes.open.contains(path)
        && let Err(status) = guard(caller.clone(), head.clone()).await
    {
        return Ok(text(status, "refused by the policy of this port\n"));
    }
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
        client: caller.client,
        local: caller.local,
        method: head.method,
        query,
        headers: head.headers,
        body,
    })
    .await)
}

/// Whether the process is ready; if not, a line for each thing that is missing.
fn ready(readiness: &Readiness) -> Response<Full<Bytes>> {
    let reasons = readiness.reasons();
    if reasons.is_empty() {
        return text(StatusCode::OK, "ready\n");
    }
    let mut page = "not ready\n".to_owned();
    for reason in reasons {
        page.push_str(&reason);
        page.push('\n');
    }
    text(StatusCode::SERVICE_UNAVAILABLE, page)
}

async fn metrics(pages: &Pages, headers: &HeaderMap) -> Response<Full<Bytes>> {
    let coding = match accepts_gzip(headers) {
        true => Coding::Gzip,
        false => Coding::Plain,
    };
    let Some(page) = pages.get(coding).await else {
        return text(StatusCode::INTERNAL_SERVER_ERROR, "");
    };
    let mut rsp = text(StatusCode::OK, page);
    let headers = rsp.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4"));
    if coding == Coding::Gzip {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
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

/// More than any monitoring needs; less where the process may have few files.
const MAX_CONNECTIONS: usize = 256;
/// Requests at once on a connection of HTTP/2.
const MAX_STREAMS: u32 = 16;
const MAX_BODY: usize = 64 * 1024;
/// How long a connection may take from its first byte to the end of TLS and of the first head, and be without a request.
const HEAD_LIMIT: Duration = Duration::from_secs(60);
const BODY_LIMIT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
