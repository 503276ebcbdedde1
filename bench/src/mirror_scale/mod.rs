//! Scale test of the service mirror: many exported Services on one API server, their mirrors on another one, and changes.
//!
//! Neither API server needs nodes, and both should be disposable. The output has the time until all mirrors exist, the memory of the
//! service mirror, and the time from a change to its mirror. With `--flat`, the mirrors have no Endpoints; the output also has the time
//! until a destination service has sent the endpoints of all mirrors, and its memory.

#![allow(clippy::print_stdout)] // the command prints its results

mod destination;
mod mirrors;
mod objects;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use hdrhistogram::Histogram;
use tokio::time::Instant;
use tulle_core::duration;
use tulle_core::names::variable;

use crate::mirror_scale::destination::Destination;
use crate::mirror_scale::mirrors::Mirrors;
use crate::mirror_scale::objects::{CLUSTER, Change, ExportedServices, LINK_NAMESPACE, Mode};
use crate::run::process::Process;
use crate::scale::control_plane::cpu_without_probes;
use crate::scale::{ApiClient, MEMORY_SETTLE_DELAY, control_program, megabytes, millis};

/// Numbers of objects and changes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kubeconfig of the API server that gets the mirrors. The run owns the namespaces `scale` and `linkerd-multicluster` there, and
    /// with --flat also `linkerd`.
    #[arg(long, env = variable::KUBECONFIG, value_name = "FILE")]
    kubeconfig: PathBuf,
    /// Kubeconfig of the API server with the exported Services. The run owns the namespace `scale` there.
    #[arg(long, value_name = "FILE")]
    remote_kubeconfig: PathBuf,
    /// The tulle-control binary to measure; by default the one beside this program.
    #[arg(long, value_name = "FILE")]
    control: Option<PathBuf>,
    /// Measure mirrors without a gateway, which have no Endpoints: a destination service reads their endpoints from the API server
    /// with the exported Services.
    #[arg(long)]
    flat: bool,
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
    /// Fail if a change takes longer to reach its mirror, or with --flat the stream of a client if the Service loses its endpoints.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration::parse)]
    max_change_time: Duration,
    /// Fail if the service mirror has used more memory at any time, in MB.
    #[arg(long, value_name = "MB", default_value_t = 60)]
    max_memory: u32,
}

impl Args {
    fn mode(&self) -> Mode {
        match self.flat {
            true => Mode::Flat,
            false => Mode::Gateway,
        }
    }
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
    let (mode, n_services, n_endpoints) = (args.mode(), args.services.get(), args.endpoints.get());
    let exported = ExportedServices {
        client: remote,
        mode,
        n_services,
        n_endpoints,
    };
    let started = Instant::now();
    exported.create().await?;
    objects::create_link(&local, &args.remote_kubeconfig, mode).await?;
    println!("objects created in {:.1?}", started.elapsed());

    let mut mirrors = match mode {
        Mode::Gateway => Mirrors::follow_with_endpoints(&local).await?,
        Mode::Flat => Mirrors::follow_services(&local, n_endpoints).await?,
    };
    let dir = tempfile::tempdir().context("making a directory")?;
    let started = Instant::now();
    let service_mirror = start_service_mirror(args, dir.path())?;
    let deadline = started + in_proportion(MIRROR_TIMEOUT, n_services);
    mirrors.wait_for_services(n_services, deadline).await?;
    if mode == Mode::Gateway {
        mirrors.wait_for_endpoints(n_services, deadline).await?;
    }
    let mirrored_after = started.elapsed();
    let first_peak_kib = service_mirror.peak_rss_kib()?;
    println!(
        "{n_services} Services mirrored {mirrored_after:.2?} after the start of the process, with {:.2?} of CPU; peak memory {:.1} MB",
        service_mirror.cpu_time()?,
        megabytes(first_peak_kib)
    );
    mirrors.ensure_unchanged(REFRESH_PERIOD + MEMORY_SETTLE_DELAY).await?;
    println!(
        "memory after a comparison of all mirrors, which changed none: {:.1} MB",
        megabytes(service_mirror.rss_kib()?)
    );
    let destination = match mode {
        Mode::Gateway => None,
        Mode::Flat => Some(measure_discovery(args, &mut mirrors).await?),
    };

    let mut baselines = vec![Baseline::read("service mirror", &service_mirror)?];
    if let Some(destination) = &destination {
        baselines.push(Baseline::read("destination service", &destination.process)?);
    }
    let (written, observed) = tokio::try_join!(
        exported.write_changes(n_changes, args.rate),
        mirrors.observe_changes(n_changes)
    )?;
    let slowest_change = print_latencies(mode, written, &observed)?;
    for baseline in &baselines {
        baseline.print_costs(n_changes)?;
    }
    let measured = Measured {
        mirrored_after,
        slowest_change,
        peak_memory: megabytes(first_peak_kib.max(service_mirror.peak_rss_kib()?)),
    };
    measured.check(args)
}

/// Starts a destination service, and waits until a stream for each mirror has all its endpoints.
async fn measure_discovery(args: &Args, mirrors: &mut Mirrors) -> anyhow::Result<Destination> {
    let n_services = args.services.get();
    let started = Instant::now();
    let deadline = started + in_proportion(MIRROR_TIMEOUT, n_services);
    let mut destination = Destination::start(&args.kubeconfig, args.control.as_deref()).await?;
    mirrors.follow(destination.open_streams(n_services, deadline).await?);
    mirrors.wait_for_endpoints(n_services, deadline).await?;
    println!(
        "{n_services} streams have all their endpoints {:.2?} after the start of the destination service, with {:.2?} of CPU; \
         peak memory {:.1} MB",
        started.elapsed(),
        cpu_without_probes(&destination.process)?,
        megabytes(destination.process.peak_rss_kib()?)
    );
    Ok(destination)
}

/// Prints the times from the writes until the changes were observed. Returns the longest.
fn print_latencies(
    mode: Mode,
    written: Vec<(Change, Instant)>,
    observed: &HashMap<Change, Instant>,
) -> anyhow::Result<Duration> {
    let mut latencies = [(); 2].map(|()| Histogram::<u64>::new(3).expect("three digits are valid"));
    for (change, written_at) in written {
        let observed_at = observed.get(&change);
        let observed_at = observed_at.with_context(|| format!("the mirror of Service {} has not changed", change.0))?;
        let latency = observed_at.duration_since(written_at);
        latencies[usize::from(change.empties_endpoints())] += u64::try_from(latency.as_micros())?;
    }
    let observer_of_endpoints = match mode {
        Mode::Gateway => "mirror",
        Mode::Flat => "stream",
    };
    let kinds = [("another port", "mirror"), ("no endpoints", observer_of_endpoints)];
    for ((what, observer), latencies) in kinds.into_iter().zip(&latencies) {
        println!(
            "{} Services with {what}: from write to the {observer} p50 {:.1} p99 {:.1} max {:.1} ms",
            latencies.len(),
            millis(latencies.value_at_quantile(0.5)),
            millis(latencies.value_at_quantile(0.99)),
            millis(latencies.max()),
        );
    }
    let slowest_change = latencies.iter().map(Histogram::max).max().unwrap_or_default();
    Ok(Duration::from_micros(slowest_change))
}

/// A process, with its CPU time before the changes.
struct Baseline<'a> {
    name: &'static str,
    process: &'a Process,
    cpu_time: Duration,
}

impl<'a> Baseline<'a> {
    /// Reads the CPU time of a process, and resets its peak memory.
    fn read(name: &'static str, process: &'a Process) -> anyhow::Result<Self> {
        process.reset_peak_rss()?;
        let cpu_time = process.cpu_time()?;
        Ok(Self {
            name,
            process,
            cpu_time,
        })
    }

    /// Prints the costs of the changes.
    fn print_costs(&self, n_changes: usize) -> anyhow::Result<()> {
        println!(
            "{}: {:.1} µs of CPU per change; peak memory {:.1} MB",
            self.name,
            (self.process.cpu_time()? - self.cpu_time).as_secs_f64() * 1e6 / n_changes as f64,
            megabytes(self.process.peak_rss_kib()?)
        );
        Ok(())
    }
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

fn start_service_mirror(args: &Args, dir: &Path) -> anyhow::Result<Process> {
    let mut command = Command::new(control_program(args.control.as_deref())?);
    command
        .args(["service-mirror", "--metrics-addr=127.0.0.1:0"])
        .args([
            format!("--link-name={CLUSTER}"),
            format!("--namespace={LINK_NAMESPACE}"),
        ])
        .args(["--kubeconfig".as_ref(), args.kubeconfig.as_os_str()]);
    Process::start("tulle-control", command, dir)
}

/// Maximum time to wait until 1000 Services are mirrored, or fewer. It is longer than the limit of a figure, so that a run shows how far
/// it is above this limit.
const MIRROR_TIMEOUT: Duration = Duration::from_secs(60);
/// The default of the service mirror for the time between two comparisons of all mirrors.
const REFRESH_PERIOD: Duration = Duration::from_secs(60);

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
