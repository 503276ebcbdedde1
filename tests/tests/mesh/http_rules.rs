//! Ports whose policy has rules for requests: what is not a plain request does not get around them.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response, Version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tulle_tests::apps;
use tulle_tests::client::{AnyBody, Http1, Http2, empty, full, read_until, request, request2};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Mesh, STRANGER, identity, mesh};

use crate::told::client_hello;

/// Ports of `web`, which the pod does not declare.
const ROUTED: u16 = 20_001;
const LIMITED: u16 = 20_002;
const HTTP1: u16 = 20_003;
const HTTP2: u16 = 20_004;
const GRPC: u16 = 20_005;
/// At these, nothing says of requests what it does not say of connections.
const UNKNOWN: u16 = 20_006;
const DEFAULT: u16 = 20_007;
const DENIED: u16 = 20_008;
const TLS: u16 = 20_009;

/// How long a connection that is permitted nothing may be without a request.
const UNAUTHORIZED_IDLE: Duration = Duration::from_secs(10);

const RULED: [u16; 5] = [ROUTED, LIMITED, HTTP1, HTTP2, GRPC];

fn server(port: u16, protocol: &str, access: &str) -> String {
    format!(
        "\
---
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {{name: web-{port}, namespace: shop}}
spec: {{podSelector: {{matchLabels: {{app: web}}}}, port: {port}, proxyProtocol: {protocol}, accessPolicy: {access}}}
"
    )
}

fn route(name: &str, port: u16, prefix: &str) -> String {
    format!(
        "\
---
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {{name: {name}, namespace: shop}}
spec:
  parentRefs: [{{group: policy.linkerd.io, kind: Server, name: web-{port}}}]
  rules: [{{matches: [{{path: {{type: PathPrefix, value: {prefix}}}}}]}}]
"
    )
}

/// A service of `web` at whose ports clients speak bytes, as far as their proxies know.
fn taken_for_bytes() -> String {
    let ports: Vec<_> = RULED
        .iter()
        .chain(&[UNKNOWN])
        .map(|port| format!("{{name: p{port}, port: {port}, targetPort: {port}}}"))
        .collect();
    format!(
        "\
---
apiVersion: v1
kind: Service
metadata: {{name: bytes, namespace: shop, annotations: {{config.linkerd.io/opaque-ports: \"20001-20008\"}}}}
spec: {{clusterIP: 10.66.2.7, selector: {{app: web}}, ports: [{}]}}
",
        ports.join(", ")
    )
}

fn manifests() -> String {
    let limit = format!(
        "\
---
apiVersion: policy.linkerd.io/v1alpha1
kind: HTTPLocalRateLimitPolicy
metadata: {{name: limit, namespace: shop}}
spec:
  targetRef: {{group: policy.linkerd.io, kind: Server, name: web-{LIMITED}}}
  total: {{requestsPerSecond: 1000}}
"
    );
    [
        server(ROUTED, "unknown", "all-unauthenticated"),
        route("public", ROUTED, "/public"),
        server(LIMITED, "unknown", "all-unauthenticated"),
        limit,
        server(HTTP1, "HTTP/1", "all-unauthenticated"),
        server(HTTP2, "HTTP/2", "all-unauthenticated"),
        server(GRPC, "gRPC", "all-unauthenticated"),
        server(UNKNOWN, "unknown", "all-unauthenticated"),
        server(DENIED, "unknown", "deny"),
        taken_for_bytes(),
    ]
    .concat()
}

fn at(mesh: &Mesh, port: u16) -> SocketAddr {
    (mesh.ip("web"), port).into()
}

/// What comes back until the connection ends.
async fn answer(mut stream: TcpStream, words: &[u8]) -> Vec<u8> {
    stream.write_all(words).await.unwrap();
    let mut answer = Vec::new();
    // A reset is an end as well.
    let _ = stream.read_to_end(&mut answer).await;
    answer
}

#[test]
fn a_port_with_rules_for_requests_never_becomes_one_of_bytes() {
    let mesh = mesh()
        .workload("client")
        .workload("web")
        .its_env("INBOUND_DETECT_TIMEOUT", "300ms")
        .manifest("rules", &manifests());
    mesh.run(async |mesh: &Mesh| {
        let n_dialled = Arc::new(AtomicUsize::new(0));
        let mut apps = Vec::new();
        for port in RULED {
            let n_dialled = n_dialled.clone();
            let listener = TcpListener::bind(at(mesh, port)).await.unwrap();
            apps.push(apps::raw(listener, move |mut stream| {
                n_dialled.fetch_add(1, Ordering::Relaxed);
                async move {
                    let _ = stream.write_all(b"a greeting\n").await;
                }
            }));
        }
        // With a version that there is, it would be a request to the Server that says HTTP/1.
        let odd = b"get /secret HTTP/1.9\r\nhost: web\r\nl5d-client-id: forged\r\n\r\n".to_vec();
        let words = [
            odd.clone(),
            b"not HTTP, and long enough to know\r\n".to_vec(),
            client_hello("elsewhere.test").to_vec(),
            Vec::new(),
        ];
        for port in RULED {
            for words in &words {
                answer(mesh.stray(STRANGER, "web", at(mesh, port)).await, words).await;
            }
            // Its proxy announces bytes.
            answer(mesh.dial("client", ([10, 66, 2, 7], port).into()).await, &odd).await;
        }
        assert_eq!(n_dialled.load(Ordering::Relaxed), 0);
        assert!(
            mesh.metric("web", "tulle_failures_total", &["cause=\"not-http\""])
                .await
                >= 1.
        );

        let listener = TcpListener::bind(at(mesh, UNKNOWN)).await.unwrap();
        apps.push(apps::raw(listener, |mut stream| async move {
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
        }));
        let strangers = mesh.stray(STRANGER, "web", at(mesh, UNKNOWN)).await;
        let peers = mesh.dial("client", ([10, 66, 2, 7], UNKNOWN).into()).await;
        for mut stream in [strangers, peers] {
            stream.write_all(&odd).await.unwrap();
            read_until(&mut stream, "forged\r\n\r\n").await;
        }
    });
}

#[test]
fn a_connection_that_is_refused_is_reset() {
    let mesh = mesh()
        .workload("web")
        .its_env("INBOUND_DETECT_TIMEOUT", "300ms")
        .manifest("rules", &(manifests() + &server(TLS, "TLS", "all-unauthenticated")));
    mesh.run(async |mesh: &Mesh| {
        let bytes = b"not HTTP, and long enough to know\r\n";
        let hello = client_hello("elsewhere.test");
        for (port, words) in [
            (ROUTED, &bytes[..]),
            (ROUTED, &hello),
            (ROUTED, &hello[..20]),
            (ROUTED, b""),
            (HTTP1, &hello),
            (HTTP1, b""),
            (TLS, bytes),
            (TLS, &hello[..20]),
            (DENIED, bytes),
            (DENIED, &hello),
        ] {
            let mut stream = mesh.stray(STRANGER, "web", at(mesh, port)).await;
            stream.write_all(words).await.unwrap();
            let ended = stream.read_to_end(&mut Vec::new()).await;
            let kind = ended.map_err(|error| error.kind());
            assert_eq!(kind, Err(ErrorKind::ConnectionReset), "{port}, {} bytes", words.len());
        }
    });
}

#[test]
fn requests_that_a_proxy_takes_for_bytes_are_judged_as_requests() {
    let mesh = mesh()
        .workload("client")
        .workload("web")
        .manifest("rules", &manifests());
    mesh.run(async |mesh: &Mesh| {
        let listener = TcpListener::bind(at(mesh, ROUTED)).await.unwrap();
        let _app = apps::http(listener, |req| async move {
            let id = req.headers().get("l5d-client-id").map(|id| id.as_bytes().to_vec());
            Response::new(full(id.unwrap_or_default()))
        });
        let mut client = Http1::over(mesh.dial("client", ([10, 66, 2, 7], ROUTED).into()).await).await;
        let forged = |path: &str| {
            let req = Request::get(path)
                .header("host", "web")
                .header("l5d-client-id", "forged");
            req.body(empty()).unwrap()
        };
        let public = client.ask(forged("/public")).await.unwrap();
        assert_eq!((public.status.as_u16(), public.text()), (200, identity("client")));
        assert_eq!(client.ask(forged("/secret")).await.unwrap().status, 404);
    });
}

#[test]
fn bytes_are_cut_when_their_port_gets_rules_for_requests() {
    let mesh = mesh().workload("web").manifest("rules", &manifests());
    mesh.run(async |mesh: &Mesh| {
        let listener = TcpListener::bind(at(mesh, UNKNOWN)).await.unwrap();
        let _app = apps::raw(listener, |mut stream| async move {
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
        });
        let mut stream = mesh.stray(STRANGER, "web", at(mesh, UNKNOWN)).await;
        stream.write_all(b"not HTTP, and long enough to know\n").await.unwrap();
        read_until(&mut stream, "know\n").await;
        mesh.write("route", &route("late", UNKNOWN, "/"));
        let mut rest = Vec::new();
        // A reset is an end as well.
        let _ = stream.read_to_end(&mut rest).await;
        assert_eq!(
            mesh.metric("web", "tulle_failures_total", &["cause=\"not-http\""])
                .await,
            1.
        );
    });
}

/// All may ask for anything but what is below `/admin`, which nobody may.
fn split_by_path() -> String {
    let permit = |name: &str, networks: &str| {
        format!(
            "\
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: {name}, namespace: shop}}
spec:
  targetRef: {{group: policy.linkerd.io, kind: HTTPRoute, name: {name}}}
  requiredAuthenticationRefs: [{{group: policy.linkerd.io, kind: NetworkAuthentication, name: {name}}}]
---
apiVersion: policy.linkerd.io/v1alpha1
kind: NetworkAuthentication
metadata: {{name: {name}, namespace: shop}}
spec: {{networks: [{{cidr: {networks}}}]}}
"
        )
    };
    [
        server(ROUTED, "unknown", "deny"),
        route("all", ROUTED, "/"),
        permit("all", "0.0.0.0/0"),
        route("admin", ROUTED, "/admin"),
        permit("admin", "192.0.2.0/24"),
    ]
    .concat()
}

#[test]
fn a_path_that_can_be_taken_for_another_is_refused_where_rules_differ_by_path() {
    let mesh = mesh().workload("web").manifest("rules", &split_by_path());
    mesh.run(async |mesh: &Mesh| {
        let mut apps = Vec::new();
        for port in [ROUTED, DEFAULT] {
            let listener = TcpListener::bind(at(mesh, port)).await.unwrap();
            apps.push(apps::http(listener, |req| async move {
                Response::new(full(req.uri().path().to_owned()))
            }));
        }
        let ask = async |port: u16, path: &str| {
            let head = format!("GET {path} HTTP/1.1\r\nhost: web\r\nconnection: close\r\n\r\n");
            let said = answer(mesh.stray(STRANGER, "web", at(mesh, port)).await, head.as_bytes()).await;
            String::from_utf8(said).unwrap()
        };
        for path in [
            "/admin%2f..",
            "//admin",
            "/x//admin",
            "/x/../admin",
            "/x/%2e%2E/admin",
            "/x/.%2e/admin",
            "/./admin",
            "/x%5c..%5cadmin",
            "/x/..;/admin",
            "/admin;x",
        ] {
            let refused = ask(ROUTED, path).await;
            assert!(refused.starts_with("HTTP/1.1 400 "), "{path}: {refused}");
            let passed = ask(DEFAULT, path).await;
            assert!(
                passed.starts_with("HTTP/1.1 200 ") && passed.ends_with(path),
                "{path}: {passed}"
            );
        }
        for (path, status) in [
            ("/admin", "403"),
            ("/admin/", "403"),
            ("/%61dmin/x", "403"),
            ("/x", "200"),
            ("/administrator", "200"),
            ("/x%20y/%7euser", "200"),
        ] {
            let answered = ask(ROUTED, path).await;
            assert!(
                answered.starts_with(&format!("HTTP/1.1 {status} ")),
                "{path}: {answered}"
            );
            assert!(
                status != "200" || answered.ends_with(path),
                "as it was sent: {answered}"
            );
        }
        let cause = ["cause=\"ambiguous_path\"", "direction=\"inbound\""];
        assert_eq!(mesh.metric("web", "tulle_failures_total", &cause).await, 10.);
    });
}

#[test]
fn headers_that_only_proxies_say_are_believed_of_peers_alone_in_every_spelling() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let listener = mesh.listen("web", tulle_tests::mesh::HTTP).await;
        let _app = apps::http(listener, |req| async move {
            let mut names: Vec<_> = req.headers().keys().map(|name| name.to_string()).collect();
            names.retain(|name| name.starts_with("l5d"));
            names.sort_unstable();
            Response::new(full(format!("{:?} {}", req.version(), names.join(" "))))
        });
        let forged = || -> Request<AnyBody> {
            let req = Request::get("http://web.test/").version(Version::HTTP_2);
            let names = ["l5d-client-id", "l5d_client_id", "l5d-client_id", "l5d_client-id"];
            let req = names.iter().fold(req, |req, name| req.header(*name, "forged"));
            req.header("l5d-orig-proto", "HTTP/1.1").body(empty()).unwrap()
        };
        let port = tulle_tests::mesh::HTTP;
        let mut stranger = Http2::over(mesh.arrive(STRANGER, "web", port).await).await;
        assert_eq!(stranger.ask(forged()).await.unwrap().text(), "HTTP/2.0 ");
        let mut peer = Http1::over(mesh.dial("client", mesh.service("web", port)).await).await;
        let mut req = request("/");
        for name in ["l5d-client-id", "l5d_client_id", "l5d-client_id"] {
            req.headers_mut().insert(name, "forged".parse().unwrap());
        }
        let seen = peer.ask(req).await.unwrap().text();
        assert!(seen.starts_with("HTTP/1.1 "), "{seen}");
        assert!(seen.contains("l5d-client-id") && !seen.contains('_'), "{seen}");
    });
}

/// The settings of HTTP/2 that a server announces: concurrent streams, and bytes of a header list.
async fn announced(mut stream: TcpStream) -> (Option<u32>, Option<u32>) {
    let begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    stream.write_all(begin).await.unwrap();
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.unwrap();
    assert_eq!(head[3], 4, "SETTINGS come first");
    let mut settings = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
    stream.read_exact(&mut settings).await.unwrap();
    let find = |id: u8| {
        let found = settings.chunks_exact(6).find(|setting| setting[1] == id)?;
        Some(u32::from_be_bytes([found[2], found[3], found[4], found[5]]))
    };
    (find(3), find(6))
}

#[test]
fn a_connection_that_the_policy_permits_nothing_has_little_room_for_headers() {
    let mesh = mesh().workload("web").manifest("rules", &manifests());
    mesh.run(async |mesh: &Mesh| {
        let (streams, list) = announced(mesh.stray(STRANGER, "web", at(mesh, DENIED)).await).await;
        assert!(streams.unwrap() * list.unwrap() <= 1 << 20, "{streams:?} {list:?}");
        let (streams, _) = announced(mesh.stray(STRANGER, "web", at(mesh, DEFAULT)).await).await;
        assert_eq!(streams, Some(1024));
        let mut denied = Http1::over(mesh.stray(STRANGER, "web", at(mesh, DENIED)).await).await;
        assert_eq!(denied.ask(request("/")).await.unwrap().status, 403);
        eventually("it does not stay for an hour", async || {
            (!denied.is_open()).then_some(())
        })
        .await;

        let permitted = manifests().replace("accessPolicy: deny", "accessPolicy: all-unauthenticated");
        let mut waiting = Http2::over(mesh.stray(STRANGER, "web", at(mesh, DENIED)).await).await;
        assert_eq!(waiting.ask(request2("/")).await.unwrap().status, 403);
        let refused_at = Instant::now();
        mesh.write("rules", &permitted);
        eventually("who is permitted more comes again", async || {
            (!waiting.is_open()).then_some(())
        })
        .await;
        assert!(refused_at.elapsed() < UNAUTHORIZED_IDLE, "{:?}", refused_at.elapsed());
        let (streams, _) = announced(mesh.stray(STRANGER, "web", at(mesh, DENIED)).await).await;
        assert_eq!(streams, Some(1024));
    });
}
