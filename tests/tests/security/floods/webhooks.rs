//! Floods of the webhooks, beside a real API server. Strangers have addresses of the loopback network there.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tulle_bench::run::process::Process;
use tulle_control::trust;
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;
use tulle_tests::programs::built;

use super::clients::Good;
use super::{Row, cells, raise_limit_of_files, run, scene};

/// What an API server asks a webhook.
#[derive(Clone, Copy)]
pub(crate) enum Review {
    /// A pod that is to get a sidecar.
    Injection,
    /// A ServiceProfile that is good.
    Profile,
}

#[test]
#[ignore = "the webhooks of its scene do not become ready"]
fn webhooks_answer_while_strangers_flood_them() {
    if !scene::can_run() {
        return;
    }
    raise_limit_of_files();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(async {
        let server = ApiServer::start().await.unwrap();
        for namespace in ["linkerd", "shop"] {
            server.create_namespace(namespace).await.unwrap();
        }
        let annotate = ["annotate", "ns", "shop", "linkerd.io/inject=enabled"];
        server.kubectl(&annotate).await.unwrap();
        server
    });
    let process = control(&server);
    let [injector, injector_admin, validator, validator_admin] =
        PORTS.map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    for (addr, review) in [(injector, Review::Injection), (validator, Review::Profile)] {
        runtime.block_on(eventually("the webhook answers", async || review.ask(addr).await.ok()));
    }
    let probes = |addr| vec![Good::http_here(addr, "/live"), Good::http_here(addr, "/metrics")];
    let rows = [
        Row {
            name: "8443, injector",
            port: injector,
            good: vec![Good::review(injector, Review::Injection)],
        },
        Row {
            name: "8443, sp-validator",
            port: validator,
            good: vec![Good::review(validator, Review::Profile)],
        },
        Row {
            name: "9995, admin of the injector",
            port: injector_admin,
            good: probes(injector_admin),
        },
        Row {
            name: "9997, admin of the sp-validator",
            port: validator_admin,
            good: probes(validator_admin),
        },
    ];
    let floods = rows.iter().flat_map(|row| cells(row, row.name == "8443, injector"));
    run(floods.collect(), |flood| flood());
    drop(process);
}

/// The injector and a validator, as the chart starts them, with ports of this test.
fn control(server: &ApiServer) -> [Process; 2] {
    let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
    let at = |name: &str| server.dir().join(name);
    std::fs::write(at("anchors.pem"), anchor.certificate).unwrap();
    std::fs::write(at("values.yaml"), VALUES).unwrap();
    let [injector, injector_admin, validator, validator_admin] = PORTS.map(|port| format!("127.0.0.1:{port}"));
    let start = |service: &str, addr: &str, admin: &str| {
        let mut command = Command::new(built("tulle-control").unwrap());
        command.args([
            service,
            "-addr",
            addr,
            "-metrics-addr",
            admin,
            "-linkerd-namespace",
            "linkerd",
        ]);
        for (flag, path) in [
            ("-kubeconfig", &*server.kubeconfig()),
            ("-values", &at("values.yaml")),
            ("-trust-anchors", &at("anchors.pem")),
        ] {
            command.arg(flag).arg::<&Path>(path);
        }
        Process::start(service, command, server.dir()).unwrap()
    };
    let mut processes = [
        start("proxy-injector", &injector, &injector_admin),
        start("sp-validator", &validator, &validator_admin),
    ];
    processes[0].listening(&PORTS[..2]).unwrap();
    processes[1].listening(&PORTS[2..]).unwrap();
    processes
}

impl Review {
    /// Sends the review as the API server would, and looks at the answer.
    pub(crate) async fn ask(self, addr: SocketAddr) -> anyhow::Result<()> {
        let body = self.body().to_string();
        let tcp = TcpStream::connect(addr).await?;
        let name = ServerName::try_from("webhook.linkerd.svc").context("a name")?;
        let mut tls = TlsConnector::from(Arc::new(config()?)).connect(name, tcp).await?;
        let head = format!(
            "POST / HTTP/1.1\r\nhost: webhook\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        tls.write_all(head.as_bytes()).await?;
        tls.write_all(body.as_bytes()).await?;
        let mut answer = String::new();
        // What ends without a farewell of TLS has ended, too.
        if let Err(error) = tls.read_to_string(&mut answer).await {
            ensure!(error.kind() == std::io::ErrorKind::UnexpectedEof, "{error}");
        }
        let (head, body) = answer.split_once("\r\n\r\n").context("there is no answer")?;
        ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
        let answer: Value = serde_json::from_str(body)?;
        let response = &answer["response"];
        ensure!(response["allowed"] == true, "{answer}");
        let is_patched = response["patch"].is_string();
        ensure!(is_patched == matches!(self, Self::Injection), "{answer}");
        Ok(())
    }

    fn body(self) -> Value {
        let (kind, group, version, resource, object) = match self {
            Self::Injection => {
                let spec = json!({"containers": [{"name": "app", "image": "app:1"}]});
                let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": spec});
                ("Pod", "", "v1", "pods", pod)
            }
            Self::Profile => {
                let route = json!({"name": "GET /", "condition": {"method": "GET", "pathRegex": "/"}});
                let name = "web.shop.svc.cluster.local";
                let profile = json!({
                    "apiVersion": "linkerd.io/v1alpha2", "kind": "ServiceProfile",
                    "metadata": {"name": name, "namespace": "shop"}, "spec": {"routes": [route]},
                });
                ("ServiceProfile", "linkerd.io", "v1alpha2", "serviceprofiles", profile)
            }
        };
        json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u-1", "operation": "CREATE", "namespace": "shop", "userInfo": {"username": "me"}, "dryRun": true,
                "kind": {"group": group, "version": version, "kind": kind},
                "resource": {"group": group, "version": version, "resource": resource},
                "object": object,
            },
        })
    }
}

/// An API server knows the webhook's authority; here it does not matter whose certificate it is.
fn config() -> anyhow::Result<ClientConfig> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody(provider)))
        .with_no_client_auth();
    Ok(config)
}

#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The injector's, its admin's, and those of the validator.
const PORTS: [u16; 4] = [28443, 29995, 28444, 29997];
const VALUES: &str = "{linkerdVersion: edge-1, identityTrustAnchorsPEM: anchors}";
