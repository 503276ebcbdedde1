//! The stage: namespaces, redirect rules, the application, certificates; the same for every peer.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::Context as _;
use tempfile::TempDir;
use tulle_core::names::port;
use tulle_core::netns::{Lab, Namespace};

use super::peer::Peer;
use super::process::Process;
use super::{certs, tools};

/// Everything but the sidecars. Dropping it removes it all.
pub(super) struct Scene {
    // Dropped in this order: processes before the namespaces they live in.
    _app: Process,
    pub(super) client: Arc<Namespace>,
    pub(super) server: Arc<Namespace>,
    pub(super) control: Arc<Namespace>,
    pub(super) certs: certs::Files,
    pub(super) dir: TempDir,
    _lab: Lab,
}

impl Scene {
    /// Checks that all that `peers` need is there, and builds the stage.
    pub(super) fn build(peers: &[Peer]) -> anyhow::Result<Self> {
        for peer in peers {
            peer.check()?;
        }
        ["wrk", "ghz"].into_iter().try_for_each(tools::installed)?;
        tools::beside(INIT)?;
        let dir = tempfile::tempdir().context("making a directory")?;
        // The sidecars run as a user of their own and have to read what is in it.
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).context("opening the directory to all")?;
        let certs = certs::make(dir.path())?;
        for (name, text) in FILES {
            std::fs::write(dir.path().join(name), text).with_context(|| format!("writing {name}"))?;
        }
        tulle_core::netns::sweep(PREFIX).context("removing what an earlier run left behind")?;
        let mut lab = Lab::new(PREFIX)?;
        let client = lab.host("client", &format!("{CLIENT}/24"), None)?;
        let server = lab.host("server", &format!("{SERVER}/24"), None)?;
        let control = lab.host("control", &format!("{CONTROL}/24"), None)?;
        // The address of the service exists nowhere; a packet needs a route to get as far as the rules.
        client.ip(&format!("route add {SERVICE} dev eth0\n"))?;
        let mut command = server.command(std::env::current_exe().context("finding this program")?);
        command.args([
            "serve",
            "--http",
            &format!("{SERVER}:{HTTP_PORT}"),
            "--tcp",
            &format!("{SERVER}:{TCP_PORT}"),
        ]);
        let mut app = Process::start("app", command, dir.path())?;
        app.listening(&[HTTP_PORT, TCP_PORT])?;
        Ok(Self {
            _app: app,
            client,
            server,
            control,
            certs,
            dir,
            _lab: lab,
        })
    }

    /// Sends the traffic of both sides through their sidecars until the value is dropped.
    pub(super) fn redirect(&self) -> anyhow::Result<Redirect> {
        let redirect = Redirect(vec![self.client.clone(), self.server.clone()]);
        let (inbound, outbound) = (port::INBOUND.to_string(), port::OUTBOUND.to_string());
        for namespace in &redirect.0 {
            init(
                namespace,
                &["-p", &inbound, "-o", &outbound, "-u", &PROXY_UID.to_string()],
            )?;
        }
        Ok(redirect)
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
const FILES: [(&str, &str); 16] = [
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
    peer_file!("wrk.lua"),
    ("echo.proto", include_str!("../../proto/echo.proto")),
];
