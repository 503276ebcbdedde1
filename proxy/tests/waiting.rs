//! `linkerd-await` as hooks and jobs call it, with an admin server in place of a proxy.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Starts a server that responds with these statuses in order, and then always with the last one. The receiver gets each request
/// line.
fn start_admin_server(statuses: &'static [u16]) -> (u16, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, request_lines) = channel();
    thread::spawn(move || {
        let mut statuses = statuses.iter().copied().peekable();
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            let status = *statuses.peek().unwrap();
            if statuses.len() > 1 {
                statuses.next();
            }
            let _ = write!(&stream, "HTTP/1.1 {status} -\r\ncontent-length: 0\r\n\r\n");
            if sender.send(line.trim().to_owned()).is_err() {
                return;
            }
        }
    });
    (port, request_lines)
}

fn linkerd_await(port: u16, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkerd-await"));
    command
        .args([format!("--port={port}"), "--backoff=10ms".to_owned()])
        .args(arguments);
    command
        .env_remove("LINKERD_AWAIT_DISABLED")
        .env_remove("LINKERD_AWAIT_VERBOSE")
        .env_remove("LINKERD_DISABLED");
    command
}

fn run_linkerd_await(port: u16, arguments: &[&str], disabled: Option<&str>) -> Output {
    let mut command = linkerd_await(port, arguments);
    if let Some(reason) = disabled {
        command.env("LINKERD_AWAIT_DISABLED", reason);
    }
    command.output().unwrap()
}

#[test]
fn the_program_runs_after_the_proxy_is_ready_and_its_exit_code_is_returned() {
    let (port, request_lines) = start_admin_server(&[503, 503, 200]);
    let output = run_linkerd_await(
        port,
        &["--timeout=2m", "--", "sh", "-c", "echo $0 ran; exit 3", "it"],
        None,
    );
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(3), b"it ran\n".as_slice())
    );
    assert_eq!(request_lines.try_iter().collect::<Vec<_>>(), ["GET /ready HTTP/1.1"; 3]);
}

#[test]
fn without_a_program_it_only_waits() {
    let (port, _request_lines) = start_admin_server(&[200]);
    let output = run_linkerd_await(port, &["--timeout=2m"], None);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_timeout_fails_unless_timeout_fatal_is_false() {
    let (port, _request_lines) = start_admin_server(&[503]);
    let program = ["--timeout=50ms", "--", "echo", "ran"];
    let output = run_linkerd_await(port, &program, None);
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(69), b"".as_slice())
    );
    let output = run_linkerd_await(port, &[&["--timeout-fatal=false"], program.as_slice()].concat(), None);
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(0), b"ran\n".as_slice())
    );
}

#[test]
fn with_shutdown_the_proxy_is_shut_down_after_the_program() {
    let (port, request_lines) = start_admin_server(&[200]);
    let output = run_linkerd_await(port, &["--shutdown", "--", "sh", "-c", "exit 4"], None);
    assert_eq!(output.status.code(), Some(4));
    assert_eq!(
        request_lines.try_iter().collect::<Vec<_>>(),
        ["GET /ready HTTP/1.1", "POST /shutdown HTTP/1.1"]
    );
}

#[test]
fn with_shutdown_sigterm_ends_the_program_and_then_the_proxy() {
    let (port, request_lines) = start_admin_server(&[200]);
    let program = "trap 'echo terminated; exit 5' TERM; echo started; while :; do sleep 0.05; done";
    let mut child = linkerd_await(port, &["--shutdown", "--", "sh", "-c", program])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "started");
    kill(Pid::from_raw(child.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "terminated");
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert_eq!(
        request_lines.try_iter().collect::<Vec<_>>(),
        ["GET /ready HTTP/1.1", "POST /shutdown HTTP/1.1"]
    );
}

#[test]
fn with_verbose_the_reason_of_a_skipped_check_is_printed() {
    let (port, _request_lines) = start_admin_server(&[503]);
    let output = run_linkerd_await(port, &["--verbose", "--", "true"], Some("no proxy here"));
    let printed = String::from_utf8(output.stderr).unwrap();
    assert_eq!(printed, "linkerd-await: does not wait for the proxy: no proxy here\n");
}

#[test]
fn no_request_is_sent_if_linkerd_await_is_disabled() {
    let (port, request_lines) = start_admin_server(&[503]);
    let output = run_linkerd_await(port, &["--shutdown", "--", "echo", "ran"], Some("no proxy here"));
    assert_eq!(output.stdout, b"ran\n");
    assert!(request_lines.try_recv().is_err());
}
