//! Ports whose policy has rules for HTTP (routes, rate limits, or a `proxyProtocol` of HTTP or gRPC): other protocols do not
//! bypass the rules.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Method, Request, Response, Version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tulle_tests::apps;
use tulle_tests::client::{AnyBody, Http1, Http2, empty, full, http2_request, read_until, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Mesh, UNMESHED_IP, identity, mesh};

use crate::scripted_policies::client_hello;

/// Ports of `web` that the pod does not declare.
const ROUTED: u16 = 20_001;
const LIMITED: u16 = 20_002;
const HTTP1: u16 = 20_003;
const HTTP2: u16 = 20_004;
const GRPC: u16 = 20_005;
// Policies of these ports have no rules for HTTP.
const DETECT_WITHOUT_RULES: u16 = 20_006;
const DEFAULT: u16 = 20_007;
const DENIED: u16 = 20_008;
const TLS: u16 = 20_009;

/// Idle timeout of a connection that is not authorized for anything.
const UNAUTHORIZED_IDLE_TIMEOUT: Duration = Duration::from_secs(10);

const PORTS_WITH_HTTP_RULES: [u16; 5] = [ROUTED, LIMITED, HTTP1, HTTP2, GRPC];

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

/// A Service of `web` whose ports are opaque for the proxies of clients.
fn opaque_service() -> String {
    let ports: Vec<_> = PORTS_WITH_HTTP_RULES
        .iter()
        .chain(&[DETECT_WITHOUT_RULES])
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
        server(DETECT_WITHOUT_RULES, "unknown", "all-unauthenticated"),
        server(DENIED, "unknown", "deny"),
        opaque_service(),
    ]
    .concat()
}

fn port_addr(mesh: &Mesh, port: u16) -> SocketAddr {
    (mesh.ip("web"), port).into()
}

/// Sends bytes, and reads until the connection ends.
async fn send_and_read_all(mut stream: TcpStream, bytes: &[u8]) -> Vec<u8> {
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    // The connection may also end with a reset.
    let _ = stream.read_to_end(&mut answer).await;
    answer
}

#[test]
fn a_port_with_http_rules_never_carries_opaque_bytes() {
    let mesh = mesh()
        .workload("client")
        .workload("web")
        .workload_env("INBOUND_DETECT_TIMEOUT", "300ms")
        .manifest("rules", &manifests());
    mesh.run(async |mesh: &Mesh| {
        let n_dialled = Arc::new(AtomicUsize::new(0));
        let mut apps = Vec::new();
        for port in PORTS_WITH_HTTP_RULES {
            let n_dialled = n_dialled.clone();
            let listener = TcpListener::bind(port_addr(mesh, port)).await.unwrap();
            apps.push(apps::serve_tcp(listener, move |mut stream| {
                n_dialled.fetch_add(1, Ordering::Relaxed);
                async move {
                    let _ = stream.write_all(b"a greeting\n").await;
                }
            }));
        }
        // HTTP/1.9 does not exist; with HTTP/1.1 this would be a valid request.
        let unsupported = b"get /secret HTTP/1.9\r\nhost: web\r\nl5d-client-id: forged\r\n\r\n".to_vec();
        let inputs = [
            unsupported.clone(),
            b"not HTTP, and long enough to know\r\n".to_vec(),
            client_hello("elsewhere.test").to_vec(),
            Vec::new(),
        ];
        for port in PORTS_WITH_HTTP_RULES {
            for input in &inputs {
                send_and_read_all(
                    mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, port))
                        .await,
                    input,
                )
                .await;
            }
            // The client's proxy announces opaque bytes.
            send_and_read_all(mesh.dial("client", ([10, 66, 2, 7], port).into()).await, &unsupported).await;
        }
        assert_eq!(n_dialled.load(Ordering::Relaxed), 0);
        mesh.wait_for_metric_at_least("web", "tulle_failures_total", &["cause=\"not-http\""], 1.)
            .await;

        let listener = TcpListener::bind(port_addr(mesh, DETECT_WITHOUT_RULES)).await.unwrap();
        apps.push(apps::serve_tcp(listener, |mut stream| async move {
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
        }));
        let unmeshed = mesh
            .dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, DETECT_WITHOUT_RULES))
            .await;
        let meshed = mesh.dial("client", ([10, 66, 2, 7], DETECT_WITHOUT_RULES).into()).await;
        for mut stream in [unmeshed, meshed] {
            stream.write_all(&unsupported).await.unwrap();
            read_until(&mut stream, "forged\r\n\r\n").await;
        }
    });
}

#[test]
fn a_connection_that_is_refused_is_reset() {
    let mesh = mesh()
        .workload("web")
        .workload_env("INBOUND_DETECT_TIMEOUT", "300ms")
        .manifest("rules", &(manifests() + &server(TLS, "TLS", "all-unauthenticated")));
    mesh.run(async |mesh: &Mesh| {
        let bytes = b"not HTTP, and long enough to know\r\n";
        let hello = client_hello("elsewhere.test");
        let own_hello = client_hello(&identity("web"));
        for (port, sent) in [
            (ROUTED, &bytes[..]),
            (ROUTED, &hello),
            (ROUTED, &hello[..20]),
            (ROUTED, b""),
            (ROUTED, &own_hello), // an incomplete handshake
            (HTTP1, &hello),
            (HTTP1, b""),
            (TLS, bytes),
            (TLS, &hello[..20]),
            (DENIED, bytes),
            (DENIED, &hello),
            (DENIED, b""),
        ] {
            let mut stream = mesh
                .dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, port))
                .await;
            stream.write_all(sent).await.unwrap();
            let ended = stream.read_to_end(&mut Vec::new()).await;
            let kind = ended.map_err(|error| error.kind());
            assert_eq!(kind, Err(ErrorKind::ConnectionReset), "{port}, {} bytes", sent.len());
        }
    });
}

#[test]
fn requests_sent_as_opaque_bytes_are_authorized_as_requests() {
    let mesh = mesh()
        .workload("client")
        .workload("web")
        .manifest("rules", &manifests());
    mesh.run(async |mesh: &Mesh| {
        let listener = TcpListener::bind(port_addr(mesh, ROUTED)).await.unwrap();
        let _app = apps::serve_http(listener, |req| async move {
            let id = req.headers().get("l5d-client-id").map(|id| id.as_bytes().to_vec());
            Response::new(full(id.unwrap_or_default()))
        });
        let mut client = Http1::handshake(mesh.dial("client", ([10, 66, 2, 7], ROUTED).into()).await).await;
        let forged = |path: &str| {
            let req = Request::get(path)
                .header("host", "web")
                .header("l5d-client-id", "forged");
            req.body(empty()).unwrap()
        };
        let public = client.fetch(forged("/public")).await.unwrap();
        assert_eq!((public.status.as_u16(), public.text()), (200, identity("client")));
        assert_eq!(client.fetch(forged("/secret")).await.unwrap().status, 404);
    });
}

#[test]
fn opaque_connections_are_closed_when_their_port_gets_rules_for_requests() {
    let mesh = mesh().workload("web").manifest("rules", &manifests());
    mesh.run(async |mesh: &Mesh| {
        let listener = TcpListener::bind(port_addr(mesh, DETECT_WITHOUT_RULES)).await.unwrap();
        let _app = apps::serve_tcp(listener, |mut stream| async move {
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
        });
        let mut stream = mesh
            .dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, DETECT_WITHOUT_RULES))
            .await;
        stream.write_all(b"not HTTP, and long enough to know\n").await.unwrap();
        read_until(&mut stream, "know\n").await;
        mesh.write("route", &route("late", DETECT_WITHOUT_RULES, "/"));
        let mut rest = Vec::new();
        // The connection may also end with a reset.
        let _ = stream.read_to_end(&mut rest).await;
        mesh.wait_for_metric("web", "tulle_failures_total", &["cause=\"not-http\""], 1.)
            .await;
    });
}

/// All clients may use every path, except those below `/admin`: these are for a network that no client of the test is in.
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
fn ambiguous_paths_are_refused_where_rules_differ_by_path() {
    let mesh = mesh().workload("web").manifest("rules", &split_by_path());
    mesh.run(async |mesh: &Mesh| {
        let mut apps = Vec::new();
        for port in [ROUTED, DEFAULT] {
            let listener = TcpListener::bind(port_addr(mesh, port)).await.unwrap();
            apps.push(apps::serve_http(listener, |req| async move {
                Response::new(full(req.uri().path().to_owned()))
            }));
        }
        let send_request = async |port: u16, path: &str| {
            let head = format!("GET {path} HTTP/1.1\r\nhost: web\r\nconnection: close\r\n\r\n");
            let received = send_and_read_all(
                mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, port))
                    .await,
                head.as_bytes(),
            )
            .await;
            String::from_utf8(received).unwrap()
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
            let refused = send_request(ROUTED, path).await;
            assert!(refused.starts_with("HTTP/1.1 400 "), "{path}: {refused}");
            let passed = send_request(DEFAULT, path).await;
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
            let answered = send_request(ROUTED, path).await;
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
        mesh.wait_for_metric("web", "tulle_failures_total", &cause, 10.).await;
    });
}

#[test]
fn a_connect_tunnel_needs_a_rule_with_its_method_where_a_port_has_rules() {
    let connect_route = route("tunnel", HTTP1, "/").replace("path: {type: PathPrefix, value: /}", "method: CONNECT");
    let rules = [manifests(), route("all", ROUTED, "/"), connect_route].concat();
    let mesh = mesh().workload("web").manifest("rules", &rules);
    mesh.run(async |mesh: &Mesh| {
        let mut apps = Vec::new();
        for port in [ROUTED, LIMITED, HTTP1, DEFAULT] {
            let listener = TcpListener::bind(port_addr(mesh, port)).await.unwrap();
            apps.push(apps::serve_tcp(listener, |mut stream| async move {
                // A server that answers every method and handles the bytes after a request as the next request.
                for _ in 0..2 {
                    read_until(&mut stream, "\r\n\r\n").await;
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
                }
            }));
        }
        for (port, status) in [(ROUTED, "403"), (LIMITED, "403"), (HTTP1, "200"), (DEFAULT, "200")] {
            let mut stream = mesh
                .dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, port))
                .await;
            let head = b"CONNECT other.test:443 HTTP/1.1\r\nhost: other.test:443\r\n\r\n";
            stream.write_all(head).await.unwrap();
            let answered = read_until(&mut stream, "\r\n\r\n").await;
            assert!(
                answered.starts_with(&format!("HTTP/1.1 {status} ")),
                "{port}: {answered}"
            );
            if status == "200" {
                stream
                    .write_all(b"GET /secret HTTP/1.1\r\nhost: web\r\n\r\n")
                    .await
                    .unwrap();
                read_until(&mut stream, "\r\n\r\n").await;
            }
        }
        let reason = ["reason=\"connect-tunnel\""];
        mesh.wait_for_metric("web", "tulle_inbound_denied_total", &reason, 2.)
            .await;
    });
}

#[test]
fn connect_tunnels_end_when_new_rules_forbid_them() {
    let mesh = mesh().workload("web").manifest("rules", &manifests());
    mesh.run(async |mesh: &Mesh| {
        let listener = TcpListener::bind(port_addr(mesh, HTTP1)).await.unwrap();
        let _http1 = apps::serve_tcp(listener, |mut stream| async move {
            read_until(&mut stream, "\r\n\r\n").await;
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
        });
        let listener = TcpListener::bind(port_addr(mesh, HTTP2)).await.unwrap();
        let _http2 = apps::serve_tcp(listener, |stream| async move {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            let mut tunnels = Vec::new();
            while let Some(Ok((req, mut respond))) = connection.accept().await {
                assert_eq!(req.method(), Method::CONNECT);
                tunnels.push((req, respond.send_response(Response::new(()), false).unwrap()));
            }
        });
        let mut tunnel = mesh
            .dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, HTTP1))
            .await;
        let head = b"CONNECT other.test:443 HTTP/1.1\r\nhost: other.test:443\r\n\r\n";
        tunnel.write_all(head).await.unwrap();
        let answered = read_until(&mut tunnel, "\r\n\r\n").await;
        assert!(answered.starts_with("HTTP/1.1 200 "), "{answered}");
        let stream = mesh
            .dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, HTTP2))
            .await;
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let req = Request::connect("other.test:443").body(()).unwrap();
        let (rsp, _request_body) = client.ready().await.unwrap().send_request(req, false).unwrap();
        let mut rsp = rsp.await.unwrap();
        assert_eq!(rsp.status(), 200);
        let rules = [route("http1", HTTP1, "/"), route("http2", HTTP2, "/")].concat();
        mesh.write("rules", &(manifests() + &rules));
        assert!(tunnel.read(&mut [0]).await.is_err(), "must be reset");
        assert!(rsp.body_mut().data().await.is_none_or(|data| data.is_err()));
        mesh.wait_for_metric("web", "inbound_tcp_authz_terminate_total", &[], 2.)
            .await;
    });
}

#[test]
fn proxy_headers_of_other_clients_are_removed_in_every_spelling() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let listener = mesh.listen("web", tulle_tests::mesh::HTTP).await;
        let _app = apps::serve_http(listener, |req| async move {
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
        let mut unmeshed = Http2::handshake(mesh.dial_inbound(UNMESHED_IP, "web", port).await).await;
        assert_eq!(unmeshed.fetch(forged()).await.unwrap().text(), "HTTP/2.0 ");
        let mut peer = Http1::handshake(mesh.dial("client", mesh.service_addr("web", port)).await).await;
        let mut req = request("/");
        for name in ["l5d-client-id", "l5d_client_id", "l5d-client_id"] {
            req.headers_mut().insert(name, "forged".parse().unwrap());
        }
        let seen = peer.fetch(req).await.unwrap().text();
        assert!(seen.starts_with("HTTP/1.1 "), "{seen}");
        assert!(seen.contains("l5d-client-id") && !seen.contains('_'), "{seen}");
    });
}

/// The HTTP/2 settings of a server: maximum concurrent streams, and maximum header list size in bytes.
async fn announced_settings(mut stream: TcpStream) -> (Option<u32>, Option<u32>) {
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
fn unauthorized_connections_have_small_header_limits() {
    let mesh = mesh().workload("web").manifest("rules", &manifests());
    mesh.run(async |mesh: &Mesh| {
        let listener = TcpListener::bind(port_addr(mesh, DENIED)).await.unwrap();
        let _app = apps::serve_http(listener, |_| async { Response::new(full("app")) });
        let (streams, list) = announced_settings(
            mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, DENIED))
                .await,
        )
        .await;
        assert!(streams.unwrap() * list.unwrap() <= 1 << 20, "{streams:?} {list:?}");
        let (streams, _) = announced_settings(
            mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, DEFAULT))
                .await,
        )
        .await;
        assert_eq!(streams, Some(1024));
        let mut denied = Http1::handshake(
            mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, DENIED))
                .await,
        )
        .await;
        assert_eq!(denied.fetch(request("/")).await.unwrap().status, 403);
        eventually("the idle connection is closed", async || {
            (!denied.is_open()).then_some(())
        })
        .await;

        let permitted = manifests().replace("accessPolicy: deny", "accessPolicy: all-unauthenticated");
        let mut idle_http2 = Http2::handshake(
            mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, DENIED))
                .await,
        )
        .await;
        assert_eq!(idle_http2.fetch(http2_request("/")).await.unwrap().status, 403);
        let mut idle_http1 = Http1::handshake(
            mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, DENIED))
                .await,
        )
        .await;
        assert_eq!(idle_http1.fetch(request("/")).await.unwrap().status, 403);
        let refused_at = Instant::now();
        mesh.write("rules", &permitted);
        eventually("the connection with small limits is closed", async || {
            (!idle_http2.is_open()).then_some(())
        })
        .await;
        let response = idle_http1.fetch(request("/")).await.unwrap();
        assert_eq!(
            (response.status.as_u16(), response.header("connection")),
            (200, "close")
        );
        assert!(
            refused_at.elapsed() < UNAUTHORIZED_IDLE_TIMEOUT,
            "{:?}",
            refused_at.elapsed()
        );
        let (streams, _) = announced_settings(
            mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, DENIED))
                .await,
        )
        .await;
        assert_eq!(streams, Some(1024));
    });
}
