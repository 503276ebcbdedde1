//! Servers announce an idle timeout and close connections after it; clients send their next request at about this time.

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
const CLIENTS: usize = 300;
const REQUESTS: u32 = 10;
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
const CLOSE_DELAY: Duration = Duration::from_millis(20);
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
            let mut streams = Vec::new();
            for workload in ["web", "legacy"].repeat(CLIENTS) {
                let stream = mesh.dial("client", mesh.service_addr(workload, HTTP)).await;
                streams.push((stream, workload));
            }
            let posts = streams
                .into_iter()
                .map(|(stream, workload)| post_in_turn(stream, workload));
            let clients: JoinSet<_> = posts.collect();
            let failed: Vec<String> = clients.join_all().await.into_iter().flatten().collect();
            assert!(
                failed.is_empty(),
                "{} failed: {:?}",
                failed.len(),
                &failed[..failed.len().min(5)]
            );
        });
}

/// Answers requests until the connection was idle for [`IDLE_TIMEOUT`], and closes it after [`CLOSE_DELAY`], like a server that
/// closes several connections in turn. Requests that arrive in this delay are lost.
async fn serve(mut stream: TcpStream) {
    while let Ok(Ok(1..)) = timeout(IDLE_TIMEOUT, stream.peek(&mut [0])).await {
        read_until(&mut stream, BODY).await;
        let rsp = "HTTP/1.1 200 OK\r\nkeep-alive: timeout=1\r\ncontent-length: 0\r\n\r\n";
        if stream.write_all(rsp.as_bytes()).await.is_err() {
            return;
        }
    }
    sleep(CLOSE_DELAY).await;
}

/// Sends requests on one connection, each about [`IDLE_TIMEOUT`] after the one before. Returns what failed.
async fn post_in_turn(stream: TcpStream, workload: &str) -> Vec<String> {
    let mut http = Http1::handshake(stream).await;
    let mut failed = Vec::new();
    for number in 0..REQUESTS {
        let req = Request::post("/").header("host", workload).body(full(BODY)).unwrap();
        match http.fetch(req).await {
            Ok(rsp) if rsp.status.is_success() => {}
            Ok(rsp) => failed.push(format!("{} {}", rsp.status, rsp.cause())),
            Err(error) => failed.push(error.to_string()),
        }
        // All clients send at about the same time, so that the proxy needs many connections, all idle for about the timeout.
        let offset = Duration::from_millis(u64::from(number * 31 % 100));
        sleep(IDLE_TIMEOUT - Duration::from_millis(50) + offset).await;
    }
    failed
}
