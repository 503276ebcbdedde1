//! HTTP/2 servers that close connections, allow few streams, or refuse streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use h2::Reason;
use http::Response;
use tokio::net::TcpStream;
use tokio::sync::Barrier;
use tulle_tests::apps;
use tulle_tests::client::{Http2, full, http2_request};
use tulle_tests::mesh::{HTTP, Mesh, UNMESHED_IP, mesh};

use crate::http2::{END_HEADERS, END_STREAM, Frame, Frames, GOAWAY, HEADERS, OK};

/// Answers the first request of each connection. At the second one it sends GOAWAY without processing it.
async fn answer_one_request(stream: TcpStream) {
    let mut frames = Frames::server_handshake(stream, b"").await;
    let mut answered = None;
    while let Some(frame) = frames.next().await {
        match (frame.kind, answered) {
            (HEADERS, None) => {
                let head = Frame::new(HEADERS, END_HEADERS | END_STREAM, frame.stream, &[OK]);
                frames.send([head]).await;
                answered = Some(frame.stream);
            }
            (HEADERS, Some(last)) => {
                let payload = [last.to_be_bytes(), [0; 4]].concat();
                frames.send([Frame::new(GOAWAY, 0, 0, &payload)]).await;
            }
            _ => {}
        }
    }
}

#[test]
fn streams_above_the_last_one_of_a_goaway_are_resent() {
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    mesh.run(async |mesh: &Mesh| {
        let _web = apps::serve_tcp(mesh.listen("web", HTTP).await, answer_one_request);
        let _legacy = apps::serve_tcp(mesh.listen("legacy", HTTP).await, answer_one_request);
        for stream in [
            mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
            mesh.dial("client", mesh.service_addr("web", HTTP)).await,
            mesh.dial("client", mesh.service_addr("legacy", HTTP)).await,
            // A destination without a policy.
            mesh.dial("client", (mesh.ip("legacy"), HTTP).into()).await,
        ] {
            let client = Http2::handshake(stream).await;
            for _ in 0..10 {
                // POST requests may be resent too, because the server has not processed them.
                let calls = (0..2).map(|_| {
                    let mut client = client.clone();
                    async move {
                        let req = http::Request::post("http://web.test/").version(http::Version::HTTP_2);
                        client.fetch(req.body(full("hello")).unwrap()).await
                    }
                });
                for answer in join_all(calls).await {
                    let answer = answer.unwrap();
                    assert_eq!((answer.status.as_u16(), answer.cause()), (200, ""));
                }
            }
        }
    });
}

#[test]
fn an_unprocessed_stream_that_cannot_be_resent_is_refused() {
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    mesh.run(async |mesh: &Mesh| {
        let _web = apps::serve_tcp(mesh.listen("web", HTTP).await, answer_one_request);
        let _legacy = apps::serve_tcp(mesh.listen("legacy", HTTP).await, answer_one_request);
        for stream in [
            mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
            mesh.dial("client", mesh.service_addr("web", HTTP)).await,
            mesh.dial("client", mesh.service_addr("legacy", HTTP)).await,
        ] {
            let (client, connection) = h2::client::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            let mut client = client.ready().await.unwrap();
            assert_eq!(
                client
                    .send_request(http2_request("/").map(drop), true)
                    .unwrap()
                    .0
                    .await
                    .unwrap()
                    .status(),
                200
            );
            // The content-length exceeds the limit of replayed bodies.
            let req = http::Request::post("http://web.test/").version(http::Version::HTTP_2);
            let req = req.header("content-length", 100_000).body(()).unwrap();
            let (rsp, mut body) = client.send_request(req, false).unwrap();
            body.send_data(vec![0; 100_000].into(), true).unwrap();
            let error = rsp.await.unwrap_err();
            assert_eq!(
                (error.is_reset(), error.reason()),
                (true, Some(Reason::REFUSED_STREAM)),
                "{error}"
            );
        }
    });
}

/// Counts each request and closes its connection.
fn close_at_request(requests: &Arc<AtomicUsize>) -> impl Fn(TcpStream) -> BoxFuture<'static, ()> + Send + use<> {
    let requests = requests.clone();
    move |stream| {
        let requests = requests.clone();
        Box::pin(async move {
            let mut frames = Frames::server_handshake(stream, b"").await;
            while let Some(frame) = frames.next().await {
                if frame.kind == HEADERS {
                    requests.fetch_add(1, Ordering::Relaxed);
                    return;
                }
            }
        })
    }
}

#[test]
fn an_endpoint_that_loses_connections_is_ejected() {
    let annotations = "balancer.linkerd.io/failure-accrual: consecutive, \
        balancer.linkerd.io/failure-accrual-consecutive-max-failures: '3', \
        balancer.linkerd.io/failure-accrual-consecutive-min-penalty: 60s, \
        balancer.linkerd.io/failure-accrual-consecutive-max-penalty: 60s";
    let mesh = mesh()
        .workload("client")
        .unmeshed("legacy")
        .annotated("legacy", annotations);
    mesh.run(async |mesh: &Mesh| {
        let requests = Arc::default();
        let _legacy = apps::serve_tcp(mesh.listen("legacy", HTTP).await, close_at_request(&requests));
        for cause in [
            "connection-closed",
            "connection-closed",
            "connection-closed",
            "breaker-open",
        ] {
            let mut client = Http2::handshake(mesh.dial("client", mesh.service_addr("legacy", HTTP)).await).await;
            let req = http::Request::post("http://web.test/").version(http::Version::HTTP_2);
            let answer = client.fetch(req.body(full("hello")).unwrap()).await.unwrap();
            assert_eq!(answer.cause(), cause);
        }
        assert_eq!(requests.load(Ordering::Relaxed), 3);
    });
}

#[test]
fn possibly_processed_requests_are_resent_as_configured() {
    for (value, n_received) in [("idempotent", [3, 3, 1]), ("safe", [3, 1, 1]), ("never", [1, 1, 1])] {
        let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
        let mesh = mesh.env("TULLE_PROXY_OUTBOUND_RESEND", value);
        mesh.env("TULLE_PROXY_INBOUND_RESEND", value).run(async |mesh: &Mesh| {
            let requests = Arc::default();
            let _web = apps::serve_tcp(mesh.listen("web", HTTP).await, close_at_request(&requests));
            let _legacy = apps::serve_tcp(mesh.listen("legacy", HTTP).await, close_at_request(&requests));
            for is_inbound in [true, false] {
                for (method, n_received) in ["GET", "PUT", "POST"].into_iter().zip(n_received) {
                    let mut client = Http2::handshake(match is_inbound {
                        true => mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
                        false => mesh.dial("client", mesh.service_addr("legacy", HTTP)).await,
                    })
                    .await;
                    let before = requests.load(Ordering::Relaxed);
                    let mut req = http2_request("/");
                    *req.method_mut() = method.parse().unwrap();
                    assert_eq!(client.fetch(req).await.unwrap().status, 502);
                    assert_eq!(
                        requests.load(Ordering::Relaxed) - before,
                        n_received,
                        "{method}, {value}, {is_inbound}"
                    );
                }
            }
        });
    }
}

#[test]
fn a_server_that_permits_few_streams_gets_more_connections() {
    const N_CONCURRENT_REQUESTS: usize = 10;
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    mesh.run(async |mesh: &Mesh| {
        let all = Arc::new(Barrier::new(N_CONCURRENT_REQUESTS));
        // Three streams on each connection; answered after all requests have arrived.
        let serve = |stream: TcpStream, all: Arc<Barrier>| async move {
            let mut builder = h2::server::Builder::new();
            let builder = builder.max_concurrent_streams(3);
            let mut connection = builder.handshake::<_, Bytes>(stream).await.unwrap();
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                let all = all.clone();
                tokio::spawn(async move {
                    all.wait().await;
                    respond.send_response(Response::new(()), true).unwrap();
                });
            }
        };
        let (of_web, of_legacy) = (all.clone(), all.clone());
        let _web = apps::serve_tcp(mesh.listen("web", HTTP).await, move |stream| {
            serve(stream, of_web.clone())
        });
        let _legacy = apps::serve_tcp(mesh.listen("legacy", HTTP).await, move |stream| {
            serve(stream, of_legacy.clone())
        });
        for path in ["inbound", "both", "outbound"] {
            // Connect just before use, because a silent client makes the proxy wait for a server-speaks-first protocol.
            let stream = match path {
                "inbound" => mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
                "both" => mesh.dial("client", mesh.service_addr("web", HTTP)).await,
                _ => mesh.dial("client", mesh.service_addr("legacy", HTTP)).await,
            };
            let client = Http2::handshake(stream).await;
            for _ in 0..3 {
                let calls = (0..N_CONCURRENT_REQUESTS).map(|_| {
                    let mut client = client.clone();
                    async move { client.fetch(http2_request("/")).await }
                });
                for answer in join_all(calls).await {
                    assert_eq!(answer.unwrap().status, 200);
                }
            }
        }
    });
}

#[test]
fn waiting_for_a_server_that_permits_no_streams_times_out() {
    let mesh = mesh().workload("client").workload("web").unmeshed("legacy");
    mesh.run(async |mesh: &Mesh| {
        let permit_none = |stream: TcpStream| async move {
            let none = [0, 3, 0, 0, 0, 0];
            let mut frames = Frames::server_handshake(stream, &none).await;
            while frames.next().await.is_some() {}
        };
        let _web = apps::serve_tcp(mesh.listen("web", HTTP).await, permit_none);
        let _legacy = apps::serve_tcp(mesh.listen("legacy", HTTP).await, permit_none);
        for (workload, stream) in [
            ("web", mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await),
            ("client", mesh.dial("client", mesh.service_addr("legacy", HTTP)).await),
        ] {
            let client = Http2::handshake(stream).await;
            let calls = (0..3).map(|_| {
                let mut client = client.clone();
                async move { client.fetch(http2_request("/")).await }
            });
            for answer in join_all(calls).await {
                assert_eq!(answer.unwrap().status, 503, "{workload}");
            }
            let failures = ["cause=\"no-free-stream\""];
            mesh.wait_for_metric(workload, "tulle_failures_total", &failures, 3.0)
                .await;
        }
    });
}
