//! Probes of the control plane while it is under load, like those of the kubelet.

use std::net::Ipv4Addr;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};

/// Probes of `/live` on a thread of their own, because the runtime of the clients is as busy as the control plane.
pub(crate) struct LivenessProbes {
    end: oneshot::Sender<()>,
    probes: JoinHandle<anyhow::Result<Duration>>,
}

impl LivenessProbes {
    pub(crate) fn start(port: u16) -> Self {
        let (end, mut ended) = oneshot::channel();
        let probing = async move {
            let mut slowest = Duration::ZERO;
            loop {
                let started_at = Instant::now();
                let status = fetch_status(port, "/live").await?;
                ensure!(status == 200, "/live responds with status {status}");
                slowest = slowest.max(started_at.elapsed());
                tokio::select! {
                    _ = &mut ended => return Ok(slowest),
                    () = sleep(PROBE_INTERVAL) => {}
                }
            }
        };
        let probes = thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build();
            runtime.context("starting the runtime of the probes")?.block_on(probing)
        });
        Self { end, probes }
    }

    /// Ends the probes. Returns the duration of the slowest probe.
    pub(crate) async fn finish(self) -> anyhow::Result<Duration> {
        // If the send fails, the probes have ended, and their result contains the reason.
        let _ = self.end.send(());
        let joining = spawn_blocking(|| self.probes.join())
            .await
            .context("waiting for the probes")?;
        joining.map_err(|_| anyhow::anyhow!("the probes panicked"))?
    }
}

/// The status code of a response of the admin server.
pub(crate) async fn fetch_status(port: u16, path: &str) -> anyhow::Result<u16> {
    Ok(fetch(port, path).await?.0)
}

/// The status code and the text of a response of the admin server.
pub(crate) async fn fetch(port: u16, path: &str) -> anyhow::Result<(u16, String)> {
    let exchange = async {
        let mut tcp = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: control\r\nconnection: close\r\n\r\n");
        tcp.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        tcp.read_to_string(&mut answer).await?;
        let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
        Ok((code.with_context(|| format!("no status in {answer:?}"))?, answer))
    };
    let result = timeout(PROBE_TIMEOUT, exchange).await;
    result.map_err(|_| anyhow::anyhow!("no response to GET {path} within {PROBE_TIMEOUT:?}"))?
}

const PROBE_INTERVAL: Duration = Duration::from_millis(20);
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
