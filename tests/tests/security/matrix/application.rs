//! The application behind the sidecar: answers any input, and records the tokens of the connections that reach it.

use std::collections::BTreeSet;
use std::net::{Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Response};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tulle_core::descriptors;
use tulle_core::netns::Namespace;

/// The start of an answer that is not HTTP.
pub(super) const BYTES: &str = "application: bytes";
/// The greeting for a silent client.
pub(super) const GREETING: &str = "application: greeting";
/// The header of its HTTP responses.
pub(super) const HEADER: &str = "x-application";
/// The request header with the token of the connection.
pub(super) const TOKEN: &str = "x-token";

/// The tokens that reached the application.
#[derive(Clone, Default)]
pub(super) struct ReceivedTokens(Arc<Mutex<BTreeSet<String>>>);

impl ReceivedTokens {
    pub(super) fn contains(&self, token: &str) -> bool {
        self.0.lock().contains(token)
    }

    /// Records each token in some bytes.
    fn record_tokens(&self, bytes: &[u8]) {
        let text = String::from_utf8_lossy(bytes);
        let found = text.match_indices("token-").filter_map(|(at, _)| {
            let (token, _) = text[at..].split_once('.')?;
            Some(token.to_owned())
        });
        self.0.lock().extend(found);
    }
}

/// Opens a listener for both families on each port.
pub(super) fn listen(host: &Namespace, ports: &[u16]) -> Vec<TcpListener> {
    // A state can need more ports than the default limit permits.
    descriptors::raise_limit();
    let bind = |port: &u16| {
        let listener = TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, *port))).unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    };
    host.run(|| ports.iter().map(bind).collect()).unwrap()
}

/// Serves all connections until the runtime ends.
pub(super) fn serve(listeners: Vec<TcpListener>) -> ReceivedTokens {
    let received_tokens = ReceivedTokens::default();
    for listener in listeners {
        let (listener, received_tokens) = (
            tokio::net::TcpListener::from_std(listener).unwrap(),
            received_tokens.clone(),
        );
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let received_tokens = received_tokens.clone();
                // An error ends the connection early, which the client reports.
                tokio::spawn(async move { serve_connection(stream, &received_tokens).await.ok() });
            }
        });
    }
    received_tokens
}

async fn serve_connection(mut stream: TcpStream, received_tokens: &ReceivedTokens) -> anyhow::Result<()> {
    let mut first = [0; 3];
    if timeout(IDLE_TIMEOUT, stream.peek(&mut first)).await.is_err() {
        stream.write_all(GREETING.as_bytes()).await?;
    }
    let n = stream.peek(&mut first).await?;
    match &first[..n] {
        b"PRI" => serve_http2(stream, received_tokens).await,
        _ => serve_bytes(stream, received_tokens).await,
    }
}

/// Answers HTTP/1 with HTTP, and other bytes after the client stops sending.
async fn serve_bytes(mut stream: TcpStream, received_tokens: &ReceivedTokens) -> anyhow::Result<()> {
    let mut received = Vec::new();
    loop {
        let has_input = !received.is_empty();
        let reading = stream.read_buf(&mut received);
        let read = if has_input {
            timeout(IDLE_TIMEOUT, reading).await
        } else {
            Ok(reading.await)
        };
        received_tokens.record_tokens(&received);
        let answer = match read {
            Ok(Ok(0)) => return Ok(()),
            Ok(Err(error)) => return Err(error.into()),
            Ok(Ok(_)) if received.ends_with(b"\r\n\r\n") && is_request(&received) => {
                format!("HTTP/1.1 200 OK\r\n{HEADER}: yes\r\ncontent-length: 0\r\n\r\n")
            }
            Ok(Ok(_)) => continue,
            Err(_) => BYTES.to_owned(),
        };
        stream.write_all(answer.as_bytes()).await?;
        received.clear();
    }
}

fn is_request(received: &[u8]) -> bool {
    let line = received.split(|byte| *byte == b'\r').next().unwrap_or_default();
    line.ends_with(b" HTTP/1.1")
}

async fn serve_http2(stream: TcpStream, received_tokens: &ReceivedTokens) -> anyhow::Result<()> {
    let mut connection = h2::server::handshake(stream).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, mut respond) = accepted?;
        received_tokens.record_tokens(token_header(request.headers()));
        let is_grpc = request.headers().get("content-type").is_some_and(|kind| kind == GRPC);
        let answer = Response::builder().header(HEADER, "yes");
        let answer = match is_grpc {
            true => answer.header("content-type", GRPC).header("grpc-status", "0"),
            false => answer,
        };
        respond.send_response(answer.body(())?, true)?;
    }
    Ok(())
}

fn token_header(headers: &HeaderMap) -> &[u8] {
    headers.get(TOKEN).map_or(b"", |token| token.as_bytes())
}

pub(super) const GRPC: &str = "application/grpc";
/// After this time a client counts as silent; the limits of the sidecar are longer.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
