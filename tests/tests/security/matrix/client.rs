//! The client: one connection with the TLS of the cell, one function for each kind of input, and the observed result.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request};
use prost::Message as _;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tulle_core::names::port;
use tulle_proto::transport::session_protocol::{Http1, Http2, Kind};
use tulle_proto::transport::{self, SessionProtocol};
use tulle_tests::credentials::{Credentials, Leaf, Validity};

use super::application::{self, GRPC, HEADER, TOKEN};
use super::table::{ClientInput, Header, Identity, InputKind};
use super::testbed::identity;

/// The result of a connection, as the client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Observed {
    /// A response of the application.
    Application,
    /// A response of the proxy.
    Status {
        status: u16,
        /// `grpc-status`.
        grpc: Option<u16>,
        /// The code in `l5d-proxy-cause`.
        cause: Option<String>,
    },
    /// The connection ended without a response.
    Closed,
    /// No response within the time limit.
    Timeout,
    /// The connection was not established.
    Unreachable,
}

/// A client for connections with any identity.
pub(super) struct Client {
    configs: BTreeMap<Identity, Arc<ClientConfig>>,
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Client {
    pub(super) fn new(credentials: &Credentials) -> Self {
        let client = identity("client");
        let leaf = |identity: Identity| match identity {
            Identity::Absent | Identity::Anonymous => None,
            Identity::Permitted => Some(credentials.leaf(&client, Validity::Current)),
            Identity::Other => Some(credentials.leaf(&self::identity("other"), Validity::Current)),
            Identity::OtherDomain => Some(credentials.leaf_in_domain("client", "other.test")),
            Identity::Expired => Some(credentials.leaf(&client, Validity::Expired)),
            Identity::OtherCa => Some(credentials.foreign_leaf(&client)),
        };
        let mut roots = RootCertStore::empty();
        roots.add(certificate(&credentials.anchor.certificate)).unwrap();
        let config = |identity| {
            let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
            let builder = builder.with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
            let builder = builder.with_root_certificates(roots.clone());
            match leaf(identity) {
                None => builder.with_no_client_auth(),
                Some(leaf) => {
                    let (chain, key) = read(&leaf);
                    builder.with_client_auth_cert(chain, key).unwrap()
                }
            }
        };
        let configs = Identity::ALL
            .iter()
            .map(|&identity| (identity, Arc::new(config(identity))));
        Self {
            configs: configs.collect(),
        }
    }

    /// Connects to an address with an identity, sends the input, and waits for the result.
    pub(super) async fn send(&self, sent: ClientInput, identity: Identity, to: SocketAddr, token: &str) -> Observed {
        let proxy = SocketAddr::new(to.ip(), port::INBOUND);
        let dialled = if sent.header == Header::Absent { to } else { proxy };
        let tcp = match timeout(CONNECT_TIMEOUT, TcpStream::connect(dialled)).await {
            Ok(Ok(tcp)) => tcp,
            // The connection was reset right after it was established.
            Ok(Err(error)) if error.kind() == ErrorKind::ConnectionReset => return Observed::Closed,
            Ok(Err(_)) | Err(_) => return Observed::Unreachable,
        };
        let stream: Box<dyn Stream> = match identity {
            Identity::Absent => Box::new(tcp),
            _ => match self.encrypt(tcp, identity, sent.header).await {
                Ok(tls) => Box::new(tls),
                Err(_) => return Observed::Closed,
            },
        };
        self.send_on(stream, sent, to.port(), token).await
    }

    async fn encrypt(
        &self,
        tcp: TcpStream,
        identity: Identity,
        header: Header,
    ) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let mut config = self.configs[&identity].clone();
        if header != Header::Absent {
            Arc::make_mut(&mut config).alpn_protocols = vec![b"transport.l5d.io/v1".to_vec()];
        }
        let name = ServerName::try_from(self::identity("server")).unwrap();
        let connecting = TlsConnector::from(config).connect(name, tcp);
        timeout(RESPONSE_TIMEOUT, connecting)
            .await
            .unwrap_or_else(|late| Err(late.into()))
    }

    async fn send_on(&self, mut stream: Box<dyn Stream>, sent: ClientInput, port: u16, token: &str) -> Observed {
        if stream.write_all(&transport_header(sent.header, port)).await.is_err() {
            return Observed::Closed;
        }
        match sent.kind {
            InputKind::Http1 => http1(stream, token).await,
            InputKind::Http2 => http2(stream, token).await,
            InputKind::Grpc => grpc(stream, token).await,
            InputKind::LowercaseMethod => lowercase_method(stream, token).await,
            InputKind::Tls => tls(stream, &self.configs[&Identity::Anonymous], token).await,
            InputKind::RawBytes => raw(stream, token).await,
            InputKind::Silence => silence(stream).await,
            InputKind::IncompleteHead => incomplete_head(stream, token).await,
        }
    }
}

async fn http1(stream: Box<dyn Stream>, token: &str) -> Observed {
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: server\r\ncontent-length: 0\r\n{TOKEN}: {token}.\r\n\r\n");
    exchange(stream, head.as_bytes()).await
}

/// Sends an HTTP/2 request with prior knowledge.
async fn http2(stream: Box<dyn Stream>, token: &str) -> Observed {
    let req = Request::post(format!("http://server{PATH}"));
    http2_request(stream, req.header(TOKEN, format!("{token}.")), None).await
}

/// Sends a unary gRPC call.
async fn grpc(stream: Box<dyn Stream>, token: &str) -> Observed {
    let req = Request::post(format!("http://server{PATH}"));
    let req = req.header("content-type", GRPC).header("te", "trailers");
    let message = Bytes::from_static(&[0; 5]);
    http2_request(stream, req.header(TOKEN, format!("{token}.")), Some(message)).await
}

/// Sends a request with a lower-case method.
async fn lowercase_method(stream: Box<dyn Stream>, token: &str) -> Observed {
    let head = format!("post {PATH} HTTP/1.1\r\nhost: server\r\ncontent-length: 0\r\n{TOKEN}: {token}.\r\n\r\n");
    exchange(stream, head.as_bytes()).await
}

/// Sends the ClientHello of an application that uses TLS itself.
async fn tls(stream: Box<dyn Stream>, config: &Arc<ClientConfig>, token: &str) -> Observed {
    let name = ServerName::try_from(format!("{token}.test")).unwrap();
    let mut connection = ClientConnection::new(config.clone(), name).unwrap();
    let mut hello = Vec::new();
    connection.write_tls(&mut hello).unwrap();
    exchange(stream, &hello).await
}

/// Sends bytes that are not HTTP.
async fn raw(stream: Box<dyn Stream>, token: &str) -> Observed {
    exchange(stream, format!("\0\x01 {token}. and more\n").as_bytes()).await
}

async fn silence(stream: Box<dyn Stream>) -> Observed {
    exchange(stream, b"").await
}

/// Sends a request line and a header, without the end of the headers.
async fn incomplete_head(stream: Box<dyn Stream>, token: &str) -> Observed {
    let head = format!("GET {PATH} HTTP/1.1\r\nhost: server\r\n{TOKEN}: {token}.\r\n");
    exchange(stream, head.as_bytes()).await
}

/// Sends bytes and reads until the result is clear.
async fn exchange(mut stream: Box<dyn Stream>, bytes: &[u8]) -> Observed {
    // The proxy may refuse before everything is sent; the refusal is read below.
    let _sent = stream.write_all(bytes).await;
    let _flushed = stream.flush().await;
    let mut answer = Vec::new();
    let reading = async {
        loop {
            if let Some(observed) = classify_bytes(&answer) {
                return observed;
            }
            if !matches!(stream.read_buf(&mut answer).await, Ok(1..)) {
                return Observed::Closed;
            }
        }
    };
    timeout(RESPONSE_TIMEOUT, reading).await.unwrap_or(Observed::Timeout)
}

/// The result for the bytes received so far; `None` if they are not sufficient.
fn classify_bytes(answer: &[u8]) -> Option<Observed> {
    let text = String::from_utf8_lossy(answer);
    if text.starts_with(application::BYTES) || text.starts_with(application::GREETING) {
        return Some(Observed::Application);
    }
    let (head, _) = text.strip_prefix("HTTP/1.1 ")?.split_once("\r\n\r\n")?;
    let mut headers = HeaderMap::new();
    for (name, value) in head.lines().skip(1).filter_map(|line| line.split_once(": ")) {
        let name: http::HeaderName = name.parse().unwrap();
        headers.insert(name, value.parse().unwrap());
    }
    Some(classify_head(head.get(..3)?.parse().ok()?, &headers))
}

/// The result for an HTTP response head.
fn classify_head(status: u16, headers: &HeaderMap) -> Observed {
    if headers.contains_key(HEADER) {
        return Observed::Application;
    }
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let code = |cause: &str| cause.split([';', ':']).next().unwrap_or_default().to_owned();
    Observed::Status {
        status,
        grpc: text("grpc-status").and_then(|code| code.parse().ok()),
        cause: text("l5d-proxy-cause").map(code),
    }
}

async fn http2_request(stream: Box<dyn Stream>, req: http::request::Builder, message: Option<Bytes>) -> Observed {
    let exchange = async {
        let (mut sender, connection) = h2::client::handshake(stream).await?;
        // The task ends with the runtime or the connection.
        tokio::spawn(async move { connection.await.ok() });
        let (response, mut body) = sender.send_request(req.body(()).unwrap(), message.is_none())?;
        if let Some(message) = message {
            // If the proxy has refused already, the response gives the reason.
            let _sent = body.send_data(message, true);
        }
        response.await
    };
    match timeout(RESPONSE_TIMEOUT, exchange).await {
        Ok(Ok(response)) => classify_head(response.status().as_u16(), response.headers()),
        Ok(Err(_)) => Observed::Closed,
        Err(_) => Observed::Timeout,
    }
}

/// The transport header for the proxy's own port; empty for other ports.
fn transport_header(header: Header, port: u16) -> Vec<u8> {
    let kind = match header {
        Header::Absent => return Vec::new(),
        Header::NoProtocol => None,
        Header::Http1 => Some(Kind::Http1(Http1 {})),
        Header::Http2 => Some(Kind::Http2(Http2 {})),
    };
    let message = transport::Header {
        port: port.into(),
        name: String::new(),
        session_protocol: kind.map(|kind| SessionProtocol { kind: Some(kind) }),
    };
    let message = message.encode_to_vec();
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&b"transport.l5d.io/v1\r\n\r\n"[..], &length, &message].concat()
}

fn read(leaf: &Leaf) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let text = |path: &Path| fs::read_to_string(path).unwrap();
    let chain = [certificate(&leaf.pem), certificate(&text(&leaf.chain))];
    let key = pem::parse(text(&leaf.key)).unwrap().into_contents();
    (chain.to_vec(), PrivatePkcs8KeyDer::from(key).into())
}

fn certificate(text: &str) -> CertificateDer<'static> {
    pem::parse(text).unwrap().into_contents().into()
}

/// The path that routes of the table match. `own` is also a gRPC service with the method `Call`.
const PATH: &str = "/own/Call";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Longer than any time limit of the sidecar: it waits 10 seconds for the start of HTTP/2.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(14);
