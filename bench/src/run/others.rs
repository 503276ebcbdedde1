//! Peers that take neither their user nor addresses from the environment: they are started as the proxy's user, with
//! configurations that are filled in for the run.

use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use tulle_core::names::port;
use tulle_core::netns::Namespace;

use super::Traffic;
use super::peer::Sidecars;
use super::process::Process;
use super::scene::{self, HTTP_PORT, PROXY_UID, SERVER, Scene, TCP_PORT};

/// A pair of nginx, one process each.
pub(super) fn nginx(scene: &Scene, traffic: Traffic) -> anyhow::Result<Sidecars> {
    let kind = match traffic {
        Traffic::Http1 => "http",
        Traffic::Grpc => "grpc",
        Traffic::Opaque => "tcp",
    };
    // nginx wants to write its process number and makes directories for files it will not use.
    let dir = scene.dir.path().join("nginx");
    std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    chown(&dir, Some(PROXY_UID), Some(PROXY_UID)).context("giving nginx its directory")?;
    let dir = dir.display().to_string();
    pair(scene, |side| {
        let name = format!("nginx-{kind}-{}.conf", side.name);
        let text = filled(scene, traffic, side, &name)?;
        let text = text.replace("@DIR@", &dir).replace("@WORKERS@", "1");
        let mut command = scene::as_proxy(side.namespace, "nginx");
        command.arg("-c").arg(written(scene, &name, &text)?);
        // One process that is all there is.
        command.args(["-g", "master_process off;"]);
        Ok(command)
    })
}

/// A pair of Envoy, one worker each.
pub(super) fn start_envoy(scene: &Scene, traffic: Traffic) -> anyhow::Result<Sidecars> {
    let (kind, codec, app_protocol) = match traffic {
        Traffic::Http1 => ("http", "HTTP1", "http_protocol_options"),
        Traffic::Grpc => ("http", "HTTP2", "http2_protocol_options"),
        Traffic::Opaque => ("tcp", "", ""),
    };
    let program = scene.dir.path().join("envoy");
    if !program.exists() {
        // Where it is installed, only its owner may look.
        std::fs::copy(envoy()?, &program).context("copying envoy")?;
    }
    pair(scene, |side| {
        let name = format!("envoy-{kind}-{}.yaml", side.name);
        let text = filled(scene, traffic, side, &name)?;
        let text = text.replace("@CODEC@", codec).replace("@APP_PROTOCOL@", app_protocol);
        let mut command = scene::as_proxy(side.namespace, &program);
        command.arg("-c").arg(written(scene, &name, &text)?);
        command.args(["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]);
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
struct Side<'a> {
    name: &'static str,
    namespace: &'a Namespace,
    certificate: &'a std::path::Path,
    listener: u16,
}

/// Starts both sides and waits until they listen.
fn pair(scene: &Scene, command: impl Fn(&Side<'_>) -> anyhow::Result<Command>) -> anyhow::Result<Sidecars> {
    let start = |side: &Side<'_>| {
        let mut process = Process::start(side.name, command(side)?, scene.dir.path())?;
        process.listening(&[side.listener]).map(|()| process)
    };
    let server = start(&Side {
        name: "server",
        namespace: &scene.server,
        certificate: &scene.certs.server,
        listener: port::INBOUND,
    })?;
    let client = start(&Side {
        name: "client",
        namespace: &scene.client,
        certificate: &scene.certs.client,
        listener: port::OUTBOUND,
    })?;
    Ok(Sidecars {
        client,
        server,
        _control: None,
        _redirect: scene.redirect()?,
    })
}

/// A committed configuration with the addresses and files of this run.
fn filled(scene: &Scene, traffic: Traffic, side: &Side<'_>, name: &str) -> anyhow::Result<String> {
    let path = scene.file(name);
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let app_port = if traffic == Traffic::Opaque {
        TCP_PORT
    } else {
        HTTP_PORT
    };
    Ok(text
        .replace("@SERVER_ADDR@", SERVER)
        .replace("@SERVER_PORT@", &app_port.to_string())
        .replace("@ANCHORS@", &scene.certs.anchors.display().to_string())
        .replace("@CERTIFICATE@", &side.certificate.display().to_string()))
}

/// Writes it under a name of the same kind: Envoy goes by its end.
fn written(scene: &Scene, name: &str, text: &str) -> anyhow::Result<PathBuf> {
    let path = scene.file(&format!("running-{name}"));
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}
