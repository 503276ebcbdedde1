//! Hosts on one bridge: the control plane, a server with a sidecar, a well-behaved client, and attackers with two
//! hundred addresses.

use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::Uid;
use rustls::ClientConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tempfile::TempDir;
use tulle_bench::run::process::Process;
use tulle_control::tls::anchors::TrustAnchors;
use tulle_control::tls::mesh_credentials::LeafWithKey;
use tulle_core::names::port;
use tulle_core::netns::{self, Namespace, VirtualNetwork};
use tulle_proto::transport::session_protocol::{Http2, Kind};
use tulle_tests::credentials::{Credentials, Validity, control_plane_identity, identity};
use tulle_tests::hosts::{admin_get, command};
use tulle_tests::programs::{self, built_binary};

use super::insecure_tls;
use super::tls_attackers::{self, TlsAttack, TlsBehaviour};

/// The mesh and its hosts. Dropping it removes everything.
pub(crate) struct Testbed {
    // Fields drop in this order: processes, then their namespaces, then the files.
    /// The control plane: all its services in one process.
    pub(crate) control_plane: Process,
    /// `None` only while it is replaced.
    sidecar: Option<Process>,
    _applications: [Process; 2],
    pub(crate) control: Arc<Namespace>,
    pub(crate) server: Arc<Namespace>,
    pub(crate) client: Arc<Namespace>,
    pub(crate) attackers: Arc<Namespace>,
    pub(crate) anchors: TrustAnchors,
    /// A certificate with the identity of the server.
    pub(crate) leaf: LeafWithKey,
    /// The certificate of the only client that may tap.
    pub(crate) tap_leaf: LeafWithKey,
    /// A certificate of attackers in the mesh.
    attacker_leaf: LeafWithKey,
    credentials: Credentials,
    _network: VirtualNetwork,
    dir: TempDir,
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
        netns::remove_stale(NAMESPACE_PREFIX).unwrap();
        let mut virtual_network = VirtualNetwork::new(NAMESPACE_PREFIX).unwrap();
        let hosts = [("control", CONTROL), ("server", SERVER), ("client", CLIENT)];
        let [control, server, client] = hosts.map(|(name, ip)| add_host(&mut virtual_network, name, ip));
        let attackers = add_attackers(&mut virtual_network);
        let applications = [&server, &client].map(|host| start_application(host, dir.path()));
        let control_plane = control_plane(&control, &credentials, dir.path());
        redirect(&server);
        programs::install(PROXY, dir.path()).unwrap();
        let sidecar = sidecar(&server, &credentials, dir.path(), MAX_OPEN_FILES);
        Self {
            control_plane,
            sidecar: Some(sidecar),
            _applications: applications,
            control,
            server,
            client,
            attackers,
            anchors: TrustAnchors::read(&credentials.anchors()).unwrap(),
            leaf: create_leaf(&identity("server"), &credentials),
            tap_leaf: create_leaf(&control_plane_identity("tap"), &credentials),
            attacker_leaf: create_leaf(&identity("attacker"), &credentials),
            credentials,
            _network: virtual_network,
            dir,
        }
    }

    /// Replaces the sidecar by one that may open as many files as this process, at most [`MAX_OPEN_FILES_WITH_LARGE_HEADS`].
    /// Returns its connection limit for one direction.
    pub(crate) fn restart_sidecar_with_many_files(&mut self) -> usize {
        let (_, files) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let files = usize::try_from(files).unwrap().min(MAX_OPEN_FILES_WITH_LARGE_HEADS);
        drop(self.sidecar.take());
        self.sidecar = Some(sidecar(&self.server, &self.credentials, self.dir.path(), files));
        files / 4
    }

    /// The sidecar, and the control plane.
    pub(crate) fn flooded(&self) -> [&Process; 2] {
        let sidecar = self.sidecar.as_ref().expect("the sidecar is not being replaced");
        [&self.control_plane, sidecar]
    }

    /// An attack by clients without a certificate on a port of the control plane; `account` is the service account of the server.
    pub(crate) fn attack_on_control_plane(account: &str, path: &'static str) -> TlsAttack {
        TlsAttack {
            attackers: "clients without a certificate",
            config: Arc::new(insecure_tls::config(None)),
            server: server_name(control_plane_identity(account)),
            prefix: Vec::new(),
            behaviours: tls_attackers::ON_HTTP2,
            path,
            stream_bytes: STREAM_BYTES,
        }
    }

    /// An attack by clients without a certificate on a port of the server's proxy.
    pub(crate) fn attack_on_server(path: &'static str) -> TlsAttack {
        TlsAttack {
            attackers: "clients without a certificate",
            config: Arc::new(insecure_tls::config(None)),
            server: server_name(identity("server")),
            prefix: Vec::new(),
            behaviours: tls_attackers::ON_HTTP2,
            path,
            stream_bytes: 1,
        }
    }

    /// The same attack by clients with a certificate of the mesh.
    pub(crate) fn with_certificate(&self, attack: &TlsAttack) -> TlsAttack {
        TlsAttack {
            attackers: "clients with a certificate",
            config: Arc::new(insecure_tls::config(Some(&self.attacker_leaf))),
            stream_bytes: attack.stream_bytes.min(PEER_STREAM_BYTES),
            ..attack.clone()
        }
    }

    /// The TLS configuration of a well-behaved workload.
    pub(crate) fn client_config(&self) -> Arc<ClientConfig> {
        Arc::new(insecure_tls::config(Some(&self.leaf)))
    }
}

/// Adds a host with an address of each family.
pub(crate) fn add_host(network: &mut VirtualNetwork, name: &str, ip: Ipv4Addr) -> Arc<Namespace> {
    let (ip4, ip6) = (format!("{ip}/16"), format!("{}/64", v6(ip)));
    network.add_host(name, &ip4, Some(&ip6)).unwrap()
}

/// Adds the host of the attackers, with all their addresses.
pub(crate) fn add_attackers(network: &mut VirtualNetwork) -> Arc<Namespace> {
    let attackers = add_host(network, "attackers", attacker_addr(0));
    let others: String = (1..200)
        .map(attacker_addr)
        .map(|ip| format!("addr add {ip}/16 dev eth0\naddr add {}/64 dev eth0 nodad\n", v6(ip)))
        .collect();
    attackers.ip(&others).unwrap();
    attackers
}

/// The same attack on the proxy's own inbound port, with a transport header.
pub(crate) fn direct(redirected: TlsAttack, behaviours: &'static [TlsBehaviour]) -> TlsAttack {
    TlsAttack {
        config: direct_config(redirected.config),
        prefix: tls_attackers::transport_header(HTTP, Kind::Http2(Http2 {})),
        behaviours,
        ..redirected
    }
}

/// A configuration for connections with a transport header.
pub(crate) fn direct_config(mut config: Arc<ClientConfig>) -> Arc<ClientConfig> {
    Arc::make_mut(&mut config).alpn_protocols = vec![tls_attackers::TRANSPORT_HEADER.to_vec()];
    config
}

pub(crate) fn server_name(name: String) -> ServerName<'static> {
    ServerName::try_from(name).unwrap()
}

/// Adds arguments to `unshare`. The command line after them may open `files` files, and reads [`MEMORY_KIB`] as the memory of the
/// machine in `/proc/meminfo`.
pub(crate) fn add_limits(unshare: &mut Command, dir: &Path, files: usize) {
    let meminfo = dir.join("meminfo");
    fs::write(&meminfo, format!("MemTotal: {MEMORY_KIB} kB\n")).unwrap();
    unshare.args([
        "--mount",
        "sh",
        "-c",
        "mount --bind \"$0\" /proc/meminfo && exec \"$@\"",
    ]);
    unshare.arg(meminfo).arg("prlimit").arg(format!("--nofile={files}"));
}

/// A message if the peak memory of a process reached [`MEMORY_KIB`].
pub(crate) fn memory_fault(process: &Process) -> Option<String> {
    let peak = match process.peak_rss_kib() {
        Ok(peak) => peak,
        Err(error) => return Some(format!("{} has ended: {error:#}", process.name())),
    };
    let message = format!("{} had {peak} of {MEMORY_KIB} KiB", process.name());
    eprintln!("{message}");
    (peak >= MEMORY_KIB).then_some(message)
}

/// A certificate of the mesh.
fn create_leaf(name: &str, credentials: &Credentials) -> LeafWithKey {
    let leaf = credentials.leaf(name, Validity::Current);
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
    let mut command = command(host, &[], Path::new("unshare"));
    add_limits(&mut command, dir, MAX_OPEN_FILES);
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

fn start_application(host: &Arc<Namespace>, dir: &Path) -> Process {
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

fn sidecar(host: &Arc<Namespace>, credentials: &Credentials, dir: &Path, files: usize) -> Process {
    let user = [format!("--reuid={PROXY_UID}"), format!("--regid={PROXY_UID}")];
    let mut command = command(host, &[&user[0], &user[1], "--clear-groups"], &PathBuf::from("prlimit"));
    command.arg(format!("--nofile={files}"));
    command.arg(dir.join(PROXY));
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env_clear().env("PATH", path);
    command.envs(credentials.sidecar_variables("server", CONTROL, "10.0.0.0/8"));
    for (variable, value) in [
        ("OUTBOUND_LISTEN_ADDR", format!("[::]:{}", port::OUTBOUND)),
        ("ADMIN_LISTEN_ADDR", format!("[::]:{}", port::ADMIN)),
        ("CONTROL_LISTEN_ADDR", format!("[::]:{}", port::TAP)),
        ("TAP_SVC_NAME", control_plane_identity("tap")),
        ("INBOUND_PORTS", HTTP.to_string()),
    ] {
        command.env(format!("LINKERD2_PROXY_{variable}"), value);
    }
    command.env("TULLE_PROXY_MEMORY_LIMIT", (MEMORY_KIB << 10).to_string());
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
const PROXY: &str = "tulle-proxy";
/// The user id of the proxy, whose traffic is not redirected.
const PROXY_UID: u32 = 2102;
const NAMESPACE_PREFIX: &str = "fl-";
/// Maximum open files, so few that a flood reaches the connection limits. The sidecar uses a quarter of them for connections of one
/// direction, the control plane a fifth for connections of one port.
const MAX_OPEN_FILES: usize = 1500;
/// For 8,000 connections of one direction, as many as the memory of the sidecar permits.
const MAX_OPEN_FILES_WITH_LARGE_HEADS: usize = 32_000;
/// Memory limit of each process, that of the components in `charts/tulle-control-plane/values-ha.yaml`.
const MEMORY_KIB: u64 = 250 << 10;
/// Bytes of a gRPC message that is not complete. The bytes of all streams of a connection fit into its flow-control window, so they
/// can be sent before the server reads.
const STREAM_BYTES: usize = 60_000;
/// Bytes of an incomplete message to 8086 or 8090, of almost the maximum length.
const PEER_STREAM_BYTES: usize = 16_000;
