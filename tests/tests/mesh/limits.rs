//! Clients that exceed a limit are refused or closed, and other clients are not affected.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use http::Response;
use http_body_util::BodyExt as _;
use nix::sys::resource::{Resource, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tulle_tests::apps;
use tulle_tests::client::{self, Http1, empty, full, read_until, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{DETECTED_TCP, HTTP, Mesh, UNMESHED_IP, mesh};

#[test]
fn a_proxy_short_of_memory_refuses_requests_until_memory_is_free() {
    const MEMORY_LIMIT_BYTES: usize = 600 << 20; // for all proxies of the test, which share a process
    mesh()
        .workload("client")
        .workload_env("TULLE_PROXY_MEMORY_LIMIT", &MEMORY_LIMIT_BYTES.to_string())
        .workload("web")
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
            assert_eq!(client.fetch(request("/")).await.unwrap().status, 200);
            let allocation = vec![1_u8; MEMORY_LIMIT_BYTES];
            eventually("memory is short", async || {
                (mesh.metric("client", "tulle_memory_short", &[]).await >= 1.0).then_some(())
            })
            .await;
            let answer = client.fetch(request("/")).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.cause()), (503, "memory-short"));
            // The connection may be reset before the dial returns.
            if let Ok(mut stream) = mesh.try_dial("client", mesh.service_addr("web", DETECTED_TCP)).await {
                assert!(matches!(stream.read(&mut [0]).await, Ok(0) | Err(_)), "must be closed");
            }
            drop(allocation);
            eventually("memory is free again", async || {
                (mesh.metric("client", "tulle_memory_short", &[]).await < 1.0).then_some(())
            })
            .await;
            assert_eq!(
                mesh.get("client", mesh.service_addr("web", HTTP), "/").await.status,
                200
            );
            let short = ["cause=\"memory-short\""];
            mesh.wait_for_metric("client", "tulle_failures_total", &short, 2.0)
                .await;
        });
}

/// More stalled responses than fit into the initial windows of a connection between two sidecars.
const N_STALLED_CLIENTS: usize = 40;
const BODY_BYTES: usize = 3 << 20;

#[test]
fn unread_responses_do_not_block_other_clients() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut stalled_clients = Vec::new();
        for _ in 0..N_STALLED_CLIENTS {
            let mut stalled_client = mesh.dial("client", mesh.service_addr("web", HTTP)).await;
            let head = format!("GET /bytes/{BODY_BYTES} HTTP/1.1\r\nhost: web.test\r\n\r\n");
            stalled_client.write_all(head.as_bytes()).await.unwrap();
            read_until(&mut stalled_client, "\r\n\r\n").await; // the rest is not read
            stalled_clients.push(stalled_client);
            assert_prompt_response(mesh).await;
        }
        // All responses are still complete.
        for mut stalled_client in stalled_clients {
            let mut body = vec![0; BODY_BYTES];
            stalled_client.read_exact(&mut body).await.unwrap();
        }
    });
}

#[test]
fn unread_uploads_do_not_block_other_clients() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        let n_started = Arc::new(AtomicUsize::new(0));
        let may_continue = Arc::new(tokio::sync::Semaphore::new(0));
        let (app_n_started, app_may_continue) = (n_started.clone(), may_continue.clone());
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, move |req| {
            let (n_started, may_continue) = (app_n_started.clone(), app_may_continue.clone());
            async move {
                if req.method() == http::Method::GET {
                    return Response::new(full("well"));
                }
                n_started.fetch_add(1, Ordering::Relaxed);
                let _permit = may_continue.acquire().await.unwrap();
                let n = req.into_body().collect().await.unwrap().to_bytes().len();
                Response::new(full(n.to_string()))
            }
        });
        let mut uploads = tokio::task::JoinSet::new();
        for n in 1..=N_STALLED_CLIENTS {
            let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
            let post = http::Request::post("http://web.test/")
                .body(full(vec![b'x'; BODY_BYTES]))
                .unwrap();
            uploads.spawn(async move { client.fetch(post).await.unwrap().text() });
            eventually("the upload has begun", async || {
                (n_started.load(Ordering::Relaxed) == n).then_some(())
            })
            .await;
            assert_prompt_response(mesh).await;
        }
        may_continue.add_permits(N_STALLED_CLIENTS);
        while let Some(n) = uploads.join_next().await {
            assert_eq!(n.unwrap(), BODY_BYTES.to_string());
        }
    });
}

/// Requests `/bytes/20000`, and expects the response within 5 s.
async fn assert_prompt_response(mesh: &Mesh) {
    let response = mesh.get("client", mesh.service_addr("web", HTTP), "/bytes/20000");
    let answer = timeout(Duration::from_secs(5), response)
        .await
        .expect("stalled clients do not delay the response");
    assert_eq!(answer.status, 200);
}

#[test]
fn the_listen_backlog_of_the_environment_is_used() {
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.workload_env("OUTBOUND_TCP_LISTEN_BACKLOG", "17");
    let mesh = mesh.workload_env("INBOUND_TCP_LISTEN_BACKLOG", "23");
    mesh.run(async |mesh: &Mesh| {
        for (workload, backlogs) in [("web", [17, 23]), ("client", [4096, 4096])] {
            assert_eq!(
                mesh.accept_queues(workload),
                backlogs.map(|backlog| (0, backlog)),
                "{workload}"
            );
        }
    });
}

#[test]
fn a_client_that_connects_to_many_closed_ports_is_refused_and_blocks_neither_open_ports_nor_other_clients() {
    const MAX_WATCHED: u16 = 256;
    const OTHER_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 66, 9, 10);
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let at = |port| (mesh.ip("web"), port).into();
        let mut held = Vec::new();
        for port in 20_000..=20_000 + MAX_WATCHED {
            held.push(mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", at(port)).await);
        }
        let listener = TcpListener::bind((mesh.ip("web"), 30_000)).await.unwrap();
        let _app = apps::serve_http(listener, |_| async { Response::new(empty()) });
        let get = |from, port| {
            let dst = at(port);
            async move {
                let stream = mesh.dial_inbound_with_orig_dst(from, "web", dst).await;
                client::get(stream, "/").await.status.as_u16()
            }
        };
        let statuses = join_all((21_000..21_040).map(|port| get(UNMESHED_IP, port))).await;
        let n_refused = statuses.iter().filter(|status| **status == 503).count();
        assert!(n_refused >= 30, "too many closed ports: {statuses:?}");
        assert_eq!(get(UNMESHED_IP, 30_000).await, 200, "open");
        let declared = client::get(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await, "/").await;
        assert_eq!(declared.status, 200);
        assert_eq!(
            get(OTHER_CLIENT, 22_000).await,
            502,
            "no application listens, but the policy permits the client"
        );
        let not_watched = ["direction=\"inbound\"", "cause=\"port-not-watched\""];
        mesh.wait_for_metric_at_least("web", "tulle_failures_total", &not_watched, 30.)
            .await;
        let unknown = mesh.metric("web", "tulle_failures_total", &["cause=\"policy_unknown\""]);
        assert_eq!(
            unknown.await,
            0.,
            "closed ports must not count as policy_unknown, on which an alert fires"
        );
        let refused = mesh.metric("web", "inbound_tcp_errors_total", &["error=\"loadshed\""]);
        assert_eq!(refused.await, 0.);
    });
}

#[test]
fn connections_over_the_open_file_limit_are_closed() {
    const MAX_OPEN_FILES: u64 = 800; // the proxies of the test use some of them
    const MAX_CONNECTIONS: usize = MAX_OPEN_FILES as usize / 4;
    setrlimit(Resource::RLIMIT_NOFILE, MAX_OPEN_FILES, MAX_OPEN_FILES).unwrap(); // for the process of this test
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let connect = async || Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let mut held = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            let mut client = connect().await;
            assert_eq!(client.fetch(request("/")).await.unwrap().status, 200);
            held.push(client);
        }
        // The connection may be reset before the dial returns.
        let send_on_new_connection = async || {
            let stream = mesh.try_dial("client", mesh.service_addr("web", HTTP)).await.ok()?;
            Http1::handshake(stream).await.fetch(request("/")).await.ok()
        };
        assert!(
            send_on_new_connection().await.is_none(),
            "the connection over the limit is refused"
        );
        let overload = ["cause=\"overload\"", "direction=\"outbound\""];
        mesh.wait_for_metric("client", "tulle_failures_total", &overload, 1.)
            .await;
        assert_eq!(
            held[0].fetch(request("/")).await.unwrap().status,
            200,
            "open connections stay"
        );
        held.clear();
        eventually("a connection slot is free again", send_on_new_connection).await;
    });
}
