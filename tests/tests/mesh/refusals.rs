//! What proxies answer themselves, and whom they tell why.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tulle_tests::apps::{self, dripping};
use tulle_tests::client::{AnyBody, Http1, empty, full, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, STRANGER, identity, mesh};

async fn client(mesh: &Mesh, app: &str) -> Http1 {
    Http1::over(mesh.dial("client", mesh.service(app, HTTP)).await).await
}

fn demanding(identity: &str) -> Request<AnyBody> {
    let req = Request::get("/")
        .header("host", "web.test")
        .header("l5d-require-id", identity);
    req.body(empty()).unwrap()
}

#[test]
fn a_server_that_is_not_whom_the_application_demands_is_not_asked() {
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    mesh.run(async |mesh: &Mesh| {
        let asked = Arc::new(AtomicUsize::new(0));
        let mut servers = Vec::new();
        for workload in ["web", "legacy"] {
            let asked = asked.clone();
            servers.push(apps::http(mesh.listen(workload, HTTP).await, move |req| {
                asked.fetch_add(1, Ordering::Relaxed);
                let leaked = req.headers().contains_key("l5d-require-id");
                async move { Response::new(full(if leaked { "leaked" } else { "ok" })) }
            }));
        }
        let answer = client(mesh, "web").await.ask(demanding(&identity("web"))).await;
        assert_eq!(answer.unwrap().text(), "ok");
        for app in ["web", "legacy"] {
            let answer = client(mesh, app)
                .await
                .ask(demanding(&identity("other")))
                .await
                .unwrap();
            let told = (answer.status.as_u16(), answer.cause());
            assert_eq!(told, (502, "tls-identity-mismatch"), "{app}");
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn requests_beyond_those_in_flight_are_shed_until_a_response_has_ended() {
    let mesh = mesh().workload("web").workload("client");
    let mesh = mesh.its_env("OUTBOUND_MAX_IN_FLIGHT", "1");
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::http(mesh.listen("web", HTTP).await, |req| async move {
            match req.uri().path() {
                "/endless" => dripping(1, Duration::ZERO, false),
                _ => Response::new(full("ok")),
            }
        });
        let mut holding = client(mesh, "web").await;
        let endless = holding.send(request("/endless")).await.unwrap();
        assert_eq!(endless.status(), 200, "its head is there, and its body goes on");
        let answer = client(mesh, "web").await.ask(request("/")).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.cause()), (503, "overload"));
        let shed = ["error=\"loadshed\""];
        assert_eq!(mesh.metric("client", "outbound_http_errors_total", &shed).await, 1.);
        drop((endless, holding));
        eventually("there is room again", async || {
            (client(mesh, "web").await.ask(request("/")).await.unwrap().status == 200).then_some(())
        })
        .await;
    });
}

#[test]
fn reasons_are_told_unless_they_are_switched_off() {
    for hidden in ["false", "true"] {
        let mesh = mesh().workload("web").workload("client");
        let mesh = mesh.its_env("OUTBOUND_DISABLE_INFORMATIONAL_HEADERS", hidden);
        mesh.run(async |mesh: &Mesh| {
            let answer = mesh.get("client", ([10, 66, 7, 7], HTTP).into(), "/").await;
            assert_eq!(answer.status, 502, "nobody listens there");
            for name in ["l5d-proxy-error", "l5d-proxy-cause", "l5d-proxy-connection"] {
                assert_eq!(answer.headers.contains_key(name), hidden == "false", "{name}");
            }
            assert_eq!(answer.header("connection"), "close");
        });
    }
}

#[test]
fn what_only_proxies_say_is_taken_out_of_an_application_s_response() {
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
            apps::http(mesh.listen("web", HTTP).await, forging),
            apps::http(mesh.listen("legacy", HTTP).await, forging),
        ];
        for app in ["web", "legacy"] {
            let answer = client(mesh, app).await.ask(request("/")).await.unwrap();
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
        apps::echo(mesh, "web").await;
        let answer = eventually("the route is known", async || {
            let answer = mesh.get("client", mesh.service("web", HTTP), "/").await;
            (answer.status != 200).then_some(answer)
        })
        .await;
        assert_eq!((answer.status.as_u16(), answer.cause()), (404, "no-route"));
        let counted = ["srv_name=\"web-http\""];
        let n_missed = mesh.metric("web", "inbound_http_route_not_found_total", &counted).await;
        assert!(n_missed >= 1., "{n_missed}");
        let n_errors = mesh.metric("web", "inbound_http_errors_total", &[]).await;
        assert_eq!(n_errors, 0., "it is counted once");
        let answer = mesh.get("client", mesh.service("web", HTTP), "/headers").await;
        assert_eq!(answer.status, 200);
    });
}

/// True when the other side ends the connection without having sent anything.
async fn is_closed(mut stream: TcpStream) -> bool {
    // It may be closed already.
    let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\n\r\n").await;
    // A reset is an end as well.
    matches!(stream.read(&mut [0]).await, Ok(0) | Err(_))
}

#[test]
fn what_was_not_meant_for_a_workload_is_closed() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::echo(mesh, "web").await;
        // The application dials the proxy, which would dial itself for ever.
        assert!(is_closed(mesh.dial("client", (mesh.ip("client"), 4140).into()).await).await);
        // What came here by mistake, or to see whether this is a way around a policy.
        for dst in [mesh.app("client", HTTP), (STRANGER, HTTP).into()] {
            assert!(is_closed(mesh.stray(STRANGER, "web", dst).await).await, "{dst}");
        }
        assert!(!is_closed(mesh.arrive(STRANGER, "web", HTTP).await).await);
    });
}

#[test]
fn without_rules_peers_are_served_and_all_others_closed() {
    let mesh = mesh().workload("client").workload("web").asks_the_kernel();
    mesh.run(async |mesh: &Mesh| {
        for workload in ["client", "web"] {
            apps::echo(mesh, workload).await;
        }
        assert_eq!(mesh.get("client", mesh.service("web", HTTP), "/").await.text(), "web\n");
        assert!(is_closed(mesh.dial("web", mesh.service("client", HTTP)).await).await);
        let mut stranger = mesh.arrive(STRANGER, "web", HTTP).await;
        stranger
            .write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\n\r\n")
            .await
            .unwrap();
        let mut said = Vec::new();
        // A reset is an end as well.
        let _ = stranger.read_to_end(&mut said).await;
        assert!(!said.starts_with(b"HTTP/"), "no more than an alert of TLS");
        eventually("it is counted", async || {
            (mesh.metric("web", "tulle_inbound_tls_failures_total", &[]).await >= 1.).then_some(())
        })
        .await;
    });
}

#[test]
fn who_asks_itself_is_asked_without_tls() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::echo(mesh, "web").await;
        let answer = mesh.get("web", mesh.service("web", HTTP), "/headers").await;
        let seen: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert!(seen["host"].is_array() && seen["l5d-client-id"].is_null(), "{seen}");
        let requests = async |labels: &[&str]| mesh.metric("web", "request_total", labels).await;
        let in_the_clear = ["direction=\"outbound\"", "no_tls_reason=\"loopback\""];
        assert_eq!(requests(&in_the_clear).await, 1.);
        assert_eq!(requests(&["direction=\"inbound\""]).await, 0., "it is not its own peer");
    });
}
