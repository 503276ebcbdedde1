//! ServiceProfiles: traffic split by weight, and retries within a budget, counted at the servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response, Version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tulle_tests::apps::{self, App};
use tulle_tests::client::{Http1, Http2, empty, full, read_until, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, UNMESHED_IP, mesh};

/// A server that counts requests, and whose response status can be changed.
struct Server {
    n_requests: Arc<AtomicUsize>,
    n_connections: Arc<AtomicUsize>,
    _apps: [App; 2],
}

impl Server {
    async fn start(mesh: &Mesh, workload: &str, status: &Arc<AtomicU16>) -> Self {
        let (received, connected) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (requests, status) = (received.clone(), status.clone());
        let http = apps::serve_http(mesh.listen(workload, HTTP).await, move |_| {
            requests.fetch_add(1, Ordering::Relaxed);
            let status = status.load(Ordering::Relaxed);
            async move { Response::builder().status(status).body(full("")).unwrap() }
        });
        let connections = connected.clone();
        let tcp = apps::serve_tcp(mesh.listen(workload, OPAQUE).await, move |_| {
            connections.fetch_add(1, Ordering::Relaxed);
            std::future::ready(())
        });
        Self {
            n_requests: received,
            n_connections: connected,
            _apps: [http, tcp],
        }
    }

    fn n_requests(&self) -> usize {
        self.n_requests.load(Ordering::Relaxed)
    }
}

/// A profile of `web` with this spec.
fn profile(spec: &str) -> String {
    format!(
        "\
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata: {{name: web.shop.svc.cluster.local, namespace: shop}}
spec:
{spec}
"
    )
}

fn overrides(port: u16) -> String {
    format!(
        "  dstOverrides:
  - {{authority: 'web.shop.svc.cluster.local:{port}', weight: 70}}
  - {{authority: 'canary.shop.svc.cluster.local:{port}', weight: 30}}
  - {{authority: 'unused.shop.svc.cluster.local:{port}', weight: 0}}
"
    )
}

/// Runs a test with `client` and three services; `web` has the profile.
fn run_with_split(spec: &str, test: impl AsyncFnOnce(&Mesh, [Server; 3], Arc<AtomicU16>) + Send) {
    let mesh = mesh().workload("client").workload("web").workload("canary");
    let mesh = mesh.workload("unused").manifest("profile", &profile(spec));
    mesh.run(async |mesh: &Mesh| {
        let status = Arc::new(AtomicU16::new(200));
        let servers = [
            Server::start(mesh, "web", &status).await,
            Server::start(mesh, "canary", &status).await,
            Server::start(mesh, "unused", &status).await,
        ];
        test(mesh, servers, status).await;
    });
}

async fn client(mesh: &Mesh) -> Http1 {
    Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await
}

#[test]
fn attempts_are_split_by_weight() {
    run_with_split(&overrides(HTTP), async |mesh: &Mesh, servers: [Server; 3], _| {
        let mut client = client(mesh).await;
        for _ in 0..1000 {
            assert_eq!(client.fetch(request("/")).await.unwrap().status, 200);
        }
        let [web, canary, unused] = servers.map(|server| server.n_requests());
        assert_eq!((web + canary, unused), (1000, 0));
        // The bounds are five standard deviations from the mean of 300.
        assert!((227..=373).contains(&canary), "{canary} of 1000");
    });
}

#[test]
fn connections_are_split_by_weight() {
    run_with_split(&overrides(OPAQUE), async |mesh: &Mesh, servers: [Server; 3], _| {
        for _ in 0..200 {
            let mut stream = mesh.dial("client", mesh.service_addr("web", OPAQUE)).await;
            stream.write_all(b"hello").await.unwrap();
            // The connection may also end with a reset.
            let _ = stream.read(&mut [0]).await;
        }
        let [web, canary, unused] = servers.map(|server| server.n_connections.load(Ordering::Relaxed));
        assert_eq!((web + canary, unused), (200, 0));
        assert!((28..=92).contains(&canary), "{canary} of 200");
    });
}

#[test]
fn retries_of_a_profile_are_split_too_and_end_with_its_budget() {
    let retrying = "  retryBudget: {retryRatio: 0.2, minRetriesPerSecond: 1, ttl: 60s}
  routes:
  - name: all
    condition: {pathRegex: '/.*'}
    isRetryable: true
";
    let spec = overrides(HTTP) + retrying;
    run_with_split(
        &spec,
        async |mesh: &Mesh, servers: [Server; 3], status: Arc<AtomicU16>| {
            let mut client = client(mesh).await;
            // Successful requests also add to the retry budget.
            for _ in 0..100 {
                assert_eq!(client.fetch(request("/")).await.unwrap().status, 200);
            }
            status.store(503, Ordering::Relaxed);
            for _ in 0..400 {
                let answer = client.fetch(request("/")).await.unwrap();
                assert_eq!(
                    (answer.status.as_u16(), answer.cause()),
                    (503, ""),
                    "the response has the status of the servers"
                );
            }
            let [web, canary, unused] = servers.map(|server| server.n_requests());
            // The retry budget: a fifth of the 500 requests, and the minimum of one retry per second for a minute.
            let n_attempts = web + canary;
            assert_eq!(n_attempts, 500 + 100 + 60, "web {web}, canary {canary}");
            assert_eq!(unused, 0);
            // The bounds are five standard deviations from the mean of three tenths.
            assert!((139..=257).contains(&canary), "{canary} of {n_attempts}");
            let count = async |name: &str| mesh.metric("client", name, &["rt_route=\"all\""]).await;
            assert_eq!(count("route_request_total").await, 500.);
            assert_eq!(count("route_actual_request_total").await, n_attempts as f64);
            for family in ["route_actual_response_total", "route_actual_response_latency_ms_count"] {
                assert_eq!(count(family).await, n_attempts as f64, "{family}");
            }
            assert!(count("route_retryable_total").await >= 1.);
        },
    );
}

#[test]
fn a_profile_timeout_is_reported_and_closes_the_connection() {
    let spec = "  routes:
  - {name: slow, condition: {pathRegex: '/slow'}, timeout: 200ms}
";
    let mesh = mesh().workload("client").workload("web");
    mesh.manifest("profile", &profile(spec)).run(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, |req| async move {
            if req.uri().path() == "/slow" {
                tokio::time::sleep(Duration::from_secs(20)).await;
            }
            Response::new(full("ok"))
        });
        let mut client = client(mesh).await;
        assert_eq!(client.fetch(request("/")).await.unwrap().text(), "ok");
        let answer = client.fetch(request("/slow")).await.unwrap();
        let reported = (answer.status.as_u16(), answer.cause(), answer.header("connection"));
        assert_eq!(reported, (504, "deadline", "close"));
        eventually("the connection is closed", async || (!client.is_open()).then_some(())).await;
    });
}

#[test]
fn a_profile_timeout_covers_grpc_responses_that_stall_after_the_head() {
    let spec = "  retryBudget: {retryRatio: 0.2, minRetriesPerSecond: 10, ttl: 10s}
  routes:
  - {name: calls, condition: {pathRegex: '/.*'}, isRetryable: true, timeout: 300ms}
";
    let mesh = mesh().workload("client").workload("web");
    mesh.manifest("profile", &profile(spec)).run(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, apps::grpc_headers_only);
        let call = || {
            let req = Request::post("http://web.test/shop.Web/Buy").version(Version::HTTP_2);
            let req = req.header("content-type", "application/grpc").header("te", "trailers");
            req.body(full(&b"\0\0\0\0\0"[..])).unwrap()
        };
        let mut client = Http2::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let answer = client.fetch(call()).await.unwrap();
        assert_eq!((answer.cause(), answer.header("grpc-status")), ("deadline", "4"));
    });
}

#[test]
fn the_profile_timeout_of_an_upgrade_ends_with_the_101() {
    let spec = "  routes:
  - {name: chat, condition: {pathRegex: '/chat'}, timeout: 1s}
  - {name: slow, condition: {pathRegex: '/slow'}, timeout: 200ms}
";
    let mesh = mesh().workload("client").workload("web");
    mesh.manifest("profile", &profile(spec)).run(async |mesh: &Mesh| {
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, |mut stream| async move {
            let head = read_until(&mut stream, "\r\n\r\n").await;
            if head.starts_with("GET /chat ") {
                let switched = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: chat\r\n\r\n";
                stream.write_all(switched).await.unwrap();
                tokio::time::sleep(Duration::from_millis(1500)).await; // longer than the timeout of the profile
                stream.write_all(head.as_bytes()).await.unwrap();
            }
            std::future::pending().await
        });
        let send_request = async |path: &str| {
            let mut stream = mesh.dial("client", mesh.service_addr("web", HTTP)).await;
            let head = format!("GET {path} HTTP/1.1\r\nhost: web.test\r\nconnection: upgrade\r\nupgrade: chat\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            let answer = read_until(&mut stream, "\r\n\r\n").await;
            (stream, answer)
        };
        let (mut chat, answer) = send_request("/chat").await;
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        let head = read_until(&mut chat, "\r\n\r\n").await;
        let canonical = format!("l5d-dst-canonical: web.shop.svc.cluster.local:{HTTP}\r\n");
        assert!(head.contains(&canonical), "{head}");
        let (_, answer) = send_request("/slow").await;
        assert!(answer.starts_with("HTTP/1.1 504 "), "{answer}");
        for (route, status) in [("chat", 101), ("slow", 504)] {
            let (route, status) = (format!("rt_route=\"{route}\""), format!("status_code=\"{status}\""));
            for family in ["route_request_total", "route_actual_request_total"] {
                mesh.wait_for_metric("client", family, &[&route], 1.0).await;
            }
            eventually("its answer is counted", async || {
                (mesh.metric("client", "route_response_total", &[&route, &status]).await == 1.0).then_some(())
            })
            .await;
        }
    });
}

#[test]
fn the_servers_sidecar_counts_by_the_profile_of_the_clients_sidecar() {
    let spec = "  routes:
  - name: broken
    condition: {pathRegex: /broken}
    responseClasses:
    - {condition: {status: {min: 500, max: 500}}, isFailure: false}
";
    let mesh = mesh().workload("client").workload("web");
    // The control plane may answer late on a machine with other load.
    let mesh = mesh.env("DESTINATION_PROFILE_INITIAL_TIMEOUT", "20s");
    mesh.manifest("profile", &profile(spec)).run(async |mesh: &Mesh| {
        let _server = Server::start(mesh, "web", &Arc::new(AtomicU16::new(500))).await;
        let mut client = client(mesh).await;
        for path in ["/broken", "/broken", "/other"] {
            assert_eq!(client.fetch(request(path)).await.unwrap().status, 500);
        }
        let name = format!("web.shop.svc.cluster.local:{HTTP}");
        let dst: &str = &format!("dst=\"{name}\"");
        let broken = "rt_route=\"broken\"";
        let (success, failure) = ("classification=\"success\"", "classification=\"failure\"");
        let expected: [(&str, &[&str], f64); 7] = [
            ("route_request_total", &[dst, broken], 2.0),
            ("route_request_total", &[dst], 3.0),
            ("route_response_total", &[dst, broken, success], 2.0),
            ("route_response_total", &[dst, failure], 1.0),
            ("route_response_latency_ms_count", &[dst], 3.0),
            ("response_total", &[success], 2.0),
            ("response_total", &[failure], 1.0),
        ];
        for (family, labels, expected) in expected {
            let labels = [labels, &["direction=\"inbound\""]].concat();
            eventually(&format!("{family} {labels:?} is {expected}"), async || {
                (mesh.metric("web", family, &labels).await == expected).then_some(())
            })
            .await;
        }

        let mut unmeshed = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        let mut req = request("/broken");
        req.headers_mut().insert("l5d-dst-canonical", name.parse().unwrap());
        assert_eq!(unmeshed.fetch(req).await.unwrap().status, 500);
        let counted = mesh.metric("web", "route_request_total", &[]).await;
        assert_eq!(
            counted, 3.0,
            "the profile header of a client outside the mesh is ignored"
        );
    });
}

#[test]
fn without_a_profile_header_of_a_proxy_the_authority_selects_the_profile() {
    let spec = "  routes:
  - name: broken
    condition: {pathRegex: /broken}
    responseClasses:
    - {condition: {status: {min: 500, max: 500}}, isFailure: false}
";
    let mesh = mesh().workload("web").workload("plain");
    // The control plane may answer late on a machine with other load.
    let mesh = mesh.env("DESTINATION_PROFILE_INITIAL_TIMEOUT", "20s");
    mesh.manifest("profile", &profile(spec)).run(async |mesh: &Mesh| {
        let _server = Server::start(mesh, "web", &Arc::new(AtomicU16::new(500))).await;
        let mut unmeshed = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        let name = |service: &str| format!("{service}.shop.svc.cluster.local:{HTTP}");
        for (host, path) in [
            (name("web"), "/broken"),
            (name("web"), "/other"),
            (name("plain"), "/broken"), // without a profile
            ("web.test".to_owned(), "/broken"),
            (mesh.app_addr("web", HTTP).to_string(), "/broken"),
            (name("web").to_uppercase(), "/broken"),
        ] {
            let req = Request::get(path).header("host", &host).body(empty()).unwrap();
            assert_eq!(unmeshed.fetch(req).await.unwrap().status, 500, "{host}");
        }
        let dst: &str = &format!("dst=\"{}\"", name("web"));
        let expected: [(&str, &[&str], f64); 5] = [
            ("route_request_total", &[], 3.0),
            ("route_request_total", &[dst, "rt_route=\"broken\""], 2.0),
            ("route_response_total", &[dst, "rt_route=\"broken\""], 2.0),
            ("response_total", &["classification=\"success\""], 2.0),
            ("response_total", &["classification=\"failure\""], 4.0),
        ];
        for (family, labels, expected) in expected {
            let labels = [labels, &["direction=\"inbound\""]].concat();
            eventually(&format!("{family} {labels:?} is {expected}"), async || {
                (mesh.metric("web", family, &labels).await == expected).then_some(())
            })
            .await;
        }
    });
}

#[test]
fn a_request_cancelled_before_its_response_is_counted_by_its_profile() {
    let spec = "  routes:
  - {name: slow, condition: {pathRegex: '/slow'}}
";
    let mesh = mesh().workload("client").workload("web");
    mesh.manifest("profile", &profile(spec)).run(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, |_| std::future::pending());
        let mut client = client(mesh).await;
        let request_task = tokio::spawn(async move { client.fetch(request("/slow")).await });
        let slow = "rt_route=\"slow\"";
        let counted = async |name, labels: &[&str]| mesh.metric("client", name, labels).await;
        eventually("the request is counted", async || {
            (counted("route_actual_request_total", &[slow]).await == 1.0).then_some(())
        })
        .await;
        request_task.abort();
        let disconnected = [slow, "error=\"client-left\""];
        eventually("its end is counted", async || {
            (counted("route_response_total", &disconnected).await == 1.0).then_some(())
        })
        .await;
        assert_eq!(counted("route_actual_response_total", &disconnected).await, 1.0);
    });
}

#[test]
fn services_of_a_split_are_found_by_every_form_of_their_names() {
    for authority in [
        "canary.shop.svc.cluster.local",
        "canary.shop.svc.cluster.local.",
        "canary.shop.svc",
        "canary.shop",
    ] {
        let spec = format!("  dstOverrides: [{{authority: '{authority}:{HTTP}', weight: 1}}]\n");
        run_with_split(&spec, async |mesh: &Mesh, [web, canary, _]: [Server; 3], _| {
            for _ in 0..5 {
                let answer = client(mesh).await.fetch(request("/")).await.unwrap();
                assert_eq!(answer.status, 200, "{authority}: {}", answer.text());
            }
            assert_eq!((web.n_requests(), canary.n_requests()), (0, 5), "{authority}");
        });
    }
}
