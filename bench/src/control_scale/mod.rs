//! Scale test of the control plane: many objects on a real API server, many streams, and changes.
//!
//! The objects are created on the API server of the kubeconfig. This API server needs no nodes, and should be disposable. The
//! output has the memory with and without streams, the time until all streams have their first message, and the results of each
//! load, such as the latency from a write to the subscriber, the CPU time per delivered update, and the slowest liveness probe.

#![allow(clippy::print_stdout)] // the command prints its results

mod cluster;
mod day;
mod servers;
mod streams;
mod subscribers;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum;
use futures_util::future::try_join_all;
use tokio::time::{Instant, sleep, sleep_until};
use tulle_control::tls::anchors::TrustAnchors;
use tulle_core::names::variable;

use crate::control_scale::cluster::{Cluster, ObjectCounts, ROLLOUT_SERVICE, RolloutSlice};
use crate::control_scale::day::Day;
use crate::control_scale::streams::{Address, ClientCounts, Streams};
use crate::control_scale::subscribers::Subscribers;
use crate::run::process::Process;
use crate::scale::control_plane::{ControlPlane, PORTS, Ports, cpu_without_probes};
use crate::scale::liveness::LivenessProbes;
use crate::scale::{MEMORY_SETTLE_DELAY, megabytes, millis};

/// Numbers of objects, clients and changes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kubeconfig of the API server. The run creates and deletes objects in its namespace `scale`.
    #[arg(long, env = variable::KUBECONFIG, value_name = "FILE")]
    kubeconfig: PathBuf,
    /// The tulle-control binary to measure; by default the one in the directory of this program.
    #[arg(long, value_name = "FILE")]
    control: Option<PathBuf>,
    /// Loads to measure, in this order. After `day`, which replaces pods, only `rollout` and `reconnect` are possible.
    #[arg(long = "load", value_enum, value_delimiter = ',', default_value = "updates")]
    loads: Vec<LoadKind>,
    #[arg(long, default_value = "1000")]
    services: NonZeroUsize,
    /// Endpoints of each Service; each endpoint is a pod.
    #[arg(long, default_value = "10")]
    endpoints: NonZeroUsize,
    /// Additional pods that belong to no Service.
    #[arg(long, default_value_t = 1000)]
    other_pods: usize,
    /// Clients, each with its own TLS connection.
    #[arg(long, default_value_t = 200)]
    clients: usize,
    /// `Get` streams per client.
    #[arg(long, default_value_t = 50)]
    streams: usize,
    /// EndpointSlice changes per second of the load `updates`.
    #[arg(long, default_value_t = 41, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
    /// Duration of the changes of each load, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Endpoints of the Service of the load `rollout`; each address changes twice.
    #[arg(long, value_name = "ENDPOINTS", default_value = "1000")]
    rollout: NonZeroUsize,
    /// Streams per client that follow the Service of the load `rollout`.
    #[arg(long, value_name = "STREAMS", default_value_t = 5)]
    rollout_streams: usize,
    /// Number of Servers of the load `servers`, each for the pods of one Service; by default, the number of Services.
    #[arg(long)]
    servers: Option<NonZeroUsize>,
    /// Use the objects of an earlier run with the same numbers of objects, instead of creating them. `rollout` needs a run with the
    /// load `rollout`; `updates`, `servers` and `day` need a run without the load `day`.
    #[arg(long)]
    reuse_objects: bool,
    /// Seed of the random changes of the load `day`.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Args {
    /// Fails if a load would use objects that do not exist, or that an earlier load deletes.
    fn check(&self) -> anyhow::Result<()> {
        let after_day = self.loads.iter().skip_while(|load| **load != LoadKind::Day).skip(1);
        for load in after_day {
            if load.needs_initial_pods() {
                bail!(
                    "--load {} after day: a day replaces the pods that this load needs; measure it before, or with a new API server",
                    load.name()
                );
            }
        }
        let (n_servers, n_services) = (self.n_servers(), self.n_services());
        ensure!(
            n_servers <= n_services,
            "--servers {n_servers}: each Service has at most one Server, and there are {n_services} Services"
        );
        Ok(())
    }

    fn n_services(&self) -> usize {
        self.services.get()
    }

    fn n_servers(&self) -> usize {
        self.servers.unwrap_or(self.services).get()
    }

    /// The control plane that these loads need. If it runs the policy service, the API server needs the custom resources.
    fn control_plane(&self) -> ControlPlane<'_> {
        let needs_policy = |load: &LoadKind| matches!(load, LoadKind::Servers | LoadKind::Day);
        ControlPlane {
            kubeconfig: &self.kubeconfig,
            program: self.control.as_deref(),
            runs_policy_service: self.loads.iter().any(needs_policy),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LoadKind {
    /// One endpoint per change, of all Services in turn.
    Updates,
    /// Every endpoint of one large Service is replaced twice.
    Rollout,
    /// All clients lose their connections and connect again at once.
    Reconnect,
    /// Each Server is edited once. Its inbound policy has one subscriber.
    Servers,
    /// The churn of a day, compressed into --seconds: rollouts, scaling, lost nodes, and edits of policies. At the end the states
    /// of the subscribers are compared with those of a new process.
    #[value(alias = "churn")]
    Day,
}

impl LoadKind {
    /// Whether the load needs the pods with which the Services were created.
    fn needs_initial_pods(self) -> bool {
        match self {
            Self::Updates | Self::Servers | Self::Day => true,
            Self::Rollout | Self::Reconnect => false,
        }
    }

    /// The name on the command line.
    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Runs the scale test and prints the results.
///
/// # Errors
/// Fails if the loads are not possible in this order, if the setup, a connection or a stream fails, or if an update is not
/// delivered.
pub fn main(args: &Args) -> anyhow::Result<()> {
    args.check()?;
    tokio::runtime::Runtime::new()
        .context("starting a runtime")?
        .block_on(run(args))
}

async fn run(args: &Args) -> anyhow::Result<()> {
    let has_rollout = args.loads.contains(&LoadKind::Rollout);
    let counts = ObjectCounts {
        services: args.n_services(),
        endpoints: args.endpoints.get(),
        other_pods: args.other_pods,
        rollout_endpoints: if has_rollout { args.rollout.get() } else { 0 },
    };
    let cluster = Cluster::connect(&args.kubeconfig, counts).await?;
    if !args.reuse_objects {
        let start = Instant::now();
        cluster.create_objects().await.context("creating objects")?;
        println!("objects created in {:.1?}", start.elapsed());
    }
    let dir = tempfile::tempdir().context("making a directory")?;
    let start = Instant::now();
    let (control, slowest) = args.control_plane().start(dir.path(), PORTS).await?;
    println!(
        "ready after {:.1?}, with {:.1?} of CPU; slowest liveness probe {slowest:.1?}",
        start.elapsed(),
        cpu_without_probes(&control)?
    );
    sleep(MEMORY_SETTLE_DELAY).await;
    print_memory("with objects", &control)?;

    let mut run = Run {
        anchors: TrustAnchors::read(&dir.path().join("anchors.pem")).context("reading trust anchors")?,
        args,
        cluster,
        control,
        next_change: fastrand::u32(0..FIRST_CHANGE_NUMBER_LIMIT),
    };
    let mut streams = run.open_streams().await?;
    sleep(MEMORY_SETTLE_DELAY).await;
    print_memory("with streams", &run.control)?;
    for load in &args.loads {
        println!("load {}:", load.name());
        match load {
            LoadKind::Updates => run.measure_updates(&mut streams).await?,
            LoadKind::Rollout => run.measure_rollout().await?,
            LoadKind::Reconnect => streams = run.measure_reconnect(streams).await?,
            LoadKind::Servers => run.measure_servers().await?,
            LoadKind::Day => run.measure_day().await?,
        }
    }
    Ok(())
}

/// The objects, and the control plane that serves them.
struct Run<'a> {
    args: &'a Args,
    anchors: TrustAnchors,
    cluster: Cluster,
    control: Process,
    /// Number of the next change, from which its address is computed. The first number is random, because objects of an earlier run
    /// can have the addresses of its changes.
    next_change: u32,
}

impl Run<'_> {
    /// Opens the streams of all clients at once. They follow all Services in turn.
    async fn open_streams(&mut self) -> anyhow::Result<Streams> {
        let args = self.args;
        let counts = ClientCounts {
            n_clients: args.clients,
            streams_per_client: args.streams,
        };
        let probes = LivenessProbes::start(PORTS.metrics);
        let (cpu, start) = (cpu_without_probes(&self.control)?, Instant::now());
        let service = |n| cluster::service_name(n % args.n_services());
        let streams = Streams::open(PORTS.destination, &self.anchors, counts, service).await?;
        println!(
            "{} streams answered in {:.2?}, with {:.2?} of CPU; slowest liveness probe {:.1?}",
            counts.n_streams(),
            start.elapsed(),
            cpu_without_probes(&self.control)? - cpu,
            probes.finish().await?
        );
        Ok(streams)
    }

    /// Changes one endpoint per Service in turn, at a steady rate.
    async fn measure_updates(&mut self, streams: &mut Streams) -> anyhow::Result<()> {
        let args = self.args;
        let n_changes = args.rate.checked_mul(args.seconds).context("too many changes")?;
        let first_change = self.reserve_change_numbers(n_changes);
        streams.record_watch_latencies(self.cluster.watch().await?);
        let (services, n_streams) = (args.n_services() as u64, streams.n_streams());
        let before = self.start_load(streams)?;
        let (start, mut writes) = (Instant::now(), Vec::new());
        let mut expected = 0;
        for n in 0..n_changes {
            let service = n as usize % args.n_services();
            expected += n_streams / services + u64::from((service as u64) < n_streams % services);
            let (cluster, addr, at) = (
                &self.cluster,
                Address::from_change_number(first_change + n),
                start + Duration::from_secs(1) * n / args.rate,
            );
            let streams = &*streams;
            writes.push(async move {
                sleep_until(at).await;
                streams.record_write(addr, Instant::now());
                cluster.replace_first_endpoint(service, addr).await
            });
        }
        try_join_all(writes).await?;
        self.finish_load(before, streams, expected).await?;
        let watch_latencies = streams.watch_latencies();
        println!(
            "from write to a watch of the API server p50 {:.1} p99 {:.1} ms",
            millis(watch_latencies.value_at_quantile(0.5)),
            millis(watch_latencies.value_at_quantile(0.99)),
        );
        print_memory("after changes", &self.control)
    }

    /// Replaces every endpoint of the large Service twice, at a steady rate: one endpoint per write, of all slices in turn.
    async fn measure_rollout(&mut self) -> anyhow::Result<()> {
        let args = self.args;
        let counts = ClientCounts {
            n_clients: args.clients,
            streams_per_client: args.rollout_streams,
        };
        let streams = Streams::open(PORTS.destination, &self.anchors, counts, |_| ROLLOUT_SERVICE.to_owned()).await?;
        let before = self.start_load(&streams)?;
        let slices = self.cluster.rollout_slices();
        let (n_slices, n_changes) = (slices.len(), 2 * args.rollout.get());
        let interval = Duration::from_secs(args.seconds.into()).div_f64(n_changes as f64);
        let first_change = self.reserve_change_numbers(u32::try_from(n_changes).context("too many changes")?);
        let start = Instant::now();
        let (cluster, rollout_streams) = (&self.cluster, &streams);
        let writes = slices
            .into_iter()
            .enumerate()
            .map(async |(at, mut slice): (usize, RolloutSlice)| {
                for change in 0..2 * slice.len() {
                    let n = u32::try_from(change * n_slices + at).context("too many changes")?;
                    sleep_until(start + interval * n).await;
                    let addr = Address::from_change_number(first_change + n);
                    slice.replace_address(change % slice.len(), addr);
                    rollout_streams.record_write(addr, Instant::now());
                    cluster.write_slice(&slice).await?;
                }
                anyhow::Ok(())
            });
        try_join_all(writes).await?;
        println!("{n_changes} changes written in {:.1?}", start.elapsed());
        self.finish_load(before, &streams, n_changes as u64 * streams.n_streams())
            .await
    }

    /// Ends all connections and opens all streams again at once.
    async fn measure_reconnect(&mut self, streams: Streams) -> anyhow::Result<Streams> {
        drop(streams);
        self.control.reset_peak_rss()?;
        let streams = self.open_streams().await?;
        println!("peak memory {:.1} MB", megabytes(self.control.peak_rss_kib()?));
        Ok(streams)
    }

    /// Edits each Server once, at a steady rate.
    async fn measure_servers(&mut self) -> anyhow::Result<()> {
        let (args, n_servers) = (self.args, self.args.n_servers());
        servers::create(&self.cluster, n_servers).await?;
        let subscribers = Subscribers::open(PORTS, &servers::subscriptions(&self.cluster, n_servers)).await?;
        subscribers.wait_until_settled().await?; // the first policy of a stream can be older than its Server
        let (cpu, probes) = (cpu_without_probes(&self.control)?, LivenessProbes::start(PORTS.metrics));
        self.control.reset_peak_rss()?;
        let seconds = Duration::from_secs(args.seconds.into());
        let latencies = servers::edit_all(&self.cluster, &subscribers, n_servers, seconds).await?;
        let cpu_time = cpu_without_probes(&self.control)? - cpu;
        println!(
            "{} Servers edited in {seconds:?}; from write to subscriber p50 {:.1} p99 {:.1} max {:.1} ms; {:.1} µs of CPU per edit",
            n_servers,
            millis(latencies.value_at_quantile(0.5)),
            millis(latencies.value_at_quantile(0.99)),
            millis(latencies.max()),
            cpu_time.as_secs_f64() * 1e6 / n_servers as f64,
        );
        println!(
            "peak memory {:.1} MB; slowest liveness probe {:.1?}",
            megabytes(self.control.peak_rss_kib()?),
            probes.finish().await?
        );
        Ok(())
    }

    /// Makes the changes of a day. Fails if a state, the memory, or the number of tasks or streams is wrong afterwards.
    async fn measure_day(&mut self) -> anyhow::Result<()> {
        let args = self.args;
        let subscriptions = day::subscriptions(&self.cluster, args.n_services());
        let day = Day::new(&self.cluster, args.n_services());
        day.create_policies().await.context("creating policies")?;
        let subscribers = Subscribers::open(PORTS, &subscriptions).await?;
        subscribers.wait_until_settled().await?;
        sleep(MEMORY_SETTLE_DELAY).await;
        let (gauges, memory, cpu) = (
            day::gauges(PORTS.metrics).await?,
            self.control.rss_kib()?,
            cpu_without_probes(&self.control)?,
        );
        let probes = LivenessProbes::start(PORTS.metrics);
        let (start, n_messages) = (Instant::now(), subscribers.n_messages());
        let n_changes = day.run(Duration::from_secs(args.seconds.into()), args.seed).await?;
        let followed = subscribers.wait_until_settled().await?;
        println!(
            "{n_changes} changes in {:.1?}; {} messages to {} streams; {:.1?} of CPU; slowest liveness probe {:.1?}",
            start.elapsed(),
            subscribers.n_messages() - n_messages,
            subscriptions.len(),
            cpu_without_probes(&self.control)? - cpu,
            probes.finish().await?
        );
        sleep(MEMORY_SETTLE_DELAY).await;
        let (gauges_after, memory_after) = (day::gauges(PORTS.metrics).await?, self.control.rss_kib()?);
        let growth = memory_after as f64 / memory as f64 - 1.0;
        println!(
            "memory before {:.1} MB, after {:.1} MB, {:+.1} %; before {gauges:?}, after {gauges_after:?}",
            megabytes(memory),
            megabytes(memory_after),
            100.0 * growth
        );
        let dir = tempfile::tempdir().context("making a directory")?;
        let ports = Ports {
            destination: PORTS.destination + 1,
            policy: PORTS.policy + 1,
            metrics: PORTS.metrics + 1,
        };
        let (new, _) = args.control_plane().start(dir.path(), ports).await?;
        let expected = Subscribers::open(ports, &subscriptions)
            .await?
            .wait_until_settled()
            .await?;
        day::check_states_equal(&followed, &expected)?;
        println!(
            "all {} states equal those of a new process, which has {:.1} MB",
            followed.len(),
            megabytes(new.rss_kib()?)
        );
        let has_grown = |(name, before): (&&str, &f64)| gauges_after[name] > *before;
        ensure!(
            !gauges.iter().any(has_grown),
            "the control plane has more tasks or streams than before the day"
        );
        ensure!(
            growth.abs() <= MAX_MEMORY_CHANGE,
            "the memory has changed by more than 5 %"
        );
        Ok(())
    }

    /// Reserves the numbers of `n_changes` changes. Returns the first number.
    fn reserve_change_numbers(&mut self, n_changes: u32) -> u32 {
        let first = self.next_change;
        self.next_change += n_changes;
        first
    }

    fn start_load(&self, streams: &Streams) -> anyhow::Result<LoadBaseline> {
        streams.clear();
        self.control.reset_peak_rss()?;
        Ok(LoadBaseline {
            cpu: cpu_without_probes(&self.control)?,
            probes: LivenessProbes::start(PORTS.metrics),
        })
    }

    /// Waits for the updates that are expected, and prints the latencies and costs of the load.
    async fn finish_load(&self, before: LoadBaseline, streams: &Streams, expected: u64) -> anyhow::Result<()> {
        streams.wait_for(expected, UPDATE_TIMEOUT).await;
        let (latencies, cpu_time) = (streams.latencies(), cpu_without_probes(&self.control)? - before.cpu);
        println!(
            "{} of {expected} updates delivered; from write to subscriber p50 {:.1} p99 {:.1} max {:.1} ms; {:.1} µs of CPU per update",
            latencies.len(),
            millis(latencies.value_at_quantile(0.5)),
            millis(latencies.value_at_quantile(0.99)),
            millis(latencies.max()),
            cpu_time.as_secs_f64() * 1e6 / latencies.len().max(1) as f64,
        );
        println!(
            "peak memory {:.1} MB; slowest liveness probe {:.1?}",
            megabytes(self.control.peak_rss_kib()?),
            before.probes.finish().await?
        );
        ensure!(latencies.len() == expected, "updates were lost");
        Ok(())
    }
}

/// Readings before a load, and the probes that run during it.
struct LoadBaseline {
    cpu: Duration,
    probes: LivenessProbes,
}

fn print_memory(when: &str, control: &Process) -> anyhow::Result<()> {
    println!("memory {when}: {:.1} MB", megabytes(control.rss_kib()?));
    Ok(())
}

const UPDATE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum difference of the memory before and after a day, as a fraction.
const MAX_MEMORY_CHANGE: f64 = 0.05;
/// The number of the first change is random, and less than this. Change n writes the address 10.200.0.1 + n. Pods have lower
/// addresses, so no address occurs twice.
const FIRST_CHANGE_NUMBER_LIMIT: u32 = 1 << 20;
