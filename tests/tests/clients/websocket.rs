//! A WebSocket client library.

use std::collections::BTreeSet;
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
        for n in 0..N_MESSAGES {
            sink.send(message(n)).await.unwrap();
        }
        sink.close().await.unwrap();
    };
    let receiving = async {
        for n in 0..N_MESSAGES {
            assert_eq!(source.next().await.unwrap().unwrap(), message(n));
        }
        assert!(source.next().await.unwrap().unwrap().is_close());
    };
    tokio::join!(sending, receiving);
    println!("{N_MESSAGES} WebSocket messages were echoed in {:?}", started.elapsed());
}

/// Text and binary messages in turn, each with lengths for all three encodings of the length in a frame header.
fn message(n: usize) -> Message {
    let length = match n {
        n if n.is_multiple_of(999) => 70_000,
        n if n.is_multiple_of(9) => 200,
        _ => 5,
    };
    let mut text = n.to_string();
    text.extend(std::iter::repeat_n('.', length));
    if n.is_multiple_of(2) {
        Message::text(text)
    } else {
        Message::binary(text)
    }
}

const N_MESSAGES: usize = 10_000;

#[test]
fn text_and_binary_messages_have_all_encodings_of_the_length() {
    let encodings = |is_kind: fn(&Message) -> bool| -> BTreeSet<usize> {
        let lengths = (0..N_MESSAGES)
            .map(message)
            .filter(is_kind)
            .map(|message| message.len());
        lengths
            .map(|length| match length {
                ..=125 => 0,
                126..=0xffff => 1,
                _ => 2,
            })
            .collect()
    };
    assert_eq!(encodings(Message::is_text), [0, 1, 2].into());
    assert_eq!(encodings(Message::is_binary), [0, 1, 2].into());
}
