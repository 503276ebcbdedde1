//! Test applications: echo servers, servers with custom handlers, and abrupt termination.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tulle_bench::serve;

use crate::client::{AnyBody, any};
use crate::mesh::{self, HTTP, Mesh, OPAQUE, TCP};

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

/// Starts echo servers on all ports of a workload: HTTP/1, HTTP/2, gRPC and WebSocket on [`HTTP`], bytes on [`TCP`] and [`OPAQUE`].
pub async fn start_echo(mesh: &Mesh, workload: &str) {
    let ip = mesh.ip(workload);
    serve(serve::Args {
        http: vec![mesh.app_addr(workload, HTTP)],
        tcp: vec![(ip, TCP).into(), (ip, OPAQUE).into()],
        https: Vec::new(),
        tcp_speaks_first: Vec::new(),
        delay: Duration::ZERO,
        fixed_date: false,
        name: workload.into(),
        ready_file: None,
    })
    .await;
}

/// Runs a test with `client` and the echo server `web`, both meshed, once for each `ProxyTransport`.
pub fn run_with_pair(test: impl AsyncFn(&Mesh) + Send + Sync) {
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

/// Answers a gRPC request with response headers, and sends nothing after them.
///
/// Reads the whole request first: the proxy waits for a gRPC status in trailers only after it has sent the request.
pub async fn grpc_headers_only(req: Request<Incoming>) -> Response<AnyBody> {
    // An incomplete request gets the same response.
    let _ = req.into_body().collect().await;
    let mut rsp = unfinished_response(0, Duration::ZERO);
    let kind = HeaderValue::from_static("application/grpc");
    rsp.headers_mut().insert("content-type", kind);
    rsp
}

/// A response body of `pieces` one-byte frames, `each` apart.
pub fn slow_response(pieces: usize, each: Duration) -> Response<AnyBody> {
    frames_response(pieces, each, BodyEnd::Complete)
}

/// A response body of `pieces` one-byte frames, `each` apart, that never ends.
pub fn unfinished_response(pieces: usize, each: Duration) -> Response<AnyBody> {
    frames_response(pieces, each, BodyEnd::Never)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BodyEnd {
    Complete,
    Never,
}

fn frames_response(pieces: usize, each: Duration, end: BodyEnd) -> Response<AnyBody> {
    let frames = stream::unfold(0, move |n| async move {
        if n < pieces {
            tokio::time::sleep(if n == 0 { Duration::ZERO } else { each }).await;
            return Some((Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"x"))), n + 1));
        }
        if end == BodyEnd::Never {
            std::future::pending::<()>().await;
        }
        None
    });
    Response::new(any(StreamBody::new(Box::pin(frames))))
}
