//! Counts the instructions and allocations per request with callgrind and compares them with the baseline.
//!
//! One client sends one request at a time, so that the counts are reproducible on any machine.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use super::budgets;
use super::callgrind::{self, Counts};
use super::generators;
use super::metric::Metric;
use super::rows::Scenario;
use super::setup::{Instrumentation, Setup};
use super::setup::{Peer, Side};
use super::sidecars::Sidecars;
use super::testbed::{self, SERVICE_IP, Testbed};
use super::{peer, tap, tools};

/// Arguments of `tulle-bench costs`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// File with the baseline costs.
    #[arg(long, value_name = "FILE", default_value = "bench/costs.json")]
    baseline: PathBuf,
    /// Write the measured costs to the baseline file instead of comparing; use it for a change whose extra cost is justified, or
    /// that reduces the cost. Only for the default row.
    #[arg(long)]
    write: bool,
    /// Also copy callgrind's files to this directory, as client.N and server.N, one for each repetition (N = 2, 4, …).
    /// "callgrind_annotate client.2" shows the calls.
    #[arg(long, value_name = "DIRECTORY")]
    dumps: Option<PathBuf>,
    /// The row whose configuration the sidecars get. The requests are always plain HTTP/1, one at a time; with `new-http`, each has
    /// a new connection. The baseline file holds the costs of `http-c1` only; other rows are compared with these, too, and the
    /// command fails if they cost more.
    #[arg(long, value_enum, default_value_t = CostRow::HttpC1)]
    row: CostRow,
    /// Measure the overhead of a tap of one in this many requests at both sidecars, instead of comparing with the baseline.
    #[arg(long, value_name = "REQUESTS", conflicts_with = "write", value_parser = clap::value_parser!(u32).range(1..))]
    tap_one_in: Option<u32>,
}

/// The rows whose sidecars or connections change the cost of one HTTP/1 request.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
enum CostRow {
    HttpC1,
    NewHttp,
    Routed,
    Rewritten,
    Profiled,
}

impl CostRow {
    fn scenario(self) -> Scenario {
        match self {
            Self::HttpC1 => Scenario::HttpC1,
            Self::NewHttp => Scenario::NewHttp,
            Self::Routed => Scenario::Routed,
            Self::Rewritten => Scenario::Rewritten,
            Self::Profiled => Scenario::Profiled,
        }
    }

    /// Fails unless the baseline file holds the costs of this row.
    fn ensure_baseline_has_row(self) -> anyhow::Result<()> {
        ensure!(
            self == Self::HttpC1,
            "the baseline holds the costs of {}, not of {}",
            Self::HttpC1.scenario().name(),
            self.scenario().name()
        );
        Ok(())
    }
}

/// Cost of one request in one sidecar.
#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
struct Cost {
    /// Instructions, without functions that have a variant for each processor type.
    instructions: f64,
    allocations: f64,
    /// Instructions of the most expensive functions, without their callees.
    functions: BTreeMap<String, f64>,
    /// Allocations by calling function, for functions with more than 0.05 per request.
    allocations_by_function: BTreeMap<String, f64>,
    /// Instructions of tap, tracing and access log code for requests that they do not record.
    #[serde(skip)]
    observability_instructions: f64,
    /// The number of requests that were tapped.
    #[serde(skip)]
    tapped_requests: f64,
}

#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
struct Costs {
    client: Cost,
    server: Cost,
}

/// Measures and prints the costs. Fails if a request costs more than in the baseline.
pub fn main(args: &Args) -> anyhow::Result<()> {
    if args.write {
        args.row.ensure_baseline_has_row().context("--write")?;
    }
    if let Some(one_in) = args.tap_one_in {
        return measure_tap_overhead(args, one_in);
    }
    let [costs] = measure(args, [UNTAPPED])?;
    if args.write {
        let json = serde_json::to_string_pretty(&costs).context("encoding the costs")? + "\n";
        return std::fs::write(&args.baseline, json).with_context(|| format!("writing {}", args.baseline.display()));
    }
    let json = std::fs::read(&args.baseline)
        .with_context(|| format!("reading {}; give its path with --baseline", args.baseline.display()))?;
    let before: Costs =
        serde_json::from_slice(&json).with_context(|| format!("reading {}", args.baseline.display()))?;
    let (mut text, mut regressions) = (String::new(), Vec::new());
    let limits = budgets::parse(budgets::COMMITTED_BUDGETS)?;
    let mut exceeded = Vec::new();
    for (side, before, now, metric) in [
        ("client", &before.client, &costs.client, Metric::ClientAllocations),
        ("server", &before.server, &costs.server, Metric::ServerAllocations),
    ] {
        let _ = writeln!(
            text,
            "the {side}'s sidecar: {:.0} instructions per request ({:+.1} %), {:.0} of them for taps, traces and access logs that are \
             off; {:.2} allocations ({:+.1} %)",
            now.instructions,
            percent(before.instructions, now.instructions),
            now.observability_instructions,
            now.allocations,
            percent(before.allocations, now.allocations)
        );
        if now.observability_instructions > MAX_OBSERVABILITY_INSTRUCTIONS {
            exceeded.push(format!(
                "in the {side}'s sidecar, taps, traces and access logs that are off take {:.0} instructions per request; the \
                 limit is {MAX_OBSERVABILITY_INSTRUCTIONS:.0}",
                now.observability_instructions
            ));
        }
        regressions.extend(describe_increase(before, now).map(|why| format!("in the {side}'s sidecar {why}")));
        // The budget of allocations applies regardless of the baseline. The value is rounded to a tenth, because it includes
        // background allocations, spread over the requests.
        let budgets: Vec<_> = limits.iter().filter(|budget| budget.metric == metric).collect();
        ensure!(
            !budgets.is_empty(),
            "bench/budgets.toml has no budget for the {side}'s allocations"
        );
        for budget in budgets {
            if !budget.holds((now.allocations * 10.0).round() / 10.0, None) {
                exceeded.push(format!(
                    "in the {side}'s sidecar a request makes {:.1} allocations; bench/budgets.toml says {}",
                    now.allocations, budget.text
                ));
            }
        }
    }
    tools::print(&text)?;
    ensure!(exceeded.is_empty(), "{}", [exceeded, regressions].concat().join("\n"));
    let hint = match args.row.ensure_baseline_has_row() {
        Ok(()) => "if the increase is justified, store it with \"./run with tulle-bench costs --write\"".to_owned(),
        Err(difference) => difference.to_string(),
    };
    ensure!(regressions.is_empty(), "{}\n{hint}", regressions.join("\n"));
    Ok(())
}

/// Measures the overhead of a tap of one in `one_in` requests, averaged over all requests. Prints it, and fails if it exceeds the
/// limit. Sampling is random, so the overhead is scaled to exactly one in `one_in`.
fn measure_tap_overhead(args: &Args, one_in: u32) -> anyhow::Result<()> {
    let requests = MEASURED_REQUESTS.max(one_in.saturating_mul(TARGET_TAPPED_REQUESTS));
    let tapped = MeasuredRequests {
        n: requests,
        tap_one_in: Some(one_in),
    };
    let [before, with, after] = measure(args, [UNTAPPED, tapped, UNTAPPED])?;
    let (mut text, mut exceeded) = (String::new(), Vec::new());
    for (side, before, with, after) in [
        ("client", &before.client, &with.client, &after.client),
        ("server", &before.server, &with.server, &after.server),
    ] {
        let without = f64::midpoint(before.instructions, after.instructions);
        let expected_tapped_requests = f64::from(requests) / f64::from(one_in);
        let scaled = (with.instructions - without) * expected_tapped_requests / with.tapped_requests;
        let overhead = percent(without, without + scaled);
        let _ = writeln!(
            text,
            "the {side}'s sidecar: {:.0} instructions per request before the tap and {:.0} after it; {overhead:+.1} % more with a \
             tap of one in {one_in}",
            before.instructions, after.instructions
        );
        let limit = max_tap_overhead(one_in) * 100.0;
        if overhead >= limit {
            exceeded.push(format!(
                "in the {side}'s sidecar a tap of one in {one_in} costs {overhead:.1} %; the limit is {limit:.0} %"
            ));
        }
    }
    tools::print(&text)?;
    ensure!(exceeded.is_empty(), "{}", exceeded.join("\n"));
    Ok(())
}

/// Maximum relative overhead per request. A tap of more than one in a hundred requests may cost more, in proportion.
fn max_tap_overhead(one_in: u32) -> f64 {
    MAX_OVERHEAD_OF_TAP_ONE_IN_100 * f64::max(100.0 / f64::from(one_in), 1.0)
}

/// Relative change in percent.
fn percent(before: f64, now: f64) -> f64 {
    (now / before - 1.0) * 100.0
}

/// Describes the increase of a cost and the functions that cause it. Returns `None` without a regression.
fn describe_increase(before: &Cost, now: &Cost) -> Option<String> {
    let totals = [
        ("instructions", before.instructions, now.instructions),
        ("allocations", before.allocations, now.allocations),
    ];
    let is_regression = |(_, before, now): &(&str, f64, f64)| *now > before * (1.0 + MAX_RELATIVE_INCREASE);
    let increases: Vec<_> = totals
        .into_iter()
        .filter(is_regression)
        .map(|(unit, before, now)| format!("a request costs {now:.1} {unit}, before {before:.1}"))
        .collect();
    if increases.is_empty() {
        return None;
    }
    let functions = [
        list_increases("instructions", &before.functions, &now.functions),
        list_increases(
            "allocations",
            &before.allocations_by_function,
            &now.allocations_by_function,
        ),
    ];
    Some(increases.join(", ") + &functions.concat())
}

/// Lists the functions with the largest increase, one line each. `unit` is what was counted: instructions or allocations.
fn list_increases(unit: &str, before: &BTreeMap<String, f64>, now: &BTreeMap<String, f64>) -> String {
    let more = |(name, now): (&String, &f64)| {
        let before = before.get(name).copied().unwrap_or_default();
        (now - before, format!("\n  {name}: {now:.1} {unit}, before {before:.1}"))
    };
    let mut functions: Vec<(f64, String)> = now.iter().map(more).collect();
    functions.sort_by(|a, b| b.0.total_cmp(&a.0));
    let increased = functions
        .into_iter()
        .take(MAX_LISTED_FUNCTIONS)
        .filter(|(more, _)| *more > 0.0);
    increased.map(|(_, line)| line).collect()
}

/// The requests of one measurement.
#[derive(Clone, Copy)]
struct MeasuredRequests {
    n: u32,
    /// A tap of one in this many requests runs meanwhile.
    tap_one_in: Option<u32>,
}

const UNTAPPED: MeasuredRequests = MeasuredRequests {
    n: MEASURED_REQUESTS,
    tap_one_in: None,
};

/// Measures the cost of each kind of requests in the same sidecars.
fn measure<const N: usize>(args: &Args, kinds: [MeasuredRequests; N]) -> anyhow::Result<[Costs; N]> {
    peer::prepare_run(&[Peer::Tulle], &["valgrind", "callgrind_control", "h2load"])?;
    let testbed = Testbed::build(&["--fixed-date"])?;
    let setup = Setup {
        instrumentation: Instrumentation::Callgrind,
        ..args.row.scenario().setup()
    };
    let sidecars = Peer::Tulle.start(&testbed, &setup).context("starting the sidecars")?;
    let sidecars = sidecars.context("there are no sidecars")?;
    // The warm-up opens connections, completes discovery, and lets buffers grow to their final size.
    let send_requests: SendRequests = match args.row {
        CostRow::NewHttp => generators::send_requests_on_new_connections,
        CostRow::HttpC1 | CostRow::Routed | CostRow::Rewritten | CostRow::Profiled => {
            generators::send_sequential_requests
        }
    };
    send_requests(&testbed, SERVICE_IP, WARM_UP_REQUESTS)?;
    let run = CostRun {
        testbed: &testbed,
        sidecars: &sidecars,
        send_requests,
    };
    let mut results = [const { None }; N];
    let mut measurements = 0..;
    for (result, requests) in results.iter_mut().zip(kinds) {
        let repeats = measurements
            .by_ref()
            .take(REPEATS)
            .map(|measurement| run.measure(measurement, requests))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let instructions = |costs: &Costs| costs.client.instructions + costs.server.instructions;
        *result = repeats
            .into_iter()
            .min_by(|a, b| f64::total_cmp(&instructions(a), &instructions(b)));
    }
    if let Some(dir) = args.dumps.as_deref() {
        std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        for measurement in 0..measurements.start {
            let [_, number] = dump_numbers(measurement);
            for (side, _) in sidecars.sides() {
                let from = callgrind::dump_path(&testbed, side).with_extension(number.to_string());
                let to = dir.join(side.name()).with_extension(number.to_string());
                std::fs::copy(&from, to).with_context(|| format!("copying {}", from.display()))?;
            }
        }
    }
    Ok(results.map(|costs| costs.expect("each has been measured")))
}

/// The numbers of callgrind's dumps before and after a measurement. Callgrind counts dumps from 1.
fn dump_numbers(measurement: u32) -> [u32; 2] {
    [2 * measurement + 1, 2 * measurement + 2]
}

/// Number of measurements of each cost. The measurement with the fewest instructions counts, because a TLS handshake can add
/// instructions to the others.
const REPEATS: usize = 4;

/// A function that sends a number of requests to a host, one at a time.
type SendRequests = fn(&Testbed, &str, u32) -> anyhow::Result<()>;

/// The running sidecars, and the function that sends requests through them.
struct CostRun<'a> {
    testbed: &'a Testbed,
    sidecars: &'a Sidecars,
    send_requests: SendRequests,
}

impl CostRun<'_> {
    /// Cost per request.
    fn measure(&self, measurement: u32, requests: MeasuredRequests) -> anyhow::Result<Costs> {
        let start_tap = |(side, _)| {
            requests
                .tap_one_in
                .map(|one_in| tap::start(self.testbed.namespace(side), one_in))
        };
        let taps: Vec<_> = self
            .sidecars
            .sides()
            .into_iter()
            .filter_map(start_tap)
            .collect::<Result<_, _>>()?;
        let [before, after] = dump_numbers(measurement);
        dump(self.testbed, self.sidecars, before)?;
        (self.send_requests)(self.testbed, SERVICE_IP, requests.n)?;
        let [mut client, mut server] =
            dump(self.testbed, self.sidecars, after)?.map(|counts| Cost::per_request(counts, requests.n));
        for (tap, cost) in taps.iter().zip([&mut client, &mut server]) {
            cost.tapped_requests = tap.events() as f64 / EVENTS_PER_REQUEST;
            ensure!(cost.tapped_requests > 0.0, "a tap received no event");
        }
        ensure!(
            client.observability_instructions > 0.0,
            "no instructions by source file: the binaries have no line tables"
        );
        Ok(Costs { client, server })
    }
}

/// The counts of both sidecars since the last dump.
fn dump(testbed: &Testbed, sidecars: &Sidecars, number: u32) -> anyhow::Result<[Counts; 2]> {
    let mut counts = [Counts::default(), Counts::default()];
    for (side, process) in sidecars.sides() {
        let at = match side {
            Side::Client => 0,
            Side::Server => 1,
        };
        let mut control = testbed::command_as_proxy_user(testbed.namespace(side), "callgrind_control");
        control.env_clear().env("PATH", "/usr/bin:/bin");
        counts[at] = callgrind::dump(control, process.id(), &callgrind::dump_path(testbed, side), number)?;
    }
    Ok(counts)
}

impl Cost {
    fn per_request(counts: Counts, requests: u32) -> Self {
        let per_request = |n: u64| n as f64 / f64::from(requests);
        let functions: BTreeMap<String, f64> = counts
            .functions
            .into_iter()
            .filter(|(name, _)| !CPU_SPECIFIC_FUNCTIONS.iter().any(|start| name.starts_with(start)))
            .map(|(name, n)| (name, per_request(n)))
            .collect();
        let instructions: f64 = functions.values().sum();
        let is_observability = |(file, _): &(&String, &u64)| OBSERVABILITY_PATHS.iter().any(|path| file.contains(path));
        let observability: u64 = counts.files.iter().filter(is_observability).map(|(_, n)| n).sum();
        let to_hundredths = |n: f64| (n * 100.0).round() / 100.0;
        let allocations: BTreeMap<String, f64> = counts
            .allocations
            .into_iter()
            .map(|(name, n)| (name, to_hundredths(per_request(n))))
            .collect();
        Self {
            instructions: instructions.round(),
            allocations: to_hundredths(allocations.values().sum()),
            allocations_by_function: allocations
                .into_iter()
                .filter(|(_, n)| *n > MIN_STORED_ALLOCATIONS)
                .collect(),
            functions: functions
                .into_iter()
                .filter(|(_, n)| *n > instructions * MIN_FUNCTION_SHARE)
                .map(|(name, n)| (name, n.round()))
                .collect(),
            observability_instructions: per_request(observability).round(),
            tapped_requests: 0.0,
        }
    }
}

const WARM_UP_REQUESTS: u32 = 200;
const MEASURED_REQUESTS: u32 = 500;
/// Approximate number of tapped requests. Sampling is random.
const TARGET_TAPPED_REQUESTS: u32 = 40;
/// The tap events of a request: its start, its response, and the end of the response.
const EVENTS_PER_REQUEST: f64 = 3.0;
/// Maximum relative increase of the cost of a request.
const MAX_RELATIVE_INCREASE: f64 = 0.02;
/// Functions with a smaller share of the instructions are not stored in the baseline.
const MIN_FUNCTION_SHARE: f64 = 0.001;
/// Functions with fewer allocations per request are not stored in the baseline.
const MIN_STORED_ALLOCATIONS: f64 = 0.05;
const MAX_OVERHEAD_OF_TAP_ONE_IN_100: f64 = 0.03;
/// Source paths of tap, tracing and the access log.
const OBSERVABILITY_PATHS: [&str; 3] = [
    "proxy/src/tap/",
    "proxy/src/trace/",
    "proxy/src/http/stack/access_log.rs",
];
/// Maximum instructions per request of the code of tap, tracing and the access log, if it does not record the request.
const MAX_OBSERVABILITY_INSTRUCTIONS: f64 = 20.0;
/// Maximum number of functions in a regression report.
const MAX_LISTED_FUNCTIONS: usize = 8;
/// Prefixes of functions of the C and the crypto library that have a variant for each processor type.
const CPU_SPECIFIC_FUNCTIONS: [&str; 4] = ["__mem", "__str", "aws_lc_", "__bcmp"];

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::super::setup::{SidecarPath, Traffic};
    use super::*;

    fn cost(instructions: f64, functions: &[(&str, f64)]) -> Cost {
        let functions = functions.iter().map(|(name, n)| ((*name).to_owned(), *n));
        Cost {
            instructions,
            allocations: 9.0,
            functions: functions.collect(),
            allocations_by_function: [("a".to_owned(), 9.0)].into(),
            observability_instructions: 4.0,
            tapped_requests: 0.0,
        }
    }

    #[test]
    fn each_row_has_its_name_in_the_benchmark_and_both_sidecars_for_http1() {
        for row in CostRow::value_variants() {
            assert_eq!(row.to_possible_value().unwrap().get_name(), row.scenario().name());
            let setup = row.scenario().setup();
            assert_eq!(
                (setup.traffic, setup.path, setup.throttle),
                (Traffic::Http1, SidecarPath::Both, None),
                "{row:?}"
            );
        }
    }

    #[test]
    fn the_baseline_is_written_for_the_default_row_only() {
        for row in CostRow::value_variants() {
            assert_eq!(
                row.ensure_baseline_has_row().is_ok(),
                *row == CostRow::HttpC1,
                "{row:?}"
            );
        }
    }

    #[test]
    fn the_limit_of_a_tap_grows_with_the_number_of_tapped_requests() {
        let limits = [1000, 100, 50, 1].map(|one_in| (max_tap_overhead(one_in) * 100.0).round());
        assert_eq!(limits, [3.0, 3.0, 6.0, 300.0]);
    }

    #[test]
    fn functions_with_higher_costs_are_listed() {
        let before = cost(1000.0, &[("a", 600.0), ("b", 300.0)]);
        assert_eq!(describe_increase(&before, &cost(1020.0, &[("a", 620.0)])), None);
        let why = describe_increase(&before, &cost(1030.0, &[("a", 580.0), ("b", 300.0), ("c", 50.0)])).unwrap();
        assert_eq!(
            why,
            "a request costs 1030.0 instructions, before 1000.0\n  c: 50.0 instructions, before 0.0"
        );
        let more = Cost {
            allocations: 9.3,
            allocations_by_function: [("a".to_owned(), 8.8), ("b".to_owned(), 0.5)].into(),
            ..cost(1000.0, &[])
        };
        assert_eq!(
            describe_increase(&before, &more).unwrap(),
            "a request costs 9.3 allocations, before 9.0\n  b: 0.5 allocations, before 0.0"
        );
    }

    #[test]
    fn instructions_that_depend_on_the_processor_do_not_count() {
        let counts = Counts {
            functions: [("a", 5000), ("__memmove_avx_unaligned", 9000), ("aws_lc_0_aes", 9000)]
                .map(|(name, n)| (name.to_owned(), n))
                .into(),
            files: [("/x/proxy/src/tap/mod.rs", 1500), ("/x/proxy/src/http/server.rs", 3500)]
                .map(|(path, n)| (path.to_owned(), n))
                .into(),
            allocations: [("a", 4550), ("b", 50)].map(|(name, n)| (name.to_owned(), n)).into(),
        };
        let cost = Cost::per_request(counts, MEASURED_REQUESTS);
        assert_eq!(
            (cost.instructions, cost.allocations, cost.observability_instructions),
            (10.0, 9.2, 3.0)
        );
        assert_eq!(
            cost.allocations_by_function,
            [("a".to_owned(), 9.1), ("b".to_owned(), 0.1)].into()
        );
    }
}
