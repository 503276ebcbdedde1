//! The test application: parses requests, records them, and responds with the configured bytes.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::cases::OK;
use super::message::{self, Message};

/// State that the application shares with the test.
#[derive(Default)]
pub(super) struct State {
    pub(super) response: Vec<u8>,
    pub(super) requests: Vec<Message>,
}

/// The path of the first request of each connection. The application responds with `OK`, and does not record the request.
pub(super) const WARM_UP_PATH: &str = "/first";

/// Accepts and serves connections until the future is dropped.
pub(super) async fn serve(listener: TcpListener, state: Arc<Mutex<State>>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    connections.spawn(serve_connection(stream, state.clone()));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Responds to requests until a response ends the connection.
async fn serve_connection(mut stream: TcpStream, state: Arc<Mutex<State>>) -> io::Result<()> {
    let mut bytes = Vec::new();
    loop {
        let request = loop {
            if let Some((request, used)) = message::parse(&bytes, false, message::StreamEnd::Unknown) {
                bytes.drain(..used);
                break request;
            }
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(());
            }
        };
        let response = if request.first_line.split(' ').nth(1) == Some(WARM_UP_PATH) {
            OK.as_bytes().to_vec()
        } else {
            let mut state = state.lock();
            state.requests.push(request);
            state.response.clone()
        };
        stream.write_all(&response).await?;
        // A response other than `OK` ends its connection, because it may be delimited by the end of the connection.
        if response != OK.as_bytes() {
            return stream.shutdown().await;
        }
    }
}
