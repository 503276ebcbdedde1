//! WebSocket between a client and a server of a library through both sidecars, and other protocols with extended CONNECT.

use std::net::SocketAddr;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{SinkExt as _, StreamExt as _};
use h2::ext::Protocol;
use http::{Method, Request, Response};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{CloseCode, Data, OpCode};
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, accept_async_with_config, client_async_with_config};
use tulle_tests::apps::{self, App};
use tulle_tests::client::{Http2, full, read_until};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Builder, HTTP, Mesh, UNMESHED_IP, mesh};

pub(crate) type Socket = WebSocketStream<TcpStream>;

fn config() -> WebSocketConfig {
    // Larger than any message in these tests.
    WebSocketConfig::default()
        .max_message_size(Some(8 << 20))
        .max_frame_size(Some(8 << 20))
}

fn meshed() -> Builder {
    mesh().workload("client").workload("web")
}

/// An application that runs `serve` for each WebSocket.
pub(crate) async fn server<F>(
    mesh: &Mesh,
    workload: &str,
    serve: impl Fn(Socket) -> F + Clone + Send + Sync + 'static,
) -> App
where
    F: Future<Output = ()> + Send + 'static,
{
    apps::serve_tcp(mesh.listen(workload, HTTP).await, move |stream| {
        let serve = serve.clone();
        async move { serve(accept_async_with_config(stream, Some(config())).await.unwrap()).await }
    })
}

pub(crate) async fn connect(mesh: &Mesh, dst: SocketAddr) -> Socket {
    connect_path(mesh, dst, "/").await
}

pub(crate) async fn connect_path(mesh: &Mesh, dst: SocketAddr, path: &str) -> Socket {
    let stream = mesh.dial("client", dst).await;
    let uri = format!("ws://web.test{path}");
    let connected = client_async_with_config(uri, stream, Some(config())).await;
    let (socket, rsp) = connected.unwrap();
    assert_eq!(rsp.status(), 101);
    socket
}

/// Echoes every message until the end.
pub(crate) async fn echo(mut socket: Socket) {
    while let Some(Ok(message)) = socket.next().await {
        if message.is_text() || message.is_binary() {
            socket.send(message).await.unwrap();
        }
    }
}

async fn next(socket: &mut Socket) -> Message {
    socket
        .next()
        .await
        .expect("the socket is open")
        .expect("a valid message")
}

#[test]
fn every_kind_of_message_of_every_length_is_echoed() {
    meshed().run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", echo).await;
        let mut socket = connect(mesh, mesh.service_addr("web", HTTP)).await;
        // Lengths around the limits between the three encodings of the length, and more than any buffer holds.
        for length in [0, 1, 125, 126, 65_535, 65_536, 1 << 20] {
            for message in [
                Message::text("ä".repeat(length / 2) + &"x".repeat(length % 2)),
                Message::binary((0..length).map(|n| (n % 251) as u8).collect::<Vec<_>>()),
            ] {
                assert_eq!(message.len(), length);
                socket.send(message.clone()).await.unwrap();
                assert!(next(&mut socket).await == message, "{length}");
            }
        }
    });
}

#[test]
fn an_idle_websocket_keeps_its_shared_connection_open() {
    let mesh = meshed().env("TULLE_PROXY_INBOUND_HTTP_IDLE_TIMEOUT", "300ms");
    mesh.run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", echo).await;
        let mut socket = connect(mesh, mesh.service_addr("web", HTTP)).await;
        for _ in 0..2 {
            let idle = Http2::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
            eventually("idle connections are closed", async || (!idle.is_open()).then_some(())).await;
        }
        socket.send(Message::text("still there?")).await.unwrap();
        assert_eq!(next(&mut socket).await, Message::text("still there?"));
    });
}

#[test]
fn fragments_are_put_together_and_pings_between_them_are_answered() {
    meshed().run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", echo).await;
        let mut socket = connect(mesh, mesh.service_addr("web", HTTP)).await;
        let fragment = |part: &'static str, first: bool, last: bool| {
            let kind = if first { Data::Text } else { Data::Continue };
            Message::Frame(Frame::message(part, OpCode::Data(kind), last))
        };
        socket.send(fragment("in ", true, false)).await.unwrap();
        socket.send(Message::Ping("between".into())).await.unwrap();
        assert_eq!(next(&mut socket).await, Message::Pong("between".into()));
        for (part, last) in [("several", false), ("", false), (" parts", true)] {
            socket.send(fragment(part, false, last)).await.unwrap();
        }
        assert_eq!(next(&mut socket).await, Message::text("in several parts"));
    });
}

#[test]
fn pings_and_pongs_pass_in_both_directions() {
    meshed().run(async |mesh: &Mesh| {
        let (ping, pong) = (Message::Ping(vec![7; 125].into()), Message::Pong("unsolicited".into()));
        let (server_ping, server_pong) = (ping.clone(), pong.clone());
        let _app = server(mesh, "web", move |mut socket| {
            let (ping, pong) = (server_ping.clone(), server_pong.clone());
            async move {
                socket.send(ping.clone()).await.unwrap();
                assert_eq!(next(&mut socket).await, Message::Pong(ping.into_data()));
                socket.send(pong).await.unwrap();
                echo(socket).await;
            }
        })
        .await;
        let mut socket = connect(mesh, mesh.service_addr("web", HTTP)).await;
        assert_eq!(next(&mut socket).await, ping, "the ping of the server");
        assert_eq!(next(&mut socket).await, pong);
        socket.send(ping.clone()).await.unwrap();
        assert_eq!(next(&mut socket).await, Message::Pong(ping.into_data()));
    });
}

#[test]
fn close_codes_and_reasons_arrive_from_either_side() {
    let codes = [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1011, 3000, 4999];
    meshed().run(async |mesh: &Mesh| {
        // The client's message is the close code for the server. If it is 0, the client sends the close frame, and the
        // server echoes it.
        let _app = server(mesh, "web", |mut socket| async move {
            let close_code: u16 = next(&mut socket).await.into_text().unwrap().parse().unwrap();
            if close_code > 0 {
                socket.close(Some(close_frame(close_code))).await.unwrap();
            }
            let last = socket.next().await;
            assert!(matches!(last, Some(Ok(Message::Close(Some(_))))), "{last:?}");
            while socket.next().await.is_some() {}
        })
        .await;
        for code in codes {
            let mut socket = connect(mesh, mesh.service_addr("web", HTTP)).await;
            socket.send(Message::text(code.to_string())).await.unwrap();
            assert_eq!(next(&mut socket).await, Message::Close(Some(close_frame(code))));
            assert!(socket.next().await.is_none(), "the connection ends afterwards");

            let mut socket = connect(mesh, mesh.service_addr("web", HTTP)).await;
            socket.send(Message::text("0")).await.unwrap();
            socket.close(Some(close_frame(code))).await.unwrap();
            assert_eq!(
                next(&mut socket).await,
                Message::Close(Some(close_frame(code))),
                "the answer"
            );
            assert!(socket.next().await.is_none());
        }
    });
}

fn close_frame(code: u16) -> CloseFrame {
    CloseFrame {
        code: CloseCode::from(code),
        reason: format!("because of {code}").into(),
    }
}

#[test]
fn an_aborted_connection_is_not_reported_as_a_close_frame() {
    meshed().run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", |mut socket| async move {
            next(&mut socket).await; // closes the connection without a close frame
        })
        .await;
        let mut socket = connect(mesh, mesh.service_addr("web", HTTP)).await;
        socket.send(Message::text("leave")).await.unwrap();
        let broken = socket.next().await;
        assert!(
            matches!(broken, Some(Err(Error::Protocol(_) | Error::Io(_)))),
            "{broken:?}"
        );
    });
}

/// Connections that the proxy of `web` has accepted from peers.
async fn n_peer_connections(mesh: &Mesh) -> f64 {
    let of_peers = [r#"direction="inbound""#, r#"peer="src""#, r#"tls="true""#];
    mesh.metric("web", "tcp_open_total", &of_peers).await
}

#[test]
fn sockets_share_one_connection_between_the_sidecars() {
    meshed().run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", echo).await;
        let sockets = join_all((0..20).map(|_| connect(mesh, mesh.service_addr("web", HTTP)))).await;
        let all = sockets.into_iter().zip(0..).map(|(mut socket, n)| async move {
            let message = Message::binary(vec![n; 1 << 20]);
            for _ in 0..2 {
                socket.send(message.clone()).await.unwrap();
                assert!(next(&mut socket).await == message, "{n}");
            }
        });
        join_all(all).await;
        assert_eq!(n_peer_connections(mesh).await, 1.);
        let to_app = [r#"direction="inbound""#, r#"peer="dst""#];
        mesh.wait_for_metric("web", "tcp_open_total", &to_app, 20.).await;
        for workload in ["client", "web"] {
            let switched = [r#"status_code="101""#];
            mesh.wait_for_metric(workload, "response_total", &switched, 20.).await;
        }
    });
}

#[test]
fn sockets_have_separate_connections_without_http2_upgrade() {
    let builder = meshed().flag("--enable-h2-upgrade=false");
    builder.run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", echo).await;
        for mut socket in join_all((0..3).map(|_| connect(mesh, mesh.service_addr("web", HTTP)))).await {
            socket.send(Message::text("hello")).await.unwrap();
            assert_eq!(next(&mut socket).await, Message::text("hello"));
        }
        assert_eq!(n_peer_connections(mesh).await, 3.);
    });
}

const UPGRADE_REQUEST: &str = "GET /chat?a=b HTTP/1.1\r\nhost: web.test\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n\
                     sec-websocket-version: 13\r\nsec-websocket-protocol: chat\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

/// Sends a WebSocket request, to which the application responds with `app_response`. Returns what the client receives, up to and
/// including `read_until_text`.
async fn upgrade_response(mesh: &Mesh, read_until_text: &'static str, app_response: &'static str) -> String {
    let app = apps::serve_tcp(mesh.listen("web", HTTP).await, move |mut stream| async move {
        let head = read_until(&mut stream, "\r\n\r\n").await;
        assert!(head.starts_with("GET /chat?a=b HTTP/1.1\r\n"), "{head}");
        for line in [
            "host: web.test",
            "connection: Upgrade",
            "upgrade: websocket",
            "sec-websocket-protocol: chat",
        ] {
            assert!(head.contains(&format!("\r\n{line}\r\n")), "{line}: {head}");
        }
        assert!(
            !head.contains("dGhlIHNhbXBsZSBub25jZQ=="),
            "the proxies make their own handshake: {head}"
        );
        stream.write_all(app_response.as_bytes()).await.unwrap();
    });
    let mut client = mesh.dial("client", mesh.service_addr("web", HTTP)).await;
    client.write_all(UPGRADE_REQUEST.as_bytes()).await.unwrap();
    let received = read_until(&mut client, read_until_text).await;
    app.kill().await;
    received
}

#[test]
fn a_refused_upgrade_is_passed_on_unchanged() {
    meshed().run(async |mesh: &Mesh| {
        let forbidden = "HTTP/1.1 403 Forbidden\r\nx-why: because\r\ncontent-length: 2\r\n\r\nno";
        let received = upgrade_response(mesh, "\r\n\r\nno", forbidden).await;
        assert!(received.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{received}");
        assert!(
            received.contains("x-why: because\r\n") && !received.contains("l5d-"),
            "{received}"
        );
        // An application that ignores the upgrade sends a normal response.
        let received = upgrade_response(
            mesh,
            "\r\n\r\na page",
            "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\na page",
        )
        .await;
        assert!(
            received.starts_with("HTTP/1.1 200 OK\r\n") && !received.contains("upgrade"),
            "{received}"
        );
        assert_eq!(n_peer_connections(mesh).await, 1.);
    });
}

#[test]
fn an_invalid_upgrade_response_is_refused() {
    let other = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: other\r\n\r\n";
    let forged = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                  sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
    meshed().run(async |mesh: &Mesh| {
        for answer in [other, forged] {
            let received = upgrade_response(mesh, "\r\n\r\n", answer).await;
            assert!(received.starts_with("HTTP/1.1 502 "), "{received}");
            assert!(
                received.contains("l5d-proxy-cause: bad-response; direction=inbound; "),
                "{received}"
            );
        }
    });
}

#[test]
fn a_policy_change_to_deny_closes_websockets() {
    let deny = "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: web, namespace: shop}
spec: {podSelector: {}, port: 8080, accessPolicy: deny}
";
    meshed().run(async |mesh: &Mesh| {
        let _app = server(mesh, "web", echo).await;
        let mut socket = connect(mesh, mesh.service_addr("web", HTTP)).await;
        mesh.write("deny", deny);
        assert!(
            socket.next().await.is_none_or(|end| end.is_err()),
            "the socket is closed"
        );
        mesh.wait_for_metric("web", "inbound_tcp_authz_terminate_total", &[], 1.)
            .await;
    });
}

/// An application that announces and accepts extended CONNECT, and echoes the bytes.
async fn extended_connect_app(mesh: &Mesh) -> App {
    apps::serve_tcp(mesh.listen("web", HTTP).await, |stream| async move {
        let mut connection = h2::server::Builder::new()
            .enable_connect_protocol()
            .handshake(stream)
            .await
            .unwrap();
        while let Some(Ok((req, mut respond))) = connection.accept().await {
            tokio::spawn(async move {
                let protocol = req
                    .extensions()
                    .get::<Protocol>()
                    .map(|protocol| protocol.as_str().to_owned());
                assert_eq!((protocol.as_deref(), req.uri().path()), (Some("chat"), "/room"));
                let mut send = respond.send_response(Response::new(()), false).unwrap();
                let mut received = req.into_body();
                while let Some(data) = received.data().await {
                    let data = data.unwrap();
                    received.flow_control().release_capacity(data.len()).unwrap();
                    send.send_data(data, false).unwrap();
                }
                send.send_data(Bytes::new(), true).unwrap();
            });
        }
    })
}

/// Sends an extended CONNECT and returns its response. If it is accepted, sends 1 MiB and expects it back.
async fn send_extended_connect(stream: TcpStream) -> Response<()> {
    let (send, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    eventually("the proxy announces extended CONNECT", async || {
        send.is_extended_connect_protocol_enabled().then_some(())
    })
    .await;
    let req = Request::builder().method(Method::CONNECT).uri("http://web.test/room");
    let req = req.extension(Protocol::from_static("chat")).body(()).unwrap();
    let (rsp, mut body) = send.ready().await.unwrap().send_request(req, false).unwrap();
    let (head, mut received) = rsp.await.unwrap().into_parts();
    if head.status.is_success() {
        let sent = Bytes::from_iter((0..1 << 20).map(|n: u32| (n % 251) as u8));
        body.send_data(sent.clone(), true).unwrap();
        let mut got = Vec::new();
        while let Some(data) = received.data().await {
            let data = data.unwrap();
            received.flow_control().release_capacity(data.len()).unwrap();
            got.extend_from_slice(&data);
        }
        assert!(got == sent, "{} bytes", got.len());
    }
    Response::from_parts(head, ())
}

#[test]
fn an_extended_connect_passes_where_the_application_takes_it() {
    meshed().run(async |mesh: &Mesh| {
        let _app = extended_connect_app(mesh).await;
        for _ in 0..3 {
            let rsp = send_extended_connect(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
            assert_eq!(rsp.status(), 200);
        }
        let rsp = send_extended_connect(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        assert_eq!(rsp.status(), 200);
        assert_eq!(n_peer_connections(mesh).await, 1.);
    });
}

#[test]
fn an_extended_connect_is_refused_where_the_application_has_not_announced_it() {
    meshed().unmeshed("legacy").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "legacy").await;
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, |_| async { Response::new(full("ok")) });
        for (app, direction) in [("web", "inbound"), ("legacy", "outbound")] {
            let rsp = send_extended_connect(mesh.dial("client", mesh.service_addr(app, HTTP)).await).await;
            let cause = rsp.headers()["l5d-proxy-cause"].to_str().unwrap();
            assert_eq!(rsp.status(), 501, "{cause}");
            assert!(
                cause.starts_with(&format!("no-extended-connect; direction={direction}; ")),
                "{cause}"
            );
        }
    });
}
