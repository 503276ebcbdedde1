//! Transparency: HTTP of every version and opaque bytes pass unchanged.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::{SinkExt as _, StreamExt as _};
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_tungstenite::tungstenite::Message;
use tulle_proto::inbound::{ProxyProtocol, proxy_protocol};
use tulle_tests::apps;
use tulle_tests::client::{AnyBody, Http1, Http2, any, empty, full, http2_request, read_until, request};
use tulle_tests::fake_policy_service::{FakePolicyService, POLICY_ADDR};
use tulle_tests::mesh::{DETECTED_TCP, HTTP, Mesh, OPAQUE, UNMESHED_IP, identity, mesh};

use crate::invalid_policy::allow_all_server;
use crate::scripted_policies::client_hello;

async fn dial_web(mesh: &Mesh) -> TcpStream {
    mesh.dial("client", mesh.service_addr("web", HTTP)).await
}

#[test]
fn http1_requests_pass_on_a_kept_connection() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let mut client = Http1::handshake(dial_web(mesh).await).await;
        for _ in 0..10 {
            let answer = client.fetch(request("/")).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "web\n"));
            assert_eq!(answer.version, Version::HTTP_11);
            let proxy_headers: Vec<_> = answer
                .headers
                .keys()
                .filter(|name| name.as_str().starts_with("l5d-"))
                .collect();
            assert!(proxy_headers.is_empty(), "{proxy_headers:?}");
        }
    });
}

#[test]
fn http2_requests_pass_on_one_connection() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let mut client = Http2::handshake(dial_web(mesh).await).await;
        for _ in 0..10 {
            let answer = client.fetch(http2_request("/")).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "web\n"));
        }
    });
}

#[test]
fn http10_responses_end_with_their_connection() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        for head in ["GET / HTTP/1.0\r\n\r\n", "GET / HTTP/1.0\r\nhost: web.test\r\n\r\n"] {
            let mut client = dial_web(mesh).await;
            client.write_all(head.as_bytes()).await.unwrap();
            let mut rsp = String::new();
            client.read_to_string(&mut rsp).await.unwrap();
            assert!(rsp.starts_with("HTTP/1.0 200 OK\r\n"), "{rsp}");
            assert!(rsp.ends_with("\r\n\r\nweb\n"), "{rsp}");
            assert!(!rsp.to_lowercase().contains("transfer-encoding"), "{rsp}");
        }
    });
}

#[test]
fn connections_pass_to_and_from_workloads_without_a_proxy() {
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        apps::start_echo(mesh, "legacy").await;
        assert_eq!(
            mesh.get("client", mesh.service_addr("legacy", HTTP), "/").await.text(),
            "legacy\n"
        );
        let mut client = Http2::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        assert_eq!(client.fetch(http2_request("/")).await.unwrap().text(), "web\n");
        let mut client = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        assert_eq!(client.fetch(request("/")).await.unwrap().text(), "web\n");
    });
}

#[test]
fn unknown_addresses_are_reached_as_dialled() {
    mesh().workload("client").run(async |mesh: &Mesh| {
        let server = tokio::net::TcpListener::bind((UNMESHED_IP, HTTP)).await.unwrap();
        let addr = server.local_addr().unwrap();
        let _app = apps::serve_http(server, |_| std::future::ready(Response::new(full("outside"))));
        assert_eq!(mesh.get("client", addr, "/").await.text(), "outside");
    });
}

/// A gRPC message with `payload` as field 1.
fn message(payload: &[u8]) -> Bytes {
    let mut framed = BytesMut::from(&[0][..]);
    let length = u8::try_from(payload.len()).expect("short messages only");
    assert!(length < 128, "larger lengths take two bytes");
    framed.extend_from_slice(&(u32::from(length) + 2).to_be_bytes());
    framed.extend_from_slice(&[0x0a, length]);
    framed.extend_from_slice(payload);
    framed.freeze()
}

fn call(method: &str, body: AnyBody) -> Request<AnyBody> {
    Request::post(format!("http://web.test/tulle.bench.Echo/{method}"))
        .version(Version::HTTP_2)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)
        .expect("a method is part of a path")
}

#[test]
fn grpc_calls_end_with_their_trailers() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let mut client = Http2::handshake(dial_web(mesh).await).await;
        let answer = client.fetch(call("Unary", full(message(b"hello")))).await.unwrap();
        assert_eq!(answer.trailers["grpc-status"], "0");
        assert!(answer.body.windows(5).any(|part| part == b"hello"));
        let answer = client.fetch(call("Missing", full(message(b"hello")))).await.unwrap();
        let status = [&answer.headers, &answer.trailers]
            .into_iter()
            .find_map(|map| map.get("grpc-status"));
        assert_eq!(status.unwrap(), "12");
    });
}

#[test]
fn grpc_streams_alternate_in_both_directions() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let mut client = Http2::handshake(dial_web(mesh).await).await;
        let (frame_tx, frame_rx) = mpsc::channel::<Result<Frame<Bytes>, std::convert::Infallible>>(1);
        let rsp = client
            .send(call("Bidi", any(StreamBody::new(ReceiverStream::new(frame_rx)))))
            .await;
        let mut body = rsp.unwrap().into_body();
        for n in 0..20 {
            let word = format!("word {n}!");
            frame_tx.send(Ok(Frame::data(message(word.as_bytes())))).await.unwrap();
            let mut reply = BytesMut::new();
            while !reply.windows(word.len()).any(|part| part == word.as_bytes()) {
                reply.extend_from_slice(&body.frame().await.unwrap().unwrap().into_data().unwrap());
            }
        }
        drop(frame_tx);
        let trailers = body.collect().await.unwrap().trailers().cloned().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
    });
}

#[test]
fn chunked_requests_and_responses_keep_their_trailers() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, |req| async {
            let sent = req.into_body().collect().await.unwrap();
            let mut trailers = HeaderMap::new();
            trailers.insert(
                "x-sum",
                sent.trailers()
                    .map_or(HeaderValue::from_static("none"), |t| t["x-sum"].clone()),
            );
            let frames = [
                Ok::<_, std::convert::Infallible>(Frame::data(sent.to_bytes())),
                Ok(Frame::trailers(trailers)),
            ];
            let mut rsp = Response::new(any(StreamBody::new(tokio_stream::iter(frames))));
            rsp.headers_mut().insert("trailer", HeaderValue::from_static("x-sum"));
            rsp
        });
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", HeaderValue::from_static("42"));
        let frames = ["in ", "several ", "chunks"].map(|part| Frame::data(Bytes::from_static(part.as_bytes())));
        let frames = frames
            .into_iter()
            .chain([Frame::trailers(trailers)])
            .map(Ok::<_, std::convert::Infallible>);
        let frames: Vec<_> = frames.collect();
        let req = Request::post("/")
            .header("host", "web.test")
            .header("te", "trailers")
            .header("trailer", "x-sum")
            .body(any(StreamBody::new(tokio_stream::iter(frames))))
            .unwrap();
        let answer = Http1::handshake(dial_web(mesh).await).await.fetch(req).await.unwrap();
        assert_eq!(answer.text(), "in several chunks");
        assert_eq!(answer.trailers["x-sum"], "42");
    });
}

#[test]
fn responses_without_a_body_leave_the_connection_usable() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let mut client = Http1::handshake(dial_web(mesh).await).await;
        let mut send_request = async |method: Method, path: &str| {
            let req = Request::builder().method(method).uri(path).header("host", "web.test");
            client.fetch(req.body(empty()).unwrap()).await.unwrap()
        };
        for _ in 0..2 {
            let head = send_request(Method::HEAD, "/bytes/1000").await;
            assert_eq!(
                (head.status.as_u16(), head.header("content-length"), head.body.len()),
                (200, "1000", 0)
            );
            assert_eq!(send_request(Method::GET, "/status/204").await.status, 204);
            assert_eq!(send_request(Method::GET, "/status/304").await.status, 304);
            assert_eq!(send_request(Method::GET, "/bytes/0").await.status, 200);
            assert_eq!(send_request(Method::GET, "/").await.text(), "web\n");
        }
    });
}

#[test]
fn large_bodies_pass_both_ways_at_once() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let body = Bytes::from_iter((0..8 << 20).map(|n: u32| (n % 251) as u8));
        let mut http1 = Http1::handshake(dial_web(mesh).await).await;
        let req = Request::post("/echo")
            .header("host", "web.test")
            .body(full(body.clone()))
            .unwrap();
        assert!(http1.fetch(req).await.unwrap().body == body);
        let mut http2 = Http2::handshake(dial_web(mesh).await).await;
        let req = Request::post("http://web.test/echo")
            .version(Version::HTTP_2)
            .body(full(body.clone()))
            .unwrap();
        assert!(http2.fetch(req).await.unwrap().body == body);
    });
}

#[test]
fn clients_that_wait_for_100_continue_get_it() {
    for mesh in [mesh(), mesh().transparent()] {
        mesh.workload("client").workload("web").run(async |mesh: &Mesh| {
            // Reading the body sends `100 Continue`.
            let _app = apps::serve_http(mesh.listen("web", HTTP).await, |req| async move {
                let body = req.into_body().collect().await.unwrap();
                Response::new(full(body.to_bytes()))
            });
            let mut client = dial_web(mesh).await;
            let head = "POST / HTTP/1.1\r\nhost: web.test\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n";
            client.write_all(head.as_bytes()).await.unwrap();
            let interim = read_until(&mut client, "\r\n\r\n").await;
            assert!(interim.starts_with("HTTP/1.1 100"), "{interim}");
            client.write_all(b"hello").await.unwrap();
            let rsp = read_until(&mut client, "\r\n\r\n").await;
            assert!(rsp.starts_with("HTTP/1.1 200"), "{rsp}");
            read_until(&mut client, "hello").await;
        });
    }
}

#[test]
fn a_client_that_asks_to_close_is_closed_after_its_response() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let mut client = dial_web(mesh).await;
        let head = "GET / HTTP/1.1\r\nhost: web.test\r\nconnection: close\r\n\r\n";
        client.write_all(head.as_bytes()).await.unwrap();
        let mut rsp = String::new();
        client.read_to_string(&mut rsp).await.unwrap();
        assert!(rsp.starts_with("HTTP/1.1 200") && rsp.ends_with("web\n"), "{rsp}");
        assert!(rsp.to_lowercase().contains("connection: close"), "{rsp}");
    });
}

#[test]
fn requests_in_one_write_are_answered_in_order() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let mut client = dial_web(mesh).await;
        let requests = ["a", "b", "c"]
            .map(|word| format!("POST /echo HTTP/1.1\r\nhost: web.test\r\ncontent-length: 1\r\n\r\n{word}"));
        client.write_all(requests.concat().as_bytes()).await.unwrap();
        for word in ["a", "b", "c"] {
            let mut rsp = read_until(&mut client, "\r\n\r\n").await;
            if rsp.to_lowercase().contains("chunked") {
                rsp = read_until(&mut client, "0\r\n\r\n").await;
            } else {
                rsp = read_until(&mut client, word).await;
            }
            assert!(rsp.contains(word), "{rsp}");
        }
    });
}

#[test]
fn a_hundred_websocket_messages_pass() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let (mut socket, rsp) = tokio_tungstenite::client_async("ws://web.test/ws", dial_web(mesh).await)
            .await
            .unwrap();
        assert_eq!(rsp.status(), 101);
        for n in 0..100 {
            let message = Message::text(format!("message {n}"));
            socket.send(message.clone()).await.unwrap();
            assert_eq!(socket.next().await.unwrap().unwrap(), message);
        }
        socket.close(None).await.unwrap();
        while let Some(Ok(_)) = socket.next().await {}
    });
}

#[test]
fn bytes_pass_until_both_sides_have_ended() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        for port in [DETECTED_TCP, OPAQUE] {
            let mut client = mesh.dial("client", mesh.service_addr("web", port)).await;
            let sent: Vec<u8> = (0..1 << 20).map(|n: u32| (n % 241) as u8).collect();
            let (mut read, mut write) = client.split();
            let writing = async {
                write.write_all(&sent).await.unwrap();
                write.shutdown().await.unwrap();
            };
            let mut got = Vec::new();
            let (read, ()) = tokio::join!(read.read_to_end(&mut got), writing);
            read.unwrap();
            assert!(got == sent, "port {port}: {} of {} bytes", got.len(), sent.len());
        }
        mesh.wait_for_metric_at_least("web", "tcp_open_total", &[r#"tls="true""#, r#"peer="src""#], 2.)
            .await;
    });
}

#[test]
fn the_greeting_of_a_server_speaks_first_protocol_arrives_before_detection_ends() {
    mesh()
        .workload("client")
        .workload("web")
        .unmeshed("legacy")
        .run(async |mesh: &Mesh| {
            for workload in ["web", "legacy"] {
                apps::start_greeting_server(workload, (mesh.ip(workload), DETECTED_TCP).into()).await;
            }
            for dst in [
                mesh.service_addr("web", DETECTED_TCP),
                mesh.service_addr("legacy", DETECTED_TCP),
            ] {
                for _ in 0..2 {
                    let mut client = mesh.dial("client", dst).await;
                    let greeting = tokio::time::timeout(DETECTION_TIMEOUT / 4, read_until(&mut client, "\n")).await;
                    assert!(greeting.unwrap().starts_with("hello from "));
                    client.write_all(b"and back").await.unwrap();
                    read_until(&mut client, "and back").await;
                }
            }
            let mut unmeshed = mesh.dial_inbound(UNMESHED_IP, "web", DETECTED_TCP).await;
            tokio::time::timeout(DETECTION_TIMEOUT / 4, read_until(&mut unmeshed, "hello from web\n"))
                .await
                .unwrap();
        });
}

#[test]
fn a_connection_without_bytes_becomes_opaque_after_the_detection_timeout() {
    let mesh = mesh().workload("web").workload_env("INBOUND_DETECT_TIMEOUT", "1s");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = mesh.dial_inbound(UNMESHED_IP, "web", DETECTED_TCP).await;
        let silent = [r#"result="read_timeout""#];
        mesh.wait_for_metric("web", "inbound_tcp_detect_http_results_total", &silent, 1.)
            .await;
        // The application gets even a ClientHello for the proxy.
        let hello = client_hello(&identity("web"));
        client.write_all(&hello).await.unwrap();
        let mut echoed = vec![0; hello.len()];
        client.read_exact(&mut echoed).await.unwrap();
        assert_eq!(echoed, hello);
    });
}

#[test]
fn a_slow_http_client_is_not_counted_as_an_opaque_connection() {
    const OPAQUE_CONNECTIONS: &str = "inbound_tcp_authz_allow_total";
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
        // The application is dialled because it may speak first.
        let dialled = [r#"direction="inbound""#, r#"peer="dst""#];
        mesh.wait_for_metric("web", "tcp_open_total", &dialled, 1.).await;
        client.write_all(b"GET / HTTP/1.1\r\nhost: web\r\n\r\n").await.unwrap();
        read_until(&mut client, "HTTP/1.1 200 OK").await;
        mesh.wait_for_metric("web", "inbound_http_authz_allow_total", &[], 1.)
            .await;
        assert_eq!(mesh.metric("web", OPAQUE_CONNECTIONS, &[]).await, 0.);
        let mut client = mesh.dial_inbound(UNMESHED_IP, "web", DETECTED_TCP).await;
        client.write_all(b"a word\n").await.unwrap();
        read_until(&mut client, "a word\n").await;
        mesh.wait_for_metric("web", OPAQUE_CONNECTIONS, &[], 1.).await;
    });
}

#[test]
fn a_greeting_after_the_timeout_of_the_policy_arrives_before_the_detection_timeout() {
    const POLICY_TIMEOUT: Duration = Duration::from_millis(500);
    let mesh = mesh().workload("web").workload_env("POLICY_SVC_ADDR", POLICY_ADDR);
    mesh.run(async |mesh: &Mesh| {
        let policies = FakePolicyService::serve().await;
        let detect = proxy_protocol::Detect {
            timeout: Some(POLICY_TIMEOUT.try_into().unwrap()),
            ..Default::default()
        };
        let mut port_policy = allow_all_server();
        port_policy.protocol = Some(ProxyProtocol {
            kind: Some(proxy_protocol::Kind::Detect(detect)),
        });
        policies.set_port_policy(Ok(port_policy));
        let _app = apps::serve_tcp(mesh.listen("web", DETECTED_TCP).await, |mut stream| async move {
            // The server greets a client only after the client has been silent for a time.
            let spoken = tokio::time::timeout(4 * POLICY_TIMEOUT, stream.read_u8()).await;
            assert!(spoken.is_err(), "{spoken:?}");
            stream.write_all(b"a late greeting\n").await.unwrap();
            // The connection may also end with a reset.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        });
        let mut client = mesh.dial_inbound(UNMESHED_IP, "web", DETECTED_TCP).await;
        let greeting = tokio::time::timeout(DETECTION_TIMEOUT / 2, read_until(&mut client, "\n")).await;
        assert_eq!(greeting.unwrap(), "a late greeting\n");
    });
}

/// The default detection timeout of proxies.
const DETECTION_TIMEOUT: Duration = Duration::from_secs(10);
