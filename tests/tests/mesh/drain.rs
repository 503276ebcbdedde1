//! A proxy that shuts down completes its requests first.

use futures_util::future::join;
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tulle_tests::apps;
use tulle_tests::client::{Http1, Http2, http2_request, request};
use tulle_tests::eventually::eventually;
use tulle_tests::load::load;
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, mesh};

/// Waits until the proxy of `workload` has counted a request.
async fn wait_for_request(mesh: &Mesh, workload: &str) {
    eventually("the request is on its way", async || {
        (mesh.metric(workload, "request_total", &[]).await >= 1.).then_some(())
    })
    .await;
}

#[test]
fn requests_in_flight_are_answered_by_a_draining_server() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let drain = async {
            wait_for_request(mesh, "web").await;
            mesh.shut_down("web");
        };
        let (answer, ()) = join(mesh.get("client", mesh.service_addr("web", HTTP), "/delay/500"), drain).await;
        assert_eq!(
            (answer.status.as_u16(), answer.text().as_str()),
            (200, "web after 500 ms\n")
        );
        mesh.wait_for_exit("web").await;
    });
}

#[test]
fn a_draining_client_proxy_answers_and_closes() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut http1 = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let mut http2 = Http2::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let drain = async {
            eventually("both requests are on their way", async || {
                (mesh.metric("client", "request_total", &[]).await >= 2.).then_some(())
            })
            .await;
            mesh.shut_down("client");
        };
        let responses = join(
            http1.fetch(request("/delay/500")),
            http2.fetch(http2_request("/delay/500")),
        );
        let ((one, two), ()) = join(responses, drain).await;
        assert_eq!((one.unwrap().status.as_u16(), two.unwrap().status.as_u16()), (200, 200));
        mesh.wait_for_exit("client").await;
        eventually("connections are closed", async || {
            (!http1.is_open() && !http2.is_open()).then_some(())
        })
        .await;
    });
}

#[test]
fn a_replica_that_drains_under_load_fails_no_request() {
    mesh().workload("client").replicas("web", 2).run(async |mesh: &Mesh| {
        for i in 0..2 {
            apps::start_echo(mesh, &format!("web-{i}")).await;
        }
        let during = async {
            let wait_for_n_requests = async |workload: &str, n: f64| {
                eventually("requests arrive", async || {
                    (mesh.metric(workload, "request_total", &[]).await >= n).then_some(())
                })
                .await;
            };
            wait_for_n_requests("web-0", 100.).await;
            mesh.shut_down("web-0");
            mesh.wait_for_exit("web-0").await;
            let before = mesh.metric("web-1", "request_total", &[]).await;
            wait_for_n_requests("web-1", before + 200.).await;
        };
        load(mesh, "client", mesh.service_addr("web", HTTP), 8, during)
            .await
            .assert_all_ok();
    });
}

#[test]
fn open_streams_last_until_the_grace_period_ends_and_metrics_stay_readable() {
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.workload_env("SHUTDOWN_GRACE_PERIOD", "2s");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut bytes = mesh.dial("client", mesh.service_addr("web", OPAQUE)).await;
        let stream = mesh.dial("client", mesh.service_addr("web", HTTP)).await;
        let (mut socket, _) = tokio_tungstenite::client_async("ws://web.test/ws", stream)
            .await
            .unwrap();
        let mut both = async || {
            bytes.write_all(b"hello").await?;
            bytes.read_exact(&mut [0; 5]).await?;
            socket
                .send(Message::text("hello"))
                .await
                .map_err(std::io::Error::other)?;
            match socket.next().await {
                Some(Ok(message)) if message.is_text() => Ok(()),
                other => Err(std::io::Error::other(format!("{other:?}"))),
            }
        };
        both().await.unwrap();
        mesh.shut_down("web");
        eventually("new connections are refused", async || {
            TcpStream::connect((mesh.ip("web"), 4143)).await.is_err().then_some(())
        })
        .await;
        both().await.unwrap();
        mesh.wait_for_metric_at_least("web", "tcp_open_connections", &["peer=\"src\""], 2.)
            .await;
        eventually("the grace period is over", async || both().await.is_err().then_some(())).await;
        mesh.wait_for_exit("web").await;
    });
}
