//! Rare cases on the wire, valid and invalid.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream;
use http::{HeaderName, Request, Response, StatusCode, Version};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tulle_tests::apps;
use tulle_tests::client::{Http1, Http2, any, full, http2_request, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, UNMESHED_IP, mesh};

/// Runs a test with a client and a workload whose application is not started yet.
fn run_without_app(test: impl AsyncFnOnce(&Mesh) + Send) {
    mesh().workload("client").workload("web").run(test);
}

async fn dial_web(mesh: &Mesh) -> TcpStream {
    mesh.dial("client", mesh.service_addr("web", HTTP)).await
}

/// An application that reads the head of a request, sends these bytes, and closes.
async fn fixed_response_app(mesh: &Mesh, answer: &'static str) -> apps::App {
    apps::serve_tcp(mesh.listen("web", HTTP).await, move |mut stream| async move {
        let mut read = Vec::new();
        while !read.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => read.push(byte),
                Err(_) => return,
            }
        }
        // The proxy may have closed the connection already.
        let _ = stream.write_all(answer.as_bytes()).await;
    })
}

#[test]
fn two_hundred_streams_share_a_connection() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let client = Http2::handshake(dial_web(mesh).await).await;
        let answers = join_all((0..200).map(|_| {
            let mut client = client.clone();
            async move {
                let answer = client.fetch(http2_request("/delay/100")).await.unwrap();
                let error_headers =
                    ["l5d-proxy-error", "l5d-proxy-cause"].map(|name| answer.headers.get(name).cloned());
                assert_eq!(answer.status, 200, "{error_headers:?}");
            }
        }));
        answers.await;
    });
}

#[test]
fn long_http2_heads_pass_and_longer_ones_are_refused() {
    run_without_app(async |mesh: &Mesh| {
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, |stream| async move {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                respond.send_response(Response::new(()), true).unwrap();
            }
        });
        let of_peer = Http2::handshake(dial_web(mesh).await).await;
        let of_unmeshed = Http2::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        for (mut client, cause) in [(of_peer, Some("head-too-long")), (of_unmeshed, None)] {
            for (n_lines, status) in [(25, 200), (35, 431), (1, 200)] {
                let mut req = http2_request("/");
                for n in 0..n_lines {
                    let name = HeaderName::try_from(format!("x-line-{n}")).unwrap();
                    req.headers_mut().insert(name, "b".repeat(8000).try_into().unwrap());
                }
                let answer = client.fetch(req).await.unwrap();
                assert_eq!(answer.status, status, "{n_lines} lines");
                if status == 431 {
                    assert_eq!(answer.headers.get("l5d-proxy-cause").map(|_| answer.cause()), cause);
                }
            }
        }
        for (workload, direction) in [("client", "outbound"), ("web", "inbound")] {
            let cause = ["cause=\"head-too-long\"", &format!("direction=\"{direction}\"")];
            mesh.wait_for_metric(workload, "tulle_failures_total", &cause, 1.).await;
        }
    });
}

#[test]
fn targets_arrive_as_they_were_sent() {
    run_without_app(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, |req| async move {
            Response::new(full(format!("{} {:?}", req.uri(), req.headers().get("host"))))
        });
        for target in [
            "/",
            "//a//b?x=%2F&y",
            "/a;b=c/../d",
            "/%7Euser/?",
            "http://web.test/absolute",
        ] {
            let mut client = dial_web(mesh).await;
            let head = format!("GET {target} HTTP/1.1\r\nhost: web.test\r\nconnection: close\r\n\r\n");
            client.write_all(head.as_bytes()).await.unwrap();
            let mut rsp = String::new();
            client.read_to_string(&mut rsp).await.unwrap();
            assert!(
                rsp.ends_with(&format!("{target} Some(\"web.test\")")),
                "{target}: {rsp}"
            );
        }
        let mut client = dial_web(mesh).await;
        client
            .write_all(b"OPTIONS * HTTP/1.1\r\nhost: web.test\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut rsp = String::new();
        client.read_to_string(&mut rsp).await.unwrap();
        assert!(rsp.ends_with("* Some(\"web.test\")"), "{rsp}");
    });
}

#[test]
fn heads_of_24_kib_pass() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let cookie = "c".repeat(12 << 10);
        let mut req = Request::get("/headers").header("host", "web.test");
        for name in ["x-1", "x-2"] {
            req = req.header(name, &cookie);
        }
        let answer = Http1::handshake(dial_web(mesh).await)
            .await
            .fetch(req.body(full("")).unwrap())
            .await
            .unwrap();
        assert_eq!((answer.status.as_u16(), answer.body.len() > 24 << 10), (200, true));
    });
}

#[test]
fn early_hints_do_not_harm_the_response() {
    run_without_app(async |mesh: &Mesh| {
        let hints =
            "HTTP/1.1 103 Early Hints\r\nlink: </style.css>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
        let _app = fixed_response_app(mesh, hints).await;
        let answer = mesh.get("client", mesh.service_addr("web", HTTP), "/").await;
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "ok"));
    });
}

#[test]
fn a_body_may_end_with_its_connection() {
    run_without_app(async |mesh: &Mesh| {
        let _app = fixed_response_app(mesh, "HTTP/1.1 200 OK\r\n\r\nuntil the end").await;
        let answer = mesh.get("client", mesh.service_addr("web", HTTP), "/").await;
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "until the end"));
    });
}

#[test]
fn an_incomplete_body_is_never_treated_as_complete() {
    run_without_app(async |mesh: &Mesh| {
        let _app = fixed_response_app(
            mesh,
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nnot\r\n",
        )
        .await;
        for _ in 0..20 {
            let mut client = Http1::handshake(dial_web(mesh).await).await;
            // Between proxies the reset may arrive before the head.
            let ended = client.fetch(request("/")).await;
            assert!(
                ended.as_ref().is_ok_and(|answer| answer.status == 502) || ended.is_err(),
                "{ended:?}"
            );
        }
    });
}

#[test]
fn a_response_that_is_not_http_is_a_bad_gateway() {
    run_without_app(async |mesh: &Mesh| {
        let _app = fixed_response_app(mesh, "220 mail.test ESMTP\r\n").await;
        let answer = mesh.get("client", mesh.service_addr("web", HTTP), "/").await;
        assert_eq!(answer.status, 502);
    });
}

#[test]
fn an_application_may_answer_before_the_upload_has_ended() {
    run_without_app(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, |_| async {
            let mut rsp = Response::new(full("too much"));
            *rsp.status_mut() = StatusCode::PAYLOAD_TOO_LARGE;
            rsp
        });
        let req = Request::post("http://web.test/").version(Version::HTTP_2);
        let mut client = Http2::handshake(dial_web(mesh).await).await;
        let answer = client
            .fetch(req.body(full(Bytes::from(vec![0; 8 << 20]))).unwrap())
            .await
            .unwrap();
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (413, "too much"));
    });
}

#[test]
fn an_application_may_read_the_upload_after_its_response_has_ended() {
    const BODY_BYTES: usize = 4 << 20;
    run_without_app(async |mesh: &Mesh| {
        let n_read = Arc::new(AtomicUsize::new(0));
        let counted = n_read.clone();
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, move |req| {
            let counted = counted.clone();
            tokio::spawn(async move {
                let mut body = req.into_body();
                while let Some(Ok(frame)) = body.frame().await {
                    counted.fetch_add(frame.into_data().map_or(0, |data| data.len()), Ordering::Relaxed);
                }
            });
            std::future::ready(Response::new(full("early")))
        });
        let req = Request::post("http://web.test/").version(Version::HTTP_2);
        let mut client = Http2::handshake(dial_web(mesh).await).await;
        let rsp = client
            .fetch(req.body(full(vec![0; BODY_BYTES])).unwrap())
            .await
            .unwrap();
        assert_eq!(rsp.text(), "early");
        eventually("the upload is complete", async || {
            (n_read.load(Ordering::Relaxed) == BODY_BYTES).then_some(())
        })
        .await;
    });
}

/// Decrements the counter when dropped, also if the request is cancelled.
struct InFlightGuard(Arc<AtomicUsize>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[test]
fn a_request_cancelled_by_its_client_ends_at_the_application() {
    run_without_app(async |mesh: &Mesh| {
        let n_waiting = Arc::new(AtomicUsize::new(0));
        let counted = n_waiting.clone();
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            let waiting = InFlightGuard(counted.clone());
            async move {
                tokio::time::sleep(Duration::from_secs(60)).await;
                drop(waiting);
                Response::new(full("late"))
            }
        });
        let mut http1 = Http1::handshake(dial_web(mesh).await).await;
        let mut http2 = Http2::handshake(dial_web(mesh).await).await;
        let both = async { tokio::join!(http1.fetch(request("/")), http2.fetch(http2_request("/"))) };
        let arrived = eventually("both requests wait", async || {
            (n_waiting.load(Ordering::Relaxed) == 2).then_some(())
        });
        tokio::select! {
            _ = both => panic!("the application never answers"),
            () = arrived => {}
        }
        drop((http1, http2));
        eventually("both requests are cancelled", async || {
            (n_waiting.load(Ordering::Relaxed) == 0).then_some(())
        })
        .await;
    });
}

/// The application has sent a response head and reads nothing, so its flow-control window is closed.
#[test]
fn a_cancelled_upload_that_the_application_does_not_read_ends_at_the_application() {
    const CHUNK: Bytes = Bytes::from_static(&[b'x'; 64 << 10]);
    /// One chunk more than fits into the application's window of 1 MiB.
    const N_CHUNKS: usize = 17;
    run_without_app(async |mesh: &Mesh| {
        let n_waiting = Arc::new(AtomicUsize::new(0));
        let counted = n_waiting.clone();
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, move |req| {
            counted.fetch_add(1, Ordering::Relaxed);
            let waiting = InFlightGuard(counted.clone());
            let endless = stream::poll_fn(move |_| {
                let _held = (&waiting, &req);
                Poll::<Option<Result<Frame<Bytes>, Infallible>>>::Pending
            });
            std::future::ready(Response::new(any(StreamBody::new(endless))))
        });
        let mut client = Http2::handshake(dial_web(mesh).await).await;
        let (chunks, body) = mpsc::channel(N_CHUNKS);
        let req = Request::post("http://web.test/").version(Version::HTTP_2);
        let rsp = client
            .send(req.body(any(StreamBody::new(ReceiverStream::new(body)))).unwrap())
            .await
            .unwrap();
        for _ in 0..N_CHUNKS {
            chunks.send(Ok(Frame::data(CHUNK))).await.unwrap();
        }
        let to_app = [r#"direction="inbound""#, r#"peer="dst""#];
        mesh.wait_for_metric_at_least("web", "tcp_write_bytes_total", &to_app, f64::from(1 << 20))
            .await;
        assert_eq!(n_waiting.load(Ordering::Relaxed), 1);
        chunks.send(Err(std::io::Error::other("cancelled"))).await.unwrap();
        eventually("the upload is cancelled", async || {
            (n_waiting.load(Ordering::Relaxed) == 0).then_some(())
        })
        .await;
        drop(rsp);
    });
}

#[test]
fn grpc_clients_get_failures_as_grpc_statuses() {
    run_without_app(async |mesh: &Mesh| {
        let mut client = Http2::handshake(dial_web(mesh).await).await;
        let call = Request::post("http://web.test/tulle.bench.Echo/Unary").version(Version::HTTP_2);
        let call = call.header("content-type", "application/grpc").header("te", "trailers");
        let answer = client.fetch(call.body(full("")).unwrap()).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.header("grpc-status")), (200, "14"));
    });
}

/// Sends more small frames at once than the TLS write buffer holds.
#[test]
fn frames_are_flushed_without_further_frames() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let mut client = Http2::handshake(dial_web(mesh).await).await;
        for _ in 0..3 {
            let frames = (0..600).map(|_| Ok::<_, Infallible>(Frame::data(Bytes::from_static(&[b'x'; 500]))));
            let req = Request::post("http://web.test/echo").version(Version::HTTP_2);
            let req = req.body(any(StreamBody::new(stream::iter(frames)))).unwrap();
            let answer = tokio::time::timeout(Duration::from_secs(5), client.fetch(req)).await;
            assert_eq!(
                answer.expect("all frames arrive at once").unwrap().text().len(),
                300_000
            );
        }
    });
}
