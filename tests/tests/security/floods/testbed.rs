//! Hosts on one bridge: the control plane, a server with a sidecar, a well-behaved client, and attackers with two
//! hundred addresses.

use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use nix::unistd::Uid;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tempfile::TempDir;
use tulle_bench::run::process::Process;
use tulle_control::tls::anchors::TrustAnchors;
use tulle_control::tls::mesh_credentials::LeafWithKey;
use tulle_core::names::port;
use tulle_core::netns::{self, Namespace, VirtualNetwork};
use tulle_tests::credentials::{Credentials, Validity, control_plane_identity, identity};
use tulle_tests::hosts::{admin_get, command};
use tulle_tests::programs::{self, built_binary};

use super::attackers::Peers;
use super::insecure_tls;

/// The mesh and its hosts. Dropping it removes everything.
pub(crate) struct Testbed {
    // Fields drop in this order: processes, then their namespaces, then the files.
    _processes: Vec<Process>,
    pub(crate) control: Arc<Namespace>,
    pub(crate) server: Arc<Namespace>,
    pub(crate) client: Arc<Namespace>,
    pub(crate) attackers: Arc<Namespace>,
    pub(crate) anchors: TrustAnchors,
    /// A certificate with the identity of the server.
    pub(crate) leaf: LeafWithKey,
    /// The identity of attackers in the mesh, for floods of the destination and policy services.
    pub(crate) peers: Peers,
    _network: VirtualNetwork,
    _dir: TempDir,
}

/// Whether the test has the rights it needs; prints a message if not. In CI missing rights are an error.
pub(crate) fn can_run() -> bool {
    if Uid::effective().is_root() {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "network namespaces need root");
    eprintln!("\n*** SKIPPED: network namespaces need root; run this test as root ***\n");
    false
}

impl Testbed {
    pub(crate) fn build() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // The sidecar runs as another user and has to read the directory.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let credentials = Credentials::create(dir.path());
        fs::create_dir(dir.path().join("manifests")).unwrap();
        fs::write(dir.path().join("manifests/mesh.yaml"), MESH).unwrap();
        netns::remove_stale(PREFIX).unwrap();
        let mut virtual_network = VirtualNetwork::new(PREFIX).unwrap();
        let hosts = [
            ("control", CONTROL),
            ("server", SERVER),
            ("client", CLIENT),
            ("attackers", attacker_addr(0)),
        ];
        let [control, server, client, attackers] = hosts.map(|(name, ip)| {
            virtual_network
                .add_host(name, &format!("{ip}/16"), Some(&format!("{}/64", v6(ip))))
                .unwrap()
        });
        let others: String = (1..200)
            .map(attacker_addr)
            .map(|ip| format!("addr add {ip}/16 dev eth0\naddr add {}/64 dev eth0 nodad\n", v6(ip)))
            .collect();
        attackers.ip(&others).unwrap();
        let applications = [&server, &client].map(|host| application(host, dir.path()));
        let mut processes = vec![control_plane(&control, &credentials, dir.path())];
        processes.extend(applications);
        redirect(&server);
        processes.push(sidecar(&server, &credentials, dir.path()));
        let peers = Peers {
            tls: Arc::new(insecure_tls::config(Some(&leaf_of("attacker", &credentials)))),
            server: ServerName::try_from(control_plane_identity("linkerd-destination")).unwrap(),
        };
        Self {
            _processes: processes,
            control,
            server,
            client,
            attackers,
            anchors: TrustAnchors::read(&credentials.anchors()).unwrap(),
            leaf: leaf_of("server", &credentials),
            peers,
            _network: virtual_network,
            _dir: dir,
        }
    }
}

/// A certificate of the mesh.
fn leaf_of(service_account: &str, credentials: &Credentials) -> LeafWithKey {
    let leaf = credentials.leaf(&identity(service_account), Validity::Current);
    let certificates = [&leaf.certificate, &leaf.chain];
    LeafWithKey {
        chain: certificates
            .iter()
            .map(|path| CertificateDer::from_pem_file(path).unwrap())
            .collect(),
        key: PrivateKeyDer::from_pem_file(&leaf.key).unwrap(),
    }
}

fn control_plane(host: &Arc<Namespace>, credentials: &Credentials, dir: &Path) -> Process {
    let mut command = command(host, &[], &PathBuf::from("prlimit"));
    command.arg(format!("--nofile={FILES}"));
    command.arg(built_binary("tulle-control").unwrap()).arg("all-in-one");
    for (flag, path) in [
        ("--manifests", dir.join("manifests")),
        ("--trust-anchors", credentials.anchors()),
        ("--issuer", credentials.issuer()),
        ("--token-keys", credentials.token_keys()),
    ] {
        command.arg(flag).arg(path);
    }
    command.args(["-enable-ipv6=false", "--telemetry-addr=:8089"]);
    let mut control = Process::start("tulle-control", command, dir).unwrap();
    control.wait_for_ports(&[8080, 8086, 8090, 8089, 9990, 9996]).unwrap();
    control
}

fn application(host: &Arc<Namespace>, dir: &Path) -> Process {
    let mut command = command(host, &[], &built_binary("tulle-bench").unwrap());
    let addr = SocketAddr::from((Ipv6Addr::UNSPECIFIED, HTTP)).to_string();
    command.args(["serve", "--http", &addr]);
    let mut application = Process::start(&format!("application-{}", host.name()), command, dir).unwrap();
    application.wait_for_ports(&[HTTP]).unwrap();
    application
}

fn redirect(host: &Namespace) {
    let mut command = host.command(built_binary("tulle-init").unwrap());
    let skipped = format!("{},{}", port::TAP, port::ADMIN);
    command.args(["-p", &port::INBOUND.to_string(), "-o", &port::OUTBOUND.to_string()]);
    command.args([
        "-u",
        &PROXY_UID.to_string(),
        "--inbound-ports-to-ignore",
        &skipped,
        "--ipv6",
    ]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A sidecar with so few file descriptors that a flood reaches its connection limit.
fn sidecar(host: &Arc<Namespace>, credentials: &Credentials, dir: &Path) -> Process {
    let user = [format!("--reuid={PROXY_UID}"), format!("--regid={PROXY_UID}")];
    let mut command = command(host, &[&user[0], &user[1], "--clear-groups"], &PathBuf::from("prlimit"));
    command.arg(format!("--nofile={FILES}"));
    command.arg(programs::install("tulle-proxy", dir).unwrap());
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env_clear().env("PATH", path);
    command.envs(credentials.sidecar_variables("server", CONTROL, "10.0.0.0/8"));
    for (variable, value) in [
        ("OUTBOUND_LISTEN_ADDR", format!("0.0.0.0:{}", port::OUTBOUND)),
        ("ADMIN_LISTEN_ADDR", format!("[::]:{}", port::ADMIN)),
        ("CONTROL_LISTEN_ADDR", format!("0.0.0.0:{}", port::TAP)),
        (
            "TAP_SVC_NAME",
            "tap.linkerd.serviceaccount.identity.linkerd.cluster.local".into(),
        ),
        ("INBOUND_PORTS", HTTP.to_string()),
    ] {
        command.env(format!("LINKERD2_PROXY_{variable}"), value);
    }
    start_ready(host, command, dir)
}

fn start_ready(host: &Arc<Namespace>, command: Command, dir: &Path) -> Process {
    let mut sidecar = Process::start("sidecar", command, dir).unwrap();
    let ready = |_: &Process| Ok(admin_get(host, "/ready").is_ok());
    sidecar.wait_for("readiness", ready).unwrap();
    sidecar
}

/// The IPv6 address of a host: fd00::a4e:14 for 10.78.0.20.
pub(crate) fn v6(ip: Ipv4Addr) -> Ipv6Addr {
    Ipv6Addr::from_bits((0xfd00 << 112) | u128::from(ip.to_bits()))
}

/// The addresses of the attackers, from 0 to 199.
pub(crate) fn attacker_addr(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 78, 1, n + 1)
}

const MESH: &str = "
apiVersion: v1
kind: Service
metadata: {name: server, namespace: shop}
spec:
  clusterIP: 10.98.0.1
  selector: {app: server}
  ports: [{name: http, port: 8080}]
---
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {name: server, namespace: shop, labels: {app: server}}
spec:
  meshTLS:
    identity: server.shop.serviceaccount.identity.linkerd.cluster.local
    serverName: server.shop.serviceaccount.identity.linkerd.cluster.local
  workloadIPs: [{ip: 10.78.0.20}]
  ports: [{name: http, port: 8080}]
";
pub(crate) const CONTROL: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 30);
pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 20);
pub(crate) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 40);
pub(crate) const HTTP: u16 = 8080;
/// The user id of the proxy, whose traffic is not redirected.
const PROXY_UID: u32 = 2102;
const PREFIX: &str = "fl-";
/// Maximum open files. The sidecar uses a quarter of them for connections of one direction, the control plane a fifth
/// for connections of one port.
const FILES: usize = 1500;
