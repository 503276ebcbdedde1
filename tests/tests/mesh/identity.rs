//! Mutual authentication: both sides know the peer's identity, and identities cannot be forged.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tulle_core::names::port;
use tulle_tests::apps;
use tulle_tests::client::{self, Http1, empty};
use tulle_tests::eventually::eventually;
use tulle_tests::load::load;
use tulle_tests::mesh::{HTTP, Mesh, NS, UNMESHED_IP, identity, mesh};

fn request_with_forged_identity() -> Request<client::AnyBody> {
    let req = Request::get("/headers").header("host", "web.test");
    req.header(
        "l5d-client-id",
        "admin.shop.serviceaccount.identity.linkerd.cluster.local",
    )
    .body(empty())
    .expect("headers are well formed")
}

#[test]
fn the_application_gets_the_identity_of_its_client() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let seen: serde_json::Value =
            serde_json::from_slice(&client.fetch(request_with_forged_identity()).await.unwrap().body).unwrap();
        assert_eq!(seen["l5d-client-id"], serde_json::json!([identity("client")]));
    });
}

#[test]
fn an_unauthenticated_client_cannot_forge_an_identity() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        let answer = client.fetch(request_with_forged_identity()).await.unwrap();
        let seen: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((seen.get("l5d-client-id"), answer.status.as_u16()), (None, 200));
    });
}

#[test]
fn both_proxies_count_mutual_tls_with_the_peers_name() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        assert_eq!(
            mesh.get("client", mesh.service_addr("web", HTTP), "/").await.status,
            200
        );
        let tls = r#"tls="true""#;
        let client_id = format!("client_id=\"{}\"", identity("client"));
        let server_id = format!("server_id=\"{}\"", identity("web"));
        for name in ["request_total", "response_total"] {
            let inbound = mesh
                .metric("web", name, &[r#"direction="inbound""#, tls, &client_id])
                .await;
            let outbound = mesh
                .metric("client", name, &[r#"direction="outbound""#, tls, &server_id])
                .await;
            assert_eq!((inbound, outbound), (1., 1.), "{name}");
        }
    });
}

#[test]
fn plaintext_is_counted_with_its_reason() {
    mesh()
        .workload("client")
        .workload("web")
        .unmeshed("legacy")
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            apps::start_echo(mesh, "legacy").await;
            assert_eq!(
                mesh.get("client", mesh.service_addr("legacy", HTTP), "/").await.status,
                200
            );
            let reason = r#"no_tls_reason="not_provided_by_service_discovery""#;
            mesh.wait_for_metric("client", "request_total", &[reason], 1.).await;
            let mut client = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
            assert_eq!(client.fetch(client::request("/")).await.unwrap().status, 200);
            mesh.wait_for_metric("web", "request_total", &[r#"no_tls_reason="no_tls_from_remote""#], 1.)
                .await;
        });
}

#[test]
fn certificates_are_renewed_without_a_failed_request() {
    mesh()
        .flag("--identity-issuance-lifetime=4s")
        .flag("--identity-clock-skew-allowance=1s")
        .env("IDENTITY_MIN_REFRESH", "500ms")
        .workload("client")
        .workload("web")
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let renewed = async || {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let counts = [
                    mesh.metric("client", REFRESHES, &[]).await,
                    mesh.metric("web", REFRESHES, &[]).await,
                ];
                counts.iter().all(|count| *count >= 3.).then_some(())
            };
            let outcome = load(
                mesh,
                "client",
                mesh.service_addr("web", HTTP),
                2,
                eventually("renewals", renewed),
            )
            .await;
            outcome.assert_all_ok();
            // New handshakes use the new certificates as well.
            assert_eq!(
                mesh.get("client", mesh.service_addr("web", HTTP), "/").await.status,
                200
            );
        });
}

#[test]
fn connections_wait_in_the_kernel_for_the_first_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.workload_env("IDENTITY_TOKEN_FILE", token.to_str().unwrap());
    let mesh = mesh.workload_env("IDENTITY_MIN_REFRESH", "100ms");
    mesh.run(async |mesh: &Mesh| {
        for workload in ["client", "web"] {
            apps::start_echo(mesh, workload).await;
        }
        let waiting = [
            mesh.dial("web", mesh.service_addr("client", HTTP)).await,
            mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await,
        ];
        let admin = async |path: &str| {
            let stream = TcpStream::connect((mesh.ip("web"), port::ADMIN)).await.unwrap();
            client::get(stream, path).await
        };
        eventually("the missing certificate is reported", async || {
            let answer = admin("/ready").await;
            assert_eq!(answer.status, 503, "{answer:?}");
            answer.text().contains("no certificate yet").then_some(())
        })
        .await;
        assert_eq!(admin("/live").await.status, 200);
        assert_eq!(mesh.accept_queues("web").map(|(n, _)| n), [1, 1]);

        fs::copy(mesh.files().create_token_file("web", "web", NS).unwrap(), &token).unwrap();
        for stream in waiting {
            assert_eq!(client::get(stream, "/").await.status, 200);
        }
        assert_eq!(mesh.accept_queues("web").map(|(n, _)| n), [0, 0]);
    });
}

/// The client is like a meshed Prometheus: the admin port of the server is not redirected, and the client has an identity.
#[test]
fn metrics_are_scraped_under_mutual_tls_through_the_proxy_of_the_client() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let page = mesh
            .get("client", (mesh.ip("web"), port::ADMIN).into(), "/metrics")
            .await;
        assert_eq!(page.status, 200, "{page:?}");
        assert!(page.text().contains(REFRESHES), "{}", page.text());
        let server_id = format!("server_id=\"{}\"", identity("web"));
        let labels = [r#"direction="outbound""#, r#"tls="true""#, &server_id];
        mesh.wait_for_metric("client", "response_total", &labels, 1.).await;
    });
}

/// The client has no certificate, like a command that prints the certificates of pods. It connects from the pod's own address,
/// not from a loopback address.
#[test]
fn the_admin_port_presents_the_certificate_of_the_proxy() {
    apps::run_with_client_and_web(async |mesh: &Mesh| {
        let stream = tls_handshake(mesh, port::ADMIN)
            .await
            .expect("the certificate names web");
        let answer = Http1::handshake(stream).await.fetch(client::request("/live")).await;
        assert_eq!(answer.unwrap().status, 200);
        // A client without a certificate gets the same pages as with plaintext.
        let mut http = Http1::handshake(tls_handshake(mesh, port::ADMIN).await.unwrap()).await;
        let shutdown = Request::post("/shutdown").header("host", "web").body(empty()).unwrap();
        assert_ne!(http.fetch(shutdown).await.unwrap().status, 200);
    });
}

/// TLS with a port of the pod of `web`, without a client certificate.
async fn tls_handshake(mesh: &Mesh, port: u16) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    let anchors = CertificateDer::pem_slice_iter(mesh.files().anchors.as_bytes());
    roots.add_parsable_certificates(anchors.map(Result::unwrap));
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(identity("web")).unwrap();
    let stream = TcpStream::connect((mesh.ip("web"), port)).await?;
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

const REFRESHES: &str = "control_identity_cert_refreshes_total";
