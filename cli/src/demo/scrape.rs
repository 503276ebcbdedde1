//! Asks admin servers inside namespaces: is it ready, what has it counted.

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

/// A connection to one admin server, made again when it breaks.
pub(super) struct Scraper {
    host: Arc<Namespace>,
    port: u16,
    connection: Option<SendRequest<Empty<Bytes>>>,
}

impl Scraper {
    /// For a server on the loopback address of this host.
    pub(super) fn new(host: Arc<Namespace>, port: u16) -> Self {
        Self {
            host,
            port,
            connection: None,
        }
    }

    /// The body of a successful answer.
    pub(super) async fn get(&mut self, path: &str) -> anyhow::Result<String> {
        // A kept connection may have died with its process; a fresh one tells.
        let kept = self.connection.is_some();
        match timeout(LIMIT, self.exchange(path))
            .await
            .context("asking took too long")
            .flatten()
        {
            Err(_) if kept => {
                self.connection = None;
                timeout(LIMIT, self.exchange(path))
                    .await
                    .context("asking took too long")?
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
        let response = connection.send_request(request.context("making a request")?).await?;
        let status = response.status();
        let body = match Limited::new(response.into_body(), LARGEST).collect().await {
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
        // The socket belongs to the namespace it is made in. Loopback answers at once, so blocking here is short.
        let stream = self.host.run(|| TcpStream::connect_timeout(&addr, LIMIT))??;
        stream.set_nonblocking(true)?;
        let stream = tokio::net::TcpStream::from_std(stream)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // Ends with the sender, or with the server.
        tokio::spawn(connection);
        Ok(sender)
    }
}

const LIMIT: Duration = Duration::from_secs(2);
const LARGEST: usize = 16 << 20;
