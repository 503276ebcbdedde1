//! `./run multicluster-demo`: a Service with endpoints in two clusters, while one cluster loses its own endpoints.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;
use tulle_bench::load::stats::Report;
use tulle_tests::cluster::Connection;
use tulle_tests::linked_clusters::{CLIENT, LinkedClusters};
use tulle_tests::meshed::MeshedCluster;

/// Starts two clusters, west and east, links west to east, and sends requests from a client in west to a Service with endpoints in
/// both.
///
/// Then the demo removes the endpoints of west and adds them again, while the client continues to send requests. Each line of
/// output shows one second: the number of responses from each cluster, and the number of failed requests. Needs root, and about
/// 4 GB of memory.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Ends after the endpoints of west are added again, and fails if a request has failed, or if the requests do not go to the
    /// expected clusters in time; without this flag, the clusters and the client run until Ctrl-C
    #[arg(long)]
    once: bool,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let is_once = args.once;
    tokio::select! {
        result = show(args) => result,
        _ = interrupt.recv() => handle_signal(is_once),
        _ = terminate.recv() => handle_signal(is_once),
    }
}

/// Handles a signal: it ends the demo, and with `--once` this is an error.
fn handle_signal(is_once: bool) -> anyhow::Result<()> {
    ensure!(!is_once, "ended by a signal");
    Ok(())
}

async fn show(args: Args) -> anyhow::Result<()> {
    let linked = LinkedClusters::start(Connection::Flat, |step| eprintln!("demo: {step}")).await?;
    eprintln!("demo: starting the Service shop/web in both, and a client in west");
    linked.start_shop().await?;
    linked.federate().await?;
    eprintln!(
        "demo: web-federated has endpoints in both clusters; look at them in another terminal:\n\
         \x20 export KUBECONFIG={}  # west\n\
         \x20 export KUBECONFIG={}  # east\n\
         \x20 ./run with kubectl get pods,services -n shop\n",
        linked.west.cluster.kubeconfig_outside().display(),
        linked.east.cluster.kubeconfig_outside().display(),
    );
    let mut client = Requests::start(&linked.west)?;
    client
        .expect("both clusters respond", 5, |second| second.west > 0 && second.east > 0)
        .await?;
    scale(&linked.west, 0).await?;
    client
        .expect("only east responds", 5, |second| second.west == 0 && second.east > 0)
        .await?;
    scale(&linked.west, 2).await?;
    client
        .expect("both clusters respond again", 5, |second| {
            second.west > 0 && second.east > 0
        })
        .await?;
    if !args.once {
        eprintln!("demo: the client continues until Ctrl-C; scale shop/web in either cluster and watch");
        client.print_until(|_| false).await?;
    }
    ensure!(
        client.failed == 0,
        "{} of {} requests failed",
        client.failed,
        client.sent
    );
    eprintln!("demo: {} requests, none failed", client.sent);
    Ok(())
}

async fn scale(cluster: &MeshedCluster, replicas: u8) -> anyhow::Result<()> {
    let line = format!("-n shop scale deploy/web --replicas={replicas}");
    eprintln!("demo: west: kubectl {line}");
    cluster.kubectl(&line).await?;
    cluster.cluster.wait_for_deployment("shop", "web").await
}

/// The client of the demo, and its requests so far.
struct Requests {
    load: tulle_tests::meshed::RunningLoad,
    sent: u64,
    failed: u64,
}

/// One second of requests.
struct Second {
    west: u64,
    east: u64,
}

impl Requests {
    fn start(west: &MeshedCluster) -> anyhow::Result<Self> {
        let line = "web-federated:80/ --rate=100 --report-every=1s --duration=8760h";
        eprintln!(
            "{:>8} {:>8} {:>8} {:>8} {:>8}",
            "second", "requests", "west", "east", "failed"
        );
        Ok(Self {
            load: west.start_load(CLIENT, line)?,
            sent: 0,
            failed: 0,
        })
    }

    /// Prints each second until `condition` has held for `seconds` seconds in a row, for at most [`EXPECT_TIMEOUT`].
    async fn expect(&mut self, what: &str, seconds: usize, condition: impl Fn(&Second) -> bool) -> anyhow::Result<()> {
        let mut held = 0;
        let wait = self.print_until(|second| {
            held = if condition(second) { held + 1 } else { 0 };
            held >= seconds
        });
        tokio::select! {
            result = wait => result,
            () = sleep(EXPECT_TIMEOUT) => anyhow::bail!("timed out after {EXPECT_TIMEOUT:?}, waiting for: {what}"),
        }
    }

    /// Prints each second until `is_last` returns true for one.
    async fn print_until(&mut self, mut is_last: impl FnMut(&Second) -> bool) -> anyhow::Result<()> {
        loop {
            let report = self.load.next().await?.context("the client has ended")?;
            self.sent += report.requests;
            self.failed += report.failed;
            let second = Second::from_report(&report);
            eprintln!(
                "{:>8.0} {:>8} {:>8} {:>8} {:>8}",
                report.at, report.requests, second.west, second.east, report.failed
            );
            if is_last(&second) {
                return Ok(());
            }
        }
    }
}

impl Second {
    fn from_report(report: &Report) -> Self {
        let n_responses = |prefix: &str| {
            let replicas = report.replicas.iter();
            replicas
                .filter(|(name, _)| name.starts_with(prefix))
                .map(|(_, n)| n)
                .sum()
        };
        Self {
            west: n_responses("west/"),
            east: n_responses("east/"),
        }
    }
}

const EXPECT_TIMEOUT: Duration = Duration::from_secs(60);
