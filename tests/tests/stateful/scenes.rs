//! The scenes that are run with each server.

use anyhow::{Context as _, bail, ensure};
use tokio::time::Instant;

use super::manifest::{Deployed, NAMESPACE, OUTSIDE};
use super::server::Script;
use super::suite::{Client, Suite};

impl Suite {
    /// Runs all scenes of a server but that of a long silence. On another port than the usual one, only the first two.
    pub(super) async fn run_scenes(&self, deployed: &Deployed<'_>) -> anyhow::Result<()> {
        self.wait_for_server(deployed).await?;
        let server = deployed.server;
        let version = self.version_of(deployed).await?;
        let pod = format!("{}-0", deployed.name);
        let pod_name = format!("{pod}.{}-pods", deployed.name);
        let service = if server.needs_pod_addr {
            &pod_name
        } else {
            &deployed.name
        };
        let run_scene = async |scene: &str, host: &str, script: Script| {
            let client = Client::of(deployed);
            let (took, result) = self.check(client, &preamble(deployed, host), script).await;
            self.results.add((&deployed.name, &version), scene, took, result);
        };
        run_scene("first connection", service, server.query).await;
        run_scene("second connection", service, server.query).await;
        if deployed.port != server.port {
            return Ok(());
        }
        if let Some(large) = server.large {
            run_scene("10 MiB", service, large).await;
        }
        for (scene, script) in server.own_scenes {
            run_scene(scene, service, *script).await;
        }
        run_scene("name of a pod", &pod_name, server.query).await;
        let addr = self.pod_addr(&pod).await?;
        run_scene("address of a pod", &addr, server.query).await;
        self.run_many_connections(deployed, &version, service).await;
        let begun = Instant::now();
        let refused = self.check_refusal(deployed).await;
        self.results.add(
            (&deployed.name, &version),
            "client without a sidecar",
            begun.elapsed(),
            refused,
        );
        Ok(())
    }

    /// Waits until the members of a cluster know each other, and runs its scenes.
    pub(super) async fn run_cluster_scenes(&self, deployed: &Deployed<'_>) -> anyhow::Result<()> {
        self.wait_for_server(deployed).await?;
        let (server, preamble) = (deployed.server, preamble(deployed, &deployed.name));
        let version = self.version_of(deployed).await?;
        let run_scene = async |script: Script| self.check(Client::of(deployed), &preamble, script).await;
        let begun = Instant::now();
        let formed = async || run_scene(server.formation_check).await.1.map(drop);
        let formed = self.meshed.cluster.wait_until("the cluster is formed", formed).await;
        let is_formed = formed.is_ok();
        let result = formed.map(|()| "ok".to_owned());
        let scene = format!("{} members form a cluster", server.members);
        self.results
            .add((&deployed.name, &version), &scene, begun.elapsed(), result);
        for (scene, script) in server.own_scenes.iter().filter(|_| is_formed) {
            let (took, result) = run_scene(*script).await;
            self.results.add((&deployed.name, &version), scene, took, result);
        }
        Ok(())
    }

    /// Runs the query with many connections, some of them at the same time.
    async fn run_many_connections(&self, deployed: &Deployed<'_>, version: &str, host: &str) {
        let (server, count) = (deployed.server, if self.is_full { 1000 } else { 100 });
        let query = server.small_query.unwrap_or(server.query);
        let last_line = query.prints.lines().last().unwrap_or_default();
        // Prints how often each last line was printed.
        let run = format!(
            "cat > /tmp/often <<'SCRIPT'\nset -euo pipefail\n{}\n{}\nSCRIPT\n\
             seq {count} | xargs -n 1 -P {PARALLEL} bash -c 'echo \"$(bash /tmp/often 2>&1 | tail -n 1)\"' | sort | uniq -c",
            preamble(deployed, host),
            query.run
        );
        let begun = Instant::now();
        let result = self.exec_client(Client::of(deployed), &run).await.and_then(|printed| {
            let printed = printed.trim();
            ensure!(printed == format!("{count} {last_line}"), "printed {printed:?}");
            Ok("ok".to_owned())
        });
        let scene = format!("{count} connections");
        self.results
            .add((&deployed.name, version), &scene, begun.elapsed(), result);
    }

    /// Checks that a client without a sidecar is refused. Returns what the client shows; the log of the server's sidecar has the cause.
    async fn check_refusal(&self, deployed: &Deployed<'_>) -> anyhow::Result<String> {
        let server = deployed.server;
        let client = Client {
            namespace: OUTSIDE,
            ..Client::of(deployed)
        };
        let host = format!("{}-0.{}-pods.{NAMESPACE}", deployed.name, deployed.name);
        // `timeout` ends a client that tries again and again.
        let run = format!(
            "cat > /tmp/refused <<'SCRIPT'\nset -euo pipefail\n{}\n{}\nSCRIPT\ntimeout {REFUSAL_SECONDS} bash /tmp/refused",
            preamble(deployed, &host),
            server.query.run
        );
        let shown = match self.exec_client(client, &run).await {
            Ok(printed) if printed.trim() == server.query.prints => bail!("not refused: {printed:?}"),
            Ok(_) => "no response".to_owned(), // a pipe hides the failure of its first program
            Err(error) => error.to_string(),
        };
        let pod = format!("{}-0", deployed.name);
        let args = ["logs", "-n", NAMESPACE, &pod, "-c", "linkerd-proxy"];
        let log = self.meshed.cluster.kubectl(&args).await?;
        let target = format!("target={}:{}", self.pod_addr(&pod).await?, deployed.port);
        let refusal = log
            .lines()
            .find(|line| line.contains("refused") && line.contains(&target));
        refusal.with_context(|| {
            format!("the client shows {shown:?}; the sidecar's log has no refusal for {target}: {log}")
        })?;
        let is_message = |line: &&str| !line.starts_with("command terminated") && !line.starts_with('\t');
        let last = shown.lines().rfind(is_message);
        Ok(format!("refused: {}", last.unwrap_or_default()))
    }

    /// Uses a connection, and uses it again after a silence that is longer than the idle timeouts.
    pub(super) async fn run_idle_scene(&self, deployed: &Deployed<'_>) -> anyhow::Result<()> {
        let server = deployed.server;
        let Some(idle) = server.idle.filter(|_| deployed.port == server.port) else {
            return Ok(());
        };
        self.wait_for_server(deployed).await?;
        let version = self.version_of(deployed).await?;
        let preamble = preamble(deployed, &deployed.name);
        let (took, result) = self.check(Client::of(deployed), &preamble, idle).await;
        let scene = format!("{IDLE_SECONDS} s of silence");
        self.results.add((&deployed.name, &version), &scene, took, result);
        Ok(())
    }
}

/// The variables of a client's script.
pub(super) fn preamble(deployed: &Deployed<'_>, host: &str) -> String {
    let (port, client) = (deployed.port, deployed.server.client);
    format!("host={host} port={port} idle={IDLE_SECONDS}\n{client}")
}

const PARALLEL: u32 = 8;
const IDLE_SECONDS: u32 = 610;
const REFUSAL_SECONDS: u32 = 20;
