//! No request is lost when a server closes the connection while the request is sent, or when endpoints are replaced.
//!
//! With `TULLE_TEST_FULL=1` each test sends a hundred thousand requests.

use std::collections::VecDeque;
use std::time::Duration;

use http::Response;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tulle_tests::apps::{self, App};
use tulle_tests::client::full;
use tulle_tests::eventually::eventually;
use tulle_tests::load::{LoadOutcome, load};
use tulle_tests::mesh::{Builder, HTTP, Mesh, mesh};

/// Unoptimised proxies would need minutes for all requests.
fn n_requests() -> f64 {
    match std::env::var_os("TULLE_TEST_FULL") {
        Some(_) => 100_000.,
        None => 3_000.,
    }
}

fn mesh_with_long_timeout() -> Builder {
    mesh().timeout(Duration::from_secs(900))
}

/// Waits until the application of `client` has sent `n` requests.
async fn wait_for_sent_requests(mesh: &Mesh, n: f64) {
    while mesh
        .metric("client", "tulle_http_requests_total", &["direction=\"outbound\""])
        .await
        < n
    {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn print_outcome(what: &str, outcome: &LoadOutcome, since: Instant) {
    eprintln!(
        "{what}: {} requests, {} failed, {:?}",
        outcome.n_ok,
        outcome.failures.len(),
        since.elapsed()
    );
}

/// Answers requests without a body, and closes without `connection: close`: after some responses immediately, after others
/// a moment later, when the next request may be on its way.
async fn randomly_closing_server(stream: TcpStream) {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    loop {
        line.clear();
        match stream.read_line(&mut line).await {
            Ok(2) => {}
            Ok(n) if n > 0 => continue,
            _ => return,
        }
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
        if stream.write_all(answer).await.is_err() {
            return;
        }
        let moment = match fastrand::u8(..8) {
            0 | 1 => Duration::ZERO,
            2 | 3 => Duration::from_micros(fastrand::u64(..3_000)),
            _ => continue,
        };
        tokio::time::sleep(moment).await;
        return;
    }
}

/// Runs load on an application whose server closes connections at random.
fn run_against_closing_server(app: &str, mesh: Builder) {
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::serve_tcp(mesh.listen(app, HTTP).await, randomly_closing_server);
        let since = Instant::now();
        let during = wait_for_sent_requests(mesh, n_requests());
        let outcome = load(mesh, "client", mesh.service_addr(app, HTTP), 8, during).await;
        print_outcome(app, &outcome, since);
        outcome.assert_all_ok();
    });
}

#[test]
fn servers_that_close_kept_connections_at_random_fail_no_request() {
    run_against_closing_server("web", mesh_with_long_timeout().workload("client").workload("web"));
}

#[test]
fn unmeshed_servers_that_close_kept_connections_at_random_fail_no_request() {
    run_against_closing_server("legacy", mesh_with_long_timeout().workload("client").unmeshed("legacy"));
}

/// Number of workloads with an application.
const N_REPLICAS: usize = 5;
/// Number of replicas that are endpoints at a time.
const N_ENDPOINTS: usize = 3;
const N_REPLACEMENTS: usize = 20;

/// Waits until a workload gets no more requests: `client` has sent 50 requests since the last one that arrived there.
async fn wait_until_unused(mesh: &Mesh, workload: &str) {
    let (mut received, mut sent_by_then) = (f64::NAN, f64::NAN);
    eventually("the endpoint is removed", async || {
        let requests_to_workload = mesh.metric(workload, "request_total", &[]).await;
        let requests_of_client = mesh
            .metric("client", "tulle_http_requests_total", &["direction=\"outbound\""])
            .await;
        if requests_to_workload != received {
            (received, sent_by_then) = (requests_to_workload, requests_of_client);
        }
        (requests_of_client > sent_by_then + 50.).then_some(())
    })
    .await;
}

async fn replica(mesh: &Mesh, n: usize) -> App {
    let listener = mesh.listen(&format!("web-{n}"), HTTP).await;
    apps::serve_http(listener, |_| async { Response::new(full("ok")) })
}

#[test]
fn endpoints_are_replaced_twenty_times_under_load_without_a_failure() {
    let mesh = mesh_with_long_timeout().workload("client").replicas("web", N_REPLICAS);
    mesh.run(async |mesh: &Mesh| {
        let name = |n: usize| format!("pod-web-{}", n % N_REPLICAS);
        let pods: Vec<_> = (0..N_REPLICAS).map(|n| mesh.manifest(&name(n))).collect();
        let mut running = VecDeque::new();
        for n in 0..N_REPLICAS {
            match n < N_ENDPOINTS {
                true => running.push_back(replica(mesh, n).await),
                false => mesh.remove(&name(n)),
            }
        }
        // A request is resent once. While two endpoints have no application it can fail, so wait until discovery has removed them.
        let dst = mesh.service_addr("web", HTTP);
        eventually("unready endpoints are known", async || {
            for _ in 0..50 {
                if mesh.get("client", dst, "/").await.status != 200 {
                    return None;
                }
            }
            Some(())
        })
        .await;
        let since = Instant::now();
        let during = async {
            for n in N_ENDPOINTS..N_ENDPOINTS + N_REPLACEMENTS {
                let (new, old) = (n % N_REPLICAS, n - N_ENDPOINTS);
                running.push_back(replica(mesh, new).await);
                mesh.write(&name(new), &pods[new]);
                let workload = format!("web-{new}");
                let before = mesh.metric(&workload, "request_total", &[]).await;
                eventually("the new one is used", async || {
                    (mesh.metric(&workload, "request_total", &[]).await > before).then_some(())
                })
                .await;
                // The worst case: the application ends at once, and its pod is removed afterwards.
                running.pop_front().unwrap().kill().await;
                mesh.remove(&name(old));
                wait_until_unused(mesh, &format!("web-{}", old % N_REPLICAS)).await;
                wait_for_sent_requests(
                    mesh,
                    n_requests() * (n + 1 - N_ENDPOINTS) as f64 / N_REPLACEMENTS as f64,
                )
                .await;
            }
        };
        let outcome = load(mesh, "client", dst, 8, during).await;
        print_outcome("replacements", &outcome, since);
        outcome.assert_all_ok();
    });
}
