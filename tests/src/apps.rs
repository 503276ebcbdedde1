//! Test applications: echo servers, servers with custom handlers, and abrupt termination.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tulle_bench::serve;

use crate::client::{AnyBody, any, full};
use crate::mesh::{self, DETECTED_TCP, HTTP, Mesh, OPAQUE};

/// A running application. Dropping it stops it and closes its connections.
pub struct App(JoinHandle<()>);

impl Drop for App {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl App {
    /// Stops the application immediately and waits until its port is free.
    pub async fn kill(mut self) {
        self.0.abort();
        let ended = (&mut self.0).await;
        assert!(
            ended.is_err_and(|error| error.is_cancelled()),
            "the application was running"
        );
    }
}

/// Starts echo servers on all ports of a workload: HTTP/1, HTTP/2, gRPC and WebSocket on [`HTTP`], bytes on [`DETECTED_TCP`] and
/// [`OPAQUE`].
pub async fn start_echo(mesh: &Mesh, workload: &str) {
    let ip = mesh.ip(workload);
    serve(serve::Args {
        http: vec![mesh.app_addr(workload, HTTP)],
        tcp: vec![(ip, DETECTED_TCP).into(), (ip, OPAQUE).into()],
        https: Vec::new(),
        tcp_speaks_first: Vec::new(),
        delay: Duration::ZERO,
        fixed_date: false,
        name: workload.into(),
        ready_file: None,
    })
    .await;
}

/// Runs a test with `client` and the echo server `web`, both meshed, twice: with transport headers between the proxies,
/// and without.
pub fn run_with_client_and_web(test: impl AsyncFn(&Mesh) + Send + Sync) {
    for mesh in [mesh::mesh(), mesh::mesh().transparent()] {
        mesh.workload("client").workload("web").run(async |mesh: &Mesh| {
            start_echo(mesh, "web").await;
            test(mesh).await;
        });
    }
}

/// Starts an HTTP echo server that is not a workload.
pub async fn start_echo_at(name: &str, addr: SocketAddr) {
    serve(serve::Args {
        http: vec![addr],
        tcp: Vec::new(),
        https: Vec::new(),
        tcp_speaks_first: Vec::new(),
        delay: Duration::ZERO,
        fixed_date: false,
        name: name.into(),
        ready_file: None,
    })
    .await;
}

/// Starts a server that sends a greeting first and then echoes.
pub async fn start_greeting_server(workload: &str, addr: SocketAddr) {
    serve(serve::Args {
        http: Vec::new(),
        tcp: Vec::new(),
        https: Vec::new(),
        tcp_speaks_first: vec![addr],
        delay: Duration::ZERO,
        fixed_date: false,
        name: workload.into(),
        ready_file: None,
    })
    .await;
}

async fn serve(args: serve::Args) {
    let server = serve::Server::bind(&args).await.expect("each port is listened on once");
    // The task ends with the runtime of the test.
    tokio::spawn(server.run(std::future::pending()));
}

/// Runs `serve` for each connection.
pub fn serve_tcp<F>(listener: TcpListener, serve: impl Fn(TcpStream) -> F + Send + 'static) -> App
where
    F: Future<Output = ()> + Send + 'static,
{
    App(tokio::spawn(async move {
        // The task owns the connections, so that they end with it.
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let (stream, _) = accepted.expect("file descriptors are available");
                    stream.set_nodelay(true).expect("a TCP socket");
                    connections.spawn(serve(stream));
                }
                Some(_) = connections.join_next() => {}
            }
        }
    }))
}

/// An HTTP server for HTTP/1 and HTTP/2.
pub fn serve_http<F>(listener: TcpListener, answer: impl Fn(Request<Incoming>) -> F + Send + Sync + 'static) -> App
where
    F: Future<Output = Response<AnyBody>> + Send + 'static,
{
    let answer = Arc::new(answer);
    serve_tcp(listener, move |stream| {
        let answer = answer.clone();
        async move {
            let service = service_fn(move |req| {
                let answer = answer(req);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            let builder = auto::Builder::new(TokioExecutor::new());
            // A peer that closes the connection is not a failure of the application.
            let _ = builder
                .serve_connection_with_upgrades(TokioIo::new(stream), service)
                .await;
        }
    })
}

/// An HTTP server that keeps the requests it receives.
pub struct Recorder {
    received: Arc<Mutex<Vec<ReceivedRequest>>>,
    _app: App,
}

/// A request that a [`Recorder`] has received.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    pub method: Method,
    pub version: Version,
    /// Path and query.
    pub target: String,
    /// The authority or the `host` header.
    pub host: String,
    pub headers: HeaderMap,
    /// `None` if the body is incomplete.
    pub body: Option<Bytes>,
}

impl Recorder {
    /// Starts the server on [`HTTP`] of a workload. `status` returns the status of the nth response; the first one is 0.
    pub async fn start(mesh: &Mesh, workload: &str, status: impl Fn(usize) -> u16 + Send + Sync + 'static) -> Self {
        let received = Arc::<Mutex<Vec<ReceivedRequest>>>::default();
        let (list, status) = (received.clone(), Arc::new(status));
        let app = serve_http(mesh.listen(workload, HTTP).await, move |req| {
            let (list, status) = (list.clone(), status.clone());
            async move {
                let received = ReceivedRequest::read(req).await;
                let n_before = {
                    let mut list = list.lock();
                    list.push(received);
                    list.len() - 1
                };
                let rsp = Response::builder().status(status(n_before));
                rsp.body(full("recorded")).expect("a status of HTTP")
            }
        });
        Self { received, _app: app }
    }

    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.received.lock().clone()
    }

    /// The targets of the requests.
    pub fn targets(&self) -> Vec<String> {
        self.requests().into_iter().map(|received| received.target).collect()
    }
}

impl ReceivedRequest {
    async fn read(req: Request<Incoming>) -> Self {
        let (head, body) = req.into_parts();
        let authority = head.uri.authority().map(|authority| authority.to_string());
        let host = head.headers.get("host").and_then(|host| host.to_str().ok());
        Self {
            host: authority.or_else(|| host.map(str::to_owned)).unwrap_or_default(),
            target: head.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
            method: head.method,
            version: head.version,
            headers: head.headers,
            body: body.collect().await.ok().map(|body| body.to_bytes()),
        }
    }

    /// The value of a header; empty if it is missing.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap_or("not text"))
    }
}

/// Answers a gRPC request with response headers, and sends nothing after them.
///
/// Reads the whole request first, because the proxy waits for the gRPC status in trailers only after it has sent the request.
pub async fn grpc_headers_only(req: Request<Incoming>) -> Response<AnyBody> {
    // An incomplete request gets the same response.
    let _ = req.into_body().collect().await;
    let mut rsp = unfinished_response(0, Duration::ZERO);
    let kind = HeaderValue::from_static("application/grpc");
    rsp.headers_mut().insert("content-type", kind);
    rsp
}

/// A response body of `n_frames` one-byte frames, `interval` apart.
pub fn slow_response(n_frames: usize, interval: Duration) -> Response<AnyBody> {
    frames_response(n_frames, interval, BodyEnd::Complete)
}

/// A response body of `n_frames` one-byte frames, `interval` apart, that never ends.
pub fn unfinished_response(n_frames: usize, interval: Duration) -> Response<AnyBody> {
    frames_response(n_frames, interval, BodyEnd::Never)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BodyEnd {
    Complete,
    Never,
}

fn frames_response(n_frames: usize, interval: Duration, end: BodyEnd) -> Response<AnyBody> {
    let frames = stream::unfold(0, move |n| async move {
        if n < n_frames {
            tokio::time::sleep(if n == 0 { Duration::ZERO } else { interval }).await;
            return Some((Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"x"))), n + 1));
        }
        if end == BodyEnd::Never {
            std::future::pending::<()>().await;
        }
        None
    });
    Response::new(any(StreamBody::new(Box::pin(frames))))
}
