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

/// A client of one admin server. It keeps its connection open, and opens a new one if the connection breaks.
pub(super) struct AdminClient {
    host: Arc<Namespace>,
    port: u16,
    connection: Option<SendRequest<Empty<Bytes>>>,
}

impl AdminClient {
    /// Creates a client of the admin server on the loopback address of this host.
    pub(super) fn new(host: Arc<Namespace>, port: u16) -> Self {
        Self {
            host,
            port,
            connection: None,
        }
    }

    /// Returns the body of a successful response.
    pub(super) async fn get(&mut self, path: &str) -> anyhow::Result<String> {
        // A reused connection may have ended with its process, so after an error the request is sent again on a new connection.
        let reused = self.connection.is_some();
        match timeout(REQUEST_TIMEOUT, self.exchange(path))
            .await
            .context("the request timed out")
            .flatten()
        {
            Err(_) if reused => {
                self.connection = None;
                timeout(REQUEST_TIMEOUT, self.exchange(path))
                    .await
                    .context("the request timed out")?
            }
            result => result,
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
            "{path} responded with status {status}: {}",
            String::from_utf8_lossy(&body).trim()
        );
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    async fn connect(&self) -> anyhow::Result<SendRequest<Empty<Bytes>>> {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        // A socket belongs to the namespace in which it is created. A connection to loopback is established immediately, so this
        // blocks only for a short time.
        let stream = self.host.run(|| TcpStream::connect_timeout(&addr, REQUEST_TIMEOUT))??;
        stream.set_nonblocking(true)?;
        let stream = tokio::net::TcpStream::from_std(stream)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // The task ends when the sender is dropped or the server closes the connection.
        tokio::spawn(connection);
        Ok(sender)
    }
}

const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_BODY_BYTES: usize = 16 << 20;
