//! Reads the metrics page of a sidecar.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::counts::Counts;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("dialling its admin port")]
    Dial(#[source] io::Error),
    #[error("asking for its metrics")]
    Http(#[source] hyper::Error),
    #[error("making a request")]
    Request(#[source] http::Error),
    #[error("its metrics are answered with {0}")]
    Status(StatusCode),
    #[error("reading its metrics, at most {MAX_PAGE} bytes")]
    Read(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("reading what its metrics say")]
    Parse(#[source] tokio::task::JoinError),
    #[error("it did not answer within {LIMIT:?}")]
    Timeout,
}

/// What the sidecar with this admin port has counted.
///
/// # Errors
/// A sidecar that cannot be reached, or has no such page.
pub(super) async fn scrape(admin: SocketAddr) -> Result<Counts, Error> {
    timeout(LIMIT, page(admin)).await.map_err(|_| Error::Timeout)?
}

async fn page(admin: SocketAddr) -> Result<Counts, Error> {
    let stream = TcpStream::connect(admin).await.map_err(Error::Dial)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(Error::Http)?;
    let request = Request::get("/metrics")
        .header(header::HOST, admin.to_string())
        .body(Empty::<Bytes>::new())
        .map_err(Error::Request)?;
    let asking = async move {
        let rsp = sender.send_request(request).await.map_err(Error::Http)?;
        if rsp.status() != StatusCode::OK {
            return Err(Error::Status(rsp.status()));
        }
        let body = Limited::new(rsp.into_body(), MAX_PAGE).collect();
        Ok(body.await.map_err(Error::Read)?.to_bytes())
    };
    // The connection moves the bytes, and ends with the sender.
    let (bytes, _) = tokio::join!(asking, connection);
    let bytes = bytes?;
    // Other services run on this thread.
    let parsed = tokio::task::spawn_blocking(move || Counts::parse(&String::from_utf8_lossy(&bytes)));
    parsed.await.map_err(Error::Parse)
}

/// A busy sidecar's page has a few MiB.
const MAX_PAGE: usize = 8 << 20;
const LIMIT: Duration = Duration::from_secs(3);
