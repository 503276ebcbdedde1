//! Circuit breakers: failing endpoints are ejected, and used again after a probe request succeeds.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::time::Duration;

use http::{Method, Request, Response, Version};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use socket2::SockRef;
use tokio::io::AsyncWriteExt as _;
use tulle_tests::apps::{self, App, unfinished_response};
use tulle_tests::client::{Http1, Http2, full, http2_request, read_until, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Builder, HTTP, Mesh, mesh};

/// A replica whose response status can be changed.
pub(crate) struct Replica {
    pub(crate) status: Arc<AtomicU16>,
    n_requests: Arc<AtomicUsize>,
    _app: App,
}

impl Replica {
    pub(crate) async fn start(mesh: &Mesh, workload: &str, status: u16) -> Self {
        let (status, received) = (Arc::new(AtomicU16::new(status)), Arc::new(AtomicUsize::new(0)));
        let (answer, count) = (status.clone(), received.clone());
        let app = apps::serve_http(mesh.listen(workload, HTTP).await, move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            let status = answer.load(Ordering::Relaxed);
            async move { Response::builder().status(status).body(full("")).unwrap() }
        });
        Self {
            status,
            n_requests: received,
            _app: app,
        }
    }

    pub(crate) fn n_requests(&self) -> usize {
        self.n_requests.load(Ordering::Relaxed)
    }
}

/// `client` and two replicas of `web`, with a failure accrual policy.
fn mesh_with_failure_accrual(annotations: &str) -> Builder {
    mesh()
        .workload("client")
        .replicas("web", 2)
        .annotated("web", annotations)
        .env("TULLE_PROXY_BALANCER", "round-robin")
}

async fn client(mesh: &Mesh) -> Http1 {
    Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await
}

#[test]
fn failures_in_a_row_eject_an_endpoint_until_a_probe_succeeds() {
    let annotations = "balancer.linkerd.io/failure-accrual: consecutive, \
        balancer.linkerd.io/failure-accrual-consecutive-max-failures: '3', \
        balancer.linkerd.io/failure-accrual-consecutive-min-penalty: 500ms";
    mesh_with_failure_accrual(annotations).run(async |mesh: &Mesh| {
        let bad = Replica::start(mesh, "web-0", 500).await;
        let good = Replica::start(mesh, "web-1", 200).await;
        let mut client = client(mesh).await;
        let mut n_failed = 0;
        while good.n_requests() < 100 {
            n_failed += usize::from(client.fetch(request("/")).await.unwrap().status == 500);
        }
        assert_eq!(n_failed, bad.n_requests(), "the application caused each failure");
        // Three consecutive failures, and at most two probe requests.
        assert!((3..=5).contains(&n_failed), "{n_failed} of {}", 100 + n_failed);
        bad.status.store(200, Ordering::Relaxed);
        let before = bad.n_requests();
        eventually("the endpoint is used again", async || {
            client.fetch(request("/")).await.unwrap();
            (bad.n_requests() > before + 10).then_some(())
        })
        .await;
    });
}

#[test]
fn a_low_success_rate_ejects_an_endpoint() {
    let annotations = "balancer.linkerd.io/failure-accrual: unified, \
        balancer.alpha.linkerd.io/failure-accrual-success-rate-threshold: '0.9', \
        balancer.alpha.linkerd.io/failure-accrual-success-rate-min-requests: '10'";
    mesh_with_failure_accrual(annotations).run(async |mesh: &Mesh| {
        // A 429 counts as a failure as well.
        let bad = Replica::start(mesh, "web-0", 429).await;
        let good = Replica::start(mesh, "web-1", 200).await;
        let mut client = client(mesh).await;
        while good.n_requests() < 200 {
            client.fetch(request("/")).await.unwrap();
        }
        assert!((10..=15).contains(&bad.n_requests()), "{}", bad.n_requests());
    });
}

#[test]
fn a_client_disconnect_is_not_an_endpoint_failure() {
    check_client_disconnect(2000);
}

#[test]
fn a_client_disconnect_during_a_silent_response_is_not_an_endpoint_failure() {
    check_client_disconnect(1);
}

/// Clients close their connection during a response that sends `n_frames` frames and then stalls.
fn check_client_disconnect(n_frames: usize) {
    let annotations = "balancer.linkerd.io/failure-accrual: consecutive, \
        balancer.linkerd.io/failure-accrual-consecutive-max-failures: '1'";
    mesh()
        .workload("client")
        .workload("web")
        .annotated("web", annotations)
        .run(async |mesh: &Mesh| {
            let listener = mesh.listen("web", HTTP).await;
            let _app = apps::serve_http(listener, move |_| async move {
                unfinished_response(n_frames, Duration::from_millis(10))
            });
            let mut n_waited_before = None;
            for _ in 0..5 {
                let mut client = client(mesh).await;
                let rsp = client.send(request("/")).await.unwrap();
                assert_eq!(rsp.status(), 200);
                n_waited_before = n_waited_before.or(Some(n_waited(mesh).await));
                drop((rsp, client));
            }
            let disconnected = ["error=\"client-left\""];
            eventually("the responses have ended", async || {
                (mesh.metric("client", "response_total", &disconnected).await >= 5.0).then_some(())
            })
            .await;
            let failed = ["cause=\"client-left\"", "direction=\"outbound\""];
            mesh.wait_for_metric("client", "tulle_failures_total", &failed, 5.0)
                .await;
            let rsp = client(mesh).await.send(request("/")).await.unwrap();
            assert_eq!(rsp.status(), 200);
            assert_eq!(Some(n_waited(mesh).await), n_waited_before);
        });
}

/// The number of requests of `client` that waited for an endpoint. Requests wait when all endpoints are ejected.
async fn n_waited(mesh: &Mesh) -> f64 {
    mesh.metric("client", "outbound_http_balancer_queue_requests_total", &[])
        .await
}

#[test]
fn a_client_disconnect_during_an_upload_is_not_an_endpoint_failure() {
    let annotations = "balancer.linkerd.io/failure-accrual: consecutive, \
        balancer.linkerd.io/failure-accrual-consecutive-max-failures: '1'";
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    let mesh = mesh.annotated("web", annotations).annotated("legacy", annotations);
    mesh.run(async |mesh: &Mesh| {
        let mut apps = Vec::new();
        for workload in ["web", "legacy"] {
            let listener = mesh.listen(workload, HTTP).await;
            apps.push(apps::serve_http(listener, |req: Request<Incoming>| async move {
                if *req.method() == Method::GET {
                    return Response::new(full("ok"));
                }
                tokio::spawn(req.into_body().collect());
                unfinished_response(1, Duration::ZERO)
            }));
        }
        for workload in ["web", "legacy"] {
            assert_eq!(
                mesh.get("client", mesh.service_addr(workload, HTTP), "/").await.status,
                200
            );
            let n_waited_before = n_waited(mesh).await;
            for _ in 0..5 {
                let mut client = mesh.dial("client", mesh.service_addr(workload, HTTP)).await;
                let head = b"POST / HTTP/1.1\r\nhost: web.test\r\ntransfer-encoding: chunked\r\n\r\n";
                client.write_all(head).await.unwrap();
                read_until(&mut client, "x\r\n").await;
                let n_cancelled = async || mesh.metric("client", "response_total", &["error"]).await;
                let n_cancelled_before = n_cancelled().await;
                drop(client);
                eventually("the cancelled request is counted", async || {
                    (n_cancelled().await > n_cancelled_before).then_some(())
                })
                .await;
                let answer = mesh.get("client", mesh.service_addr(workload, HTTP), "/").await;
                assert_eq!(
                    (answer.status.as_u16(), n_waited(mesh).await),
                    (200, n_waited_before),
                    "{workload}"
                );
            }
        }
    });
}

/// How an HTTP/2 client aborts its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientDisconnect {
    ResetsStream,
    ClosesConnection,
}

#[test]
fn an_http2_client_disconnect_is_not_an_endpoint_failure() {
    let annotations = "balancer.linkerd.io/failure-accrual: consecutive, \
        balancer.linkerd.io/failure-accrual-consecutive-max-failures: '1'";
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    let mesh = mesh.annotated("web", annotations).annotated("legacy", annotations);
    mesh.run(async |mesh: &Mesh| {
        let n_silent = Arc::new(AtomicUsize::new(0));
        let mut apps = Vec::new();
        for workload in ["web", "legacy"] {
            let n_silent = n_silent.clone();
            let app = apps::serve_http(mesh.listen(workload, HTTP).await, move |req: Request<Incoming>| {
                let n_silent = n_silent.clone();
                async move {
                    match req.uri().path() {
                        "/silent" => {
                            n_silent.fetch_add(1, Ordering::Relaxed);
                            std::future::pending().await
                        }
                        "/begun" => unfinished_response(1, Duration::ZERO),
                        "/slow" => unfinished_response(2000, Duration::from_millis(10)),
                        "/upload" => {
                            tokio::spawn(req.into_body().collect());
                            unfinished_response(1, Duration::ZERO)
                        }
                        _ => Response::new(full("ok")),
                    }
                }
            });
            apps.push(app);
        }
        let mut n_disconnects = 0.;
        for workload in ["web", "legacy"] {
            assert_eq!(
                mesh.get("client", mesh.service_addr(workload, HTTP), "/").await.status,
                200
            );
            let n_waited_before = n_waited(mesh).await;
            for path in ["/silent", "/begun", "/slow", "/upload"] {
                for disconnect in [ClientDisconnect::ResetsStream, ClientDisconnect::ClosesConnection] {
                    let stream = mesh.dial("client", mesh.service_addr(workload, HTTP)).await;
                    let socket = SockRef::from(&stream).try_clone().unwrap();
                    let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
                    tokio::spawn(connection);
                    let is_upload = path == "/upload";
                    let mut req = http2_request(path).map(drop);
                    if is_upload {
                        *req.method_mut() = Method::POST;
                    }
                    let n_silent_before = n_silent.load(Ordering::Relaxed);
                    let (rsp, mut stream) = client.send_request(req, !is_upload).unwrap();
                    if path == "/silent" {
                        eventually("the server receives the request", async || {
                            (n_silent.load(Ordering::Relaxed) > n_silent_before).then_some(())
                        })
                        .await;
                    } else {
                        assert_eq!(rsp.await.unwrap().into_body().data().await.unwrap().unwrap(), "x");
                    }
                    match disconnect {
                        ClientDisconnect::ResetsStream => stream.send_reset(h2::Reason::CANCEL),
                        ClientDisconnect::ClosesConnection => socket.shutdown(Shutdown::Both).unwrap(),
                    }
                    n_disconnects += 1.;
                    let disconnected = ["cause=\"client-left\"", "direction=\"outbound\""];
                    eventually(&format!("{workload}{path}: {disconnect:?}"), async || {
                        let counted = mesh.metric("client", "tulle_failures_total", &disconnected).await;
                        (counted == n_disconnects).then_some(())
                    })
                    .await;
                    let answer = mesh.get("client", mesh.service_addr(workload, HTTP), "/").await;
                    let what = (answer.status.as_u16(), n_waited(mesh).await);
                    assert_eq!(what, (200, n_waited_before), "{workload}{path}: {disconnect:?}");
                }
            }
        }
    });
}

#[test]
fn an_endpoint_that_does_not_answer_in_time_is_ejected() {
    let annotations = "retry.linkerd.io/http: 5xx, retry.linkerd.io/timeout: 200ms, \
        balancer.linkerd.io/failure-accrual: consecutive, \
        balancer.linkerd.io/failure-accrual-consecutive-max-failures: '2', \
        balancer.linkerd.io/failure-accrual-consecutive-min-penalty: 60s, \
        balancer.linkerd.io/failure-accrual-consecutive-max-penalty: 60s";
    mesh_with_failure_accrual(annotations).run(async |mesh: &Mesh| {
        let n_requests = Arc::new(AtomicUsize::new(0));
        let count = n_requests.clone();
        let _silent = apps::serve_http(mesh.listen("web-0", HTTP).await, move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            std::future::pending()
        });
        let good = Replica::start(mesh, "web-1", 200).await;
        let mut client = client(mesh).await;
        for n in 1..=50 {
            assert_eq!(client.fetch(request("/")).await.unwrap().status, 200);
            assert_eq!(
                good.n_requests(),
                n,
                "each failed request is retried at the other endpoint"
            );
        }
        assert_eq!(n_requests.load(Ordering::Relaxed), 2);
        let late = ["error=\"RESPONSE_HEADERS_TIMEOUT\""];
        let name = "outbound_http_route_backend_response_statuses_total";
        mesh.wait_for_metric("client", name, &late, 2.0).await;
    });
}

#[test]
fn an_endpoint_that_causes_request_timeouts_is_ejected() {
    let annotations = "timeout.linkerd.io/request: 200ms, \
        balancer.linkerd.io/failure-accrual: consecutive, \
        balancer.linkerd.io/failure-accrual-consecutive-max-failures: '2', \
        balancer.linkerd.io/failure-accrual-consecutive-min-penalty: 60s, \
        balancer.linkerd.io/failure-accrual-consecutive-max-penalty: 60s";
    mesh_with_failure_accrual(annotations).run(async |mesh: &Mesh| {
        let _silent = apps::serve_http(mesh.listen("web-0", HTTP).await, |_| std::future::pending());
        let good = Replica::start(mesh, "web-1", 200).await;
        let mut client = client(mesh).await;
        let mut n_late = 0;
        while good.n_requests() < 50 {
            n_late += usize::from(client.fetch(request("/")).await.unwrap().status == 504);
        }
        // The first request may time out while it waits for a connection, which is no failure of the endpoint.
        assert!((2..=3).contains(&n_late), "{n_late}");
    });
}

#[test]
fn an_endpoint_that_stalls_after_its_response_head_is_ejected() {
    let annotations = "balancer.linkerd.io/failure-accrual: consecutive, \
        balancer.linkerd.io/failure-accrual-consecutive-max-failures: '2', \
        balancer.linkerd.io/failure-accrual-consecutive-min-penalty: 60s, \
        balancer.linkerd.io/failure-accrual-consecutive-max-penalty: 60s";
    let route = format!(
        "\
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata:
  name: web
  namespace: shop
  annotations: {{retry.linkerd.io/grpc: unavailable, timeout.linkerd.io/response: 200ms}}
spec:
  parentRefs: [{{group: core, kind: Service, name: web, port: {HTTP}}}]
  rules:
  - backendRefs: [{{name: web, port: {HTTP}}}]
"
    );
    let mesh = mesh().workload("client").workload("web").annotated("web", annotations);
    mesh.manifest("route", &route).run(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, apps::grpc_headers_only);
        let mut client = Http2::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        for cause in ["response-timeout", "response-timeout", "breaker-open"] {
            let req = Request::post("http://web.test/shop.Web/Buy").version(Version::HTTP_2);
            let req = req.header("content-type", "application/grpc").header("te", "trailers");
            let answer = client.fetch(req.body(full(&b"\0\0\0\0\0"[..])).unwrap()).await.unwrap();
            assert_eq!(answer.cause(), cause);
        }
    });
}
