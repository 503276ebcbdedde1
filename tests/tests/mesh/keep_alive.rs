//! Servers that close idle connections after a time that they announce, with clients that come again after about this time.

use std::time::Duration;

use http::Request;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tulle_tests::apps;
use tulle_tests::client::{Http1, full, read_until};
use tulle_tests::mesh::{HTTP, Mesh, mesh};

/// Clients of each server. With [`REQUESTS`] of each, a server gets 3,000 requests.
const CLIENTS: u32 = 300;
const REQUESTS: u32 = 10;
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
const BODY: &str = "an order";

#[test]
fn no_post_is_lost_when_a_server_closes_idle_connections() {
    mesh()
        .workload("client")
        .workload("web")
        .unmeshed("legacy")
        .run(async |mesh: &Mesh| {
            let mut servers = Vec::new();
            for workload in ["web", "legacy"] {
                servers.push(apps::serve_tcp(mesh.listen(workload, HTTP).await, serve));
            }
            let mut clients = JoinSet::new();
            for (workload, client) in ["web", "legacy"]
                .into_iter()
                .flat_map(|w| (0..CLIENTS).map(move |client| (w, client)))
            {
                let stream = mesh.dial("client", mesh.service_addr(workload, HTTP)).await;
                clients.spawn(post_in_turn(stream, workload, client));
            }
            let failed: Vec<String> = clients.join_all().await.into_iter().flatten().collect();
            assert!(
                failed.is_empty(),
                "{} failed: {:?}",
                failed.len(),
                &failed[..failed.len().min(5)]
            );
        });
}

/// Answers requests until the connection was idle for [`IDLE_TIMEOUT`].
async fn serve(mut stream: TcpStream) {
    while timeout(IDLE_TIMEOUT, stream.readable()).await.is_ok() {
        let is_ended = stream.peek(&mut [0]).await.map_or(true, |n| n == 0);
        if is_ended {
            return;
        }
        read_until(&mut stream, BODY).await;
        let rsp = "HTTP/1.1 200 OK\r\nkeep-alive: timeout=1\r\ncontent-length: 0\r\n\r\n";
        if stream.write_all(rsp.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Sends requests on one connection, each about [`IDLE_TIMEOUT`] after the one before. Returns what failed.
async fn post_in_turn(stream: TcpStream, workload: &str, client: u32) -> Vec<String> {
    let mut http = Http1::handshake(stream).await;
    let mut failed = Vec::new();
    for number in 0..REQUESTS {
        let req = Request::post("/").header("host", workload).body(full(BODY)).unwrap();
        match http.fetch(req).await {
            Ok(rsp) if rsp.status.is_success() => {}
            Ok(rsp) => failed.push(format!("{} {}", rsp.status, rsp.cause())),
            Err(error) => failed.push(error.to_string()),
        }
        // The time is spread around the idle timeout, so that some requests would meet the end of a connection.
        sleep(
            IDLE_TIMEOUT + Duration::from_millis(u64::from((client * 7 + number * 31) % 100))
                - Duration::from_millis(50),
        )
        .await;
    }
    failed
}
