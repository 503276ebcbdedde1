//! The benchmark: two sidecars with mutual TLS between a client and a server, in network namespaces of one machine.
//!
//! Each peer has its own testbed. Rows with the same setup are measured with the same running sidecars. Peers take turns within
//! each row, so that other load on the machine affects all of them alike. The report has medians. The client, both sidecars and the
//! application share the CPUs of the machine, so ratios between peers are more reliable than absolute values.

mod brokers;
mod budgets;
mod callgrind;
mod certs;
pub mod compare;
mod conformance;
pub mod costs;
mod databases;
mod document;
mod generators;
mod hostile;
mod measurement;
mod memory;
mod metric;
mod nginx_envoy;
mod peer;
mod plot;
pub mod process;
mod report;
mod rows;
mod setup;
mod sidecars;
mod slow;
mod tap;
mod tcp_apps;
mod testbed;
mod throttle;
mod tools;
mod tulle;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::ValueEnum as _;

use self::report::{Report, Results};
use self::rows::Scenario;
use self::setup::Peer;
use self::setup::Setup;
use self::sidecars::Sidecars;
use self::testbed::Testbed;
use self::testbed::{SERVER_IP, SERVICE_IP};

#[derive(clap::Args, Clone, Debug)]
pub struct DocumentArgs {
    /// JSON file that "tulle-bench run --json" wrote.
    json: PathBuf,
    /// Directory for benchmarks.md and its plots.
    #[arg(long, value_name = "DIRECTORY", default_value = "docs/reference")]
    to: PathBuf,
}

#[derive(clap::Args, Clone, Debug)]
pub struct ConformanceArgs {
    /// Sidecars to test, separated by commas; not "none".
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Peer::Tulle, Peer::Haproxy, Peer::Nginx, Peer::Envoy])]
    peers: Vec<Peer>,
    /// Output file; default: standard output.
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
}

/// Runs the HTTP/1 conformance cases with each peer and writes the results.
pub fn conformance(args: &ConformanceArgs) -> anyhow::Result<()> {
    ensure!(
        !args.peers.contains(&Peer::None),
        "--peers none: the cases need sidecars"
    );
    let text = conformance::document(&args.peers)?;
    match &args.to {
        Some(path) => std::fs::write(path, text).with_context(|| format!("writing {}", path.display())),
        None => tools::print(&text),
    }
}

/// Writes `benchmarks.md` and its plots.
pub fn document(args: &DocumentArgs) -> anyhow::Result<()> {
    document::write(&Report::read(&args.json)?, &args.to)
}

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Sidecars to measure, separated by commas. Budgets are checked only if `tulle` is measured.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Peer::value_variants().to_vec())]
    peers: Vec<Peer>,
    /// Rows to measure, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Scenario::value_variants().to_vec())]
    rows: Vec<Scenario>,
    /// Number of measurements of each row and peer.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    repeats: u16,
    /// Duration of each measurement, in whole seconds. Without effect on `hostile` (5 s without the attack and 20 s with it) and on
    /// `idle` and `idle-opaque`, which measure memory. `slow-heads` is measured without and with the slow clients, at most 5 s each.
    #[arg(long, default_value = "4s", value_parser = generators::parse_whole_seconds)]
    duration: Duration,
    /// Write all results to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Do not fail if a result exceeds its budget.
    #[arg(long)]
    ignore_budgets: bool,
}

/// Runs the measurements, prints the table and writes the JSON. Fails if a result exceeds its budget or a measurement is skipped.
pub fn main(args: &Args) -> anyhow::Result<()> {
    tools::raise_descriptor_limit()?;
    peer::prepare_run(&args.peers, &["wrk", "ghz", "h2load"])?;
    for row in &args.rows {
        tcp_apps::check(row.setup().tcp_app)?;
    }
    let testbeds = args.peers.iter().map(|peer| Ok((*peer, Testbed::build(&[])?)));
    let mut testbeds = testbeds.collect::<anyhow::Result<Vec<_>>>()?;
    let mut results = Results::new(peer::versions(&args.peers)?);
    let mut n_skipped = 0;
    for repeat in 1..=args.repeats {
        for group in rows::group_by_setup(&args.rows) {
            eprintln!("repeat {repeat} of {}: {group:?}", args.repeats);
            n_skipped += measure(&testbeds, &group, args.duration, &mut results)?;
        }
        // The peers take turns in being first and last, in case the order matters.
        testbeds.rotate_left(1);
        // The results are written after each repeat, so that a run that fails later still has results.
        if let Some(path) = &args.json {
            results.report(budgets::COMMITTED_BUDGETS)?.write(path)?;
        }
    }
    let report = results.report(budgets::COMMITTED_BUDGETS)?;
    tools::print(&report.to_string())?;
    if !args.peers.contains(&Peer::Tulle) {
        eprintln!("no budget was checked: budgets are for the peer tulle, which is built with a profile");
    }
    ensure!(
        n_skipped == 0,
        "{n_skipped} measurements were skipped; the reasons are printed above"
    );
    ensure!(
        args.ignore_budgets || report.passed(),
        "a result exceeds its budget in budgets.toml"
    );
    Ok(())
}

/// Starts the sidecars of all peers and measures the rows in turn. Returns the number of skipped measurements: those of HAProxy,
/// nginx or Envoy after a failure, and those that this machine does not support. A failure of tulle or of the peer without a proxy
/// is an error.
fn measure(
    testbeds: &[(Peer, Testbed)],
    rows: &[Scenario],
    duration: Duration,
    results: &mut Results,
) -> anyhow::Result<u32> {
    let Some(setup) = rows.first().map(|row| row.setup()) else {
        return Ok(0);
    };
    if setup.throttle.is_some()
        && let Err(error) = throttle::check()
    {
        eprintln!("skipped: {rows:?}: {error:#}");
        return Ok(testbeds.iter().map(|(peer, _)| n_measurements(rows, *peer)).sum());
    }
    let mut n_skipped = 0;
    // A peer that fails is not measured in the remaining rows.
    let mut skip_or_fail = |peer: Peer, remaining_rows: &[Scenario], failed: anyhow::Error| {
        let error = failed.context(format!("measuring {peer:?}"));
        if matches!(peer, Peer::Tulle | Peer::TulleNoProfile | Peer::None) {
            return Err(error);
        }
        eprintln!("skipped in {remaining_rows:?}: {error:#}");
        n_skipped += n_measurements(remaining_rows, peer);
        Ok(())
    };
    let mut running = Vec::new();
    for (peer, testbed) in testbeds {
        if rows.iter().any(|row| row.applies_to(*peer)) {
            match start(testbed, *peer, &setup) {
                Ok(sidecars) => running.push(Some((*peer, testbed, sidecars))),
                Err(error) => skip_or_fail(*peer, rows, error)?,
            }
        }
    }
    for (n, row) in rows.iter().enumerate() {
        eprintln!("  {}", row.name());
        for slot in &mut running {
            let Some((peer, testbed, sidecars)) = slot.take_if(|(peer, ..)| row.applies_to(*peer)) else {
                continue;
            };
            match measurement::measure(*row, testbed, sidecars.as_ref(), duration) {
                Ok(sample) => {
                    results.add(*row, peer, sample);
                    *slot = Some((peer, testbed, sidecars));
                }
                Err(error) => skip_or_fail(peer, &rows[n..], error.context(format!("{row:?}")))?,
            }
        }
    }
    Ok(n_skipped)
}

/// The number of measurements of a peer in one repeat of these rows.
fn n_measurements(rows: &[Scenario], peer: Peer) -> u32 {
    rows.iter().map(|row| u32::from(row.applies_to(peer))).sum()
}

/// Starts the sidecars of one peer and verifies that traffic passes through them.
fn start(testbed: &Testbed, peer: Peer, setup: &Setup) -> anyhow::Result<Option<Sidecars>> {
    let host = if peer == Peer::None { SERVER_IP } else { SERVICE_IP };
    tcp_apps::run(setup.tcp_app, testbed, host).context("starting the application")?;
    let sidecars = peer.start(testbed, setup).context("starting")?;
    measurement::warm_up(testbed, sidecars.as_ref(), setup).context("warming up")?;
    peer.verify(testbed, setup).context("checking")?;
    Ok(sidecars)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_measurements_of_a_peer_are_the_rows_that_apply_to_it() {
        let rows = [Scenario::HttpC1, Scenario::OneWorker, Scenario::TwoWorkers];
        assert_eq!(n_measurements(&rows, Peer::Envoy), 3);
        assert_eq!(n_measurements(&rows, Peer::Nginx), 1);
        assert_eq!(n_measurements(&rows[1..], Peer::None), 0);
    }
}
