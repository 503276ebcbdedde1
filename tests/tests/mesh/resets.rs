//! A byte stream that breaks looks like one that breaks, and a dial that fails like one that fails: never like a clean end.

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
use tulle_tests::apps;
use tulle_tests::client::{self, full, read_until};
use tulle_tests::mesh::{Builder, HTTP, Mesh, OPAQUE, STRANGER, TCP, mesh};

fn workloads() -> Builder {
    mesh().workload("client").workload("web").unmeshed("legacy")
}

/// Has a connection end with a reset when it is dropped.
fn reset(stream: TcpStream) {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

/// How a connection ends, with what came before.
async fn end(stream: &mut TcpStream) -> Result<usize, ErrorKind> {
    let mut all = Vec::new();
    stream.read_to_end(&mut all).await.map_err(|error| error.kind())
}

/// A way to bytes.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// From `client` to a service, by one proxy or two, detected or opaque.
    Service(&'static str, u16),
    /// From `client` to a workload by its address.
    Address(&'static str, u16),
    /// From outside to a port of `web`.
    Outside(u16),
}

const WAYS: [Way; 8] = [
    Way::Service("web", TCP),
    Way::Service("web", OPAQUE),
    Way::Service("legacy", TCP),
    Way::Service("legacy", OPAQUE),
    Way::Address("web", TCP),
    Way::Address("legacy", TCP),
    Way::Outside(TCP),
    Way::Outside(OPAQUE),
];

impl Way {
    async fn open(self, mesh: &Mesh) -> io::Result<TcpStream> {
        match self {
            Self::Service(app, port) => mesh.try_dial("client", mesh.service(app, port)).await,
            Self::Address(workload, port) => mesh.try_dial("client", (mesh.ip(workload), port).into()).await,
            Self::Outside(port) => mesh.try_arrive(STRANGER, "web", port).await,
        }
    }
}

#[test]
fn a_reset_of_the_application_is_a_reset_for_its_client() {
    workloads().run(async |mesh: &Mesh| {
        let mut apps = Vec::new();
        for workload in ["web", "legacy"] {
            for port in [TCP, OPAQUE] {
                let app = apps::raw(mesh.listen(workload, port).await, |mut stream| async move {
                    read_until(&mut stream, "\n").await;
                    stream.write_all(b"half of it").await.unwrap();
                    read_until(&mut stream, "\n").await;
                    reset(stream);
                });
                apps.push(app);
            }
        }
        for way in WAYS {
            let mut client = way.open(mesh).await.unwrap();
            client.write_all(b"\x01no HTTP at all\n").await.unwrap();
            client.read_exact(&mut [0; 10]).await.unwrap();
            client.write_all(b"and more\n").await.unwrap();
            assert_eq!(end(&mut client).await, Err(ErrorKind::ConnectionReset), "{way:?}");
        }
    });
}

#[test]
fn a_reset_of_the_client_is_a_reset_for_the_application() {
    workloads().run(async |mesh: &Mesh| {
        let (tell, mut told) = mpsc::channel(1);
        let mut apps = Vec::new();
        for workload in ["web", "legacy"] {
            for port in [TCP, OPAQUE] {
                let tell = tell.clone();
                let app = apps::raw(mesh.listen(workload, port).await, move |mut stream| {
                    let tell = tell.clone();
                    async move {
                        read_until(&mut stream, "\n").await;
                        stream.write_all(b"half of it").await.unwrap();
                        tell.send(end(&mut stream).await).await.unwrap();
                    }
                });
                apps.push(app);
            }
        }
        for way in WAYS {
            let mut client = way.open(mesh).await.unwrap();
            client.write_all(b"\x01no HTTP at all\n").await.unwrap();
            client.read_exact(&mut [0; 10]).await.unwrap();
            reset(client);
            assert_eq!(told.recv().await, Some(Err(ErrorKind::ConnectionReset)), "{way:?}");
        }
    });
}

#[test]
fn a_connection_to_nobody_is_reset_whether_its_client_speaks_or_not() {
    workloads().run(async |mesh: &Mesh| {
        for says in [&b"\x01no HTTP at all\n"[..], b""] {
            for way in WAYS {
                let began_at = Instant::now();
                // Where nobody has to be heard first, the reset may come as soon as the connection is there.
                let refused = async {
                    let mut client = way.open(mesh).await?;
                    client.write_all(says).await?;
                    client.read_to_end(&mut Vec::new()).await
                };
                let error = refused.await.expect_err("a reset");
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{way:?}");
                let elapsed = began_at.elapsed();
                assert!(elapsed < Duration::from_millis(1900), "{way:?}, {says:?}: {elapsed:?}");
            }
        }
        // Requests are still told why.
        let answer = mesh.get("client", (mesh.ip("legacy"), HTTP).into(), "/").await;
        assert_eq!((answer.status.as_u16(), answer.cause()), (502, "connect-refused"));
    });
}

/// A listener that accepts nobody, and whose queue is full: what dials it gets no answer.
fn unanswering(addr: SocketAddr) -> (Socket, Vec<Socket>) {
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

#[test]
fn an_address_that_does_not_answer_is_dialled_once() {
    workloads().run(async |mesh: &Mesh| {
        let addr = SocketAddr::from(([10, 66, 7, 1], TCP));
        let _nobody = unanswering(addr);
        for says in [&b"\x01no HTTP at all\n"[..], b""] {
            let began_at = Instant::now();
            let mut client = mesh.dial("client", addr).await;
            client.write_all(says).await.unwrap();
            assert_eq!(end(&mut client).await, Err(ErrorKind::ConnectionReset), "{says:?}");
            // A dial takes a second.
            let elapsed = began_at.elapsed();
            assert!(elapsed > Duration::from_millis(900), "{says:?}: {elapsed:?}");
            assert!(elapsed < Duration::from_millis(1900), "{says:?}: {elapsed:?}");
        }
    });
}

#[test]
fn an_application_whose_queue_is_full_for_a_moment_is_waited_for() {
    // As the chart has it.
    let mesh = workloads().env("INBOUND_CONNECT_TIMEOUT", "100ms");
    mesh.run(async |mesh: &Mesh| {
        let (listener, waiting) = unanswering(mesh.app("web", HTTP));
        let mut asking = pin!(client::get(mesh.arrive(STRANGER, "web", HTTP).await, "/"));
        let too_early = tokio::time::timeout(Duration::from_millis(500), &mut asking).await;
        assert!(too_early.is_err(), "{}", too_early.unwrap().status);
        drop(waiting);
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener.into()).unwrap();
        let _app = apps::http(listener, |_| std::future::ready(Response::new(full("at last"))));
        assert_eq!(asking.await.text(), "at last");
    });
}

#[test]
fn half_closes_are_still_passed_on() {
    workloads().run(async |mesh: &Mesh| {
        let mut apps = Vec::new();
        for workload in ["web", "legacy"] {
            for port in [TCP, OPAQUE] {
                let app = apps::raw(mesh.listen(workload, port).await, |mut stream| async move {
                    let mut all = Vec::new();
                    stream.read_to_end(&mut all).await.unwrap();
                    stream.write_all(&all).await.unwrap();
                });
                apps.push(app);
            }
        }
        for way in WAYS {
            let mut client = way.open(mesh).await.unwrap();
            client.write_all(b"\x01no HTTP at all\n").await.unwrap();
            client.shutdown().await.unwrap();
            assert_eq!(end(&mut client).await, Ok(16), "{way:?}");
        }
    });
}
