//! A WebSocket client library.

use std::net::TcpStream as StdStream;

use futures_util::{SinkExt as _, StreamExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message;

use crate::testbed::{HTTP, service, start_testbed};

#[tokio::test]
async fn ten_thousand_messages_are_echoed_over_a_websocket() {
    let Some(testbed) = start_testbed(&[]) else { return };
    let stream = testbed
        .client
        .run(|| StdStream::connect(service(HTTP)))
        .unwrap()
        .unwrap();
    stream.set_nonblocking(true).unwrap();
    let stream = TcpStream::from_std(stream).unwrap();
    let url = format!("ws://{}/ws", service(HTTP));
    let (socket, rsp) = tokio_tungstenite::client_async(url, stream).await.unwrap();
    assert_eq!(rsp.status(), 101);
    let started = Instant::now();
    let (mut sink, mut source) = socket.split();
    let sending = async {
        for n in 0..MESSAGES {
            sink.send(message(n)).await.unwrap();
        }
        sink.close().await.unwrap();
    };
    let receiving = async {
        for n in 0..MESSAGES {
            assert_eq!(source.next().await.unwrap().unwrap(), message(n));
        }
        assert!(source.next().await.unwrap().unwrap().is_close());
    };
    tokio::join!(sending, receiving);
    println!("{MESSAGES} WebSocket messages were echoed in {:?}", started.elapsed());
}

/// Text and binary messages in turn, with lengths for all three header forms.
fn message(n: usize) -> Message {
    let length = [5, 200, 70_000][usize::from(n.is_multiple_of(10)) + usize::from(n.is_multiple_of(1000))];
    let mut text = n.to_string();
    text.extend(std::iter::repeat_n('.', length));
    if n.is_multiple_of(2) {
        Message::text(text)
    } else {
        Message::binary(text)
    }
}

const MESSAGES: usize = 10_000;
