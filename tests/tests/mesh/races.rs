//! No request is lost to a connection that its server closes meanwhile, nor to endpoints that come and go.
//!
//! With `TULLE_TEST_FULL=1` these are a hundred thousand requests each.

use std::collections::VecDeque;
use std::time::Duration;

use http::Response;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tulle_tests::apps::{self, App};
use tulle_tests::client::full;
use tulle_tests::eventually::eventually;
use tulle_tests::load::{Outcome, load};
use tulle_tests::mesh::{Builder, HTTP, Mesh, mesh};

/// Unoptimised proxies would take minutes for all of them.
fn n_requests() -> f64 {
    match std::env::var_os("TULLE_TEST_FULL") {
        Some(_) => 100_000.,
        None => 3_000.,
    }
}

fn patient() -> Builder {
    mesh().within(Duration::from_secs(900))
}

/// Waits until the application of `client` has sent so many requests.
async fn sent(mesh: &Mesh, n: f64) {
    while mesh
        .metric("client", "tulle_http_requests_total", &["direction=\"outbound\""])
        .await
        < n
    {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn tell(what: &str, outcome: &Outcome, since: Instant) {
    eprintln!(
        "{what}: {} requests, {} failed, {:?}",
        outcome.n_ok,
        outcome.failures.len(),
        since.elapsed()
    );
}

/// Answers requests without a body, and closes without a word: after some of its responses at once, after some a moment
/// later, when the next request may be on its way.
async fn fickle(stream: TcpStream) {
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

/// Load on the only application of this name.
fn of_fickle(app: &str, mesh: Builder) {
    mesh.run(async |mesh: &Mesh| {
        let _app = apps::raw(mesh.listen(app, HTTP).await, fickle);
        let since = Instant::now();
        let during = sent(mesh, n_requests());
        let outcome = load(mesh, "client", mesh.service(app, HTTP), 8, during).await;
        tell(app, &outcome, since);
        outcome.assert_all_ok();
    });
}

#[test]
fn servers_that_close_kept_connections_at_random_fail_no_request() {
    of_fickle("web", patient().workload("client").workload("web"));
}

#[test]
fn the_same_of_servers_without_a_sidecar() {
    of_fickle("legacy", patient().workload("client").unmeshed("legacy"));
}

/// How many workloads there are, and how many of them have endpoints at a time.
const REPLICAS: usize = 5;
const READY: usize = 3;
const REPLACEMENTS: usize = 20;

/// Waits until a workload gets no more requests.
async fn withdrawn(mesh: &Mesh, workload: &str) {
    let mut last = (f64::NAN, f64::NAN);
    eventually("it is withdrawn", async || {
        let at_it = mesh.metric(workload, "request_total", &[]).await;
        let of_all = mesh
            .metric("client", "tulle_http_requests_total", &["direction=\"outbound\""])
            .await;
        if at_it != last.0 {
            last = (at_it, of_all);
        }
        (of_all > last.1 + 50.).then_some(())
    })
    .await;
}

async fn replica(mesh: &Mesh, n: usize) -> App {
    let listener = mesh.listen(&format!("web-{n}"), HTTP).await;
    apps::http(listener, |_| async { Response::new(full("ok")) })
}

#[test]
fn endpoints_are_replaced_twenty_times_under_load_without_a_failure() {
    let mesh = patient().workload("client").replicas("web", REPLICAS);
    mesh.run(async |mesh: &Mesh| {
        let name = |n: usize| format!("pod-web-{}", n % REPLICAS);
        let pods: Vec<_> = (0..REPLICAS).map(|n| mesh.manifest(&name(n))).collect();
        let mut running = VecDeque::new();
        for n in 0..REPLICAS {
            match n < READY {
                true => running.push_back(replica(mesh, n).await),
                false => mesh.remove(&name(n)),
            }
        }
        // Two that are gone at a time are more than a request can get past, and nobody has asked yet.
        let dst = mesh.service("web", HTTP);
        eventually("who is not ready is known to be", async || {
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
            for n in READY..READY + REPLACEMENTS {
                let (new, old) = (n % REPLICAS, n - READY);
                running.push_back(replica(mesh, new).await);
                mesh.write(&name(new), &pods[new]);
                let workload = format!("web-{new}");
                let before = mesh.metric(&workload, "request_total", &[]).await;
                eventually("the new one is used", async || {
                    (mesh.metric(&workload, "request_total", &[]).await > before).then_some(())
                })
                .await;
                // The worst that an application can do: it is gone at once, and the mesh hears of it afterwards.
                running.pop_front().unwrap().kill().await;
                mesh.remove(&name(old));
                withdrawn(mesh, &format!("web-{}", old % REPLICAS)).await;
                sent(mesh, n_requests() * (n + 1 - READY) as f64 / REPLACEMENTS as f64).await;
            }
        };
        let outcome = load(mesh, "client", dst, 8, during).await;
        tell("replacements", &outcome, since);
        outcome.assert_all_ok();
    });
}
