//! Reads the metrics page of a sidecar: by mutual TLS where both sides have a certificate, so that policies can permit it by our
//! identity, and in the clear otherwise.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::body::Body;
use tower::Service as _;
use tracing::debug;
use tulle_core::addr::Addr;

use super::counts::Counts;
use crate::cluster::members::Sidecar;
use crate::model::endpoints::TlsIdentity;
use crate::tls::client::{self, Channel, Peer};
use crate::tls::creds::ServerCreds;

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

/// What a sidecar has counted.
///
/// # Errors
/// A sidecar that cannot be reached, or has no such page.
pub(super) async fn scrape(sidecar: &Sidecar, creds: &ServerCreds) -> Result<Counts, Error> {
    timeout(LIMIT, page(sidecar, creds)).await.map_err(|_| Error::Timeout)?
}

async fn page(sidecar: &Sidecar, creds: &ServerCreds) -> Result<Counts, Error> {
    match connect(sidecar, creds).await {
        Some(channel) => over_tls(channel).await,
        None => in_the_clear(sidecar.admin).await,
    }
}

/// A connection by mutual TLS; none where either side has no certificate, or the other one is not who it should be.
async fn connect(sidecar: &Sidecar, creds: &ServerCreds) -> Option<Channel> {
    let (TlsIdentity::Dns { server_name, .. } | TlsIdentity::Uri { server_name, .. }) = sidecar.identity.as_ref()?;
    let (leaf, anchors) = creds.as_client()?;
    let peer = Peer {
        addr: &Addr::Socket(sidecar.admin),
        name: server_name,
        anchors: &anchors,
    };
    match client::connect(&peer, Some(leaf)).await {
        Ok(channel) => Some(channel),
        Err(error) => {
            debug!(admin = %sidecar.admin, %error, "metrics are asked for in the clear");
            None
        }
    }
}

async fn over_tls(mut channel: Channel) -> Result<Counts, Error> {
    let request = Request::get("/metrics").body(Body::empty()).map_err(Error::Request)?;
    let rsp = channel.call(request).await.map_err(Error::Http)?;
    parse(read(rsp).await?).await
}

async fn in_the_clear(admin: SocketAddr) -> Result<Counts, Error> {
    let stream = TcpStream::connect(admin).await.map_err(Error::Dial)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(Error::Http)?;
    let request = Request::get("/metrics")
        .header(header::HOST, admin.to_string())
        .body(Empty::<Bytes>::new())
        .map_err(Error::Request)?;
    let asking = async move {
        let rsp = sender.send_request(request).await.map_err(Error::Http)?;
        read(rsp).await
    };
    // The connection moves the bytes, and ends with the sender.
    let (bytes, _) = tokio::join!(asking, connection);
    parse(bytes?).await
}

async fn read(rsp: Response<Incoming>) -> Result<Bytes, Error> {
    if rsp.status() != StatusCode::OK {
        return Err(Error::Status(rsp.status()));
    }
    let body = Limited::new(rsp.into_body(), MAX_PAGE).collect();
    Ok(body.await.map_err(Error::Read)?.to_bytes())
}

async fn parse(page: Bytes) -> Result<Counts, Error> {
    // Other services run on this thread.
    let parsed = tokio::task::spawn_blocking(move || Counts::parse(&String::from_utf8_lossy(&page)));
    parsed.await.map_err(Error::Parse)
}

/// A busy sidecar's page has a few MiB.
const MAX_PAGE: usize = 8 << 20;
const LIMIT: Duration = Duration::from_secs(3);
