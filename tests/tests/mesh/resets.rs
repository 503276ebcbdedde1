//! A reset of a byte stream is passed on as a reset, and a failed dial or handshake ends with one, never with a clean end.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use http::Response;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tulle_core::names::port;
use tulle_tests::apps;
use tulle_tests::client::{self, Http2, full, http2_request, read_until};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Builder, DETECTED_TCP, HTTP, Mesh, OPAQUE, UNMESHED_IP, identity, mesh};

use crate::scripted_policies::client_hello;

fn workloads() -> Builder {
    mesh().workload("client").workload("web").unmeshed("legacy")
}

/// Resets a connection: drops it with a linger time of 0.
fn reset(stream: TcpStream) {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

/// Reads to the end; returns the number of bytes, or the kind of the error that ended the stream.
async fn read_to_end_or_error(stream: &mut TcpStream) -> Result<usize, ErrorKind> {
    let (all, end) = read_to_end(stream).await;
    end.map(|()| all.len())
}

/// Reads to the end; returns the bytes, also those before an error.
async fn read_to_end(stream: &mut TcpStream) -> (Vec<u8>, Result<(), ErrorKind>) {
    let mut all = Vec::new();
    let end = stream.read_to_end(&mut all).await.map_err(|error| error.kind());
    (all, end.map(drop))
}

/// A path of a byte stream through the mesh.
#[derive(Clone, Copy, Debug)]
enum ConnectionPath {
    /// From `client` to a service, through one or two proxies, with protocol detection or opaque.
    Service(&'static str, u16),
    /// From `client` to the address of a workload.
    Address(&'static str, u16),
    /// From outside the mesh to a port of `web`.
    Outside(u16),
}

const CONNECTION_PATHS: [ConnectionPath; 8] = [
    ConnectionPath::Service("web", DETECTED_TCP),
    ConnectionPath::Service("web", OPAQUE),
    ConnectionPath::Service("legacy", DETECTED_TCP),
    ConnectionPath::Service("legacy", OPAQUE),
    ConnectionPath::Address("web", DETECTED_TCP),
    ConnectionPath::Address("legacy", DETECTED_TCP),
    ConnectionPath::Outside(DETECTED_TCP),
    ConnectionPath::Outside(OPAQUE),
];

impl ConnectionPath {
    async fn open(self, mesh: &Mesh) -> io::Result<TcpStream> {
        match self {
            Self::Service(app, port) => mesh.try_dial("client", mesh.service_addr(app, port)).await,
            Self::Address(workload, port) => mesh.try_dial("client", (mesh.ip(workload), port).into()).await,
            Self::Outside(port) => mesh.try_dial_inbound(UNMESHED_IP, "web", port).await,
        }
    }
}

#[test]
fn a_reset_of_the_application_is_a_reset_for_its_client() {
    workloads().run(async |mesh: &Mesh| {
        let mut apps = Vec::new();
        for workload in ["web", "legacy"] {
            for port in [DETECTED_TCP, OPAQUE] {
                let app = apps::serve_tcp(mesh.listen(workload, port).await, |mut stream| async move {
                    read_until(&mut stream, "\n").await;
                    stream.write_all(b"half of it").await.unwrap();
                    read_until(&mut stream, "\n").await;
                    reset(stream);
                });
                apps.push(app);
            }
        }
        for path in CONNECTION_PATHS {
            let mut client = path.open(mesh).await.unwrap();
            client.write_all(b"\x01no HTTP at all\n").await.unwrap();
            client.read_exact(&mut [0; 10]).await.unwrap();
            client.write_all(b"and more\n").await.unwrap();
            assert_eq!(
                read_to_end_or_error(&mut client).await,
                Err(ErrorKind::ConnectionReset),
                "{path:?}"
            );
        }
    });
}

#[test]
fn a_reset_of_the_client_is_a_reset_for_the_application() {
    workloads().run(async |mesh: &Mesh| {
        let (end_tx, mut end_rx) = mpsc::channel(1);
        let mut apps = Vec::new();
        for workload in ["web", "legacy"] {
            for port in [DETECTED_TCP, OPAQUE] {
                let end_tx = end_tx.clone();
                let app = apps::serve_tcp(mesh.listen(workload, port).await, move |mut stream| {
                    let end_tx = end_tx.clone();
                    async move {
                        read_until(&mut stream, "\n").await;
                        stream.write_all(b"half of it").await.unwrap();
                        end_tx.send(read_to_end_or_error(&mut stream).await).await.unwrap();
                    }
                });
                apps.push(app);
            }
        }
        for path in CONNECTION_PATHS {
            let mut client = path.open(mesh).await.unwrap();
            client.write_all(b"\x01no HTTP at all\n").await.unwrap();
            client.read_exact(&mut [0; 10]).await.unwrap();
            reset(client);
            assert_eq!(end_rx.recv().await, Some(Err(ErrorKind::ConnectionReset)), "{path:?}");
        }
    });
}

#[test]
fn a_connection_without_a_listener_is_reset_even_if_its_client_is_silent() {
    workloads().run(async |mesh: &Mesh| {
        for sent in [&b"\x01no HTTP at all\n"[..], b""] {
            for path in CONNECTION_PATHS {
                let began_at = Instant::now();
                // If the proxy dials before it reads, the reset may come right after the connection is established.
                let refused = async {
                    let mut client = path.open(mesh).await?;
                    client.write_all(sent).await?;
                    client.read_to_end(&mut Vec::new()).await
                };
                let error = refused.await.expect_err("a reset");
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{path:?}");
                let elapsed = began_at.elapsed();
                assert!(elapsed < Duration::from_millis(1900), "{path:?}, {sent:?}: {elapsed:?}");
            }
        }
        // HTTP requests still get the cause.
        let answer = mesh.get("client", (mesh.ip("legacy"), HTTP).into(), "/").await;
        assert_eq!((answer.status.as_u16(), answer.cause()), (502, "connect-refused"));
    });
}

/// A listener with a full accept queue, so that dialling it times out.
fn full_listener(addr: SocketAddr) -> (Socket, Vec<Socket>) {
    let socket = |nonblocking| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(nonblocking).unwrap();
        socket
    };
    let listener = socket(false);
    listener.bind(&addr.into()).unwrap();
    listener.listen(0).unwrap();
    let waiting = (0..4).map(|_| {
        let client = socket(true);
        let _in_progress = client.connect(&addr.into());
        client
    });
    let waiting = waiting.collect();
    (listener, waiting)
}

/// Type and length of the last TLS record; `None` if there is none, or if it is incomplete.
fn last_record(mut bytes: &[u8]) -> Option<(u8, usize)> {
    let mut last = None;
    while !bytes.is_empty() {
        let [kind, _, _, high, low, rest @ ..] = bytes else {
            return None;
        };
        let len = usize::from(u16::from_be_bytes([*high, *low]));
        bytes = rest.get(len..)?;
        last = Some((*kind, len));
    }
    last
}

/// Type and length of a TLS 1.3 record with an alert: two bytes, the inner type and the tag of the cipher. Encrypted records of the
/// handshake are longer.
const ENCRYPTED_ALERT: (u8, usize) = (23, 2 + 1 + 16);

#[test]
fn a_tls_handshake_that_fails_ends_with_a_reset_on_every_port() {
    let mesh = mesh().workload("web").env("TAP_SVC_NAME", &identity("client"));
    mesh.run(async |mesh: &Mesh| {
        let mut streams = vec![("redirected", mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await)];
        for (name, port) in [("direct", port::INBOUND), ("admin", port::ADMIN), ("tap", port::TAP)] {
            streams.push((name, TcpStream::connect((mesh.ip("web"), port)).await.unwrap()));
        }
        let invalid = [&client_hello(&identity("web"))[..], b"not a TLS record"].concat();
        for (name, mut stream) in streams {
            stream.write_all(&invalid).await.unwrap();
            let (received, end) = read_to_end(&mut stream).await;
            assert_eq!(end, Err(ErrorKind::ConnectionReset), "{name}");
            assert_eq!(last_record(&received), Some(ENCRYPTED_ALERT), "{name}: {received:?}");
        }
    });
}

#[test]
fn an_address_that_does_not_answer_is_dialled_once() {
    workloads().run(async |mesh: &Mesh| {
        let addr = SocketAddr::from(([10, 66, 7, 1], DETECTED_TCP));
        let _full = full_listener(addr);
        for sent in [&b"\x01no HTTP at all\n"[..], b""] {
            let began_at = Instant::now();
            let mut client = mesh.dial("client", addr).await;
            client.write_all(sent).await.unwrap();
            assert_eq!(
                read_to_end_or_error(&mut client).await,
                Err(ErrorKind::ConnectionReset),
                "{sent:?}"
            );
            // The connect timeout is one second.
            let elapsed = began_at.elapsed();
            assert!(elapsed > Duration::from_millis(900), "{sent:?}: {elapsed:?}");
            assert!(elapsed < Duration::from_millis(1900), "{sent:?}: {elapsed:?}");
        }
    });
}

#[test]
fn the_proxy_waits_for_a_full_accept_queue() {
    // The default of the chart.
    let mesh = workloads().env("INBOUND_CONNECT_TIMEOUT", "100ms");
    mesh.run(async |mesh: &Mesh| {
        let (listener, waiting) = full_listener(mesh.app_addr("web", HTTP));
        let mut response = pin!(client::get(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await, "/"));
        let too_early = tokio::time::timeout(Duration::from_millis(500), &mut response).await;
        assert!(too_early.is_err(), "{}", too_early.unwrap().status);
        drop(waiting);
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener.into()).unwrap();
        let _app = apps::serve_http(listener, |_| std::future::ready(Response::new(full("at last"))));
        assert_eq!(response.await.text(), "at last");
    });
}

#[test]
fn half_closes_are_still_passed_on() {
    workloads().run(async |mesh: &Mesh| {
        let mut apps = Vec::new();
        for workload in ["web", "legacy"] {
            for port in [DETECTED_TCP, OPAQUE] {
                let app = apps::serve_tcp(mesh.listen(workload, port).await, |mut stream| async move {
                    let mut all = Vec::new();
                    stream.read_to_end(&mut all).await.unwrap();
                    stream.write_all(&all).await.unwrap();
                });
                apps.push(app);
            }
        }
        for path in CONNECTION_PATHS {
            let mut client = path.open(mesh).await.unwrap();
            client.write_all(b"\x01no HTTP at all\n").await.unwrap();
            client.shutdown().await.unwrap();
            assert_eq!(read_to_end_or_error(&mut client).await, Ok(16), "{path:?}");
        }
    });
}

#[test]
fn an_http2_connection_to_an_address_that_refuses_connections_is_reset() {
    workloads().run(async |mesh: &Mesh| {
        let dst: SocketAddr = (mesh.ip("legacy"), HTTP).into();
        // The first client learns the cause.
        let mut http = Http2::handshake(mesh.dial("client", dst).await).await;
        let rsp = http.fetch(http2_request("/")).await.unwrap();
        assert_eq!(rsp.cause(), "connect-refused");
        eventually("the connection is closed", async || (!http.is_open()).then_some(())).await;
        // The next connection is reset before it has a request, so that its client does not believe that requests are accepted.
        let mut client = mesh.dial("client", dst).await;
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        assert_eq!(read_to_end_or_error(&mut client).await, Err(ErrorKind::ConnectionReset));
        // An HTTP/1 client has no other requests on the connection, so it gets a response, which contains the cause.
        let rsp = client::get(mesh.dial("client", dst).await, "/").await;
        assert_eq!(rsp.cause(), "connect-refused");
        let _app = apps::serve_http(mesh.listen("legacy", HTTP).await, async |_| {
            Response::new(client::empty())
        });
        let mut http = Http2::handshake(mesh.dial("client", dst).await).await;
        let rsp = http.fetch(http2_request("/")).await.unwrap();
        assert!(rsp.status.is_success(), "{rsp:?}");
    });
}
