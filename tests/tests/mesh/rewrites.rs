//! URLRewrite: the host and the path that a backend receives.

use http::{Request, Version};
use tulle_tests::apps::Recorder;
use tulle_tests::client::{Http1, Http2, empty, full, http2_request, request};
use tulle_tests::mesh::{HTTP, Mesh, mesh};

use crate::routing::http_route;

/// A rule for requests whose path begins with `prefix`.
fn rule(prefix: &str, rewrite: &str) -> String {
    format!(
        "  - matches: [{{path: {{type: PathPrefix, value: {prefix}}}}}]
    filters: [{{type: URLRewrite, urlRewrite: {{{rewrite}}}}}]
    backendRefs: [{{name: web, port: {HTTP}}}]
"
    )
}

fn to_prefix(prefix: &str) -> String {
    format!("path: {{type: ReplacePrefixMatch, replacePrefixMatch: '{prefix}'}}")
}

#[test]
fn backends_receive_the_new_path_and_host() {
    let rules = [
        rule("/foo", &to_prefix("/xyz")),
        rule("/slash", &to_prefix("/xyz/")),
        rule("/gone", &to_prefix("")),
        rule("/root", &to_prefix("/")),
        rule("/full", "path: {type: ReplaceFullPath, replaceFullPath: /x}"),
        rule("/host", "hostname: other.test"),
        rule("/", &format!("hostname: other.test, {}", to_prefix("/all"))),
    ];
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.manifest("route", &http_route("", &rules.concat()));
    mesh.run(async |mesh: &Mesh| {
        let web = Recorder::start(mesh, "web", |_| 200).await;
        let addr = mesh.service_addr("web", HTTP);
        let mut http1 = Http1::handshake(mesh.dial("client", addr).await).await;
        let mut http2 = Http2::handshake(mesh.dial("client", addr).await).await;
        let mut n_sent = 0;
        for (path, expected, host) in [
            ("/foo/bar?q=/foo", "/xyz/bar?q=/foo", "web.test"),
            ("/foo/", "/xyz/", "web.test"),
            ("/foo", "/xyz", "web.test"),
            ("/slash/bar", "/xyz/bar", "web.test"),
            ("/gone/bar", "/bar", "web.test"),
            ("/gone/", "/", "web.test"),
            ("/gone?q", "/?q", "web.test"),
            ("/root/bar", "/bar", "web.test"),
            ("/root", "/", "web.test"),
            ("/full/a?q=1", "/x?q=1", "web.test"),
            ("/host/a?q=1", "/host/a?q=1", "other.test"),
            ("/foobar", "/all/foobar", "other.test"),
        ] {
            assert_eq!(http1.fetch(request(path)).await.unwrap().status, 200, "{path}");
            assert_eq!(http2.fetch(http2_request(path)).await.unwrap().status, 200, "{path}");
            n_sent += 2;
            let received = web.requests();
            assert_eq!(received.len(), n_sent);
            for received in &received[n_sent - 2..] {
                assert_eq!((&*received.target, &*received.host), (expected, host), "{path}");
            }
        }
        // Metrics of the client's proxy have the name of the service, not the new host.
        let page = mesh.metrics("client").await;
        assert!(!page.contains("other.test"), "{page}");
        let authority = format!("authority=\"web.shop.svc.cluster.local:{HTTP}\"");
        let n_counted = mesh
            .metric("client", "request_total", &["direction=\"outbound\"", &authority])
            .await;
        assert_eq!(n_counted, n_sent as f64);
    });
}

#[test]
fn requests_without_a_path_keep_their_target() {
    let rules = rule("/", &format!("hostname: other.test, {}", to_prefix("/new")));
    let mesh = mesh().workload("client").workload("web");
    mesh.manifest("route", &http_route("", &rules))
        .run(async |mesh: &Mesh| {
            let web = Recorder::start(mesh, "web", |_| 200).await;
            let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
            let options = Request::options("*").header("host", "web.test");
            assert_eq!(client.fetch(options.body(empty()).unwrap()).await.unwrap().status, 200);
            let received = &web.requests()[0];
            assert_eq!((&*received.target, &*received.host), ("*", "other.test"));
        });
}

#[test]
fn backends_of_a_rule_have_their_own_rewrites() {
    let backend = |name: &str, rewrite: &str| {
        format!("{{name: {name}, port: {HTTP}, filters: [{{type: URLRewrite, urlRewrite: {{{rewrite}}}}}]}}")
    };
    // The second backend replaces the prefix that the rule has inserted.
    let rules = format!(
        "  - matches: [{{path: {{type: PathPrefix, value: /foo}}}}]
    filters: [{{type: URLRewrite, urlRewrite: {{{}}}}}]
    backendRefs: [{}, {}]",
        to_prefix("/of/rule"),
        backend("web", "hostname: first.test"),
        backend("canary", &to_prefix("/second")),
    );
    let mesh = mesh().workload("client").workload("web").workload("canary");
    mesh.manifest("route", &http_route("", &rules))
        .run(async |mesh: &Mesh| {
            let web = Recorder::start(mesh, "web", |_| 200).await;
            let canary = Recorder::start(mesh, "canary", |_| 200).await;
            let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
            for _ in 0..100 {
                assert_eq!(client.fetch(request("/foo/bar?q")).await.unwrap().status, 200);
            }
            let (web, canary) = (web.requests(), canary.requests());
            assert!(!web.is_empty() && !canary.is_empty() && web.len() + canary.len() == 100);
            for (received, expected) in [
                (web, ("first.test", "/of/rule/bar?q")),
                (canary, ("web.test", "/second/bar?q")),
            ] {
                for received in received {
                    assert_eq!((&*received.host, &*received.target), expected);
                }
            }
        });
}

#[test]
fn a_retry_is_rewritten_once() {
    let rules = format!(
        "  - matches: [{{path: {{type: PathPrefix, value: /foo}}}}]
    filters: [{{type: URLRewrite, urlRewrite: {{{}}}}}]
    backendRefs: [{{name: web, port: {HTTP}, filters: [{{type: URLRewrite, urlRewrite: {{{}}}}}]}}]",
        to_prefix("/foo/foo"),
        to_prefix("/foo/foo/foo"),
    );
    let annotations = "retry.linkerd.io/http: 5xx, retry.linkerd.io/limit: '2'";
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.manifest("route", &http_route(annotations, &rules));
    mesh.run(async |mesh: &Mesh| {
        let web = Recorder::start(mesh, "web", |n| if n % 3 < 2 { 503 } else { 200 }).await;
        let addr = mesh.service_addr("web", HTTP);
        let req = Request::post("/foo/bar").header("host", "web.test");
        let mut http1 = Http1::handshake(mesh.dial("client", addr).await).await;
        assert_eq!(http1.fetch(req.body(full("body")).unwrap()).await.unwrap().status, 200);
        let req = Request::post("http://web.test/foo/bar").version(Version::HTTP_2);
        let mut http2 = Http2::handshake(mesh.dial("client", addr).await).await;
        assert_eq!(http2.fetch(req.body(full("body")).unwrap()).await.unwrap().status, 200);
        assert_eq!(web.targets(), ["/foo/foo/foo/bar"; 6]);
    });
}
