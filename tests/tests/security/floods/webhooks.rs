//! Floods of the webhooks and of telemetry, with a real API server. Attackers use loopback addresses.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tulle_bench::run::process::Process;
use tulle_control::tls::mesh_credentials::LeafWithKey;
use tulle_control::trust;
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;
use tulle_tests::programs::built_binary;

use super::attackers::Sources;
use super::clients::NormalClient;
use super::tls_attackers::{self, TlsAttack};
use super::{FloodedPort, flood_cases, insecure_tls, prepend, raise_open_file_limit, run, testbed};

/// A request of an API server to a webhook.
#[derive(Clone, Copy)]
pub(crate) enum ReviewRequest {
    /// A pod that needs a sidecar.
    Injection,
    /// A valid ServiceProfile.
    Profile,
    /// A valid Server.
    Policy,
}

#[test]
fn webhooks_and_telemetry_answer_during_floods() {
    if !testbed::can_run() {
        return;
    }
    raise_open_file_limit();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(async {
        let server = ApiServer::start().await.unwrap();
        for namespace in ["linkerd", "shop"] {
            server.create_namespace(namespace).await.unwrap();
        }
        let annotate = ["annotate", "ns", "shop", "linkerd.io/inject=enabled"];
        server.kubectl(&annotate).await.unwrap();
        // Without a configuration the API server does not call a webhook, and the webhook creates no certificate.
        let configurations = server.dir().join("configurations.yaml");
        std::fs::write(&configurations, webhook_configurations()).unwrap();
        let apply = ["apply", "-f", configurations.to_str().unwrap()];
        server.kubectl(&apply).await.unwrap();
        server
    });
    let processes = start_services(&server);
    let front_proxy = front_proxy_leaf(&server);
    let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let [injector, validator, policies, telemetry] = SERVICES.map(|service| at(service.port));
    for (addr, review) in [
        (injector, ReviewRequest::Injection),
        (validator, ReviewRequest::Profile),
        (policies, ReviewRequest::Policy),
    ] {
        runtime.block_on(eventually("the webhook answers", async || review.ask(addr).await.ok()));
    }
    let telemetry_client = NormalClient::telemetry(telemetry, &front_proxy);
    runtime.block_on(eventually("telemetry answers", async || {
        telemetry_client.answer().await.ok()
    }));
    let probes = |service: &Service| {
        let get = |path| NormalClient::http_here(at(service.admin), path, 200);
        vec![get("/live"), get("/ready"), get("/metrics")]
    };
    let port = |name, listener, addr, clients| FloodedPort {
        name,
        addr,
        listener,
        clients,
        held: Vec::new(),
        tls: Vec::new(),
        sources: Sources::ALL,
    };
    let strangers = TlsAttack {
        who: "strangers",
        config: Arc::new(insecure_tls::config(None)),
        server: testbed::server_name("webhook.linkerd.svc".to_owned()),
        prefix: Vec::new(),
        behaviours: tls_attackers::ON_HTTP1,
        path: "/",
        stream_bytes: 1,
    };
    let in_tls = |name, listener, addr, clients| FloodedPort {
        tls: vec![strangers.clone()],
        ..port(name, listener, addr, clients)
    };
    let ports = [
        in_tls(
            "8443, injector",
            "injector",
            injector,
            prepend(
                NormalClient::review(injector, ReviewRequest::Injection),
                probes(&INJECTOR)[..2].to_vec(),
            ),
        ),
        in_tls(
            "8443, sp-validator",
            "sp-validator",
            validator,
            vec![NormalClient::review(validator, ReviewRequest::Profile)],
        ),
        in_tls(
            "9443, policy validator",
            "policy",
            policies,
            vec![NormalClient::review(policies, ReviewRequest::Policy)],
        ),
        in_tls("8089, telemetry", "telemetry", telemetry, vec![telemetry_client]),
        port(
            "9995, admin of the injector",
            "injector",
            at(INJECTOR.admin),
            probes(&INJECTOR),
        ),
        port(
            "9997, admin of the sp-validator",
            "9997",
            at(PROFILES.admin),
            probes(&PROFILES),
        ),
    ];
    let floods = ports
        .iter()
        .flat_map(|port| flood_cases(port, port.name == "8443, injector"));
    run(floods.collect(), &processes.each_ref(), |flood| flood());
}

/// A service, and its ports in this test.
struct Service {
    name: &'static str,
    addr_flag: &'static str,
    port: u16,
    admin_flag: &'static str,
    admin: u16,
    /// The kind and the name of the configuration of a webhook.
    webhook: Option<(&'static str, &'static str)>,
}

/// Configurations as a chart writes them, without a CA bundle. The rules of webhooks are for the group `floods.test`, which has no
/// objects, so the API server never calls them. The APIService has no Service, so the API server does not call telemetry either.
fn webhook_configurations() -> String {
    let webhooks = SERVICES.iter().filter_map(|service| {
        let (kind, name) = service.webhook?;
        let configuration = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": name},
            "webhooks": [{
                "name": name.replace("-webhook-config", ".linkerd.io"),
                "clientConfig": {"url": format!("https://localhost:{}/", service.port)},
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "rules": [{"operations": ["CREATE"], "apiGroups": ["floods.test"], "apiVersions": ["*"], "resources": ["*"]}],
            }],
        });
        Some(configuration.to_string())
    });
    let telemetry = json!({
        "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
        "metadata": {"name": "v1alpha1.telemetry.tulle.dev"},
        "spec": {
            "group": "telemetry.tulle.dev", "version": "v1alpha1",
            "groupPriorityMinimum": 1000, "versionPriority": 100,
            "service": {"name": "linkerd-telemetry", "namespace": "linkerd", "port": 8089},
        },
    });
    let configurations: Vec<_> = webhooks.chain([telemetry.to_string()]).collect();
    configurations.join("\n---\n")
}

/// The services as the chart starts them, with the ports of this test.
fn start_services(server: &ApiServer) -> [Process; 4] {
    let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
    let at = |name: &str| server.dir().join(name);
    std::fs::write(at("anchors.pem"), anchor.certificate).unwrap();
    std::fs::write(at("values.yaml"), VALUES).unwrap();
    SERVICES.map(|service| {
        let mut command = Command::new("unshare");
        testbed::add_limits(&mut command, server.dir(), FILES);
        command.arg(built_binary("tulle-control").unwrap());
        command.arg(service.name);
        for (flag, port) in [(service.addr_flag, service.port), (service.admin_flag, service.admin)] {
            command.arg(flag).arg(format!("127.0.0.1:{port}"));
        }
        command.args(["-linkerd-namespace", "linkerd"]);
        for (flag, path) in [
            ("-kubeconfig", &*server.kubeconfig()),
            ("-trust-anchors", &at("anchors.pem")),
        ] {
            command.arg(flag).arg::<&Path>(path);
        }
        if service.webhook.is_some() {
            command.arg("-values").arg(at("values.yaml"));
        }
        if service.name == "policy" {
            command.args(["-grpc-addr", "127.0.0.1:0"]);
        }
        let mut process = Process::start(service.name, command, server.dir()).unwrap();
        process.wait_for_ports(&[service.port, service.admin]).unwrap();
        process
    })
}

/// The client certificate of the API server for aggregated APIs.
fn front_proxy_leaf(server: &ApiServer) -> LeafWithKey {
    let file = |ending: &str| server.ca().with_file_name(format!("front-proxy-client.{ending}"));
    LeafWithKey {
        chain: vec![CertificateDer::from_pem_file(file("crt")).unwrap()],
        key: PrivateKeyDer::from_pem_file(file("key")).unwrap(),
    }
}

impl ReviewRequest {
    /// Sends the review as the API server would, and checks the response.
    pub(crate) async fn ask(self, addr: SocketAddr) -> anyhow::Result<()> {
        let body = self.body().to_string();
        let tcp = TcpStream::connect(addr).await?;
        let name = ServerName::try_from("webhook.linkerd.svc").context("a name")?;
        let mut tls = TlsConnector::from(Arc::new(insecure_tls::config(None)))
            .connect(name, tcp)
            .await?;
        let head = format!(
            "POST / HTTP/1.1\r\nhost: webhook\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        tls.write_all(head.as_bytes()).await?;
        tls.write_all(body.as_bytes()).await?;
        let mut answer = String::new();
        // A connection that ends without a TLS close_notify has also ended.
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
            Self::Policy => {
                let server = json!({
                    "apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server",
                    "metadata": {"name": "web", "namespace": "shop"},
                    "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "port": 8080},
                });
                ("Server", "policy.linkerd.io", "v1beta3", "servers", server)
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

const SERVICES: [&Service; 4] = [&INJECTOR, &PROFILES, &POLICIES, &TELEMETRY];
const INJECTOR: Service = Service {
    name: "proxy-injector",
    addr_flag: "-addr",
    port: 28443,
    admin_flag: "-metrics-addr",
    admin: 29995,
    webhook: Some(("MutatingWebhookConfiguration", "linkerd-proxy-injector-webhook-config")),
};
const PROFILES: Service = Service {
    name: "sp-validator",
    addr_flag: "-addr",
    port: 28444,
    admin_flag: "-metrics-addr",
    admin: 29997,
    webhook: Some(("ValidatingWebhookConfiguration", "linkerd-sp-validator-webhook-config")),
};
const POLICIES: Service = Service {
    name: "policy",
    addr_flag: "-server-addr",
    port: 29443,
    admin_flag: "-admin-addr",
    admin: 29990,
    webhook: Some((
        "ValidatingWebhookConfiguration",
        "linkerd-policy-validator-webhook-config",
    )),
};
const TELEMETRY: Service = Service {
    name: "telemetry",
    addr_flag: "-telemetry-addr",
    port: 28089,
    admin_flag: "-admin-addr",
    admin: 29991,
    webhook: None,
};
/// Maximum open files. The connection limit of a webhook is a twentieth of them: fewer than one flood opens, and more than the
/// 200 addresses of attackers.
const FILES: usize = 10_000;
const VALUES: &str = "{linkerdVersion: edge-1, identityTrustAnchorsPEM: anchors}";
