//! Floods of the webhooks, of telemetry, and of the admin port of the service mirror. These services and a real API server are on
//! one host, the attackers on another host of the same bridge.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tulle_bench::run::process::Process;
use tulle_control::tls::mesh_credentials::LeafWithKey;
use tulle_control::trust;
use tulle_core::netns::{self, Namespace, VirtualNetwork};
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;
use tulle_tests::programs::built_binary;

use super::clients::WellBehavedClient;
use super::ports::{FloodedPort, from_two_hundred_addresses, prepend};
use super::reviews::ReviewRequest;
use super::tls_attackers::{self, TlsAttack};
use super::{flood_cases, insecure_tls, raise_open_file_limit, run, testbed};

#[test]
fn webhooks_and_telemetry_answer_during_floods() {
    if !testbed::can_run() {
        return;
    }
    raise_open_file_limit();
    netns::remove_stale(NAMESPACE_PREFIX).unwrap();
    let mut network = VirtualNetwork::new(NAMESPACE_PREFIX).unwrap();
    let host = testbed::add_host(&mut network, "services", HOST);
    let attackers = testbed::add_attackers(&mut network);
    // The processes and the well-behaved clients are started inside, so they are in this network namespace.
    host.run(|| flood_services(&attackers)).unwrap();
}

fn flood_services(attackers: &Namespace) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(start_api_server());
    let processes = start_services(&server);
    let front_proxy = front_proxy_leaf(&server);
    for (service, review) in [
        (&INJECTOR, ReviewRequest::Injection),
        (&PROFILES, ReviewRequest::Profile),
        (&POLICIES, ReviewRequest::Policy),
    ] {
        let addr = loopback(service.port);
        runtime.block_on(eventually("the webhook answers", async || {
            review.send_and_check(addr).await.ok()
        }));
    }
    let telemetry_client = WellBehavedClient::telemetry(loopback(TELEMETRY.port), &front_proxy);
    runtime.block_on(eventually("telemetry answers", async || {
        telemetry_client.exchange().await.ok()
    }));
    let ports = flooded_ports(telemetry_client);
    let ports_by_ipv6: Vec<_> = ports.iter().map(by_ipv6).collect();
    let floods = ports
        .iter()
        .flat_map(|port| flood_cases(port, port.name == "8443, injector"));
    let floods = floods.chain(ports_by_ipv6.iter().flat_map(|port| flood_cases(port, false)));
    run(floods.collect(), &processes.each_ref(), |flood| {
        attackers.run(flood).unwrap()
    });
}

/// The same port by IPv6.
fn by_ipv6<'a>(port: &FloodedPort<'a>) -> FloodedPort<'a> {
    from_two_hundred_addresses(FloodedPort {
        addr: (testbed::v6(HOST), port.addr.port()).into(),
        ..port.clone()
    })
}

/// Starts an API server with the namespaces and the configurations that the services need.
async fn start_api_server() -> ApiServer {
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
}

/// The ports of the services, with their clients.
fn flooded_ports(telemetry_client: WellBehavedClient<'_>) -> [FloodedPort<'_>; 7] {
    let flooded = |port: u16| SocketAddr::from((HOST, port));
    let review = |service: &Service, review| WellBehavedClient::review(loopback(service.port), review);
    let probes = |port: u16| {
        let get = |path| WellBehavedClient::http_in_current_namespace(loopback(port), path, 200);
        vec![get("/live"), get("/ready"), get("/metrics")]
    };
    let attack = TlsAttack {
        attackers: "clients without a certificate",
        config: Arc::new(insecure_tls::config(None)),
        server: testbed::server_name("webhook.linkerd.svc".to_owned()),
        prefix: Vec::new(),
        behaviours: tls_attackers::ON_HTTP1,
        path: "/",
        stream_bytes: 1,
    };
    let in_tls = |name, serial_group, service: &Service, clients| FloodedPort {
        tls: vec![attack.clone()],
        ..FloodedPort::new(name, serial_group, flooded(service.port), clients)
    };
    let admin = |name, serial_group, port: u16| FloodedPort::new(name, serial_group, flooded(port), probes(port));
    [
        in_tls(
            "8443, injector",
            "injector",
            &INJECTOR,
            prepend(
                review(&INJECTOR, ReviewRequest::Injection),
                probes(INJECTOR.admin)[..2].to_vec(),
            ),
        ),
        in_tls(
            "8443, sp-validator",
            "sp-validator",
            &PROFILES,
            vec![review(&PROFILES, ReviewRequest::Profile)],
        ),
        in_tls(
            "9443, policy validator",
            "policy",
            &POLICIES,
            vec![review(&POLICIES, ReviewRequest::Policy)],
        ),
        in_tls("8089, telemetry", "telemetry", &TELEMETRY, vec![telemetry_client]),
        admin("9995, admin of the injector", "injector", INJECTOR.admin),
        admin("9997, admin of the sp-validator", "9997", PROFILES.admin),
        admin("9999, admin of the service mirror", "9999", MIRROR_ADMIN),
    ]
}

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
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
fn start_services(server: &ApiServer) -> [Process; 5] {
    let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
    let at = |name: &str| server.dir().join(name);
    std::fs::write(at("anchors.pem"), anchor.certificate).unwrap();
    std::fs::write(at("values.yaml"), VALUES).unwrap();
    let [injector, profiles, policies, telemetry] = SERVICES.map(|service| {
        let mut command = service_command(server, service.name);
        for (flag, port) in [(service.addr_flag, service.port), (service.admin_flag, service.admin)] {
            command.arg(flag).arg(format!(":{port}"));
        }
        command.args(["-linkerd-namespace", "linkerd"]);
        command.arg("-trust-anchors").arg(at("anchors.pem"));
        if service.webhook.is_some() {
            command.arg("-values").arg(at("values.yaml"));
        }
        if service.name == "policy" {
            command.args(["-grpc-addr", "127.0.0.1:0"]);
        }
        let mut process = Process::start(service.name, command, server.dir()).unwrap();
        process.wait_for_ports(&[service.port, service.admin]).unwrap();
        process
    });
    [injector, profiles, policies, telemetry, start_service_mirror(server)]
}

/// The service mirror, which listens on an admin port only.
fn start_service_mirror(server: &ApiServer) -> Process {
    let name = "service-mirror";
    let mut command = service_command(server, name);
    command.args(["-local-mirror", "-namespace", "linkerd", "-metrics-addr"]);
    command.arg(format!(":{MIRROR_ADMIN}"));
    let mut process = Process::start(name, command, server.dir()).unwrap();
    process.wait_for_ports(&[MIRROR_ADMIN]).unwrap();
    process
}

fn service_command(server: &ApiServer, service: &str) -> Command {
    let mut command = Command::new("unshare");
    testbed::add_limits(&mut command, server.dir(), MAX_OPEN_FILES);
    command.arg(built_binary("tulle-control").unwrap()).arg(service);
    command.arg("-kubeconfig").arg(server.kubeconfig());
    command
}

/// The client certificate of the API server for aggregated APIs.
fn front_proxy_leaf(server: &ApiServer) -> LeafWithKey {
    let file = |ending: &str| server.ca().with_file_name(format!("front-proxy-client.{ending}"));
    LeafWithKey {
        chain: vec![CertificateDer::from_pem_file(file("crt")).unwrap()],
        key: PrivateKeyDer::from_pem_file(file("key")).unwrap(),
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
const MIRROR_ADMIN: u16 = 29999;
/// The host of the services.
const HOST: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 50);
const NAMESPACE_PREFIX: &str = "fw-";
/// Maximum open files. The connection limit of a webhook is a twentieth of them, 300: fewer than the 400 that most floods open,
/// and more than the 200 addresses of attackers.
const MAX_OPEN_FILES: usize = 6_000;
const VALUES: &str = "{linkerdVersion: edge-1, identityTrustAnchorsPEM: anchors}";
