//! The reference scenario: two sidecars with mutual TLS between a client and a server, in namespaces of one machine.
//!
//! Peers take turns within each repeat and group of rows, so that whatever else the machine does hits all of them; medians are
//! reported. Each group gets fresh sidecars.
//! The client, both sidecars and the application share the machine's cores: trust the ratios, not the absolutes.

mod bounds;
mod callgrind;
mod certs;
mod conformance;
pub mod costs;
mod document;
mod drive;
mod generators;
mod others;
mod peer;
mod plot;
pub mod process;
mod report;
mod rows;
mod scene;
mod slow;
mod throttle;
mod tools;
mod tulle;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum as _;

use self::peer::Peer;
use self::report::{Report, Results};
use self::rows::Row;
use self::scene::Scene;

/// Renders what `run --json` wrote.
#[derive(clap::Args, Clone, Debug)]
pub struct DocumentArgs {
    /// What "tulle-bench run --json" wrote.
    json: PathBuf,
    /// Where benchmarks.md and its plots go.
    #[arg(long, value_name = "DIRECTORY", default_value = "docs")]
    to: PathBuf,
}

/// Whom to try the table of HTTP/1 with.
#[derive(clap::Args, Clone, Debug)]
pub struct ConformanceArgs {
    /// Which sidecars to try, with commas between them.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Peer::Tulle, Peer::Haproxy, Peer::Nginx, Peer::Envoy])]
    peers: Vec<Peer>,
    /// Where the document goes; default: standard output.
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
}

/// Tries the table with each peer, and writes what came of it.
pub fn conformance(args: &ConformanceArgs) -> anyhow::Result<()> {
    let text = conformance::document(&args.peers)?;
    match &args.to {
        Some(path) => std::fs::write(path, text).with_context(|| format!("writing {}", path.display())),
        None => tools::print(&text),
    }
}

/// Writes the document and its plots.
pub fn document(args: &DocumentArgs) -> anyhow::Result<()> {
    document::write(&Report::read(&args.json)?, &args.to)
}

/// What to compare, and for how long.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Which sidecars to measure, with commas between them.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Peer::value_variants().to_vec())]
    peers: Vec<Peer>,
    /// Which rows to measure, with commas between them.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Row::value_variants().to_vec())]
    rows: Vec<Row>,
    /// How often each row is measured for each peer.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    repeats: u16,
    /// How long each measurement takes, in whole seconds.
    #[arg(long, default_value = "4s", value_parser = tulle_core::duration::parse)]
    duration: Duration,
    /// Also write everything measured to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures, prints the table, writes the JSON, and fails when a bound is broken.
pub fn main(args: &Args) -> anyhow::Result<()> {
    tools::raise_descriptor_limit()?;
    let scene = Scene::build(&args.peers, &["wrk", "ghz", "h2load"])?;
    let mut results = Results::new(tools::versions(&args.peers)?);
    let mut left_out = 0;
    for repeat in 1..=args.repeats {
        for group in rows::groups(&args.rows) {
            for peer in &args.peers {
                eprintln!("repeat {repeat} of {}: {peer:?} {group:?}", args.repeats);
                let measured = measure(&scene, *peer, &group, args.duration, &mut results)
                    .with_context(|| format!("measuring {group:?} of {peer:?}"));
                match measured {
                    // Another that serves nothing any more has no figure, and costs no others theirs.
                    Err(error) if !matches!(peer, Peer::Tulle | Peer::None) => {
                        eprintln!("left out: {error:#}");
                        left_out += 1;
                    }
                    measured => measured?,
                }
            }
        }
        // Also after each repeat: a long run that fails at its end has not been for nothing.
        if let Some(path) = &args.json {
            results.report(bounds::COMMITTED)?.write(path)?;
        }
    }
    let report = results.report(bounds::COMMITTED)?;
    tools::print(&report.to_string())?;
    anyhow::ensure!(
        left_out == 0,
        "{left_out} times another served nothing and was left out"
    );
    anyhow::ensure!(report.passed(), "a bound of budgets.toml is broken");
    Ok(())
}

/// Starts the sidecars of one peer, and measures one row after the other.
fn measure(scene: &Scene, peer: Peer, rows: &[Row], duration: Duration, results: &mut Results) -> anyhow::Result<()> {
    let rows: Vec<Row> = rows.iter().copied().filter(|row| row.applies_to(peer)).collect();
    let Some(setup) = rows.first().map(|row| row.setup()) else {
        return Ok(());
    };
    if setup.throttle.is_some() && !throttle::available() {
        eprintln!("left out: only the cpu controller of cgroup v1 can hold single threads to a share of a core");
        return Ok(());
    }
    let sidecars = peer.start(scene, &setup).context("starting")?;
    drive::warm_up(scene, sidecars.as_ref(), &setup).context("warming up")?;
    peer.verify(scene, &setup).context("checking")?;
    for row in rows {
        let sample = drive::measure(row, scene, sidecars.as_ref(), duration);
        results.add(row, peer, sample.with_context(|| format!("measuring {row:?}"))?);
    }
    Ok(())
}
