//! Tests the methods, the authorization and the responses of each route.

use bytes::Bytes;
use http::header::ALLOW;
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use tulle_core::logging::{self, Format};

use super::*;

const LOOPBACK_CLIENT: &str = "[::ffff:127.0.0.1]:1000";
const REMOTE_CLIENT: &str = "10.0.0.1:1000";

fn req(method: Method, client: &str) -> AdminRequest {
    AdminRequest {
        client: client.parse().unwrap(),
        local: LOOPBACK_CLIENT.parse().unwrap(),
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
fn the_log_filter_is_shown_and_changed_for_loopback_clients_only() {
    let log = logging::init("warn,tulle=info", Format::Plain).unwrap();
    let send = |req: AdminRequest| log_level(&req, Some(&log));
    assert_eq!(body(send(req(Method::GET, LOOPBACK_CLIENT))), "warn,tulle=info");
    let put = |filter: &'static str| AdminRequest {
        body: Bytes::from_static(filter.as_bytes()),
        ..req(Method::PUT, LOOPBACK_CLIENT)
    };
    assert_eq!(send(put("error\n")).status(), StatusCode::NO_CONTENT);
    assert_eq!(log.current(), "error");
    let bad = send(put("tulle=loud"));
    assert_eq!(bad.status(), StatusCode::BAD_REQUEST);
    assert!(body(bad).contains("tulle=loud"));
    let binary = AdminRequest {
        body: Bytes::from_static(b"\xff"),
        ..req(Method::PUT, LOOPBACK_CLIENT)
    };
    assert_eq!(send(binary).status(), StatusCode::BAD_REQUEST);
    let posted = send(req(Method::POST, LOOPBACK_CLIENT));
    assert_eq!(
        (posted.status(), &posted.headers()[ALLOW]),
        (StatusCode::METHOD_NOT_ALLOWED, &"GET, PUT".parse().unwrap())
    );
    for method in [Method::GET, Method::PUT] {
        assert_eq!(send(req(method, REMOTE_CLIENT)).status(), StatusCode::FORBIDDEN);
    }
    assert_eq!(log.current(), "error");
    assert_eq!(
        log_level(&req(Method::GET, LOOPBACK_CLIENT), None).status(),
        StatusCode::NOT_FOUND
    );
}

#[test]
fn variables_are_json_and_can_be_selected() {
    let env = [("A", "1"), ("B", "two")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
    let send = |query: Option<&str>| {
        env_json(
            &AdminRequest {
                query: query.map(str::to_owned),
                ..req(Method::GET, REMOTE_CLIENT)
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
        env_json(&req(Method::PUT, LOOPBACK_CLIENT), &env).status(),
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
                    ..req(Method::GET, REMOTE_CLIENT)
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
        send(ShutdownEndpoint::Disabled, Method::POST, LOOPBACK_CLIENT),
        StatusCode::NOT_FOUND
    );
    assert_eq!(
        send(ShutdownEndpoint::Enabled, Method::GET, LOOPBACK_CLIENT),
        StatusCode::METHOD_NOT_ALLOWED
    );
    assert_eq!(
        send(ShutdownEndpoint::Enabled, Method::POST, REMOTE_CLIENT),
        StatusCode::FORBIDDEN
    );
    assert_eq!(
        send(ShutdownEndpoint::Enabled, Method::POST, LOOPBACK_CLIENT),
        StatusCode::OK
    );
    shutdown.notified().await;
}
