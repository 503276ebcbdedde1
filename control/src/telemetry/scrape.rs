//! Scrapes the metrics page of a sidecar: by mutual TLS, so that policies can authorize this process by its identity. If the
//! connection fails for any reason, such as a missing certificate, or is not open within [`TLS_CONNECT_TIMEOUT`], the sidecar of
//! a pod is scraped in plaintext.
//!
//! The address of a pod comes from the API server and is trusted. The address of an ExternalWorkload is set by an
//! editor of its namespace, so the request is sent only after the server has proved the identity of the workload.

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

use super::counts::SidecarValues;
use crate::cluster::views::workload_list::{Sidecar, WorkloadKind};
use crate::tls::client::{self, Channel, TlsServer};
use crate::tls::mesh_credentials::MeshCredentials;

/// Why a workload's sidecar cannot be scraped. The response names the workload before each message.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("dialling its admin port")]
    Dial(#[source] io::Error),
    #[error("this process has no certificate yet")]
    NoCertificate,
    #[error("the identity of its sidecar is unknown")]
    NoIdentity,
    #[error("connecting to its admin port by TLS")]
    Connect(#[source] client::Error),
    #[error("requesting its metrics")]
    Http(#[source] hyper::Error),
    #[error("building the request")]
    Request(#[source] http::Error),
    #[error("its metrics page returned status {0}")]
    Status(StatusCode),
    #[error("reading its metrics, at most {MAX_PAGE_BYTES} bytes")]
    Read(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("parsing its metrics")]
    Parse(#[source] tokio::task::JoinError),
    #[error("connecting to its admin port by TLS took longer than {0:?}")]
    TlsTimeout(Duration),
    #[error("it did not respond within {SCRAPE_TIMEOUT:?}")]
    Timeout,
}

/// Scrapes this sidecar.
///
/// # Errors
/// Fails if the sidecar is unreachable or has no metrics page, or, for an ExternalWorkload, has another identity.
pub(super) async fn scrape(
    sidecar: &Sidecar,
    kind: WorkloadKind,
    creds: &MeshCredentials,
) -> Result<SidecarValues, Error> {
    let scraping = async {
        match kind {
            WorkloadKind::External => read_over_tls(connect(sidecar, creds).await?).await,
            WorkloadKind::Pod => scrape_pod(sidecar, creds, TLS_CONNECT_TIMEOUT).await,
        }
    };
    timeout(SCRAPE_TIMEOUT, scraping).await.map_err(|_| Error::Timeout)?
}

async fn scrape_pod(sidecar: &Sidecar, creds: &MeshCredentials, tls_timeout: Duration) -> Result<SidecarValues, Error> {
    let connected = timeout(tls_timeout, connect(sidecar, creds)).await;
    match connected.unwrap_or(Err(Error::TlsTimeout(tls_timeout))) {
        Ok(channel) => read_over_tls(channel).await,
        Err(error) => {
            debug!(admin = %sidecar.admin_addr, error = &error as &dyn std::error::Error, "scraping metrics in plaintext");
            read_over_plaintext(sidecar.admin_addr).await
        }
    }
}

/// Connects by mutual TLS and verifies the sidecar's identity.
async fn connect(sidecar: &Sidecar, creds: &MeshCredentials) -> Result<Channel, Error> {
    let identity = sidecar.identity.as_ref().ok_or(Error::NoIdentity)?;
    let (leaf, anchors) = creds.client_credentials().ok_or(Error::NoCertificate)?;
    let server = TlsServer {
        addr: &Addr::Socket(sidecar.admin_addr),
        name: identity.server_name(),
        identity: Some(identity.name()),
        anchors: &anchors,
    };
    client::connect(&server, Some(leaf)).await.map_err(Error::Connect)
}

async fn read_over_tls(mut channel: Channel) -> Result<SidecarValues, Error> {
    let request = Request::get("/metrics").body(Body::empty()).map_err(Error::Request)?;
    let rsp = channel.call(request).await.map_err(Error::Http)?;
    parse_counts(read_body(rsp).await?).await
}

async fn read_over_plaintext(admin: SocketAddr) -> Result<SidecarValues, Error> {
    let stream = TcpStream::connect(admin).await.map_err(Error::Dial)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(Error::Http)?;
    let request = Request::get("/metrics")
        .header(header::HOST, admin.to_string())
        .body(Empty::<Bytes>::new())
        .map_err(Error::Request)?;
    let response = async move {
        let rsp = sender.send_request(request).await.map_err(Error::Http)?;
        read_body(rsp).await
    };
    // `connection` drives the I/O and ends when `sender` is dropped.
    let (bytes, _) = tokio::join!(response, connection);
    parse_counts(bytes?).await
}

async fn read_body(rsp: Response<Incoming>) -> Result<Bytes, Error> {
    if rsp.status() != StatusCode::OK {
        return Err(Error::Status(rsp.status()));
    }
    let body = Limited::new(rsp.into_body(), MAX_PAGE_BYTES).collect();
    Ok(body.await.map_err(Error::Read)?.to_bytes())
}

async fn parse_counts(page: Bytes) -> Result<SidecarValues, Error> {
    // Runs on a blocking thread, because this thread also serves the other queries and taps.
    let parsed = tokio::task::spawn_blocking(move || SidecarValues::parse(&String::from_utf8_lossy(&page)));
    parsed.await.map_err(Error::Parse)
}

/// Maximum size of a metrics page. The page of a busy sidecar has a few MiB.
const MAX_PAGE_BYTES: usize = 8 << 20;
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum time to connect to a pod's sidecar by TLS. The rest of [`SCRAPE_TIMEOUT`] is for plaintext.
const TLS_CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::path::Path;

    use http_body_util::Full;
    use hyper::server::conn::http2;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioExecutor;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::model::endpoints::TlsIdentity;
    use crate::tls::anchors::TrustAnchors;
    use crate::tls::mesh_credentials::{ClientCertificates, LeafWithKey};
    use crate::trust::{self, CertificateAuthority};

    /// Returns credentials of a SPIFFE identity with this server name.
    fn creds(name: &str, uri: &str, anchor: &CertificateAuthority) -> MeshCredentials {
        let svid = trust::create_svid(uri, Duration::from_secs(3600), anchor).unwrap();
        let leaf = LeafWithKey {
            chain: svid.chain.into_iter().map(CertificateDer::from).collect(),
            key: PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(svid.key)),
        };
        let creds = MeshCredentials::new(name.to_owned(), ClientCertificates::default());
        let anchors = TrustAnchors::parse(anchor.certificate.as_bytes(), Path::new("ca.crt")).unwrap();
        creds.install(leaf, &anchors).unwrap();
        creds
    }

    fn sidecar(admin: SocketAddr, uri: &str) -> Sidecar {
        Sidecar {
            admin_addr: admin,
            tap_addr: admin,
            identity: Some(TlsIdentity::Uri {
                uri: uri.into(),
                server_name: "vm.test".into(),
            }),
        }
    }

    #[tokio::test]
    async fn no_request_is_sent_to_an_address_that_is_not_the_sidecar_of_the_external_workload() {
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
        let ours = creds("telemetry", "spiffe://root.test/telemetry", &anchor);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let sidecar = sidecar(listener.local_addr().unwrap(), "spiffe://root.test/vm");
        let listening = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut sent = vec![0; 64 * 1024];
            let n = stream.read(&mut sent).await.unwrap();
            stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                .await
                .unwrap();
            drop(stream);
            sent.truncate(n);
            sent
        };
        let (scraped, sent) = tokio::join!(scrape(&sidecar, WorkloadKind::External, &ours), listening);
        assert!(matches!(scraped, Err(Error::Connect(_))), "{scraped:?}");
        assert_eq!(sent[0], 22, "a TLS handshake record");
        assert!(!sent.windows(8).any(|part| part == b"/metrics"));
    }

    #[tokio::test]
    async fn a_pod_whose_tls_handshake_hangs_is_scraped_in_plaintext() {
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
        let ours = creds("telemetry", "spiffe://root.test/telemetry", &anchor);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let sidecar = sidecar(listener.local_addr().unwrap(), "spiffe://root.test/web");
        let serving = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                connections.spawn(async move {
                    let mut start = [0; 3];
                    // A TLS client gets no answer: the stream stays open until the client closes it.
                    while stream.read_exact(&mut start).await.is_ok() {
                        if &start != b"GET" {
                            continue;
                        }
                        let page = "tulle_failures_total{direction=\"inbound\",cause=\"loop\"} 3\n";
                        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", page.len());
                        stream.write_all((head + page).as_bytes()).await.unwrap();
                    }
                });
            }
        });
        let scraped = scrape_pod(&sidecar, &ours, Duration::from_millis(20)).await;
        assert_eq!(scraped.unwrap().failures.len(), 1);
        serving.abort();
    }

    #[tokio::test]
    async fn an_external_workload_is_scraped_after_it_proves_its_identity() {
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
        let ours = creds("telemetry", "spiffe://root.test/telemetry", &anchor);
        let (vm, other) = ("spiffe://root.test/vm", "spiffe://root.test/other");
        for (claimed, expected) in [(vm, true), (other, false)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let sidecar = sidecar(listener.local_addr().unwrap(), vm);
            let theirs = creds("vm.test", claimed, &anchor);
            let acceptor = TlsAcceptor::from(theirs.server_config().unwrap());
            let serving = async {
                let (stream, _) = listener.accept().await.unwrap();
                let Ok(tls) = acceptor.accept(stream).await else { return };
                let respond = service_fn(async |req: Request<Incoming>| {
                    assert_eq!(req.uri().path(), "/metrics");
                    let page = "tulle_failures_total{direction=\"inbound\",cause=\"loop\"} 3\n";
                    Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(page))))
                });
                let connection = http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(tls), respond);
                // Returns when the client closes the connection.
                let _ = connection.await;
            };
            let (scraped, ()) = tokio::join!(scrape(&sidecar, WorkloadKind::External, &ours), serving);
            match expected {
                true => assert_eq!(scraped.unwrap().failures.len(), 1),
                false => assert!(matches!(scraped, Err(Error::Connect(_))), "{scraped:?}"),
            }
        }
    }
}
