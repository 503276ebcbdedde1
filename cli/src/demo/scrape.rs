//! Queries admin servers inside network namespaces for readiness and metrics.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use tulle_core::netns::Namespace;

/// A connection to one admin server, opened again when it breaks.
pub(super) struct Scraper {
    host: Arc<Namespace>,
    port: u16,
    connection: Option<SendRequest<Empty<Bytes>>>,
}

impl Scraper {
    /// A client of a server on the loopback address of this host.
    pub(super) fn new(host: Arc<Namespace>, port: u16) -> Self {
        Self {
            host,
            port,
            connection: None,
        }
    }

    /// Returns the body of a successful response.
    pub(super) async fn get(&mut self, path: &str) -> anyhow::Result<String> {
        // A reused connection may have died with its process, so a failure on it is retried on a new one.
        let kept = self.connection.is_some();
        match timeout(SCRAPE_TIMEOUT, self.exchange(path))
            .await
            .context("the request timed out")
            .flatten()
        {
            Err(_) if kept => {
                self.connection = None;
                timeout(SCRAPE_TIMEOUT, self.exchange(path))
                    .await
                    .context("the request timed out")?
            }
            answer => answer,
        }
    }

    async fn exchange(&mut self, path: &str) -> anyhow::Result<String> {
        let mut connection = match self.connection.take() {
            Some(connection) if !connection.is_closed() => connection,
            _ => self.connect().await?,
        };
        let request = Request::get(path).header("host", "localhost").body(Empty::new());
        let response = connection
            .send_request(request.context("building the request")?)
            .await?;
        let status = response.status();
        let body = match Limited::new(response.into_body(), MAX_BODY_BYTES).collect().await {
            Ok(body) => body.to_bytes(),
            Err(err) => bail!("reading {path}: {err}"),
        };
        self.connection = Some(connection);
        ensure!(
            status.is_success(),
            "{path} answered {status}: {}",
            String::from_utf8_lossy(&body).trim()
        );
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    async fn connect(&self) -> anyhow::Result<SendRequest<Empty<Bytes>>> {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        // A socket belongs to the namespace in which it is created. Loopback answers immediately, so blocking here is short.
        let stream = self.host.run(|| TcpStream::connect_timeout(&addr, SCRAPE_TIMEOUT))??;
        stream.set_nonblocking(true)?;
        let stream = tokio::net::TcpStream::from_std(stream)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // The task ends when the sender is dropped or the server closes the connection.
        tokio::spawn(connection);
        Ok(sender)
    }
}

const SCRAPE_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_BODY_BYTES: usize = 16 << 20;
