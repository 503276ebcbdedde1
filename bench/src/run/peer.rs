//! The sidecars that are compared, each pair started the same way.

use std::process::Command;

use super::process::Process;
use super::rows::{Path, Setup, Traffic};
use super::scene::{self, HTTP_PORT, PROXY_UID, Redirect, SERVER, Scene, TCP_PORT};
use super::throttle::Throttle;
use super::{others, tools, tulle};

/// Who carries the traffic.
#[derive(clap::ValueEnum, serde::Serialize, serde::Deserialize, Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Peer {
    /// As its images have it: built with a profile.
    Tulle,
    /// tulle, built without a profile.
    TulleNoProfile,
    Haproxy,
    Nginx,
    Envoy,
    /// Nobody: what the client and the application can do alone.
    None,
}

/// One of the two sidecars.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Side {
    Client,
    Server,
}

impl Side {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

/// Running sidecars with their redirect rules.
pub(super) struct Sidecars {
    // Dropped in this order: processes before the limits on them.
    pub(super) client: Option<Process>,
    pub(super) server: Option<Process>,
    _throttles: Vec<Throttle>,
    /// Runs while they do; its cost is not theirs.
    _control: Option<Process>,
    _redirect: Redirect,
}

impl Sidecars {
    /// Starts what the setup wants, the server's first, then redirects the traffic of its side.
    pub(super) fn start(
        scene: &Scene,
        setup: &Setup,
        control: Option<Process>,
        start: impl Fn(Side) -> anyhow::Result<Process>,
    ) -> anyhow::Result<Self> {
        let server = (setup.path != Path::Outbound)
            .then(|| start(Side::Server))
            .transpose()?;
        let client = (setup.path != Path::Inbound).then(|| start(Side::Client)).transpose()?;
        let throttle = |process| setup.throttle.map(|percent| Throttle::threads_of(process, percent));
        Ok(Self {
            _throttles: [&client, &server]
                .into_iter()
                .flatten()
                .filter_map(throttle)
                .collect::<anyhow::Result<_>>()?,
            _redirect: scene.redirect(setup.path)?,
            client,
            server,
            _control: control,
        })
    }

    pub(super) fn sides(&self) -> Vec<(Side, &Process)> {
        let client = self.client.iter().map(|process| (Side::Client, process));
        let server = self.server.iter().map(|process| (Side::Server, process));
        client.chain(server).collect()
    }
}

impl Peer {
    /// Fails when a program is missing, before anything is started.
    pub(super) fn check(self) -> anyhow::Result<()> {
        match self {
            Self::Tulle => tulle::check(tulle::PROXY),
            Self::TulleNoProfile => tulle::check(tulle::PROXY_NO_PROFILE),
            Self::Haproxy => tools::installed("haproxy"),
            Self::Nginx => tools::installed("nginx"),
            Self::Envoy => others::envoy().map(drop),
            Self::None => Ok(()),
        }
    }

    /// Fails when the traffic of the warm-up did not go the way that is measured.
    pub(super) fn verify(self, scene: &Scene, setup: &Setup) -> anyhow::Result<()> {
        match self {
            Self::Tulle | Self::TulleNoProfile => tulle::verify(scene, setup.path),
            // Nobody else answers at the service's address, and the sidecar accepts nothing but certificates of ours.
            Self::Haproxy | Self::Nginx | Self::Envoy | Self::None => Ok(()),
        }
    }

    /// Starts the sidecars and waits until they listen.
    pub(super) fn start(self, scene: &Scene, setup: &Setup) -> anyhow::Result<Option<Sidecars>> {
        match self {
            Self::Tulle => tulle::start(scene, setup, tulle::PROXY).map(Some),
            Self::TulleNoProfile => tulle::start(scene, setup, tulle::PROXY_NO_PROFILE).map(Some),
            Self::Haproxy => haproxy(scene, setup).map(Some),
            Self::Nginx => others::nginx(scene, setup).map(Some),
            Self::Envoy => others::start_envoy(scene, setup).map(Some),
            Self::None => Ok(None),
        }
    }

    /// What it calls itself, with its version.
    pub(super) fn version(self) -> anyhow::Result<String> {
        match self {
            Self::Tulle | Self::TulleNoProfile => {
                let git = Command::new("git").args(["describe", "--always", "--dirty"]).output();
                let commit = git.ok().filter(|output| output.status.success());
                let commit = commit.map(|output| format!(" ({})", String::from_utf8_lossy(&output.stdout).trim()));
                Ok(format!(
                    "{} {}{}",
                    super::report::name(self),
                    env!("CARGO_PKG_VERSION"),
                    commit.unwrap_or_default()
                ))
            }
            Self::Haproxy => tools::first_line("haproxy", &["-v"]),
            Self::Nginx => tools::first_line("nginx", &["-v"]),
            Self::Envoy => {
                let line = tools::first_line(others::envoy()?, &["--version"])?;
                // It begins with where the program is.
                Ok(line
                    .split_once("version:")
                    .map_or_else(|| line.clone(), |(_, version)| format!("envoy version:{version}")))
            }
            Self::None => Ok("no proxy".to_owned()),
        }
    }
}

fn haproxy(scene: &Scene, setup: &Setup) -> anyhow::Result<Sidecars> {
    let (mode, proto, app_port) = match setup.traffic {
        Traffic::Http1 => ("http", "h1", HTTP_PORT),
        Traffic::Http2 => ("http", "h2", HTTP_PORT),
        Traffic::Opaque => ("tcp", "", TCP_PORT),
    };
    Sidecars::start(scene, setup, None, |side| {
        let name = side.name();
        let listener = scene::listener(side);
        let file = match setup.path {
            Path::Both => format!("haproxy-{mode}-{name}.cfg"),
            Path::Outbound | Path::Inbound => "haproxy-plain.cfg".to_owned(),
        };
        let mut command = scene.namespace(side).command("haproxy");
        command
            .args(["-db", "-f"])
            .arg(scene.file(&file))
            .env("PROTO", proto)
            .env("WORKERS", setup.workers.to_string())
            .env("PROXY_UID", PROXY_UID.to_string())
            .env("LISTENER", listener.to_string())
            .env("SERVER", format!("{SERVER}:{app_port}"))
            .env("ANCHORS", &scene.certs.anchors)
            .env("CERTIFICATE", scene.certificate(side));
        let mut process = Process::start(&format!("haproxy-{name}"), command, scene.dir.path())?;
        process.listening(&[listener.port()]).map(|()| process)
    })
}
