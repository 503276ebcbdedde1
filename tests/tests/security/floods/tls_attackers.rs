//! Attackers that complete a TLS handshake, with or without an identity.

use std::fmt;
use std::future::pending;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use futures_util::future::{join_all, poll_fn};
use h2::SendStream;
use http::Request;
use prost::Message as _;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::AsyncWriteExt as _;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tulle_proto::transport::session_protocol::Kind;
use tulle_proto::transport::{self, SessionProtocol};

/// How attackers use TLS on a port.
#[derive(Clone)]
pub(crate) struct TlsAttack {
    /// The attackers, for messages.
    pub(crate) attackers: &'static str,
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) server: ServerName<'static>,
    /// Sent before HTTP.
    pub(crate) prefix: Vec<u8>,
    pub(crate) behaviours: &'static [TlsBehaviour],
    pub(crate) path: &'static str,
    /// Bytes of each request body over HTTP/2, which does not end.
    pub(crate) stream_bytes: usize,
}

/// What an attacker does after the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TlsBehaviour {
    Silent,
    /// HTTP/2 without a request.
    NoRequest,
    /// HTTP/2 with sixteen streams whose bodies do not end.
    Streams,
    /// A request body that does not end. Nine MiB of it are sent.
    Body,
}

/// The connections of one flood, which this runtime serves.
pub(crate) struct TlsFlood {
    // Fields drop in this order.
    _tasks: JoinSet<()>,
    _runtime: Runtime,
    n_connections: usize,
    /// Increases with each stream and each byte that an attacker sends.
    progress: Arc<AtomicU64>,
}

/// One connection.
struct Attacker {
    attack: TlsAttack,
    behaviour: TlsBehaviour,
    progress: Arc<AtomicU64>,
}

impl TlsBehaviour {
    pub(crate) fn n_connections(self) -> usize {
        match self {
            Self::Silent | Self::NoRequest | Self::Streams => 400,
            Self::Body => 50,
        }
    }
}

/// The transport header before requests to a port of the application through the proxy's own port.
pub(crate) fn transport_header(port: u16, protocol: Kind) -> Vec<u8> {
    let message = transport::Header {
        port: port.into(),
        name: String::new(),
        session_protocol: Some(SessionProtocol { kind: Some(protocol) }),
    };
    let message = message.encode_to_vec();
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&b"transport.l5d.io/v1\r\n\r\n"[..], &length, &message].concat()
}

impl fmt::Debug for TlsAttack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.attackers)
    }
}

impl TlsFlood {
    /// Starts attackers on these connections, and waits until each has ended its handshake.
    pub(super) fn start(
        attack: &TlsAttack,
        behaviour: TlsBehaviour,
        connections: impl Iterator<Item = TcpStream>,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let progress = Arc::new(AtomicU64::new(0));
        let (opening_tx, opening_rx) = mpsc::channel::<()>();
        let mut tasks = JoinSet::new();
        let mut n_connections = 0;
        for connection in connections {
            n_connections += 1;
            let attacker = Attacker {
                attack: attack.clone(),
                behaviour,
                progress: progress.clone(),
            };
            let opening = opening_tx.clone();
            // Errors end the connection: the server has closed it.
            let task = async move { drop(attacker.run(connection, opening).await) };
            tasks.spawn_on(task, runtime.handle());
        }
        drop(opening_tx);
        // Nothing is sent: the channel closes when the last handshake has ended.
        let _ = opening_rx.recv_timeout(MAX_OPENING_TIME);
        Self {
            _tasks: tasks,
            _runtime: runtime,
            n_connections,
            progress,
        }
    }

    pub(super) fn n_connections(&self) -> usize {
        self.n_connections
    }

    /// Waits until the attackers have sent nothing for a time.
    pub(super) fn wait_until_stalled(&self) {
        let deadline = Instant::now() + MAX_SENDING_TIME;
        let mut seen = None;
        while Instant::now() < deadline {
            let progress = self.progress.load(Ordering::Relaxed);
            if seen.replace(progress) == Some(progress) {
                return;
            }
            thread::sleep(STALL_INTERVAL);
        }
    }
}

impl Attacker {
    /// Attacks until the server closes the connection. `opening` is dropped at the end of the handshake.
    async fn run(self, tcp: TcpStream, opening: mpsc::Sender<()>) -> anyhow::Result<()> {
        tcp.set_nonblocking(true)?;
        let tcp = tokio::net::TcpStream::from_std(tcp)?;
        let TlsAttack {
            config, server, prefix, ..
        } = &self.attack;
        let connecting = TlsConnector::from(config.clone()).connect(server.clone(), tcp);
        let mut tls = timeout(MAX_OPENING_TIME, connecting).await??;
        tls.write_all(prefix).await?;
        match self.behaviour {
            TlsBehaviour::Silent => {
                drop(opening);
                pending().await
            }
            TlsBehaviour::NoRequest => self.open_streams(tls, opening, 0).await,
            TlsBehaviour::Streams => self.open_streams(tls, opening, N_STREAMS).await,
            TlsBehaviour::Body => self.send_long_body(tls, opening).await,
        }
    }

    async fn open_streams(
        &self,
        tls: TlsStream<tokio::net::TcpStream>,
        opening: mpsc::Sender<()>,
        n: usize,
    ) -> anyhow::Result<()> {
        let (mut client, connection) = h2::client::handshake(tls).await?;
        drop(opening);
        let requests = async {
            let (mut responses, mut bodies) = (Vec::new(), Vec::new());
            for _ in 0..n {
                client = client.ready().await?;
                let req = Request::post(format!("http://x{}", self.attack.path))
                    .header("content-type", "application/grpc")
                    .header("te", "trailers")
                    .body(())?;
                let (response, body) = client.send_request(req, false)?;
                self.progress.fetch_add(1, Ordering::Relaxed);
                responses.push(response);
                bodies.push(self.send_message_start(body));
            }
            // The streams stay open.
            let _bodies = join_all(bodies).await;
            pending().await
        };
        tokio::select! {
            ended = connection => ended.context("the server has closed the connection"),
            result = requests => result,
        }
    }

    /// Sends the start of a gRPC message, as far as the server permits.
    async fn send_message_start(&self, mut body: SendStream<Bytes>) -> SendStream<Bytes> {
        let length = u32::try_from(self.attack.stream_bytes).unwrap();
        let mut message = vec![0];
        message.extend((length + 1).to_be_bytes());
        message.resize(message.len() + self.attack.stream_bytes, 0);
        let mut message = Bytes::from(message);
        while !message.is_empty() {
            body.reserve_capacity(message.len());
            let Some(Ok(n)) = poll_fn(|cx| body.poll_capacity(cx)).await else {
                break;
            };
            let part = message.split_to(n.min(message.len()));
            self.progress.fetch_add(part.len() as u64, Ordering::Relaxed);
            if body.send_data(part, false).is_err() {
                break;
            }
        }
        body
    }

    async fn send_long_body(
        &self,
        mut tls: TlsStream<tokio::net::TcpStream>,
        opening: mpsc::Sender<()>,
    ) -> anyhow::Result<()> {
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.attack.path,
            (N_BODY_PIECES + 1) * MIB,
        );
        tls.write_all(head.as_bytes()).await?;
        tls.flush().await?;
        drop(opening);
        let piece = vec![b' '; MIB];
        for _ in 0..N_BODY_PIECES {
            let mut rest = &piece[..];
            while !rest.is_empty() {
                let n = tls.write(rest).await?;
                self.progress.fetch_add(n as u64, Ordering::Relaxed);
                rest = &rest[n..];
            }
        }
        tls.flush().await?;
        pending().await
    }
}

/// The behaviours on a port that serves no HTTP/2. `Streams` uses it nevertheless.
pub(crate) const ON_HTTP1: &[TlsBehaviour] = &[TlsBehaviour::Silent, TlsBehaviour::Streams, TlsBehaviour::Body];
/// The behaviours on a port that serves HTTP/2.
pub(crate) const ON_HTTP2: &[TlsBehaviour] = &[TlsBehaviour::Silent, TlsBehaviour::NoRequest, TlsBehaviour::Streams];
/// ALPN of connections with a transport header.
pub(crate) const TRANSPORT_HEADER: &[u8] = b"transport.l5d.io/v1";
const N_STREAMS: usize = 16;
const MIB: usize = 1 << 20;
/// Below the maximum length of a review, so that it is not refused for its length.
const N_BODY_PIECES: usize = 9;
const MAX_OPENING_TIME: Duration = Duration::from_secs(10);
const MAX_SENDING_TIME: Duration = Duration::from_secs(5);
/// After this time without progress, attackers count as stalled.
const STALL_INTERVAL: Duration = Duration::from_millis(200);
