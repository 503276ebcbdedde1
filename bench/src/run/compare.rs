//! Compares builds of the proxy, such as two versions, or builds with and without an optimization.
//!
//! Each build has its own testbed. The builds are measured in turn with each load, so that other load on the machine affects all
//! of them alike.
//! In each repeat, the value of each metric is divided by the value of the first build. The result is the median of these ratios.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum as _;

use super::generators::{self, WrkLoad};
use super::measurement;
use super::metric::{Metric, Sample};
use super::rows::{self, Scenario};
use super::setup::{Peer, Setup};
use super::sidecars::Sidecars;
use super::testbed::{SERVICE_IP, Testbed};
use super::{peer, tcp_apps, throttle, tools, tulle};

/// Arguments of `tulle-bench compare-builds`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Names of proxy programs in the directory of this program. Each further one is compared with the first.
    #[arg(required = true, num_args = 2.., value_name = "PROGRAM")]
    builds: Vec<String>,
    /// Rows of the benchmark to measure, separated by commas; only rows with latencies and the CPU time of both sidecars.
    /// Default: HTTP/1 with many kinds of arrivals.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with_all = ["workers", "connections"])]
    rows: Vec<Scenario>,
    /// Measurements of each load and build.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    repeats: u16,
    /// Duration of each measurement, in whole seconds.
    #[arg(long, default_value = "2s", value_parser = generators::parse_whole_seconds)]
    duration: Duration,
    /// Numbers of worker threads of a sidecar.
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_parser = clap::value_parser!(u16).range(1..))]
    workers: Vec<u16>,
    /// Numbers of connections.
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256", value_parser = clap::value_parser!(u32).range(1..))]
    connections: Vec<u32>,
    /// Write the table as Markdown to this file.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

/// A load with which each build is measured.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Load {
    Scenario(Scenario),
    Http1(Http1Load),
}

/// HTTP/1 with one kind of arrivals.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Http1Load {
    workers: u16,
    reconnect: bool,
    connections: u32,
    arrivals: Arrivals,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
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

type MetricOfSample = fn(&Sample) -> f64;

/// The compared metrics, in the order of the columns: p50, p99 and CPU time. Less is better.
const COMPARED_METRICS: [MetricOfSample; 3] = [
    |sample| sample[&Metric::P50Us],
    |sample| sample[&Metric::P99Us],
    |sample| sample[&Metric::ClientCpuUs] + sample[&Metric::ServerCpuUs],
];

/// The rate of an open loop, as a fraction of the rate of a closed loop.
///
/// With think time, the mean pause of a connection is the interval between its requests at this rate. The response time is added to
/// the pause, so the measured rate is a third to a half of the rate of a closed loop.
const RATE_FRACTION: f64 = 0.5;
/// The median of some ratios is marked if their lower quartile is at least this value, or if their upper quartile is at most the
/// inverse of this value.
const MIN_NOTABLE_RATIO: f64 = 1.03;

/// Samples by load and build, in the order of the repeats.
type Samples = BTreeMap<Load, Vec<Vec<Sample>>>;

/// The testbed and the sidecars of each build.
type RunningBuilds<'a> = Vec<(&'a Testbed, Sidecars)>;

/// Measures all loads and prints the table.
pub fn main(args: &Args) -> anyhow::Result<()> {
    check_rows(&args.rows)?;
    if let Some(row) = args.rows.iter().find(|row| row.setup().throttle.is_some()) {
        throttle::check().with_context(|| format!("--rows {}", row.name()))?;
    }
    tools::raise_descriptor_limit()?;
    peer::prepare_run(&[Peer::Tulle], &["wrk"])?;
    args.builds.iter().try_for_each(|build| tulle::check(build))?;
    let testbeds = args.builds.iter().map(|_| Testbed::build(&[]));
    let testbeds = testbeds.collect::<anyhow::Result<Vec<_>>>()?;
    let mut samples = Samples::new();
    if args.rows.is_empty() {
        for &workers in &args.workers {
            let setup = Setup {
                workers,
                ..Scenario::HttpC64.setup()
            };
            let running = start(args, &testbeds, &setup)?;
            measure_http1_loads(args, workers, &running, &mut samples)?;
        }
    }
    for rows in rows::group_by_setup(&args.rows) {
        let running = start(args, &testbeds, &rows[0].setup())?;
        for repeat in 0..args.repeats {
            eprintln!("{rows:?}, repeat {} of {}", repeat + 1, args.repeats);
            for &row in &rows {
                let row_samples = samples_by_build(&mut samples, Load::Scenario(row), running.len());
                measure_in_turn(args, repeat, &running, row_samples, |testbed, sidecars| {
                    measurement::measure(row, testbed, Some(sidecars), args.duration)
                })
                .with_context(|| format!("measuring {row:?}"))?;
            }
        }
    }
    let table = markdown(&args.builds, &samples);
    tools::print(&table)?;
    match &args.markdown {
        Some(path) => std::fs::write(path, table).with_context(|| format!("writing {}", path.display())),
        None => Ok(()),
    }
}

/// Fails if a row has no value for one of the [`COMPARED_METRICS`], or if it measures another build.
fn check_rows(rows: &[Scenario]) -> anyhow::Result<()> {
    for row in rows {
        if let Some(reason) = incomparable_reason(*row) {
            let usable = Scenario::value_variants()
                .iter()
                .filter(|row| incomparable_reason(**row).is_none())
                .map(|row| row.name());
            bail!(
                "--rows {}: {reason}; expected some of {}",
                row.name(),
                usable.collect::<Vec<_>>().join(", ")
            );
        }
    }
    Ok(())
}

/// The reason why builds cannot be compared by a row. `None` if they can be compared.
fn incomparable_reason(row: Scenario) -> Option<&'static str> {
    match row {
        Scenario::Idle | Scenario::IdleOpaque => Some("this row measures memory only"),
        Scenario::SlowHeads | Scenario::Hostile => Some("this row does not measure CPU time"),
        Scenario::OutboundOnly | Scenario::InboundOnly => {
            Some("this row has one sidecar, and the CPU time of both sidecars is compared")
        }
        Scenario::Allocations => Some("this row measures the build whose allocator counts, not the compared builds"),
        Scenario::HttpC1
        | Scenario::HttpC16
        | Scenario::HttpC64
        | Scenario::Post1Kib
        | Scenario::Post32Kib
        | Scenario::NewHttp
        | Scenario::Post1Mib
        | Scenario::Http2
        | Scenario::Grpc
        | Scenario::GrpcStream
        | Scenario::Bulk
        | Scenario::SmallOpaque
        | Scenario::NewMtls
        | Scenario::Pgbench
        | Scenario::PgbenchConnect
        | Scenario::RedisC1
        | Scenario::RedisC50
        | Scenario::RedisPipelined
        | Scenario::Kafka
        | Scenario::Nats
        | Scenario::HttpC64Baseline
        | Scenario::Routed
        | Scenario::Rewritten
        | Scenario::Profiled
        | Scenario::Tproxy
        | Scenario::TproxyNewMtls
        | Scenario::OneWorker
        | Scenario::TwoWorkers => None,
    }
}

/// Starts the sidecars of all builds.
fn start<'a>(args: &Args, testbeds: &'a [Testbed], setup: &Setup) -> anyhow::Result<RunningBuilds<'a>> {
    testbeds
        .iter()
        .zip(&args.builds)
        .map(|(testbed, build)| {
            tcp_apps::run(setup.tcp_app, testbed, SERVICE_IP)?;
            let sidecars = tulle::start(testbed, setup, build)?;
            measurement::warm_up(testbed, Some(&sidecars), setup)?;
            tulle::verify(testbed, setup.path)?;
            Ok((testbed, sidecars))
        })
        .collect()
}

/// Measures all HTTP/1 loads with this number of workers.
fn measure_http1_loads(
    args: &Args,
    workers: u16,
    running: &RunningBuilds<'_>,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    for repeat in 0..args.repeats {
        eprintln!("workers {workers}, repeat {} of {}", repeat + 1, args.repeats);
        for reconnect in [false, true] {
            for &connections in &args.connections {
                let (testbed, _) = &running[0];
                let closed_loop = WrkLoad {
                    reconnect,
                    ..WrkLoad::get_requests(connections)
                };
                let capacity = generators::wrk(testbed, SERVICE_IP, closed_loop, CALIBRATION_DURATION)?;
                let rate = capacity.requests as f64 / capacity.seconds * RATE_FRACTION;
                for arrivals in ARRIVALS {
                    let load = Http1Load {
                        workers,
                        reconnect,
                        connections,
                        arrivals,
                    };
                    let load_samples = samples_by_build(samples, Load::Http1(load), running.len());
                    measure_in_turn(args, repeat, running, load_samples, |testbed, sidecars| {
                        measurement::measure_load(Some(sidecars), || {
                            generators::bench_load_http1(testbed, SERVICE_IP, &load.load_arguments(rate), args.duration)
                        })
                    })
                    .with_context(|| format!("measuring {load:?}"))?;
                }
            }
        }
    }
    Ok(())
}

/// The samples of one load so far, by build.
fn samples_by_build(samples: &mut Samples, load: Load, n_builds: usize) -> &mut [Vec<Sample>] {
    samples.entry(load).or_insert_with(|| vec![Vec::new(); n_builds])
}

/// Measures one load with each build. The builds take turns in being first.
fn measure_in_turn(
    args: &Args,
    repeat: u16,
    running: &RunningBuilds<'_>,
    samples_by_build: &mut [Vec<Sample>],
    measure: impl Fn(&Testbed, &Sidecars) -> anyhow::Result<Sample>,
) -> anyhow::Result<()> {
    for n in 0..running.len() {
        let build = (n + usize::from(repeat)) % running.len();
        let (testbed, sidecars) = &running[build];
        let sample = measure(testbed, sidecars)?;
        ensure!(
            sample[&Metric::Failed] == 0.0,
            "{} requests with {} failed",
            sample[&Metric::Failed],
            args.builds[build]
        );
        samples_by_build[build].push(sample);
    }
    Ok(())
}

impl Http1Load {
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

/// One table for each build: the median of the ratios of each load, with the lower and upper quartile.
fn markdown(builds: &[String], samples: &Samples) -> String {
    let mut out = String::new();
    for (n, build) in builds.iter().enumerate().skip(1) {
        let _ = writeln!(out, "### {build} relative to {}\n", builds[0]);
        let _ = writeln!(out, "| Load | p50 | p99 | CPU |\n|---|---|---|---|");
        let (mut higher, mut lower) = (0, 0);
        for (load, samples_by_build) in samples {
            let mut row = String::new();
            for metric in COMPARED_METRICS {
                let pairs = samples_by_build[0].iter().zip(&samples_by_build[n]);
                let ratios =
                    Quartiles::from_values(pairs.map(|(first, other)| metric(other) / metric(first)).collect());
                higher += u32::from(ratios.lower >= MIN_NOTABLE_RATIO);
                lower += u32::from(ratios.upper <= 1.0 / MIN_NOTABLE_RATIO);
                let mark = if ratios.lower >= MIN_NOTABLE_RATIO {
                    "**"
                } else if ratios.upper <= 1.0 / MIN_NOTABLE_RATIO {
                    "_"
                } else {
                    ""
                };
                let _ = write!(
                    row,
                    " {mark}{:.2}{mark} ({:.2} to {:.2}) |",
                    ratios.median, ratios.lower, ratios.upper
                );
            }
            let _ = writeln!(out, "| {} |{row}", load.name());
        }
        let _ = writeln!(
            out,
            "\n{higher} figures are higher (bold: even the lower quartile is at least {MIN_NOTABLE_RATIO}), {lower} are lower \
             (italic: even the upper quartile is at most 1/{MIN_NOTABLE_RATIO}).\n"
        );
    }
    out
}

impl Load {
    fn name(self) -> String {
        match self {
            Self::Scenario(row) => row.name(),
            Self::Http1(load) => format!(
                "{}, {}, {}",
                load.arrivals.name(),
                match (load.connections, load.reconnect) {
                    (1, false) => "1 connection".to_owned(),
                    (n, false) => format!("{n} connections"),
                    (n, true) => format!("{n} clients that reconnect"),
                },
                if load.workers == 1 {
                    "1 worker".to_owned()
                } else {
                    format!("{} workers", load.workers)
                }
            ),
        }
    }
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
    fn from_values(mut values: Vec<f64>) -> Self {
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

/// Duration of the closed loop that measures the capacity.
const CALIBRATION_DURATION: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_without_a_compared_metric_are_refused_with_the_usable_rows() {
        let refused = [
            Scenario::Idle,
            Scenario::IdleOpaque,
            Scenario::SlowHeads,
            Scenario::Hostile,
            Scenario::OutboundOnly,
            Scenario::InboundOnly,
            Scenario::Allocations,
        ];
        for row in refused {
            let error = check_rows(&[Scenario::HttpC64, row]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--rows {}: ", row.name())), "{error}");
            let (_, usable) = error.split_once("expected some of ").unwrap();
            let usable: Vec<&str> = usable.split(", ").collect();
            assert!(usable.contains(&"http-c64") && usable.contains(&"new-mtls"), "{error}");
            assert!(
                !refused.iter().any(|row| usable.contains(&row.name().as_str())),
                "{error}"
            );
        }
        let usable: Vec<Scenario> = Scenario::value_variants()
            .iter()
            .copied()
            .filter(|row| !refused.contains(row))
            .collect();
        check_rows(&usable).unwrap();
    }

    #[test]
    fn ratios_beyond_the_limit_are_marked_and_counted() {
        let sample = |p50: f64, p99: f64| {
            Sample::from([
                (Metric::P50Us, p50),
                (Metric::P99Us, p99),
                (Metric::ClientCpuUs, 1.0),
                (Metric::ServerCpuUs, 1.0),
            ])
        };
        let samples = Samples::from([(
            Load::Scenario(Scenario::HttpC1),
            vec![vec![sample(1.03, 1.0)], vec![sample(1.0, 1.03)]],
        )]);
        let text = markdown(&["one".to_owned(), "other".to_owned()], &samples);
        for part in [
            "| http-c1 | _0.97_ (0.97 to 0.97) | **1.03** (1.03 to 1.03) | 1.00 (1.00 to 1.00) |",
            "\n1 figures are higher (bold: even the lower quartile is at least 1.03), 1 are lower (italic: even the upper quartile is at most 1/1.03).",
        ] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }

    #[test]
    fn quartiles_are_interpolated() {
        let quartiles = Quartiles::from_values(vec![4.0, 1.0, 2.0, 3.0]);
        assert_eq!((quartiles.lower, quartiles.median, quartiles.upper), (1.75, 2.5, 3.25));
        assert_eq!(Quartiles::from_values(vec![7.0]).median, 7.0);
    }
}
