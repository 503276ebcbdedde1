//! Timeouts and retries, counted at the failing server.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, Request, Response, Version};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tulle_proto::outbound::http_route::retry::Conditions;
use tulle_proto::outbound::http_route::retry::conditions::StatusRange;
use tulle_proto::outbound::{ExponentialBackoff, http_route};
use tulle_tests::apps::{self, App, slow_response, unfinished_response};
use tulle_tests::client::{AnyBody, CollectedResponse, Http1, Http2, any, empty, full};
use tulle_tests::eventually::eventually;
use tulle_tests::fake_policy_service::FakePolicyService;
use tulle_tests::mesh::{Builder, HTTP, Mesh, mesh};

use crate::scripted_policies;

/// A route of the service `web` with annotations, one per line, and the other fields of its rule.
fn route(kind: &str, annotations: &str, rule: &str) -> String {
    let annotations: String = annotations.lines().map(|line| format!("    {line}\n")).collect();
    format!(
        "\
apiVersion: gateway.networking.k8s.io/v1
kind: {kind}
metadata:
  name: web
  namespace: shop
  annotations:
{annotations}spec:
  parentRefs: [{{group: core, kind: Service, name: web, port: {HTTP}}}]
  rules:
  - backendRefs: [{{name: web, port: {HTTP}}}]
{rule}
"
    )
}

/// The requests that reached a server, by their header `x-id`.
#[derive(Clone, Default)]
struct RecordedRequests(Arc<Mutex<HashMap<String, Vec<Bytes>>>>);

impl RecordedRequests {
    /// Records a request; returns the number of earlier requests with its id.
    async fn record(&self, req: Request<Incoming>) -> usize {
        let id = req.headers()["x-id"].to_str().unwrap().to_owned();
        let body = req
            .into_body()
            .collect()
            .await
            .map_or_else(|_| Bytes::new(), |body| body.to_bytes());
        let mut seen = self.0.lock();
        let bodies = seen.entry(id).or_default();
        bodies.push(body);
        bodies.len() - 1
    }

    fn count(&self, id: &str) -> usize {
        self.0.lock().get(id).map_or(0, Vec::len)
    }
}

/// A server at `workload`; `answer` gets the attempt number, starting at 0.
async fn server<F>(
    mesh: &Mesh,
    workload: &str,
    seen: &RecordedRequests,
    answer: impl Fn(usize) -> F + Clone + Send + Sync + 'static,
) -> App
where
    F: Future<Output = Response<AnyBody>> + Send + 'static,
{
    let seen = seen.clone();
    apps::serve_http(mesh.listen(workload, HTTP).await, move |req| {
        let (seen, answer) = (seen.clone(), answer.clone());
        async move { answer(seen.record(req).await).await }
    })
}

fn status(status: u16) -> Response<AnyBody> {
    Response::builder().status(status).body(full("hello")).unwrap()
}

fn get(id: &str) -> Request<AnyBody> {
    Request::get("/")
        .header("host", "web.test")
        .header("x-id", id)
        .body(empty())
        .unwrap()
}

fn post(id: &str, body: impl Into<Bytes>) -> Request<AnyBody> {
    Request::post("/")
        .header("host", "web.test")
        .header("x-id", id)
        .body(full(body))
        .unwrap()
}

/// `client` and `web`, with a route.
fn mesh_with_route(route: &str) -> Builder {
    mesh().workload("client").workload("web").manifest("route", route)
}

async fn client(mesh: &Mesh) -> Http1 {
    Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await
}

/// Two retries after a 503.
const TWO_RETRIES: &str = "retry.linkerd.io/http: 503\nretry.linkerd.io/limit: '2'";

#[test]
fn a_retryable_response_is_retried_with_its_body() {
    mesh_with_route(&route("HTTPRoute", TWO_RETRIES, "")).run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |n| status(if n < 2 { 503 } else { 200 })).await;
        let mut client = client(mesh).await;
        assert_eq!(client.fetch(get("twice")).await.unwrap().status, 200);
        assert_eq!(seen.count("twice"), 3);
        assert_eq!(client.fetch(post("body", "all of it")).await.unwrap().status, 200);
        assert_eq!(seen.0.lock()["body"], ["all of it"; 3]);
        let answer = client.fetch(post("long", vec![b'x'; 100_000])).await.unwrap();
        assert_eq!(
            (answer.status.as_u16(), seen.count("long")),
            (503, 1),
            "a long body is not buffered for retries"
        );
    });
}

#[test]
fn other_responses_are_not_retried_and_the_retry_limit_holds() {
    mesh_with_route(&route("HTTPRoute", TWO_RETRIES, "")).run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |n| status(if n < 3 { 503 } else { 500 })).await;
        let mut client = client(mesh).await;
        assert_eq!(client.fetch(get("limit")).await.unwrap().status, 503);
        assert_eq!(seen.count("limit"), 3);
        assert_eq!(client.fetch(get("limit")).await.unwrap().status, 500);
        assert_eq!(seen.count("limit"), 4);
    });
}

#[test]
fn a_retry_goes_to_another_endpoint() {
    let route = route("HTTPRoute", "retry.linkerd.io/http: 5xx", "");
    let replicas = mesh().workload("client").replicas("web", 2).manifest("route", &route);
    replicas.run(async |mesh: &Mesh| {
        let (bad, good) = (RecordedRequests::default(), RecordedRequests::default());
        let _bad = server(mesh, "web-0", &bad, async |_| status(500)).await;
        let _good = server(mesh, "web-1", &good, async |_| status(200)).await;
        let mut client = client(mesh).await;
        for n in 0..100 {
            assert_eq!(client.fetch(get(&n.to_string())).await.unwrap().status, 200, "{n}");
        }
        let max_attempts = |seen: &RecordedRequests| seen.0.lock().values().map(Vec::len).max();
        assert_eq!(max_attempts(&good), Some(1));
        assert!(max_attempts(&bad).is_none_or(|max| max == 1));
    });
}

#[test]
fn an_attempt_that_times_out_is_retried() {
    let annotations = "retry.linkerd.io/http: 5xx\nretry.linkerd.io/timeout: 200ms";
    mesh_with_route(&route("HTTPRoute", annotations, "")).run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |n| match n {
            0 => std::future::pending().await,
            _ => {
                tokio::time::sleep(Duration::from_millis(400)).await; // the last attempt may take longer
                status(200)
            }
        })
        .await;
        assert_eq!(client(mesh).await.fetch(get("slow")).await.unwrap().status, 200);
        assert_eq!(seen.count("slow"), 2);
    });
}

#[test]
fn after_its_backoff_a_rule_retries_responses_and_attempts_that_timed_out() {
    let rule = "    retry: {codes: [503], attempts: 2, backoff: 400ms}\n    timeouts: {backendRequest: 200ms}";
    mesh_with_route(&route("HTTPRoute", "unrelated: annotation", rule)).run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |n| match n {
            0 => status(503),
            1 => std::future::pending().await,
            _ => status(200),
        })
        .await;
        let start = Instant::now();
        assert_eq!(client(mesh).await.fetch(get("both")).await.unwrap().status, 200);
        assert_eq!(seen.count("both"), 3);
        // The first backoff, the timeout, and the doubled backoff.
        assert!(
            start.elapsed() >= Duration::from_millis(400 + 200 + 800),
            "{:?}",
            start.elapsed()
        );
    });
}

#[test]
fn a_request_has_one_deadline_for_all_its_attempts() {
    let annotations = "retry.linkerd.io/http: 5xx\nretry.linkerd.io/limit: '1000'\ntimeout.linkerd.io/request: 2s";
    mesh_with_route(&route("HTTPRoute", annotations, "")).run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |n| {
            if n == 2 {
                return std::future::pending().await;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
            status(503)
        })
        .await;
        let start = Instant::now();
        let answer = client(mesh).await.fetch(get("late")).await.unwrap();
        let elapsed = start.elapsed();
        assert_eq!((answer.status.as_u16(), answer.cause()), (504, "deadline"));
        assert_eq!(seen.count("late"), 3);
        // A deadline of the third attempt alone would end after 3 seconds.
        let expected = Duration::from_secs(2)..Duration::from_secs(3);
        assert!(expected.contains(&elapsed), "{elapsed:?}");
    });
}

#[test]
fn the_deadline_covers_the_body_of_the_response() {
    for (annotation, version) in [
        ("timeout.linkerd.io/request: 300ms", Version::HTTP_11),
        ("timeout.linkerd.io/response: 300ms", Version::HTTP_2),
        ("timeout.linkerd.io/idle: 300ms", Version::HTTP_11),
    ] {
        mesh_with_route(&route("HTTPRoute", annotation, "")).run(async |mesh: &Mesh| {
            let seen = RecordedRequests::default();
            let _app = server(mesh, "web", &seen, async |_| unfinished_response(1, Duration::ZERO)).await;
            let stream = mesh.dial("client", mesh.service_addr("web", HTTP)).await;
            let start = Instant::now();
            let result = match version {
                Version::HTTP_2 => Http2::handshake(stream).await.fetch(http2_get("x")).await,
                _ => Http1::handshake(stream).await.fetch(get("x")).await,
            };
            let error = result.expect_err("the body has no end");
            assert!(!error.is_timeout(), "{error}");
            assert!(
                start.elapsed() >= Duration::from_millis(300),
                "{annotation}: {:?}",
                start.elapsed()
            );
        });
    }
}

fn http2_get(id: &str) -> Request<AnyBody> {
    let req = Request::get("http://web.test/")
        .version(Version::HTTP_2)
        .header("x-id", id);
    req.body(empty()).unwrap()
}

#[test]
fn data_resets_only_the_idle_timeout() {
    let idle_timeout = route("HTTPRoute", "timeout.linkerd.io/idle: 300ms", "");
    mesh_with_route(&idle_timeout).run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", &RecordedRequests::default(), async |_| {
            slow_response(5, Duration::from_millis(100))
        })
        .await;
        assert_eq!(client(mesh).await.fetch(get("x")).await.unwrap().body.len(), 5);
    });
    let strict = route("HTTPRoute", "timeout.linkerd.io/response: 300ms", "");
    mesh_with_route(&strict).run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", &RecordedRequests::default(), async |_| {
            slow_response(9, Duration::from_millis(100))
        })
        .await;
        assert!(client(mesh).await.fetch(get("x")).await.is_err());
    });
}

/// A gRPC call with the parts that proxies use.
fn call(id: &str) -> Request<AnyBody> {
    let req = Request::post("http://web.test/shop.Web/Buy").version(Version::HTTP_2);
    let req = req
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("x-id", id);
    req.body(full(&b"\0\0\0\0\0"[..])).unwrap()
}

/// A gRPC response: an optional message, and the status in trailers or in the head.
fn reply(message: Option<&'static [u8]>, code: i32, in_head: bool) -> Response<AnyBody> {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from(code));
    let rsp = Response::builder().header("content-type", "application/grpc");
    if in_head {
        return rsp.header("grpc-status", code).body(empty()).unwrap();
    }
    let frames = message.map(|message| Frame::data(Bytes::from_static(message)));
    let frames = frames
        .into_iter()
        .chain([Frame::trailers(trailers)])
        .map(Ok::<_, Infallible>);
    rsp.body(any(StreamBody::new(stream::iter(frames)))).unwrap()
}

fn grpc_status(answer: &CollectedResponse) -> &str {
    let status = answer
        .trailers
        .get("grpc-status")
        .or_else(|| answer.headers.get("grpc-status"));
    status.map_or("", |status| status.to_str().unwrap())
}

#[test]
fn grpc_statuses_are_retried_in_headers_and_trailers() {
    let route = route("GRPCRoute", "retry.linkerd.io/grpc: unavailable", "");
    mesh_with_route(&route).run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |n| match n {
            0 => reply(None, 14, true),
            _ => reply(Some(b"\0\0\0\0\0"), 0, false),
        })
        .await;
        let mut client = Http2::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let answer = client.fetch(call("head")).await.unwrap();
        assert_eq!(
            (grpc_status(&answer), answer.body.len(), seen.count("head")),
            ("0", 5, 2)
        );
    });
    mesh_with_route(&route).run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |n| match n {
            0 => reply(None, 14, false),
            _ => reply(Some(b"\0\0\0\0\0"), 5, false),
        })
        .await;
        let mut client = Http2::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let answer = client.fetch(call("trailers")).await.unwrap();
        assert_eq!(
            (grpc_status(&answer), answer.body.len(), seen.count("trailers")),
            ("5", 5, 2)
        );
    });
}

#[test]
fn a_grpc_stream_that_times_out_ends_with_a_status() {
    let route = route("GRPCRoute", "timeout.linkerd.io/idle: 300ms", "");
    mesh_with_route(&route).run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", &RecordedRequests::default(), async |_| {
            let mut rsp = unfinished_response(1, Duration::ZERO);
            let kind = HeaderValue::from_static("application/grpc");
            rsp.headers_mut().insert("content-type", kind);
            rsp
        })
        .await;
        let mut client = Http2::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let answer = client.fetch(call("stream")).await.unwrap();
        assert_eq!((grpc_status(&answer), answer.body.len()), ("4", 1));
        assert!(
            answer.trailers["grpc-message"]
                .to_str()
                .unwrap()
                .contains("idle timeout")
        );
    });
}

#[test]
fn l5d_retry_headers_override_the_route_where_allowed() {
    let plain = route("HTTPRoute", NO_ANNOTATIONS, "");
    for allowed in [true, false] {
        let builder = match allowed {
            true => mesh_with_route(&plain).flag("--allow-l5d-request-headers"),
            false => mesh_with_route(&plain),
        };
        builder.run(async |mesh: &Mesh| {
            let seen = RecordedRequests::default();
            let heads = Arc::new(Mutex::new(Vec::new()));
            let (app_seen, app_heads) = (seen.clone(), heads.clone());
            let _app = apps::serve_http(mesh.listen("web", HTTP).await, move |req| {
                let app_seen = app_seen.clone();
                app_heads.lock().push(req.headers().clone());
                async move {
                    match req.uri().path() {
                        "/hang" => std::future::pending().await,
                        _ => status(if app_seen.record(req).await < 3 { 503 } else { 200 }),
                    }
                }
            });
            let mut client = client(mesh).await;
            let mut req = get("asks");
            for (name, value) in [
                ("l5d-retry-http", "5xx"),
                ("l5d-retry-limit", "3"),
                ("l5d-timeout", "20s"),
            ] {
                req.headers_mut().insert(name, HeaderValue::from_static(value));
            }
            let answer = client.fetch(req).await.unwrap();
            let (code, n) = if allowed { (200, 4) } else { (503, 1) };
            assert_eq!((answer.status.as_u16(), seen.count("asks")), (code, n));
            let leaked = heads.lock().iter().any(|head| head.contains_key("l5d-retry-http"));
            assert_eq!(leaked, !allowed);
            if allowed {
                let req = Request::get("/hang")
                    .header("host", "web.test")
                    .header("l5d-timeout", "200ms");
                let answer = client.fetch(req.body(empty()).unwrap()).await.unwrap();
                assert_eq!((answer.status.as_u16(), answer.cause()), (504, "deadline"));
            }
        });
    }
}

#[test]
fn a_failing_server_gets_retries_up_to_the_budget() {
    let annotations = "retry.linkerd.io/http: 5xx\nretry.linkerd.io/limit: '20'";
    mesh_with_route(&route("HTTPRoute", annotations, "")).run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |_| status(500)).await;
        let mut clients = JoinSet::new();
        for n in 0..200 {
            let mut client = client(mesh).await;
            clients.spawn(async move { client.fetch(get(&n.to_string())).await.unwrap().status });
        }
        while let Some(status) = clients.join_next().await {
            assert_eq!(status.unwrap(), 500);
        }
        let n: usize = seen.0.lock().values().map(Vec::len).sum();
        // 200 requests; the budget permits 200 retries, and 10 per second for 10 s.
        assert!((400..=501).contains(&n), "{n}");
    });
}

#[test]
fn a_profile_retries_within_its_budget_and_replaces_routes() {
    let profile = "\
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata: {name: web.shop.svc.cluster.local, namespace: shop}
spec:
  retryBudget: {retryRatio: 0.0, minRetriesPerSecond: 1, ttl: 10s}
  routes:
  - name: flaky
    condition: {pathRegex: /}
    isRetryable: true
";
    // A route that matches no request of this test, so that without the profile they get 404.
    let nowhere = route(
        "HTTPRoute",
        NO_ANNOTATIONS,
        "    matches: [{path: {type: Exact, value: /nowhere}}]",
    );
    mesh_with_route(&nowhere)
        .manifest("profile", profile)
        .run(async |mesh: &Mesh| {
            let seen = RecordedRequests::default();
            let _app = server(mesh, "web", &seen, async |n| status(if n < 2 { 503 } else { 200 })).await;
            let mut client = client(mesh).await;
            eventually("the profile is known", async || {
                let known = client.fetch(get("known")).await.unwrap().status;
                (known != 404).then_some(())
            })
            .await;
            for id in ["a", "b", "c", "d"] {
                assert_eq!(client.fetch(get(id)).await.unwrap().status, 200);
                assert_eq!(seen.count(id), 3);
            }
            let mut n_failed = 0;
            for id in ["e", "f", "g"] {
                n_failed += usize::from(client.fetch(get(id)).await.unwrap().status == 503);
            }
            assert_eq!(n_failed, 3, "the budget of ten retries in ten seconds is used up");
            let skipped = mesh
                .metric("client", "route_retryable_total", &["skipped=\"no_budget\""])
                .await;
            assert!(skipped >= 3.0, "{skipped}");
        });
}

#[test]
fn a_profile_retries_requests_without_a_response() {
    let profile = "\
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata: {name: web.shop.svc.cluster.local, namespace: shop}
spec:
  routes:
  - {name: all, condition: {pathRegex: '/.*'}, isRetryable: true}
";
    let mesh = mesh().workload("client").unmeshed("web").manifest("profile", profile);
    mesh.run(async |mesh: &Mesh| {
        // The number of connections to close without a response.
        let n_to_close = Arc::new(AtomicUsize::new(0));
        let listener = mesh.listen("web", HTTP).await;
        let remaining = n_to_close.clone();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") && stream.read_buf(&mut head).await.unwrap() > 0 {}
                if remaining.load(Ordering::Relaxed) > 0 {
                    remaining.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
                stream.write_all(answer).await.unwrap();
            }
        });
        // POST, which the proxy does not resend without permission.
        let post = || Request::post("/").header("host", "web.test").body(empty()).unwrap();
        let mut client = client(mesh).await;
        eventually("the profile is known", async || {
            assert_eq!(client.fetch(post()).await.unwrap().status, 200);
            let all = ["rt_route=\"all\""];
            (mesh.metric("client", "route_request_total", &all).await > 0.0).then_some(())
        })
        .await;
        n_to_close.store(2, Ordering::Relaxed);
        assert_eq!(client.fetch(post()).await.unwrap().status, 200);
        assert_eq!(n_to_close.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn timeouts_apply_to_clients_that_stop_reading() {
    mesh_with_route(&route("HTTPRoute", "timeout.linkerd.io/request: 500ms", "")).run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", &RecordedRequests::default(), async |_| {
            let piece = || Ok::<_, Infallible>(Frame::data(Bytes::from_static(&[b'x'; 65_536])));
            Response::new(any(StreamBody::new(stream::repeat_with(piece))))
        })
        .await;
        let to_web = mesh.service_addr("web", HTTP);
        let mut one = client(mesh).await;
        let mut two = Http2::handshake(mesh.dial("client", to_web).await).await;
        let unread = (
            one.send(get("one")).await.unwrap(),
            two.send(http2_get("two")).await.unwrap(),
        );
        let late = ["error=\"deadline\""];
        eventually("both requests are cancelled", async || {
            (mesh.metric("client", "response_total", &late).await >= 2.0).then_some(())
        })
        .await;
        let failed = ["cause=\"deadline\"", "direction=\"outbound\""];
        mesh.wait_for_metric("client", "tulle_failures_total", &failed, 2.0)
            .await;
        drop(unread);
    });
}

#[test]
fn a_policy_change_does_not_refill_the_retry_budget() {
    let annotations = "retry.linkerd.io/http: 5xx\nretry.linkerd.io/limit: '20'";
    mesh_with_route(&route("HTTPRoute", annotations, "")).run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |_| status(500)).await;
        let mut clients = JoinSet::new();
        for n in 0..100 {
            let mut client = client(mesh).await;
            clients.spawn(async move { client.fetch(get(&n.to_string())).await.unwrap().status });
        }
        while clients.join_next().await.is_some() {}
        let mut client = client(mesh).await;
        let moved = "  - matches: [{path: {type: Exact, value: /moved}}]
    filters: [{type: RequestRedirect, requestRedirect: {hostname: other.test, statusCode: 301}}]";
        mesh.write("route", &route("HTTPRoute", annotations, moved));
        eventually("the route has changed", async || {
            let req = Request::get("/moved")
                .header("host", "web.test")
                .header("x-id", "moved");
            let answer = client.fetch(req.body(empty()).unwrap()).await.unwrap();
            (answer.status == 301).then_some(())
        })
        .await;
        assert_eq!(client.fetch(get("more")).await.unwrap().status, 500);
        assert!(seen.count("more") < 10, "{}", seen.count("more"));
        let refused = mesh
            .metric("client", "outbound_http_route_retry_overflow_total", &[])
            .await;
        assert!(refused > 0., "{refused}");
    });
}

#[test]
fn a_profile_change_does_not_refill_the_retry_budget() {
    let profile = |more| {
        format!(
            "\
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata: {{name: web.shop.svc.cluster.local, namespace: shop}}
spec:
  retryBudget: {{retryRatio: 0.0, minRetriesPerSecond: 10, ttl: 10s}}
  routes:
  - {{name: flaky, condition: {{pathRegex: /}}, isRetryable: true}}
{more}"
        )
    };
    let mesh = mesh()
        .workload("client")
        .workload("web")
        .manifest("profile", &profile(""));
    mesh.run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |_| status(500)).await;
        let mut client = client(mesh).await;
        assert_eq!(client.fetch(get("all")).await.unwrap().status, 500);
        assert_eq!(seen.count("all"), 101);
        mesh.write("profile", &profile("  - {name: new, condition: {pathRegex: /new}}\n"));
        eventually("the profile has changed", async || {
            let req = Request::get("/new").header("host", "web.test").header("x-id", "new");
            client.fetch(req.body(empty()).unwrap()).await.unwrap();
            let new = ["rt_route=\"new\""];
            (mesh.metric("client", "route_request_total", &new).await > 0.0).then_some(())
        })
        .await;
        assert_eq!(client.fetch(get("more")).await.unwrap().status, 500);
        assert_eq!(seen.count("more"), 1);
    });
}

#[test]
fn a_received_body_is_not_cut_off_while_its_reader_pauses() {
    mesh_with_route(&route("HTTPRoute", "timeout.linkerd.io/response: 300ms", "")).run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", &RecordedRequests::default(), async |_| {
            Response::new(full(vec![b'x'; 200_000]))
        })
        .await;
        // With a small window, so that the proxy has to buffer most of the body.
        let stream = mesh.dial("client", mesh.service_addr("web", HTTP)).await;
        let mut builder = http2::Builder::new(TokioExecutor::new());
        let handshake = builder
            .initial_stream_window_size(65_535)
            .handshake(TokioIo::new(stream));
        let (mut client, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        let rsp = client.send_request(http2_get("pause")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await; // the pause of the reader
        let answer = CollectedResponse::collect(rsp).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.body.len()), (200, 200_000));
    });
}

#[test]
fn no_retry_without_an_available_endpoint() {
    mesh_with_route(&route("HTTPRoute", TWO_RETRIES, "")).run(async |mesh: &Mesh| {
        let (seen, request_arrived, may_respond) = (
            RecordedRequests::default(),
            Arc::new(Notify::new()),
            Arc::new(Notify::new()),
        );
        let app_signals = (request_arrived.clone(), may_respond.clone());
        let _app = server(mesh, "web", &seen, move |_| {
            let (request_arrived, may_respond) = app_signals.clone();
            async move {
                request_arrived.notify_one();
                may_respond.notified().await;
                status(503)
            }
        })
        .await;
        let mut client = client(mesh).await;
        let request_task = tokio::spawn(async move { client.fetch(get("one")).await.unwrap() });
        request_arrived.notified().await;
        mesh.remove("pod-web");
        eventually("the endpoint is gone", async || {
            let known = mesh.metric("client", "outbound_http_balancer_p2c_endpoints", &[]);
            (known.await == 0.0).then_some(())
        })
        .await;
        may_respond.notify_one();
        let answer = request_task.await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (503, "hello"));
        assert_eq!(seen.count("one"), 1);
        for (name, expected) in [("overflow", 1.0), ("requests", 0.0)] {
            let name = format!("outbound_http_route_retry_{name}_total");
            assert_eq!(mesh.metric("client", &name, &[]).await, expected, "{name}");
        }
    });
}

#[test]
fn retries_are_delayed_by_backoff() {
    let annotations = "retry.linkerd.io/http: 5xx\nretry.linkerd.io/limit: '5'";
    mesh_with_route(&route("HTTPRoute", annotations, "")).run(async |mesh: &Mesh| {
        let seen = RecordedRequests::default();
        let _app = server(mesh, "web", &seen, async |_| status(500)).await;
        let mut client = client(mesh).await;
        client.fetch(get("warm")).await.unwrap();
        let start = Instant::now();
        assert_eq!(client.fetch(get("paused")).await.unwrap().status, 500);
        assert_eq!(seen.count("paused"), 6);
        // 25 ms, doubled for each attempt, up to 250 ms.
        assert!(
            start.elapsed() >= Duration::from_millis(25 + 50 + 100 + 200 + 250),
            "{:?}",
            start.elapsed()
        );
    });
}

#[test]
fn retry_after_is_respected_if_the_policy_says_so() {
    for respects_hint in [true, false] {
        scripted_policies::run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
            let seen = RecordedRequests::default();
            let _app = server(mesh, "legacy", &seen, async |n| {
                let mut rsp = status(if n < 1 { 503 } else { 200 });
                rsp.headers_mut().insert("retry-after", HeaderValue::from_static("60"));
                rsp
            })
            .await;
            let unavailable = StatusRange { start: 503, end: 503 };
            let retry = http_route::Retry {
                max_retries: 1,
                max_request_bytes: 1024,
                conditions: Some(Conditions {
                    status_ranges: vec![unavailable],
                }),
                timeout: None,
                backoff: Some(ExponentialBackoff {
                    min_backoff: Some(prost_types::Duration {
                        seconds: 0,
                        nanos: 10_000_000,
                    }),
                    max_backoff: scripted_policies::seconds(2),
                    jitter_ratio: 0.0,
                    respect_retry_after_hint: respects_hint,
                }),
            };
            let to_server = scripted_policies::forward(scripted_policies::endpoint((mesh.ip("legacy"), HTTP).into()));
            let rule = http_route::Rule {
                retry: Some(retry),
                ..scripted_policies::rule(to_server)
            };
            policies.set_destination_policy(Ok(scripted_policies::http1(rule)));
            let mut client = Http1::handshake(mesh.dial("client", scripted_policies::ORIG_DST).await).await;
            client.fetch(get("warm")).await.unwrap();
            let start = Instant::now();
            assert_eq!(client.fetch(get("asked")).await.unwrap().status, 200);
            assert_eq!(seen.count("asked"), 2);
            // The server asks for a minute, but the policy limits the backoff to 2 s.
            assert_eq!(
                start.elapsed() >= Duration::from_secs(2),
                respects_hint,
                "{:?}",
                start.elapsed()
            );
        });
    }
}

/// An empty YAML map in place of annotations.
const NO_ANNOTATIONS: &str = "{}";
