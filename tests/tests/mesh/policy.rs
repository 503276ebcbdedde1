//! Inbound policy: enforced before the application is dialled, and again when the policy changes.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::ext::Protocol;
use h2::{RecvStream, SendStream};
use http::{Method, Request, Response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tulle_tests::apps::{self, App};
use tulle_tests::client::{self, Http1, Http2, http2_request, read_until, request};
use tulle_tests::eventually::{eventually, within};
use tulle_tests::mesh::{Builder, DETECTED_TCP, HTTP, Mesh, OPAQUE, UNMESHED_IP, identity, mesh};

fn server(name: &str, port: u16, access_policy: &str) -> String {
    format!(
        "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {{name: {name}, namespace: shop}}
spec:
  podSelector: {{matchLabels: {{app: web}}}}
  port: {port}
  accessPolicy: {access_policy}
"
    )
}

/// Permits the workloads of `app` on the Server `name`.
fn permit(name: &str, app: &str) -> String {
    format!(
        "\
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: {name}, namespace: shop}}
spec:
  targetRef: {{group: policy.linkerd.io, kind: Server, name: {name}}}
  requiredAuthenticationRefs:
  - {{group: policy.linkerd.io, kind: MeshTLSAuthentication, name: {name}}}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: MeshTLSAuthentication
metadata: {{name: {name}, namespace: shop}}
spec:
  identities: [\"{}\"]
",
        identity(app)
    )
}

/// Only authenticated clients are permitted, from the start.
fn authenticated() -> Builder {
    mesh()
        .flag("--default-policy=all-authenticated")
        .env("INBOUND_DEFAULT_POLICY", "all-authenticated")
        .workload("client")
        .workload("web")
}

/// True if the peer closes the connection without sending anything.
async fn ends_without_data(stream: &mut TcpStream) -> bool {
    // The connection may also end with a reset.
    matches!(stream.read(&mut [0]).await, Ok(0) | Err(_))
}

#[test]
fn plaintext_is_refused_before_the_application_is_dialled() {
    authenticated().run(async |mesh: &Mesh| {
        let dialled = Arc::new(AtomicUsize::new(0));
        let apps = [HTTP, DETECTED_TCP, OPAQUE].map(|port| {
            let dialled = dialled.clone();
            async move {
                apps::serve_tcp(mesh.listen("web", port).await, move |_| {
                    dialled.fetch_add(1, Ordering::Relaxed);
                    std::future::ready(())
                })
            }
        });
        let _apps = futures_util::future::join_all(apps).await;
        let mut http1 = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        let answer = http1.fetch(request("/")).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.header("l5d-proxy-error")), (403, ""));
        let mut http2 = Http2::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        assert_eq!(http2.fetch(http2_request("/")).await.unwrap().status, 403);
        for port in [DETECTED_TCP, OPAQUE] {
            let mut unmeshed = mesh.dial_inbound(UNMESHED_IP, "web", port).await;
            // The write fails if the connection was refused before.
            let _sent = unmeshed.write_all(b"not HTTP, and long enough to know\n").await;
            assert!(ends_without_data(&mut unmeshed).await, "port {port}");
        }
        // Detection must not dial the application for an unauthorized client that sends nothing.
        let mut silent = mesh.dial_inbound(UNMESHED_IP, "web", DETECTED_TCP).await;
        silent.shutdown().await.unwrap();
        assert!(ends_without_data(&mut silent).await);
        assert_eq!(dialled.load(Ordering::Relaxed), 0);
        mesh.wait_for_metric("web", "inbound_http_authz_deny_total", &[], 2.)
            .await;
    });
}

#[test]
fn meshed_clients_are_authenticated() {
    authenticated().run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        assert_eq!(
            mesh.get("client", mesh.service_addr("web", HTTP), "/").await.status,
            200
        );
        let mut bytes = mesh.dial("client", mesh.service_addr("web", OPAQUE)).await;
        bytes.write_all(b"hello").await.unwrap();
        let mut back = [0; 5];
        bytes.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"hello");
    });
}

#[test]
fn one_identity_is_permitted_and_another_is_refused() {
    mesh()
        .env("INBOUND_DEFAULT_POLICY", "deny")
        .workload("client")
        .workload("other")
        .workload("web")
        .manifest("server", &server("web-http", HTTP, "deny"))
        .manifest("authorization", &permit("web-http", "client"))
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let dst = mesh.service_addr("web", HTTP);
            eventually("the policy is known", async || {
                (mesh.get("client", dst, "/").await.status == 200).then_some(())
            })
            .await;
            let refused = mesh.get("other", dst, "/").await;
            assert_eq!(refused.status, 403);
            let (hop, target) = (identity("web"), mesh.ip("web"));
            assert_eq!(
                refused.header("l5d-proxy-cause"),
                format!(
                    "policy-denied:server/web-http; why=identity; direction=inbound; hop={hop}; target={target}:{HTTP}"
                )
            );
            assert_eq!(
                refused.header("l5d-proxy-error"),
                "",
                "the client does not get the error text"
            );
            let cause = [r#"direction="inbound""#, r#"cause="policy-denied""#];
            mesh.wait_for_metric_at_least("web", "tulle_failures_total", &cause, 1.)
                .await;
            let mut unmeshed = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
            assert_eq!(unmeshed.fetch(request("/")).await.unwrap().status, 403);
            let labels = [
                r#"authz_kind="authorizationpolicy""#,
                r#"authz_name="web-http""#,
                r#"srv_name="web-http""#,
            ];
            mesh.wait_for_metric_at_least("web", "inbound_http_authz_allow_total", &labels, 1.)
                .await;
            mesh.wait_for_metric_at_least("web", "inbound_http_authz_deny_total", &[r#"srv_name="web-http""#], 2.)
                .await;
        });
}

#[test]
fn a_policy_change_to_deny_closes_open_connections() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut bytes = mesh.dial("client", mesh.service_addr("web", OPAQUE)).await;
        let mut plain = mesh.dial_inbound(UNMESHED_IP, "web", OPAQUE).await;
        for stream in [&mut bytes, &mut plain] {
            stream.write_all(b"hello").await.unwrap();
            stream.read_exact(&mut [0; 5]).await.unwrap();
        }
        mesh.write("server", &server("web-opaque", OPAQUE, "deny"));
        for stream in [&mut bytes, &mut plain] {
            assert!(ends_without_data(stream).await);
        }
        mesh.wait_for_metric("web", "inbound_tcp_authz_terminate_total", &[], 2.)
            .await;
    });
}

#[test]
fn requests_on_an_open_connection_follow_the_policy() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        assert_eq!(client.fetch(request("/")).await.unwrap().status, 200);
        mesh.write("server", &server("web-http", HTTP, "deny"));
        eventually("requests are refused", async || {
            (client.fetch(request("/")).await.unwrap().status == 403).then_some(())
        })
        .await;
        mesh.remove("server");
        eventually("requests are permitted again", async || {
            (client.fetch(request("/")).await.unwrap().status == 200).then_some(())
        })
        .await;
    });
}

#[test]
fn networks_are_permitted_without_an_identity() {
    let network = "\
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: probes, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: web-http}
  requiredAuthenticationRefs: [{group: policy.linkerd.io, kind: NetworkAuthentication, name: probes}]
---
apiVersion: policy.linkerd.io/v1alpha1
kind: NetworkAuthentication
metadata: {name: probes, namespace: shop}
spec:
  networks: [{cidr: 10.66.9.0/24, except: [10.66.9.8/32]}]
";
    mesh()
        .env("INBOUND_DEFAULT_POLICY", "deny")
        .workload("web")
        .manifest("server", &server("web-http", HTTP, "deny"))
        .manifest("network", network)
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let get = async |from| {
                client::get(mesh.dial_inbound(from, "web", HTTP).await, "/")
                    .await
                    .status
                    .as_u16()
            };
            eventually("the policy is known", async || {
                (get(UNMESHED_IP).await == 200).then_some(())
            })
            .await;
            assert_eq!(get([10, 66, 9, 8].into()).await, 403);
            assert_eq!(get([10, 66, 8, 1].into()).await, 403);
        });
}

/// The kubelet sends the path of a probe as it is written, whichever characters are percent-encoded.
#[test]
fn a_probe_is_permitted_for_every_spelling_of_its_path() {
    mesh()
        .flag("--default-policy=deny")
        .flag("--probe-networks=10.66.0.0/16")
        .workload("web")
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let pod = mesh.manifest("pod-web");
            for path in ["/up", "/up%7Eme", "/caf%c3%a9", "/a[1]", "/a//b"] {
                let probe = format!("  - name: app\n    readinessProbe: {{httpGet: {{path: '{path}', port: http}}}}");
                mesh.write("pod-web", &pod.replace("  - name: app", &probe));
                let get = async |path: &str| {
                    let client = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
                    client::get(client, path).await.status.as_u16()
                };
                eventually(&format!("a probe of {path} is permitted"), async || {
                    (get(path).await == 404).then_some(()) // from the application
                })
                .await;
                assert_eq!(get("/other").await, 403, "{path}");
                // Its connection is not closed for each probe, although the client is not authorized for anything else.
                let mut client = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
                for _ in 0..2 {
                    let response = client.fetch(request(path)).await.unwrap();
                    assert_eq!((response.status.as_u16(), response.header("connection")), (404, ""));
                }
            }
        });
}

#[test]
fn a_rate_limit_answers_429_over_its_total() {
    let limit = "\
apiVersion: policy.linkerd.io/v1alpha1
kind: HTTPLocalRateLimitPolicy
metadata: {name: web-http, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: web-http}
  total: {requestsPerSecond: 5}
";
    mesh()
        .workload("client")
        .workload("web")
        .manifest("server", &server("web-http", HTTP, "all-unauthenticated"))
        .manifest("limit", limit)
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
            eventually("a request is over the limit", async || {
                let status = client.fetch(request("/")).await.unwrap().status.as_u16();
                assert!([200, 429].contains(&status), "{status}");
                (status == 429).then_some(())
            })
            .await;
            let labels = [r#"ratelimit_name="web-http""#, r#"ratelimit_scope="total""#];
            mesh.wait_for_metric_at_least("web", "inbound_http_local_ratelimit_total", &labels, 1.)
                .await;
        });
}

/// A server that accepts every upgrade, except of `/ignored`, and echoes the bytes that follow; other requests get an incomplete
/// response.
async fn upgrade_and_partial_response_app(mesh: &Mesh, workload: &str) -> App {
    apps::serve_tcp(mesh.listen(workload, HTTP).await, |mut stream| async move {
        let head = read_until(&mut stream, "\r\n\r\n").await;
        let answer = match head.contains("upgrade: ") && !head.contains("/ignored") {
            true => "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n",
            false => "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nbegun\n\r\n",
        };
        stream.write_all(answer.as_bytes()).await.unwrap();
        let (mut from, mut to) = stream.split();
        let _ = tokio::io::copy(&mut from, &mut to).await;
    })
}

#[test]
fn a_policy_change_to_deny_closes_tunnels_and_responses() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        let _app = upgrade_and_partial_response_app(mesh, "web").await;
        let dst = mesh.service_addr("web", HTTP);
        // Two responses, two responses to requests for an upgrade that the application ignores, then two tunnels; the first of each two
        // is through the client's proxy, the second is direct.
        let upgrade = "connection: upgrade\r\nupgrade: echo\r\n";
        let mut open = Vec::new();
        for (path, upgrade, begun) in [
            ("/", "", "begun\n"),
            ("/ignored", upgrade, "begun\n"),
            ("/", upgrade, "\r\n\r\n"),
        ] {
            for mut stream in [
                mesh.dial("client", dst).await,
                mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
            ] {
                let head = format!("GET {path} HTTP/1.1\r\nhost: web.test\r\n{upgrade}\r\n");
                stream.write_all(head.as_bytes()).await.unwrap();
                read_until(&mut stream, begun).await;
                open.push(stream);
            }
        }
        mesh.write("server", &server("web-http", HTTP, "all-unauthenticated"));
        let known = ["srv_name=\"web-http\""];
        eventually("the policy is known", async || {
            drop(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await);
            (mesh.metric("web", "tcp_open_total", &known).await > 0.).then_some(())
        })
        .await;
        for tunnel in &mut open[4..] {
            tunnel.write_all(b"hello").await.unwrap();
            tunnel
                .read_exact(&mut [0; 5])
                .await
                .expect("a permitted tunnel stays open");
        }
        mesh.write("server", &server("web-http", HTTP, "deny"));
        for (index, mut stream) in open.into_iter().enumerate() {
            let mut rest = Vec::new();
            let reading = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut rest));
            let ended = reading.await.expect("the connection is closed");
            let is_direct = index % 2 == 1;
            if is_direct {
                assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionReset, "{index}");
            }
        }
        mesh.wait_for_metric("web", "inbound_tcp_authz_terminate_total", &[], 6.)
            .await;
    });
}

/// A policy by which clients may send requests only by the rules of a route.
fn route_with_authorization(rules: &str) -> String {
    let server = server("web-http", HTTP, "deny");
    format!(
        "\
{server}---
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {{name: tunnels, namespace: shop}}
spec:
  parentRefs: [{{group: policy.linkerd.io, kind: Server, name: web-http}}]
  rules: [{rules}]
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: tunnels, namespace: shop}}
spec:
  targetRef: {{group: policy.linkerd.io, kind: HTTPRoute, name: tunnels}}
  requiredAuthenticationRefs: [{{group: policy.linkerd.io, kind: NetworkAuthentication, name: anywhere}}]
---
apiVersion: policy.linkerd.io/v1alpha1
kind: NetworkAuthentication
metadata: {{name: anywhere, namespace: shop}}
spec: {{networks: [{{cidr: 0.0.0.0/0}}]}}
"
    )
}

/// Opens a tunnel to the application of `web`; `None` if the policy refuses it.
async fn open_tunnel(mesh: &Mesh, path: &str) -> Option<TcpStream> {
    let mut stream = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
    let head = format!("GET {path} HTTP/1.1\r\nhost: web.test\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = read_until(&mut stream, "\r\n\r\n").await;
    answer.starts_with("HTTP/1.1 101 ").then_some(stream)
}

#[test]
fn a_tunnel_is_closed_when_the_rules_of_its_route_no_longer_permit_its_request() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        let _app = upgrade_and_partial_response_app(mesh, "web").await;
        let path = |value: &str| format!("{{matches: [{{path: {{type: Exact, value: {value}}}}}]}}");
        let write_rules = |rules: &[String]| mesh.write("policy", &route_with_authorization(&rules.join(", ")));
        write_rules(&[path("/moved"), path("/redirected"), path("/kept")]);
        eventually("the default policy applies no more", async || {
            open_tunnel(mesh, "/other").await.is_none().then_some(())
        })
        .await;
        let mut open = Vec::new();
        for path in ["/moved", "/redirected", "/kept"] {
            let what = format!("{path} is permitted");
            open.push(eventually(&what, async || open_tunnel(mesh, path).await).await);
        }
        let [mut moved, mut redirected, mut kept] = <[TcpStream; 3]>::try_from(open).unwrap();
        // The route keeps its name and its authorization; only its rules change.
        write_rules(&[path("/elsewhere"), path("/redirected"), path("/kept")]);
        let ended = within("a tunnel without a rule ends", moved.read(&mut [0])).await;
        assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionReset);
        let redirect = "{matches: [{path: {type: Exact, value: /redirected}}], \
                        filters: [{type: RequestRedirect, requestRedirect: {hostname: other.test}}]}";
        write_rules(&[path("/elsewhere"), redirect.to_owned(), path("/kept")]);
        let ended = within("a tunnel whose rule refuses it ends", redirected.read(&mut [0])).await;
        assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionReset);
        kept.write_all(b"hello").await.unwrap();
        kept.read_exact(&mut [0; 5])
            .await
            .expect("a permitted tunnel stays open");
        // A tunnel that was dropped just before the first change can count, too.
        let denied = [r#"reason="tunnel-request""#];
        mesh.wait_for_metric_at_least("web", "tulle_inbound_denied_total", &denied, 2.)
            .await;
    });
}

/// An application that accepts HTTP/2 requests and extended CONNECT, and echoes the bytes. `/unanswered` gets no response.
async fn http2_echo_app(mesh: &Mesh) -> App {
    apps::serve_tcp(mesh.listen("web", HTTP).await, |stream| async move {
        let mut connection = h2::server::Builder::new()
            .enable_connect_protocol()
            .handshake(stream)
            .await
            .unwrap();
        while let Some(Ok((req, mut respond))) = connection.accept().await {
            tokio::spawn(async move {
                if req.uri().path() == "/unanswered" {
                    std::future::pending::<()>().await;
                }
                let mut send = respond.send_response(Response::new(()), false).unwrap();
                let mut received = req.into_body();
                while let Some(Ok(data)) = received.data().await {
                    received.flow_control().release_capacity(data.len()).unwrap();
                    send.send_data(data, false).unwrap();
                }
                let _ = send.send_data(Bytes::new(), true);
            });
        }
    })
}

/// The request of a tunnel: extended CONNECT.
fn tunnel_request(path: &str) -> Request<()> {
    let req = Request::builder()
        .method(Method::CONNECT)
        .uri(format!("http://web.test{path}"));
    req.extension(Protocol::from_static("chat")).body(()).unwrap()
}

/// Sends a request to the application, and returns the stream.
async fn open_stream(client: &SendRequest<Bytes>, req: Request<()>) -> (SendStream<Bytes>, RecvStream) {
    let mut client = client.clone().ready().await.unwrap();
    let (rsp, send) = client.send_request(req, false).unwrap();
    let rsp = rsp.await.unwrap();
    assert_eq!(rsp.status(), 200);
    (send, rsp.into_body())
}

async fn is_echoed((send, received): &mut (SendStream<Bytes>, RecvStream)) -> bool {
    let sent = Bytes::from_static(b"hello");
    send.send_data(sent.clone(), false).is_ok() && matches!(received.data().await, Some(Ok(data)) if data == sent)
}

#[test]
fn a_tunnel_over_http2_ends_without_the_other_requests_of_its_connection() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        let _app = http2_echo_app(mesh).await;
        let path = |value: &str| format!("{{matches: [{{path: {{type: Exact, value: {value}}}}}]}}");
        let write_rules = |rules: &[String]| mesh.write("policy", &route_with_authorization(&rules.join(", ")));
        write_rules(&[path("/moved"), path("/unanswered"), path("/kept")]);
        eventually("the rules are known", async || {
            let mut client = Http2::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
            let other = client.fetch(http2_request("/other")).await.ok()?;
            let kept = client.fetch(http2_request("/kept")).await.ok()?;
            (other.status == 404 && kept.status == 200).then_some(())
        })
        .await;

        let stream = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        eventually("the proxy announces extended CONNECT", async || {
            client.is_extended_connect_protocol_enabled().then_some(())
        })
        .await;
        let mut ready = client.clone().ready().await.unwrap();
        let (unanswered, _body) = ready.send_request(tunnel_request("/unanswered"), false).unwrap();
        let mut tunnel = open_stream(&client, tunnel_request("/moved")).await;
        let post = Request::post("http://web.test/kept").body(()).unwrap();
        let mut kept = open_stream(&client, post).await;
        assert!(is_echoed(&mut tunnel).await && is_echoed(&mut kept).await);
        write_rules(&[path("/elsewhere"), path("/kept")]);
        let ended = within("the tunnel ends", tunnel.1.data()).await;
        assert!(ended.is_none_or(|data| data.is_err()));
        let refused = within("a tunnel without a response is refused", unanswered).await;
        assert_eq!(refused.unwrap().status(), 403);
        assert!(
            is_echoed(&mut kept).await,
            "the other request of the connection continues"
        );
        let denied = [r#"reason="tunnel-request""#];
        mesh.wait_for_metric("web", "tulle_inbound_denied_total", &denied, 2.)
            .await;

        mesh.write("policy", &server("web-http", HTTP, "deny"));
        let ended = within("the connection of a client without permission ends", kept.1.data()).await;
        assert!(ended.is_none_or(|data| data.is_err()));
    });
}

#[test]
fn a_request_without_a_response_is_reset_when_the_policy_changes_to_deny() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        let (received_tx, mut received_rx) = mpsc::channel(2);
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, move |_| {
            let received_tx = received_tx.clone();
            async move {
                received_tx.send(()).await.unwrap();
                std::future::pending().await
            }
        });
        let mut http1 = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
        http1
            .write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\n\r\n")
            .await
            .unwrap();
        let http2 = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
        let (mut client, connection) = h2::client::handshake(http2).await.unwrap();
        let http2_end = tokio::spawn(connection);
        let req = Request::get("http://web.test/").body(()).unwrap();
        let _response = client.send_request(req, true).unwrap();
        for _ in 0..2 {
            received_rx.recv().await.expect("the application receives the request");
        }
        mesh.write("server", &server("web-http", HTTP, "deny"));
        let http1_end = http1.read(&mut [0]).await.expect_err("the connection is reset");
        let http2_end = http2_end.await.unwrap().expect_err("the connection is reset");
        let http2_end = http2_end.get_io().map(std::io::Error::kind);
        assert_eq!(
            (Some(http1_end.kind()), http2_end),
            (Some(ErrorKind::ConnectionReset), Some(ErrorKind::ConnectionReset))
        );
    });
}

#[test]
fn a_response_without_a_length_is_reset_when_the_policy_changes_to_deny() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        let _app = upgrade_and_partial_response_app(mesh, "web").await;
        let mut client = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
        client.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
        read_until(&mut client, "begun\n").await;
        mesh.write("server", &server("web-http", HTTP, "deny"));
        let mut rest = Vec::new();
        let cut = tokio::time::timeout(Duration::from_secs(5), client.read_to_end(&mut rest));
        cut.await.expect("the connection is closed").expect_err("a reset");
    });
}

#[test]
fn tls_is_not_looked_for_on_opaque_ports() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut bytes = mesh.dial_inbound(UNMESHED_IP, "web", OPAQUE).await;
        bytes.write_all(b"\x16\x03\x01").await.unwrap(); // the start of a TLS record
        bytes.read_exact(&mut [0; 3]).await.unwrap();
        let skipped = ["no_tls_reason=\"port_skipped\"", "target_port=\"3306\""];
        mesh.wait_for_metric("web", "tcp_open_total", &skipped, 1.).await;
    });
}
