//! The sidecars that are compared, each pair started the same way.

use tulle_core::names::port;

use super::process::Process;
use super::scene::{HTTP_PORT, PROXY_UID, Redirect, SERVER, Scene, TCP_PORT};
use super::{Row, Traffic, others, tools, tulle};

/// Who carries the traffic.
#[derive(clap::ValueEnum, serde::Serialize, Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Peer {
    Tulle,
    Haproxy,
    Nginx,
    Envoy,
    /// Nobody: what the client and the application can do alone.
    None,
}

/// A running pair with its redirect rules.
pub(super) struct Sidecars {
    pub(super) client: Process,
    pub(super) server: Process,
    /// Runs while they do; its cost is not theirs.
    pub(super) _control: Option<Process>,
    pub(super) _redirect: Redirect,
}

impl Peer {
    /// Fails when a program is missing, before anything is started.
    pub(super) fn check(self) -> anyhow::Result<()> {
        match self {
            Self::Tulle => tulle::PROGRAMS
                .into_iter()
                .try_for_each(|name| tools::beside(name).map(drop)),
            Self::Haproxy => tools::installed("haproxy"),
            Self::Nginx => tools::installed("nginx"),
            Self::Envoy => others::envoy().map(drop),
            Self::None => Ok(()),
        }
    }

    /// Fails when the traffic of the warm-up did not go the way that is measured.
    pub(super) fn verify(self, scene: &Scene) -> anyhow::Result<()> {
        match self {
            Self::Tulle => tulle::verify(scene),
            // Nobody else answers at the service's address, and the sidecar accepts nothing but certificates of ours.
            Self::Haproxy | Self::Nginx | Self::Envoy | Self::None => Ok(()),
        }
    }

    /// Starts a pair for this row and waits until both sides listen.
    pub(super) fn start(self, scene: &Scene, row: Row) -> anyhow::Result<Option<Sidecars>> {
        match self {
            Self::Tulle => tulle::start(scene, row).map(Some),
            Self::Haproxy => haproxy(scene, row.traffic()).map(Some),
            Self::Nginx => others::nginx(scene, row.traffic()).map(Some),
            Self::Envoy => others::start_envoy(scene, row.traffic()).map(Some),
            Self::None => Ok(None),
        }
    }
}

fn haproxy(scene: &Scene, traffic: Traffic) -> anyhow::Result<Sidecars> {
    let (mode, proto, app_port) = match traffic {
        Traffic::Http1 => ("http", "h1", HTTP_PORT),
        Traffic::Grpc => ("http", "h2", HTTP_PORT),
        Traffic::Opaque => ("tcp", "", TCP_PORT),
    };
    let start = |side: &str, namespace: &tulle_core::netns::Namespace, certificate, listener| {
        let mut command = namespace.command("haproxy");
        command
            .args(["-db", "-f"])
            .arg(scene.file(&format!("haproxy-{mode}-{side}.cfg")))
            .env("PROTO", proto)
            .env("PROXY_UID", PROXY_UID.to_string())
            .env("SERVER", format!("{SERVER}:{app_port}"))
            .env("ANCHORS", &scene.certs.anchors)
            .env("CERTIFICATE", certificate);
        let mut process = Process::start(&format!("haproxy-{side}"), command, scene.dir.path())?;
        process.listening(&[listener]).map(|()| process)
    };
    let server = start("server", &scene.server, &scene.certs.server, port::INBOUND)?;
    let client = start("client", &scene.client, &scene.certs.client, port::OUTBOUND)?;
    Ok(Sidecars {
        client,
        server,
        _control: None,
        _redirect: scene.redirect()?,
    })
}
