//! Tap: authorized clients see requests in real time, and other clients are refused.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use ::http::uri::Authority;
use tokio::net::TcpSocket;
use tokio::time::timeout;
use tonic::{Code, Status, Streaming};
use tulle_control::tls::client::{Channel, connect_over};
use tulle_proto::tap::observe_request::{Extract, Match, extract, r#match as kinds};
use tulle_proto::tap::tap_client::TapClient;
use tulle_proto::tap::tap_event::{Event, ProxyDirection, http};
use tulle_proto::tap::{ObserveRequest, TapEvent, eos};
use tulle_tests::apps;
use tulle_tests::client::{AnyBody, Http1, Http2, empty, full, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, UNMESHED_IP, identity, mesh};

/// A tap client for a workload, from a source address.
async fn tap(mesh: &Mesh, workload: &str, from: Ipv4Addr) -> TapClient<Channel> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    let stream = socket.connect((mesh.ip(workload), 4190).into()).await.unwrap();
    TapClient::new(connect_over(stream, &Authority::from_static("tap")).await.unwrap())
}

async fn observe(
    mesh: &Mesh,
    workload: &str,
    change: impl FnOnce(&mut ObserveRequest),
) -> Result<Streaming<TapEvent>, Status> {
    let mut request = ObserveRequest {
        limit: 100,
        r#match: Some(match_all()),
        extract: None,
        sample_one_in: 0,
    };
    change(&mut request);
    let mut client = tap(mesh, workload, Ipv4Addr::LOCALHOST).await;
    client.observe(request).await.map(tonic::Response::into_inner)
}

fn tap_match(kind: kinds::Match) -> Match {
    Match { r#match: Some(kind) }
}

fn with_headers(request: &mut ObserveRequest) {
    request.extract = Some(Extract {
        extract: Some(extract::Extract::Http(extract::Http {
            extract: Some(extract::http::Extract::Headers(Default::default())),
        })),
    });
}

/// A match on all requests.
fn match_all() -> Match {
    tap_match(kinds::Match::All(kinds::Seq { matches: Vec::new() }))
}

/// A match on requests whose path begins with `prefix`.
fn match_path_prefix(prefix: &str) -> Match {
    let text = kinds::http::StringMatch {
        r#match: Some(kinds::http::string_match::Match::Prefix(prefix.into())),
    };
    tap_match(kinds::Match::Http(kinds::Http {
        r#match: Some(kinds::http::Match::Path(text)),
    }))
}

async fn next(events: &mut Streaming<TapEvent>) -> (TapEvent, http::Event) {
    let event = timeout(Duration::from_secs(5), events.message())
        .await
        .expect("an event arrives within five seconds");
    let event = event.unwrap().expect("the tap has not ended");
    let Some(Event::Http(http)) = event.event.clone() else {
        panic!("{event:?}")
    };
    (event, http.event.unwrap())
}

async fn next_request_events(
    events: &mut Streaming<TapEvent>,
) -> (TapEvent, http::RequestInit, http::ResponseInit, http::ResponseEnd) {
    let (event, http::Event::RequestInit(init)) = next(events).await else {
        panic!()
    };
    let (_, http::Event::ResponseInit(answer)) = next(events).await else {
        panic!()
    };
    let (_, http::Event::ResponseEnd(end)) = next(events).await else {
        panic!()
    };
    assert_eq!((answer.id, end.id), (init.id, init.id));
    (event, init, answer, end)
}

fn run_with_client(test: impl AsyncFnOnce(&Mesh, Http1) + Send) {
    let mesh = mesh().env("TAP_SVC_NAME", &identity("watcher"));
    mesh.workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        test(mesh, client).await;
    });
}

#[test]
fn a_request_cancelled_before_its_response_is_shown_and_counted() {
    let mesh = mesh().env("TAP_SVC_NAME", &identity("watcher"));
    mesh.workload("client").workload("web").run(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, |_| std::future::pending());
        let mut outbound = observe(mesh, "client", |_| ()).await.unwrap();
        let mut inbound = observe(mesh, "web", |_| ()).await.unwrap();
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let request_task = tokio::spawn(async move { client.fetch(request("/")).await });
        let client_reset = Some(eos::End::ResetErrorCode(h2::Reason::CANCEL.into()));
        for events in [&mut inbound, &mut outbound] {
            let (_, event) = next(events).await;
            assert!(matches!(event, http::Event::RequestInit(_)), "{event:?}");
        }
        request_task.abort();
        for events in [&mut inbound, &mut outbound] {
            let (_, http::Event::ResponseEnd(end)) = next(events).await else {
                panic!()
            };
            assert_eq!(end.eos.unwrap().end, client_reset);
        }
        for (workload, name, label) in [
            ("client", "response_total", "error=\"client-left\""),
            ("web", "response_total", "error=\"client-left\""),
            (
                "client",
                "outbound_http_route_request_statuses_total",
                "error=\"CANCEL\"",
            ),
            (
                "client",
                "outbound_http_route_backend_response_statuses_total",
                "error=\"CANCEL\"",
            ),
        ] {
            mesh.wait_for_metric(workload, name, &[label], 1.0).await;
        }
    });
}

#[test]
fn both_sides_show_a_request_and_how_it_ended() {
    run_with_client(async |mesh: &Mesh, mut client: Http1| {
        let mut outbound = observe(mesh, "client", with_headers).await.unwrap();
        let mut inbound = observe(mesh, "web", |_| ()).await.unwrap();
        let answer = client.fetch(request("/")).await.unwrap();
        assert_eq!(answer.text(), "web\n");

        let (event, init, rsp, end) = next_request_events(&mut outbound).await;
        assert_eq!(event.proxy_direction(), ProxyDirection::Outbound);
        let destination = SocketAddr::try_from(event.destination.unwrap()).unwrap();
        assert_eq!(destination, (mesh.ip("web"), HTTP).into());
        let labels = event.destination_meta.unwrap().labels;
        let expected = [("tls", "true"), ("server_id", &identity("web")), ("pod", "web")];
        for (name, value) in expected {
            assert_eq!(labels[name], value, "{labels:?}");
        }
        assert_eq!((init.authority.as_str(), init.path.as_str()), ("web.test", "/"));
        assert_eq!((rsp.http_status, end.response_bytes), (200, 4));
        let by_name = |headers: Option<tulle_proto::http_types::Headers>| {
            let all = headers.unwrap().headers.into_iter();
            all.map(|header| (header.name, header.value))
                .collect::<BTreeMap<_, _>>()
        };
        assert_eq!(by_name(rsp.headers)["x-replica"], b"web");

        let (event, init, rsp, end) = next_request_events(&mut inbound).await;
        assert_eq!(event.proxy_direction(), ProxyDirection::Inbound);
        assert_eq!(event.source_meta.unwrap().labels["client_id"], identity("client"));
        assert_eq!((rsp.http_status, end.response_bytes), (200, 4));
        assert_eq!((init.headers, end.trailers), (None, None));
    });
}

/// A match on the labels of routes.
fn by_route(key: &str, value: &str) -> impl FnOnce(&mut ObserveRequest) {
    let (key, value) = (key.into(), value.into());
    move |request| request.r#match = Some(tap_match(kinds::Match::RouteLabel(kinds::Label { key, value })))
}

/// The values of these labels.
fn select_labels<'a>(labels: &'a BTreeMap<String, String>, names: &[&str]) -> Vec<&'a str> {
    names.iter().map(|name| labels[*name].as_str()).collect()
}

#[test]
fn a_tap_selects_requests_by_the_routes_of_policies() {
    let route = |name: &str, parent: &str, path: &str| {
        format!(
            "\
---
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {{name: {name}, namespace: shop}}
spec:
  parentRefs: [{parent}]
  rules: [{{matches: [{{path: {{type: PathPrefix, value: {path}}}}}]}}]
"
        )
    };
    let service = format!("{{group: core, kind: Service, name: web, port: {HTTP}}}");
    let server = "{group: policy.linkerd.io, kind: Server, name: web-http}";
    let manifests = [
        "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: web-http, namespace: shop}
spec: {podSelector: {matchLabels: {app: web}}, port: 8080, accessPolicy: all-unauthenticated}
"
        .to_owned(),
        route("all", &service, "/"),
        route("headers", &service, "/headers"),
        route("in", server, "/"),
        route("in-headers", server, "/headers"),
    ];
    let mesh = mesh().env("TAP_SVC_NAME", &identity("watcher"));
    let mesh = mesh.manifest("routes", &manifests.concat());
    mesh.workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        eventually("both sides know their routes", async || {
            assert_eq!(client.fetch(request("/")).await.unwrap().status, 200);
            let counted = async |workload, name, route: &str| mesh.metric(workload, name, &[route]).await > 0.0;
            let outbound = "outbound_http_route_backend_requests_total";
            (counted("client", outbound, "route_name=\"all\"").await
                && counted("web", "inbound_http_requests_total", "route_name=\"in\"").await)
                .then_some(())
        })
        .await;
        let mut outbound = observe(mesh, "client", by_route("route_name", "headers"))
            .await
            .unwrap();
        let mut inbound = observe(mesh, "web", by_route("route_name", "in-headers"))
            .await
            .unwrap();
        for path in ["/", "/headers"] {
            assert_eq!(client.fetch(request(path)).await.unwrap().status, 200);
        }
        let (event, init, ..) = next_request_events(&mut outbound).await;
        assert_eq!(init.path, "/headers");
        let route = event.route_meta.unwrap().labels;
        let names = ["route_group", "route_kind", "route_namespace", "route_name"];
        assert_eq!(
            select_labels(&route, &names),
            ["policy.linkerd.io", "HTTPRoute", "shop", "headers"]
        );

        let (event, init, ..) = next_request_events(&mut inbound).await;
        assert_eq!(init.path, "/headers");
        let names = ["route_group", "route_kind", "route_name"];
        let expected = ["policy.linkerd.io", "HTTPRoute", "in-headers"];
        assert_eq!(select_labels(&event.route_meta.unwrap().labels, &names), expected);
        let destination = event.destination_meta.unwrap().labels;
        assert_eq!(select_labels(&destination, &names), expected);
        let names = ["tls", "srv_kind", "srv_name", "authz_name"];
        assert_eq!(
            select_labels(&destination, &names),
            ["loopback", "server", "web-http", "all-unauthenticated"]
        );
    });
}

#[test]
fn a_tap_selects_requests_by_the_routes_of_profiles_on_both_sides() {
    let profile = "\
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata: {name: web.shop.svc.cluster.local, namespace: shop}
spec:
  routes:
  - {name: shown, condition: {pathRegex: /headers}}
";
    let mesh = mesh()
        .env("TAP_SVC_NAME", &identity("watcher"))
        // The control plane may answer late on a machine with other load.
        .env("DESTINATION_PROFILE_INITIAL_TIMEOUT", "20s");
    let mesh = mesh.manifest("profile", profile);
    mesh.workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let mut sides = Vec::new();
        for workload in ["client", "web"] {
            sides.push(observe(mesh, workload, by_route("route", "shown")).await.unwrap());
        }
        for path in ["/", "/headers"] {
            assert_eq!(client.fetch(request(path)).await.unwrap().status, 200);
        }
        for events in &mut sides {
            let (event, init, ..) = next_request_events(events).await;
            assert_eq!(init.path, "/headers");
            assert_eq!(event.route_meta.unwrap().labels["route"], "shown");
        }
    });
}

#[test]
fn grpc_events_have_their_status_and_queries_are_never_shown() {
    run_with_client(async |mesh: &Mesh, _: Http1| {
        let mut inbound = observe(mesh, "web", with_headers).await.unwrap();
        let call = ::http::Request::post("http://web.test/tulle.bench.Echo/Unary?access_token=secret")
            .version(::http::Version::HTTP_2)
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        let mut client = Http2::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        client
            .fetch(call.body(full(&b"\0\0\0\0\0"[..])).unwrap())
            .await
            .unwrap();
        let (_, init, _, end) = next_request_events(&mut inbound).await;
        assert_eq!(end.eos.unwrap().end, Some(eos::End::GrpcStatusCode(0)));
        let headers = init.headers.as_ref().unwrap();
        let path = headers.headers.iter().find(|header| header.name == ":path");
        assert_eq!(path.unwrap().value, b"/tulle.bench.Echo/Unary");
        assert!(!format!("{init:?}").contains("secret"), "{init:?}");
    });
}

#[test]
fn only_matching_requests_are_shown_up_to_the_limit() {
    run_with_client(async |mesh: &Mesh, mut client: Http1| {
        let set_match = |request: &mut ObserveRequest| {
            request.limit = 2;
            request.r#match = Some(tap_match(kinds::Match::Not(Box::new(match_path_prefix("/delay")))));
        };
        let mut events = observe(mesh, "web", set_match).await.unwrap();
        for path in ["/delay/1", "/", "/delay/1", "/ready", "/"] {
            client.fetch(request(path)).await.unwrap();
        }
        for path in ["/", "/ready"] {
            assert_eq!(next_request_events(&mut events).await.1.path, path);
        }
        assert!(events.message().await.unwrap().is_none(), "there is no third");
    });
}

#[test]
fn sampling_shows_a_part_of_the_requests() {
    run_with_client(async |mesh: &Mesh, mut client: Http1| {
        let set_sampling = |request: &mut ObserveRequest| (request.limit, request.sample_one_in) = (50, 4);
        let mut events = observe(mesh, "web", set_sampling).await.unwrap();
        let counting = tokio::spawn(async move { while events.message().await.unwrap().is_some() {} });
        let mut n_requests = 0;
        while !counting.is_finished() {
            client.fetch(request("/")).await.unwrap();
            n_requests += 1;
        }
        // The bounds are five standard deviations from the mean of 200. The upper bound also permits requests that are sent
        // before the end of the tap is noticed.
        assert!((75..=400).contains(&n_requests), "{n_requests}");
    });
}

#[test]
fn unauthorized_and_invalid_taps_are_refused() {
    run_with_client(async |mesh: &Mesh, mut client: Http1| {
        let request = ObserveRequest {
            limit: 1,
            r#match: Some(match_all()),
            ..ObserveRequest::default()
        };
        let refused = tap(mesh, "web", UNMESHED_IP).await.observe(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        for change in [
            |request: &mut ObserveRequest| request.limit = 0,
            |request: &mut ObserveRequest| request.r#match = None,
            |request: &mut ObserveRequest| request.r#match = Some(Match::default()),
        ] {
            let refused = observe(mesh, "web", change).await.unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument);
        }
        let ok: ::http::Request<AnyBody> = ::http::Request::get("/")
            .header("host", "web.test")
            .body(empty())
            .unwrap();
        assert_eq!(client.fetch(ok).await.unwrap().status, 200);
    });
}

#[test]
fn idle_unauthenticated_tap_clients_are_evicted() {
    let mesh = mesh().env("TAP_SVC_NAME", &identity("watcher"));
    mesh.workload("web").run(async |mesh: &Mesh| {
        // Uses all connection slots for clients that speak HTTP/2 and answer pings, but send no requests.
        let mut unmeshed_clients = Vec::new();
        for _ in 0..64 {
            unmeshed_clients.push(tap(mesh, "web", UNMESHED_IP).await);
        }
        eventually("a connection slot is free again", async || {
            observe(mesh, "web", |_| ()).await.ok()
        })
        .await;
    });
}
