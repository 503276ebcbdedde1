//! The stage: namespaces, redirect rules, the application, certificates; the same for every peer, but one for each, so that
//! all of them can be there at once.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::Context as _;
use tempfile::TempDir;
use tulle_core::names::port;
use tulle_core::netns::{Lab, Namespace};

use super::peer::{Peer, Side};
use super::process::Process;
use super::rows::Path;
use super::{certs, tools};

/// Everything but the sidecars. Dropping it removes it all.
pub(super) struct Scene {
    // Dropped in this order: processes before the namespaces they live in.
    _app: Option<Process>,
    pub(super) client: Arc<Namespace>,
    pub(super) server: Arc<Namespace>,
    pub(super) control: Arc<Namespace>,
    pub(super) certs: certs::Files,
    pub(super) dir: TempDir,
    _lab: Lab,
}

/// Checks that all that `peers` need is there, and the programs that drive them, and clears what an earlier run left behind.
pub(super) fn prepare(peers: &[Peer], programs: &[&str]) -> anyhow::Result<()> {
    programs.iter().try_for_each(|program| tools::installed(program))?;
    peers.iter().try_for_each(|peer| peer.check())?;
    tools::beside(INIT)?;
    tulle_core::netns::sweep(PREFIX).context("removing what an earlier run left behind")?;
    Ok(())
}

impl Scene {
    /// Builds the stage.
    pub(super) fn build() -> anyhow::Result<Self> {
        let mut scene = Self::without_app()?;
        let mut command = scene
            .server
            .command(std::env::current_exe().context("finding this program")?);
        command.args([
            "serve",
            "--http",
            &format!("{SERVER}:{HTTP_PORT}"),
            "--tcp",
            &format!("{SERVER}:{TCP_PORT}"),
        ]);
        let mut app = Process::start("app", command, scene.dir.path())?;
        app.listening(&[HTTP_PORT, TCP_PORT])?;
        scene._app = Some(app);
        Ok(scene)
    }

    /// The stage for an application of the caller's.
    pub(super) fn without_app() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir().context("making a directory")?;
        // The sidecars run as a user of their own and have to read what is in it.
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).context("opening the directory to all")?;
        let certs = certs::make(dir.path())?;
        for (name, text) in FILES {
            std::fs::write(dir.path().join(name), text).with_context(|| format!("writing {name}"))?;
        }
        let mut lab = Lab::new(PREFIX)?;
        let client = lab.host("client", &format!("{CLIENT}/24"), None)?;
        let server = lab.host("server", &format!("{SERVER}/24"), None)?;
        let control = lab.host("control", &format!("{CONTROL}/24"), None)?;
        // The address of the service exists nowhere; a packet needs a route to get as far as the rules.
        client.ip(&format!("route add {SERVICE} dev eth0\n"))?;
        for namespace in [&client, &server] {
            namespace.run(tcp_settings)?.context("setting TCP up")?;
        }
        Ok(Self {
            _app: None,
            client,
            server,
            control,
            certs,
            dir,
            _lab: lab,
        })
    }

    /// Sends the traffic of the sides that have one through their sidecars until the value is dropped.
    pub(super) fn redirect(&self, path: Path) -> anyhow::Result<Redirect> {
        let (client, server) = (self.client.clone(), self.server.clone());
        let redirect = Redirect(match path {
            Path::Both => vec![client, server],
            Path::Outbound => vec![client],
            Path::Inbound => vec![server],
        });
        let (inbound, outbound) = (port::INBOUND.to_string(), port::OUTBOUND.to_string());
        for namespace in &redirect.0 {
            init(
                namespace,
                &["-p", &inbound, "-o", &outbound, "-u", &PROXY_UID.to_string()],
            )?;
        }
        Ok(redirect)
    }

    /// Where a sidecar runs.
    pub(super) fn namespace(&self, side: Side) -> &Namespace {
        match side {
            Side::Client => &self.client,
            Side::Server => &self.server,
        }
    }

    /// The certificate of a sidecar that gets it from us, with its key.
    pub(super) fn certificate(&self, side: Side) -> &std::path::Path {
        match side {
            Side::Client => &self.certs.client,
            Side::Server => &self.certs.server,
        }
    }

    /// The path of one of [`FILES`].
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// A program as the user whose traffic is not redirected: entering the namespace needs root, so the user changes after it.
pub(super) fn as_proxy(namespace: &Namespace, program: impl AsRef<OsStr>) -> Command {
    let mut command = namespace.command("setpriv");
    command
        .args([
            format!("--reuid={PROXY_UID}"),
            format!("--regid={PROXY_UID}"),
            "--clear-groups".into(),
        ])
        .arg(program);
    command
}

/// Where a sidecar listens.
pub(super) fn listener(side: Side) -> SocketAddr {
    match side {
        Side::Client => (Ipv4Addr::LOCALHOST, port::OUTBOUND).into(),
        Side::Server => (Ipv4Addr::UNSPECIFIED, port::INBOUND).into(),
    }
}

/// Redirect rules in force.
pub(super) struct Redirect(Vec<Arc<Namespace>>);

impl Drop for Redirect {
    fn drop(&mut self) {
        for namespace in &self.0 {
            if let Err(error) = init(namespace, &["--clean=now"]) {
                eprintln!("tulle-bench: {error:#}");
            }
        }
    }
}

/// Settings of TCP, the same for every peer.
fn tcp_settings() -> std::io::Result<()> {
    // Some machines have BBR instead of Linux's default. It paces by what it has measured, and on one busy machine that is how long
    // processes waited for a processor: bodies come in jerks of 40 ms. A namespace may not choose cubic, but reno, which is the same
    // where nothing is lost.
    let control = "/proc/sys/net/ipv4/tcp_congestion_control";
    if std::fs::read_to_string(control)?.trim() != "cubic" {
        std::fs::write(control, "reno")?;
    }
    // Rows with a connection for each request go through more of them than there are ports, and each lingers for a minute.
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "1024 65535")?;
    std::fs::write("/proc/sys/net/ipv4/tcp_tw_reuse", "1")?;
    // There once there are redirect rules; the sidecar's ports must not run out because of what is long over.
    let tracked = std::path::Path::new("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_time_wait");
    if tracked.exists() {
        std::fs::write(tracked, "1")?;
    }
    Ok(())
}

/// Programs the rules with the shipped binary, for every peer the same.
fn init(namespace: &Namespace, args: &[&str]) -> anyhow::Result<()> {
    let output = namespace
        .command(tools::beside(INIT)?)
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

const INIT: &str = "tulle-init";
pub(super) const CLIENT: &str = "10.88.0.10";
pub(super) const SERVER: &str = "10.88.0.20";
/// The control plane of tulle.
pub(super) const CONTROL: &str = "10.88.0.30";
/// The cluster IP of the service that the server is the only endpoint of.
pub(super) const SERVICE: &str = "10.99.0.1";
pub(super) const HTTP_PORT: u16 = 8080;
pub(super) const TCP_PORT: u16 = 9000;
/// The user whose traffic is not redirected.
pub(super) const PROXY_UID: u32 = 2102;
const PREFIX: &str = "tb-";

/// A file of `peers/`.
macro_rules! peer_file {
    ($name:literal) => {
        ($name, include_str!(concat!("../../peers/", $name)))
    };
}

/// Committed files that the programs of a run read.
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
