//! Admin server: a small HTTP server for metrics, probes and further paths of each binary.
//!
//! It speaks HTTP/1 and HTTP/2, in plaintext, and over TLS if the binary supplies a TLS terminator. Request and response
//! bodies are held in memory.

pub mod access;
mod metrics_renderer;

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
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tracing::debug;

use crate::addr::canonical;
use crate::admin::access::{AuthorizeFn, Caller, Tls};
use crate::admin::metrics_renderer::{ContentEncoding, MetricsRenderer};
use crate::descriptors;
use crate::drain::Watch;
use crate::listener::{AcceptedConnection, ConnectionEnd, Listener};
use crate::memory;
use crate::metrics::Registry;
use crate::open_responses::{OpenResponses, PART_BYTES, ResponseBody};
use crate::readiness::Readiness;
use crate::request_body::{self, ReadError};

/// An admin server that is being configured; [`serve`](Self::serve) starts it.
pub struct Admin {
    registry: Registry,
    routes: Routes,
    tls_terminator: Option<TlsTerminator>,
}

/// The input of a handler.
#[derive(Clone, Debug)]
pub struct AdminRequest {
    pub client: SocketAddr,
    /// The local address that the client connected to.
    pub local: SocketAddr,
    pub method: Method,
    pub query: Option<String>,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// The HTTP version of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    Http1,
    Http2,
}

/// A byte stream that carries HTTP: TCP, or TLS over TCP.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A stream whose HTTP version is known, after TLS termination if it uses TLS.
type DetectedStream = (Box<dyn Stream>, Version, Tls);
type TlsTerminator = Arc<dyn Fn(TcpStream) -> TerminateFuture + Send + Sync>;
type TerminateFuture = Pin<Box<dyn Future<Output = io::Result<DetectedStream>> + Send>>;

#[derive(Default)]
struct Routes {
    handlers: HashMap<Cow<'static, str>, Handler>,
    /// Paths without authorization, regardless of `authorize`.
    public_paths: HashSet<Cow<'static, str>>,
    authorize: Option<AuthorizeFn>,
}

/// What the connections of a server share.
struct Server {
    routes: Routes,
    tls_terminator: Option<TlsTerminator>,
    open_responses: Arc<OpenResponses>,
}

/// Limits of a server, derived from the file and memory limits of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limits {
    connections: usize,
    /// Bytes of the responses that are not sent completely.
    open_response_bytes: usize,
}

impl Limits {
    /// Returns the limits for a process that may open `files` files and use `memory` bytes.
    fn from_resources(files: usize, memory: Option<u64>) -> Self {
        let memory = memory.map_or(usize::MAX, |memory| usize::try_from(memory).unwrap_or(usize::MAX));
        let by_memory = (memory / 32 / BYTES_PER_CONNECTION).max(MIN_CONNECTIONS);
        Self {
            connections: MAX_CONNECTIONS.min(files / 8).min(by_memory),
            open_response_bytes: memory / 16,
        }
    }
}

type Handler = Arc<dyn Fn(AdminRequest) -> HandlerFuture + Send + Sync>;
type HandlerFuture = Pin<Box<dyn Future<Output = Response<Full<Bytes>>> + Send>>;

/// A plain-text response.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut rsp = Response::new(Full::new(body.into()));
    *rsp.status_mut() = status;
    rsp.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    rsp
}

impl AdminRequest {
    /// Whether the client's address is loopback; IPv4-mapped loopback addresses count.
    pub fn is_loopback(&self) -> bool {
        canonical(self.client).ip().is_loopback()
    }
}

impl Admin {
    /// A server for `/metrics`, `/live` and `/ready`.
    pub fn new(registry: Registry, readiness: Readiness) -> Self {
        let admin = Self {
            registry: registry.clone(),
            routes: Routes::default(),
            tls_terminator: None,
        };
        let pages = Arc::new(MetricsRenderer::new(registry));
        admin
            .route("/metrics", move |req| {
                let pages = pages.clone();
                async move { metrics(&pages, &req.headers).await }
            })
            .public_route("/live", |_| std::future::ready(text(StatusCode::OK, "live\n")))
            .public_route("/ready", move |_| std::future::ready(ready(&readiness)))
    }

    /// Serves this path with this handler, for every method.
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

    /// Serves this path as [`Self::route`] does, but without authorization, for the kubelet, which presents no identity.
    pub fn public_route<F>(
        mut self,
        path: impl Into<Cow<'static, str>>,
        handler: impl Fn(AdminRequest) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        let path = path.into();
        self.routes.public_paths.insert(path.clone());
        self.route(path, handler)
    }

    /// Sets the authorization check for all requests except those of public routes.
    pub fn authorize_with(mut self, authorize: AuthorizeFn) -> Self {
        self.routes.authorize = Some(authorize);
        self
    }

    /// Sets the TLS terminator for connections whose first byte starts a TLS handshake; nothing has been read from them.
    ///
    /// The terminator returns the decrypted stream. It is cancelled after 60 seconds. The client must send its first byte
    /// within five seconds.
    pub fn tls<F, S>(mut self, terminate: impl Fn(TcpStream) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = io::Result<(S, Version, Tls)>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        self.tls_terminator = Some(Arc::new(move |stream| {
            let terminating = terminate(stream);
            Box::pin(async move {
                let (stream, version, tls) = terminating.await?;
                let stream: Box<dyn Stream> = Box::new(stream);
                Ok((stream, version, tls))
            })
        }));
        self
    }

    /// Serves until the drain starts, then waits for requests in flight, for a limited time.
    ///
    /// At the connection limit, a new connection replaces an open one, by the rules of [`connections`](crate::connections).
    pub async fn serve(self, listener: TcpListener, drain: Watch) {
        let _drain_guard = drain.guard();
        let limits = Limits::from_resources(descriptors::raise_limit(), memory::limit());
        let server = Arc::new(Server {
            routes: self.routes,
            tls_terminator: self.tls_terminator,
            open_responses: OpenResponses::new(limits.open_response_bytes),
        });
        let listener = Listener::new("admin", listener, limits.connections, &self.registry);
        let watch = drain.clone();
        let serve = move |accepted| serve_connection(accepted, server.clone(), watch.clone());
        listener.run(drain.signaled(), serve).await;
    }
}

async fn serve_connection(accepted: AcceptedConnection, server: Arc<Server>, drain: Watch) -> ConnectionEnd {
    let (client, is_tls) = (accepted.client, accepted.is_tls());
    let AcceptedConnection { stream, permit, .. } = accepted;
    let local = match stream.local_addr() {
        Ok(local) => canonical(local),
        Err(err) => {
            debug!(%client, %err, "reading the local address of an admin connection failed");
            return ConnectionEnd::Failed;
        }
    };
    let caller = |tls| Caller { client, local, tls };
    let opened = match server.tls_terminator.as_ref().filter(|_| is_tls) {
        Some(terminate) => timeout(HANDSHAKE_TIMEOUT, terminate(stream)).await,
        None => timeout(HANDSHAKE_TIMEOUT, detect_version(stream)).await,
    };
    if let Ok(Ok((_, _, Tls::Terminated { client_id: Some(id) }))) = &opened {
        permit.set_identity(id.as_str());
    }
    let served = match opened {
        Ok(Ok((stream, Version::Http2, tls))) => serve_http2(permit.track(stream), caller(tls), server, drain).await,
        Ok(Ok((stream, Version::Http1, tls))) => serve_http1(permit.track(stream), caller(tls), server, drain).await,
        Ok(Err(err)) => {
            debug!(%client, %err, "TLS or protocol detection of an admin connection failed");
            return ConnectionEnd::Failed;
        }
        Err(_) => {
            debug!(%client, "an admin connection did not finish TLS and protocol detection in time");
            return ConnectionEnd::Failed;
        }
    };
    match served {
        Ok(()) => ConnectionEnd::Closed,
        // The timeout of a request head also ends idle connections.
        Err(err) if err.is_timeout() => ConnectionEnd::Closed,
        Err(err) => {
            debug!(%client, %err, "serving an admin connection failed");
            ConnectionEnd::Failed
        }
    }
}

/// Detects the HTTP version from the first three bytes of the HTTP/2 preface, with which no HTTP/1 method starts.
///
/// A preface that arrives in pieces of one or two bytes is taken for HTTP/1 and refused there.
async fn detect_version(stream: TcpStream) -> io::Result<DetectedStream> {
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
    server: Arc<Server>,
    drain: Watch,
) -> Result<(), hyper::Error> {
    let service = service_fn(move |req| respond(req, caller.clone(), server.clone()));
    let conn = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_TIMEOUT)
        .max_buf_size(MAX_HTTP1_BUFFER_BYTES)
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
    server: Arc<Server>,
    drain: Watch,
) -> Result<(), hyper::Error> {
    let service = service_fn(move |req| respond(req, caller.clone(), server.clone()));
    let conn = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(HTTP2_PING_INTERVAL)
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
        .max_header_list_size(MAX_HEADER_LIST_BYTES)
        .max_send_buf_size(PART_BYTES)
        .initial_stream_window_size(HTTP2_WINDOW_BYTES)
        .initial_connection_window_size(HTTP2_WINDOW_BYTES)
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
    server: Arc<Server>,
) -> Result<Response<ResponseBody>, Infallible> {
    let client = caller.client.ip();
    let (head, body) = server.routes.respond(req, caller).await.into_parts();
    let content = body.collect().await?.to_bytes();
    Ok(Response::from_parts(head, server.open_responses.add(client, content)))
}

impl Routes {
    async fn respond(&self, req: Request<Incoming>, caller: Caller) -> Response<Full<Bytes>> {
        let (head, body) = req.into_parts();
        let path = head.uri.path();
        let Some(handler) = self.handlers.get(path) else {
            return text(StatusCode::NOT_FOUND, "not found\n");
        };
        if let Some(authorize) = &self.authorize
            && !self.public_paths.contains(path)
            && let Err(status) = authorize(caller.clone(), head.clone()).await
        {
            return text(status, "refused by the policy of this port\n");
        }
        let body = match timeout(BODY_READ_TIMEOUT, request_body::read(body, MAX_BODY_BYTES)).await {
            Ok(Ok(body)) => body,
            Ok(Err(ReadError::TooLong { .. })) => {
                return text(StatusCode::PAYLOAD_TOO_LARGE, "the body is longer than 8 KiB\n");
            }
            Ok(Err(ReadError::Body(_))) => return text(StatusCode::BAD_REQUEST, "reading the body failed\n"),
            Err(_) => return text(StatusCode::REQUEST_TIMEOUT, "the body took too long\n"),
        };
        let query = head.uri.query().map(str::to_owned);
        handler(AdminRequest {
            client: caller.client,
            local: caller.local,
            method: head.method,
            query,
            headers: head.headers,
            body,
        })
        .await
    }
}

/// The response of `/ready`: 200, or one line for each reason why the process is not ready.
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

async fn metrics(pages: &MetricsRenderer, headers: &HeaderMap) -> Response<Full<Bytes>> {
    let coding = match accepts_gzip(headers) {
        true => ContentEncoding::Gzip,
        false => ContentEncoding::Plain,
    };
    let Some(page) = pages.get(coding).await else {
        return text(StatusCode::INTERNAL_SERVER_ERROR, "");
    };
    let mut rsp = text(StatusCode::OK, page);
    let headers = rsp.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4"));
    if coding == ContentEncoding::Gzip {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    rsp
}

fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers
        .get_all(ACCEPT_ENCODING)
        .iter()
        .filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(is_acceptable_gzip)
}

/// Whether a member of `accept-encoding` is gzip with a weight above zero.
fn is_acceptable_gzip(member: &str) -> bool {
    let mut parts = member.split(';').map(str::trim);
    let is_gzip = parts.next().is_some_and(|coding| coding.eq_ignore_ascii_case("gzip"));
    let weight = parts.find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim_end()
            .eq_ignore_ascii_case("q")
            .then(|| value.trim().parse::<f32>())
    });
    is_gzip && weight.is_none_or(|weight| weight.is_ok_and(|weight| weight > 0.0))
}

/// Maximum number of open connections; lower if the limit of open files or of memory is low.
const MAX_CONNECTIONS: usize = 256;
/// However little memory the process has, probes and metrics need some connections.
const MIN_CONNECTIONS: usize = 32;
/// Maximum memory of a connection. An HTTP/2 connection reaches it with [`MAX_CONCURRENT_STREAMS`] requests whose headers, bodies
/// and unread responses have the maximum size.
const BYTES_PER_CONNECTION: usize = 192 * 1024;
/// Maximum number of concurrent requests on an HTTP/2 connection.
const MAX_CONCURRENT_STREAMS: u32 = 4;
const MAX_BODY_BYTES: usize = 8 * 1024;
/// Maximum length of the headers of a request over HTTP/2.
const MAX_HEADER_LIST_BYTES: u32 = 8 * 1024;
/// Maximum size of each of the two buffers of an HTTP/1 connection: received bytes, which include a whole request head, and bytes
/// to send.
const MAX_HTTP1_BUFFER_BYTES: usize = 16 * 1024;
/// Flow-control window of each HTTP/2 stream and connection for request bodies: the default of the protocol.
const HTTP2_WINDOW_BYTES: u32 = 65_535;
/// Maximum time for the TLS handshake, or without TLS for the detection of the HTTP version.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time for receiving a request head, including the idle time before it.
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(60);
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(60);
const BODY_READ_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
