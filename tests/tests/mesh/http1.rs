//! HTTP/1 conformance: the table of raw bytes, and further behaviour of clients and applications.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{Barrier, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tulle_bench::conformance::{App, Outcome};
use tulle_tests::apps;
use tulle_tests::client::{AnyBody, Http1, any, full, read_until, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, UNMESHED_IP, mesh};

/// Fails with every row that has a wrong result.
fn check(via: &str, outcomes: &[Outcome]) {
    let wrong: Vec<_> = outcomes
        .iter()
        .filter(|outcome| outcome.deviation_details.is_some())
        .collect();
    let text: Vec<_> = wrong.iter().map(ToString::to_string).collect();
    assert!(
        wrong.is_empty(),
        "{via}, {} of {}:\n{}",
        wrong.len(),
        outcomes.len(),
        text.join("\n")
    );
}

#[test]
fn both_sidecars_conform_to_rfc_9112() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        let app = App::start(mesh.listen("web", HTTP).await);
        let dial = async || mesh.dial("client", mesh.service_addr("web", HTTP)).await;
        check("through both", &app.run_all(dial).await);
    });
}

#[test]
fn the_servers_sidecar_conforms_to_the_table() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        let app = App::start(mesh.listen("web", HTTP).await);
        let dial = async || mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
        check("from outside the mesh", &app.run_all(dial).await);
    });
}

#[test]
fn the_clients_sidecar_conforms_to_the_table() {
    mesh().workload("client").unmeshed("legacy").run(async |mesh: &Mesh| {
        let app = App::start(mesh.listen("legacy", HTTP).await);
        let dial = async || mesh.dial("client", mesh.service_addr("legacy", HTTP)).await;
        check("to a server without a proxy", &app.run_all(dial).await);
    });
}

async fn dial(mesh: &Mesh) -> TcpStream {
    mesh.dial("client", mesh.service_addr("web", HTTP)).await
}

/// Reads until the connection ends.
async fn read_rest(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await.unwrap();
    String::from_utf8(text).unwrap()
}

const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

#[test]
fn long_heads_pass_and_longer_ones_are_refused() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, |mut stream| async move {
            read_until(&mut stream, "\r\n\r\n").await;
            stream.write_all(OK).await.unwrap();
        });
        for (size, status) in [(60_000, "200"), (70_000, "431")] {
            for line in [
                "a: ".to_owned() + &"b".repeat(size),
                "abcd: efghijkl\r\n".repeat(size / 16),
            ] {
                let mut client = dial(mesh).await;
                let head = format!(
                    "GET / HTTP/1.1\r\nhost: web.test\r\nconnection: close\r\n{}\r\n\r\n",
                    line.trim_end()
                );
                client.write_all(head.as_bytes()).await.unwrap();
                let rsp = read_rest(&mut client).await;
                assert!(rsp.starts_with(&format!("HTTP/1.1 {status} ")), "{size}: {rsp}");
                assert_eq!(
                    rsp.contains("l5d-proxy-cause: head-too-long;"),
                    status == "431",
                    "{rsp}"
                );
            }
        }
    });
}

#[test]
fn each_direction_has_its_own_head_size_limit() {
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.env("TULLE_PROXY_OUTBOUND_HTTP_MAX_HEAD_SIZE", "1000");
    let mesh = mesh.env("TULLE_PROXY_INBOUND_HTTP_MAX_HEAD_SIZE", "3000");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        for (is_inbound, limit) in [(false, 1000), (true, 3000)] {
            for (excess, status) in [(0, "200"), (1, "431")] {
                let mut client = match is_inbound {
                    true => mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
                    false => dial(mesh).await,
                };
                let start = "GET / HTTP/1.1\r\nhost: web.test\r\nconnection: close\r\na: ";
                let fill = "b".repeat(limit + excess - start.len() - 4);
                client
                    .write_all(format!("{start}{fill}\r\n\r\n").as_bytes())
                    .await
                    .unwrap();
                let rsp = read_rest(&mut client).await;
                assert!(
                    rsp.starts_with(&format!("HTTP/1.1 {status} ")),
                    "{limit} + {excess}: {rsp}"
                );
            }
        }
    });
}

#[test]
fn a_missing_head_times_out() {
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.env("TULLE_PROXY_OUTBOUND_HTTP_HEAD_TIMEOUT", "200ms");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = dial(mesh).await;
        for part in ["GET / HTTP/1.1\r\nhost: web.test\r\n\r\n", "GET / HTTP/1.1\r\nhost: w"] {
            client.write_all(part.as_bytes()).await.unwrap();
        }
        read_until(&mut client, "web\n").await;
        let rsp = read_rest(&mut client).await;
        assert!(rsp.starts_with("HTTP/1.1 408 "), "{rsp}");
        assert!(rsp.contains("l5d-proxy-cause: head-timeout;"), "{rsp}");
    });
}

#[test]
fn an_incomplete_request_line_times_out_as_http() {
    let mut mesh = mesh().workload("client").workload("web");
    for direction in ["INBOUND", "OUTBOUND"] {
        mesh = mesh.env(&format!("TULLE_PROXY_{direction}_HTTP_HEAD_TIMEOUT"), "200ms");
        mesh = mesh.env(&format!("{direction}_DETECT_TIMEOUT"), "200ms");
    }
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        for via in ["through the client's sidecar", "from outside the mesh"] {
            let mut client = match via {
                "from outside the mesh" => mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
                _ => dial(mesh).await,
            };
            client.write_all(b"GET /").await.unwrap();
            let rsp = read_rest(&mut client).await;
            assert!(rsp.starts_with("HTTP/1.1 408 "), "{via}: {rsp}");
        }
    });
}

#[test]
fn slow_heads_time_out_and_do_not_delay_other_clients() {
    const N_CLIENTS: usize = 100;
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.env("TULLE_PROXY_OUTBOUND_HTTP_HEAD_TIMEOUT", "1s");
    let mesh = mesh.env("TULLE_PROXY_INBOUND_HTTP_HEAD_TIMEOUT", "1s");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut clients = JoinSet::new();
        for n in 0..N_CLIENTS {
            let mut stream = match n % 2 {
                0 => dial(mesh).await,
                _ => mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
            };
            stream
                .write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\na: ")
                .await
                .unwrap();
            clients.spawn(send_slowly(stream));
        }
        for _ in 0..10 {
            let answer = mesh.get("client", mesh.service_addr("web", HTTP), "/").await;
            assert_eq!(answer.status, 200);
        }
        let responses = clients.join_all().await;
        let n_timeouts = responses.iter().filter(|rsp| rsp.starts_with("HTTP/1.1 408 ")).count();
        assert_eq!(n_timeouts, N_CLIENTS, "{responses:?}");
    });
}

/// Sends a byte at intervals until the connection ends, and returns the response.
async fn send_slowly(mut stream: TcpStream) -> String {
    let (mut read, mut write) = stream.split();
    let mut interval = tokio::time::interval(Duration::from_millis(100));
    let sending = async {
        loop {
            interval.tick().await;
            if write.write_all(b"a").await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let mut rsp = String::new();
    tokio::select! {
        read = read.read_to_string(&mut rsp) => drop(read.unwrap()),
        () = sending => {}
    }
    rsp
}

#[test]
fn a_connection_without_requests_is_closed_in_time() {
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.env("TULLE_PROXY_OUTBOUND_HTTP_IDLE_TIMEOUT", "200ms");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = dial(mesh).await;
        client
            .write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\n\r\n")
            .await
            .unwrap();
        let rsp = read_rest(&mut client).await;
        assert!(rsp.starts_with("HTTP/1.1 200 ") && rsp.ends_with("web\n"), "{rsp}");
    });
}

/// Echoes the body for `/echo`; for other paths reads the whole body and responds with its length.
async fn answer(req: Request<Incoming>) -> Response<AnyBody> {
    if req.uri().path() == "/echo" {
        return Response::new(any(req.into_body()));
    }
    match req.into_body().collect().await {
        Ok(body) => Response::new(full(body.to_bytes().len().to_string())),
        Err(_) => Response::new(full("cut")),
    }
}

#[test]
fn stalled_uploads_time_out_and_others_do_not() {
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.env("TULLE_PROXY_OUTBOUND_HTTP_IDLE_TIMEOUT", "1s");
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, answer);
        let upload = async |path: &str, length: usize, first: &str| {
            let mut stream = dial(mesh).await;
            let head = format!("POST {path} HTTP/1.1\r\nhost: web.test\r\ncontent-length: {length}\r\n\r\n{first}");
            stream.write_all(head.as_bytes()).await.unwrap();
            stream
        };
        let mut answered = upload("/echo", 8, "abc").await;
        read_until(&mut answered, "abc").await;
        let mut slow = upload("/", 20, "").await;
        let slow = tokio::spawn(async move {
            let mut pause = tokio::time::interval(Duration::from_millis(100));
            for _ in 0..20 {
                pause.tick().await;
                slow.write_all(b"a").await.unwrap();
            }
            read_until(&mut slow, "\r\n\r\n20").await
        });
        let stalled = read_rest(&mut upload("/", 1000, "abc").await).await;
        assert!(stalled.starts_with("HTTP/1.1 408 "), "{stalled}");
        assert!(stalled.contains("l5d-proxy-cause: body-timeout;"), "{stalled}");
        assert!(stalled.contains("connection: close\r\n"), "{stalled}");
        assert!(slow.await.unwrap().starts_with("HTTP/1.1 200 "));
        // The response has already started, so there is no error response.
        let rest = read_rest(&mut answered).await;
        assert!(!rest.contains("defgh"), "{rest}");
    });
}

#[test]
fn an_upload_that_waits_for_its_response_does_not_time_out() {
    const N_FRAMES: usize = 20;
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.env("TULLE_PROXY_OUTBOUND_HTTP_IDLE_TIMEOUT", "1s");
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, |_| async {
            apps::slow_response(N_FRAMES, Duration::from_millis(100))
        });
        let mut client = dial(mesh).await;
        let head = b"POST / HTTP/1.1\r\nhost: web.test\r\nconnection: close\r\ncontent-length: 5\r\n\r\n";
        client.write_all(head).await.unwrap();
        read_until(&mut client, "\r\n\r\n").await;
        for _ in 0..N_FRAMES {
            read_until(&mut client, "x\r\n").await;
        }
    });
}

const EXPECT_CONTINUE_REQUEST: &[u8] =
    b"POST / HTTP/1.1\r\nhost: web.test\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n";

/// An application that reads a head, responds with `response` after one second, and then reads the body unless `response` is a 4xx.
async fn start_delayed_app(mesh: &Mesh, response: &'static [u8]) -> apps::App {
    apps::serve_tcp(mesh.listen("web", HTTP).await, move |mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        stream.write_all(response).await.unwrap();
        if !response.starts_with(b"HTTP/1.1 4") {
            read_until(&mut stream, "hello").await;
            stream.write_all(OK).await.unwrap();
        }
        stream.shutdown().await.unwrap();
    })
}

#[test]
fn expect_100_continue_is_decided_by_the_application() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let permitting = start_delayed_app(mesh, b"HTTP/1.1 100 Continue\r\n\r\n").await;
        let mut client = dial(mesh).await;
        client.write_all(EXPECT_CONTINUE_REQUEST).await.unwrap();
        assert!(read_until(&mut client, "\r\n\r\n").await.starts_with("HTTP/1.1 100 "));
        client.write_all(b"hello").await.unwrap();
        assert!(read_until(&mut client, "ok").await.starts_with("HTTP/1.1 200 "));
        permitting.kill().await;

        let refusing = start_delayed_app(mesh, b"HTTP/1.1 417 Expectation Failed\r\ncontent-length: 0\r\n\r\n").await;
        let mut client = dial(mesh).await;
        client.write_all(EXPECT_CONTINUE_REQUEST).await.unwrap();
        let rsp = read_rest(&mut client).await;
        assert!(
            rsp.starts_with("HTTP/1.1 417 ") && rsp.contains("connection: close"),
            "{rsp}"
        );
        refusing.kill().await;

        // An application that does not support it sends no interim response, and the client sends the body anyway.
        let _silent = start_delayed_app(mesh, b"").await;
        let mut client = dial(mesh).await;
        client.write_all(EXPECT_CONTINUE_REQUEST).await.unwrap();
        client.write_all(b"hello").await.unwrap();
        assert!(read_until(&mut client, "ok").await.starts_with("HTTP/1.1 200 "));
    });
}

#[test]
fn a_client_disconnect_cancels_its_request() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let (disconnected_tx, mut disconnected_rx) = mpsc::channel(1);
        let (arrived_tx, mut arrived_rx) = mpsc::channel(1);
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, move |mut stream| {
            let (arrived_tx, disconnected_tx) = (arrived_tx.clone(), disconnected_tx.clone());
            async move {
                read_until(&mut stream, "\r\n\r\n").await;
                arrived_tx.send(()).await.unwrap();
                let read = stream.read(&mut [0]).await;
                disconnected_tx.send(read.unwrap_or(0)).await.unwrap();
            }
        });
        for half_closes_first in [false, true] {
            let mut client = dial(mesh).await;
            client
                .write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\n\r\n")
                .await
                .unwrap();
            arrived_rx.recv().await.unwrap();
            if half_closes_first {
                client.shutdown().await.unwrap();
            }
            drop(client);
            assert_eq!(disconnected_rx.recv().await, Some(0));
        }
    });
}

#[test]
fn an_upgrade_may_have_a_body() {
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    mesh.run(async |mesh: &Mesh| {
        let answer = |mut stream: TcpStream| async move {
            let head = read_until(&mut stream, "\r\n\r\n").await.to_lowercase();
            assert!(head.starts_with("post /exec http/1.1\r\n"), "{head}");
            for line in ["connection: upgrade\r\n", "upgrade: tcp\r\n", "content-length: 11\r\n"] {
                assert!(head.contains(line), "{head}");
            }
            assert!(!head.contains("x-hop"), "{head}");
            // The request body arrives after the response has started.
            let switch =
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade, x-hop\r\nupgrade: tcp\r\nx-hop: 1\r\n\r\n";
            stream.write_all(switch).await.unwrap();
            assert_eq!(read_until(&mut stream, "}").await, "{\"tty\":true}");
            stream.write_all(b"server first\n").await.unwrap();
            let line = read_until(&mut stream, "\n").await;
            stream.write_all(line.to_uppercase().as_bytes()).await.unwrap();
        };
        let _web = apps::serve_tcp(mesh.listen("web", HTTP).await, answer);
        let _legacy = apps::serve_tcp(mesh.listen("legacy", HTTP).await, answer);
        for mut client in [
            dial(mesh).await,
            mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
            mesh.dial("client", mesh.service_addr("legacy", HTTP)).await,
        ] {
            let head = "POST /exec HTTP/1.1\r\nhost: web.test\r\nconnection: Upgrade, x-hop, l5d-client-id\r\n\
                x-hop: 1\r\nupgrade: tcp\r\ncontent-length: 11\r\n\r\n";
            client.write_all(head.as_bytes()).await.unwrap();
            client.write_all(b"{\"tty\":").await.unwrap();
            client.write_all(b"true}").await.unwrap();
            let head = read_until(&mut client, "\r\n\r\n").await.to_lowercase();
            assert!(head.starts_with("http/1.1 101 "), "{head}");
            assert!(
                head.contains("connection: upgrade\r\n") && head.contains("upgrade: tcp\r\n"),
                "{head}"
            );
            assert!(!head.contains("x-hop"), "{head}");
            assert_eq!(read_until(&mut client, "\n").await, "server first\n");
            client.write_all(b"then i\n").await.unwrap();
            assert_eq!(read_until(&mut client, "\n").await, "THEN I\n");
        }
    });
}

#[test]
fn a_client_that_half_closes_is_answered() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        for (head, body) in [
            ("GET / HTTP/1.0\r\n\r\n", "web\n"),
            ("GET / HTTP/1.1\r\nhost: web.test\r\nconnection: close\r\n\r\n", "web\n"),
            ("GET / HTTP/1.1\r\nhost: web.test\r\n\r\n", "web\n"),
            (
                "POST /echo HTTP/1.1\r\nhost: web.test\r\ncontent-length: 5\r\n\r\nhello",
                "hello",
            ),
            // Longer than the interval at which the proxy checks the client's connection.
            (
                "GET /delay/2500 HTTP/1.1\r\nhost: web.test\r\n\r\n",
                "web after 2500 ms\n",
            ),
        ] {
            for mut client in [dial(mesh).await, mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await] {
                client.write_all(head.as_bytes()).await.unwrap();
                client.shutdown().await.unwrap();
                let rsp = read_rest(&mut client).await;
                assert!(rsp.ends_with(body), "{head}: {rsp}");
            }
        }
    });
}

#[test]
fn a_response_arrives_although_the_body_is_not_read() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, |mut stream| async move {
            read_until(&mut stream, "\r\n\r\n").await;
            stream
                .write_all(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 3\r\n\r\nno\n")
                .await
                .unwrap();
            // It neither reads nor closes.
            stream.readable().await.unwrap();
            std::future::pending::<()>().await;
        });
        let mut client = dial(mesh).await;
        client
            .write_all(b"POST / HTTP/1.1\r\nhost: web.test\r\ncontent-length: 100000000\r\n\r\n")
            .await
            .unwrap();
        let (mut read, mut write) = client.split();
        let mut rsp = Vec::new();
        let reading = async {
            while !rsp.ends_with(b"no\n") {
                assert!(read.read_buf(&mut rsp).await.unwrap() > 0);
            }
        };
        let writing = async {
            while write.write_all(&[b'x'; 10_000]).await.is_ok() {}
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = reading => {}
            () = writing => {}
        }
        assert!(rsp.starts_with(b"HTTP/1.1 413 "), "{}", String::from_utf8_lossy(&rsp));
    });
}

#[test]
fn a_truncated_response_does_not_look_complete_to_an_http10_client() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let (close_tx, close_rx) = oneshot::channel::<()>();
        let close_rx = Mutex::new(Some(close_rx));
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, move |mut stream| {
            let close_rx = close_rx.lock().take().unwrap();
            async move {
                read_until(&mut stream, "\r\n\r\n").await;
                let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n";
                stream.write_all(head).await.unwrap();
                close_rx.await.unwrap();
            }
        });
        let mut client = dial(mesh).await;
        client
            .write_all(b"GET / HTTP/1.0\r\nhost: web.test\r\n\r\n")
            .await
            .unwrap();
        read_until(&mut client, "ok").await;
        close_tx.send(()).unwrap();
        let mut text = Vec::new();
        let ended = client.read_to_end(&mut text).await;
        assert!(ended.is_err(), "{}", String::from_utf8_lossy(&text));
    });
}

#[test]
fn http10_clients_may_keep_their_connection_and_get_no_interim_responses() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, |mut stream| async move {
            let mut buffer = [0; 4096];
            while matches!(stream.read(&mut buffer).await, Ok(1..)) {
                let answer = "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let mut client = dial(mesh).await;
        for _ in 0..3 {
            let head = b"GET / HTTP/1.0\r\nhost: web.test\r\nconnection: keep-alive\r\n\r\n";
            client.write_all(head).await.unwrap();
            let rsp = read_until(&mut client, "\r\n\r\nok").await;
            assert!(rsp.starts_with("HTTP/1.0 200 OK\r\n"), "{rsp}");
            assert!(rsp.contains("\r\nconnection: keep-alive\r\n"), "{rsp}");
        }
    });
}

#[test]
fn connections_are_reused_after_bodies_of_every_form() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = dial(mesh).await;
        for body in [
            "content-length: 5\r\n\r\nhello",
            "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        ] {
            for _ in 0..3 {
                let text = format!("POST /echo HTTP/1.1\r\nhost: web.test\r\n{body}");
                client.write_all(text.as_bytes()).await.unwrap();
                let head = read_until(&mut client, "\r\n\r\n").await;
                assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
                read_until(
                    &mut client,
                    if head.contains("chunked") { "0\r\n\r\n" } else { "hello" },
                )
                .await;
            }
        }
        let opened = || mesh.metric("client", "tcp_open_total", &[r#"peer="src""#]);
        eventually("connections are counted", async || (opened().await >= 1.).then_some(())).await;
        assert_eq!(opened().await as u32, 1);
    });
}

/// An application that counts its accepted and its open connections. Requests for `/together` are answered in pairs.
struct CountingApp {
    _app: apps::App,
    n_accepted: Arc<AtomicUsize>,
    n_open: Arc<AtomicUsize>,
}

impl CountingApp {
    async fn start(mesh: &Mesh, workload: &str) -> Self {
        let (n_accepted, n_open) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let (accepted, open) = (n_accepted.clone(), n_open.clone());
        let two = Arc::new(Barrier::new(2));
        let app = apps::serve_tcp(mesh.listen(workload, HTTP).await, move |stream| {
            let (accepted, open, two) = (accepted.clone(), open.clone(), two.clone());
            async move {
                accepted.fetch_add(1, Ordering::Relaxed);
                open.fetch_add(1, Ordering::Relaxed);
                let answer = service_fn(async |req: Request<Incoming>| {
                    if req.uri().path() == "/together" {
                        two.wait().await;
                    }
                    Ok::<_, Infallible>(Response::new(full("ok")))
                });
                // The result of the connection does not matter.
                let _ = server::Builder::new()
                    .serve_connection(TokioIo::new(stream), answer)
                    .await;
                open.fetch_sub(1, Ordering::Relaxed);
            }
        });
        Self {
            _app: app,
            n_accepted,
            n_open,
        }
    }

    fn n_accepted(&self) -> usize {
        self.n_accepted.load(Ordering::Relaxed)
    }

    fn n_open(&self) -> usize {
        self.n_open.load(Ordering::Relaxed)
    }
}

/// Runs a test on two pools with these variables: the inbound pool of the proxy of `web`, reached from outside, and the outbound
/// pool of the proxy of `client`, to `legacy`.
fn run_on_both_pools(variables: &[(&str, &str)], test: impl AsyncFn(&CountingApp, [Http1; 2]) + Send + Sync) {
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    let mesh = variables.iter().fold(mesh, |mesh, (name, value)| mesh.env(name, value));
    mesh.run(async |mesh: &Mesh| {
        for workload in ["web", "legacy"] {
            let app = CountingApp::start(mesh, workload).await;
            let dial = async || {
                Http1::handshake(match workload {
                    "web" => mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
                    _ => mesh.dial("client", mesh.service_addr("legacy", HTTP)).await,
                })
                .await
            };
            test(&app, [dial().await, dial().await]).await;
        }
    });
}

#[test]
fn the_number_of_idle_connections_to_an_application_is_limited() {
    let variables = [
        ("MAX_IDLE_CONNS_PER_ENDPOINT", "1"),
        ("INBOUND_HTTP1_CONNECTION_POOL_IDLE_TIMEOUT", "1h"),
        ("OUTBOUND_MAX_IDLE_CONNS_PER_ENDPOINT", "1"),
        ("OUTBOUND_HTTP1_CONNECTION_POOL_IDLE_TIMEOUT", "1h"),
    ];
    run_on_both_pools(&variables, async |app: &CountingApp, [mut first, mut second]| {
        let (rsp1, rsp2) = tokio::join!(first.fetch(request("/together")), second.fetch(request("/together")));
        assert_eq!((rsp1.unwrap().text(), rsp2.unwrap().text()), ("ok".into(), "ok".into()));
        eventually("one of the two idle connections is closed", async || {
            (app.n_open() == 1).then_some(())
        })
        .await;
        let n_accepted = app.n_accepted();
        for client in [&mut first, &mut second] {
            client.fetch(request("/")).await.unwrap();
        }
        assert_eq!(
            (app.n_accepted(), app.n_open()),
            (n_accepted, 1),
            "the other connection is used again"
        );
    });
}

#[test]
fn idle_connections_to_an_application_are_closed_in_time() {
    let variables = [
        ("INBOUND_HTTP1_CONNECTION_POOL_IDLE_TIMEOUT", "200ms"),
        ("OUTBOUND_HTTP1_CONNECTION_POOL_IDLE_TIMEOUT", "200ms"),
    ];
    run_on_both_pools(&variables, async |app: &CountingApp, [mut one, silent]| {
        // The proxy has also dialled the application for the silent client, to detect a server-speaks-first protocol; close that
        // connection first.
        drop(silent);
        one.fetch(request("/")).await.unwrap();
        let closed = eventually("the connection is closed", async || (app.n_open() == 0).then_some(()));
        // The default timeout is 3 s.
        timeout(Duration::from_secs(2), closed).await.unwrap();
        one.fetch(request("/")).await.unwrap();
    });
}

#[test]
fn a_client_reset_during_an_upload_is_detected_after_the_response_has_started() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let (disconnected_tx, mut disconnected_rx) = mpsc::channel(1);
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, move |mut stream| {
            let disconnected_tx = disconnected_tx.clone();
            async move {
                read_until(&mut stream, "\r\n\r\n").await;
                let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n";
                stream.write_all(head).await.unwrap();
                // Reads until the connection fails.
                while stream.read_u8().await.is_ok() {}
                disconnected_tx.send(()).await.unwrap();
            }
        });
        let mut client = dial(mesh).await;
        let head = b"POST / HTTP/1.1\r\nhost: web.test\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n";
        client.write_all(head).await.unwrap();
        read_until(&mut client, "ok").await;
        drop(client);
        disconnected_rx.recv().await.unwrap();
    });
}

#[test]
fn endless_interim_responses_are_a_bad_response() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, |mut stream| async move {
            read_until(&mut stream, "\r\n\r\n").await;
            // Until the connection is closed.
            while stream.write_all(b"HTTP/1.1 103 Early Hints\r\n\r\n").await.is_ok() {}
        });
        let mut client = dial(mesh).await;
        let head = b"GET / HTTP/1.1\r\nhost: web.test\r\nconnection: close\r\n\r\n";
        client.write_all(head).await.unwrap();
        let rsp = read_rest(&mut client).await;
        assert!(rsp.contains("HTTP/1.1 502 "), "{rsp}");
    });
}

#[test]
fn an_early_response_keeps_the_connection_to_the_application() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        // The head of each response is sent before the rest of the request body arrives. Its body is the number of requests on
        // the connection.
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, |mut stream| async move {
            for n in 1..=3 {
                read_until(&mut stream, "begun").await;
                let head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n";
                stream.write_all(head).await.unwrap();
                read_until(&mut stream, "ended").await;
                stream.write_all(format!("{n}\n").as_bytes()).await.unwrap();
            }
        });
        let mut client = dial(mesh).await;
        for n in 1..=3 {
            let head = "POST / HTTP/1.1\r\nhost: web.test\r\ncontent-length: 10\r\n\r\nbegun";
            client.write_all(head.as_bytes()).await.unwrap();
            read_until(&mut client, "\r\n\r\n").await;
            client.write_all(b"ended").await.unwrap();
            assert_eq!(read_until(&mut client, "\n").await, format!("{n}\n"));
        }
    });
}

#[test]
fn the_application_decides_about_connect_tunnels() {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, |mut stream| async move {
            let head = read_until(&mut stream, "\r\n\r\n").await;
            assert!(head.starts_with("CONNECT other.test:443 HTTP/1.1\r\n"), "{head}");
            stream
                .write_all(b"HTTP/1.1 200 OK\r\n\r\nserver first\n")
                .await
                .unwrap();
            let line = read_until(&mut stream, "\n").await;
            stream.write_all(line.to_uppercase().as_bytes()).await.unwrap();
        });
        let mut client = dial(mesh).await;
        let head = "CONNECT other.test:443 HTTP/1.1\r\nhost: other.test:443\r\n\r\n";
        client.write_all(head.as_bytes()).await.unwrap();
        assert!(read_until(&mut client, "\r\n\r\n").await.starts_with("HTTP/1.1 200 "));
        assert_eq!(read_until(&mut client, "\n").await, "server first\n");
        client.write_all(b"then i\n").await.unwrap();
        assert_eq!(read_until(&mut client, "\n").await, "THEN I\n");
    });
}
