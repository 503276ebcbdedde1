//! Peers that take neither their user nor addresses from the environment: they are started as the proxy's user, with
//! configurations that are filled in for the run.

use std::net::SocketAddr;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use super::peer::{Side, Sidecars};
use super::process::Process;
use super::rows::{Path, Setup, Traffic};
use super::scene::{self, HTTP_PORT, PROXY_UID, SERVER, Scene, TCP_PORT};

/// nginx, one process a side.
pub(super) fn nginx(scene: &Scene, setup: &Setup) -> anyhow::Result<Sidecars> {
    let kind = match setup.traffic {
        Traffic::Http1 => "http",
        Traffic::Http2 => "grpc",
        Traffic::Opaque => "tcp",
    };
    // nginx wants to write its process number and makes directories for files it will not use.
    let dir = scene.dir.path().join("nginx");
    std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    chown(&dir, Some(PROXY_UID), Some(PROXY_UID)).context("giving nginx its directory")?;
    let dir = dir.display().to_string();
    start(scene, setup, |sidecar| {
        let text = sidecar.filled(&match setup.path {
            Path::Both => format!("nginx-{kind}-{}.conf", sidecar.side.name()),
            Path::Outbound | Path::Inbound => "nginx-plain.conf".to_owned(),
        })?;
        let text = text.replace("@DIR@", &dir);
        let mut command = scene::as_proxy(scene.namespace(sidecar.side), "nginx");
        command.arg("-c").arg(sidecar.written("conf", &text)?);
        // One process that is all there is.
        command.args(["-g", "master_process off;"]);
        Ok(command)
    })
}

/// Envoy.
pub(super) fn start_envoy(scene: &Scene, setup: &Setup) -> anyhow::Result<Sidecars> {
    let (kind, codec, app_protocol) = match setup.traffic {
        Traffic::Http1 => ("http", "HTTP1", "http_protocol_options"),
        Traffic::Http2 => ("http", "HTTP2", "http2_protocol_options"),
        Traffic::Opaque => ("tcp", "", ""),
    };
    let program = scene.dir.path().join("envoy");
    if !program.exists() {
        // Where it is installed, only its owner may look.
        std::fs::copy(envoy()?, &program).context("copying envoy")?;
    }
    start(scene, setup, |sidecar| {
        let text = sidecar.filled(&match setup.path {
            Path::Both => format!("envoy-{kind}-{}.yaml", sidecar.side.name()),
            Path::Outbound | Path::Inbound => "envoy-plain.yaml".to_owned(),
        })?;
        let text = text.replace("@CODEC@", codec).replace("@APP_PROTOCOL@", app_protocol);
        let mut command = scene::as_proxy(scene.namespace(sidecar.side), &program);
        command.arg("-c").arg(sidecar.written("yaml", &text)?);
        command.args(["--concurrency", &setup.workers.to_string()]);
        command.args(["--disable-hot-restart", "--log-level", "warning"]);
        Ok(command)
    })
}

/// The program inside the Python package, whose own `envoy` is a script that starts it.
pub(super) fn envoy() -> anyhow::Result<PathBuf> {
    let script = "import envoy, pathlib; print(pathlib.Path(envoy.__file__).parent / '_bin/envoy')";
    let output = Command::new("python3").args(["-c", script]).output();
    let output = output.context("starting python3")?;
    let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    anyhow::ensure!(
        output.status.success() && path.exists(),
        "envoy is missing; \"./run bench\" installs what is missing"
    );
    Ok(path)
}

/// One of the two sidecars.
struct Sidecar<'a> {
    scene: &'a Scene,
    side: Side,
    listener: SocketAddr,
    app_port: u16,
}

/// Starts what the setup wants and waits until it listens.
fn start(
    scene: &Scene,
    setup: &Setup,
    command: impl Fn(&Sidecar<'_>) -> anyhow::Result<Command>,
) -> anyhow::Result<Sidecars> {
    Sidecars::start(scene, setup, None, |side| {
        let sidecar = Sidecar {
            scene,
            side,
            listener: scene::listener(side),
            app_port: if setup.traffic == Traffic::Opaque {
                TCP_PORT
            } else {
                HTTP_PORT
            },
        };
        let mut process = Process::start(side.name(), command(&sidecar)?, scene.dir.path())?;
        process.listening(&[sidecar.listener.port()]).map(|()| process)
    })
}

impl Sidecar<'_> {
    /// A committed configuration with the addresses and files of this run.
    fn filled(&self, name: &str) -> anyhow::Result<String> {
        let path = self.scene.file(name);
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(text
            .replace("@SERVER_ADDR@", SERVER)
            .replace("@SERVER_PORT@", &self.app_port.to_string())
            .replace("@LISTENER_ADDR@", &self.listener.ip().to_string())
            .replace("@LISTENER_PORT@", &self.listener.port().to_string())
            .replace("@ANCHORS@", &self.scene.certs.anchors.display().to_string())
            .replace(
                "@CERTIFICATE@",
                &self.scene.certificate(self.side).display().to_string(),
            ))
    }

    /// Writes it under a name of the same kind: Envoy goes by its end.
    fn written(&self, kind: &str, text: &str) -> anyhow::Result<PathBuf> {
        let path = self.scene.file(&format!("running-{}.{kind}", self.side.name()));
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }
}
