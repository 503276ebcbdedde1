//! WebSocket between a client and a server of a library, through both sidecars.

use futures_util::{SinkExt as _, StreamExt as _};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{CloseCode, Data, OpCode};
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, accept_async_with_config, client_async_with_config};
use tulle_tests::apps::{self, App};
use tulle_tests::mesh::{Builder, HTTP, Mesh, mesh};

type Socket = WebSocketStream<TcpStream>;

fn config() -> WebSocketConfig {
    // Larger than any message here.
    WebSocketConfig::default()
        .max_message_size(Some(8 << 20))
        .max_frame_size(Some(8 << 20))
}

fn meshed() -> Builder {
    mesh().workload("client").workload("web")
}

/// An application that runs `serve` for each WebSocket.
async fn server<F>(mesh: &Mesh, serve: impl Fn(Socket) -> F + Clone + Send + Sync + 'static) -> App
where
    F: Future<Output = ()> + Send + 'static,
{
    apps::raw(mesh.listen("web", HTTP).await, move |stream| {
        let serve = serve.clone();
        async move { serve(accept_async_with_config(stream, Some(config())).await.unwrap()).await }
    })
}

async fn connect(mesh: &Mesh) -> Socket {
    let stream = mesh.dial("client", mesh.service("web", HTTP)).await;
    let connected = client_async_with_config("ws://web.test/", stream, Some(config())).await;
    let (socket, rsp) = connected.unwrap();
    assert_eq!(rsp.status(), 101);
    socket
}

/// Sends back whatever is a message, to the end.
async fn echo(mut socket: Socket) {
    while let Some(Ok(message)) = socket.next().await {
        if message.is_text() || message.is_binary() {
            socket.send(message).await.unwrap();
        }
    }
}

async fn next(socket: &mut Socket) -> Message {
    socket.next().await.expect("it goes on").expect("it is well")
}

#[test]
fn every_kind_of_message_of_every_length_is_echoed() {
    meshed().run(async |mesh: &Mesh| {
        let _app = server(mesh, echo).await;
        let mut socket = connect(mesh).await;
        // Where the length takes another form, and more than anything holds at once.
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
fn fragments_are_put_together_and_pings_between_them_are_answered() {
    meshed().run(async |mesh: &Mesh| {
        let _app = server(mesh, echo).await;
        let mut socket = connect(mesh).await;
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
        let (payload, unasked) = (Message::Ping(vec![7; 125].into()), Message::Pong("unasked".into()));
        let (asks, tells) = (payload.clone(), unasked.clone());
        let _app = server(mesh, move |mut socket| {
            let (asks, tells) = (asks.clone(), tells.clone());
            async move {
                socket.send(asks.clone()).await.unwrap();
                assert_eq!(next(&mut socket).await, Message::Pong(asks.into_data()));
                socket.send(tells).await.unwrap();
                echo(socket).await;
            }
        })
        .await;
        let mut socket = connect(mesh).await;
        assert_eq!(next(&mut socket).await, payload, "it is answered as it is read");
        assert_eq!(next(&mut socket).await, unasked);
        socket.send(payload.clone()).await.unwrap();
        assert_eq!(next(&mut socket).await, Message::Pong(payload.into_data()));
    });
}

#[test]
fn codes_and_reasons_of_the_end_arrive_whoever_says_them() {
    let codes = [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1011, 3000, 4999];
    meshed().run(async |mesh: &Mesh| {
        // Told which code to end with; and who is told the end by the client tells it by the next answer.
        let _app = server(mesh, |mut socket| async move {
            let asked: u16 = next(&mut socket).await.into_text().unwrap().parse().unwrap();
            if asked > 0 {
                socket.close(Some(frame(asked))).await.unwrap();
            }
            let last = socket.next().await;
            assert!(matches!(last, Some(Ok(Message::Close(Some(_))))), "{last:?}");
            while socket.next().await.is_some() {}
        })
        .await;
        for code in codes {
            let mut socket = connect(mesh).await;
            socket.send(Message::text(code.to_string())).await.unwrap();
            assert_eq!(next(&mut socket).await, Message::Close(Some(frame(code))));
            assert!(socket.next().await.is_none(), "and then the connection ends");

            let mut socket = connect(mesh).await;
            socket.send(Message::text("0")).await.unwrap();
            socket.close(Some(frame(code))).await.unwrap();
            assert_eq!(next(&mut socket).await, Message::Close(Some(frame(code))), "the answer");
            assert!(socket.next().await.is_none());
        }
    });
}

fn frame(code: u16) -> CloseFrame {
    CloseFrame {
        code: CloseCode::from(code),
        reason: format!("because of {code}").into(),
    }
}

#[test]
fn a_side_that_breaks_off_is_not_taken_for_one_that_has_said_the_end() {
    meshed().run(async |mesh: &Mesh| {
        let _app = server(mesh, |mut socket| async move {
            next(&mut socket).await; // and away
        })
        .await;
        let mut socket = connect(mesh).await;
        socket.send(Message::text("leave")).await.unwrap();
        let broken = socket.next().await;
        assert!(
            matches!(broken, Some(Err(Error::Protocol(_) | Error::Io(_)))),
            "{broken:?}"
        );
    });
}
