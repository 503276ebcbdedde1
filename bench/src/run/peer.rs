//! What the benchmark does with each kind of sidecar: it checks that the programs exist, starts them, and verifies them.

use std::process::Command;

use anyhow::Context as _;

use super::process::Process;
use super::setup::{Peer, Setup, SidecarPath, Traffic, json_name};
use super::sidecars::Sidecars;
use super::testbed::{self, HTTP_PORT, PROXY_UID, SERVER_IP, TCP_PORT, Testbed};
use super::{nginx_envoy, tools, tulle};

impl Peer {
    /// Fails if a required program is missing.
    pub(super) fn check(self) -> anyhow::Result<()> {
        match self {
            Self::Tulle => tulle::check(tulle::PROXY),
            Self::TulleNoProfile => tulle::check(tulle::PROXY_NO_PROFILE),
            Self::Haproxy => tools::check_installed("haproxy"),
            Self::Nginx => tools::check_installed("nginx"),
            Self::Envoy => nginx_envoy::envoy_binary().map(drop),
            Self::None => Ok(()),
        }
    }

    /// Fails if the warm-up traffic did not pass through the sidecars.
    pub(super) fn verify(self, testbed: &Testbed, setup: &Setup) -> anyhow::Result<()> {
        match self {
            Self::Tulle | Self::TulleNoProfile => tulle::verify(testbed, setup.path),
            // No check is needed. No host has the service's address, so its traffic reaches only the client's sidecar. With both
            // sidecars, the client's sidecar connects only to a server's sidecar with a certificate of this run. The row
            // `inbound-only`, in which the client dials the server's address, is not checked.
            Self::Haproxy | Self::Nginx | Self::Envoy | Self::None => Ok(()),
        }
    }

    /// Starts the sidecars and waits until they listen.
    pub(super) fn start(self, testbed: &Testbed, setup: &Setup) -> anyhow::Result<Option<Sidecars>> {
        match self {
            Self::Tulle => tulle::start(testbed, setup, tulle::PROXY).map(Some),
            Self::TulleNoProfile => tulle::start(testbed, setup, tulle::PROXY_NO_PROFILE).map(Some),
            Self::Haproxy => start_haproxy(testbed, setup).map(Some),
            Self::Nginx => nginx_envoy::start_nginx(testbed, setup).map(Some),
            Self::Envoy => nginx_envoy::start_envoy(testbed, setup).map(Some),
            Self::None => Ok(None),
        }
    }

    /// Name and version, as the program reports them. tulle has the version of this program and the commit of the current
    /// directory.
    pub(super) fn version(self) -> anyhow::Result<String> {
        match self {
            Self::Tulle | Self::TulleNoProfile => {
                let git = Command::new("git").args(["describe", "--always", "--dirty"]).output();
                let commit = git.ok().filter(|output| output.status.success());
                let commit = commit.map(|output| format!(" ({})", String::from_utf8_lossy(&output.stdout).trim()));
                Ok(format!(
                    "{} {}{}",
                    json_name(self),
                    env!("CARGO_PKG_VERSION"),
                    commit.unwrap_or_default()
                ))
            }
            Self::Haproxy => tools::first_line("haproxy", &["-v"]),
            Self::Nginx => tools::first_line("nginx", &["-v"]),
            Self::Envoy => {
                let line = tools::first_line(nginx_envoy::envoy_binary()?, &["--version"])?;
                // The line begins with the path of the program.
                Ok(line
                    .split_once("version:")
                    .map_or_else(|| line.clone(), |(_, version)| format!("envoy version:{version}")))
            }
            Self::None => Ok("no proxy".to_owned()),
        }
    }
}

fn start_haproxy(testbed: &Testbed, setup: &Setup) -> anyhow::Result<Sidecars> {
    let (mode, proto, app_port) = match setup.traffic {
        Traffic::Http1 => ("http", "h1", HTTP_PORT),
        Traffic::Http2 => ("http", "h2", HTTP_PORT),
        Traffic::Opaque => ("tcp", "", TCP_PORT),
    };
    Sidecars::start(testbed, setup, None, |side| {
        let name = side.name();
        let listener = testbed::listen_addr(side);
        let file = match setup.path {
            SidecarPath::Both => format!("haproxy-{mode}-{name}.cfg"),
            SidecarPath::Outbound | SidecarPath::Inbound => "haproxy-plain.cfg".to_owned(),
        };
        let mut command = testbed.namespace(side).command("haproxy");
        command
            .args(["-db", "-f"])
            .arg(testbed.file(&file))
            .env("PROTO", proto)
            .env("WORKERS", setup.workers.to_string())
            .env("PROXY_UID", PROXY_UID.to_string())
            .env("LISTENER", listener.to_string())
            .env("SERVER", format!("{SERVER_IP}:{app_port}"))
            .env("ANCHORS", &testbed.certs.anchors)
            .env("CERTIFICATE", testbed.certificate(side));
        let mut process = Process::start(&format!("haproxy-{name}"), command, testbed.dir.path())?;
        process.wait_for_ports(&[listener.port()]).map(|()| process)
    })
}

/// Checks that the programs of `peers` and the other `programs` are installed, and removes leftovers of an earlier run.
pub(super) fn prepare_run(peers: &[Peer], programs: &[&str]) -> anyhow::Result<()> {
    programs
        .iter()
        .try_for_each(|program| tools::check_installed(program))?;
    peers.iter().try_for_each(|peer| peer.check())?;
    tools::sibling_binary(testbed::INIT_PROGRAM)?;
    tulle_core::netns::remove_stale(testbed::NAMESPACE_PREFIX).context("removing leftovers of an earlier run")?;
    Ok(())
}

/// Names and versions of the peers ([`Peer::version`]) and of the load generators, as the programs report them.
pub(super) fn versions(peers: &[Peer]) -> anyhow::Result<Vec<String>> {
    let peers = peers
        .iter()
        .filter(|peer| **peer != Peer::None)
        .map(|peer| peer.version());
    let generators: [(&str, &[&str]); 3] = [("wrk", &["-v"]), ("h2load", &["--version"]), ("ghz", &["--version"])];
    let generators = generators.iter().map(|(program, args)| {
        let line = tools::first_line(program, args)?;
        Ok(if line.starts_with(program) {
            line
        } else {
            format!("{program} {line}")
        })
    });
    peers.chain(generators).collect()
}
