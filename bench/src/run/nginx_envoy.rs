//! nginx and Envoy. Both read neither their user nor their addresses from the environment. They are started as the proxy's user,
//! with configuration files that are rendered for the run.

use std::net::SocketAddr;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use super::process::Process;
use super::setup::Side;
use super::setup::{Setup, SidecarPath, Traffic};
use super::sidecars::Sidecars;
use super::testbed::{self, HTTP_PORT, PROXY_UID, SERVER_IP, TCP_PORT, Testbed};

/// Starts nginx, with one process per side.
pub(super) fn start_nginx(testbed: &Testbed, setup: &Setup) -> anyhow::Result<Sidecars> {
    let kind = match setup.traffic {
        Traffic::Http1 => "http",
        Traffic::Http2 => "grpc", // the configuration with grpc_pass, for all HTTP/2
        Traffic::Opaque => "tcp",
    };
    // nginx needs a directory for its pid file, and for temporary files even if it does not use them.
    let dir = testbed.dir.path().join("nginx");
    std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    chown(&dir, Some(PROXY_UID), Some(PROXY_UID)).context("changing the owner of the directory of nginx")?;
    let dir = dir.display().to_string();
    start(testbed, setup, |sidecar| {
        let text = sidecar.render_config(&match setup.path {
            SidecarPath::Both => format!("nginx-{kind}-{}.conf", sidecar.side.name()),
            SidecarPath::Outbound | SidecarPath::Inbound => "nginx-plain.conf".to_owned(),
        })?;
        let text = text.replace("@DIR@", &dir);
        let mut command = testbed::command_as_proxy_user(testbed.namespace(sidecar.side), "nginx");
        command.arg("-c").arg(sidecar.write_config("conf", &text)?);
        // Without a master process, nginx is a single process, which is measured.
        command.args(["-g", "master_process off;"]);
        Ok(command)
    })
}

/// Starts Envoy.
pub(super) fn start_envoy(testbed: &Testbed, setup: &Setup) -> anyhow::Result<Sidecars> {
    let (kind, codec, app_protocol) = match setup.traffic {
        Traffic::Http1 => ("http", "HTTP1", "http_protocol_options"),
        Traffic::Http2 => ("http", "HTTP2", "http2_protocol_options"),
        Traffic::Opaque => ("tcp", "", ""),
    };
    let program = testbed.dir.path().join("envoy");
    if !program.exists() {
        // The installation directory is accessible to its owner only.
        std::fs::copy(envoy_binary()?, &program).context("copying envoy")?;
    }
    start(testbed, setup, |sidecar| {
        let text = sidecar.render_config(&match setup.path {
            SidecarPath::Both => format!("envoy-{kind}-{}.yaml", sidecar.side.name()),
            SidecarPath::Outbound | SidecarPath::Inbound => "envoy-plain.yaml".to_owned(),
        })?;
        let text = text.replace("@CODEC@", codec).replace("@APP_PROTOCOL@", app_protocol);
        let mut command = testbed::command_as_proxy_user(testbed.namespace(sidecar.side), &program);
        command.arg("-c").arg(sidecar.write_config("yaml", &text)?);
        command.args(["--concurrency", &setup.workers.to_string()]);
        command.args(["--disable-hot-restart", "--log-level", "warning"]);
        Ok(command)
    })
}

/// The binary inside the Python package. The `envoy` command of the package is a script that starts it.
pub(super) fn envoy_binary() -> anyhow::Result<PathBuf> {
    let script = "import envoy, pathlib; print(pathlib.Path(envoy.__file__).parent / '_bin/envoy')";
    let output = Command::new("python3").args(["-c", script]).output();
    let output = output.context("starting python3")?;
    let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    anyhow::ensure!(
        output.status.success() && path.exists(),
        "envoy is missing; \"./run bench\" installs it"
    );
    Ok(path)
}

/// A sidecar that is about to be started.
struct Sidecar<'a> {
    testbed: &'a Testbed,
    side: Side,
    listener: SocketAddr,
    app_port: u16,
}

/// Starts the sidecars that the setup needs and waits until they listen.
fn start(
    testbed: &Testbed,
    setup: &Setup,
    command: impl Fn(&Sidecar<'_>) -> anyhow::Result<Command>,
) -> anyhow::Result<Sidecars> {
    Sidecars::start(testbed, setup, None, |side| {
        let sidecar = Sidecar {
            testbed,
            side,
            listener: testbed::listen_addr(side),
            app_port: if setup.traffic == Traffic::Opaque {
                TCP_PORT
            } else {
                HTTP_PORT
            },
        };
        let mut process = Process::start(side.name(), command(&sidecar)?, testbed.dir.path())?;
        process.wait_for_ports(&[sidecar.listener.port()]).map(|()| process)
    })
}

impl Sidecar<'_> {
    /// Renders a configuration of `bench/peers` with the addresses and files of this run.
    fn render_config(&self, name: &str) -> anyhow::Result<String> {
        let path = self.testbed.file(name);
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(text
            .replace("@SERVER_ADDR@", SERVER_IP)
            .replace("@SERVER_PORT@", &self.app_port.to_string())
            .replace("@LISTENER_ADDR@", &self.listener.ip().to_string())
            .replace("@LISTENER_PORT@", &self.listener.port().to_string())
            .replace("@ANCHORS@", &self.testbed.certs.anchors.display().to_string())
            .replace(
                "@CERTIFICATE@",
                &self.testbed.certificate(self.side).display().to_string(),
            ))
    }

    /// Writes the configuration. Envoy derives the format from the file extension.
    fn write_config(&self, extension: &str, text: &str) -> anyhow::Result<PathBuf> {
        let path = self.testbed.file(&format!("running-{}.{extension}", self.side.name()));
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }
}
