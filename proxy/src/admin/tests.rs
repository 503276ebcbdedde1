//! Every route: methods, authorization, and responses.

use bytes::Bytes;
use http::header::ALLOW;
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use tulle_core::logging::{self, Format};

use super::*;

const HERE: &str = "[::ffff:127.0.0.1]:1000";
const THERE: &str = "10.0.0.1:1000";

fn req(method: Method, client: &str) -> AdminRequest {
    AdminRequest {
        client: client.parse().unwrap(),
        local: HERE.parse().unwrap(),
        method,
        query: None,
        headers: HeaderMap::new(),
        body: Bytes::new(),
    }
}

fn body(rsp: AdminResponse) -> String {
    use futures_util::FutureExt;
    let collected = rsp
        .into_body()
        .collect()
        .now_or_never()
        .expect("reading the body")
        .unwrap();
    String::from_utf8(collected.to_bytes().to_vec()).unwrap()
}

#[test]
fn the_log_filter_is_shown_and_changed_from_this_machine() {
    let log = logging::init("warn,tulle=info", Format::Plain).unwrap();
    let send = |req: AdminRequest| log_level(&req, Some(&log));
    assert_eq!(body(send(req(Method::GET, HERE))), "warn,tulle=info");
    let put = |filter: &'static str| AdminRequest {
        body: Bytes::from_static(filter.as_bytes()),
        ..req(Method::PUT, HERE)
    };
    assert_eq!(send(put("error\n")).status(), StatusCode::NO_CONTENT);
    assert_eq!(log.current(), "error");
    let bad = send(put("tulle=loud"));
    assert_eq!(bad.status(), StatusCode::BAD_REQUEST);
    assert!(body(bad).contains("tulle=loud"));
    let binary = AdminRequest {
        body: Bytes::from_static(b"\xff"),
        ..req(Method::PUT, HERE)
    };
    assert_eq!(send(binary).status(), StatusCode::BAD_REQUEST);
    let posted = send(req(Method::POST, HERE));
    assert_eq!(
        (posted.status(), &posted.headers()[ALLOW]),
        (StatusCode::METHOD_NOT_ALLOWED, &"GET, PUT".parse().unwrap())
    );
    for method in [Method::GET, Method::PUT] {
        assert_eq!(send(req(method, THERE)).status(), StatusCode::FORBIDDEN);
    }
    assert_eq!(log.current(), "error");
    assert_eq!(log_level(&req(Method::GET, HERE), None).status(), StatusCode::NOT_FOUND);
}

#[test]
fn variables_are_json_and_can_be_chosen() {
    let env = [("A", "1"), ("B", "two")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
    let send = |query: Option<&str>| {
        env_json(
            &AdminRequest {
                query: query.map(str::to_owned),
                ..req(Method::GET, THERE)
            },
            &env,
        )
    };
    let all = send(None);
    assert_eq!(all.headers()[CONTENT_TYPE], "application/json");
    assert_eq!(body(all), r#"{"A":"1","B":"two"}"#);
    assert_eq!(body(send(Some("B&C"))), r#"{"B":"two","C":null}"#);
    assert_eq!(send(Some("A=1")).status(), StatusCode::BAD_REQUEST);
    assert_eq!(
        env_json(&req(Method::PUT, HERE), &env).status(),
        StatusCode::METHOD_NOT_ALLOWED
    );
    for (accept, status) in [
        ("application/json", StatusCode::OK),
        ("text/html, */*;q=0.1", StatusCode::OK),
        ("text/html", StatusCode::NOT_ACCEPTABLE),
    ] {
        let headers = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(accept))]);
        assert_eq!(
            env_json(
                &AdminRequest {
                    headers,
                    ..req(Method::GET, THERE)
                },
                &env
            )
            .status(),
            status,
            "{accept}"
        );
    }
}

#[tokio::test]
async fn shutdown_needs_a_post_from_loopback_and_must_be_enabled() {
    let shutdown = Notify::new();
    let send = |endpoint, method, client| shut_down(&req(method, client), endpoint, &shutdown).status();
    assert_eq!(
        send(ShutdownEndpoint::Disabled, Method::POST, HERE),
        StatusCode::NOT_FOUND
    );
    assert_eq!(
        send(ShutdownEndpoint::Enabled, Method::GET, HERE),
        StatusCode::METHOD_NOT_ALLOWED
    );
    assert_eq!(
        send(ShutdownEndpoint::Enabled, Method::POST, THERE),
        StatusCode::FORBIDDEN
    );
    assert_eq!(send(ShutdownEndpoint::Enabled, Method::POST, HERE), StatusCode::OK);
    shutdown.notified().await;
}
