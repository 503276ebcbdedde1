//! Open connections whose certificates expire, or whose trust anchor is removed.

use std::time::Duration;

use http::Request;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, interval};
use tokio_rustls::client::TlsStream;
use tulle_control::trust::{self, CertificateAuthority};
use tulle_core::names::port;
use tulle_tests::apps;
use tulle_tests::client::{Http1, Http2, full, http2_request, request};
use tulle_tests::eventually::{eventually, within};
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, mesh};

use crate::direct;

/// Fields of the transport header that name the protocol.
const HTTP1_FIELD: &[u8] = &[3 << 3 | 2, 2, 1 << 3 | 2, 0];
const HTTP2_FIELD: &[u8] = &[3 << 3 | 2, 2, 2 << 3 | 2, 0];

/// A direct connection to a port of `web`, by a client with this certificate.
async fn connect(mesh: &Mesh, certificate: trust::Svid, app_port: u16, protocol: &[u8]) -> TlsStream<TcpStream> {
    let stream = TcpStream::connect((mesh.ip("web"), port::INBOUND)).await.unwrap();
    let config = direct::client_config(mesh, Some(certificate), &[b"transport.l5d.io/v1"]);
    let mut stream = direct::connect_with(config, stream).await;
    let message = [&direct::port_field(app_port)[..], protocol].concat();
    // The write fails if the connection is already closed.
    let _ = stream.write_all(&direct::header(message.len(), &message)).await;
    stream
}

/// A connection for bytes by a client with a certificate of this authority; `None` if it is refused.
async fn connect_opaque(mesh: &Mesh, authority: &CertificateAuthority) -> Option<TlsStream<TcpStream>> {
    let certificate = direct::svid_of_peer(authority, trust::ISSUER_LIFETIME);
    let mut stream = connect(mesh, certificate, OPAQUE, &[]).await;
    is_echoed(&mut stream).await.then_some(stream)
}

async fn is_echoed(stream: &mut TlsStream<TcpStream>) -> bool {
    let mut bytes = [0; 4];
    let sent = async {
        stream.write_all(b"ping").await?;
        stream.flush().await?;
        stream.read_exact(&mut bytes).await
    };
    sent.await.is_ok() && &bytes == b"ping"
}

#[test]
fn http_connections_end_when_the_certificate_of_their_client_expires_and_byte_streams_do_not() {
    const VALIDITY: Duration = Duration::from_secs(5);
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let certificate = || direct::svid_of_peer(&mesh.files().anchor, VALIDITY);
        let mut http1 = Http1::handshake(connect(mesh, certificate(), HTTP, HTTP1_FIELD).await).await;
        let mut http2 = Http2::handshake(connect(mesh, certificate(), HTTP, HTTP2_FIELD).await).await;
        let stream = TcpStream::connect((mesh.ip("web"), port::ADMIN)).await.unwrap();
        let config = direct::client_config(mesh, Some(certificate()), &[]);
        let mut admin = Http1::handshake(direct::connect_with(config, stream).await).await;
        let mut bytes = connect(mesh, certificate(), OPAQUE, &[]).await;
        let expires_at = Instant::now() + VALIDITY;
        assert_eq!(http1.fetch(request("/")).await.unwrap().status, 200);
        assert_eq!(http2.fetch(http2_request("/")).await.unwrap().status, 200);
        assert_eq!(admin.fetch(request("/metrics")).await.unwrap().status, 200);
        assert!(is_echoed(&mut bytes).await);
        eventually("HTTP connections end", async || {
            (!http1.is_open() && !http2.is_open() && !admin.is_open()).then_some(())
        })
        .await;
        let late = Instant::now().saturating_duration_since(expires_at);
        assert!(late < Duration::from_secs(2), "{late:?}");
        // An idle HTTP/1 connection ends only when the certificate has expired.
        assert!(
            is_echoed(&mut bytes).await,
            "its client cannot present a renewed certificate"
        );
    });
}

#[test]
fn connections_of_a_client_end_when_its_trust_anchor_is_removed() {
    mesh()
        .flag("--identity-issuance-lifetime=1m")
        .flag("--identity-clock-skew-allowance=1s")
        .env("IDENTITY_MIN_REFRESH", "300ms")
        .env("IDENTITY_MAX_REFRESH", "300ms")
        .workload("web")
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let files = mesh.files();
            let former = trust::create_anchor("former", trust::ANCHOR_LIFETIME).unwrap();
            let both = [files.anchors.as_str(), &former.certificate].concat();
            files.replace_anchors(&both).unwrap();
            let mut of_former = eventually("the proxy accepts both anchors", async || {
                connect_opaque(mesh, &former).await
            })
            .await;
            let certificate = direct::svid_of_peer(&former, trust::ISSUER_LIFETIME);
            let mut http2 = Http2::handshake(connect(mesh, certificate, HTTP, HTTP2_FIELD).await).await;
            assert_eq!(http2.fetch(http2_request("/")).await.unwrap().status, 200);
            let mut other = connect_opaque(mesh, &files.anchor)
                .await
                .expect("its anchor is trusted");
            files.replace_anchors(&files.anchors).unwrap();
            let read = within("the byte stream ends", of_former.read(&mut [0])).await;
            assert!(read.is_err() || read.is_ok_and(|n| n == 0));
            eventually("the HTTP/2 connection ends", async || (!http2.is_open()).then_some(())).await;
            assert!(is_echoed(&mut other).await, "its anchor is still trusted");
            let reason = [r#"reason="certificate-untrusted""#];
            mesh.wait_for_metric("web", "tulle_inbound_denied_total", &reason, 1.)
                .await;
        });
}

/// The certificates of both proxies are valid for a few seconds, so the connection between them is replaced several times.
#[test]
fn no_request_fails_when_connections_are_replaced_before_their_certificates_expire() {
    mesh()
        .flag("--identity-issuance-lifetime=6s")
        .flag("--identity-clock-skew-allowance=1s")
        .env("IDENTITY_MIN_REFRESH", "500ms")
        .env("IDENTITY_MAX_REFRESH", "2s")
        .workload("client")
        .workload("web")
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
            let opened = || mesh.metric("web", "tcp_open_total", &[r#"peer="src""#, r#"tls="true""#]);
            let mut pace = interval(Duration::from_millis(10));
            let mut n_sent = 0;
            let ends_at = Instant::now() + Duration::from_secs(9);
            while Instant::now() < ends_at {
                pace.tick().await;
                let req = Request::post("/").header("host", "web.test");
                let answer = client.fetch(req.body(full("a body")).unwrap()).await.unwrap();
                assert_eq!(answer.status, 200, "after {n_sent} requests: {answer:?}");
                n_sent += 1;
            }
            assert!(opened().await >= 2., "the connection was replaced");
        });
}
