//! Clusters lose members while a client writes to them, in the mesh and at the same time outside of it.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::process::Stdio;
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context as _, ensure};
use futures_util::future::{try_join, try_join_all};
use nix::sys::signal::{Signal, kill};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::time::{Instant, sleep, timeout};
use tulle_tests::images::Image;
use tulle_tests::meshed::find_process;

use super::manifest::{self, Deployed, NAMESPACE, OUTSIDE};
use super::scenes::preamble;
use super::selection;
use super::server::{Disturbance, Server, Writer};
use super::suite::{Client, Suite};

/// What the program `writer` prints at its end.
#[derive(Deserialize)]
struct Report {
    acknowledged: u32,
    failed: u32,
    lost: u32,
    longest_pause_ms: f64,
    errors: BTreeMap<String, u32>,
    /// Why the numbers could not be read; then none is counted as lost.
    read_error: String,
}

/// A running `writer`. It ends when its input does.
struct RunningWriter {
    _child: Child,
    input: ChildStdin,
    lines: tokio::io::Lines<BufReader<ChildStdout>>,
}

/// The cluster in the mesh, and its copy outside.
type Copies<'a> = [Deployed<'a>; 2];

impl Suite {
    /// Creates a cluster and its copy, and disturbs both in each way, `TULLE_STATEFUL_TIMES` times.
    pub(super) async fn disturb_cluster(&self, server: &Server, writer: Writer) {
        let copies = [NAMESPACE, OUTSIDE].map(|namespace| Deployed {
            storage: Some(self.meshed.file("storage").join(namespace).join(server.name)),
            ..Deployed::new(server, namespace)
        });
        let disturbed = async {
            let mut result = self.disturb_copies(&copies, writer).await;
            for copy in &copies {
                result = result.and(self.delete(copy).await);
            }
            result
        };
        self.report_error(&copies[0], disturbed).await;
    }

    async fn disturb_copies(&self, copies: &Copies<'_>, writer: Writer) -> anyhow::Result<()> {
        for copy in copies {
            create_storage(copy)?;
            self.meshed.apply(&copy.manifest().to_string()).await?;
        }
        self.wait_until_formed(copies).await?;
        let version = self.version_of(&copies[0]).await?;
        let times = env::var("TULLE_STATEFUL_TIMES").unwrap_or_else(|_| "1".to_owned());
        let times: NonZeroU32 = times
            .parse()
            .with_context(|| format!("TULLE_STATEFUL_TIMES is {times:?}; expected a number from 1"))?;
        for disturbance in copies[0].server.disturbances.iter().copied().filter(is_selected) {
            let begun = Instant::now();
            let mut reports = Vec::new();
            for time in 0..times.get() {
                let name = format!("written_{disturbance:?}_{time}").to_lowercase();
                reports.push(self.disturb(copies, writer, disturbance, &name).await?);
            }
            self.results.add(
                (&copies[0].name, &version),
                disturbance.scene(),
                begun.elapsed(),
                summary(&reports),
            );
        }
        Ok(())
    }

    /// Returns the reports of the writers in the mesh and outside.
    async fn disturb(
        &self,
        copies: &Copies<'_>,
        writer: Writer,
        disturbance: Disturbance,
        name: &str,
    ) -> anyhow::Result<[Report; 2]> {
        let started = copies.iter().map(|copy| self.start_writer(copy, writer, name));
        let writers = try_join_all(started).await?;
        let leaders = try_join_all(copies.iter().map(|copy| self.leader_of(copy, writer, name))).await?;
        let disturb = async {
            self.apply_disturbance(copies, disturbance, &leaders).await?;
            self.wait_until_formed(copies).await
        };
        let disturbed = disturb.await;
        if matches!(disturbance, Disturbance::NodeDrained) {
            // Also after a failure, because other clusters come after this one.
            self.meshed.kubectl(&format!("uncordon {DRAINED_NODE}")).await?;
        }
        disturbed.with_context(|| format!("{}, {leaders:?}", disturbance.scene()))?;
        sleep(AFTERWARDS).await;
        let reports = try_join_all(writers.into_iter().map(RunningWriter::finish)).await?;
        reports.try_into().ok().context("two reports")
    }

    async fn apply_disturbance(
        &self,
        copies: &Copies<'_>,
        disturbance: Disturbance,
        leaders: &[String],
    ) -> anyhow::Result<()> {
        let meshed = &self.meshed;
        match disturbance {
            Disturbance::ControlPlaneGone => {
                meshed.kubectl("scale deploy --all -n linkerd --replicas=0").await?;
                sleep(WITHOUT_CONTROL_PLANE).await;
                meshed.kubectl("scale deploy --all -n linkerd --replicas=1").await?;
                meshed.wait_for_control_plane().await
            }
            Disturbance::SidecarKilled => self.kill_container(NAMESPACE, &leaders[0], "linkerd-proxy").await,
            Disturbance::Rollout => {
                let restart = async |copy: &Deployed<'_>| {
                    let line = format!("rollout restart -n {} statefulset/{}", copy.namespace, copy.name);
                    meshed.kubectl(&line).await?;
                    self.wait_for_server(copy).await
                };
                try_join(restart(&copies[0]), restart(&copies[1])).await.map(drop)
            }
            Disturbance::LeaderKilled => {
                for (copy, leader) in copies.iter().zip(leaders) {
                    self.kill_container(copy.namespace, leader, "server").await?;
                }
                Ok(())
            }
            Disturbance::PodDeleted => {
                let delete = async |copy: &Deployed<'_>, leader: &str| {
                    let line = format!("delete pod -n {} {leader} --force --grace-period=0", copy.namespace);
                    meshed.kubectl(&line).await
                };
                let deleted = copies.iter().zip(leaders).map(|(copy, leader)| delete(copy, leader));
                try_join_all(deleted).await.map(drop)
            }
            Disturbance::NodeDrained => {
                let drain = ["drain", DRAINED_NODE, "--ignore-daemonsets", "--delete-emptydir-data"];
                self.kubectl_for_minutes(&drain).await
            }
        }
    }

    /// Kills the first process of a container.
    async fn kill_container(&self, namespace: &str, pod: &str, container: &str) -> anyhow::Result<()> {
        let lists = ["containerStatuses", "initContainerStatuses"];
        let ids = lists.map(|list| format!("{{.status.{list}[?(@.name==\"{container}\")].containerID}}"));
        let args = [
            "get",
            "pod",
            "-n",
            namespace,
            pod,
            "-o",
            &format!("jsonpath={}", ids.concat()),
        ];
        let id = self.meshed.cluster.kubectl(&args).await?;
        let id = id
            .trim()
            .strip_prefix("containerd://")
            .context("the ID of a container")?;
        let process = find_process(&format!("{container} of {pod} in {namespace}"), |read| {
            // The last number is its process ID in the container.
            let is_first = |line: &str| line.starts_with("NSpid:") && line.ends_with("\t1");
            read("cgroup").contains(id) && read("status").lines().any(is_first)
        })?;
        kill(process, Signal::SIGKILL).with_context(|| format!("killing {process}"))
    }

    /// Waits until all members of both copies are ready and know each other.
    async fn wait_until_formed(&self, copies: &Copies<'_>) -> anyhow::Result<()> {
        let formed = async |copy: &Deployed<'_>| {
            self.wait_for_server(copy).await?;
            let (preamble, check) = (preamble(copy, &copy.name), copy.server.formation_check);
            let formed = async || self.check(Client::of(copy), &preamble, check).await.1.map(drop);
            let what = format!("the cluster {} in {} is formed", copy.name, copy.namespace);
            self.meshed.cluster.wait_until(&what, formed).await
        };
        try_join(formed(&copies[0]), formed(&copies[1])).await.map(drop)
    }

    async fn leader_of(&self, copy: &Deployed<'_>, writer: Writer, name: &str) -> anyhow::Result<String> {
        let run = format!("name={name} {}\n{}", preamble(copy, &copy.name), writer.leader);
        let leader = self.exec_client(Client::of(copy), &run).await?.trim().to_owned();
        let is_member = copy.pods().any(|pod| pod == leader);
        ensure!(
            is_member,
            "the leader of {} in {}: {leader:?}",
            copy.name,
            copy.namespace
        );
        Ok(leader)
    }

    /// Starts a writer, and waits until it writes.
    async fn start_writer(&self, copy: &Deployed<'_>, writer: Writer, name: &str) -> anyhow::Result<RunningWriter> {
        let addrs = copy
            .pods()
            .map(|pod| format!("{pod}.{}-pods:{}", copy.name, writer.port));
        let client = format!("deploy/{}", manifest::client_name(Image::Brokers));
        let mut kubectl = self.meshed.cluster.command("kubectl")?;
        kubectl
            .args(["exec", "-i", "-n", copy.namespace, &client, "-c", "client", "--"])
            .args(["writer", writer.kind, name])
            .args(addrs)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = kubectl.spawn().context("starting a writer")?;
        let stdout = child.stdout.take().context("the output of a writer")?;
        let mut writer = RunningWriter {
            input: child.stdin.take().context("the input of a writer")?,
            lines: BufReader::new(stdout).lines(),
            _child: child,
        };
        let what = format!("the first acknowledgement of {} in {}", copy.name, copy.namespace);
        let first = timeout(WRITER_TIMEOUT, writer.lines.next_line()).await;
        let first = first.with_context(|| what.clone())??;
        ensure!(first.as_deref() == Some("writing"), "{what}: {first:?}");
        Ok(writer)
    }
}

impl RunningWriter {
    async fn finish(mut self) -> anyhow::Result<Report> {
        drop(self.input);
        let line = timeout(WRITER_TIMEOUT, self.lines.next_line()).await;
        let line = line.context("the report of a writer")??.context("no report")?;
        serde_json::from_str(&line).with_context(|| format!("the report of a writer: {line}"))
    }
}

fn is_selected(disturbance: &Disturbance) -> bool {
    let name = |disturbance: &Disturbance| format!("{disturbance:?}");
    selection::is_selected(
        "TULLE_STATEFUL_DISTURBANCES",
        &Disturbance::ALL.each_ref().map(name),
        &name(disturbance),
    )
}

/// Creates the directories of all pods. Servers do not run as root.
fn create_storage(copy: &Deployed<'_>) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let storage = copy.storage.as_ref().context("no storage")?;
    for pod in copy.pods() {
        let dir = storage.join(pod);
        fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777))?;
    }
    Ok(())
}

/// The sums of all writers in the mesh and outside, and the medians of their longest pauses.
///
/// # Errors
/// Fails if acknowledged writes in the mesh are lost.
fn summary(reports: &[[Report; 2]]) -> anyhow::Result<String> {
    let of = |copy: usize| reports.iter().map(move |reports| &reports[copy]);
    let line = |copy: usize| {
        let sum = |count: fn(&Report) -> u32| of(copy).map(count).sum::<u32>();
        let mut pauses: Vec<f64> = of(copy).map(|report| report.longest_pause_ms / 1e3).collect();
        pauses.sort_by(f64::total_cmp);
        let pause = pauses[pauses.len() / 2];
        let (lost, acknowledged, failed) = (
            sum(|report| report.lost),
            sum(|report| report.acknowledged),
            sum(|report| report.failed),
        );
        let text = format!("lost {lost} of {acknowledged}, failed {failed}, longest pause {pause:.2} s");
        (lost, text)
    };
    let [(lost, meshed), (_, plain)] = [line(0), line(1)];
    let text = format!("{meshed}; without a mesh: {plain}");
    let errors: Vec<_> = of(0)
        .map(|report| &report.errors)
        .filter(|errors| !errors.is_empty())
        .collect();
    eprintln!("{text}; in the mesh: {errors:?}");
    let read_errors = reports.iter().flatten().map(|report| report.read_error.as_str());
    let read_errors: String = read_errors.collect();
    ensure!(lost == 0 && read_errors.is_empty(), "{text}; {read_errors}");
    Ok(text)
}

const DRAINED_NODE: &str = "node2";
const WITHOUT_CONTROL_PLANE: Duration = Duration::from_secs(15);
/// How long writes go on after the cluster is complete.
const AFTERWARDS: Duration = Duration::from_secs(3);
/// Longer than the time within which the program has to read what it wrote.
const WRITER_TIMEOUT: Duration = Duration::from_secs(100);
