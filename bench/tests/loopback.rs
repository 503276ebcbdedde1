//! `tulle-bench serve` and `tulle-bench load` as processes that talk to each other over loopback.

#![allow(clippy::unwrap_used)] // test helpers

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tulle_bench::load::stats::{Counts, Report, ReportKind};

/// A server process. Dropping the value kills it.
struct Server {
    process: Child,
    addrs: Vec<SocketAddr>,
    _dir: TempDir,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ready = dir.path().join("ready");
        let mut process = bench("serve")
            .args(args)
            .arg("--ready-file")
            .arg(&ready)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let lines = eventually(|| {
            assert_eq!(process.try_wait().unwrap(), None, "the server ended");
            std::fs::read_to_string(&ready).ok()
        });
        let addrs = lines
            .lines()
            .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
            .collect();
        Self {
            process,
            addrs,
            _dir: dir,
        }
    }

    fn terminate(&self) {
        kill(Pid::from_raw(self.process.id() as i32), Signal::SIGTERM).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn bench(subcommand: &str) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_BIN_EXE_tulle-bench")));
    command.arg(subcommand);
    command
}

fn eventually<T>(mut condition: impl FnMut() -> Option<T>) -> T {
    for _ in 0..2000 {
        if let Some(value) = condition() {
            return value;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the condition did not hold within 20 seconds");
}

/// Runs the load generator and returns its reports; the last one is the total.
fn reports(target: &str, args: &str) -> Vec<Report> {
    let output = bench("load")
        .arg(target)
        .args(args.split_whitespace())
        .arg("--json")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn load(target: &str, args: &str) -> Report {
    reports(target, args).pop().unwrap()
}

fn counts(name: &str, n: u64) -> Counts {
    Counts::from([(name.to_owned(), n)])
}

#[test]
fn every_protocol_echoes_its_bytes() {
    let server = Server::start(&["--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--name", "one"]);
    let (http, tcp) = (format!("http://{}/echo", server.addrs[0]), server.addrs[1].to_string());
    let ws = format!("ws://{}/ws", server.addrs[0]);
    for (target, args, outcome, sent, received) in [
        (&http, "--protocol http1 --body-size 1000", "2xx", 1000, 1000),
        (
            &http,
            "--protocol http2 --body-size 1000 --streams 5",
            "2xx",
            1000,
            1000,
        ),
        (
            &http,
            "--protocol grpc --body-size 1000 --streams 5",
            "grpc ok",
            1000,
            1000,
        ),
        (
            &http,
            "--protocol grpc --grpc-method server-stream --messages 3 --body-size 10",
            "grpc ok",
            10,
            30,
        ),
        (
            &http,
            "--protocol grpc --grpc-method client-stream --messages 3 --body-size 10",
            "grpc ok",
            30,
            0,
        ),
        (
            &http,
            "--protocol grpc --grpc-method bidi --messages 3 --body-size 10",
            "grpc ok",
            30,
            30,
        ),
        (
            &ws,
            "--protocol ws --body-size 1000 --connections 2",
            "echoed",
            1000,
            1000,
        ),
        (
            &tcp,
            "--protocol tcp --body-size 300000 --connections 2",
            "echoed",
            300_000,
            300_000,
        ),
    ] {
        let report = load(target, &format!("{args} --requests 100"));
        assert_eq!(report.outcomes, counts(outcome, 100), "{args}: {report}");
        assert_eq!(
            (report.sent_bytes, report.received_bytes),
            (100 * sent, 100 * received),
            "{args}"
        );
        if target != &tcp {
            assert_eq!(report.replicas, counts("one", 100), "{args}");
        }
    }
}

#[test]
fn each_path_of_the_http_server_has_its_own_response() {
    let server = Server::start(&["--http", "127.0.0.1:0", "--name", "r1"]);
    let addr = server.addrs[0];
    for protocol in ["http1", "http2"] {
        let report = load(
            &format!("{addr}/bytes/1000000"),
            &format!("--protocol {protocol} --requests 3"),
        );
        assert_eq!((report.succeeded, report.received_bytes), (3, 3_000_000), "{protocol}");
        let report = load(
            &format!("{addr}/delay/30"),
            &format!("--protocol {protocol} --requests 1"),
        );
        assert!(report.latency_us.unwrap().p50 >= 30_000.0, "{protocol}: {report}");
        for (path, outcome) in [
            ("status/204", "2xx"),
            ("status/418", "4xx"),
            ("status/101", "4xx"),
            ("none", "4xx"),
        ] {
            let report = load(
                &format!("{addr}/{path}"),
                &format!("--protocol {protocol} --requests 1"),
            );
            assert_eq!(report.outcomes, counts(outcome, 1), "{protocol} {path}");
        }
    }
    let (head, body) = get(addr, "/headers", "x-one: 1\r\nx-one: 2\r\n");
    assert!(head.contains("x-replica: r1"), "{head}");
    let fields: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(fields["x-one"], serde_json::json!(["1", "2"]));
    let (head, _) = get(addr, "/ws", "");
    assert!(head.starts_with("HTTP/1.1 426"), "{head}");
}

/// Sends a GET and returns the headers and the body of the response.
fn get(addr: SocketAddr, path: &str, headers: &str) -> (String, String) {
    let mut stream = TcpStream::connect(addr).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

#[test]
fn a_new_connection_for_each_request_works_for_every_protocol() {
    let server = Server::start(&["--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0"]);
    let http = server.addrs[0].to_string();
    for (target, protocol) in [
        (&http, "http1"),
        (&http, "http2"),
        (&http, "grpc"),
        (&http, "ws"),
        (&server.addrs[1].to_string(), "tcp"),
    ] {
        let report = load(
            target,
            &format!("--protocol {protocol} --reconnect --requests 20 --body-size 5"),
        );
        // `/` accepts any body.
        assert_eq!((report.requests, report.failed), (20, 0), "{protocol}: {report}");
    }
}

#[test]
fn the_greeting_contains_the_name_of_the_server() {
    let server = Server::start(&["--tcp-speaks-first", "127.0.0.1:0", "--name", "greeter"]);
    let target = server.addrs[0].to_string();
    let report = load(
        &target,
        "--protocol tcp --expect-greeting hello --body-size 64 --requests 10",
    );
    assert_eq!((report.succeeded, report.replicas), (10, counts("greeter", 10)));
    let report = load(&target, "--protocol tcp --expect-greeting 220 --reconnect --requests 3");
    assert_eq!(report.outcomes, counts("wrong answer", 3));
}

#[test]
fn failures_are_counted_by_kind_and_never_sent_again() {
    let server = Server::start(&["--http", "127.0.0.1:0"]);
    let addr = server.addrs[0];
    let report = load(&format!("{addr}/status/503"), "--requests 7");
    assert_eq!(
        (report.outcomes, report.errors),
        (counts("5xx", 7), counts("status 503", 7))
    );
    let report = load(&format!("{addr}/delay/5000"), "--requests 2 --timeout 50ms");
    assert_eq!(report.outcomes, counts("timeout", 2));
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let report = load(&free.to_string(), "--requests 3");
    assert_eq!(report.errors, counts("connect error: refused", 3));
}

#[test]
fn an_open_loop_measures_latency_from_the_time_a_request_was_due() {
    let server = Server::start(&["--http", "127.0.0.1:0", "--delay", "20ms"]);
    // One connection carries 50 requests per second, but 100 are due within one second. All requests need two seconds. The last one
    // is due after almost one second, so it waits for about one second.
    let report = load(
        &server.addrs[0].to_string(),
        "--rate 100 --connections 1 --duration 1s --timeout 60s",
    );
    assert_eq!((report.requests, report.succeeded), (100, 100), "{report}");
    let latency = report.latency_us.unwrap();
    assert!(latency.p50 > 300_000.0 && latency.max > 700_000.0, "{latency:?}");
}

#[test]
fn an_open_loop_with_enough_connections_keeps_its_rate() {
    let server = Server::start(&["--http", "127.0.0.1:0", "--delay", "20ms"]);
    let report = load(&server.addrs[0].to_string(), "--rate 200 --duration 1s");
    assert_eq!((report.requests, report.succeeded), (200, 200), "{report}");
    assert!(report.latency_us.unwrap().p50 < 200_000.0, "{report}");
}

#[test]
fn interval_reports_add_up_to_the_total() {
    let server = Server::start(&["--http", "127.0.0.1:0"]);
    let args = "--rate 300 --duration 1s --report-every 200ms --threads 2 --connections 4";
    let reports = reports(&server.addrs[0].to_string(), args);
    let (total, intervals) = reports.split_last().unwrap();
    assert!(
        intervals.len() >= 3 && intervals.iter().all(|report| report.kind == ReportKind::Interval),
        "{reports:?}"
    );
    assert_eq!(total.kind, ReportKind::Total);
    assert_eq!(
        intervals.iter().map(|report| report.requests).sum::<u64>(),
        total.requests
    );
    assert_eq!(total.requests, 300);
}

#[test]
fn a_terminated_server_finishes_its_requests_and_ends() {
    let mut server = Server::start(&["--http", "127.0.0.1:0", "--delay", "300ms"]);
    let addr = server.addrs[0];
    let target = addr.to_string();
    let client = std::thread::spawn(move || load(&target, "--requests 1"));
    // The connection is established: either the server accepts it and serves its request, or it is reset and the test fails.
    eventually(|| has_established_connection(addr).then_some(()));
    server.terminate();
    assert_eq!(client.join().unwrap().outcomes, counts("2xx", 1));
    assert!(eventually(|| server.process.try_wait().unwrap()).success());
    assert!(TcpStream::connect(addr).is_err());
}

/// Whether the kernel has an established connection to `addr`.
fn has_established_connection(addr: SocketAddr) -> bool {
    let port = format!(":{:04X}", addr.port());
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    table.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, _, state) = (fields.next(), fields.next(), fields.next());
        local.is_some_and(|local| local.ends_with(&port)) && state == Some("01")
    })
}

#[test]
fn a_terminated_load_still_reports() {
    let server = Server::start(&["--http", "127.0.0.1:0"]);
    let mut process = bench("load")
        .arg(server.addrs[0].to_string())
        .args(["--rate", "500", "--duration", "60s", "--report-every", "50ms", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(process.stdout.take().unwrap()));
    lines.next().unwrap().unwrap();
    kill(Pid::from_raw(process.id() as i32), Signal::SIGINT).unwrap();
    let last: Report = serde_json::from_str(&lines.last().unwrap().unwrap()).unwrap();
    assert!(process.wait().unwrap().success());
    assert_eq!((last.kind, last.failed), (ReportKind::Total, 0), "{last}");
}
