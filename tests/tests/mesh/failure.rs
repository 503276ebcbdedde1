//! Failures: prompt error responses with the right cause, and resends where they are possible.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use http::{Request, Response, Version};
use socket2::SockRef;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{Instant, timeout};
use tulle_tests::apps;
use tulle_tests::client::{AnyBody, Http1, Http2, full, http2_request, request};
use tulle_tests::eventually::eventually;
use tulle_tests::load::load;
use tulle_tests::mesh::{DETECTED_TCP, HTTP, Mesh, UNMESHED_IP, mesh};

#[test]
fn a_service_without_endpoints_is_refused_at_once() {
    let empty = "\
apiVersion: v1
kind: Service
metadata: {name: empty, namespace: shop}
spec:
  clusterIP: 10.66.2.1
  selector: {app: none}
  ports: [{port: 8080}]
";
    mesh()
        .workload("client")
        .manifest("empty", empty)
        .run(async |mesh: &Mesh| {
            let asked_at = Instant::now();
            let answer = mesh.get("client", ([10, 66, 2, 1], HTTP).into(), "/").await;
            assert_eq!((answer.status.as_u16(), answer.cause()), (503, "no-endpoints"));
            assert!(!answer.header("l5d-proxy-error").is_empty());
            assert!(asked_at.elapsed() < Duration::from_secs(1), "{:?}", asked_at.elapsed());
        });
}

#[test]
fn an_endpoint_that_accepts_no_connections_delays_no_request() {
    let half_silent = format!(
        "\
apiVersion: v1
kind: Service
metadata: {{name: half, namespace: shop}}
spec: {{clusterIP: 10.66.2.2, ports: [{{port: 8080}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: half, namespace: shop, labels: {{kubernetes.io/service-name: half}}}}
addressType: IPv4
ports: [{{port: 8080}}]
endpoints: [{{addresses: [{UNMESHED_IP}]}}, {{addresses: ['@legacy']}}]
"
    );
    mesh()
        .env("TULLE_PROXY_BALANCER", "round-robin")
        // The timeout is longer than the test waits.
        .env("OUTBOUND_CONNECT_TIMEOUT", "60s")
        .workload("client")
        .unmeshed("legacy")
        .run(async |mesh: &Mesh| {
            let _silent = full_listener((UNMESHED_IP, HTTP).into()).await;
            apps::start_echo(mesh, "legacy").await;
            mesh.write("half", &half_silent.replace("@legacy", &mesh.ip("legacy").to_string()));
            let half = ([10, 66, 2, 2], HTTP).into();
            // The first of these requests dial the service before discovery has finished.
            eventually("the service is known", async || {
                (mesh.get("client", half, "/").await.status == 200).then_some(())
            })
            .await;
            let mut http1 = Http1::handshake(mesh.dial("client", half).await).await;
            let mut http2 = Http2::handshake(mesh.dial("client", half).await).await;
            let all = async {
                for _ in 0..20 {
                    assert_eq!(http1.fetch(request("/")).await.unwrap().text(), "legacy\n");
                    assert_eq!(http2.fetch(http2_request("/")).await.unwrap().text(), "legacy\n");
                }
            };
            timeout(Duration::from_secs(20), all)
                .await
                .expect("no request waits for a dial");
        });
}

#[test]
fn requests_that_wait_for_an_endpoint_get_the_connect_error_too() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        // Discovery now reports an identity that the certificate does not have.
        let pod = mesh.manifest("pod-web");
        let other = pod.replace("serviceAccountName: web", "serviceAccountName: other");
        assert_ne!(pod, other);
        mesh.write("pod-web", &other);
        eventually("no endpoint can be reached", async || {
            let answer = mesh.get("client", mesh.service_addr("web", HTTP), "/").await;
            (answer.status != 200).then_some(())
        })
        .await;
        let requests = (0..8).map(|_| mesh.get("client", mesh.service_addr("web", HTTP), "/"));
        let answers = join_all(requests).await;
        let reported: Vec<_> = answers.iter().map(|answer| answer.header("l5d-proxy-cause")).collect();
        let (waited, dialled): (Vec<&str>, Vec<&str>) = reported
            .iter()
            .partition(|reported| reported.starts_with("endpoints-unready;"));
        assert!(!waited.is_empty(), "{reported:?}");
        assert!(
            waited.iter().all(|reported| reported.contains("; after=tls-")),
            "{reported:?}"
        );
        assert!(
            dialled.iter().all(|reported| reported.starts_with("tls-")),
            "{reported:?}"
        );
    });
}

#[test]
fn a_queue_limit_of_the_policy_below_that_of_the_proxy_is_raised() {
    mesh().workload("client").unmeshed("legacy").run(async |mesh: &Mesh| {
        let service = mesh.service_addr("legacy", HTTP);
        eventually("the connection is refused", async || {
            (mesh.get("client", service, "/").await.cause() == "connect-refused").then_some(())
        })
        .await;
        let client = Http2::handshake(mesh.dial("client", service).await).await;
        // The limit of the policy is 100. The default of `OUTBOUND_HTTP_QUEUE_CAPACITY`, 10,000, is a lower bound.
        let requests = (0..200).map(|_| {
            let mut client = client.clone();
            async move { client.fetch(http2_request("/")).await.unwrap() }
        });
        let answers = join_all(requests).await;
        let waited = answers.iter().filter(|answer| answer.cause() == "endpoints-unready");
        assert!(waited.count() > 100);
        assert!(answers.iter().all(|answer| answer.cause() != "queue-full"));
    });
}

#[test]
fn an_endpoint_that_cannot_be_connected_to_in_time_is_a_gateway_timeout() {
    mesh()
        .env("OUTBOUND_CONNECT_TIMEOUT", "200ms")
        .workload("client")
        .run(async |mesh: &Mesh| {
            let addr = (UNMESHED_IP, HTTP).into();
            let _silent = full_listener(addr).await;
            let answer = mesh.get("client", addr, "/").await;
            assert_eq!((answer.status.as_u16(), answer.cause()), (504, "connect-timeout"));
        });
}

/// A listener with a full accept queue, so that no connection can be established.
async fn full_listener(addr: SocketAddr) -> (TcpListener, TcpStream) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(addr).unwrap();
    let listener = socket.listen(0).unwrap();
    let queued = TcpStream::connect(addr).await.unwrap();
    let next = timeout(Duration::from_millis(100), TcpStream::connect(addr)).await;
    assert!(next.is_err(), "a queue of 0 holds one connection");
    (listener, queued)
}

#[test]
fn an_application_that_refuses_connections_is_a_bad_gateway_with_its_cause() {
    mesh()
        .workload("client")
        .workload("web")
        .unmeshed("legacy")
        .run(async |mesh: &Mesh| {
            for app in ["legacy", "web"] {
                let answer = mesh.get("client", mesh.service_addr(app, HTTP), "/").await;
                assert_eq!(
                    (answer.status.as_u16(), answer.cause()),
                    (502, "connect-refused"),
                    "{app}"
                );
            }
        });
}

#[test]
fn byte_streams_without_a_listener_are_closed() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        let mut client = mesh.dial("client", mesh.service_addr("web", DETECTED_TCP)).await;
        client.write_all(b"not HTTP, and long enough to know\n").await.unwrap();
        assert!(matches!(client.read(&mut [0]).await, Ok(0) | Err(_)));
    });
}

#[test]
fn requests_that_reached_no_application_go_to_another_endpoint() {
    mesh().workload("client").replicas("web", 2).run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web-1").await;
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        for _ in 0..30 {
            let answer = client.fetch(request("/")).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "web-1\n"));
            let req = Request::post("/echo")
                .header("host", "web.test")
                .body(full("a body"))
                .unwrap();
            assert_eq!(client.fetch(req).await.unwrap().text(), "a body");
        }
        mesh.wait_for_metric_at_least("client", "tulle_outbound_resent_total", &[], 1.)
            .await;
    });
}

#[test]
fn a_request_that_is_still_being_sent_goes_to_another_endpoint_too() {
    let mesh = mesh().env("TULLE_PROXY_BALANCER", "round-robin");
    mesh.workload("client").replicas("web", 2).run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web-1").await;
        let mut clients = Vec::new();
        for _ in 0..2 {
            let mut client = mesh.dial("client", mesh.service_addr("web", HTTP)).await;
            let begun = b"POST /echo HTTP/1.1\r\nhost: web.test\r\ncontent-length: 6\r\nconnection: close\r\n\r\na b";
            client.write_all(begun).await.unwrap();
            clients.push(client);
        }
        eventually("one of them is refused", async || {
            (mesh.metric("client", "tulle_outbound_resent_total", &[]).await >= 1.).then_some(())
        })
        .await;
        for mut client in clients {
            client.write_all(b"ody").await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert!(
                answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("a body"),
                "{answer}"
            );
        }
    });
}

#[test]
fn grpc_calls_that_reached_no_application_go_to_another_endpoint() {
    mesh().workload("client").replicas("web", 2).run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web-1").await;
        let mut client = Http2::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        for _ in 0..30 {
            let call = Request::post("http://web.test/tulle.bench.Echo/Unary")
                .version(Version::HTTP_2)
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .body(full(&b"\0\0\0\0\0"[..]))
                .unwrap();
            let answer = client.fetch(call).await.unwrap();
            let reported = answer.headers.get("l5d-proxy-cause");
            assert_eq!(
                answer.trailers.get("grpc-status").map(|code| code.as_bytes()),
                Some(&b"0"[..]),
                "{reported:?}"
            );
        }
        mesh.wait_for_metric_at_least("client", "tulle_outbound_resent_total", &[], 1.)
            .await;
    });
}

#[test]
fn an_application_that_dies_under_load_causes_no_failed_request() {
    mesh().workload("client").replicas("web", 3).run(async |mesh: &Mesh| {
        let mut apps = Vec::new();
        for i in 0..3 {
            let listener = mesh.listen(&format!("web-{i}"), HTTP).await;
            apps.push(apps::serve_http(listener, |_| async { Response::new(full("ok")) }));
        }
        let during = async {
            wait_for_requests(mesh, "web-0", 100.).await;
            apps.remove(0).kill().await;
            let before = mesh.metric("web-1", "request_total", &[]).await;
            wait_for_requests(mesh, "web-1", before + 300.).await;
        };
        load(mesh, "client", mesh.service_addr("web", HTTP), 8, during)
            .await
            .assert_all_ok();
    });
}

async fn wait_for_requests(mesh: &Mesh, workload: &str, n: f64) {
    eventually("requests arrive", async || {
        (mesh.metric(workload, "request_total", &[]).await >= n).then_some(())
    })
    .await;
}

#[test]
fn an_application_that_closes_idle_connections_causes_no_failed_request() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        // Answers one request per connection and closes without `connection: close`. The next request may already be on its way.
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, |stream| async move {
            let mut stream = BufReader::new(stream);
            read_head(&mut stream).await;
            // The proxy may have closed the connection already.
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                .await;
        });
        let during = wait_for_requests(mesh, "web", 500.);
        load(mesh, "client", mesh.service_addr("web", HTTP), 4, during)
            .await
            .assert_all_ok();
    });
}

#[test]
fn requests_left_unread_by_an_ending_application_are_resent_if_idempotent() {
    mesh().workload("client").replicas("web", 2).run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web-1").await;
        let listener = mesh.listen("web-0", HTTP).await;
        let ending = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            read_head(&mut stream).await;
            let mut stream = stream.into_inner();
            stream.write_all(ANSWER).await.unwrap();
            // The next request has arrived, and the application does not read it.
            stream.peek(&mut [0]).await.unwrap();
            drop(listener);
        });
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        while !ending.is_finished() {
            assert_eq!(client.fetch(request("/")).await.unwrap().status.as_u16(), 200);
        }
        ending.await.unwrap();
    });
}

#[test]
fn a_request_that_an_ending_application_may_have_read_is_not_resent() {
    mesh().workload("client").replicas("web", 2).run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web-1").await;
        let listener = mesh.listen("web-0", HTTP).await;
        let ending = tokio::spawn(async move {
            let stream = loop {
                let (stream, _) = listener.accept().await.unwrap();
                let stream = answer_once(stream).await;
                // The proxy closes a connection that is idle because the other replica gets all requests.
                if stream.peek(&mut [0]).await.unwrap() > 0 {
                    break read_post(stream).await;
                }
            };
            drop(listener);
            SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        });
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let answer = loop {
            let answer = client.fetch(post()).await.unwrap();
            if answer.status != 200 || ending.is_finished() {
                break answer;
            }
        };
        let reported = (answer.status.as_u16(), answer.cause());
        assert_eq!(reported, (502, "connection-closed"));
        ending.await.unwrap();
    });
}

#[test]
fn a_request_that_its_application_aborts_is_not_sent_again() {
    mesh().workload("client").replicas("web", 2).run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web-1").await;
        let aborting = apps::serve_tcp(mesh.listen("web-0", HTTP).await, |stream| async move {
            let mut stream = answer_once(stream).await;
            stream.read_exact(&mut [0; 32]).await.unwrap();
        });
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let answer = loop {
            let answer = client.fetch(post()).await.unwrap();
            if answer.status != 200 {
                break answer;
            }
        };
        let reported = (answer.status.as_u16(), answer.cause());
        assert_eq!(reported, (502, "connection-closed"));
        drop(aborting);
    });
}

fn post() -> Request<AnyBody> {
    let req = Request::post("/echo").header("host", "web.test");
    req.body(full("a body")).unwrap()
}

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\na body";

/// Reads one request with the body of [`post`], and answers it.
async fn answer_once(stream: TcpStream) -> TcpStream {
    let mut stream = read_post(stream).await;
    stream.write_all(ANSWER).await.unwrap();
    stream
}

/// Reads one request with the body of [`post`].
async fn read_post(stream: TcpStream) -> TcpStream {
    let mut stream = BufReader::new(stream);
    read_head(&mut stream).await;
    stream.read_exact(&mut [0; 6]).await.unwrap();
    stream.into_inner()
}

async fn read_head(stream: &mut BufReader<TcpStream>) {
    let mut line = String::new();
    while stream.read_line(&mut line).await.is_ok_and(|n| n > 2) {
        line.clear();
    }
}

#[test]
fn the_proxy_waits_for_a_slow_application() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let answer = mesh.get("client", mesh.service_addr("web", HTTP), "/delay/1500").await;
        assert_eq!(
            (answer.status.as_u16(), answer.text().as_str()),
            (200, "web after 1500 ms\n")
        );
    });
}

#[test]
fn a_request_with_a_long_body_is_not_resent_and_gets_the_502_of_the_servers_proxy() {
    mesh().workload("client").replicas("web", 2).run(async |mesh: &Mesh| {
        let req = Request::post("/echo")
            .header("host", "web.test")
            .body(full(vec![0; 1 << 20]))
            .unwrap();
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let answer = client.fetch(req).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.cause()), (502, "connect-refused"));
    });
}
