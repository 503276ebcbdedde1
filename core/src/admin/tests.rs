use std::io::Read;

use flate2::read::GzDecoder;
use http_body_util::Empty;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

use super::*;
use crate::drain;
use crate::metrics::Labels;

struct RunningServer {
    addr: SocketAddr,
    signal: drain::Signal,
    server: JoinHandle<()>,
    readiness: Readiness,
}

async fn start() -> RunningServer {
    start_with(|admin| admin).await
}

async fn start_with(configure: impl FnOnce(Admin) -> Admin) -> RunningServer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let registry = Registry::new();
    registry.counter("a_total", "A.").get(&Labels::new()).inc();
    let readiness = Readiness::new();
    let admin = Admin::new(registry, readiness.clone()).route("/echo", |req| async move {
        let line = format!("{} {:?} {:?} {}\n", req.method, req.query, req.body, req.is_loopback());
        text(StatusCode::OK, line)
    });
    let (signal, watch) = drain::channel();
    let server = tokio::spawn(configure(admin).serve(listener, watch));
    RunningServer {
        addr,
        signal,
        server,
        readiness,
    }
}

async fn send<B>(addr: SocketAddr, req: Request<B>) -> Response<Bytes>
where
    B: hyper::body::Body<Data = Bytes, Error = Infallible> + Send + Unpin + 'static,
{
    send_over(TcpStream::connect(addr).await.unwrap(), req).await
}

async fn send_over<B>(stream: TcpStream, req: Request<B>) -> Response<Bytes>
where
    B: hyper::body::Body<Data = Bytes, Error = Infallible> + Send + Unpin + 'static,
{
    let (mut client, conn) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .unwrap();
    let conn = tokio::spawn(conn);
    let (head, body) = client.send_request(req).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    drop(client);
    conn.await.unwrap().unwrap();
    Response::from_parts(head, body)
}

async fn send_http2(stream: TcpStream, req: Request<Empty<Bytes>>) -> Response<Bytes> {
    let (mut client, conn) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    let conn = tokio::spawn(conn);
    let (head, body) = client.send_request(req).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    drop(client);
    conn.await.unwrap().unwrap();
    Response::from_parts(head, body)
}

fn get(path: &str) -> Request<Empty<Bytes>> {
    Request::get(path).body(Empty::new()).unwrap()
}

#[tokio::test]
async fn probes_report_liveness_and_readiness() {
    let running = start().await;
    let latch = running.readiness.latch("first certificate");
    assert_eq!(send(running.addr, get("/live")).await.body(), "live\n");
    let rsp = send(running.addr, get("/ready")).await;
    assert_eq!(
        (rsp.status(), &rsp.body()[..]),
        (StatusCode::SERVICE_UNAVAILABLE, &b"not ready\nfirst certificate\n"[..])
    );
    drop(latch);
    let rsp = send(running.addr, get("/ready")).await;
    assert_eq!((rsp.status(), &rsp.body()[..]), (StatusCode::OK, &b"ready\n"[..]));
    assert_eq!(
        send(running.addr, get("/nothing")).await.status(),
        StatusCode::NOT_FOUND
    );
}

#[tokio::test]
async fn metrics_are_compressed_if_the_client_accepts_it() {
    let running = start().await;
    let plain = send(running.addr, get("/metrics")).await;
    assert_eq!(plain.headers()[CONTENT_TYPE], "text/plain; version=0.0.4");
    let mut req = get("/metrics");
    req.headers_mut()
        .insert(ACCEPT_ENCODING, HeaderValue::from_static("deflate, gzip;q=0.5"));
    let compressed = send(running.addr, req).await;
    assert_eq!(compressed.headers()[CONTENT_ENCODING], "gzip");
    let mut decompressed = String::new();
    GzDecoder::new(&compressed.body()[..])
        .read_to_string(&mut decompressed)
        .unwrap();
    assert_eq!(decompressed.as_bytes(), plain.body());
    assert!(decompressed.contains("a_total 1\n"));
    for (value, expected) in [
        ("GZIP", true),
        ("br;q=1, gzip ; Q=0.001", true),
        ("gzip;q=0", false),
        ("gzip; q=0.0, br", false),
        ("gzip;q=x", false),
        ("br", false),
    ] {
        let headers = HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static(value))]);
        assert_eq!(accepts_gzip(&headers), expected, "{value}");
    }
}

#[tokio::test]
async fn handlers_get_the_whole_request_and_long_bodies_are_refused() {
    let running = start().await;
    let req = Request::put("/echo?a=b").body(Full::new(Bytes::from("hello"))).unwrap();
    assert_eq!(
        send(running.addr, req).await.body(),
        "PUT Some(\"a=b\") b\"hello\" true\n"
    );
    let req = Request::put("/echo")
        .body(Full::new(Bytes::from(vec![0; MAX_BODY_BYTES + 1])))
        .unwrap();
    assert_eq!(send(running.addr, req).await.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let mut stream = TcpStream::connect(running.addr).await.unwrap();
    let invalid_chunk = b"PUT /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nno number\r\n";
    stream.write_all(invalid_chunk).await.unwrap();
    let mut rsp = Vec::new();
    stream.read_to_end(&mut rsp).await.unwrap();
    assert!(rsp.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&rsp));
}

#[tokio::test]
async fn long_heads_are_refused() {
    let running = start().await;
    let mut stream = TcpStream::connect(running.addr).await.unwrap();
    let head = format!(
        "GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: {}\r\n\r\n",
        "a".repeat(2 * MAX_HTTP1_BUFFER_BYTES)
    );
    // The server closes the connection before it has read everything.
    let _ = stream.write_all(head.as_bytes()).await;
    let mut rsp = Vec::new();
    let _ = stream.read_to_end(&mut rsp).await;
    assert!(!rsp.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&rsp));
    let mut req = get("http://admin/live");
    let long = HeaderValue::from_str(&"a".repeat(MAX_HEADER_LIST_BYTES as usize)).unwrap();
    req.headers_mut().insert("x", long);
    let stream = TcpStream::connect(running.addr).await.unwrap();
    let (mut client, conn) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(conn);
    let status = client.send_request(req).await.map(|rsp| rsp.status());
    assert!(!status.is_ok_and(|status| status.is_success()));
}

#[test]
fn connections_and_responses_are_bounded_by_files_and_by_memory() {
    let limits = |files, memory| {
        let limits = Limits::from_resources(files, memory);
        (limits.connections, limits.open_response_bytes)
    };
    assert_eq!(limits(1_048_576, Some(250 << 20)), (41, 250 << 16));
    assert_eq!(limits(1_048_576, Some(20 << 20)), (MIN_CONNECTIONS, 20 << 16));
    assert_eq!(limits(1024, Some(8 << 30)), (128, 8 << 26));
    assert_eq!(limits(1_048_576, None).0, MAX_CONNECTIONS);
}

#[tokio::test]
async fn a_connection_that_starts_with_tls_goes_to_the_terminator() {
    // This terminator reads one byte and takes the next one as the HTTP version.
    async fn open(mut stream: TcpStream) -> io::Result<(TcpStream, Version, Tls)> {
        assert_eq!(stream.read_u8().await?, 22, "nothing was read before");
        let version = match stream.read_u8().await? {
            2 => Version::Http2,
            _ => Version::Http1,
        };
        Ok((stream, version, Tls::Terminated { client_id: None }))
    }
    let running = start_with(|admin| admin.tls(open)).await;
    for begin in [b"\x16\x01", b"\x16\x02"] {
        let mut stream = TcpStream::connect(running.addr).await.unwrap();
        stream.write_all(begin).await.unwrap();
        let rsp = match begin[1] {
            2 => send_http2(stream, get("http://admin/live")).await,
            _ => send_over(stream, get("/live")).await,
        };
        assert_eq!(rsp.body(), "live\n");
    }
    assert_eq!(send(running.addr, get("/live")).await.body(), "live\n");
    // Without a TLS terminator, a TLS handshake is an invalid HTTP request.
    let running = start().await;
    let mut stream = TcpStream::connect(running.addr).await.unwrap();
    stream.write_all(b"\x16\x03\x01\x00\x05hello\r\n\r\n").await.unwrap();
    let mut rsp = Vec::new();
    stream.read_to_end(&mut rsp).await.unwrap();
    assert!(!rsp.starts_with(b"HTTP/1.1 200"), "{rsp:?}");
}

#[tokio::test]
async fn all_requests_but_probes_are_authorized() {
    let authorize: AuthorizeFn = Arc::new(|caller, head| {
        assert!(caller.client.ip().is_loopback() && caller.tls == Tls::None);
        Box::pin(std::future::ready(match head.uri.path() {
            "/echo" => Ok(()),
            _ => Err(StatusCode::FORBIDDEN),
        }))
    });
    let running = start_with(|admin| admin.authorize_with(authorize)).await;
    for (path, status) in [
        ("/metrics", StatusCode::FORBIDDEN),
        ("/echo", StatusCode::OK),
        ("/live", StatusCode::OK),
        ("/ready", StatusCode::OK),
        ("/nowhere", StatusCode::NOT_FOUND),
    ] {
        assert_eq!(send(running.addr, get(path)).await.status(), status, "{path}");
    }
}

#[tokio::test]
async fn http2_is_served_on_the_same_port() {
    let running = start().await;
    let stream = TcpStream::connect(running.addr).await.unwrap();
    assert_eq!(send_http2(stream, get("http://admin/live")).await.body(), "live\n");
}

#[tokio::test]
async fn a_drain_closes_idle_connections_and_the_listener() {
    let running = start().await;
    let stream = TcpStream::connect(running.addr).await.unwrap();
    let (mut client, conn) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .unwrap();
    let conn = tokio::spawn(conn);
    client
        .send_request(get("/live"))
        .await
        .unwrap()
        .into_body()
        .collect()
        .await
        .unwrap();

    timeout(Duration::from_secs(4), running.signal.drain()).await.unwrap();
    running.server.await.unwrap();
    conn.await.unwrap().unwrap();
    assert!(TcpStream::connect(running.addr).await.is_err());
}

#[tokio::test]
async fn probes_are_answered_while_other_clients_hold_all_connections() {
    let running = start().await;
    let mut idle_clients = Vec::new();
    for start in [
        &b""[..],
        b"G",
        b"\x16\x03\x01",
        b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n",
    ] {
        for _ in 0..MAX_CONNECTIONS {
            let mut idle_client = TcpStream::connect(running.addr).await.unwrap();
            // The oldest connections may be evicted by now.
            let _ = idle_client.write_all(start).await;
            idle_clients.push(idle_client);
        }
        for path in ["/live", "/ready"] {
            let received = timeout(Duration::from_secs(5), send(running.addr, get(path))).await;
            let rsp = received.unwrap_or_else(|_| panic!("{path} has no response, after {start:?}"));
            assert_eq!(rsp.status(), StatusCode::OK, "{path}");
        }
    }
}
