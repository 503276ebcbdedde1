//! RequestMirror: copies of requests go to other backends, and neither delay nor fail the requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _};
use http::{Method, Request, Response, Version};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tulle_tests::apps::{self, ReceivedRequest, Recorder};
use tulle_tests::client::{AnyBody, Http1, Http2, any, empty, full, read_until, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Builder, HTTP, Mesh, identity, mesh};

use crate::routing::http_route;

const MIRRORED: &str = "tulle_outbound_mirrored_requests_total";

/// A rule for requests to `web` whose path begins with `prefix`. `fraction` are fields of the mirror, with a leading comma.
fn rule(prefix: &str, fraction: &str) -> String {
    format!(
        "  - matches: [{{path: {{type: PathPrefix, value: {prefix}}}}}]
    filters: [{{type: RequestMirror, requestMirror: {{backendRef: {{name: copy, port: {HTTP}}}{fraction}}}}}]
    backendRefs: [{{name: web, port: {HTTP}}}]
"
    )
}

fn three_workloads() -> Builder {
    mesh().workload("client").workload("web").workload("copy")
}

async fn http1_client(mesh: &Mesh) -> Http1 {
    Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await
}

async fn http2_client(mesh: &Mesh) -> Http2 {
    Http2::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await
}

fn post(target: &str, body: AnyBody) -> Request<AnyBody> {
    let req = Request::post(target).header("host", "web.test").header("x-id", "7");
    req.body(body).unwrap()
}

async fn copies(mesh: &Mesh, result: &str) -> f64 {
    mesh.metric("client", MIRRORED, &[&format!("result=\"{result}\"")])
        .await
}

/// Waits until the recorder has this number of requests, and returns its requests.
async fn wait_for_requests(recorder: &Recorder, n: usize) -> Vec<ReceivedRequest> {
    eventually(&format!("{n} requests are copied"), async || {
        Some(recorder.requests()).filter(|received| received.len() >= n)
    })
    .await
}

#[test]
fn a_mirror_gets_the_head_and_the_body_and_the_client_gets_the_response_of_the_backend() {
    let mesh = three_workloads().manifest("route", &http_route("", &rule("/", "")));
    mesh.run(async |mesh: &Mesh| {
        let web = Recorder::start(mesh, "web", |_| 201).await;
        let copy = Recorder::start(mesh, "copy", |_| 500).await;
        let streamed = || {
            let frames = ["one", "two"].map(|text| Ok::<_, std::io::Error>(Frame::data(Bytes::from(text))));
            any(StreamBody::new(stream::iter(frames)))
        };
        let (mut http1, mut http2) = (http1_client(mesh).await, http2_client(mesh).await);
        let absolute = |body| {
            let req = Request::post("http://web.test/a?q=2").version(Version::HTTP_2);
            req.header("x-id", "7").body(body).unwrap()
        };
        let responses = [
            http1.fetch(post("/a?q=1", full("body"))).await,
            http1.fetch(post("/a?q=1", streamed())).await,
            http2.fetch(absolute(full("body"))).await,
            http2.fetch(absolute(streamed())).await,
        ];
        for rsp in responses {
            assert_eq!(rsp.unwrap().status, 201);
        }
        let copied = wait_for_requests(&copy, 4).await;
        let sent = web.requests();
        assert_eq!((sent.len(), copied.len()), (4, 4));
        let shown = |received: &ReceivedRequest| {
            let body = String::from_utf8_lossy(received.body.as_ref().unwrap()).into_owned();
            assert_eq!(
                (&received.method, &*received.host, received.header("x-id")),
                (&Method::POST, "web.test", "7")
            );
            // The copy goes through mTLS.
            assert_eq!(received.header("l5d-client-id"), identity("client"));
            format!("{:?} {} {body}", received.version, received.target)
        };
        let [mut sent, mut copied] = [sent, copied].map(|list| list.iter().map(shown).collect::<Vec<_>>());
        sent.sort();
        copied.sort();
        assert_eq!(sent, copied);
        eventually("the copies are counted", async || {
            (copies(mesh, "failure").await == 4.).then_some(())
        })
        .await;
        let labels = ["parent_name=\"web\"", "route_name=\"web\"", "backend_name=\"copy\""];
        mesh.wait_for_metric("client", MIRRORED, &labels, 4.).await;
    });
}

#[test]
fn a_mirror_gets_its_fraction_of_the_requests() {
    let rules = [
        rule("/none", ", percent: 0"),
        rule("/quarter", ", fraction: {numerator: 1, denominator: 4}"),
        rule("/all", ""),
    ];
    let mesh = three_workloads().manifest("route", &http_route("", &rules.concat()));
    mesh.run(async |mesh: &Mesh| {
        let _web = Recorder::start(mesh, "web", |_| 200).await;
        let copy = Recorder::start(mesh, "copy", |_| 200).await;
        let mut client = http1_client(mesh).await;
        for path in ["/none", "/quarter"] {
            for _ in 0..400 {
                assert_eq!(client.fetch(request(path)).await.unwrap().status, 200);
            }
        }
        assert_eq!(client.fetch(request("/all")).await.unwrap().status, 200);
        // The bounds are five standard deviations from the mean of 100, plus the request for `/all`.
        let targets = eventually("the copies arrive", async || {
            Some(copy.targets()).filter(|targets| targets.len() > 57 && targets.contains(&"/all".to_owned()))
        })
        .await;
        assert!(targets.len() <= 144, "{} of 400", targets.len());
        assert!(!targets.contains(&"/none".to_owned()));
    });
}

#[test]
fn a_large_body_arrives_whole_at_the_mirror() {
    let mesh = three_workloads().manifest("route", &http_route("", &rule("/", "")));
    mesh.run(async |mesh: &Mesh| {
        let _web = Recorder::start(mesh, "web", |_| 200).await;
        let copy = Recorder::start(mesh, "copy", |_| 200).await;
        // The body fits in the memory of a copy, so the copy is complete even if the request ends before the mirror connects.
        let body = Bytes::from(vec![b'x'; 3 << 20]);
        let mut client = http2_client(mesh).await;
        let req = Request::post("http://web.test/").body(full(body.clone())).unwrap();
        assert_eq!(client.fetch(req).await.unwrap().status, 200);
        let copied = wait_for_requests(&copy, 1).await;
        assert_eq!(copied[0].body.as_ref().map(Bytes::len), Some(body.len()));
    });
}

#[test]
fn a_copy_ends_with_the_response_of_the_mirror() {
    let mesh = three_workloads().manifest("route", &http_route("", &rule("/", "")));
    mesh.run(async |mesh: &Mesh| {
        let _web = apps::serve_http(mesh.listen("web", HTTP).await, |_| std::future::pending());
        let (ended_tx, mut ended) = mpsc::channel(1);
        let _copy = apps::serve_http(mesh.listen("copy", HTTP).await, move |req| {
            let ended_tx = ended_tx.clone();
            // Responds while the request goes on, and reads it to its end.
            tokio::spawn(async move { ended_tx.send(req.into_body().collect().await.is_err()).await });
            std::future::ready(Response::new(full("early")))
        });
        let mut client = http2_client(mesh).await;
        let endless = stream::iter([Ok::<_, std::convert::Infallible>(Frame::data(Bytes::from_static(b"x")))]);
        let endless = StreamBody::new(endless.chain(stream::pending()));
        let req = Request::post("http://web.test/").body(any(endless)).unwrap();
        let requested = tokio::spawn(async move { client.fetch(req).await });
        assert_eq!(ended.recv().await, Some(true), "the rest of the copy is cancelled");
        assert!(!requested.is_finished(), "the request goes on");
        assert_eq!(copies(mesh, "success").await, 1.);
        requested.abort();
    });
}

#[test]
fn a_mirror_that_does_not_respond_does_not_affect_requests() {
    let mesh = three_workloads().manifest("route", &http_route("", &rule("/", "")));
    // If the drain waited for the copy, the proxy would outlive the test.
    let mesh = mesh.env("SHUTDOWN_GRACE_PERIOD", "60s");
    mesh.run(async |mesh: &Mesh| {
        let web = Recorder::start(mesh, "web", |_| 200).await;
        let n_connections = Arc::new(AtomicUsize::new(0));
        let connections = n_connections.clone();
        let _copy = apps::serve_tcp(mesh.listen("copy", HTTP).await, move |stream| {
            connections.fetch_add(1, Ordering::Relaxed);
            async move {
                let _stream = stream;
                std::future::pending().await
            }
        });
        let mut client = http1_client(mesh).await;
        // More than all buffers on the way hold.
        let body = Bytes::from(vec![b'x'; 64 << 20]);
        assert_eq!(client.fetch(post("/", full(body.clone()))).await.unwrap().status, 200);
        assert_eq!(web.requests()[0].body.as_ref().map(Bytes::len), Some(body.len()));
        eventually("the copy is dropped", async || {
            (copies(mesh, "dropped").await == 1.).then_some(())
        })
        .await;
        for _ in 0..20 {
            assert_eq!(client.fetch(request("/")).await.unwrap().status, 200);
        }
        assert!(n_connections.load(Ordering::Relaxed) > 0);
        // Copies that wait for a response do not delay the shutdown.
        mesh.shut_down("client");
        mesh.wait_for_exit("client").await;
    });
}

#[test]
fn a_mirror_that_is_unreachable_does_not_affect_requests() {
    let mesh = three_workloads().manifest("route", &http_route("", &rule("/", "")));
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = http1_client(mesh).await;
        for _ in 0..20 {
            assert_eq!(client.fetch(request("/")).await.unwrap().text(), "web\n");
        }
        eventually("the copies fail", async || {
            (copies(mesh, "failure").await == 20.).then_some(())
        })
        .await;
        assert_eq!(mesh.metric("client", "tulle_failures_total", &[]).await, 0.);
    });
}

#[test]
fn a_retried_request_is_copied_once() {
    let annotations = "retry.linkerd.io/http: 5xx, retry.linkerd.io/limit: '2'";
    let mesh = three_workloads().manifest("route", &http_route(annotations, &rule("/", "")));
    mesh.run(async |mesh: &Mesh| {
        let web = Recorder::start(mesh, "web", |n| if n < 2 { 503 } else { 200 }).await;
        let copy = Recorder::start(mesh, "copy", |_| 200).await;
        let mut client = http1_client(mesh).await;
        assert_eq!(client.fetch(post("/retried", full("body"))).await.unwrap().status, 200);
        assert_eq!(web.targets(), ["/retried"; 3]);
        assert_eq!(client.fetch(post("/last", full("body"))).await.unwrap().status, 200);
        let copied = wait_for_requests(&copy, 2).await;
        let mut targets: Vec<_> = copied.iter().map(|copy| &*copy.target).collect();
        targets.sort_unstable();
        assert_eq!(targets, ["/last", "/retried"]);
        assert!(copied.iter().all(|copy| copy.body.as_deref() == Some(&b"body"[..])));
    });
}

#[test]
fn upgrade_requests_are_not_copied() {
    let mesh = three_workloads().manifest("route", &http_route("", &rule("/", "")));
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let copy = Recorder::start(mesh, "copy", |_| 200).await;
        let mut client = http1_client(mesh).await;
        let upgrade = Request::get("/upgrade")
            .header("host", "web.test")
            .header("connection", "upgrade")
            .header("upgrade", "unknown");
        client.fetch(upgrade.body(empty()).unwrap()).await.unwrap();
        let mut client = http1_client(mesh).await;
        client.fetch(request("/last")).await.unwrap();
        wait_for_requests(&copy, 1).await;
        assert_eq!(copy.targets(), ["/last"]);
    });
}

#[test]
fn interim_responses_of_a_mirror_reach_no_client() {
    let mesh = three_workloads().manifest("route", &http_route("", &rule("/", "")));
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let _copy = apps::serve_tcp(mesh.listen("copy", HTTP).await, |mut stream| async move {
            let mut received = Vec::new();
            loop {
                let mut piece = [0; 4096];
                match stream.read(&mut piece).await {
                    Ok(0) | Err(_) => return,
                    Ok(n) => received.extend_from_slice(&piece[..n]),
                }
                while let Some(end) = received.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                    received.drain(..end + 4);
                    let responses = "HTTP/1.1 103 Early Hints\r\nlink: </of-mirror>\r\n\r\n\
                        HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
                    if stream.write_all(responses.as_bytes()).await.is_err() {
                        return;
                    }
                }
            }
        });
        let mut client = mesh.dial("client", mesh.service_addr("web", HTTP)).await;
        for n in 1..=50 {
            client
                .write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\n\r\n")
                .await
                .unwrap();
            let rsp = read_until(&mut client, "web\n").await;
            assert!(rsp.starts_with("HTTP/1.1 200"), "{rsp}");
            // The interim response of this copy has arrived before the next request.
            eventually("the copy ends", async || {
                (copies(mesh, "success").await == f64::from(n)).then_some(())
            })
            .await;
        }
    });
}

#[test]
fn grpc_requests_are_copied() {
    let manifest = format!(
        "\
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {{name: web, namespace: shop}}
spec:
  parentRefs: [{{group: \"\", kind: Service, name: web, port: {HTTP}}}]
  rules:
  - filters: [{{type: RequestMirror, requestMirror: {{backendRef: {{name: copy, port: {HTTP}}}}}}}]
"
    );
    three_workloads().manifest("route", &manifest).run(async |mesh: &Mesh| {
        let web = Recorder::start(mesh, "web", |_| 200).await;
        let copy = Recorder::start(mesh, "copy", |_| 200).await;
        let req = Request::post("http://web.test/svc/Method")
            .version(Version::HTTP_2)
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        let message = full(&b"\0\0\0\0\x01x"[..]);
        let mut client = http2_client(mesh).await;
        let rsp = client.fetch(req.body(message).unwrap()).await.unwrap();
        assert_eq!(rsp.status, 200);
        let copied = wait_for_requests(&copy, 1).await;
        assert_eq!(web.targets(), ["/svc/Method"]);
        assert_eq!(
            (copied[0].version, &*copied[0].target, copied[0].body.as_deref()),
            (Version::HTTP_2, "/svc/Method", Some(&b"\0\0\0\0\x01x"[..]))
        );
        assert_eq!(copied[0].header("te"), "trailers");
    });
}
