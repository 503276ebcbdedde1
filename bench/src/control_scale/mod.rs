//! Scale test of the destination service: many objects on a real API server, many streams, and a steady rate of changes.
//!
//! The objects are created on the API server of the kubeconfig. It needs no nodes and should be a disposable one. The output has
//! the memory with and without streams, the time until all streams have their first message, the latency from a write to the
//! subscriber, and the CPU time per delivered update.

#![allow(clippy::print_stdout)] // the command prints its results

mod cluster;
mod streams;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use hdrhistogram::Histogram;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};
use tulle_control::tls::anchors::TrustAnchors;
use tulle_control::trust::{self, CertificateAuthority};

use crate::control_scale::cluster::{Cluster, Size};
use crate::control_scale::streams::{Address, Streams};
use crate::run::process::Process;

/// Numbers of objects, clients and changes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kubeconfig of the API server. The run owns the namespace `scale` there.
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    kubeconfig: PathBuf,
    /// The tulle-control binary to measure; by default the one beside this program.
    #[arg(long, value_name = "FILE")]
    control: Option<PathBuf>,
    #[arg(long, default_value_t = 1000)]
    services: usize,
    /// Endpoints of each Service; each endpoint is a pod.
    #[arg(long, default_value_t = 10)]
    endpoints: usize,
    /// Additional pods that belong to no Service.
    #[arg(long, default_value_t = 1000)]
    other_pods: usize,
    /// Clients, each with its own TLS connection.
    #[arg(long, default_value_t = 200)]
    clients: usize,
    /// `Get` streams per client.
    #[arg(long, default_value_t = 50)]
    streams: usize,
    /// EndpointSlice changes per second.
    #[arg(long, default_value_t = 41)]
    rate: u32,
    /// Duration of the changes, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    seconds: u32,
    /// Use the objects of an earlier run instead of creating them.
    #[arg(long)]
    reuse_objects: bool,
}

/// Runs the scale test and prints the results.
///
/// # Errors
/// Fails if the setup fails, a connection or stream fails, or an update is not delivered.
pub fn main(args: &Args) -> anyhow::Result<()> {
    tokio::runtime::Runtime::new()
        .context("starting a runtime")?
        .block_on(run(args))
}

async fn run(args: &Args) -> anyhow::Result<()> {
    let size = Size {
        services: args.services,
        endpoints: args.endpoints,
        other_pods: args.other_pods,
    };
    let cluster = Cluster::connect(&args.kubeconfig, size).await?;
    if !args.reuse_objects {
        let start = Instant::now();
        cluster.create().await.context("creating objects")?;
        println!("objects created in {:.1?}", start.elapsed());
    }
    let dir = tempfile::tempdir().context("making a directory")?;
    let mut control = start_control(args, dir.path())?;
    let start = Instant::now();
    control.wait_for_ports(&[DESTINATION])?;
    wait_until_ready().await?;
    println!("ready after {:.1?}", start.elapsed());
    sleep(MEMORY_SETTLE_DELAY).await;
    print_memory("with objects", &control)?;

    let anchors = TrustAnchors::read(&dir.path().join("anchors.pem")).context("reading trust anchors")?;
    let (cpu, start) = (control.cpu()?, Instant::now());
    let mut streams = Streams::open(DESTINATION, &anchors, args.clients, args.streams, size.services).await?;
    let n_streams = args.clients * args.streams;
    println!(
        "{n_streams} streams answered in {:.2?}, with {:.2?} of CPU",
        start.elapsed(),
        control.cpu()? - cpu
    );
    sleep(MEMORY_SETTLE_DELAY).await;
    print_memory("with streams", &control)?;

    streams.record_watch_latencies(cluster.watch().await?);
    let cpu = control.cpu()?;
    let (latencies, expected) = run_changes(args, &cluster, &streams).await?;
    let used = control.cpu()? - cpu;
    println!(
        "{} of {expected} updates delivered; from write to subscriber p50 {:.1} p99 {:.1} max {:.1} ms; {:.0} µs of CPU per update",
        latencies.len(),
        millis(latencies.value_at_quantile(0.5)),
        millis(latencies.value_at_quantile(0.99)),
        millis(latencies.max()),
        used.as_secs_f64() * 1e6 / latencies.len().max(1) as f64,
    );
    let watch_latencies = streams.watch_latencies();
    println!(
        "from write to a watch of the API server p50 {:.1} p99 {:.1} ms",
        millis(watch_latencies.value_at_quantile(0.5)),
        millis(watch_latencies.value_at_quantile(0.99)),
    );
    print_memory("after changes", &control)?;
    ensure!(latencies.len() == expected, "updates were lost");
    Ok(())
}

/// Changes one endpoint per Service in turn, at a steady rate. Returns the latencies in microseconds and the expected number of
/// updates.
async fn run_changes(args: &Args, cluster: &Cluster, streams: &Streams) -> anyhow::Result<(Histogram<u64>, u64)> {
    let n_changes = args.rate * args.seconds;
    let start = Instant::now();
    let mut writes = tokio::task::JoinSet::new();
    let mut expected = 0;
    for n in 0..n_changes {
        tokio::time::sleep_until(start + Duration::from_secs(1) * n / args.rate).await;
        let service = n as usize % args.services;
        expected += streams.subscribers(service);
        let (cluster, addr) = (cluster.clone(), Address::of_change(n));
        streams.record_write(addr, Instant::now());
        writes.spawn(async move { cluster.change(service, addr).await });
    }
    while let Some(written) = writes.join_next().await {
        written.context("a write failed")??;
    }
    streams.wait_for(expected, UPDATE_TIMEOUT).await;
    Ok((streams.latencies(), expected))
}

fn start_control(args: &Args, dir: &Path) -> anyhow::Result<Process> {
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
    let program = match &args.control {
        Some(path) => path.clone(),
        None => std::env::current_exe()
            .context("finding this program")?
            .with_file_name("tulle-control"),
    };
    let mut command = Command::new(program);
    command
        .args(["destination", "identity", "-enable-ipv6=false"])
        .arg("-client-certificates=optional") // the clients of this test have no certificates
        .args(["--kubeconfig".as_ref(), args.kubeconfig.as_os_str()])
        .args(["--trust-anchors".as_ref(), dir.join("anchors.pem").as_os_str()])
        .args(["--issuer".as_ref(), dir.join("issuer").as_os_str()])
        .args(["--token-keys".as_ref(), dir.join("token-keys").as_os_str()])
        .args(["--identity-addr=127.0.0.1:0", "--admin-addr=127.0.0.1:0"])
        .args([
            format!("--destination-addr=127.0.0.1:{DESTINATION}"),
            format!("--metrics-addr=127.0.0.1:{METRICS}"),
        ]);
    Process::start("tulle-control", command, dir)
}

/// Waits until the control plane reports that it is ready.
async fn wait_until_ready() -> anyhow::Result<()> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let deadline = Instant::now() + Duration::from_secs(60);
    while Instant::now() < deadline {
        let mut tcp = TcpStream::connect(("127.0.0.1", METRICS))
            .await
            .context("asking for readiness")?;
        tcp.write_all(b"GET /ready HTTP/1.1\r\nhost: control\r\nconnection: close\r\n\r\n")
            .await?;
        let mut answer = String::new();
        tcp.read_to_string(&mut answer).await?;
        if answer.starts_with("HTTP/1.1 200") {
            return Ok(());
        }
        sleep(Duration::from_millis(20)).await;
    }
    anyhow::bail!("the control plane is not ready after a minute")
}

fn print_memory(when: &str, control: &Process) -> anyhow::Result<()> {
    println!("memory {when}: {:.1} MB", control.rss_kib()? as f64 / 1000.0 * 1.024);
    Ok(())
}

fn millis(micros: u64) -> f64 {
    micros as f64 / 1000.0
}

const DESTINATION: u16 = 18086;
const METRICS: u16 = 19996;
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// Wait before memory is read, so that work after the first responses has finished.
const MEMORY_SETTLE_DELAY: Duration = Duration::from_secs(2);
const UPDATE_TIMEOUT: Duration = Duration::from_secs(30);
