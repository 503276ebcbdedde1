//! A server that speaks first, on a port of which nobody knows that it does.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tokio::time::Instant;
use tulle_core::netns::Namespace;

use crate::scene::{GREETING, SERVER, Scene, scene, service};

#[test]
fn a_server_that_speaks_first_is_heard_at_once_by_the_first_client_of_fresh_proxies() {
    let Some(scene) = scene(&[]) else { return };
    let accepted = greet(&scene);
    let (mut stream, took) = scene.client.run(|| hear(service(GREETING))).unwrap();
    println!("first byte {took:?} after connect");
    assert!(took < LIMIT, "{took:?}");
    stream.write_all(b"hello").unwrap();
    let mut back = [0; 5];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"hello");
    let (_, again) = scene.client.run(|| hear(service(GREETING))).unwrap();
    println!("first byte of the second connection {again:?} after connect");
    assert_eq!(accepted.load(Ordering::SeqCst), 2);
}

#[test]
fn an_unauthorized_client_never_makes_the_application_accept_a_connection() {
    let Some(scene) = scene(&[]) else { return };
    let accepted = greet(&scene);
    for words in [
        &b""[..],
        b"hello\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ] {
        assert_refused(&scene.outside, words);
        assert_eq!(accepted.load(Ordering::SeqCst), 0);
    }
    let port = ["target_port=\"5000\""];
    scene.counts("inbound_tcp_authz_deny_total", &port, "tls", &[("no_identity", 2)]);
    scene.counts("inbound_http_authz_deny_total", &port, "tls", &[("no_identity", 1)]);
    scene.counts("tulle_inbound_denied_total", &port, "reason", &[("no-tls", 3)]);
    // The first that the application ever sees is one from inside.
    scene.client.run(|| hear(service(GREETING))).unwrap();
    assert_eq!(accepted.load(Ordering::SeqCst), 1);
}

/// Connects, and reads the greeting; how long its first byte took from the connection on.
fn hear(to: SocketAddr) -> (TcpStream, Duration) {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let connected = Instant::now();
    let mut greeting = [0; HELLO.len()];
    stream.read_exact(&mut greeting[..1]).unwrap();
    let took = connected.elapsed();
    stream.read_exact(&mut greeting[1..]).unwrap();
    assert_eq!(&greeting, HELLO);
    (stream, took)
}

fn assert_refused(from: &Namespace, words: &[u8]) {
    let answer = from.run(|| {
        let mut stream = TcpStream::connect((SERVER, GREETING)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(words).unwrap();
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error} after {answer:?}"),
            _ => String::from_utf8(answer).unwrap(),
        }
    });
    let answer = answer.unwrap();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 403"), "{answer:?}");
}

/// Starts the application: says hello and echoes then. Counts connections.
fn greet(scene: &Scene) -> Arc<AtomicUsize> {
    let listener = scene
        .server
        .run(|| TcpListener::bind((SERVER, GREETING)))
        .unwrap()
        .unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = accepted.clone();
    // Ends with the test's process.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            thread::spawn(move || {
                // Clients go away when they have heard enough.
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
const PATIENCE: Duration = Duration::from_secs(10);
/// The promise is for the proxy as it is shipped.
const LIMIT: Duration = if cfg!(debug_assertions) {
    Duration::from_secs(1)
} else {
    Duration::from_millis(100)
};
