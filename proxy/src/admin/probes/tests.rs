//! Tests every kind of probe with servers that are healthy, fail, or never respond.

use std::num::{NonZeroU16, NonZeroU32};
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use rustls::version::{TLS12, TLS13};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tulle_core::drain;
use tulle_core::probes::{Handler, Header, Kind, OriginalProbe, Port, Scheme};
use tulle_core::readiness::Readiness;
use tulle_proto::health::health_check_response::ServingStatus;
use tulle_proto::health::health_server::{Health, HealthServer};
use tulle_proto::health::{HealthCheckRequest, HealthCheckResponse};

use super::*;

/// An admin server with one readiness probe of container `app`, whose timeout is 1 s.
struct TestAdmin {
    addr: SocketAddr,
    registry: Registry,
    _drain: drain::Signal,
}

impl TestAdmin {
    async fn with_handler(handler: Handler, port: u16) -> Self {
        let declared = OriginalProbe {
            container: "app".to_owned(),
            kind: Kind::Readiness,
            port: NonZeroU16::new(port).unwrap(),
            timeout_seconds: NonZeroU32::MIN,
            handler,
        };
        let registry = Registry::new();
        let admin = Admin::new(registry.clone(), Readiness::new());
        let admin = add_routes(admin, vec![declared.try_into().unwrap()], &registry);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (signal, drain) = drain::channel();
        tokio::spawn(admin.serve(listener, drain));
        Self {
            addr,
            registry,
            _drain: signal,
        }
    }

    async fn tcp(port: u16) -> Self {
        let handler = Handler::TcpSocket {
            port: Port::Number(NonZeroU16::new(port).unwrap()),
        };
        Self::with_handler(handler, port).await
    }

    async fn grpc(service: Option<&str>, port: u16) -> Self {
        let handler = Handler::Grpc {
            port: NonZeroU16::new(port).unwrap(),
            service: service.map(str::to_owned),
        };
        Self::with_handler(handler, port).await
    }

    async fn https(path: &str, headers: &[(&str, &str)], port: u16) -> Self {
        let headers = headers.iter().map(|(name, value)| Header {
            name: (*name).to_owned(),
            value: (*value).to_owned(),
        });
        let handler = Handler::HttpGet {
            path: Some(path.to_owned()),
            port: Port::Name("https".to_owned()),
            scheme: Scheme::Https,
            http_headers: headers.collect(),
        };
        Self::with_handler(handler, port).await
    }

    /// Sends the probe request of the kubelet.
    async fn send_probe(&self) -> (u16, String) {
        self.send("GET", "/probes/app/readiness").await
    }

    async fn send(&self, method: &str, path: &str) -> (u16, String) {
        let stream = TcpStream::connect(self.addr).await.unwrap();
        let (mut sender, conn) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(conn);
        let req = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "pod")
            .header("user-agent", "kube-probe/1.99");
        let rsp = sender
            .send_request(req.body(Full::<Bytes>::default()).unwrap())
            .await
            .unwrap();
        let status = rsp.status().as_u16();
        let body = rsp.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }
}

/// The number of a port without a listener.
async fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().port()
}

/// Starts a server that passes each connection to `serve`; returns its port.
async fn server<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> u16
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    });
    port
}

/// Starts a server that accepts connections and sends nothing; returns its port.
async fn silent_server() -> u16 {
    server(|mut stream| async move {
        let _ = stream.read_to_end(&mut Vec::new()).await;
    })
    .await
}

#[tokio::test]
async fn a_tcp_probe_succeeds_while_the_application_listens() {
    let port = free_port().await;
    let admin = TestAdmin::tcp(port).await;
    let (status, text) = admin.send_probe().await;
    assert_eq!(status, 503);
    assert!(
        text.contains(&format!("127.0.0.1:{port}")) && text.contains("refused"),
        "{text}"
    );
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    assert_eq!(admin.send_probe().await.0, 200);
    drop(listener);
    assert_eq!(admin.send_probe().await.0, 503);
    let page = admin.registry.render();
    let count = |outcome: &str| {
        let line = format!("tulle_probes_total{{container=\"app\",probe=\"readiness\",outcome=\"{outcome}\"}}");
        page.lines()
            .find_map(|found| found.strip_prefix(&line)?.trim().parse::<u64>().ok())
    };
    assert_eq!((count("success"), count("failure")), (Some(1), Some(2)), "{page}");
}

#[tokio::test]
async fn only_declared_probes_are_run_and_only_for_get() {
    let admin = TestAdmin::tcp(silent_server().await).await;
    for path in [
        "/probes/app/liveness",
        "/probes/other/readiness",
        "/probes/app/readiness/",
        "/probes/",
    ] {
        assert_eq!(admin.send("GET", path).await.0, 404, "{path}");
    }
    assert_eq!(admin.send("POST", "/probes/app/readiness").await.0, 405);
    assert_eq!(admin.send("GET", "/probes/app/readiness?port=1").await.0, 200);
}

#[tokio::test]
async fn requests_that_arrive_during_a_probe_share_its_result() {
    let accepted = Arc::new(AtomicUsize::new(0));
    let counted = accepted.clone();
    let port = server(move |mut stream| {
        counted.fetch_add(1, Ordering::Relaxed);
        async move {
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    })
    .await;
    let admin = TestAdmin::grpc(None, port).await;
    let results = futures_util::future::join_all((0..20).map(|_| admin.send_probe())).await;
    for (status, text) in results {
        assert_eq!(status, 503, "{text}");
        assert!(text.contains("longer than 1s"), "{text}");
    }
    assert_eq!(accepted.load(Ordering::Relaxed), 1);
}

/// A health service whose status depends on the service's name.
struct ScriptedHealth;

#[tonic::async_trait]
impl Health for ScriptedHealth {
    async fn check(
        &self,
        req: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<HealthCheckResponse>, tonic::Status> {
        let status = match req.get_ref().service.as_str() {
            "" | "up" => ServingStatus::Serving,
            "down" => ServingStatus::NotServing,
            "hangs" => std::future::pending().await,
            _ => return Err(tonic::Status::not_found("unknown service")),
        };
        assert!(req.metadata().get("grpc-timeout").is_some());
        Ok(tonic::Response::new(HealthCheckResponse { status: status.into() }))
    }
}

#[tokio::test]
async fn a_grpc_probe_succeeds_if_the_health_check_returns_serving() {
    let health = server(|stream| async move {
        let service = TowerToHyperService::new(HealthServer::new(ScriptedHealth));
        let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service)
            .await;
    })
    .await;
    let (http1_port, _) = https_server(&[], TestResponses::default(), TestProtocol::Plain).await;
    for (port, service, expected, reason) in [
        (health, None, 200, "200"),
        (health, Some("up"), 200, "200"),
        (health, Some("down"), 503, "NOT_SERVING"),
        (health, Some("unknown"), 503, "unknown service"),
        (health, Some("hangs"), 503, "longer than 1s"),
        (http1_port, None, 503, "HTTP"),
        (silent_server().await, None, 503, "longer than 1s"),
        (free_port().await, None, 503, "refused"),
    ] {
        let admin = TestAdmin::grpc(service, port).await;
        let (status, text) = admin.send_probe().await;
        assert_eq!(status, expected, "{service:?}: {text}");
        assert!(
            text.contains(reason) || (reason == "HTTP" && text.contains("health check")),
            "{service:?}: {text}"
        );
    }
}

/// The responses of a test server, and the requests that it got.
#[derive(Clone, Default)]
struct TestResponses {
    location: Option<String>,
    seen: Arc<Mutex<Vec<String>>>,
}

#[derive(Clone, Copy, PartialEq)]
enum TestProtocol {
    Plain,
    Tls,
    Tls12,
    /// HTTP/2 only.
    TlsHttp2,
}

/// Starts a server that answers `/<status>` with this status, and with `location` if it is a redirect. Returns its port.
async fn https_server(alpn: &[&str], responses: TestResponses, protocol: TestProtocol) -> (u16, TestResponses) {
    let key = rcgen::generate_simple_self_signed(["expired.test".to_owned()]).unwrap();
    let chain = vec![key.cert.der().clone()];
    let key = PrivateKeyDer::try_from(key.signing_key.serialize_der()).unwrap();
    let versions = match protocol {
        TestProtocol::Tls12 => &[&TLS12][..],
        _ => &[&TLS13, &TLS12],
    };
    let mut config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let shared = responses.clone();
    let port = server(move |stream| {
        let (acceptor, responses) = (acceptor.clone(), shared.clone());
        async move {
            let service = service_fn(move |req: Request<Incoming>| {
                let responses = responses.clone();
                async move { Ok::<_, std::convert::Infallible>(responses.respond(&req)) }
            });
            let http1 = hyper::server::conn::http1::Builder::new();
            match protocol {
                TestProtocol::Plain => drop(http1.serve_connection(TokioIo::new(stream), service).await),
                TestProtocol::TlsHttp2 => {
                    let Ok(tls) = acceptor.accept(stream).await else { return };
                    let http2 = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    drop(http2.serve_connection(TokioIo::new(tls), service).await);
                }
                TestProtocol::Tls | TestProtocol::Tls12 => {
                    let Ok(tls) = acceptor.accept(stream).await else { return };
                    drop(http1.serve_connection(TokioIo::new(tls), service).await);
                }
            }
        }
    })
    .await;
    (port, responses)
}

impl TestResponses {
    fn respond(&self, req: &Request<Incoming>) -> Response<Full<Bytes>> {
        let header = |name: &str| {
            let values = req.headers().get_all(name).iter();
            values
                .map(|value| value.to_str().unwrap())
                .collect::<Vec<_>>()
                .join("|")
        };
        let host = req
            .uri()
            .authority()
            .map_or_else(|| header("host"), ToString::to_string);
        self.seen.lock().push(format!(
            "{} {} host={host} agent={} accept={} x={}",
            req.method(),
            req.uri().path_and_query().unwrap(),
            header("user-agent"),
            header("accept"),
            header("x-probe")
        ));
        let status = req.uri().path().trim_start_matches('/').parse().unwrap_or(200_u16);
        let mut rsp = Response::builder().status(status);
        if let Some(location) = self.location.as_ref().filter(|_| (300..400).contains(&status)) {
            rsp = rsp.header("location", location);
        }
        // The body is longer than the part that the kubelet reads.
        rsp.body(Full::from(vec![b'x'; 20_000])).unwrap()
    }
}

#[tokio::test]
async fn an_https_probe_returns_the_status_of_the_application_with_any_certificate() {
    for (protocol, alpn) in [
        (TestProtocol::Tls, &[][..]),
        (TestProtocol::Tls, &["http/1.1"]),
        (TestProtocol::Tls12, &[]),
        (TestProtocol::TlsHttp2, &["h2"]),
    ] {
        let (port, _) = https_server(alpn, TestResponses::default(), protocol).await;
        for (path, expected) in [("/", 200), ("/204", 204), ("/302", 302), ("/404", 404), ("/500", 500)] {
            let admin = TestAdmin::https(path, &[], port).await;
            let (status, text) = admin.send_probe().await;
            assert_eq!(status, expected, "{path}: {text}");
        }
    }
    let (plain, _) = https_server(&[], TestResponses::default(), TestProtocol::Plain).await;
    for (port, reason) in [
        (plain, "TLS handshake"),
        (silent_server().await, "longer than 1s"),
        (free_port().await, "refused"),
    ] {
        let admin = TestAdmin::https("/", &[], port).await;
        let (status, text) = admin.send_probe().await;
        assert_eq!(status, 503, "{text}");
        assert!(text.contains(reason), "{text}");
    }
}

#[tokio::test]
async fn an_https_probe_sends_the_request_that_the_kubelet_would_send() {
    let (port, responses) = https_server(&[], TestResponses::default(), TestProtocol::Tls).await;
    let (h2_port, h2_responses) = https_server(&["h2"], TestResponses::default(), TestProtocol::TlsHttp2).await;
    for (port, responses) in [(port, responses), (h2_port, h2_responses)] {
        for (path, headers, expected) in [
            (
                "healthz?full=1",
                &[][..],
                format!("GET /healthz?full=1 host=127.0.0.1:{port} agent=kube-probe/1.99 accept=*/* x="),
            ),
            (
                "/a b",
                &[
                    ("Host", "web.test"),
                    ("X-Probe", "1"),
                    ("x-probe", "2"),
                    ("X-Name", "é"),
                ],
                "GET /a%20b host=web.test agent=kube-probe/1.99 accept=*/* x=1|2".to_owned(),
            ),
            (
                "/",
                &[("User-Agent", "mine"), ("Accept", ""), ("Content-Length", "7")],
                format!("GET / host=127.0.0.1:{port} agent=mine accept= x="),
            ),
        ] {
            let admin = TestAdmin::https(path, headers, port).await;
            assert_eq!(admin.send_probe().await.0, 200, "{path}");
            assert_eq!(responses.seen.lock().pop(), Some(expected));
        }
    }
}

#[tokio::test]
async fn an_https_probe_follows_redirects_on_the_same_host_with_ten_requests_at_most() {
    for (location, expected, n_requests) in [
        ("/login", 200, 2),
        ("https://elsewhere.test/login", 302, 1),
        ("/302", 503, 10),
    ] {
        let responses = TestResponses {
            location: Some(location.to_owned()),
            ..TestResponses::default()
        };
        let (port, responses) = https_server(&[], responses, TestProtocol::Tls).await;
        let admin = TestAdmin::https("/302", &[], port).await;
        let (status, text) = admin.send_probe().await;
        assert_eq!(status, expected, "{location}: {text}");
        assert_eq!(responses.seen.lock().len(), n_requests, "{location}");
    }
}

#[tokio::test]
async fn an_incomplete_response_fails_the_probe() {
    // The server redirects to a plaintext server whose body is shorter than its content-length.
    let broken = server(|mut stream| async move {
        let _ = stream.read(&mut [0; 1024]).await;
        let _ = stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
            .await;
    })
    .await;
    let responses = TestResponses {
        location: Some(format!("http://127.0.0.1:{broken}/")),
        ..TestResponses::default()
    };
    let (port, _) = https_server(&[], responses, TestProtocol::Tls).await;
    let admin = TestAdmin::https("/302", &[], port).await;
    let (status, text) = admin.send_probe().await;
    assert_eq!(status, 503, "{text}");
}
