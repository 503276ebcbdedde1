//! The application of a row: reads requests by the letter, remembers them, and answers with the bytes it is told.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::cases::OK;
use super::message::{self, Message};

/// What rows share with the application.
#[derive(Default)]
pub(super) struct State {
    pub(super) answer: Vec<u8>,
    pub(super) requests: Vec<Message>,
}

/// Serves until it is dropped.
pub(super) async fn serve(listener: TcpListener, state: Arc<Mutex<State>>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    connections.spawn(answer(stream, state.clone()));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Answers until the answer is one that ends its connection.
async fn answer(mut stream: TcpStream, state: Arc<Mutex<State>>) -> io::Result<()> {
    let mut bytes = Vec::new();
    loop {
        let request = loop {
            if let Some((request, used)) = message::read(&bytes, message::End::Unknown) {
                bytes.drain(..used);
                break request;
            }
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(());
            }
        };
        let answer = if request.first_line.contains(" /first ") {
            OK.as_bytes().to_vec()
        } else {
            let mut state = state.lock();
            state.requests.push(request);
            state.answer.clone()
        };
        stream.write_all(&answer).await?;
        // Whatever is not whole by itself ends with its connection, and so does a row's own answer.
        if answer != OK.as_bytes() {
            return stream.shutdown().await;
        }
    }
}
