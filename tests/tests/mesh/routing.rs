//! Routes of the Gateway API select backends and modify requests and responses.

use http::Request;
use tulle_tests::apps;
use tulle_tests::client::{Http1, empty, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, mesh};

/// An HTTPRoute of the service `web`. `rules` are indented by two spaces; the last needs no line break.
pub(crate) fn http_route(annotations: &str, rules: &str) -> String {
    format!(
        "\
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: web, namespace: shop, annotations: {{{annotations}}}}}
spec:
  parentRefs: [{{group: \"\", kind: Service, name: web, port: {HTTP}}}]
  rules:
{rules}
"
    )
}

/// Runs a test with `client`, `web` and `canary`, with these rules for `web`.
fn run_with_route(rules: &str, test: impl AsyncFnOnce(&Mesh, Http1) + Send) {
    let mesh = mesh().workload("client").workload("web").workload("canary");
    mesh.manifest("route", &http_route("", rules)).run(async |mesh: &Mesh| {
        for workload in ["web", "canary"] {
            apps::start_echo(mesh, workload).await;
        }
        let client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        test(mesh, client).await;
    });
}

#[test]
fn a_header_sends_requests_to_another_backend() {
    let rules = "  - matches: [{headers: [{name: x-canary, value: \"yes\"}]}]
    backendRefs: [{name: canary, port: 8080}]
  - backendRefs: [{name: web, port: 8080}]";
    run_with_route(rules, async |_: &Mesh, mut client: Http1| {
        for (value, expected) in [("yes", "canary\n"), ("no", "web\n"), ("yes", "canary\n")] {
            let req = Request::get("/").header("host", "web.test").header("x-canary", value);
            assert_eq!(client.fetch(req.body(empty()).unwrap()).await.unwrap().text(), expected);
        }
    });
}

#[test]
fn weights_divide_requests_among_backends() {
    let rules = "  - backendRefs: [{name: web, port: 8080, weight: 3}, {name: canary, port: 8080, weight: 1}]";
    run_with_route(rules, async |_: &Mesh, mut client: Http1| {
        let mut n_canary = 0;
        for _ in 0..400 {
            n_canary += usize::from(client.fetch(request("/")).await.unwrap().text() == "canary\n");
        }
        // The bounds are five standard deviations from the mean of 100.
        assert!((57..=143).contains(&n_canary), "{n_canary} of 400");
    });
}

#[test]
fn a_redirect_is_answered_by_the_proxy() {
    let rules = "  - matches: [{path: {type: PathPrefix, value: /old}}]
    filters:
    - type: RequestRedirect
      requestRedirect:
        hostname: elsewhere.test
        statusCode: 301
        path: {type: ReplacePrefixMatch, replacePrefixMatch: /new}
  - backendRefs: [{name: web, port: 8080}]";
    run_with_route(rules, async |_: &Mesh, mut client: Http1| {
        let answer = client.fetch(request("/old/page")).await.unwrap();
        assert_eq!(answer.status, 301);
        let location = answer.header("location");
        assert!(
            location.starts_with("http://elsewhere.test") && location.ends_with("/new/page"),
            "{location}"
        );
        assert_eq!(client.fetch(request("/")).await.unwrap().text(), "web\n");
    });
}

#[test]
fn filters_change_headers_of_requests_and_responses() {
    let rules = "  - filters:
    - type: RequestHeaderModifier
      requestHeaderModifier:
        set: [{name: x-set, value: new}]
        add: [{name: x-added, value: two}]
        remove: [x-gone]
    - type: ResponseHeaderModifier
      responseHeaderModifier:
        set: [{name: x-answer, value: \"42\"}]
        remove: [x-replica]
    backendRefs: [{name: web, port: 8080}]";
    run_with_route(rules, async |_: &Mesh, mut client: Http1| {
        let req = Request::get("/headers")
            .header("host", "web.test")
            .header("x-set", "old");
        let req = req.header("x-added", "one").header("x-gone", "here");
        let answer = client.fetch(req.body(empty()).unwrap()).await.unwrap();
        let seen: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(
            (&seen["x-set"], &seen["x-added"]),
            (&serde_json::json!(["new"]), &serde_json::json!(["one", "two"]))
        );
        assert_eq!(seen.get("x-gone"), None);
        assert_eq!(
            (answer.header("x-answer"), answer.headers.get("x-replica")),
            ("42", None)
        );
    });
}

#[test]
fn a_route_that_appears_changes_requests_of_open_connections() {
    mesh()
        .workload("client")
        .workload("web")
        .workload("canary")
        .run(async |mesh: &Mesh| {
            for workload in ["web", "canary"] {
                apps::start_echo(mesh, workload).await;
            }
            let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
            assert_eq!(client.fetch(request("/")).await.unwrap().text(), "web\n");
            mesh.write(
                "route",
                &http_route("", "  - backendRefs: [{name: canary, port: 8080}]"),
            );
            eventually("requests go to the canary", async || {
                (client.fetch(request("/")).await.unwrap().text() == "canary\n").then_some(())
            })
            .await;
            mesh.remove("route");
            eventually("requests go to web again", async || {
                (client.fetch(request("/")).await.unwrap().text() == "web\n").then_some(())
            })
            .await;
        });
}
