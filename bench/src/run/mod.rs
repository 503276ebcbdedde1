//! The reference scenario: two sidecars with mutual TLS between a client and a server, in namespaces of one machine.
//!
//! Each peer has such a stage of its own. Rows that need the same sidecars share a start of them, and peers take turns with
//! each row, so that whatever else the machine does hits all of them; medians are reported.
//! The client, both sidecars and the application share the machine's cores: trust the ratios, not the absolutes.

mod bounds;
mod callgrind;
mod certs;
mod conformance;
pub mod costs;
mod document;
mod drive;
mod generators;
mod hostile;
mod others;
mod peer;
mod plot;
pub mod process;
mod report;
mod rows;
mod scene;
mod slow;
mod tap;
mod throttle;
mod tools;
mod tulle;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum as _;

use self::peer::{Peer, Sidecars};
use self::report::{Report, Results};
use self::rows::{Row, Setup};
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
    /// Succeed whatever the figures are, if only all could be measured.
    #[arg(long)]
    unbounded: bool,
}

/// Measures, prints the table, writes the JSON, and fails when a bound is broken.
pub fn main(args: &Args) -> anyhow::Result<()> {
    tools::raise_descriptor_limit()?;
    scene::prepare(&args.peers, &["wrk", "ghz", "h2load"])?;
    let stages = args.peers.iter().map(|peer| Ok((*peer, Scene::build()?)));
    let mut stages = stages.collect::<anyhow::Result<Vec<_>>>()?;
    let mut results = Results::new(tools::versions(&args.peers)?);
    let mut left_out = 0;
    for repeat in 1..=args.repeats {
        for group in rows::groups(&args.rows) {
            eprintln!("repeat {repeat} of {}: {group:?}", args.repeats);
            left_out += measure(&stages, &group, args.duration, &mut results)?;
        }
        // Whatever it means to be the first or the last, each is.
        stages.rotate_left(1);
        // Also after each repeat: a long run that fails at its end has not been for nothing.
        if let Some(path) = &args.json {
            results.report(bounds::COMMITTED)?.write(path)?;
        }
    }
    let report = results.report(bounds::COMMITTED)?;
    tools::print(&report.to_string())?;
    anyhow::ensure!(
        left_out == 0,
        "{left_out} measurements were left out; what was said meanwhile has the reasons"
    );
    anyhow::ensure!(args.unbounded || report.passed(), "a bound of budgets.toml is broken");
    Ok(())
}

/// Starts the sidecars of all peers, and measures one row after the other. Says how many were left out on the way: another
/// that serves nothing any more has no figure, and costs no others theirs; nor has what this machine has not the means for.
fn measure(stages: &[(Peer, Scene)], rows: &[Row], duration: Duration, results: &mut Results) -> anyhow::Result<u32> {
    let Some(setup) = rows.first().map(|row| row.setup()) else {
        return Ok(0);
    };
    if setup.throttle.is_some() && !throttle::available() {
        eprintln!("left out: only the cpu controller of cgroup v1 can hold single threads to a share of a core");
        return Ok(1);
    }
    let mut left_out = 0;
    let mut unless_left_out = |peer: Peer, failed: anyhow::Error| {
        let error = failed.context(format!("measuring {rows:?} of {peer:?}"));
        if matches!(peer, Peer::Tulle | Peer::TulleNoProfile | Peer::None) {
            return Err(error);
        }
        eprintln!("left out: {error:#}");
        left_out += 1;
        Ok(())
    };
    let mut running = Vec::new();
    for (peer, scene) in stages {
        if rows.iter().any(|row| row.applies_to(*peer)) {
            match start(scene, *peer, &setup) {
                Ok(sidecars) => running.push(Some((*peer, scene, sidecars))),
                Err(error) => unless_left_out(*peer, error)?,
            }
        }
    }
    for row in rows {
        eprintln!("  {}", row.name());
        for place in &mut running {
            let Some((peer, scene, sidecars)) = place.take_if(|(peer, ..)| row.applies_to(*peer)) else {
                continue;
            };
            match drive::measure(*row, scene, sidecars.as_ref(), duration) {
                Ok(sample) => {
                    results.add(*row, peer, sample);
                    *place = Some((peer, scene, sidecars));
                }
                Err(error) => unless_left_out(peer, error.context(format!("measuring {row:?}")))?,
            }
        }
    }
    Ok(left_out)
}

/// Starts the sidecars of one peer, and sees that traffic takes their way.
fn start(scene: &Scene, peer: Peer, setup: &Setup) -> anyhow::Result<Option<Sidecars>> {
    let sidecars = peer.start(scene, setup).context("starting")?;
    drive::warm_up(scene, sidecars.as_ref(), setup).context("warming up")?;
    peer.verify(scene, setup).context("checking")?;
    Ok(sidecars)
}
