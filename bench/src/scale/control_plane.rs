//! The measured process of the control plane.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::{Instant, sleep};
use tulle_control::trust::{self, CertificateAuthority};

use super::control_program;
use super::liveness::{self, LivenessProbes};
use crate::run::process::Process;

/// The configuration of a control plane process.
pub(crate) struct ControlPlane<'a> {
    pub(crate) kubeconfig: &'a Path,
    /// The tulle-control binary. `None` is the one in the directory of this program.
    pub(crate) program: Option<&'a Path>,
    pub(crate) runs_policy_service: bool,
}

/// CPU time without the thread of the admin server, which responds to fifty liveness probes of this measurement per second.
pub(crate) fn cpu_without_probes(process: &Process) -> anyhow::Result<Duration> {
    process.cpu_time_without_thread("admin")
}

/// The ports of a control plane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    pub(crate) destination: u16,
    pub(crate) policy: u16,
    pub(crate) metrics: u16,
}

impl ControlPlane<'_> {
    /// Starts the process and waits until it is ready. Its trust anchors are `<dir>/anchors.pem`. Also returns the duration
    /// of the slowest liveness probe.
    pub(crate) async fn start(&self, dir: &Path, ports: Ports) -> anyhow::Result<(Process, Duration)> {
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            std::fs::create_dir_all(path.parent().expect("the path has a directory")).context("making a directory")?;
            std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
        };
        let anchor = trust::create_anchor("root.linkerd.cluster.local", LIFETIME)?;
        let CertificateAuthority { certificate, key } =
            trust::create_issuer("identity.linkerd.cluster.local", LIFETIME, &anchor)?;
        write("anchors.pem", &anchor.certificate)?;
        write("issuer/tls.crt", &certificate)?;
        write("issuer/tls.key", &key)?;
        write("token-keys/bench.pem", &trust::create_token_keys()?.public)?;
        let mut command = Command::new(control_program(self.program)?);
        command
            .args(["destination", "identity", "-enable-ipv6=false"])
            .args(self.runs_policy_service.then_some("policy"))
            .arg("-client-certificates=optional") // the clients of this test have no certificates
            .args(["--kubeconfig".as_ref(), self.kubeconfig.as_os_str()])
            .args(["--trust-anchors".as_ref(), dir.join("anchors.pem").as_os_str()])
            .args(["--issuer".as_ref(), dir.join("issuer").as_os_str()])
            .args(["--token-keys".as_ref(), dir.join("token-keys").as_os_str()])
            .args([
                "--identity-addr=127.0.0.1:0",
                "--admin-addr=127.0.0.1:0",
                "--server-addr=127.0.0.1:0",
            ])
            .args([
                format!("--destination-addr=127.0.0.1:{}", ports.destination),
                format!("--policy-addr=127.0.0.1:{}", ports.policy),
                format!("--metrics-addr=127.0.0.1:{}", ports.metrics),
            ]);
        let mut process = Process::start("tulle-control", command, dir)?;
        process.wait_for_ports(&[ports.destination])?;
        let slowest = wait_until_ready(ports).await?;
        Ok((process, slowest))
    }
}

/// Waits until the control plane is ready. Returns the duration of the slowest liveness probe.
async fn wait_until_ready(ports: Ports) -> anyhow::Result<Duration> {
    let deadline = Instant::now() + READY_TIMEOUT;
    let probes = LivenessProbes::start(ports.metrics);
    while Instant::now() < deadline {
        if liveness::fetch_status(ports.metrics, "/ready").await? == 200 {
            return probes.finish().await;
        }
        sleep(Duration::from_millis(20)).await;
    }
    anyhow::bail!("the control plane is not ready after {READY_TIMEOUT:?}")
}

pub(crate) const PORTS: Ports = Ports {
    destination: 18086,
    policy: 18090,
    metrics: 19996,
};
const LIFETIME: Duration = Duration::from_secs(24 * 3600);
const READY_TIMEOUT: Duration = Duration::from_secs(180);
