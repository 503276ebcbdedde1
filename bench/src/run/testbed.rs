//! The testbed: network namespaces, redirect rules, the application and certificates. Each peer has its own testbed with the same
//! structure, so that all of them can run at the same time.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::Context as _;
use parking_lot::Mutex;
use tempfile::TempDir;
use tulle_core::names::port;
use tulle_core::netns::{Namespace, VirtualNetwork};

use super::process::Process;
use super::setup::{InboundMode, Setup, Side, SidecarPath, TcpApp};
use super::{certs, tools};

/// The testbed without the sidecars. Dropping it removes everything.
pub(super) struct Testbed {
    // Field order is drop order: processes end before their namespaces are removed.
    _app: Option<Process>,
    tcp_app: Mutex<Option<(TcpApp, Process)>>,
    pub(super) client: Arc<Namespace>,
    pub(super) server: Arc<Namespace>,
    pub(super) control: Arc<Namespace>,
    pub(super) certs: certs::CertificateFiles,
    pub(super) dir: TempDir,
    _network: VirtualNetwork,
}

impl Testbed {
    /// Builds the testbed with its HTTP application. `app_args` are additional arguments of the application.
    pub(super) fn build(app_args: &[&str]) -> anyhow::Result<Self> {
        let mut testbed = Self::without_app()?;
        let mut command = testbed
            .server
            .command(std::env::current_exe().context("finding this program")?);
        command.args(["serve", "--http", &format!("{SERVER_IP}:{HTTP_PORT}")]);
        command.args(app_args);
        let mut app = Process::start("app", command, testbed.dir.path())?;
        app.wait_for_ports(&[HTTP_PORT])?;
        testbed._app = Some(app);
        Ok(testbed)
    }

    /// Starts this application at [`TCP_PORT`] unless it runs. Ends the one that ran before.
    pub(super) fn run_tcp_app(
        &self,
        app: TcpApp,
        start: impl FnOnce() -> anyhow::Result<Process>,
    ) -> anyhow::Result<()> {
        let mut running = self.tcp_app.lock();
        if running.as_ref().is_none_or(|(current, _)| *current != app) {
            *running = None; // the old one frees the port
            *running = Some((app, start()?));
        }
        Ok(())
    }

    /// Builds the testbed without an application; the caller provides one.
    pub(super) fn without_app() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir().context("creating a directory")?;
        // The sidecars run as another user and must be able to read the directory.
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755))
            .context("making the directory readable for all users")?;
        let certs = certs::create(dir.path())?;
        for (name, text) in FILES {
            std::fs::write(dir.path().join(name), text).with_context(|| format!("writing {name}"))?;
        }
        let mut virtual_network = VirtualNetwork::new(NAMESPACE_PREFIX)?;
        let client = virtual_network.add_host("client", &format!("{CLIENT_IP}/24"), None)?;
        let server = virtual_network.add_host("server", &format!("{SERVER_IP}/24"), None)?;
        let control = virtual_network.add_host("control", &format!("{CONTROL_IP}/24"), None)?;
        // No host has the address of the service. Packets to it need a route, so that they reach the redirect rules.
        client.ip(&format!("route add {SERVICE_IP} dev eth0\n"))?;
        for namespace in [&client, &server] {
            namespace
                .run(apply_tcp_settings)?
                .context("applying the TCP settings")?;
        }
        Ok(Self {
            _app: None,
            tcp_app: Mutex::default(),
            client,
            server,
            control,
            certs,
            dir,
            _network: virtual_network,
        })
    }

    /// Redirects traffic to the sidecars of a setup until the returned value is dropped.
    pub(super) fn redirect(&self, setup: &Setup) -> anyhow::Result<Redirect> {
        let (client, server) = (self.client.clone(), self.server.clone());
        let redirect = Redirect(match setup.path {
            SidecarPath::Both => vec![client, server],
            SidecarPath::Outbound => vec![client],
            SidecarPath::Inbound => vec![server],
        });
        let (inbound, outbound) = (port::INBOUND.to_string(), port::OUTBOUND.to_string());
        for namespace in &redirect.0 {
            run_init(
                namespace,
                &[
                    "-p",
                    &inbound,
                    "-o",
                    &outbound,
                    "-u",
                    &PROXY_UID.to_string(),
                    "--inbound-mode",
                    setup.inbound_mode.name(),
                ],
            )?;
            namespace
                .run(shorten_tracking_of_closed_connections)?
                .context("setting up connection tracking")?;
        }
        Ok(redirect)
    }

    /// The namespace of a sidecar.
    pub(super) fn namespace(&self, side: Side) -> &Namespace {
        match side {
            Side::Client => &self.client,
            Side::Server => &self.server,
        }
    }

    /// The file with the certificate and the key of a sidecar that does not get them from the identity service.
    pub(super) fn certificate(&self, side: Side) -> &std::path::Path {
        match side {
            Side::Client => &self.certs.client,
            Side::Server => &self.certs.server,
        }
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Creates a command that runs a program as the proxy's user, whose traffic is not redirected. Entering the namespace needs root,
/// so `setpriv` changes the user inside the namespace.
pub(super) fn command_as_proxy_user(namespace: &Namespace, program: impl AsRef<OsStr>) -> Command {
    let mut command = setpriv(namespace);
    command.arg(program);
    command
}

/// Like [`command_as_proxy_user`], with the capability that the mode `tproxy` needs.
pub(super) fn command_as_proxy_user_in_mode(
    namespace: &Namespace,
    mode: InboundMode,
    program: impl AsRef<OsStr>,
) -> Command {
    let mut command = setpriv(namespace);
    if mode == InboundMode::Tproxy {
        command.args(["--inh-caps=+net_raw", "--ambient-caps=+net_raw"]);
    }
    command.arg(program);
    command
}

fn setpriv(namespace: &Namespace) -> Command {
    let mut command = namespace.command("setpriv");
    command.args([
        format!("--reuid={PROXY_UID}"),
        format!("--regid={PROXY_UID}"),
        "--clear-groups".into(),
    ]);
    command
}

/// Listen address of a sidecar.
pub(super) fn listen_addr(side: Side) -> SocketAddr {
    match side {
        Side::Client => (Ipv4Addr::LOCALHOST, port::OUTBOUND).into(),
        Side::Server => (Ipv4Addr::UNSPECIFIED, port::INBOUND).into(),
    }
}

/// Installed redirect rules. Dropping the value removes them.
pub(super) struct Redirect(Vec<Arc<Namespace>>);

impl Drop for Redirect {
    fn drop(&mut self) {
        for namespace in &self.0 {
            if let Err(error) = run_init(namespace, &["--clean=now"]) {
                eprintln!("tulle-bench: {error:#}");
            }
        }
    }
}

/// TCP settings, the same for every peer.
fn apply_tcp_settings() -> std::io::Result<()> {
    // Some machines use BBR instead of Linux's default, cubic. BBR paces by measured delays. On a busy machine it measures
    // scheduling delays, and bodies arrive in bursts 40 ms apart. A namespace cannot select cubic, but it can select reno, which
    // behaves like cubic without packet loss.
    let control = "/proc/sys/net/ipv4/tcp_congestion_control";
    if std::fs::read_to_string(control)?.trim() != "cubic" {
        std::fs::write(control, "reno")?;
    }
    // Rows with a connection per request open more connections per minute than there are ports. Each closed connection stays in
    // TIME_WAIT.
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "1024 65535")?;
    std::fs::write("/proc/sys/net/ipv4/tcp_tw_reuse", "1")?;
    Ok(())
}

/// Shortens the time for which connection tracking keeps closed connections, so that they do not use up the sidecar's ports.
///
/// The setting exists only after redirect rules have loaded connection tracking.
fn shorten_tracking_of_closed_connections() -> std::io::Result<()> {
    std::fs::write("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_time_wait", "1")
}

/// Runs the shipped `tulle-init` in a namespace.
fn run_init(namespace: &Namespace, args: &[&str]) -> anyhow::Result<()> {
    let output = namespace
        .command(tools::sibling_binary(INIT_PROGRAM)?)
        .args(args)
        .output()
        .context("starting tulle-init")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(
        output.status.success(),
        "tulle-init {args:?} ended with {}: {errors}",
        output.status
    );
    Ok(())
}

pub(super) const INIT_PROGRAM: &str = "tulle-init";
pub(super) const CLIENT_IP: &str = "10.88.0.10";
pub(super) const SERVER_IP: &str = "10.88.0.20";
/// Address of tulle's control plane.
pub(super) const CONTROL_IP: &str = "10.88.0.30";
/// Cluster IP of the service. The server is its only endpoint.
pub(super) const SERVICE_IP: &str = "10.99.0.1";
pub(super) const HTTP_PORT: u16 = 8080;
pub(super) const TCP_PORT: u16 = 9000;
pub(super) const PROXY_UID: u32 = 2102;
pub(super) const NAMESPACE_PREFIX: &str = "tb-";

/// Name and content of a file in `peers/`.
macro_rules! peer_file {
    ($name:literal) => {
        ($name, include_str!(concat!("../../peers/", $name)))
    };
}

/// The files of the repository that a run needs.
const FILES: [(&str, &str); 19] = [
    peer_file!("haproxy-http-client.cfg"),
    peer_file!("haproxy-http-server.cfg"),
    peer_file!("haproxy-tcp-client.cfg"),
    peer_file!("haproxy-tcp-server.cfg"),
    peer_file!("nginx-http-client.conf"),
    peer_file!("nginx-http-server.conf"),
    peer_file!("nginx-grpc-client.conf"),
    peer_file!("nginx-grpc-server.conf"),
    peer_file!("nginx-tcp-client.conf"),
    peer_file!("nginx-tcp-server.conf"),
    peer_file!("envoy-http-client.yaml"),
    peer_file!("envoy-http-server.yaml"),
    peer_file!("envoy-tcp-client.yaml"),
    peer_file!("envoy-tcp-server.yaml"),
    peer_file!("haproxy-plain.cfg"),
    peer_file!("nginx-plain.conf"),
    peer_file!("envoy-plain.yaml"),
    peer_file!("wrk.lua"),
    ("echo.proto", include_str!("../../proto/echo.proto")),
];
