//! A cluster with servers and clients.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use futures_util::future::join_all;
use tokio::time::Instant;
use tulle_tests::cluster::ClusterOptions;
use tulle_tests::commands;
use tulle_tests::images::Image;
use tulle_tests::meshed::MeshedCluster;

use super::manifest::{self, Deployed, NAMESPACE, OUTSIDE};
use super::results::Results;
use super::server::{Script, Server};

pub(super) struct Suite {
    pub(super) meshed: MeshedCluster,
    pub(super) is_full: bool,
    pub(super) results: Results,
}

/// Which client runs a script.
#[derive(Clone, Copy)]
pub(super) struct Client {
    pub(super) namespace: &'static str,
    pub(super) image: Image,
}

impl Client {
    /// The client of a server that has the server's image and is in its namespace.
    pub(super) fn of(server: &Deployed<'_>) -> Self {
        Self {
            namespace: server.namespace,
            image: server.server.image,
        }
    }
}

impl Suite {
    /// Starts a cluster with clients that have these images.
    pub(super) async fn start(nodes: u8, images: &[Image], is_full: bool) -> anyhow::Result<Self> {
        let options = ClusterOptions {
            nodes,
            images: [&[Image::Controller, Image::Proxy][..], images].concat(),
            ..ClusterOptions::default()
        };
        let meshed = MeshedCluster::start_with(options).await?;
        let suite = Self {
            meshed,
            is_full,
            results: Results::default(),
        };
        suite.meshed.apply(&manifest::clients(images).to_string()).await?;
        for namespace in [NAMESPACE, OUTSIDE] {
            let args = format!("wait -n {namespace} --for=condition=Available deploy --all --timeout=100s");
            suite.meshed.kubectl(&args).await?;
        }
        Ok(suite)
    }

    /// Runs all scenes of these servers, and then of these clusters, while some connections to the servers are silent.
    pub(super) async fn run(&self, servers: &[Server], clusters: &[Server]) -> anyhow::Result<()> {
        let deployed: Vec<Deployed<'_>> = servers.iter().flat_map(deployments).collect();
        for server in &deployed {
            self.meshed.apply(&server.manifest().to_string()).await?;
        }
        let idle_scenes = async {
            if self.is_full {
                let scenes = deployed.iter().map(|server| async {
                    self.report_error(server, self.run_idle_scene(server)).await;
                });
                join_all(scenes).await;
            }
        };
        let other_scenes = async {
            for server in &deployed {
                self.report_error(server, self.run_scenes(server)).await;
            }
            // One after another, so that only one needs memory.
            for server in clusters {
                let cluster = Deployed::new(server, NAMESPACE);
                self.report_error(&cluster, self.run_cluster(&cluster)).await;
            }
        };
        tokio::join!(idle_scenes, other_scenes);
        Ok(())
    }

    async fn run_cluster(&self, cluster: &Deployed<'_>) -> anyhow::Result<()> {
        self.meshed.apply(&cluster.manifest().to_string()).await?;
        let run = self.run_cluster_scenes(cluster).await;
        run.and(self.delete(cluster).await)
    }

    /// A server whose scenes could not be run does not end those of the others.
    pub(super) async fn report_error(&self, server: &Deployed<'_>, scenes: impl Future<Output = anyhow::Result<()>>) {
        let begun = Instant::now();
        if let Err(error) = scenes.await {
            self.results
                .add((&server.name, ""), "its scenes", begun.elapsed(), Err(error));
        }
    }

    pub(super) async fn delete(&self, server: &Deployed<'_>) -> anyhow::Result<()> {
        let (name, namespace) = (&server.name, server.namespace);
        let line = format!("delete statefulset,service,pdb -n {namespace} {name} {name}-pods --ignore-not-found");
        self.meshed.kubectl(&line).await.map(drop)
    }

    /// Waits until all pods of a server are ready and up to date.
    pub(super) async fn wait_for_server(&self, server: &Deployed<'_>) -> anyhow::Result<()> {
        let name = format!("statefulset/{}", server.name);
        let args = ["rollout", "status", "-n", server.namespace, &name];
        if let Err(error) = self.kubectl_for_minutes(&args).await {
            let args = ["logs", "-n", server.namespace, &name, "-c", "server", "--tail=20"];
            let log = self.meshed.cluster.kubectl(&args).await;
            return Err(error.context(log.unwrap_or_else(|error| format!("{error:#}"))));
        }
        Ok(())
    }

    /// Runs a kubectl command that waits for several pods in turn.
    pub(super) async fn kubectl_for_minutes(&self, args: &[&str]) -> anyhow::Result<()> {
        let mut kubectl = self.meshed.cluster.command("kubectl")?;
        kubectl.args(args);
        let what = format!("kubectl {}", args.join(" "));
        let output = commands::output_within(PODS_IN_TURN_TIMEOUT, &what, kubectl).await?;
        ensure!(
            output.status.success(),
            "{what}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    /// The version of a server, as its program prints it.
    pub(super) async fn version_of(&self, server: &Deployed<'_>) -> anyhow::Result<String> {
        let pod = format!("{}-0", server.name);
        let printed = self
            .exec(server.namespace, &pod, "server", server.server.version)
            .await?;
        Ok(short_version(&printed))
    }

    /// Runs a script of a client, and returns how long it took.
    pub(super) async fn check(
        &self,
        client: Client,
        preamble: &str,
        script: Script,
    ) -> (Duration, anyhow::Result<String>) {
        let begun = Instant::now();
        let printed = self.exec_client(client, &format!("{preamble}\n{}", script.run)).await;
        let result = printed.and_then(|printed| {
            let printed = printed.trim();
            ensure!(printed == script.prints, "printed {printed:?}, not {:?}", script.prints);
            Ok("ok".to_owned())
        });
        (begun.elapsed(), result)
    }

    pub(super) async fn exec_client(&self, client: Client, run: &str) -> anyhow::Result<String> {
        let target = format!("deploy/{}", manifest::client_name(client.image));
        self.exec(client.namespace, &target, "client", run).await
    }

    /// Runs a script in a container, and returns its standard output. The error contains both outputs.
    async fn exec(&self, namespace: &str, target: &str, container: &str, run: &str) -> anyhow::Result<String> {
        let mut kubectl = self.meshed.cluster.command("kubectl")?;
        let bash = ["--", "bash", "-euo", "pipefail", "-c", run];
        kubectl
            .args(["exec", "-n", namespace, target, "-c", container])
            .args(bash);
        let what = format!("a script in {target}");
        let output = commands::output_within(SCRIPT_TIMEOUT, &what, kubectl).await?;
        let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        ensure!(
            output.status.success(),
            "{}{}",
            last_lines(&stdout),
            last_lines(&stderr)
        );
        Ok(stdout)
    }

    /// The address of a pod.
    pub(super) async fn pod_addr(&self, pod: &str) -> anyhow::Result<String> {
        let args = format!("get pod -n {NAMESPACE} {pod} -o jsonpath={{.status.podIP}}");
        let addr = self.meshed.kubectl(&args).await.context("the address of a pod")?;
        ensure!(!addr.is_empty(), "{pod} has no address");
        Ok(addr)
    }
}

/// A server on its usual port, and on another one if the chart's list of opaque ports has the usual one.
fn deployments(server: &Server) -> Vec<Deployed<'_>> {
    let unlisted = server.unlisted_port.map(|port| Deployed {
        name: format!("{}-unlisted", server.name),
        port,
        ..Deployed::new(server, NAMESPACE)
    });
    [Deployed::new(server, NAMESPACE)].into_iter().chain(unlisted).collect()
}

/// The first word with a dot between digits.
fn short_version(printed: &str) -> String {
    let is_part = |byte: char| byte.is_ascii_digit() || byte == '.' || byte == 'p';
    let parts = printed.split(|byte| !is_part(byte));
    let version = parts.map(|part| part.trim_matches(['.', 'p'])).find(|part| {
        let first = part.starts_with(|byte: char| byte.is_ascii_digit());
        first && part.contains('.')
    });
    version.unwrap_or_else(|| printed.trim()).to_owned()
}

/// The end of an output.
fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(MAX_REPORTED_LINES)..].join("\n")
}

/// Six members are replaced or evicted one after another.
const PODS_IN_TURN_TIMEOUT: Duration = Duration::from_secs(300);
/// Longer than the longest silence.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(900);
const MAX_REPORTED_LINES: usize = 6;

#[test]
fn the_version_is_found_in_what_servers_print() {
    for (printed, expected) in [
        ("postgres (PostgreSQL) 15.20 (Debian 15.20-0+deb12u1)", "15.20"),
        (
            "mariadbd  Ver 10.11.19-MariaDB-0+deb12u1 for debian-linux-gnu",
            "10.11.19",
        ),
        ("/usr/lib/rabbitmq/lib/rabbitmq_server-3.10.8\n", "3.10.8"),
        ("/usr/share/brokers/kafka-clients-3.9.1.jar", "3.9.1"),
        ("OpenSSH_9.2p1 Debian-2+deb12u10", "9.2p1"),
        ("version: OpenSMTPD 6.8.0p2", "6.8.0p2"),
    ] {
        assert_eq!(short_version(printed), expected, "{printed}");
    }
}
