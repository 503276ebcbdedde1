//! A channel over one HTTP/2 connection, for gRPC and other requests: TLS with a server name, or plaintext.
//!
//! The client offers no ALPN, as the control plane and its proxies expect. tonic's own TLS requires `h2`. A channel
//! does not reconnect: callers create a new one, with their own backoff.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hickory_resolver::TokioResolver;
use http::uri::{Authority, InvalidUri, Scheme};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, ServerName, UnixTime};
use rustls::sign::SingleCertAndKey;
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::body::Body;
use tracing::debug;
use tulle_core::addr::Addr;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::anchors::TrustAnchors;
use super::mesh_credentials::LeafWithKey;

/// A connection to one server. Clones share it, and dropping the last one closes it.
///
/// While streams are open, HTTP/2 pings are sent to an idle server. The connection is closed if a ping is not
/// acknowledged.
#[derive(Clone)]
pub struct Channel {
    sender: SendRequest<Body>,
    scheme: Scheme,
    authority: Authority,
    _connection: Arc<ConnectionTask>,
}

/// The server to connect to, and how to authenticate it.
pub struct TlsServer<'a> {
    pub addr: &'a Addr,
    /// Sent as SNI. Without `identity`, also the name in its certificate.
    pub name: &'a str,
    /// The identity in its certificate, verified instead of `name`: a DNS name or a SPIFFE URI.
    pub identity: Option<&'a str>,
    pub anchors: &'a TrustAnchors,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("looking up {addr}")]
    Lookup {
        addr: Addr,
        #[source]
        source: hickory_resolver::net::NetError,
    },
    #[error("{addr} has no address")]
    NoAddress { addr: Addr },
    #[error("dialling {addr}")]
    Dial {
        addr: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("TLS with {name} at {addr}")]
    Handshake {
        name: String,
        addr: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("connecting to {addr} took longer than {limit:?}")]
    Timeout { addr: Addr, limit: Duration },
    #[error("{name:?} is not a TLS server name")]
    Name {
        name: String,
        #[source]
        source: InvalidDnsNameError,
    },
    #[error("{name:?} is not an authority")]
    Authority {
        name: String,
        #[source]
        source: InvalidUri,
    },
    #[error("preparing TLS")]
    Config(#[source] rustls::Error),
    #[error("starting HTTP/2 with {authority}")]
    Http {
        authority: String,
        #[source]
        source: hyper::Error,
    },
}

/// Connects with TLS. Verifies the server's identity, or else its name, and sends the client certificate, if there is one.
///
/// # Errors
/// Fails if TLS or HTTP/2 cannot be established within 10 seconds each.
pub async fn connect(peer: &TlsServer<'_>, leaf: Option<LeafWithKey>) -> Result<Channel, Error> {
    let tls = connect_tls(peer, leaf).await?;
    with_connect_timeout(peer.addr, Channel::start(tls, Scheme::HTTPS, peer.name)).await
}

async fn connect_tls(peer: &TlsServer<'_>, leaf: Option<LeafWithKey>) -> Result<TlsStream<TcpStream>, Error> {
    let name = ServerName::try_from(peer.name.to_owned()).map_err(|source| Error::Name {
        name: peer.name.to_owned(),
        source,
    })?;
    let connector = TlsConnector::from(Arc::new(client_config(peer, leaf)?));
    with_connect_timeout(peer.addr, async {
        let (tcp, addr) = dial(peer.addr).await?;
        connector.connect(name, tcp).await.map_err(|source| Error::Handshake {
            name: peer.name.to_owned(),
            addr,
            source,
        })
    })
    .await
}

/// Connects in plaintext, which the control plane accepts on loopback only.
///
/// # Errors
/// As [`connect`].
pub async fn connect_plaintext(addr: &Addr) -> Result<Channel, Error> {
    with_connect_timeout(addr, async {
        let (tcp, _) = dial(addr).await?;
        Channel::start(tcp, Scheme::HTTP, &addr.to_string()).await
    })
    .await
}

/// Starts plaintext HTTP/2 on an open stream, such as a forwarded port.
///
/// # Errors
/// Fails if the stream ends.
pub async fn connect_over<I>(io: I, authority: &Authority) -> Result<Channel, Error>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    Channel::start(io, Scheme::HTTP, authority.as_str()).await
}

impl Channel {
    async fn start<I>(io: I, scheme: Scheme, authority: &str) -> Result<Self, Error>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let authority: Authority = authority.parse().map_err(|source| Error::Authority {
            name: authority.to_owned(),
            source,
        })?;
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(HTTP2_KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(HTTP2_KEEP_ALIVE_INTERVAL)
            .handshake(TokioIo::new(io))
            .await
            .map_err(|source| Error::Http {
                authority: authority.to_string(),
                source,
            })?;
        let task = tokio::spawn(async move {
            if let Err(err) = connection.await {
                debug!(%err, "a connection ended with an error");
            }
        });
        Ok(Self {
            sender,
            scheme,
            authority,
            _connection: Arc::new(ConnectionTask(task.abort_handle())),
        })
    }
}

impl tower::Service<Request<Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    /// Adds scheme and authority to the URI, because generated clients set only the path.
    fn call(&mut self, mut req: Request<Body>) -> Self::Future {
        let mut uri = std::mem::take(req.uri_mut()).into_parts();
        uri.scheme = Some(self.scheme.clone());
        uri.authority = Some(self.authority.clone());
        // Cannot fail: an empty URI has the path "/".
        *req.uri_mut() = Uri::from_parts(uri).unwrap_or_default();
        Box::pin(self.sender.send_request(req))
    }
}

/// The task that drives the connection of a channel.
struct ConnectionTask(AbortHandle);

impl Drop for ConnectionTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn client_config(peer: &TlsServer<'_>, leaf: Option<LeafWithKey>) -> Result<ClientConfig, Error> {
    let builder = ClientConfig::builder_with_provider(super::crypto_provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(Error::Config)?;
    let builder = match peer.identity {
        None => builder.with_root_certificates(peer.anchors.roots()),
        Some(identity) => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(IdentityVerifier {
                anchors: peer.anchors.clone(),
                identity: identity.to_owned(),
                algorithms: super::crypto_provider().signature_verification_algorithms,
            })),
    };
    let mut config = match leaf {
        Some(leaf) => {
            let certified = leaf.certified_key().map_err(Error::Config)?;
            builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified)))
        }
        None => builder.with_no_client_auth(),
    };
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Verifies that a server has this identity, independently of the SNI.
#[derive(Debug)]
struct IdentityVerifier {
    anchors: TrustAnchors,
    identity: String,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for IdentityVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.anchors.verify_chain_at(leaf, issuers, now)?;
        let (_, parsed) = X509Certificate::from_der(leaf).map_err(|_| CertificateError::BadEncoding)?;
        let names = parsed
            .subject_alternative_name()
            .map_err(|_| CertificateError::BadEncoding)?;
        let matches_identity = |name: &GeneralName<'_>| match name {
            GeneralName::URI(uri) => *uri == self.identity,
            GeneralName::DNSName(dns) => dns.eq_ignore_ascii_case(&self.identity),
            _ => false,
        };
        match names.is_some_and(|names| names.value.general_names.iter().any(matches_identity)) {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(CertificateError::NotValidForName.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

async fn with_connect_timeout<T>(addr: &Addr, connecting: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    timeout(CONNECT_TIMEOUT, connecting).await.unwrap_or_else(|_| {
        Err(Error::Timeout {
            addr: addr.clone(),
            limit: CONNECT_TIMEOUT,
        })
    })
}

async fn dial(addr: &Addr) -> Result<(TcpStream, SocketAddr), Error> {
    let sockets = lookup(addr).await?;
    let connected = connect_to_first(&sockets, TcpStream::connect).await;
    let (tcp, socket) = connected.unwrap_or_else(|| Err(Error::NoAddress { addr: addr.clone() }))?;
    // Reduces the latency of small requests. The connection also works without the option.
    let _ = tcp.set_nodelay(true);
    Ok((tcp, socket))
}

/// Connects to the first address that accepts; the addresses are tried in turn. Returns the last error, or `None` without
/// addresses.
///
/// Each attempt but the last ends after an equal share of [`CONNECT_TIMEOUT`], so that an address that drops packets does not
/// prevent the attempts at the others. With many addresses an attempt has [`MIN_ATTEMPT_TIMEOUT`], and the time can end before
/// the last ones.
async fn connect_to_first<T, F>(
    sockets: &[SocketAddr],
    connect: impl Fn(SocketAddr) -> F,
) -> Option<Result<(T, SocketAddr), Error>>
where
    F: Future<Output = io::Result<T>>,
{
    let n_addresses = u32::try_from(sockets.len()).unwrap_or(u32::MAX);
    let (last, others) = sockets.split_last()?;
    let attempt_timeout = (CONNECT_TIMEOUT / n_addresses).max(MIN_ATTEMPT_TIMEOUT);
    for socket in others {
        let connected = timeout(attempt_timeout, connect(*socket)).await;
        if let Ok(Ok(connected)) = connected {
            return Some(Ok((connected, *socket)));
        }
    }
    let connected = connect(*last).await;
    Some(match connected {
        Ok(connected) => Ok((connected, *last)),
        Err(source) => Err(Error::Dial { addr: *last, source }),
    })
}

async fn lookup(addr: &Addr) -> Result<Vec<SocketAddr>, Error> {
    let name = match addr {
        Addr::Socket(socket) => return Ok(vec![*socket]),
        Addr::Name(name) => name,
    };
    let failed = |source| Error::Lookup {
        addr: addr.clone(),
        source,
    };
    let resolver = TokioResolver::builder_tokio()
        .and_then(|builder| builder.build())
        .map_err(failed)?;
    let found = resolver.lookup_ip(name.name.to_string()).await.map_err(failed)?;
    Ok(found.iter().map(|ip| SocketAddr::new(ip, name.port)).collect())
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum timeout of a connection attempt. It is longer than a second, after which the kernel sends a lost SYN again.
const MIN_ATTEMPT_TIMEOUT: Duration = Duration::from_millis(1200);
/// Idle time before a ping, and maximum time until its acknowledgement.
const HTTP2_KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::pending;
    use std::pin::pin;

    use bytes::Bytes;
    use futures_util::stream;
    use http_body::Frame;
    use http_body_util::{BodyExt as _, StreamBody};
    use hyper::server::conn::http2 as server;
    use hyper::service::service_fn;
    use tokio::sync::Notify;
    use tokio::time::sleep;
    use tower::Service as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_address_that_drops_packets_leaves_time_for_the_next_one() {
        let sockets = [1, 2, 3].map(|n| SocketAddr::from(([10, 0, 0, n], 8080)));
        let addr = Addr::Socket(sockets[0]);
        let connecting = with_connect_timeout(&addr, async {
            let connect = async |socket| match socket == sockets[2] {
                true => Ok(()),
                false => pending().await,
            };
            connect_to_first(&sockets, connect).await.unwrap()
        });
        let ((), connected) = connecting.await.unwrap();
        assert_eq!(connected, sockets[2]);
        let refuse = async |_| Err::<(), _>(io::ErrorKind::ConnectionRefused.into());
        let refused = connect_to_first(&sockets, refuse).await.unwrap();
        assert!(
            matches!(refused, Err(Error::Dial { addr, .. }) if addr == sockets[2]),
            "{refused:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_packet_does_not_end_an_attempt_at_one_of_many_addresses() {
        let sockets: Vec<_> = (1..=20).map(|n| SocketAddr::from(([10, 0, 0, n], 8080))).collect();
        let connect = async |_| {
            sleep(Duration::from_millis(1150)).await;
            Ok(())
        };
        let ((), connected) = connect_to_first(&sockets, connect).await.unwrap().unwrap();
        assert_eq!(connected, sockets[0]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_stream_stays_open_and_ends_when_its_server_is_unreachable() {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let vanishes = Arc::new(Notify::new());
        let vanished = vanishes.clone();
        let served = tokio::spawn(async move {
            let service = service_fn(|_: Request<Incoming>| async {
                let silence = stream::pending::<Result<Frame<Bytes>, Infallible>>();
                Ok::<_, Infallible>(Response::new(StreamBody::new(silence)))
            });
            let mut serving =
                pin!(server::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(theirs), service));
            // The connection stays open, but nothing reads from it.
            tokio::select! {
                ended = &mut serving => panic!("{ended:?}"),
                () = vanished.notified() => pending::<()>().await,
            }
        });
        let mut channel = connect_over(ours, &Authority::from_static("peer")).await.unwrap();
        let mut body = channel.call(Request::new(Body::empty())).await.unwrap().into_body();
        let silent = timeout(Duration::from_secs(300), body.frame()).await;
        assert!(silent.is_err(), "{silent:?}");
        vanishes.notify_one();
        let ended = timeout(3 * HTTP2_KEEP_ALIVE_INTERVAL, body.frame()).await.unwrap();
        assert!(matches!(ended, Some(Err(_))), "{ended:?}");
        served.abort();
    }
}
