//! Connections with a verified identity that are opened before a flood and used during it.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::Streaming;
use tulle_control::tls::client::Channel;
use tulle_core::netns::Namespace;
use tulle_proto::tap::TapEvent;
use tulle_proto::tap::tap_event::{self, Http, http};

use super::clients::{self, GrpcClient, GrpcRequest, WellBehavedClient};

/// A meshed client that keeps its connections open.
#[derive(Clone)]
pub(crate) struct MeshedClient<'a> {
    host: &'a Arc<Namespace>,
    addr: SocketAddr,
    usage: Usage<'a>,
    n_connections: usize,
}

#[derive(Clone)]
enum Usage<'a> {
    Http(MeshedHttp<'a>),
    Grpc(GrpcClient<'a>, GrpcRequest),
    /// A tap, and a client whose requests it must show.
    Tap(GrpcClient<'a>, WellBehavedClient<'a>),
}

/// Requests over HTTP/1 inside TLS.
#[derive(Clone)]
pub(crate) struct MeshedHttp<'a> {
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) server: ServerName<'static>,
    /// Sent before HTTP.
    pub(crate) prefix: Vec<u8>,
    pub(crate) path: &'a str,
}

/// The open connections of a client.
pub(crate) struct HeldConnections<'a> {
    client: MeshedClient<'a>,
    connections: Vec<Mutex<Connection>>,
    /// The connections use it until they are dropped.
    runtime: Runtime,
}

enum Connection {
    Http(Box<TlsStream<TcpStream>>),
    Grpc(Channel),
    Tap {
        events: Box<Streaming<TapEvent>>,
        _channel: Channel,
    },
}

impl<'a> MeshedClient<'a> {
    pub(crate) fn http(host: &'a Arc<Namespace>, addr: SocketAddr, http: MeshedHttp<'a>) -> Self {
        Self::new(host, addr, Usage::Http(http))
    }

    pub(crate) fn grpc(
        host: &'a Arc<Namespace>,
        addr: SocketAddr,
        client: GrpcClient<'a>,
        request: GrpcRequest,
    ) -> Self {
        Self::new(host, addr, Usage::Grpc(client, request))
    }

    /// `tapped` sends the requests that the tap must show.
    pub(crate) fn tap(
        host: &'a Arc<Namespace>,
        addr: SocketAddr,
        client: GrpcClient<'a>,
        tapped: WellBehavedClient<'a>,
    ) -> Self {
        Self::new(host, addr, Usage::Tap(client, tapped))
    }

    fn new(host: &'a Arc<Namespace>, addr: SocketAddr, usage: Usage<'a>) -> Self {
        Self {
            host,
            addr,
            usage,
            // The client has more connections than each of two hundred attackers: if identities had no effect, the meshed client
            // would be evicted first.
            n_connections: 3,
        }
    }

    /// Opens the connections.
    pub(crate) fn open(&self) -> anyhow::Result<HeldConnections<'a>> {
        // Its threads are in the namespace, too.
        let open = || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?;
            let open_all = async {
                let mut connections = Vec::new();
                for _ in 0..self.n_connections {
                    connections.push(Mutex::new(self.connect().await?));
                }
                anyhow::Ok(connections)
            };
            let connections = runtime.block_on(async { timeout(RESPONSE_TIMEOUT, open_all).await })??;
            Ok(HeldConnections {
                client: self.clone(),
                connections,
                runtime,
            })
        };
        self.host.run(open)?
    }

    async fn connect(&self) -> anyhow::Result<Connection> {
        Ok(match &self.usage {
            Usage::Http(http) => {
                let tcp = TcpStream::connect(self.addr).await?;
                let connector = TlsConnector::from(http.config.clone());
                let mut tls = connector.connect(http.server.clone(), tcp).await?;
                tls.write_all(&http.prefix).await?;
                Connection::Http(Box::new(tls))
            }
            Usage::Grpc(client, _) => Connection::Grpc(client.connect(self.addr).await?),
            Usage::Tap(client, _) => {
                let channel = client.connect(self.addr).await?;
                let events = clients::tap(channel.clone()).await?;
                Connection::Tap {
                    events: Box::new(events),
                    _channel: channel,
                }
            }
        })
    }
}

impl HeldConnections<'_> {
    /// Uses each connection once; the error describes a wrong response.
    pub(crate) fn use_all(&self) -> anyhow::Result<()> {
        if let Usage::Tap(_, tapped) = &self.client.usage {
            tapped.send_and_check().context("the request for the tap")?;
        }
        for connection in &self.connections {
            let mut connection = connection.lock();
            let using = async { timeout(RESPONSE_TIMEOUT, self.client.usage.use_once(&mut connection)).await };
            self.runtime.block_on(using).context("there is no answer")??;
        }
        Ok(())
    }
}

impl Usage<'_> {
    async fn use_once(&self, connection: &mut Connection) -> anyhow::Result<()> {
        match (self, connection) {
            (Self::Http(http), Connection::Http(tls)) => http.request(tls).await,
            (Self::Grpc(_, request), Connection::Grpc(channel)) => request.send(channel.clone()).await,
            (Self::Tap(..), Connection::Tap { events, .. }) => {
                // The events of one request end with that of its response.
                while !is_response_end(&events.message().await?.context("the tap has ended")?) {}
                Ok(())
            }
            _ => unreachable!("the connection is of this client"),
        }
    }
}

impl MeshedHttp<'_> {
    async fn request(&self, tls: &mut TlsStream<TcpStream>) -> anyhow::Result<()> {
        let request = format!("GET {} HTTP/1.1\r\nhost: x\r\n\r\n", self.path);
        tls.write_all(request.as_bytes()).await?;
        tls.flush().await?;
        let mut answer = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&answer);
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
                let length = head.to_ascii_lowercase();
                let length = length.split("content-length: ").nth(1).context("there is no length")?;
                let length: usize = length.lines().next().unwrap_or_default().parse()?;
                if body.len() >= length {
                    return Ok(());
                }
            }
            ensure!(
                tls.read_buf(&mut answer).await? > 0,
                "the connection has ended: {answer:?}"
            );
        }
    }
}

fn is_response_end(event: &TapEvent) -> bool {
    let Some(tap_event::Event::Http(Http { event })) = &event.event else {
        return false;
    };
    matches!(event, Some(http::Event::ResponseEnd(_)))
}

impl fmt::Display for HeldConnections<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let usage = match &self.client.usage {
            Usage::Http(_) => "requests inside TLS",
            Usage::Grpc(..) => "gRPC",
            Usage::Tap(..) => "a tap",
        };
        write!(f, "{usage} on open connections to {}", self.client.addr)
    }
}

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
