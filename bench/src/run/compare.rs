//! Compares builds of the proxy under many kinds of load, such as builds with and without an optimization.
//!
//! Each build has its own testbed, and all are measured in turn in each cell, so that other load on the machine affects them alike.
//! A result is the ratio of another build to the first, over pairs of the same repeat.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::Serialize;

use super::drive;
use super::generators::{self, Http1};
use super::metric::{Metric, Sample};
use super::scene::{SERVICE, Testbed};
use super::setup::{Peer, Setup};
use super::sidecars::Sidecars;
use super::{peer, rows::Row, tools, tulle};

/// Arguments of `tulle-bench compare-builds`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Names of proxy programs in the directory of this program. The others are compared with the first one.
    #[arg(required = true, num_args = 2.., value_name = "PROGRAM")]
    builds: Vec<String>,
    /// Measurements of each cell and build.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Duration of each measurement.
    #[arg(long, default_value = "2s", value_parser = tulle_core::duration::parse)]
    duration: Duration,
    /// Numbers of worker threads of a sidecar.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    workers: Vec<u16>,
    /// Numbers of connections.
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256")]
    connections: Vec<u32>,
    /// Write the table as Markdown to this file.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

/// One kind of load.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
struct Cell {
    workers: u16,
    reconnect: bool,
    connections: u32,
    arrivals: Arrivals,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
enum Arrivals {
    /// Each connection sends as soon as it has its response.
    ClosedLoop,
    /// Each connection pauses for a random time after a response.
    ThinkTime,
    /// An open loop with random intervals.
    Poisson,
    /// An open loop with 50 requests at once.
    Bursts,
}

const ARRIVALS: [Arrivals; 4] = [
    Arrivals::ClosedLoop,
    Arrivals::ThinkTime,
    Arrivals::Poisson,
    Arrivals::Bursts,
];

type Figure = fn(&Sample) -> f64;

/// The figures that are compared, in the order of the columns: p50, p99 and CPU time. Less is better.
const FIGURES: [Figure; 3] = [
    |sample| sample[&Metric::P50Us],
    |sample| sample[&Metric::P99Us],
    |sample| sample[&Metric::ClientCpuUs] + sample[&Metric::ServerCpuUs],
];

/// The fraction of the capacity that all loads other than a closed loop use.
const LOAD: f64 = 0.5;
/// A ratio that counts as a difference.
const DIFFERENCE: f64 = 1.03;

/// Samples by cell and build, in the order of the repeats.
type Samples = BTreeMap<Cell, Vec<Vec<Sample>>>;

/// Measures all cells and prints the table.
pub fn main(args: &Args) -> anyhow::Result<()> {
    tools::raise_descriptor_limit()?;
    peer::check_requirements(&[Peer::Tulle], &["wrk"])?;
    args.builds.iter().try_for_each(|build| tulle::check(build))?;
    let testbeds = args.builds.iter().map(|_| Testbed::build(&[]));
    let testbeds = testbeds.collect::<anyhow::Result<Vec<_>>>()?;
    let mut samples = Samples::new();
    for workers in &args.workers {
        let setup = Setup {
            workers: *workers,
            exclusive: true,
            ..Row::HttpC64.setup()
        };
        let started = testbeds
            .iter()
            .zip(&args.builds)
            .map(|(scene, build)| {
                let sidecars = tulle::start(scene, &setup, build)?;
                drive::warm_up(scene, Some(&sidecars), &setup)?;
                Ok((scene, sidecars))
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        measure_cells(args, *workers, &started, &mut samples)?;
    }
    let table = markdown(&args.builds, &samples);
    tools::print(&table)?;
    match &args.markdown {
        Some(path) => std::fs::write(path, table).with_context(|| format!("writing {}", path.display())),
        None => Ok(()),
    }
}

/// Measures all cells with this number of workers.
fn measure_cells(
    args: &Args,
    workers: u16,
    builds: &[(&Testbed, Sidecars)],
    samples: &mut Samples,
) -> anyhow::Result<()> {
    for repeat in 0..args.repeats {
        eprintln!("workers {workers}, repeat {} of {}", repeat + 1, args.repeats);
        for reconnect in [false, true] {
            for &connections in &args.connections {
                let (scene, _) = &builds[0];
                let closed = Http1 {
                    close: reconnect,
                    ..Http1::get(connections)
                };
                let capacity = generators::wrk(scene, SERVICE, closed, CALIBRATION)?;
                let rate = capacity.requests as f64 / capacity.seconds * LOAD;
                for arrivals in ARRIVALS {
                    let cell = Cell {
                        workers,
                        reconnect,
                        connections,
                        arrivals,
                    };
                    let of_builds = samples.entry(cell).or_insert_with(|| vec![Vec::new(); builds.len()]);
                    // Each build is first equally often.
                    for n in 0..builds.len() {
                        let build = (n + repeat) % builds.len();
                        let (scene, sidecars) = &builds[build];
                        let sample = drive::measure_load(Some(sidecars), || {
                            generators::load_with(scene, SERVICE, &cell.load_arguments(rate), args.duration)
                        })?;
                        ensure!(
                            sample[&Metric::Failed] == 0.0,
                            "{} requests of {cell:?} with {} failed",
                            sample[&Metric::Failed],
                            args.builds[build]
                        );
                        of_builds[build].push(sample);
                    }
                }
            }
        }
    }
    Ok(())
}

impl Cell {
    /// The arguments of `tulle-bench load`, with this rate for loads other than a closed loop.
    fn load_arguments(self, rate: f64) -> Vec<String> {
        let mut arguments = vec![format!("--connections={}", self.connections)];
        if self.reconnect {
            arguments.push("--reconnect".to_owned());
        }
        match self.arrivals {
            Arrivals::ClosedLoop => (),
            Arrivals::ThinkTime => {
                let pause = f64::from(self.connections) * 1e6 / rate;
                arguments.push(format!("--think-time={}us", pause.round() as u64));
            }
            Arrivals::Poisson => arguments.extend([format!("--rate={rate:.0}"), "--arrivals=poisson".to_owned()]),
            Arrivals::Bursts => arguments.extend([format!("--rate={rate:.0}"), "--arrivals=bursts".to_owned()]),
        }
        arguments
    }
}

/// One table for each build: the median of the ratios of each cell, with the lower and upper quartile.
fn markdown(builds: &[String], samples: &Samples) -> String {
    let mut out = String::new();
    for (n, build) in builds.iter().enumerate().skip(1) {
        let _ = writeln!(out, "### {build} relative to {}\n", builds[0]);
        let _ = writeln!(
            out,
            "| Load | Connections | Workers | p50 | p99 | CPU |\n|---|---|---|---|---|---|"
        );
        let (mut higher, mut lower) = (0, 0);
        for (cell, of_builds) in samples {
            let mut row = String::new();
            for figure in FIGURES {
                let pairs = of_builds[0].iter().zip(&of_builds[n]);
                let ratios = Quartiles::of(pairs.map(|(first, other)| figure(other) / figure(first)).collect());
                higher += u32::from(ratios.lower >= DIFFERENCE);
                lower += u32::from(ratios.upper <= 1.0 / DIFFERENCE);
                let mark = match () {
                    () if ratios.lower >= DIFFERENCE => "**",
                    () if ratios.upper <= 1.0 / DIFFERENCE => "_",
                    () => "",
                };
                let _ = write!(
                    row,
                    " {mark}{:.2}{mark} ({:.2} to {:.2}) |",
                    ratios.median, ratios.lower, ratios.upper
                );
            }
            let connection = if cell.reconnect {
                "new connection"
            } else {
                "kept connection"
            };
            let _ = writeln!(
                out,
                "| {}, {connection} | {} | {} |{row}",
                cell.arrivals.name(),
                cell.connections,
                cell.workers
            );
        }
        let _ = writeln!(
            out,
            "\n{higher} figures are at least 3 % higher (bold), {lower} at least 3 % lower (italic), by their quartiles.\n"
        );
    }
    out
}

impl Arrivals {
    fn name(self) -> &'static str {
        match self {
            Self::ClosedLoop => "closed loop",
            Self::ThinkTime => "think time",
            Self::Poisson => "Poisson",
            Self::Bursts => "bursts of 50",
        }
    }
}

#[derive(Debug, PartialEq)]
struct Quartiles {
    lower: f64,
    median: f64,
    upper: f64,
}

impl Quartiles {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |fraction: f64| {
            let position = (values.len() - 1) as f64 * fraction;
            let (below, above) = (values[position.floor() as usize], values[position.ceil() as usize]);
            below + (above - below) * position.fract()
        };
        Self {
            lower: at(0.25),
            median: at(0.5),
            upper: at(0.75),
        }
    }
}

/// How long the capacity is measured.
const CALIBRATION: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_interpolated() {
        let quartiles = Quartiles::of(vec![4.0, 1.0, 2.0, 3.0]);
        assert_eq!((quartiles.lower, quartiles.median, quartiles.upper), (1.75, 2.5, 3.25));
        assert_eq!(Quartiles::of(vec![7.0]).median, 7.0);
    }
}
