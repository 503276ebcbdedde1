//! A complete control plane without Kubernetes, tested through its clients: in this process, and as the built binary.

#![allow(clippy::unwrap_used, clippy::expect_used)] // allowed in tests; clippy recognizes only functions with a test attribute

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStderr, Command};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tonic::{Code, Streaming};
use tulle_control::app::{Addrs, App};
use tulle_control::config::Config;
use tulle_control::tls::anchors::TrustAnchors;
use tulle_control::tls::client::{self, Channel, TlsServer};
use tulle_control::tls::mesh_credentials::LeafWithKey;
use tulle_control::trust::{self, TokenKeys, TokenSubject};
use tulle_core::addr::Addr;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::destination::{GetDestination, Update, update};
use tulle_proto::identity::CertifyRequest;
use tulle_proto::identity::identity_client::IdentityClient;
use tulle_proto::inbound::PortSpec;
use tulle_proto::inbound::inbound_server_policies_client::InboundServerPoliciesClient;
use tulle_proto::outbound::outbound_policies_client::OutboundPoliciesClient;
use tulle_proto::outbound::{TrafficSpec, traffic_spec};

const DB: &str = "db.shop.serviceaccount.identity.linkerd.cluster.local";
const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";
const IDENTITY: &str = "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local";
const DESTINATION: &str = "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local";

const WEBHOOK: &str = "linkerd-sp-validator.linkerd.svc";
const KUBECONFIG: &str = "\
apiVersion: v1
kind: Config
current-context: none
contexts: [{name: none, context: {cluster: none, user: none}}]
clusters: [{name: none, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: none, user: {}}]
";

const SERVICE: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.10
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: 8080}]
";

/// The files of a control plane: credentials and manifests.
struct Files {
    dir: tempfile::TempDir,
    keys: TokenKeys,
}

impl Files {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let keys = trust::create_token_keys().unwrap();
        let files = Self { dir, keys };
        for name in ["issuer", "keys", "manifests"] {
            fs::create_dir(files.at(name)).unwrap();
        }
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
        anchor.write(&files.at("ca.crt"), &files.at("ca.key")).unwrap();
        let issuer = trust::create_issuer("issuer", trust::ISSUER_LIFETIME, &anchor).unwrap();
        issuer
            .write(&files.at("issuer/crt.pem"), &files.at("issuer/key.pem"))
            .unwrap();
        files
            .keys
            .write(&files.at("keys/join.pub"), &files.at("join.key"))
            .unwrap();
        files.write("manifests/service.yaml", SERVICE);
        files.write("manifests/web-1.yaml", &workload("web-1", "10.77.0.11"));
        files
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.at(name), text).unwrap();
    }

    fn token(&self, service_account: &str, namespace: &str) -> String {
        let subject = TokenSubject {
            service_account,
            namespace,
            lifetime: Duration::from_secs(3600),
        };
        trust::create_token(&self.keys.private, &subject).unwrap()
    }

    fn anchors(&self) -> TrustAnchors {
        TrustAnchors::read(&self.at("ca.crt")).unwrap()
    }

    /// Returns a command line with free ports on loopback.
    fn command_line(&self, services: &str, more: &[&str]) -> Vec<OsString> {
        let mut line: Vec<OsString> = services.split(' ').map(OsString::from).collect();
        for (flag, name) in [
            ("--manifests", "manifests"),
            ("--trust-anchors", "ca.crt"),
            ("--issuer", "issuer"),
            ("--token-keys", "keys"),
        ] {
            line.extend([flag.into(), self.at(name).into()]);
        }
        for flag in ["destination", "identity", "grpc", "telemetry", "metrics", "admin"] {
            // The metrics flag belongs to the destination service.
            if flag != "metrics" || services.contains("destination") || services == "all-in-one" {
                line.push(format!("-{flag}-addr=127.0.0.1:0").into());
            }
        }
        line.extend(more.iter().map(OsString::from));
        line
    }

    async fn connect(&self, addr: Option<SocketAddr>, name: &str, leaf: Option<LeafWithKey>) -> Channel {
        let anchors = self.anchors();
        let peer = TlsServer {
            addr: &Addr::Socket(addr.unwrap()),
            name,
            identity: None,
            anchors: &anchors,
        };
        // The server may not have its certificate yet.
        eventually(async || client::connect(&peer, leaf.as_ref().map(copy)).await.ok()).await
    }
}

fn copy(leaf: &LeafWithKey) -> LeafWithKey {
    LeafWithKey {
        chain: leaf.chain.clone(),
        key: leaf.key.clone_key(),
    }
}

fn workload(name: &str, ip: &str) -> String {
    format!(
        "\
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {{name: {name}, namespace: shop, labels: {{app: web}}}}
spec:
  meshTLS: {{identity: {WEB}, serverName: {WEB}}}
  workloadIPs: [{{ip: {ip}}}]
  ports: [{{name: http, port: 8080}}]
"
    )
}

/// A control plane in this process.
struct RunningControlPlane {
    addrs: Addrs,
    end: tokio::sync::oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl RunningControlPlane {
    async fn start(files: &Files) -> Self {
        Self::start_with(files.command_line("all-in-one", &[])).await
    }

    async fn start_with(line: Vec<OsString>) -> Self {
        let line = std::iter::once("tulle-control".into()).chain(line);
        let command = tulle_control::cmd::Command::parse_from_line(line).unwrap();
        let mut app = App::build(Config::from_command(&command).unwrap()).await.unwrap();
        let addrs = app.addrs();
        let (end, ended) = tokio::sync::oneshot::channel();
        let task = tokio::spawn(async move {
            let end = async {
                ended.await.unwrap();
                Ok(())
            };
            app.run_until(end).await.unwrap();
            app.drain().await;
        });
        Self { addrs, end, task }
    }

    async fn wait_until_ready(&self) {
        eventually(async || {
            (get(self.addrs.destination_admin, "/ready").await == (200, "ok\n".to_owned())).then_some(())
        })
        .await;
    }
}

/// Requests a certificate for `web`, as its proxy would.
async fn certify(files: &Files, identity: Channel) -> LeafWithKey {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new([WEB.to_owned()]).unwrap();
    params.distinguished_name = DistinguishedName::new();
    let req = CertifyRequest {
        identity: WEB.to_owned(),
        token: files.token("web", "shop").into_bytes(),
        certificate_signing_request: params.serialize_request(&key).unwrap().der().to_vec(),
    };
    let rsp = IdentityClient::new(identity).certify(req).await.unwrap().into_inner();
    let bundle: Vec<_> = files.anchors().certs().iter().map(|cert| cert.to_vec()).collect();
    assert_eq!(rsp.trust_anchors, bundle);
    let chain = std::iter::once(rsp.leaf_certificate).chain(rsp.intermediate_certificates);
    LeafWithKey {
        chain: chain.map(CertificateDer::from).collect(),
        key: PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
    }
}

fn target() -> GetDestination {
    GetDestination {
        path: "web.shop.svc.cluster.local:80".to_owned(),
        ..GetDestination::default()
    }
}

/// Opens a stream of the target's endpoints.
async fn get_endpoints(channel: Channel) -> Streaming<Update> {
    let response = DestinationClient::new(channel).get(target()).await;
    response.unwrap().into_inner()
}

/// Returns the ports of the endpoints that the next message adds.
async fn added(updates: &mut Streaming<Update>) -> Vec<u32> {
    let update = timeout(TIMEOUT, updates.message()).await.unwrap().unwrap().unwrap();
    match update.update {
        Some(update::Update::Add(set)) => set.addrs.into_iter().map(|addr| addr.addr.unwrap().port).collect(),
        other => panic!("expected an addition, got {other:?}"),
    }
}

#[tokio::test]
async fn a_workload_gets_its_certificate_endpoints_and_policy() {
    let files = Files::new();
    let running = RunningControlPlane::start(&files).await;
    running.wait_until_ready().await;

    let identity = files.connect(running.addrs.identity, IDENTITY, None).await;
    let leaf = certify(&files, identity).await;
    let destination = files
        .connect(running.addrs.destination, DESTINATION, Some(copy(&leaf)))
        .await;
    let mut updates = get_endpoints(destination.clone()).await;
    assert_eq!(added(&mut updates).await, [8080]);
    files.write("manifests/web-2.yaml", &workload("web-2", "10.77.0.12"));
    assert_eq!(added(&mut updates).await, [8080]);

    let policy = files.connect(running.addrs.policy, DESTINATION, Some(leaf)).await;
    let spec = PortSpec {
        workload: r#"{"ns":"shop","external_workload":"web-1"}"#.to_owned(),
        port: 8080,
    };
    let server = InboundServerPoliciesClient::new(policy.clone()).get_port(spec).await;
    assert!(!server.unwrap().into_inner().authorizations.is_empty());
    // A workload cannot read the policies of another identity.
    files.write(
        "manifests/db-1.yaml",
        &workload("db-1", "10.77.0.13")
            .replace(WEB, DB)
            .replace("app: web", "app: db"),
    );
    let refused = eventually(async || {
        let spec = PortSpec {
            workload: r#"{"ns":"shop","external_workload":"db-1"}"#.to_owned(),
            port: 8080,
        };
        let refused = InboundServerPoliciesClient::new(policy.clone())
            .get_port(spec)
            .await
            .unwrap_err();
        (refused.code() != Code::NotFound).then_some(refused)
    })
    .await;
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused:?}");
    let spec = TrafficSpec {
        source_workload: r#"{"ns":"shop","external_workload":"web-1"}"#.to_owned(),
        target: Some(traffic_spec::Target::Authority(target().path)),
    };
    let outbound = OutboundPoliciesClient::new(policy.clone())
        .get(spec.clone())
        .await
        .unwrap();
    assert!(outbound.into_inner().protocol.is_some());
    // A workload cannot read the profiles and outbound policies of another namespace.
    let mut profile = GetDestination {
        context_token: r#"{"ns":"shop"}"#.to_owned(),
        ..target()
    };
    let mut destination = DestinationClient::new(destination);
    destination.get_profile(profile.clone()).await.unwrap();
    profile.context_token = r#"{"ns":"billing"}"#.to_owned();
    let refused = destination.get_profile(profile).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused:?}");
    let spec = TrafficSpec {
        source_workload: r#"{"ns":"billing","pod":"web-1"}"#.to_owned(),
        ..spec
    };
    let refused = OutboundPoliciesClient::new(policy).get(spec).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused:?}");

    let (status, metrics) = get(running.addrs.destination_admin, "/metrics").await;
    assert_eq!(status, 200);
    for line in [
        "certify_requests_total{outcome=\"issued\"} 1",
        "issuer_cert_ttl_seconds ",
        "grpc_server_msg_sent_total{grpc_type=\"server_stream\",grpc_service=\"io.linkerd.proxy.destination.Destination\",\
         grpc_method=\"Get\"} 2",
        "process_cpu_seconds_total",
    ] {
        assert!(metrics.contains(line), "no {line} in {metrics}");
    }
    running.end.send(()).unwrap();
    timeout(TIMEOUT, running.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_invalid_manifest_is_reported_and_the_previous_objects_stay() {
    let files = Files::new();
    let running = RunningControlPlane::start(&files).await;
    running.wait_until_ready().await;
    assert_eq!(get(running.addrs.admin, "/ping").await, (200, "pong\n".to_owned()));
    assert_eq!(
        get(running.addrs.destination_admin, "/manifest-errors").await,
        (200, String::new())
    );

    files.write("manifests/web-1.yaml", "kind: [");
    let errors = eventually(async || {
        let (_, errors) = get(running.addrs.destination_admin, "/manifest-errors").await;
        (!errors.is_empty()).then_some(errors)
    })
    .await;
    assert!(errors.contains("web-1.yaml:"), "{errors}");
    // Loopback clients may use plaintext, as in a port-forward.
    let addr = Addr::Socket(running.addrs.destination.unwrap());
    let plain = client::connect_plaintext(&addr).await.unwrap();
    let mut updates = get_endpoints(plain).await;
    assert_eq!(added(&mut updates).await, [8080]);

    // A drain ends streams instead of waiting for them.
    let started_at = Instant::now();
    running.end.send(()).unwrap();
    running.task.await.unwrap();
    let took = started_at.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    let last = updates.message().await;
    assert!(
        matches!(&last, Ok(None)) || matches!(&last, Err(status) if status.code() == Code::Unavailable),
        "{last:?}"
    );
}

#[tokio::test]
async fn a_route_that_its_parent_does_not_accept_is_counted() {
    let route = "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\n\
                 spec: {parentRefs: [{group: '', kind: Service, name: gone}], rules: [{}]}\n";
    let part = "kind=\"HTTPRoute\",namespace=\"shop\",name=\"r\",field=\"spec.parentRefs\"";
    check_counted(route, &route.replace("gone", "web"), part).await;
}

#[tokio::test]
async fn an_external_workload_without_the_target_port_is_counted() {
    let manifests = "apiVersion: workload.linkerd.io/v1beta1\nkind: ExternalWorkload\n\
                     metadata: {name: vm, namespace: shop, labels: {app: db}}\n\
                     spec: {meshTLS: {identity: vm.shop, serverName: vm.shop}, ports: [{name: sql, port: 5432}], workloadIPs: [{ip: 192.0.2.1}]}\n\
                     ---\napiVersion: v1\nkind: Service\nmetadata: {name: db, namespace: shop}\n\
                     spec: {clusterIP: 10.96.7.7, selector: {app: db}, ports: [{port: 80, targetPort: slq}]}\n";
    let part = "kind=\"ExternalWorkload\",namespace=\"shop\",name=\"vm\",field=\"spec.ports\"";
    check_counted(manifests, &manifests.replace("slq", "sql"), part).await;
}

/// Checks that a part of an object is counted until its manifests are corrected.
async fn check_counted(manifests: &str, corrected: &str, part: &str) {
    let files = Files::new();
    files.write("manifests/counted.yaml", manifests);
    let running = RunningControlPlane::start(&files).await;
    running.wait_until_ready().await;
    let is_counted = async || {
        let (_, page) = get(running.addrs.destination_admin, "/metrics").await;
        page.contains(&format!("unserved_configuration{{{part}}} 1"))
    };
    eventually(async || is_counted().await.then_some(())).await;
    files.write("manifests/counted.yaml", corrected);
    eventually(async || (!is_counted().await).then_some(())).await;
    running.end.send(()).unwrap();
    timeout(TIMEOUT, running.task).await.unwrap().unwrap();
}

/// A process of the built binary.
struct Process {
    child: Child,
    log: Lines<BufReader<ChildStderr>>,
}

impl Process {
    fn start(line: &[OsString]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tulle-control"))
            .args(line)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, log }
    }

    /// Returns the address that the log shows for a service.
    async fn logged_addr(&mut self, service: &str) -> SocketAddr {
        let line = self.wait_for_log_line(service).await;
        let addr = line.split(" addr=").nth(1).unwrap();
        addr.split(' ').next().unwrap().trim_matches('"').parse().unwrap()
    }

    /// Waits for a log line that contains `part`.
    async fn wait_for_log_line(&mut self, part: &str) -> String {
        let find = async {
            let mut seen = Vec::new();
            while let Some(line) = self.log.next_line().await.unwrap() {
                if line.contains(part) {
                    return line;
                }
                seen.push(line);
            }
            panic!("no {part} in {seen:#?}");
        };
        timeout(TIMEOUT, find).await.expect(part)
    }

    async fn end(self) -> Option<i32> {
        end(self.child).await
    }
}

async fn end(mut child: Child) -> Option<i32> {
    let pid = child.id().unwrap().to_string();
    Command::new("kill").args(["-TERM", &pid]).status().await.unwrap();
    timeout(Duration::from_secs(5), child.wait())
        .await
        .unwrap()
        .unwrap()
        .code()
}

#[tokio::test]
async fn a_closed_log_reader_does_not_stop_the_process() {
    let files = Files::new();
    let mut identity = Process::start(&files.command_line("identity", &["-log-level=debug"]));
    let addr = identity.logged_addr("service=identity").await;
    let Process { child, log } = identity;
    drop(log);
    certify(&files, files.connect(Some(addr), IDENTITY, None).await).await; // writes a log line
    assert_eq!(end(child).await, Some(0));
}

#[tokio::test]
async fn each_service_runs_in_a_separate_process() {
    let files = Files::new();
    let mut identity = Process::start(&files.command_line("identity", &[]));
    let addr = identity.logged_addr("service=identity").await;

    files.write("token", &format!("{}\n", files.token("linkerd-destination", "linkerd")));
    let token = files.at("token");
    let more = [
        "--identity-svc-addr",
        &addr.to_string(),
        "--identity-token",
        token.to_str().unwrap(),
        "-log-level=debug",
    ];
    let mut destination_process = Process::start(&files.command_line("destination policy", &more));
    let destination = destination_process.logged_addr("service=destination").await;
    let leaf = certify(&files, files.connect(Some(addr), IDENTITY, None).await).await;
    let channel = files.connect(Some(destination), DESTINATION, Some(leaf)).await;
    let mut updates = get_endpoints(channel).await;
    assert_eq!(added(&mut updates).await, [8080]);
    assert_eq!(destination_process.end().await, Some(0), "with a stream open");
    let issued = format!("level=info msg=\"certificate issued\" identity={DESTINATION}");
    identity.wait_for_log_line(&issued).await;
    assert_eq!(identity.end().await, Some(0));
}

#[tokio::test]
async fn destination_waits_for_identity_at_start_only() {
    let files = Files::new();
    files.write("token", &files.token("linkerd-destination", "linkerd"));
    let reserved = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = reserved.local_addr().unwrap().to_string();
    drop(reserved);
    let token = files.at("token");
    let more = [
        "--identity-svc-addr",
        &addr,
        "--identity-token",
        token.to_str().unwrap(),
        "--client-certificates=optional",
    ];
    let mut destination_process = Process::start(&files.command_line("destination", &more));
    let destination = destination_process.logged_addr("service=destination").await;
    let admin = destination_process.logged_addr("serving admin").await;
    destination_process
        .wait_for_log_line("renewing the certificate failed; it is retried")
        .await;
    assert_eq!(get(Some(admin), "/ready").await.0, 500);

    let mut line = files.command_line("identity", &[]);
    let flag = line
        .iter_mut()
        .find(|flag| flag.to_string_lossy().starts_with("-identity-addr="));
    *flag.unwrap() = format!("-identity-addr={addr}").into();
    let identity = Process::start(&line);
    destination_process
        .wait_for_log_line("the certificate is renewed")
        .await;
    eventually(async || (get(Some(admin), "/ready").await.0 == 200).then_some(())).await;

    assert_eq!(identity.end().await, Some(0));
    let channel = files.connect(Some(destination), DESTINATION, None).await;
    let mut updates = get_endpoints(channel).await;
    assert_eq!(added(&mut updates).await, [8080]);
}

#[tokio::test]
async fn a_failed_start_reports_its_reason() {
    let files = Files::new();
    let check = async |line: &[OsString], expected: &str| {
        let mut process = Process::start(line);
        process.wait_for_log_line(expected).await;
        let status = timeout(TIMEOUT, process.child.wait()).await.unwrap().unwrap();
        assert!(!status.success());
    };
    check(&["policy".into()], "pass --kubeconfig FILE or --manifests DIR").await;
    let missing = Path::new("/does/not/exist");
    let with = |flag: &str| {
        let mut line = files.command_line("all-in-one", &[]);
        let at = line.iter().position(|arg| arg == flag).unwrap();
        line[at + 1] = missing.into();
        line
    };
    check(&with("--manifests"), "/does/not/exist is not a directory of manifests").await;
    check(&with("--token-keys"), "--token-keys: reading token keys from").await;
    check(&with("--issuer"), "watching \\\"/does/not/exist\\\" for changes").await;
    let used = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = format!("--telemetry-addr={}", used.local_addr().unwrap());
    let mut line = files.command_line("all-in-one", &[]);
    line.retain(|arg| !arg.to_string_lossy().starts_with("-telemetry-addr="));
    line.push(addr.into());
    check(&line, "serving linkerd-telemetry: listening on 127.0.0.1:").await;
}

/// Webhooks have a thread of their own: reviews wait for no work of the thread that serves proxies, and do not delay it.
#[tokio::test]
async fn a_review_is_answered_while_the_main_thread_is_busy() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new([WEBHOOK.to_owned()])
        .unwrap()
        .self_signed(&key)
        .unwrap();
    fs::write(at("tls.crt"), cert.pem()).unwrap();
    fs::write(at("tls.key"), key.serialize_pem()).unwrap();
    // The certificate is mounted, so this validator sends no request to the API server.
    fs::write(at("kubeconfig"), KUBECONFIG).unwrap();
    let mut line: Vec<OsString> = ["sp-validator", "--addr=127.0.0.1:0", "--metrics-addr=127.0.0.1:0"]
        .map(OsString::from)
        .into();
    for (flag, name) in [
        ("--kubeconfig", "kubeconfig"),
        ("--server-tls-certs", "tls.crt"),
        ("--server-tls-key", "tls.key"),
    ] {
        line.extend([flag.into(), at(name).into()]);
    }
    let running = RunningControlPlane::start_with(line).await;
    let (addr, admin) = (running.addrs.sp_validator.unwrap(), running.addrs.sp_validator_admin);
    eventually(async || (get(admin, "/ready").await.0 == 200).then_some(())).await;
    let client = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let reviewing = async { timeout(TIMEOUT, review_profile(addr, cert.der().clone())).await };
        runtime.unwrap().block_on(reviewing)
    });
    // Blocks the runtime of the control plane.
    let rsp = client.join().unwrap().expect("a response within 10 seconds");
    assert!(rsp.starts_with("HTTP/1.1 200"), "{rsp}");
    assert!(rsp.contains(r#""allowed":true"#), "{rsp}");
    running.end.send(()).unwrap();
    running.task.await.unwrap();
}

/// Sends an empty ServiceProfile for review, and returns the response.
async fn review_profile(addr: SocketAddr, root: CertificateDer<'static>) -> String {
    let mut roots = RootCertStore::empty();
    roots.add(root).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tcp = TcpStream::connect(addr).await.unwrap();
    let name = ServerName::try_from(WEBHOOK).unwrap();
    let mut tls = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
    let body = r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","namespace":"shop",
        "kind":{"group":"linkerd.io","version":"v1alpha2","kind":"ServiceProfile"},"object":{"apiVersion":"linkerd.io/v1alpha2",
        "kind":"ServiceProfile","metadata":{"name":"web.shop.svc.cluster.local"},"spec":{"routes":[]}}}}"#;
    let head = format!(
        "POST / HTTP/1.1\r\nhost: {WEBHOOK}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    tls.write_all((head + body).as_bytes()).await.unwrap();
    let mut rsp = String::new();
    tls.read_to_string(&mut rsp).await.unwrap();
    rsp
}

/// Sends a request to an admin server. Returns the status and the body.
async fn get(addr: Option<SocketAddr>, path: &str) -> (u16, String) {
    let mut tcp = TcpStream::connect(addr.unwrap()).await.unwrap();
    let req = format!("GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n");
    tcp.write_all(req.as_bytes()).await.unwrap();
    let mut rsp = String::new();
    tcp.read_to_string(&mut rsp).await.unwrap();
    let (head, body) = rsp.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Repeats `attempt` until it returns a value, for at most 10 seconds.
async fn eventually<T>(mut attempt: impl AsyncFnMut() -> Option<T>) -> T {
    let waiting = async {
        loop {
            if let Some(found) = attempt().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(TIMEOUT, waiting).await.expect("a value within 10 seconds")
}

const TIMEOUT: Duration = Duration::from_secs(10);
