//! Sidecars that receive SIGTERM under load.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tulle_core::netns::Namespace;
use tulle_tests::eventually::eventually_blocking;

use crate::testbed::{HTTP, Testbed, service, start_testbed};

#[test]
fn after_sigterm_a_sidecar_serves_without_failures_while_its_application_listens() {
    let Some(testbed) = start_testbed(&[]) else { return };
    let (stop, n_ok) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let load: Vec<_> = (0..4)
        .map(|_| {
            let (stop, n_ok) = (stop.clone(), n_ok.clone());
            in_client(&testbed, move || {
                while !stop.load(Ordering::Relaxed) {
                    assert_ok(&send_request("/"));
                    n_ok.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    eventually_blocking("requests are answered", || n_ok.load(Ordering::Relaxed) > 20);
    // Clients may not know yet that the sidecar is shutting down, so it still accepts connections.
    terminate(&testbed, "sidecar-server");
    let n_ok_at_sigterm = n_ok.load(Ordering::Relaxed);
    eventually_blocking("requests go on", || n_ok.load(Ordering::Relaxed) > n_ok_at_sigterm + 50);
    stop.store(true, Ordering::Relaxed);
    load.into_iter().for_each(join);
    // A second SIGTERM starts the drain; requests in flight still complete.
    let n_counted_before = n_ok.load(Ordering::Relaxed) as u64;
    assert_graceful_exit(&testbed, "sidecar-server", n_counted_before);
}

/// No application listens on this host, so the sidecar does not wait for one.
#[test]
fn a_clients_sidecar_after_sigterm_completes_all_requests_in_flight() {
    let Some(testbed) = start_testbed(&[]) else { return };
    assert_graceful_exit(&testbed, "sidecar-client", 0);
}

/// Sends SIGTERM while the application processes requests, and waits for their responses and the exit. `n_counted_before` is the
/// number of requests that the server's sidecar has counted already.
fn assert_graceful_exit(testbed: &Testbed, sidecar: &str, n_counted_before: u64) {
    let in_flight: Vec<_> = (0..8)
        .map(|_| in_client(testbed, || assert_ok(&send_request("/delay/2000"))))
        .collect();
    let labels = ["direction=\"inbound\"", "target_port=\"8080\""];
    testbed.wait_for_count("request_total", &labels, n_counted_before + 8);
    let pid = terminate(testbed, sidecar);
    in_flight.into_iter().for_each(join);
    eventually_blocking("the sidecar has ended", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // A process that has exited, whose parent has not yet read its status, is a zombie.
        stat.is_empty() || stat.contains(") Z ")
    });
}

fn terminate(testbed: &Testbed, process: &str) -> Pid {
    let pid = Pid::from_raw(testbed.process(process).id().cast_signed());
    kill(pid, Signal::SIGTERM).unwrap();
    pid
}

fn assert_ok(answer: &str) {
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

/// Runs a closure on a thread in the client's namespace.
fn in_client(testbed: &Testbed, run: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let host: Arc<Namespace> = testbed.client.clone();
    thread::spawn(move || host.run(run).unwrap())
}

fn join(thread: JoinHandle<()>) {
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Sends one request on its own connection and returns the whole response.
fn send_request(path: &str) -> String {
    let to: SocketAddr = service(HTTP);
    let exchange = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(to)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        write!(stream, "GET {path} HTTP/1.1\r\nhost: mesh\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    exchange().unwrap_or_else(|error| error.to_string())
}

const READ_TIMEOUT: Duration = Duration::from_secs(20);
