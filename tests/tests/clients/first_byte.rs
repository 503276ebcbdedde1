//! A server-speaks-first application on a port that is not configured as opaque.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tokio::time::Instant;
use tulle_core::netns::Namespace;

use crate::testbed::{SERVER, SERVER_SPEAKS_FIRST, Testbed, service, start_testbed};

#[test]
fn the_greeting_of_a_server_speaks_first_protocol_arrives_without_delay() {
    let Some(testbed) = start_testbed(&[]) else { return };
    let accepted = start_greeting_app(&testbed);
    let (mut stream, took) = testbed
        .client
        .run(|| read_greeting(service(SERVER_SPEAKS_FIRST)))
        .unwrap();
    println!("first byte {took:?} after connect");
    assert!(took < MAX_FIRST_BYTE_DELAY, "{took:?}");
    stream.write_all(b"hello").unwrap();
    let mut back = [0; 5];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"hello");
    let (_, again) = testbed
        .client
        .run(|| read_greeting(service(SERVER_SPEAKS_FIRST)))
        .unwrap();
    println!("first byte of the second connection {again:?} after connect");
    assert_eq!(accepted.load(Ordering::SeqCst), 2);
}

#[test]
fn an_unauthorized_client_never_makes_the_application_accept_a_connection() {
    let Some(testbed) = start_testbed(&[]) else { return };
    let accepted = start_greeting_app(&testbed);
    for input in [
        &b""[..],
        b"hello\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ] {
        assert_refused(&testbed.outside, input);
        assert_eq!(accepted.load(Ordering::SeqCst), 0);
    }
    let port = ["target_port=\"5000\""];
    testbed.wait_for_series("inbound_tcp_authz_deny_total", &port, "tls", &[("no_identity", 2)]);
    testbed.wait_for_series("inbound_http_authz_deny_total", &port, "tls", &[("no_identity", 1)]);
    testbed.wait_for_series("tulle_inbound_denied_total", &port, "reason", &[("no-tls", 3)]);
    // The first connection that the application accepts comes from a client in the mesh.
    testbed
        .client
        .run(|| read_greeting(service(SERVER_SPEAKS_FIRST)))
        .unwrap();
    assert_eq!(accepted.load(Ordering::SeqCst), 1);
}

/// Connects and reads the greeting. Returns the time from the connection to the first byte.
fn read_greeting(to: SocketAddr) -> (TcpStream, Duration) {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
    let connected = Instant::now();
    let mut greeting = [0; HELLO.len()];
    stream.read_exact(&mut greeting[..1]).unwrap();
    let took = connected.elapsed();
    stream.read_exact(&mut greeting[1..]).unwrap();
    assert_eq!(&greeting, HELLO);
    (stream, took)
}

fn assert_refused(from: &Namespace, input: &[u8]) {
    let answer = from.run(|| {
        let mut stream = TcpStream::connect((SERVER, SERVER_SPEAKS_FIRST)).unwrap();
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        stream.write_all(input).unwrap();
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error} after {answer:?}"),
            _ => String::from_utf8(answer).unwrap(),
        }
    });
    let answer = answer.unwrap();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 403"), "{answer:?}");
}

/// Starts an application that sends a greeting and then echoes. Counts connections.
fn start_greeting_app(testbed: &Testbed) -> Arc<AtomicUsize> {
    let listener = testbed
        .server
        .run(|| TcpListener::bind((SERVER, SERVER_SPEAKS_FIRST)))
        .unwrap()
        .unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = accepted.clone();
    // The thread ends with the test's process.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            thread::spawn(move || {
                // An error means that the client has closed the connection.
                let _ = stream.write_all(HELLO).and_then(|()| {
                    let mut from = stream.try_clone()?;
                    std::io::copy(&mut from, &mut stream)
                });
            });
        }
    });
    accepted
}

const HELLO: &[u8; 6] = b"hello\n";
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time from the connection to the first byte. An unoptimised build is slower.
const MAX_FIRST_BYTE_DELAY: Duration = if cfg!(debug_assertions) {
    Duration::from_secs(1)
} else {
    Duration::from_millis(100)
};
