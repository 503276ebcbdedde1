//! What takes more than there is finds an end, and everybody else goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Response;
use http_body_util::BodyExt as _;
use nix::sys::resource::{Resource, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tulle_tests::apps;
use tulle_tests::client::{self, Http1, empty, full, read_until, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, STRANGER, TCP, mesh};

#[test]
fn a_proxy_short_of_memory_refuses_and_says_so_until_there_is_some_again() {
    const LIMIT: usize = 600 << 20; // all proxies of a test are one process
    mesh()
        .workload("client")
        .its_env("TULLE_PROXY_MEMORY_LIMIT", &LIMIT.to_string())
        .workload("web")
        .run(async |mesh: &Mesh| {
            apps::echo(mesh, "web").await;
            let mut client = Http1::over(mesh.dial("client", mesh.service("web", HTTP)).await).await;
            assert_eq!(client.ask(request("/")).await.unwrap().status, 200);
            let hog = vec![1_u8; LIMIT];
            eventually("memory is short", async || {
                (mesh.metric("client", "tulle_memory_short", &[]).await >= 1.0).then_some(())
            })
            .await;
            let answer = client.ask(request("/")).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.cause()), (503, "memory-short"));
            // A reset may come before the connection is known to be established.
            if let Ok(mut stream) = mesh.try_dial("client", mesh.service("web", TCP)).await {
                assert!(matches!(stream.read(&mut [0]).await, Ok(0) | Err(_)), "it is closed");
            }
            drop(hog);
            eventually("there is memory again", async || {
                (mesh.metric("client", "tulle_memory_short", &[]).await < 1.0).then_some(())
            })
            .await;
            assert_eq!(mesh.get("client", mesh.service("web", HTTP), "/").await.status, 200);
            let short = ["cause=\"memory-short\""];
            assert_eq!(mesh.metric("client", "tulle_failures_total", &short).await, 2.0);
        });
}

/// More than the windows of a connection between two sidecars have room for at first.
const IDLERS: usize = 40;
const BODY: usize = 3 << 20;

#[test]
fn answers_that_nobody_reads_hold_up_nobody_else() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::echo(mesh, "web").await;
        let mut idlers = Vec::new();
        for _ in 0..IDLERS {
            let mut idler = mesh.dial("client", mesh.service("web", HTTP)).await;
            let head = format!("GET /bytes/{BODY} HTTP/1.1\r\nhost: web.test\r\n\r\n");
            idler.write_all(head.as_bytes()).await.unwrap();
            read_until(&mut idler, "\r\n\r\n").await; // and no more of it
            idlers.push(idler);
            asks_at_ease(mesh).await;
        }
        // Nothing was lost of what waits.
        for mut idler in idlers {
            let mut body = vec![0; BODY];
            idler.read_exact(&mut body).await.unwrap();
        }
    });
}

#[test]
fn uploads_that_nobody_reads_hold_up_nobody_else() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        let (n_held, held) = (Arc::new(AtomicUsize::new(0)), Arc::new(tokio::sync::Semaphore::new(0)));
        let (seen, goes_on) = (n_held.clone(), held.clone());
        let _app = apps::http(mesh.listen("web", HTTP).await, move |req| {
            let (seen, goes_on) = (seen.clone(), goes_on.clone());
            async move {
                if req.method() == http::Method::GET {
                    return Response::new(full("well"));
                }
                seen.fetch_add(1, Ordering::Relaxed);
                let _turn = goes_on.acquire().await.unwrap();
                let n = req.into_body().collect().await.unwrap().to_bytes().len();
                Response::new(full(n.to_string()))
            }
        });
        let mut uploads = tokio::task::JoinSet::new();
        for n in 1..=IDLERS {
            let mut client = Http1::over(mesh.dial("client", mesh.service("web", HTTP)).await).await;
            let post = http::Request::post("http://web.test/")
                .body(full(vec![b'x'; BODY]))
                .unwrap();
            uploads.spawn(async move { client.ask(post).await.unwrap().text() });
            eventually("the upload has begun", async || {
                (n_held.load(Ordering::Relaxed) == n).then_some(())
            })
            .await;
            asks_at_ease(mesh).await;
        }
        held.add_permits(IDLERS);
        while let Some(n) = uploads.join_next().await {
            assert_eq!(n.unwrap(), BODY.to_string());
        }
    });
}

/// Asks for something that does not fit into the head's packet, and has it at once.
async fn asks_at_ease(mesh: &Mesh) {
    let asked = mesh.get("client", mesh.service("web", HTTP), "/bytes/20000");
    let answer = timeout(Duration::from_secs(5), asked)
        .await
        .expect("it waits for those who do not read");
    assert_eq!(answer.status, 200);
}

#[test]
fn as_many_connections_may_wait_to_be_accepted_as_the_environment_says() {
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.its_env("OUTBOUND_TCP_LISTEN_BACKLOG", "17");
    let mesh = mesh.its_env("INBOUND_TCP_LISTEN_BACKLOG", "23");
    mesh.run(async |mesh: &Mesh| {
        for (workload, most) in [("web", [17, 23]), ("client", [4096, 4096])] {
            assert_eq!(mesh.waiting(workload), most.map(|most| (0, most)), "{workload}");
        }
    });
}

#[test]
fn who_holds_connections_to_many_ports_keeps_nobody_from_another() {
    const MOST_WATCHED: u16 = 256;
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::echo(mesh, "web").await;
        let at = |port| (mesh.ip("web"), port).into();
        let mut held = Vec::new();
        for port in 20_000..=20_000 + MOST_WATCHED {
            held.push(mesh.stray(STRANGER, "web", at(port)).await);
        }
        let listener = TcpListener::bind((mesh.ip("web"), 30_000)).await.unwrap();
        let _app = apps::http(listener, |_| async { Response::new(empty()) });
        let further = client::get(mesh.stray(STRANGER, "web", at(30_000)).await, "/").await;
        assert_eq!(further.status, 200);
        let declared = client::get(mesh.arrive(STRANGER, "web", HTTP).await, "/").await;
        assert_eq!(declared.status, 200);
        let refused = mesh.metric("web", "inbound_tcp_errors_total", &["error=\"loadshed\""]);
        assert_eq!(refused.await, 0.);
    });
}

#[test]
fn connections_beyond_what_files_there_are_for_are_closed() {
    const FILES: u64 = 800; // of which all proxies of a test take theirs
    const MOST: usize = FILES as usize / 4;
    setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES).unwrap(); // of this test's process
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::echo(mesh, "web").await;
        let connect = async || Http1::over(mesh.dial("client", mesh.service("web", HTTP)).await).await;
        let mut held = Vec::new();
        for _ in 0..MOST {
            let mut client = connect().await;
            assert_eq!(client.ask(request("/")).await.unwrap().status, 200);
            held.push(client);
        }
        // A reset may come before the connection is known to be established.
        let ask_anew = async || {
            let stream = mesh.try_dial("client", mesh.service("web", HTTP)).await.ok()?;
            Http1::over(stream).await.ask(request("/")).await.ok()
        };
        assert!(ask_anew().await.is_none(), "one is too many");
        let overload = ["cause=\"overload\"", "direction=\"outbound\""];
        assert_eq!(mesh.metric("client", "tulle_failures_total", &overload).await, 1.);
        assert_eq!(
            held[0].ask(request("/")).await.unwrap().status,
            200,
            "who is there stays"
        );
        held.clear();
        eventually("there is a place again", ask_anew).await;
    });
}
