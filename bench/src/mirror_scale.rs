//! Scale test of the service mirror: many exported Services on one API server, their mirrors on another one, and changes.
//!
//! Neither API server needs nodes, and both should be disposable. The output has the time until all mirrors exist, the memory of the
//! service mirror, and the time from a change to its mirror.

#![allow(clippy::print_stdout)] // the command prints its results

use std::collections::{HashMap, HashSet};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use hdrhistogram::Histogram;
use k8s_openapi::ByteString;
use kube::config::Kubeconfig;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tulle_core::duration;
use tulle_core::names::variable;

use crate::run::process::Process;
use crate::scale::{ApiClient, MEMORY_SETTLE_DELAY, control_program, megabytes, millis, run_concurrently};

/// Numbers of objects and changes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kubeconfig of the API server that gets the mirrors. The run owns the namespaces `scale` and `linkerd-multicluster` there.
    #[arg(long, env = variable::KUBECONFIG, value_name = "FILE")]
    kubeconfig: PathBuf,
    /// Kubeconfig of the API server with the exported Services. The run owns the namespace `scale` there.
    #[arg(long, value_name = "FILE")]
    remote_kubeconfig: PathBuf,
    /// The tulle-control binary to measure; by default the one beside this program.
    #[arg(long, value_name = "FILE")]
    control: Option<PathBuf>,
    /// Exported Services.
    #[arg(long, default_value = "1000")]
    services: NonZeroUsize,
    /// Endpoints of each Service.
    #[arg(long, default_value = "10")]
    endpoints: NonZeroUsize,
    /// Changes per second: by turns, a Service gets another port, and another one loses its endpoints.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
    /// Duration of the changes, in seconds. Each Service changes at most once.
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Fail if the mirrors of 1000 Services take longer; more Services may take longer in proportion.
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = duration::parse)]
    max_mirror_time: Duration,
    /// Fail if a change takes longer to reach its mirror.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration::parse)]
    max_change_time: Duration,
    /// Fail if the service mirror has used more memory at any time, in MB.
    #[arg(long, value_name = "MB", default_value_t = 60)]
    max_memory: u32,
}

/// Runs the scale test and prints the results.
///
/// # Errors
/// There are more changes than Services, the setup fails, a mirror or a change does not arrive, or a figure is above its limit.
pub fn main(args: &Args) -> anyhow::Result<()> {
    let n_changes = (args.rate as usize).saturating_mul(args.seconds as usize);
    ensure!(
        n_changes <= args.services.get(),
        "--rate {} --seconds {}: {n_changes} changes need as many Services, and --services says {}",
        args.rate,
        args.seconds,
        args.services
    );
    tokio::runtime::Runtime::new()
        .context("starting a runtime")?
        .block_on(run(args, n_changes))
}

async fn run(args: &Args, n_changes: usize) -> anyhow::Result<()> {
    let remote = ApiClient::connect(&args.remote_kubeconfig)
        .await
        .context("the remote API server")?;
    let local = ApiClient::connect(&args.kubeconfig)
        .await
        .context("the local API server")?;
    let started = Instant::now();
    create_exported_services(&remote, args).await?;
    create_link(&local, &args.remote_kubeconfig).await?;
    println!("objects created in {:.1?}", started.elapsed());

    let dir = tempfile::tempdir().context("making a directory")?;
    let mut mirrors = Mirrors::follow(&local).await?;
    let started = Instant::now();
    let process = start_service_mirror(args, dir.path())?;
    mirrors
        .wait_for_all(
            args.services.get(),
            started + in_proportion(MIRROR_TIMEOUT, args.services.get()),
        )
        .await?;
    let mirrored_after = started.elapsed();
    let first_peak_kib = process.peak_rss_kib()?;
    println!(
        "{} Services mirrored {mirrored_after:.2?} after the start of the process, with {:.2?} of CPU; peak memory {:.1} MB",
        args.services,
        process.cpu_time()?,
        megabytes(first_peak_kib)
    );
    mirrors.ensure_unchanged(REFRESH_PERIOD + MEMORY_SETTLE_DELAY).await?;
    println!(
        "memory after a comparison of all mirrors, which changed none: {:.1} MB",
        megabytes(process.rss_kib()?)
    );

    process.reset_peak_rss()?;
    let cpu_time = process.cpu_time()?;
    let (written, observed) = tokio::try_join!(
        write_changes(&remote, args, n_changes),
        mirrors.observe_changes(n_changes)
    )?;
    let mut latencies = [(); 2].map(|()| Histogram::<u64>::new(3).expect("three digits are valid"));
    for (change, written_at) in written {
        let observed_at = observed.get(&change);
        let observed_at = observed_at.with_context(|| format!("the mirror of Service {} has not changed", change.0))?;
        let latency = observed_at.duration_since(written_at);
        latencies[usize::from(change.empties_endpoints())] += u64::try_from(latency.as_micros())?;
    }
    for (what, latencies) in ["another port", "no endpoints"].into_iter().zip(&latencies) {
        println!(
            "{} Services with {what}: from write to the mirror p50 {:.1} p99 {:.1} max {:.1} ms",
            latencies.len(),
            millis(latencies.value_at_quantile(0.5)),
            millis(latencies.value_at_quantile(0.99)),
            millis(latencies.max()),
        );
    }
    let peak_kib = process.peak_rss_kib()?;
    println!(
        "{:.1} µs of CPU per change; peak memory {:.1} MB",
        (process.cpu_time()? - cpu_time).as_secs_f64() * 1e6 / n_changes as f64,
        megabytes(peak_kib)
    );
    let slowest_change = latencies.iter().map(Histogram::max).max().unwrap_or_default();
    let measured = Measured {
        mirrored_after,
        slowest_change: Duration::from_micros(slowest_change),
        peak_memory: megabytes(first_peak_kib.max(peak_kib)),
    };
    measured.check(args)
}

/// The figures that have limits.
struct Measured {
    mirrored_after: Duration,
    slowest_change: Duration,
    /// In MB.
    peak_memory: f64,
}

impl Measured {
    /// Fails if a figure is above its limit.
    fn check(&self, args: &Args) -> anyhow::Result<()> {
        let max_mirror_time = in_proportion(args.max_mirror_time, args.services.get());
        ensure!(
            self.mirrored_after <= max_mirror_time,
            "the Services were mirrored after {:.2?}; the limit is {max_mirror_time:.2?}",
            self.mirrored_after
        );
        ensure!(
            self.slowest_change <= args.max_change_time,
            "a change took {:.2?}; the limit is {:.2?}",
            self.slowest_change,
            args.max_change_time
        );
        ensure!(
            self.peak_memory <= f64::from(args.max_memory),
            "the service mirror used {:.1} MB; the limit is {} MB",
            self.peak_memory,
            args.max_memory
        );
        Ok(())
    }
}

/// The time for this number of Services, from the time for 1000, which is also that for fewer.
fn in_proportion(time: Duration, n_services: usize) -> Duration {
    time.mul_f64((n_services as f64 / 1000.).max(1.))
}

/// The n-th change, of the n-th Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Change(usize);

impl Change {
    /// Whether the Service loses its endpoints; otherwise it gets another port.
    fn empties_endpoints(self) -> bool {
        self.0 % 2 == 1
    }
}

async fn create_exported_services(remote: &ApiClient, args: &Args) -> anyhow::Result<()> {
    apply(remote, "/api/v1", "namespaces", namespace(NAMESPACE)).await?;
    let (n_services, n_endpoints) = (args.services.get(), args.endpoints.get());
    let objects = (0..n_services).map(|n| {
        let slice = slice(n, n * n_endpoints..(n + 1) * n_endpoints);
        [
            (IN_NAMESPACE, "services", service(n, PORT)),
            (SLICES_IN_NAMESPACE, "endpointslices", slice),
        ]
    });
    let applied = objects
        .flatten()
        .map(|(parent, plural, object)| apply(remote, parent, plural, object));
    run_concurrently(stream::iter(applied)).await
}

/// Creates the Link, the Secret with access to the other API server, and the namespace of the mirrors.
async fn create_link(local: &ApiClient, remote_kubeconfig: &Path) -> anyhow::Result<()> {
    for name in [NAMESPACE, LINK_NAMESPACE] {
        apply(local, "/api/v1", "namespaces", namespace(name)).await?;
    }
    let in_link_namespace = format!("/api/v1/namespaces/{LINK_NAMESPACE}");
    let credentials = "cluster-credentials-east";
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "mirror.linkerd.io/remote-kubeconfig",
        "metadata": {"name": credentials},
        "data": {"kubeconfig": ByteString(inline_files(remote_kubeconfig)?)},
    });
    apply(local, &in_link_namespace, "secrets", secret).await?;
    let link = json!({
        "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
        "metadata": {"name": "east"},
        "spec": {
            "targetClusterName": "east", "targetClusterDomain": "cluster.local",
            "clusterCredentialsSecret": credentials,
            "gatewayAddress": "192.0.2.7", "gatewayPort": "4143", "gatewayIdentity": "gateway.east",
            "selector": {"matchLabels": {EXPORTED: "true"}},
        },
    });
    let in_link_namespace = format!("/apis/multicluster.linkerd.io/v1alpha3/namespaces/{LINK_NAMESPACE}");
    apply(local, &in_link_namespace, "links", link).await
}

/// The kubeconfig, with the contents of the files that it names.
fn inline_files(kubeconfig: &Path) -> anyhow::Result<Vec<u8>> {
    let reading = || format!("reading {}", kubeconfig.display());
    let parsed = Kubeconfig::read_from(kubeconfig).with_context(reading)?;
    let mut config = serde_json::to_value(parsed).with_context(reading)?;
    for (list, item, fields) in [
        ("clusters", "cluster", &["certificate-authority"][..]),
        ("users", "user", &["client-certificate", "client-key"]),
    ] {
        for entry in config[list].as_array_mut().into_iter().flatten() {
            for field in fields {
                let Some(path) = entry[item][field].as_str() else {
                    continue;
                };
                let contents = std::fs::read(path).with_context(|| format!("reading {path}"))?;
                entry[item][format!("{field}-data")] = json!(ByteString(contents));
                entry[item][field].take();
            }
        }
    }
    Ok(config.to_string().into_bytes())
}

fn start_service_mirror(args: &Args, dir: &Path) -> anyhow::Result<Process> {
    let mut command = Command::new(control_program(args.control.as_deref())?);
    command
        .args(["service-mirror", "--link-name=east", "--metrics-addr=127.0.0.1:0"])
        .arg(format!("--namespace={LINK_NAMESPACE}"))
        .args(["--kubeconfig".as_ref(), args.kubeconfig.as_os_str()]);
    Process::start("tulle-control", command, dir)
}

/// Makes the changes at a steady rate. Returns when each was written.
async fn write_changes(remote: &ApiClient, args: &Args, n_changes: usize) -> anyhow::Result<Vec<(Change, Instant)>> {
    let (start, interval) = (Instant::now(), Duration::from_secs(1) / args.rate);
    let writes = (0..n_changes).map(|n| async move {
        sleep_until(start + interval * u32::try_from(n)?).await;
        let (change, written_at) = (Change(n), Instant::now());
        match change.empties_endpoints() {
            true => apply(remote, SLICES_IN_NAMESPACE, "endpointslices", slice(n, 0..0)).await?,
            false => apply(remote, IN_NAMESPACE, "services", service(n, OTHER_PORT)).await?,
        }
        anyhow::Ok((change, written_at))
    });
    futures_util::future::try_join_all(writes).await
}

/// The watches of the mirrors.
struct Mirrors {
    changes: stream::BoxStream<'static, anyhow::Result<MirrorChange>>,
}

/// A mirror was created or has changed.
enum MirrorChange {
    Service { n: usize, port: u64 },
    Endpoints { n: usize, is_empty: bool },
}

impl Mirrors {
    async fn follow(local: &ApiClient) -> anyhow::Result<Self> {
        let services = watch(local, "services").await?.map_ok(|object| {
            let port = object["spec"]["ports"][0]["port"].as_u64()?;
            Some(MirrorChange::Service {
                n: service_number(&object)?,
                port,
            })
        });
        let endpoints = watch(local, "endpoints").await?.map_ok(|object| {
            let addresses = object["subsets"][0]["addresses"].as_array();
            let is_empty = addresses.is_none_or(Vec::is_empty);
            Some(MirrorChange::Endpoints {
                n: service_number(&object)?,
                is_empty,
            })
        });
        let changes = stream::select(services, endpoints).try_filter_map(|change| std::future::ready(Ok(change)));
        Ok(Self {
            changes: changes.boxed(),
        })
    }

    /// Waits until `n_services` Services have a mirror with an endpoint.
    async fn wait_for_all(&mut self, n_services: usize, deadline: Instant) -> anyhow::Result<()> {
        let (mut services, mut with_endpoints) = (HashSet::new(), HashSet::new());
        while services.len() < n_services || with_endpoints.len() < n_services {
            match self.next(deadline).await.with_context(|| {
                format!(
                    "{} Services and {} Endpoints are mirrored",
                    services.len(),
                    with_endpoints.len()
                )
            })? {
                MirrorChange::Service { n, .. } => services.insert(n),
                MirrorChange::Endpoints { n, is_empty: false } => with_endpoints.insert(n),
                MirrorChange::Endpoints { n, is_empty: true } => with_endpoints.remove(&n),
            };
        }
        Ok(())
    }

    /// Waits until `n_changes` changes have arrived in the mirrors. Returns when each was seen first.
    async fn observe_changes(&mut self, n_changes: usize) -> anyhow::Result<HashMap<Change, Instant>> {
        let mut observed = HashMap::new();
        let mut deadline = Instant::now() + CHANGE_TIMEOUT;
        while observed.len() < n_changes {
            let change = self.next(deadline).await;
            match change.with_context(|| format!("{} of {n_changes} changes are mirrored", observed.len()))? {
                MirrorChange::Service { n, port: OTHER_PORT } | MirrorChange::Endpoints { n, is_empty: true } => {
                    let now = Instant::now();
                    observed.entry(Change(n)).or_insert(now);
                    deadline = now + CHANGE_TIMEOUT;
                }
                MirrorChange::Service { .. } | MirrorChange::Endpoints { .. } => {}
            }
        }
        Ok(observed)
    }

    /// Waits for this time.
    ///
    /// # Errors
    /// A mirror changes meanwhile, although no exported Service does.
    async fn ensure_unchanged(&mut self, time: Duration) -> anyhow::Result<()> {
        match timeout(time, self.changes.try_next()).await {
            Err(_) => Ok(()),
            Ok(change) => {
                change?.context("a watch has ended")?;
                bail!("a mirror has changed without a change of its Service");
            }
        }
    }

    async fn next(&mut self, deadline: Instant) -> anyhow::Result<MirrorChange> {
        match timeout_at(deadline, self.changes.try_next()).await {
            Ok(change) => change?.context("a watch has ended"),
            Err(_) => bail!("no further change has arrived in time"),
        }
    }
}

/// Watches the objects of this kind in the namespace `scale`: first those that exist, then changes.
async fn watch(
    client: &ApiClient,
    plural: &str,
) -> anyhow::Result<impl Stream<Item = anyhow::Result<Value>> + Send + use<>> {
    let what = format!("watching {plural}");
    let lines = client.watch(&format!("{IN_NAMESPACE}/{plural}")).await?;
    Ok(lines.map(move |line| {
        let mut event: Value = serde_json::from_str(&line.context(what.clone())?).context(what.clone())?;
        ensure!(event["type"] != "ERROR", "{what}: {event}");
        Ok(event["object"].take())
    }))
}

/// The number of the Service that this object mirrors; `None` if it is no mirror.
fn service_number(object: &Value) -> Option<usize> {
    let name = object["metadata"]["name"].as_str()?;
    name.strip_prefix("svc-")?.strip_suffix("-east")?.parse().ok()
}

/// Creates or replaces an object by server-side apply.
async fn apply(client: &ApiClient, parent: &str, plural: &str, object: Value) -> anyhow::Result<()> {
    let name = object["metadata"]["name"].as_str().context("an object has no name")?;
    client.apply(&format!("{parent}/{plural}/{name}"), &object).await
}

fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
}

fn service(n: usize, port: u64) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": format!("svc-{n}"), "labels": {EXPORTED: "true"}},
        "spec": {"ports": [{"name": "http", "port": port, "targetPort": 8080}]},
    })
}

/// The EndpointSlice of a Service, with the addresses of these pods.
fn slice(service: usize, pods: std::ops::Range<usize>) -> Value {
    let service = format!("svc-{service}");
    let address = |pod: usize| format!("10.{}.{}.{}", 100 + pod / 62500, pod / 250 % 250, 1 + pod % 250);
    let endpoints: Vec<Value> = pods
        .map(|pod| json!({"addresses": [address(pod)], "conditions": {"ready": true}}))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": service, "labels": {"kubernetes.io/service-name": service}},
        "endpoints": endpoints, "ports": [{"name": "http", "port": 8080}],
    })
}

const NAMESPACE: &str = "scale";
const IN_NAMESPACE: &str = "/api/v1/namespaces/scale";
const SLICES_IN_NAMESPACE: &str = "/apis/discovery.k8s.io/v1/namespaces/scale";
const LINK_NAMESPACE: &str = "linkerd-multicluster";
const EXPORTED: &str = "mirror.linkerd.io/exported";
const PORT: u64 = 80;
const OTHER_PORT: u64 = 81;
/// Maximum time to wait until 1000 Services are mirrored, or fewer. It is longer than the limit of a figure, so that a run shows how far
/// it is above this limit.
const MIRROR_TIMEOUT: Duration = Duration::from_secs(60);
/// The default of the service mirror for the time between two comparisons of all mirrors.
const REFRESH_PERIOD: Duration = Duration::from_secs(60);
/// Maximum time between two changes of mirrors.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn figures_above_their_limits_are_errors() {
        let parse = |services: &str| {
            let line = ["x", "--kubeconfig=a", "--remote-kubeconfig=b", "--services", services];
            Line::parse_from(line).args
        };
        let millis = Duration::from_millis;
        for (services, mirrored_after, slowest_change, peak_memory, expected) in [
            ("1000", 20_000, 1_000, 60., None),
            ("10", 20_001, 0, 0., Some("after 20.00s; the limit is 20.00s")),
            ("2000", 40_000, 0, 0., None),
            ("2000", 40_001, 0, 0., Some("the limit is 40.00s")),
            ("1000", 0, 1_001, 0., Some("a change took 1.00s; the limit is 1.00s")),
            ("1000", 0, 0, 60.1, Some("60.1 MB; the limit is 60 MB")),
        ] {
            let measured = Measured {
                mirrored_after: millis(mirrored_after),
                slowest_change: millis(slowest_change),
                peak_memory,
            };
            let error = measured.check(&parse(services)).err().map(|error| error.to_string());
            match expected {
                None => assert_eq!(error, None),
                Some(text) => assert!(error.as_ref().is_some_and(|error| error.contains(text)), "{error:?}"),
            }
        }
    }
}
