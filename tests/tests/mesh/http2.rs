//! HTTP/2 at the frame level: settings from the environment, stream resets, and clients that stall or flood.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use h2::Reason;
use http::Response;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tulle_tests::apps;
use tulle_tests::client::{Http2, any, full, http2_request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Builder, HTTP, Mesh, UNMESHED_IP, mesh};

use crate::direct::tls_connect;

const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const ACK: u8 = 1;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

pub(crate) struct Frame {
    pub(crate) kind: u8,
    flags: u8,
    pub(crate) stream: u32,
    payload: Vec<u8>,
}

impl Frame {
    pub(crate) fn new(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Self {
        let payload = payload.to_vec();
        Self {
            kind,
            flags,
            stream,
            payload,
        }
    }

    /// HEADERS of a request without END_STREAM; headers outside the HPACK static table are literal.
    fn request(stream: u32, path: &str) -> Self {
        let mut head = vec![0x82, 0x86]; // GET, http
        for (name, value) in [(0x04, path), (0x01, "web.test")] {
            head.extend([name, u8::try_from(value.len()).unwrap()]);
            head.extend(value.as_bytes());
        }
        Self::new(HEADERS, END_HEADERS, stream, &head)
    }

    /// A complete request without an authority, with these headers.
    fn request_with(stream: u32, headers: &[(&str, &str)]) -> Self {
        let mut head = vec![0x82, 0x86, 0x84]; // GET, http, /
        for (name, value) in headers {
            head.push(0);
            for text in [name, value] {
                head.push(u8::try_from(text.len()).unwrap());
                head.extend(text.as_bytes());
            }
        }
        Self::new(HEADERS, END_HEADERS | END_STREAM, stream, &head)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = u32::try_from(self.payload.len()).unwrap().to_be_bytes()[1..].to_vec();
        bytes.extend([self.kind, self.flags]);
        bytes.extend(self.stream.to_be_bytes());
        bytes.extend(&self.payload);
        bytes
    }

    /// The 32-bit number at an offset of the payload.
    fn u32_at(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.payload[at..at + 4].try_into().unwrap())
    }

    /// The settings in the frame, by their numbers in RFC 9113, section 6.5.2.
    fn settings(&self) -> BTreeMap<u8, u32> {
        let setting = |bytes: &[u8]| (bytes[1], u32::from_be_bytes(bytes[2..].try_into().unwrap()));
        self.payload.chunks(6).map(setting).collect()
    }
}

/// A connection as a sequence of frames.
pub(crate) struct Frames<S>(S);

impl<S: AsyncRead + AsyncWrite + Unpin> Frames<S> {
    /// The server side of a connection, with these settings.
    pub(crate) async fn server_handshake(mut stream: S, settings: &[u8]) -> Self {
        stream.read_exact(&mut [0; 24]).await.unwrap();
        let mut frames = Self(stream);
        frames.send([Frame::new(SETTINGS, 0, 0, settings)]).await;
        frames
    }

    async fn client_handshake(stream: S) -> Self {
        Self::client_handshake_with(stream, None).await
    }

    /// The client side of a connection, which sends a frame together with its preface.
    async fn client_handshake_with(mut stream: S, frame: Option<Frame>) -> Self {
        let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        sent.extend(Frame::new(SETTINGS, 0, 0, b"").bytes());
        sent.extend(frame.into_iter().flat_map(|frame| frame.bytes()));
        stream.write_all(&sent).await.unwrap();
        stream.flush().await.unwrap();
        Self(stream)
    }

    /// Sends frames in one packet if they fit.
    pub(crate) async fn send(&mut self, frames: impl IntoIterator<Item = Frame>) {
        let bytes: Vec<u8> = frames.into_iter().flat_map(|frame| frame.bytes()).collect();
        self.0.write_all(&bytes).await.unwrap();
        self.0.flush().await.unwrap();
    }

    /// The next frame, or `None` at the end of the connection.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).await.ok()?;
        let mut payload = vec![0; usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2])];
        self.0.read_exact(&mut payload).await.ok()?;
        let stream = u32::from_be_bytes(head[5..].try_into().unwrap());
        Some(Frame::new(head[3], head[4], stream, &payload))
    }

    /// The next frame of a kind; other frames are skipped.
    async fn next_frame_of_kind(&mut self, kind: u8) -> Frame {
        loop {
            let frame = self.next().await.expect("the connection is open");
            assert!(
                frame.kind != GOAWAY || kind == GOAWAY,
                "unexpected GOAWAY: {:?}",
                frame.payload
            );
            if frame.kind == kind {
                return frame;
            }
        }
    }

    /// Returns after the peer has processed everything that was sent.
    async fn wait_until_processed(&mut self) {
        self.send([Frame::new(PING, 0, 0, b"settled?")]).await;
        let pong = self.next_frame_of_kind(PING).await;
        assert_eq!((pong.flags, &pong.payload[..]), (ACK, &b"settled?"[..]));
    }

    /// The reason in the peer's GOAWAY frame.
    async fn goaway_reason(&mut self) -> Reason {
        self.next_frame_of_kind(GOAWAY).await.u32_at(4).into()
    }
}

/// A client and the echo server `web`, whose proxies use these HTTP/2 settings, and a connection to the proxy of each.
fn run_with_settings(settings: &[(&str, &str)], test: impl AsyncFnOnce(&Mesh, [TcpStream; 2]) + Send) {
    let mut mesh = mesh().workload("client").workload("web");
    for (name, value) in settings {
        for direction in ["INBOUND", "OUTBOUND"] {
            mesh = mesh.env(&format!("{direction}_SERVER_HTTP2_{name}"), value);
        }
    }
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let outbound = mesh.dial("client", mesh.service_addr("web", HTTP)).await;
        let inbound = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
        test(mesh, [outbound, inbound]).await;
    });
}

#[test]
fn settings_of_the_environment_are_announced_and_enforced() {
    let settings = [
        ("MAX_CONCURRENT_STREAMS", "2"),
        ("INITIAL_STREAM_WINDOW_SIZE", "70000"),
        ("INITIAL_CONNECTION_WINDOW_SIZE", "200000"),
        ("MAX_FRAME_SIZE", "20000"),
        ("MAX_HEADER_LIST_SIZE", "5000"),
    ];
    run_with_settings(&settings, async |mesh: &Mesh, connections| {
        for stream in connections {
            let mut client = Frames::client_handshake(stream).await;
            let announced = client.next_frame_of_kind(SETTINGS).await.settings();
            // The announced size of header lists is twice the limit.
            for (setting, value) in [(3, 2), (4, 70_000), (5, 20_000), (6, 10_000)] {
                assert_eq!(announced.get(&setting), Some(&value), "{announced:?}");
            }
            let window = client.next_frame_of_kind(WINDOW_UPDATE).await;
            assert_eq!((window.stream, window.u32_at(0)), (0, 200_000 - 65_535));

            client.send([1, 3].map(|stream| Frame::request(stream, "/echo"))).await;
            client.wait_until_processed().await;
            client.send([Frame::request(5, "/echo")]).await;
            let refused = client.next_frame_of_kind(RST_STREAM).await;
            assert_eq!((refused.stream, refused.u32_at(0)), (5, Reason::REFUSED_STREAM.into()));

            client.send([Frame::new(DATA, 0, 1, &[b'x'; 20_000])]).await;
            client.wait_until_processed().await;
            client.send([Frame::new(DATA, 0, 1, &[b'x'; 20_001])]).await;
            assert_eq!(client.goaway_reason().await, Reason::FRAME_SIZE_ERROR);
        }
        for stream in [
            mesh.dial("client", mesh.service_addr("web", HTTP)).await,
            mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
        ] {
            let mut client = Http2::handshake(stream).await;
            for (length, status) in [(4_000, 200), (5_000, 431)] {
                let mut req = http2_request("/");
                req.headers_mut().insert("x-long", "x".repeat(length).parse().unwrap());
                assert_eq!(client.fetch(req).await.unwrap().status, status, "{length}");
            }
        }
    });
}

#[test]
fn only_peers_may_send_larger_frames() {
    /// The maximum frame size in the server's settings.
    async fn announced(stream: impl AsyncRead + AsyncWrite + Unpin) -> Option<u32> {
        let settings = Frames::client_handshake(stream)
            .await
            .next_frame_of_kind(SETTINGS)
            .await
            .settings();
        settings.get(&5).copied()
    }
    run_with_settings(&[], async |mesh: &Mesh, connections| {
        let inbound = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
        assert_eq!(announced(tls_connect(mesh, inbound, &[]).await).await, Some(64 << 10));
        for stream in connections {
            assert_eq!(announced(stream).await, None);
        }
    });
}

#[test]
fn streams_reset_before_they_are_accepted_are_limited() {
    let settings = [("MAX_PENDING_ACCEPT_RESET_STREAMS", "3")];
    run_with_settings(&settings, async |_: &Mesh, connections| {
        for stream in connections {
            let mut client = Frames::client_handshake(stream).await;
            let mut streams = (1..).step_by(2);
            let mut requests_with_reset = |n| {
                let cancel = u32::from(Reason::CANCEL).to_be_bytes();
                let of_one = move |stream| {
                    let reset = Frame::new(RST_STREAM, 0, stream, &cancel);
                    [Frame::request(stream, "/"), reset]
                };
                streams.by_ref().take(n).flat_map(of_one).collect::<Vec<_>>()
            };
            for _ in 0..3 {
                client.send(requests_with_reset(3)).await;
                client.wait_until_processed().await;
            }
            client.send(requests_with_reset(10)).await;
            assert_eq!(client.goaway_reason().await, Reason::ENHANCE_YOUR_CALM);
        }
    });
}

#[test]
fn a_client_that_answers_no_pings_is_disconnected() {
    let settings = [("KEEP_ALIVE_INTERVAL", "200ms"), ("KEEP_ALIVE_TIMEOUT", "300ms")];
    run_with_settings(&settings, async |_: &Mesh, connections| {
        let clients = connections.map(|stream| async {
            let mut client = Frames::client_handshake(stream).await;
            // Longer than the keep-alive timeout.
            for _ in 0..3 {
                let ping = client.next_frame_of_kind(PING).await;
                assert_eq!(ping.flags, 0);
                client.send([Frame::new(PING, ACK, 0, &ping.payload)]).await;
            }
            client.next_frame_of_kind(PING).await;
            while client.next().await.is_some() {}
        });
        join_all(clients).await;
    });
}

#[test]
fn the_send_buffer_of_a_stream_is_limited() {
    let settings = [("MAX_SEND_BUF_SIZE", "1000")];
    run_with_settings(&settings, async |_: &Mesh, connections| {
        for stream in connections {
            let mut client = Frames::client_handshake(stream).await;
            let head = Frame {
                flags: END_HEADERS | END_STREAM,
                ..Frame::request(1, "/bytes/20000")
            };
            client.send([head]).await;
            let mut n = 0;
            loop {
                let data = client.next_frame_of_kind(DATA).await;
                // Each frame fits into the send buffer.
                assert!(data.payload.len() <= 1000, "{} at once", data.payload.len());
                n += data.payload.len();
                if data.flags & END_STREAM != 0 {
                    break;
                }
            }
            assert_eq!(n, 20_000);
        }
    });
}

/// A mesh whose proxies have 300 ms for the timeout `TULLE_PROXY_*_HTTP_<variable>`.
fn mesh_with_short_timeout(variable: &str) -> Builder {
    let mesh = mesh().workload("client").workload("web");
    ["INBOUND", "OUTBOUND"].iter().fold(mesh, |mesh, direction| {
        mesh.env(&format!("TULLE_PROXY_{direction}_HTTP_{variable}"), "300ms")
    })
}

#[test]
fn connections_without_requests_get_a_goaway() {
    mesh_with_short_timeout("IDLE_TIMEOUT").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let dial = async || mesh.dial("client", mesh.service_addr("web", HTTP)).await;
        let mut busy = Frames::client_handshake(dial().await).await;
        let flags = END_HEADERS | END_STREAM;
        busy.send([Frame {
            flags,
            ..Frame::request(1, "/delay/3000")
        }])
        .await;
        busy.wait_until_processed().await;
        for _ in 0..3 {
            let mut client = Http2::handshake(dial().await).await;
            assert_eq!(client.fetch(http2_request("/")).await.unwrap().status, 200);
            eventually("the connection gets a GOAWAY", async || {
                (!client.is_open()).then_some(())
            })
            .await;
        }
        assert_eq!(busy.next_frame_of_kind(DATA).await.payload, b"web after 3000 ms\n");
        drop(busy);
        // The next request uses another connection between the proxies, without an error.
        for _ in 0..3 {
            eventually("the client's proxy gets a GOAWAY too", async || {
                let open = mesh.metric("web", "tcp_open_connections", &["peer=\"src\""]).await;
                (open < 1.).then_some(())
            })
            .await;
            assert_eq!(
                mesh.get("client", mesh.service_addr("web", HTTP), "/").await.status,
                200
            );
        }
    });
}

#[test]
fn a_missing_first_request_times_out() {
    mesh_with_short_timeout("HEAD_TIMEOUT").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let dial = async || mesh.dial("client", mesh.service_addr("web", HTTP)).await;
        let mut served = Http2::handshake(dial().await).await;
        assert_eq!(served.fetch(http2_request("/")).await.unwrap().status, 200);
        for (sends_partial_head, reason) in [(false, Reason::NO_ERROR), (true, Reason::ENHANCE_YOUR_CALM)] {
            for stream in [dial().await, mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await] {
                let partial_head = Frame {
                    flags: 0, // END_HEADERS is not set
                    ..Frame::request(1, "/")
                };
                let partial_head = sends_partial_head.then_some(partial_head);
                let mut client = Frames::client_handshake_with(stream, partial_head).await;
                assert_eq!(client.goaway_reason().await, reason);
                // The client ignores the GOAWAY frame.
                while client.next().await.is_some() {}
            }
        }
        assert_eq!(
            served.fetch(http2_request("/")).await.unwrap().status,
            200,
            "its first request has arrived"
        );
    });
}

#[test]
fn floods_are_ended_and_others_are_served_meanwhile() {
    const MAX_WRITES: u32 = 10_000;
    run_with_settings(&[], async |mesh: &Mesh, _| {
        let resets = |n: u32| {
            let cancel = u32::from(Reason::CANCEL).to_be_bytes();
            let streams = (100 * n..100 * (n + 1)).map(|stream| 2 * stream + 1);
            let of_one = |stream| [Frame::request(stream, "/"), Frame::new(RST_STREAM, 0, stream, &cancel)];
            streams.flat_map(of_one).collect::<Vec<_>>()
        };
        let head = |n: u32| {
            let kind = if n == 0 { HEADERS } else { CONTINUATION };
            vec![Frame::new(kind, 0, 1, &b"\0\x03x-a\x03abc".repeat(1000))]
        };
        let floods: [(_, &dyn Fn(u32) -> Vec<Frame>); 2] = [("resets", &resets), ("a head", &head)];
        for (what, part) in floods {
            for stream in [
                mesh.dial("client", mesh.service_addr("web", HTTP)).await,
                mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
            ] {
                let flood = async {
                    let Frames(mut stream) = Frames::client_handshake(stream).await;
                    for n in 0..MAX_WRITES {
                        let bytes: Vec<u8> = part(n).iter().flat_map(Frame::bytes).collect();
                        if stream.write_all(&bytes).await.is_err() {
                            return;
                        }
                    }
                    panic!("{what}: the connection is open after {MAX_WRITES} writes");
                };
                let others = async {
                    for _ in 0..10 {
                        let answer = mesh.get("client", mesh.service_addr("web", HTTP), "/").await;
                        assert_eq!(answer.status, 200, "{what}");
                    }
                };
                tokio::join!(flood, others);
            }
        }
    });
}

/// An error code that is not defined by HTTP/2.
const UNDEFINED_ERROR_CODE: u32 = 0x7e57;

/// The HPACK byte for status 200, from the static table.
pub(crate) const OK: u8 = 0x88;
const BAD_REQUEST: u8 = 0x8c;

#[test]
fn a_host_header_replaces_a_missing_authority() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let cases: [(&[_], _); 4] = [
            (&[("host", "web.test")], OK),
            (&[("host", "web.test"), ("host", "web.test")], BAD_REQUEST),
            (&[("host", "me@web.test")], BAD_REQUEST),
            (&[], BAD_REQUEST),
        ];
        for (headers, status) in cases {
            for stream in [
                mesh.dial("client", mesh.service_addr("web", HTTP)).await,
                mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
            ] {
                let mut client = Frames::client_handshake(stream).await;
                client.send([Frame::request_with(1, headers)]).await;
                let head = client.next_frame_of_kind(HEADERS).await;
                assert_eq!((head.stream, head.payload[0]), (1, status), "{headers:?}");
            }
        }
    });
}

#[test]
fn a_host_header_that_differs_from_the_authority_is_refused() {
    run_with_settings(&[], async |mesh: &Mesh, connections| {
        let [_, stream] = connections;
        for (stream, host, status) in [
            (stream, "WEB.test:80", 200),
            (mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await, "other.test", 400),
            (
                mesh.dial("client", mesh.service_addr("web", HTTP)).await,
                "other.test",
                400,
            ),
        ] {
            let (client, connection) = h2::client::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            let mut req = http2_request("/").map(drop);
            req.headers_mut().insert("host", host.parse().unwrap());
            let rsp = client.ready().await.unwrap().send_request(req, true).unwrap().0;
            assert_eq!(rsp.await.unwrap().status(), status, "{host}");
        }
    });
}

#[test]
fn the_original_protocol_header_is_accepted_from_peers_only() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, |req| async move {
            let mark = req.headers().contains_key("l5d-orig-proto");
            Response::new(full(format!("{:?} {mark}", req.version())))
        });
        let mut client = Http2::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        let mut req = http2_request("/");
        req.headers_mut().insert("l5d-orig-proto", "HTTP/1.1".parse().unwrap());
        assert_eq!(client.fetch(req).await.unwrap().text(), "HTTP/2.0 false");
        // A peer may use the header.
        assert_eq!(
            mesh.get("client", mesh.service_addr("web", HTTP), "/").await.text(),
            "HTTP/1.1 false"
        );
    });
}

#[test]
fn stalled_uploads_time_out_and_others_do_not() {
    const N_FRAMES: usize = 20;
    let each = Duration::from_millis(100);
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.env("TULLE_PROXY_INBOUND_HTTP_IDLE_TIMEOUT", "1s");
    mesh.env("TULLE_PROXY_OUTBOUND_HTTP_IDLE_TIMEOUT", "1s")
        .run(async |mesh: &Mesh| {
            let _app = apps::serve_http(mesh.listen("web", HTTP).await, move |req| async move {
                match req.uri().path() {
                    "/echo" => Response::new(any(req.into_body())),
                    "/drip" => apps::unfinished_response(N_FRAMES, each),
                    _ => std::future::pending().await,
                }
            });
            for stream in [
                mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
                mesh.dial("client", mesh.service_addr("web", HTTP)).await,
            ] {
                let (client, connection) = h2::client::handshake(stream).await.unwrap();
                tokio::spawn(connection);
                let mut client = client.ready().await.unwrap();
                let mut upload = |path: &str| {
                    let req = http::Request::post(format!("http://web.test{path}")).version(http::Version::HTTP_2);
                    client.send_request(req.body(()).unwrap(), false).unwrap()
                };
                // Response data of the server keeps one request alive, and request data of the client keeps another alive. The
                // other two stall: one before its response, and one after the response has begun.
                let (dripping, _body) = upload("/drip");
                let (echoed, mut echo) = upload("/echo");
                let (stalled, mut stalled_upload) = upload("/stall");
                stalled_upload.send_data("abc".into(), false).unwrap();
                let (cut, mut cut_upload) = upload("/echo");
                cut_upload.send_data("abc".into(), false).unwrap();
                let sending = async {
                    let mut interval = tokio::time::interval(each);
                    for _ in 0..N_FRAMES {
                        interval.tick().await;
                        echo.send_data("x".into(), false).unwrap();
                    }
                    echo.send_data("".into(), true).unwrap();
                    let mut n = 0;
                    let mut echoed = echoed.await.unwrap().into_body();
                    while let Some(data) = echoed.data().await {
                        n += data.unwrap().len();
                    }
                    assert_eq!(n, N_FRAMES);
                };
                let dripping = async {
                    let mut dripping = dripping.await.unwrap().into_body();
                    for _ in 0..N_FRAMES {
                        assert_eq!(dripping.data().await.unwrap().unwrap(), "x");
                    }
                };
                let cut = async {
                    let mut response = cut.await.unwrap().into_body();
                    assert_eq!(response.data().await.unwrap().unwrap(), "abc");
                    assert!(response.data().await.unwrap().is_err());
                };
                let (stalled, ..) = tokio::join!(stalled, sending, dripping, cut);
                assert_eq!(stalled.unwrap().status(), 408);
            }
        });
}

#[test]
fn header_lists_in_flight_on_one_connection_are_bounded() {
    const HEADER_LIST_BYTES: usize = 200_000;
    const N_REFUSED: usize = 3;
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        // It accepts connections and reads nothing.
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, |stream| async move {
            std::future::pending::<()>().await;
            drop(stream);
        });
        let (client, mut connection) = h2::client::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await)
            .await
            .unwrap();
        let mut pings = connection.ping_pong().unwrap();
        tokio::spawn(connection);
        let mut client = client.ready().await.unwrap();
        let mut send = || {
            let mut req = http2_request("/").map(drop);
            req.headers_mut()
                .insert("x-long", "x".repeat(HEADER_LIST_BYTES).parse().unwrap());
            client.send_request(req, true).unwrap().0
        };
        let n_permitted = (16 << 20) / (HEADER_LIST_BYTES + 100);
        let mut waiting = Vec::new();
        for _ in 0..n_permitted + N_REFUSED {
            waiting.push(send());
            pings.ping(h2::Ping::opaque()).await.unwrap();
        }
        eventually("those above the bound are refused", async || {
            waiting.retain_mut(|rsp| match rsp.now_or_never() {
                None => true,
                Some(rsp) => {
                    assert_eq!(rsp.unwrap_err().reason(), Some(Reason::REFUSED_STREAM));
                    false
                }
            });
            (waiting.len() <= n_permitted).then_some(())
        })
        .await;
        assert_eq!(waiting.len(), n_permitted);
        let labels = ["direction=\"inbound\"", "cause=\"overload\""];
        let n_refused = async || mesh.metric("web", "tulle_failures_total", &labels).await;
        mesh.wait_for_metric("web", "tulle_failures_total", &labels, N_REFUSED as f64)
            .await;
        // Requests that the client resets make room for others.
        waiting.clear();
        eventually("another request is accepted", async || {
            let before = n_refused().await;
            let mut rsp = send();
            pings.ping(h2::Ping::opaque()).await.unwrap();
            pings.ping(h2::Ping::opaque()).await.unwrap();
            let is_accepted = n_refused().await == before && (&mut rsp).now_or_never().is_none();
            is_accepted.then_some(())
        })
        .await;
    });
}

#[test]
fn a_stream_reset_keeps_its_error_code() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        let may_reset = Arc::new(Notify::new());
        let server_may_reset = may_reset.clone();
        let _app = apps::serve_tcp(mesh.listen("web", HTTP).await, move |stream| {
            let may_reset = server_may_reset.clone();
            async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((req, mut respond))) = connection.accept().await {
                    if req.uri().path() == "/at-once" {
                        respond.send_reset(UNDEFINED_ERROR_CODE.into());
                        continue;
                    }
                    let may_reset = may_reset.clone();
                    tokio::spawn(async move {
                        let mut body = respond.send_response(Response::new(()), false).unwrap();
                        body.send_data("begun".into(), false).unwrap();
                        may_reset.notified().await;
                        body.send_reset(UNDEFINED_ERROR_CODE.into());
                    });
                }
            }
        });
        for stream in [
            mesh.dial("client", mesh.service_addr("web", HTTP)).await,
            mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
        ] {
            let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            let mut send = |path| client.send_request(http2_request(path).map(drop), true).unwrap().0;
            let error = send("/at-once").await.unwrap_err();
            assert_eq!(
                (error.is_reset(), error.reason()),
                (true, Some(UNDEFINED_ERROR_CODE.into())),
                "{error}"
            );

            let mut body = send("/amid-the-body").await.unwrap().into_body();
            assert_eq!(body.data().await.unwrap().unwrap(), "begun");
            may_reset.notify_one();
            let error = body.data().await.unwrap().unwrap_err();
            assert_eq!(
                (error.is_reset(), error.reason()),
                (true, Some(UNDEFINED_ERROR_CODE.into())),
                "{error}"
            );
        }
    });
}
