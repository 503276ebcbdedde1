//! The application behind the sidecar: answers whatever it gets, and remembers which connections' bytes reached it.

use std::collections::BTreeSet;
use std::net::{Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Response};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tulle_core::netns::Namespace;

/// What an answer of the application begins with that is no HTTP.
pub(super) const BYTES: &str = "application: bytes";
/// The greeting of a client that says nothing.
pub(super) const GREETING: &str = "application: greeting";
/// The header of its answers in HTTP.
pub(super) const HEADER: &str = "x-application";
/// The header of requests that says which connection this is.
pub(super) const TOKEN: &str = "x-token";

/// What has reached the application.
#[derive(Clone, Default)]
pub(super) struct Reached(Arc<Mutex<BTreeSet<String>>>);

impl Reached {
    pub(super) fn contains(&self, token: &str) -> bool {
        self.0.lock().contains(token)
    }

    /// Remembers each token in some bytes.
    fn note(&self, bytes: &[u8]) {
        let text = String::from_utf8_lossy(bytes);
        let found = text.match_indices("token-").filter_map(|(at, _)| {
            let (token, _) = text[at..].split_once('.')?;
            Some(token.to_owned())
        });
        self.0.lock().extend(found);
    }
}

/// Opens a listener for both families on each of these ports.
pub(super) fn listen(host: &Namespace, ports: &[u16]) -> Vec<TcpListener> {
    let bind = |port: &u16| {
        let listener = TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, *port))).unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    };
    host.run(|| ports.iter().map(bind).collect()).unwrap()
}

/// Serves all connections until the runtime ends.
pub(super) fn serve(listeners: Vec<TcpListener>) -> Reached {
    let reached = Reached::default();
    for listener in listeners {
        let (listener, reached) = (tokio::net::TcpListener::from_std(listener).unwrap(), reached.clone());
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let reached = reached.clone();
                // Whatever ends a connection early shows at the client.
                tokio::spawn(async move { connection(stream, &reached).await.ok() });
            }
        });
    }
    reached
}

async fn connection(mut stream: TcpStream, reached: &Reached) -> anyhow::Result<()> {
    let mut first = [0; 3];
    if timeout(SILENCE, stream.peek(&mut first)).await.is_err() {
        stream.write_all(GREETING.as_bytes()).await?;
    }
    let n = stream.peek(&mut first).await?;
    match &first[..n] {
        b"PRI" => http2(stream, reached).await,
        _ => bytes(stream, reached).await,
    }
}

/// Answers HTTP/1 as such, and all else once nothing more comes.
async fn bytes(mut stream: TcpStream, reached: &Reached) -> anyhow::Result<()> {
    let mut said = Vec::new();
    loop {
        let is_late = !said.is_empty();
        let reading = stream.read_buf(&mut said);
        let read = if is_late {
            timeout(SILENCE, reading).await
        } else {
            Ok(reading.await)
        };
        reached.note(&said);
        let answer = match read {
            Ok(Ok(0)) => return Ok(()),
            Ok(Err(error)) => return Err(error.into()),
            Ok(Ok(_)) if said.ends_with(b"\r\n\r\n") && is_request(&said) => {
                format!("HTTP/1.1 200 OK\r\n{HEADER}: yes\r\ncontent-length: 0\r\n\r\n")
            }
            Ok(Ok(_)) => continue,
            Err(_) => BYTES.to_owned(),
        };
        stream.write_all(answer.as_bytes()).await?;
        said.clear();
    }
}

fn is_request(said: &[u8]) -> bool {
    let line = said.split(|byte| *byte == b'\r').next().unwrap_or_default();
    line.ends_with(b" HTTP/1.1")
}

async fn http2(stream: TcpStream, reached: &Reached) -> anyhow::Result<()> {
    let mut connection = h2::server::handshake(stream).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, mut respond) = accepted?;
        reached.note(told(request.headers()));
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

fn told(headers: &HeaderMap) -> &[u8] {
    headers.get(TOKEN).map_or(b"", |token| token.as_bytes())
}

pub(super) const GRPC: &str = "application/grpc";
/// After this a client is taken for silent; the sidecar's own limits are longer.
const SILENCE: Duration = Duration::from_secs(1);
