use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Request as HttpRequest;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use proptest::prelude::*;
use rustls::pki_types::ServerName;
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tulle_core::drain::{self, Signal};
use tulle_core::log_capture::LogCapture;
use tulle_core::metrics::Registry;
use tulle_core::names::annotation;
use tulle_core::readiness::Readiness;

use super::certificate::CertificateKeyPair;
use super::memory::MAX_BODY_BYTES;
use super::mounted_certificate::{MountedCertificate, Paths};
use super::*;

const NAME: &str = "linkerd-sp-validator.linkerd.svc";

/// Reviews an object as its name requests.
#[derive(Clone, Default)]
struct TestHandler {
    n_reviews: Arc<AtomicUsize>,
    resume: Arc<Notify>,
}

impl ReviewHandler for TestHandler {
    async fn review(&self, req: Request) -> Result<AdmissionResponse, Failure> {
        self.n_reviews.fetch_add(1, Ordering::SeqCst);
        let object = req.object.ok_or("there is no object")?;
        match object.metadata.name.as_deref() {
            Some("deny") => Ok(AdmissionResponse::deny("the name is not allowed")),
            Some("warn") => Ok(AdmissionResponse::allow().warn("odd").warn("very odd")),
            Some("patch") => {
                let patch = json!([{"op": "add", "path": "/x", "value": 1}]);
                Ok(AdmissionResponse::allow().patch(serde_json::from_value(patch)?))
            }
            Some("client") => Ok(AdmissionResponse::allow().warn(format!("{:?}", req.client))),
            Some("wait") => {
                self.resume.notified().await;
                Ok(AdmissionResponse::allow())
            }
            _ => Ok(AdmissionResponse::allow().patch(serde_json::from_value(json!([]))?)),
        }
    }

    async fn review_undecoded(&self, head: RequestHead, reason: String) -> AdmissionResponse {
        assert!(head.client.is_some());
        match (head.kind.kind.as_str(), head.inject_annotation()) {
            ("Service", Some("disabled")) => AdmissionResponse::allow().warn(reason),
            _ => AdmissionResponse::deny(reason),
        }
    }
}

struct TestServer {
    addr: SocketAddr,
    pair: CertificateKeyPair,
    creds: Arc<ServerCredentials>,
    handler: TestHandler,
    shared: SharedResources,
    registry: Registry,
    signal: Signal,
    drain: Watch,
    serving: JoinHandle<()>,
}

impl TestServer {
    async fn start() -> Self {
        Self::start_with(None).await
    }

    async fn start_with(memory: Option<u64>) -> Self {
        let pair = CertificateKeyPair::generate(NAME, Duration::from_secs(600)).unwrap();
        let creds = Arc::new(ServerCredentials::new());
        creds.install(&pair).unwrap();
        let (registry, handler) = (Registry::new(), TestHandler::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (signal, drain) = drain::channel();
        let shared = SharedResources::new(memory, &registry);
        let server = WebhookServer::new("test", creds.clone(), handler.clone(), shared.clone());
        let serving = tokio::spawn(server.serve(listener, drain.clone()));
        Self {
            addr,
            pair,
            creds,
            handler,
            shared,
            registry,
            signal,
            drain,
            serving,
        }
    }

    async fn connect(&self, versions: &[&'static SupportedProtocolVersion]) -> io::Result<SendRequest<Full<Bytes>>> {
        let tls = self.connect_from(Ipv4Addr::LOCALHOST, versions).await?;
        let (sender, connection) = handshake(TokioIo::new(tls)).await.map_err(io::Error::other)?;
        tokio::spawn(connection);
        Ok(sender)
    }

    async fn connect_from(
        &self,
        client: Ipv4Addr,
        versions: &[&'static SupportedProtocolVersion],
    ) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.pair.chain().remove(0)).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let socket = TcpSocket::new_v4()?;
        socket.bind((client, 0).into())?;
        let tcp = socket.connect(self.addr).await?;
        let name = ServerName::try_from(NAME).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, tcp).await
    }

    async fn send(&self, method: Method, path: &str, body: impl Into<Bytes>) -> (StatusCode, Bytes) {
        let mut sender = self.connect(&[&TLS13]).await.unwrap();
        let req = HttpRequest::builder().method(method).uri(path).header("host", NAME);
        let rsp = sender
            .send_request(req.body(Full::new(body.into())).unwrap())
            .await
            .unwrap();
        let status = rsp.status();
        (status, rsp.into_body().collect().await.unwrap().to_bytes())
    }

    async fn review(&self, version: &str, object: &str) -> Value {
        let (status, body) = self.send(Method::POST, "/", review(version, object)).await;
        assert_eq!(status, StatusCode::OK);
        serde_json::from_slice(&body).unwrap()
    }
}

fn review(version: &str, object: &str) -> String {
    format!(
        r#"{{"apiVersion":"{version}","kind":"AdmissionReview","request":{{"uid":"u-1",
            "kind":{{"group":"","version":"v1","kind":"Service"}},
            "resource":{{"group":"","version":"v1","resource":"services"}},
            "operation":"CREATE","userInfo":{{"username":"me"}},"object":{object}}}}}"#
    )
}

fn named(name: &str) -> String {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}}).to_string()
}

#[tokio::test]
async fn responses_have_the_version_of_the_review() {
    let server = TestServer::start().await;
    for version in ["admission.k8s.io/v1", "admission.k8s.io/v1beta1"] {
        let check = async |name: &str, response: Value| {
            let expected = json!({"apiVersion": version, "kind": "AdmissionReview", "response": response});
            assert_eq!(server.review(version, &named(name)).await, expected);
        };
        check("web", json!({"uid": "u-1", "allowed": true})).await;
        let status = json!({"status": "Failure", "message": "the name is not allowed", "code": 400});
        check("deny", json!({"uid": "u-1", "allowed": false, "status": status})).await;
        check(
            "warn",
            json!({"uid": "u-1", "allowed": true, "warnings": ["odd", "very odd"]}),
        )
        .await;
        // The patch in Base64: [{"op":"add","path":"/x","value":1}]
        let patch = "W3sib3AiOiJhZGQiLCJwYXRoIjoiL3giLCJ2YWx1ZSI6MX1d";
        check(
            "patch",
            json!({"uid": "u-1", "allowed": true, "patchType": "JSONPatch", "patch": patch}),
        )
        .await;
    }
}

#[tokio::test]
async fn a_handler_gets_the_address_of_the_client() {
    let server = TestServer::start().await;
    let answer = server.review("admission.k8s.io/v1", &named("client")).await;
    assert_eq!(answer.pointer("/response/warnings/0"), Some(&json!("Some(127.0.0.1)")));
}

#[tokio::test]
async fn a_handler_that_fails_refuses_the_object_with_its_reason() {
    let server = TestServer::start().await;
    let answer = server.review("admission.k8s.io/v1", "null").await;
    assert_eq!(answer.pointer("/response/allowed"), Some(&json!(false)));
    assert_eq!(
        answer.pointer("/response/status/message"),
        Some(&json!("there is no object"))
    );
}

#[tokio::test]
async fn an_object_that_cannot_be_read_is_refused_and_the_next_one_is_served() {
    let server = TestServer::start().await;
    let deep = format!(
        r#"{{"metadata":{{"name":"x"}},"spec":{}{}}}"#,
        "[".repeat(5000),
        "]".repeat(5000)
    );
    for object in [deep.as_str(), r#"{"metadata":7}"#, "[]"] {
        let answer = server.review("admission.k8s.io/v1", object).await;
        assert_eq!(answer.pointer("/response/uid"), Some(&json!("u-1")));
        assert_eq!(answer.pointer("/response/allowed"), Some(&json!(false)));
        let message = answer
            .pointer("/response/status/message")
            .and_then(Value::as_str)
            .unwrap();
        assert!(message.starts_with("the object cannot be read: "), "{message}");
    }
    assert_eq!(server.handler.n_reviews.load(Ordering::SeqCst), 0);
    let large = json!({"metadata": {"name": "web", "annotations": {"x": "y".repeat(5 << 20)}}}).to_string();
    let answer = server.review("admission.k8s.io/v1", &large).await;
    assert_eq!(answer.pointer("/response/allowed"), Some(&json!(true)));
}

#[tokio::test]
async fn an_object_that_needs_too_much_memory_is_denied_before_it_is_decoded() {
    // Decoded objects may have 8 MiB.
    let server = TestServer::start_with(Some(64 << 20)).await;
    let object = |n: usize| {
        let containers = vec![json!({}); n];
        json!({"metadata": {"name": "web"}, "spec": {"containers": containers}}).to_string()
    };
    let answer = server.review("admission.k8s.io/v1", &object(1000)).await;
    assert_eq!(answer.pointer("/response/allowed"), Some(&json!(true)));
    let answer = server.review("admission.k8s.io/v1", &object(10_000)).await;
    assert_eq!(answer.pointer("/response/allowed"), Some(&json!(false)));
    let message = answer.pointer("/response/status/message").unwrap().to_string();
    assert!(message.contains("KiB of memory"), "{message}");
    assert_eq!(server.handler.n_reviews.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn the_handler_decides_about_an_object_that_is_not_decoded() {
    let server = TestServer::start_with(Some(64 << 20)).await;
    let metadata = json!({"annotations": {(annotation::INJECT): "disabled"}, "name": "web"});
    let too_large = format!(r#"{{"metadata":{metadata},"spec":[{}]}}"#, vec!["{}"; 10_000].join(","));
    let too_deep = format!(
        r#"{{"metadata":{metadata},"spec":{}{}}}"#,
        "[".repeat(5000),
        "]".repeat(5000)
    );
    for object in [too_large, too_deep] {
        let answer = server.review("admission.k8s.io/v1", &object).await;
        assert_eq!(answer.pointer("/response/allowed"), Some(&json!(true)));
        let warning = answer.pointer("/response/warnings/0").and_then(Value::as_str).unwrap();
        assert!(warning.starts_with("the object cannot be read: "), "{warning}");
    }
    assert_eq!(server.handler.n_reviews.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn reviews_are_served_while_another_client_fills_the_memory_for_bodies() {
    // Bodies may have 4 MiB.
    let server = TestServer::start_with(Some(32 << 20)).await;
    let mut uploads = Vec::new();
    for _ in 0..8 {
        let mut tls = server
            .connect_from(Ipv4Addr::new(127, 0, 0, 2), &[&TLS13])
            .await
            .unwrap();
        let head = format!(
            "POST / HTTP/1.1\r\nhost: {NAME}\r\ncontent-length: {}\r\n\r\n{{",
            1 << 20
        );
        tls.write_all(head.as_bytes()).await.unwrap();
        uploads.push(tls);
    }
    while server.shared.memory.body_bytes() < 4 << 20 {
        tokio::task::yield_now().await;
    }
    let large = json!({"metadata": {"name": "web", "annotations": {"x": "y".repeat(1 << 19)}}}).to_string();
    let review =
        review("admission.k8s.io/v1", &large).replace("\"object\":", &format!("\"oldObject\":{large},\"object\":"));
    let (status, answer) = server.send(Method::POST, "/", review).await;
    assert_eq!(status, StatusCode::OK, "{answer:?}");
    assert!(server.shared.memory.body_bytes() <= 4 << 20);
    assert_eq!(server.handler.n_reviews.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_head_that_is_too_long_is_refused() {
    let server = TestServer::start().await;
    let mut tls = server.connect_from(Ipv4Addr::LOCALHOST, &[&TLS13]).await.unwrap();
    let head = format!("POST / HTTP/1.1\r\nhost: {NAME}\r\nx: {}", "x".repeat(20_000));
    tls.write_all(head.as_bytes()).await.unwrap();
    let mut rsp = Vec::new();
    // The server closes the connection before it has read everything.
    let _ = tls.read_to_end(&mut rsp).await;
    let rsp = String::from_utf8_lossy(&rsp);
    assert!(rsp.is_empty() || rsp.starts_with("HTTP/1.1 431"), "{rsp}");
}

#[tokio::test]
async fn invalid_requests_of_a_client_are_logged_once_a_minute() {
    let log = LogCapture::start();
    let server = TestServer::start().await;
    for _ in 0..3 {
        server.send(Method::GET, "/", "").await;
        server.review("admission.k8s.io/v1", &named("deny")).await;
        server.review("admission.k8s.io/v1", "null").await;
    }
    for message in ["answered without a review", "an object is denied", "a review failed"] {
        assert_eq!(log.lines_with(message).len(), 1, "{message}: {:#?}", log.lines());
    }
}

#[tokio::test]
async fn invalid_reviews_get_a_status_with_the_reason() {
    let server = TestServer::start().await;
    let check = async |method: Method, path: &str, body: String, code: u16, text: &str| {
        let (status, body) = server.send(method, path, body).await;
        let body = String::from_utf8(body.to_vec()).unwrap();
        assert_eq!(status.as_u16(), code, "{body}");
        assert!(body.starts_with(text), "{body}");
    };
    let good = || review("admission.k8s.io/v1", &named("web"));
    check(Method::POST, "/", String::new(), 200, "").await;
    check(Method::GET, "/", good(), 404, "not found").await;
    check(Method::POST, "/other", good(), 404, "not found").await;
    check(
        Method::POST,
        "/",
        "hello".to_owned(),
        400,
        "the body is not an AdmissionReview",
    )
    .await;
    check(Method::POST, "/", good()[..200].to_owned(), 400, "the body is not").await;
    check(
        Method::POST,
        "/",
        good().replace("u-1\"", "u-1\", \"uid\": 7"),
        400,
        "the body is not",
    )
    .await;
    check(
        Method::POST,
        "/",
        good().replace("io/v1", "io/v7"),
        400,
        "admission.k8s.io/v7 AdmissionReview",
    )
    .await;
    check(
        Method::POST,
        "/",
        "x".repeat(MAX_BODY_BYTES + 1),
        413,
        "the body is larger than 10485760",
    )
    .await;
    let page = server.registry.render();
    for line in [
        r#"http_server_requests_total{code="400",method="post"} 4"#,
        r#"http_server_requests_total{code="404",method="get"} 1"#,
        r#"http_server_request_latency_seconds_bucket{code="413",method="post",le="50"} 1"#,
        r#"http_server_response_size_bytes_count{code="200",method="post"} 1"#,
    ] {
        assert!(page.contains(line), "{line} is not in\n{page}");
    }
}

#[tokio::test]
async fn only_tls_1_3_is_accepted() {
    let server = TestServer::start().await;
    assert!(server.connect(&[&TLS13]).await.is_ok());
    let err = server.connect(&[&TLS12]).await.unwrap_err();
    assert!(err.to_string().contains("ProtocolVersion"), "{err}");
}

#[tokio::test]
async fn a_drain_lets_reviews_end() {
    let mut server = TestServer::start().await;
    let mut sender = server.connect(&[&TLS13]).await.unwrap();
    let body = review("admission.k8s.io/v1", &named("wait"));
    let req = HttpRequest::post("/")
        .header("host", NAME)
        .body(Full::new(body.into()))
        .unwrap();
    let response = tokio::spawn(sender.send_request(req));
    while server.handler.n_reviews.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    let mut idle = server.connect(&[&TLS13]).await.unwrap();
    let draining = tokio::spawn(std::mem::replace(&mut server.signal, drain::channel().0).drain());
    server.drain.signaled().await;
    server.handler.resume.notify_one();
    assert_eq!(response.await.unwrap().unwrap().status(), StatusCode::OK);
    // Clients that have not seen the drain are still served, over existing and new connections.
    let body = review("admission.k8s.io/v1", &named("web"));
    let req = HttpRequest::post("/")
        .header("host", NAME)
        .body(Full::new(body.clone().into()))
        .unwrap();
    let rsp = idle.send_request(req).await.unwrap();
    assert_eq!(
        (rsp.status(), &rsp.headers()["connection"]),
        (StatusCode::OK, &HeaderValue::from_static("close"))
    );
    assert_eq!(server.send(Method::POST, "/", body).await.0, StatusCode::OK);
    draining.await.unwrap();
    server.serving.await.unwrap();
    assert!(TcpStream::connect(server.addr).await.is_err());
}

#[tokio::test]
async fn a_mounted_certificate_is_served_and_replaced_and_an_invalid_one_is_ignored() {
    let mut server = TestServer::start().await;
    let dir = tempfile::tempdir().unwrap();
    let path_of = |name: &str| dir.path().join(name);
    // As Kubernetes mounts Secrets: files are symlinks through `..data`, which is replaced.
    let mount = |version: &str, pair: &CertificateKeyPair, key: &str| {
        std::fs::create_dir(path_of(version)).unwrap();
        std::fs::write(path_of(version).join("tls.crt"), &pair.certificate_pem).unwrap();
        std::fs::write(path_of(version).join("tls.key"), key).unwrap();
        std::os::unix::fs::symlink(version, path_of("..tmp")).unwrap();
        std::fs::rename(path_of("..tmp"), path_of("..data")).unwrap();
    };
    let [first, second] = [(); 2].map(|()| CertificateKeyPair::generate(NAME, Duration::from_secs(600)).unwrap());
    mount("..1", &first, &first.key_pem);
    for name in ["tls.crt", "tls.key"] {
        std::os::unix::fs::symlink(format!("..data/{name}"), path_of(name)).unwrap();
    }
    let paths = Paths {
        certificate: path_of("tls.crt"),
        key: path_of("tls.key"),
    };
    let readiness = Readiness::new();
    let registry = Registry::new();
    let is_counted = || registry.render().contains("/tls.crt\",field=\"certificate\"} 1");
    let mounted = MountedCertificate::watch(paths, server.creds.clone(), &registry).unwrap();
    tokio::spawn(mounted.run(readiness.latch("certificate"), server.drain.clone()));
    let mut assert_served = async |pair: CertificateKeyPair| {
        server.pair = pair;
        timeout(Duration::from_secs(20), async {
            while server.connect(&[&TLS13]).await.is_err() {
                sleep(Duration::from_millis(10)).await;
            }
        })
        .await
        .unwrap();
    };
    let again = |pair: &CertificateKeyPair| {
        CertificateKeyPair::parse(pair.certificate_pem.as_bytes(), pair.key_pem.as_bytes()).unwrap()
    };
    assert_served(again(&first)).await;
    assert!(readiness.is_ready());
    assert!(!is_counted());
    mount("..2", &second, &first.key_pem);
    timeout(Duration::from_secs(20), async {
        while !is_counted() {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
    assert_served(again(&first)).await;
    mount("..3", &second, &second.key_pem);
    assert_served(second).await;
    assert!(!is_counted());
}

proptest! {
    #[test]
    fn parsing_never_panics(start in 0usize..400, bytes in proptest::collection::vec(any::<u8>(), 0..20)) {
        let mut body = review("admission.k8s.io/v1", &named("web")).into_bytes();
        let start = start.min(body.len());
        let end = (start + bytes.len()).min(body.len());
        body.splice(start..end, bytes);
        if let Ok(review) = ReviewOutline::parse(body.into()) {
            AdmissionResponse::allow().to_json(&review.id).unwrap();
            let _ = review.decode();
        }
    }
}
