//! The HTTP server: HTTP/1 and HTTP/2, gRPC calls and WebSocket upgrades on one port.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _, stream};
use http::header::{
    ALLOW, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, DATE, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body as _, Frame};
use http_body_util::{Full, StreamBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;
use tonic::body::Body;
use tulle_core::drain::Watch;

use super::app::App;
use super::grpc;

/// Serves one connection until it ends, or until its requests complete after the process starts to drain.
pub(super) async fn serve<IO>(stream: IO, app: Arc<App>, watch: Watch)
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let handler = Arc::new(ConnectionHandler {
        echo_service: grpc::service(app.clone()),
        app,
        watch: watch.clone(),
    });
    let service = service_fn(|req| {
        let handler = handler.clone();
        async move { Ok::<_, Infallible>(handler.handle(req).await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new());
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(HTTP2_WINDOW_BYTES)
        .initial_connection_window_size(HTTP2_WINDOW_BYTES);
    let mut connection = std::pin::pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        () = watch.signaled() => None,
    };
    let ended = match ended {
        Some(ended) => Some(ended),
        // A request that has arrived is read before the connection is closed as idle: its client cannot know that it may send it again.
        None => tokio::select! {
            biased;
            ended = connection.as_mut() => Some(ended),
            () = tokio::task::yield_now() => None,
        },
    };
    if ended.is_none() {
        connection.as_mut().graceful_shutdown();
        // Errors of the peer are ignored here; the load generator counts them.
        let _ = connection.await;
    }
}

/// Handles the requests of one connection.
struct ConnectionHandler {
    app: Arc<App>,
    echo_service: grpc::Service,
    watch: Watch,
}

impl ConnectionHandler {
    async fn handle(&self, req: Request<Incoming>) -> Response<Body> {
        super::app::delay_response(self.app.delay).await;
        let is_head = req.method() == Method::HEAD;
        let mut rsp = self.route(req).await;
        rsp.headers_mut().insert(X_REPLICA, self.app.replica.clone());
        if self.app.fixed_date {
            let date = HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT");
            rsp.headers_mut().insert(DATE, date);
        }
        if is_head {
            // hyper would send the body of a response to HEAD over HTTP/2.
            if let Some(length) = rsp.body().size_hint().exact() {
                rsp.headers_mut().insert(CONTENT_LENGTH, length.into());
            }
            rsp = rsp.map(|_| Body::empty());
        }
        rsp
    }

    async fn route(&self, req: Request<Incoming>) -> Response<Body> {
        let path = req.uri().path();
        match path {
            "/" => text_response(StatusCode::OK, format!("{}\n", self.app.name)),
            "/ready" => text_response(StatusCode::OK, "ready\n".into()),
            "/echo" => echo_response(req),
            "/headers" => headers_response(req.headers()),
            "/ws" => self.websocket(req),
            _ if path.starts_with(grpc::HEALTH_PATH_PREFIX) => grpc::health(req).await,
            _ if path.starts_with(grpc::ECHO_PATH_PREFIX) => grpc::call(&self.echo_service, req).await,
            _ => match split_number_path(path) {
                Some(("bytes", n)) => zero_bytes(n),
                Some(("delay", ms)) => {
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    text_response(StatusCode::OK, format!("{} after {ms} ms\n", self.app.name))
                }
                Some(("status", code)) => match u16::try_from(code).map(StatusCode::from_u16) {
                    Ok(Ok(status)) if !status.is_informational() => text_response(status, format!("{status}\n")),
                    _ => text_response(
                        StatusCode::BAD_REQUEST,
                        format!("{code} is not a final status: give 200 to 999\n"),
                    ),
                },
                _ => text_response(
                    StatusCode::NOT_FOUND,
                    "try /, /ready, /echo, /bytes/N, /delay/MS, /status/CODE, /headers, /ws or gRPC tulle.bench.Echo\n"
                        .into(),
                ),
            },
        }
    }

    /// Upgrades an HTTP/1.1 request to a WebSocket that echoes its messages.
    fn websocket(&self, mut req: Request<Incoming>) -> Response<Body> {
        let key = req
            .headers()
            .get(SEC_WEBSOCKET_KEY)
            .map(|key| derive_accept_key(key.as_bytes()));
        let is_upgrade = req
            .headers()
            .get(UPGRADE)
            .is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"websocket"));
        let (Some(accept), true, &Method::GET) = (key, is_upgrade, req.method()) else {
            let mut rsp = text_response(
                StatusCode::UPGRADE_REQUIRED,
                "/ws speaks WebSocket: GET with upgrade: websocket\n".into(),
            );
            rsp.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
            rsp.headers_mut().insert(UPGRADE, HeaderValue::from_static("websocket"));
            return rsp;
        };
        let upgrade = hyper::upgrade::on(&mut req);
        let (delay, watch, guard) = (self.app.delay, self.watch.clone(), self.watch.guard());
        tokio::spawn(async move {
            // The client may close the connection before the upgrade completes.
            let Ok(io) = upgrade.await else { return };
            let socket = WebSocketStream::from_raw_socket(TokioIo::new(io), Role::Server, None).await;
            echo_messages(socket, delay, watch).await;
            drop(guard);
        });
        let mut rsp = Response::new(Body::empty());
        *rsp.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        rsp.headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("upgrade"));
        rsp.headers_mut().insert(UPGRADE, HeaderValue::from_static("websocket"));
        if let Ok(accept) = HeaderValue::from_str(&accept) {
            rsp.headers_mut().insert(SEC_WEBSOCKET_ACCEPT, accept);
        }
        rsp
    }
}

async fn echo_messages(mut socket: WebSocketStream<TokioIo<hyper::upgrade::Upgraded>>, delay: Duration, watch: Watch) {
    loop {
        let message = tokio::select! {
            biased;
            message = socket.next() => message,
            () = watch.signaled() => break,
        };
        // tungstenite responds to pings and to the closing handshake while the socket is read.
        let Some(Ok(message)) = message else { return };
        if message.is_text() || message.is_binary() {
            super::app::delay_response(delay).await;
            if socket.send(message).await.is_err() {
                return;
            }
        }
    }
    let _ = socket.close(None).await;
}

/// Splits a path that ends with a number: `/bytes/17` gives `("bytes", 17)`.
fn split_number_path(path: &str) -> Option<(&str, u64)> {
    let (name, value) = path.strip_prefix('/')?.split_once('/')?;
    Some((name, value.parse().ok()?))
}

fn text_response(status: StatusCode, text: String) -> Response<Body> {
    let mut rsp = Response::new(Body::new(Full::new(Bytes::from(text))));
    *rsp.status_mut() = status;
    rsp.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    rsp
}

/// Streams the request body back as it arrives, without buffering it.
fn echo_response(req: Request<Incoming>) -> Response<Body> {
    let content_type = req.headers().get(CONTENT_TYPE).cloned();
    let mut rsp = Response::new(Body::new(req.into_body()));
    if let Some(content_type) = content_type {
        rsp.headers_mut().insert(CONTENT_TYPE, content_type);
    }
    rsp
}

fn zero_bytes(n: u64) -> Response<Body> {
    let chunks = stream::unfold(n, |left| async move {
        let size = left.min(ZEROS.len() as u64);
        let chunk = Bytes::from_static(&ZEROS[..size as usize]);
        (size > 0).then(|| (Ok::<_, Infallible>(Frame::data(chunk)), left - size))
    });
    let mut rsp = Response::new(Body::new(StreamBody::new(chunks)));
    rsp.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(n));
    rsp.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    rsp
}

/// The request headers as a JSON object of arrays.
fn headers_response(headers: &HeaderMap) -> Response<Body> {
    let mut fields: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (name, value) in headers {
        fields
            .entry(name.as_str())
            .or_default()
            .push(String::from_utf8_lossy(value.as_bytes()).into_owned());
    }
    let json = serde_json::to_string(&fields).expect("a map of strings is valid JSON");
    let mut rsp = text_response(StatusCode::OK, json);
    rsp.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    rsp
}

const X_REPLICA: HeaderName = HeaderName::from_static("x-replica");
/// HTTP/2 window size, large enough for bulk transfers over a local network.
const HTTP2_WINDOW_BYTES: u32 = 4 << 20;
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
