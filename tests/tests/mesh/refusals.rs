//! Responses of the proxies themselves, and which clients get the cause.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tulle_tests::apps::{self, unfinished_response};
use tulle_tests::client::{AnyBody, Http1, empty, full, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, UNMESHED_IP, identity, mesh};

async fn client(mesh: &Mesh, app: &str) -> Http1 {
    Http1::handshake(mesh.dial("client", mesh.service_addr(app, HTTP)).await).await
}

fn request_requiring_identity(identity: &str) -> Request<AnyBody> {
    let req = Request::get("/")
        .header("host", "web.test")
        .header("l5d-require-id", identity);
    req.body(empty()).unwrap()
}

#[test]
fn a_server_without_the_required_identity_gets_no_request() {
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    mesh.run(async |mesh: &Mesh| {
        let n_received = Arc::new(AtomicUsize::new(0));
        let mut servers = Vec::new();
        for workload in ["web", "legacy"] {
            let n_received = n_received.clone();
            servers.push(apps::serve_http(mesh.listen(workload, HTTP).await, move |req| {
                n_received.fetch_add(1, Ordering::Relaxed);
                let leaked = req.headers().contains_key("l5d-require-id");
                async move { Response::new(full(if leaked { "leaked" } else { "ok" })) }
            }));
        }
        let answer = client(mesh, "web")
            .await
            .fetch(request_requiring_identity(&identity("web")))
            .await;
        assert_eq!(answer.unwrap().text(), "ok");
        for app in ["web", "legacy"] {
            let answer = client(mesh, app)
                .await
                .fetch(request_requiring_identity(&identity("other")))
                .await
                .unwrap();
            let reported = (answer.status.as_u16(), answer.cause());
            assert_eq!(reported, (502, "tls-identity-mismatch"), "{app}");
        }
        assert_eq!(n_received.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn requests_over_the_in_flight_limit_are_shed_until_a_response_has_ended() {
    let mesh = mesh().workload("web").workload("client");
    let mesh = mesh.workload_env("OUTBOUND_MAX_IN_FLIGHT", "1");
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, |req| async move {
            match req.uri().path() {
                "/endless" => unfinished_response(1, Duration::ZERO),
                _ => Response::new(full("ok")),
            }
        });
        let mut holding = client(mesh, "web").await;
        let endless = holding.send(request("/endless")).await.unwrap();
        assert_eq!(endless.status(), 200, "the head has arrived, and the body continues");
        let answer = client(mesh, "web").await.fetch(request("/")).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.cause()), (503, "overload"));
        let shed = ["error=\"loadshed\""];
        mesh.wait_for_metric("client", "outbound_http_errors_total", &shed, 1.)
            .await;
        drop((endless, holding));
        eventually("a request is accepted again", async || {
            (client(mesh, "web").await.fetch(request("/")).await.unwrap().status == 200).then_some(())
        })
        .await;
    });
}

#[test]
fn causes_are_reported_unless_disabled() {
    for hidden in ["false", "true"] {
        let mesh = mesh().workload("web").workload("client");
        let mesh = mesh.workload_env("OUTBOUND_DISABLE_INFORMATIONAL_HEADERS", hidden);
        mesh.run(async |mesh: &Mesh| {
            let answer = mesh.get("client", ([10, 66, 7, 7], HTTP).into(), "/").await;
            assert_eq!(answer.status, 502, "no listener");
            for name in ["l5d-proxy-error", "l5d-proxy-cause", "l5d-proxy-connection"] {
                assert_eq!(answer.headers.contains_key(name), hidden == "false", "{name}");
            }
            assert_eq!(answer.header("connection"), "close");
        });
    }
}

#[test]
fn proxy_headers_are_removed_from_application_responses() {
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    mesh.run(async |mesh: &Mesh| {
        let names = ["l5d-proxy-error", "l5d-proxy-cause", "l5d-proxy-connection"];
        let forging = move |_| async move {
            let forged = names.iter().fold(Response::builder().status(502), |rsp, name| {
                rsp.header(*name, "connect-refused")
            });
            forged.body(full("forged")).unwrap()
        };
        let _apps = [
            apps::serve_http(mesh.listen("web", HTTP).await, forging),
            apps::serve_http(mesh.listen("legacy", HTTP).await, forging),
        ];
        for app in ["web", "legacy"] {
            let answer = client(mesh, app).await.fetch(request("/")).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.text().as_str()), (502, "forged"));
            assert!(
                !names.iter().any(|name| answer.headers.contains_key(*name)),
                "{answer:?}"
            );
        }
    });
}

#[test]
fn a_request_that_no_route_of_a_server_matches_is_not_found() {
    let manifests = "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: web-http, namespace: shop}
spec: {podSelector: {matchLabels: {app: web}}, port: 8080, accessPolicy: all-unauthenticated}
---
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {name: known, namespace: shop}
spec:
  parentRefs: [{group: policy.linkerd.io, kind: Server, name: web-http}]
  rules: [{matches: [{path: {type: Exact, value: /headers}}]}]
";
    let mesh = mesh().workload("client").workload("web").manifest("known", manifests);
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let answer = eventually("the route is known", async || {
            let answer = mesh.get("client", mesh.service_addr("web", HTTP), "/").await;
            (answer.status != 200).then_some(answer)
        })
        .await;
        assert_eq!((answer.status.as_u16(), answer.cause()), (404, "no-route"));
        let counted = ["srv_name=\"web-http\""];
        mesh.wait_for_metric_at_least("web", "inbound_http_route_not_found_total", &counted, 1.)
            .await;
        let n_errors = mesh.metric("web", "inbound_http_errors_total", &[]).await;
        assert_eq!(n_errors, 0., "the failure must be counted once");
        let answer = mesh.get("client", mesh.service_addr("web", HTTP), "/headers").await;
        assert_eq!(answer.status, 200);
    });
}

/// True if the peer closes the connection without sending anything.
async fn is_closed_without_response(mut stream: TcpStream) -> bool {
    // The write fails if the connection is already closed.
    let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\n\r\n").await;
    // The connection may also end with a reset.
    matches!(stream.read(&mut [0]).await, Ok(0) | Err(_))
}

#[test]
fn connections_for_other_workloads_are_closed() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        // The application dials its own proxy, which would dial itself in a loop.
        assert!(is_closed_without_response(mesh.dial("client", (mesh.ip("client"), 4140).into()).await).await);
        // Destinations that are not this workload, by mistake or to bypass a policy.
        for dst in [mesh.app_addr("client", HTTP), (UNMESHED_IP, HTTP).into()] {
            assert!(
                is_closed_without_response(mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", dst).await).await,
                "{dst}"
            );
        }
        assert!(!is_closed_without_response(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await);
    });
}

#[test]
fn without_redirect_rules_only_peers_are_served() {
    let mesh = mesh().workload("client").workload("web").orig_dst_from_kernel();
    mesh.run(async |mesh: &Mesh| {
        for workload in ["client", "web"] {
            apps::start_echo(mesh, workload).await;
        }
        assert_eq!(
            mesh.get("client", mesh.service_addr("web", HTTP), "/").await.text(),
            "web\n"
        );
        assert!(is_closed_without_response(mesh.dial("web", mesh.service_addr("client", HTTP)).await).await);
        let mut unmeshed = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
        unmeshed
            .write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\n\r\n")
            .await
            .unwrap();
        let mut received = Vec::new();
        // The connection may also end with a reset.
        let _ = unmeshed.read_to_end(&mut received).await;
        assert!(!received.starts_with(b"HTTP/"), "at most a TLS alert");
        eventually("the failure is counted", async || {
            (mesh.metric("web", "tulle_inbound_tls_failures_total", &[]).await >= 1.).then_some(())
        })
        .await;
    });
}

#[test]
fn a_request_to_the_own_workload_uses_no_tls() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let answer = mesh.get("web", mesh.service_addr("web", HTTP), "/headers").await;
        let seen: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert!(seen["host"].is_array() && seen["l5d-client-id"].is_null(), "{seen}");
        let requests = async |labels: &[&str]| mesh.metric("web", "request_total", labels).await;
        let in_the_clear = ["direction=\"outbound\"", "no_tls_reason=\"loopback\""];
        assert_eq!(requests(&in_the_clear).await, 1.);
        assert_eq!(
            requests(&["direction=\"inbound\""]).await,
            0.,
            "it does not pass the inbound side of the proxy"
        );
    });
}
