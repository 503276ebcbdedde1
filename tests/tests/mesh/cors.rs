//! CORS: preflight requests are answered by the client's proxy, and the headers of responses are replaced.

use http::{Method, Request, Response, Version};
use tulle_tests::apps::{self, App};
use tulle_tests::client::{AnyBody, CollectedResponse, Http1, Http2, empty, full};
use tulle_tests::mesh::{HTTP, Mesh, mesh};

use crate::routing::http_route;

const RULES: &str = "  - filters:
    - type: CORS
      cors:
        allowOrigins: ['https://a.test', 'https://*.b.test']
        allowCredentials: true
        allowMethods: [PUT]
        allowHeaders: ['*']
        exposeHeaders: [x-more]
        maxAge: 60
    backendRefs: [{name: web, port: 8080}]";

/// Serves `web`, with its own CORS headers.
async fn application(mesh: &Mesh) -> App {
    apps::serve_http(mesh.listen("web", HTTP).await, async |_| {
        Response::builder()
            .header("access-control-allow-origin", "*")
            .header("x-application", "web")
            .body(full("hello"))
            .unwrap()
    })
}

fn from_origin(method: Method, origin: &str) -> http::request::Builder {
    Request::builder().method(method).header("origin", origin)
}

fn preflight(origin: &str) -> http::request::Builder {
    from_origin(Method::OPTIONS, origin)
        .header("access-control-request-method", "PUT")
        .header("access-control-request-headers", "x-a, x-b")
}

/// Sends a request by HTTP/1 and by HTTP/2, and returns both responses.
async fn fetch_both(mesh: &Mesh, req: impl Fn() -> http::request::Builder) -> [CollectedResponse; 2] {
    let addr = mesh.service_addr("web", HTTP);
    let build = |req: http::request::Builder| -> Request<AnyBody> { req.body(empty()).unwrap() };
    let mut http1 = Http1::handshake(mesh.dial("client", addr).await).await;
    let mut http2 = Http2::handshake(mesh.dial("client", addr).await).await;
    let of_http1 = build(req().uri("/").header("host", "web.test"));
    let of_http2 = build(req().uri("http://web.test/").version(Version::HTTP_2));
    [
        http1.fetch(of_http1).await.unwrap(),
        http2.fetch(of_http2).await.unwrap(),
    ]
}

/// The headers about CORS and caches, sorted.
fn cors_headers(rsp: &CollectedResponse) -> Vec<String> {
    let lines = rsp
        .headers
        .iter()
        .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()));
    let mut found: Vec<_> = lines
        .filter(|line| line.starts_with("access-control") || line.starts_with("vary"))
        .collect();
    found.sort();
    found
}

#[test]
fn preflight_requests_are_answered_without_the_application() {
    let mesh = mesh().workload("client").workload("web");
    mesh.manifest("route", &http_route("", RULES)).run(async |mesh: &Mesh| {
        let _application = application(mesh).await;
        for origin in ["https://a.test", "https://x.b.test"] {
            for rsp in fetch_both(mesh, || preflight(origin)).await {
                assert_eq!((rsp.status.as_u16(), rsp.text()), (204, String::new()));
                let expected = [
                    "access-control-allow-credentials: true",
                    "access-control-allow-headers: x-a, x-b",
                    "access-control-allow-methods: PUT",
                    &format!("access-control-allow-origin: {origin}"),
                    "access-control-expose-headers: x-more",
                    "access-control-max-age: 60",
                    "vary: origin",
                ];
                assert_eq!(cors_headers(&rsp), expected);
                assert_eq!(rsp.headers.get("x-application"), None);
            }
        }
        for rsp in fetch_both(mesh, || preflight("https://b.test")).await {
            assert_eq!(
                (rsp.status.as_u16(), cors_headers(&rsp)),
                (204, vec!["vary: origin".to_owned()])
            );
        }
        let statuses = "outbound_http_route_request_statuses_total";
        let counted = mesh
            .metric("client", statuses, &["http_status=\"204\"", "error=\"\""])
            .await;
        assert_eq!(counted, 6.0);
        // A request that is not a preflight request reaches the application.
        for rsp in fetch_both(mesh, || from_origin(Method::OPTIONS, "https://a.test")).await {
            assert_eq!((rsp.status.as_u16(), rsp.header("x-application")), (200, "web"));
        }
    });
}

#[test]
fn cors_headers_of_the_application_are_replaced() {
    let mesh = mesh().workload("client").workload("web");
    mesh.manifest("route", &http_route("", RULES)).run(async |mesh: &Mesh| {
        let _application = application(mesh).await;
        let allowed = [
            "access-control-allow-credentials: true",
            "access-control-allow-origin: https://a.test",
            "access-control-expose-headers: x-more",
            "vary: origin",
        ];
        for (origin, expected) in [("https://a.test", &allowed[..]), ("https://b.test", &allowed[3..])] {
            for rsp in fetch_both(mesh, || from_origin(Method::PUT, origin)).await {
                assert_eq!((rsp.text(), rsp.header("x-application")), ("hello".to_owned(), "web"));
                assert_eq!(cors_headers(&rsp), expected);
            }
        }
    });
}
