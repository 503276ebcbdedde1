//! Transport headers at a proxy's inbound port: complete ones in any fragmentation, and invalid ones.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tulle_control::trust::{self, CertificateAuthority, Svid};
use tulle_core::names::port;
use tulle_tests::apps;
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, identity, mesh};

/// Connects to the inbound port of the proxy of `web` with the identity of a peer.
async fn connect(mesh: &Mesh) -> TlsStream<TcpStream> {
    let stream = TcpStream::connect((mesh.ip("web"), port::INBOUND)).await.unwrap();
    tls_connect(mesh, stream, &[b"transport.l5d.io/v1"]).await
}

/// Performs a TLS handshake with the proxy of `web`, with these ALPN protocols.
pub(crate) async fn tls_connect(mesh: &Mesh, stream: TcpStream, protocols: &[&[u8]]) -> TlsStream<TcpStream> {
    connect_with(config(mesh, Certificate::OfPeer, protocols), stream).await
}

/// The certificate of a client.
enum Certificate {
    OfPeer,
    /// It does not chain to the trust anchors of the mesh.
    OfOtherAnchor,
    Absent,
}

fn config(mesh: &Mesh, certificate: Certificate, protocols: &[&[u8]]) -> ClientConfig {
    let authority = match certificate {
        Certificate::Absent => None,
        Certificate::OfPeer => Some(mesh.files().anchor.clone()),
        Certificate::OfOtherAnchor => Some(trust::create_anchor("other", trust::ANCHOR_LIFETIME).unwrap()),
    };
    let svid = authority.map(|authority| svid_of_peer(&authority, trust::ISSUER_LIFETIME));
    client_config(mesh, svid, protocols)
}

/// A certificate of a peer.
pub(crate) fn svid_of_peer(authority: &CertificateAuthority, lifetime: Duration) -> Svid {
    trust::create_svid("spiffe://a.test/peer", lifetime, authority).unwrap()
}

/// The configuration of a client with this certificate, which trusts the first trust anchors of the mesh.
pub(crate) fn client_config(mesh: &Mesh, certificate: Option<Svid>, protocols: &[&[u8]]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    let anchors = CertificateDer::pem_slice_iter(mesh.files().anchors.as_bytes());
    roots.add_parsable_certificates(anchors.map(Result::unwrap));
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match certificate {
        None => builder.with_no_client_auth(),
        Some(svid) => {
            let chain = svid.chain.into_iter().map(CertificateDer::from).collect();
            let key = PrivateKeyDer::try_from(svid.key).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    config
}

pub(crate) async fn connect_with(config: ClientConfig, stream: TcpStream) -> TlsStream<TcpStream> {
    let name = ServerName::try_from(identity("web")).unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
        .unwrap()
}

/// Reads until the connection is reset; nothing precedes the reset.
async fn assert_reset(stream: &mut TlsStream<TcpStream>, name: &str) {
    let mut read = Vec::new();
    let ended = stream.read_to_end(&mut read).await;
    let kind = ended.map_err(|error| error.kind());
    assert_eq!((kind, &*read), (Err(ErrorKind::ConnectionReset), &b""[..]), "{name}");
}

/// Reads until the connection ends, by a close or a reset.
async fn read_to_end(stream: &mut TlsStream<TcpStream>) -> String {
    let mut read = Vec::new();
    let _ = stream.read_to_end(&mut read).await;
    String::from_utf8(read).unwrap()
}

/// Asserts that the proxy of `web` closes a connection whose certificate does not chain to its trust anchors, before it reads the
/// transport header.
pub(crate) async fn assert_refused_with_other_anchor(mesh: &Mesh) {
    let stream = TcpStream::connect((mesh.ip("web"), port::INBOUND)).await.unwrap();
    let config = config(mesh, Certificate::OfOtherAnchor, &[b"transport.l5d.io/v1"]);
    // In TLS 1.3 the handshake of a client ends before the server has verified its certificate.
    let mut client = connect_with(config, stream).await;
    // The write fails if the connection is already closed.
    let _ = client.write_all(&header(3, &port_field(HTTP))).await;
    assert_eq!(read_to_end(&mut client).await, "");
}

/// A transport header with this message and this length field.
pub(crate) fn header(length: usize, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(length).unwrap().to_be_bytes();
    [b"transport.l5d.io/v1\r\n\r\n", &length[..], message].concat()
}

/// The port as field 1 of a message; its value is a varint of two bytes.
pub(crate) fn port_field(port: u16) -> [u8; 3] {
    assert!((1 << 7..1 << 14).contains(&port));
    [1 << 3, (port & 0x7f) as u8 | 0x80, (port >> 7) as u8]
}

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: web.test\r\nconnection: close\r\n\r\n";

#[test]
fn a_transport_header_may_arrive_byte_by_byte() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut peer = connect(mesh).await;
        for byte in header(3, &port_field(HTTP)).into_iter().chain(REQUEST.iter().copied()) {
            peer.write_u8(byte).await.unwrap();
            peer.flush().await.unwrap();
        }
        let response = read_to_end(&mut peer).await;
        assert!(
            response.starts_with("HTTP/1.1 200 OK\r\n") && response.ends_with("web\n"),
            "{response}"
        );
        let of_port = ["target_port=\"8080\""];
        let header = "inbound_tcp_transport_header_connections_total";
        mesh.wait_for_metric("web", header, &of_port, 1.).await;
    });
}

#[test]
fn invalid_transport_headers_reset_their_connections() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let whole = header(3, &port_field(HTTP));
        let wrong = [
            REQUEST.to_vec(),
            header((64 << 10) + 1, &[0; 100]), // longer than the maximum, so the proxy does not read it
            header(u32::MAX as usize, &[]),
            header(3, &[0xff; 3]),             // not a valid message
            header(2, &[1 << 3, 0]),           // port 0
            whole[..whole.len() - 1].to_vec(), // incomplete
        ];
        for (wrong, n) in wrong.into_iter().zip(1..) {
            let mut peer = connect(mesh).await;
            peer.write_all(&wrong).await.unwrap();
            if whole.starts_with(&wrong) {
                peer.shutdown().await.unwrap();
            }
            assert_reset(&mut peer, &format!("{wrong:?}")).await;
            eventually("the connection is counted", async || {
                let cause = ["cause=\"bad-transport-header\""];
                (mesh.metric("web", "tulle_failures_total", &cause).await == f64::from(n)).then_some(())
            })
            .await;
        }
        let error = ["error=\"transport header\""];
        mesh.wait_for_metric("web", "inbound_tcp_errors_total", &error, 6.)
            .await;
    });
}

#[test]
fn a_client_without_a_certificate_or_without_the_alpn_protocol_is_reset() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        let transport_header: &[&[u8]] = &[b"transport.l5d.io/v1"];
        for (certificate, protocols, cause) in [
            (Certificate::Absent, transport_header, "tls-handshake"),
            (Certificate::OfPeer, &[], "bad-transport-header"),
        ] {
            let stream = TcpStream::connect((mesh.ip("web"), port::INBOUND)).await.unwrap();
            let mut client = connect_with(config(mesh, certificate, protocols), stream).await;
            assert_reset(&mut client, cause).await;
            let cause = format!("cause=\"{cause}\"");
            mesh.wait_for_metric("web", "tulle_failures_total", &[&cause], 1.).await;
        }
    });
}

#[test]
fn a_transport_header_that_is_late_is_refused_after_the_detect_timeout() {
    let mesh = mesh().workload("web").workload_env("INBOUND_DETECT_TIMEOUT", "500ms");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let whole = header(3, &port_field(HTTP));
        let mut silent = connect(mesh).await;
        let mut slow = connect(mesh).await;
        // Each byte arrives in time, but the whole header does not.
        let mut pace = tokio::time::interval(Duration::from_millis(100));
        for byte in &whole[..whole.len() - 1] {
            pace.tick().await;
            if slow.write_u8(*byte).await.is_err() || slow.flush().await.is_err() {
                break;
            }
        }
        assert_reset(&mut silent, "silent").await;
        // A failed write may have reported the reset already.
        assert_eq!(read_to_end(&mut slow).await, "");
        let cause = ["cause=\"detect-timeout\""];
        eventually("they are counted", async || {
            (mesh.metric("web", "tulle_failures_total", &cause).await == 2.).then_some(())
        })
        .await;
        let error = ["error=\"transport header timeout\""];
        mesh.wait_for_metric("web", "inbound_tcp_errors_total", &error, 2.)
            .await;
    });
}
