//! What a request costs in instructions and allocations, counted by callgrind, against what it cost before.
//!
//! One client asks for one page after the other, so that the same happens each time, on any machine.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use super::bounds;
use super::callgrind::{self, Counts};
use super::drive::Metric;
use super::generators;
use super::peer::{Peer, Side, Sidecars};
use super::rows::{Build, Row, Setup};
use super::scene::{self, SERVICE, Scene};
use super::{tap, tools};

/// What to compare with.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// What a request cost before.
    #[arg(long, value_name = "FILE", default_value = "bench/costs.json")]
    baseline: PathBuf,
    /// Write what it costs now into that file instead: for a change that is worth what it costs, or that saves something.
    #[arg(long)]
    write: bool,
    /// Also copy what callgrind wrote into this directory: "callgrind_annotate client.2" shows who calls what, and
    /// client.4 is the second measurement of the same.
    #[arg(long, value_name = "DIRECTORY")]
    dumps: Option<PathBuf>,
    /// By which rules requests go, and whether each has a connection of its own, as in "new-http"; the baseline is of those
    /// without any, on one connection.
    #[arg(long, value_name = "ROW", default_value = "http-c1")]
    row: Row,
    /// Compare with what it costs while somebody taps one of so many requests at both sidecars, instead of with the
    /// baseline.
    #[arg(long, value_name = "REQUESTS")]
    tap_one_in: Option<u32>,
}

/// What one request costs in one sidecar.
#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
struct Cost {
    /// Without those whose number depends on the processor.
    instructions: f64,
    allocations: f64,
    /// Instructions of the functions that have the most, without those they call.
    functions: BTreeMap<String, f64>,
    /// Allocations by the function that asks for them, of those that do so in more than a few requests.
    allocating: BTreeMap<String, f64>,
    /// Instructions of what shows requests to somebody, where nobody wants to see them.
    #[serde(skip)]
    unwatched: f64,
    /// How many were shown to somebody.
    #[serde(skip)]
    shown: f64,
}

#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
struct Costs {
    client: Cost,
    server: Cost,
}

/// Measures, prints, and fails when a request costs more than it did.
pub fn main(args: &Args) -> anyhow::Result<()> {
    if let Some(one_in) = args.tap_one_in {
        return taps(args, one_in);
    }
    let [costs] = measure(args, REQUESTS, [None])?;
    if args.write {
        let json = serde_json::to_string_pretty(&costs).context("encoding the costs")? + "\n";
        return std::fs::write(&args.baseline, json).with_context(|| format!("writing {}", args.baseline.display()));
    }
    let json = std::fs::read(&args.baseline)
        .with_context(|| format!("reading {}; --baseline says where it is", args.baseline.display()))?;
    let before: Costs =
        serde_json::from_slice(&json).with_context(|| format!("reading {}", args.baseline.display()))?;
    let (mut text, mut dearer) = (String::new(), Vec::new());
    let limits = bounds::parse(bounds::COMMITTED)?;
    let mut exceeded = Vec::new();
    for (side, before, now, metric) in [
        ("client", &before.client, &costs.client, Metric::ClientAllocations),
        ("server", &before.server, &costs.server, Metric::ServerAllocations),
    ] {
        let _ = writeln!(
            text,
            "the {side}'s sidecar: {:.0} instructions a request ({:+.1} %), {:.0} of them of taps, traces and access logs that \
             nobody asked for; {:.2} allocations ({:+.1} %)",
            now.instructions,
            percent(before.instructions, now.instructions),
            now.unwatched,
            now.allocations,
            percent(before.allocations, now.allocations)
        );
        if now.unwatched > UNWATCHED {
            exceeded.push(format!(
                "in the {side}'s sidecar {:.0} instructions of a request are of taps, traces and access logs that nobody asked \
                 for; it takes {UNWATCHED:.0} to see that",
                now.unwatched
            ));
        }
        dearer.extend(compare(before, now).map(|why| format!("in the {side}'s sidecar {why}")));
        // Whatever the baseline is, and to a tenth: what is not a request's own is spread over them.
        let bound = limits.iter().find(|bound| bound.metric == metric);
        let bound = bound.with_context(|| format!("bench/budgets.toml has no bound of the {side}'s allocations"))?;
        if !bound.holds((now.allocations * 10.0).round() / 10.0, None) {
            exceeded.push(format!(
                "in the {side}'s sidecar a request makes {:.1} allocations; bench/budgets.toml says {}",
                now.allocations, bound.text
            ));
        }
    }
    tools::print(&text)?;
    ensure!(exceeded.is_empty(), "{}", [exceeded, dearer].concat().join("\n"));
    ensure!(
        dearer.is_empty(),
        "{}\nif it is worth that, \"tulle-bench costs --write\" notes it down",
        dearer.join("\n")
    );
    Ok(())
}

/// Measures what a tap costs those that are not shown, prints that, and fails when it is more than it may be.
fn taps(args: &Args, one_in: u32) -> anyhow::Result<()> {
    let requests = REQUESTS.max(one_in.saturating_mul(SHOWN));
    // The table of headers that two sidecars share is longer with each second in which there are requests, tapped or not.
    let [before, with, after] = measure(args, requests, [None, Some(one_in), None])?;
    let (mut text, mut exceeded) = (String::new(), Vec::new());
    for (side, before, with, after) in [
        ("client", &before.client, &with.client, &after.client),
        ("server", &before.server, &with.server, &after.server),
    ] {
        let without = f64::midpoint(before.instructions, after.instructions);
        // As if as many had been drawn as are on average.
        let drawn = with.shown * f64::from(one_in) / f64::from(requests);
        let more = percent(without, without + (with.instructions - without) / drawn);
        let _ = writeln!(
            text,
            "the {side}'s sidecar: {:.0} to {:.0} instructions a request, {more:+.1} % with a tap of one in {one_in}",
            before.instructions, after.instructions
        );
        if more >= TAPPED * 100.0 {
            exceeded.push(format!(
                "in the {side}'s sidecar a tap of one in {one_in} costs {more:.1} %; it may cost {:.0} %",
                TAPPED * 100.0
            ));
        }
    }
    tools::print(&text)?;
    ensure!(exceeded.is_empty(), "{}", exceeded.join("\n"));
    Ok(())
}

/// How much more, or less, in percent.
fn percent(before: f64, now: f64) -> f64 {
    (now / before - 1.0) * 100.0
}

/// Says what costs more than it did, and which functions do.
fn compare(before: &Cost, now: &Cost) -> Option<String> {
    let totals = [
        ("instructions", before.instructions, now.instructions),
        ("allocations", before.allocations, now.allocations),
    ];
    let dearer = |(_, before, now): &(&str, f64, f64)| *now > before * (1.0 + TOLERANCE);
    let why: Vec<_> = totals
        .into_iter()
        .filter(dearer)
        .map(|(what, before, now)| format!("a request costs {now:.1} {what}, before {before:.1}"))
        .collect();
    if why.is_empty() {
        return None;
    }
    let named = [
        grown("instructions", &before.functions, &now.functions),
        grown("allocations", &before.allocating, &now.allocating),
    ];
    Some(why.join(", ") + &named.concat())
}

/// The functions of which there is most more of `what`, a line each.
fn grown(what: &str, before: &BTreeMap<String, f64>, now: &BTreeMap<String, f64>) -> String {
    let more = |(name, now): (&String, &f64)| {
        let before = before.get(name).copied().unwrap_or_default();
        (now - before, format!("\n  {name}: {now:.1} {what}, before {before:.1}"))
    };
    let mut functions: Vec<(f64, String)> = now.iter().map(more).collect();
    functions.sort_by(|a, b| b.0.total_cmp(&a.0));
    let named = functions.into_iter().take(NAMED).filter(|(more, _)| *more > 0.0);
    named.map(|(_, line)| line).collect()
}

/// What requests cost while nobody taps them or one of so many is tapped, one after the other in the same sidecars.
fn measure<const N: usize>(args: &Args, requests: u32, tapped: [Option<u32>; N]) -> anyhow::Result<[Costs; N]> {
    scene::prepare(&[Peer::Tulle], &["valgrind", "callgrind_control", "h2load"])?;
    let scene = Scene::build()?;
    let setup = Setup {
        build: Build::Callgrind,
        ..args.row.setup()
    };
    let sidecars = Peer::Tulle.start(&scene, &setup).context("starting the sidecars")?;
    let sidecars = sidecars.context("there are no sidecars")?;
    // Connections are made and learned about, buffers are as large as they will be.
    let load: Load = match args.row {
        Row::NewHttp => generators::reconnecting,
        _ => generators::one_by_one,
    };
    load(&scene, SERVICE, WARM_UP)?;
    let mut costs = [const { None }; N];
    for (n, (costs, one_in)) in (0..).zip(costs.iter_mut().zip(tapped)) {
        let repeats = (n * REPEATS..(n + 1) * REPEATS)
            .map(|repeat| watched(&scene, &sidecars, load, requests, 2 * repeat + 1, one_in))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let instructions = |costs: &Costs| costs.client.instructions + costs.server.instructions;
        *costs = repeats
            .into_iter()
            .min_by(|a, b| f64::total_cmp(&instructions(a), &instructions(b)));
    }
    if let Some(dir) = args.dumps.as_deref() {
        std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        for number in (1..=N as u32 * REPEATS).map(|n| 2 * n) {
            for (side, _) in sidecars.sides() {
                let from = out(&scene, side).with_extension(number.to_string());
                let to = dir.join(side.name()).with_extension(number.to_string());
                std::fs::copy(&from, to).with_context(|| format!("copying {}", from.display()))?;
            }
        }
    }
    Ok(costs.map(|costs| costs.expect("each has been measured")))
}

/// Measurements of each cost. The one with the fewest instructions counts: a TLS handshake during one of them adds to it.
const REPEATS: u32 = 2;

/// So many requests, one after the other.
type Load = fn(&Scene, &str, u32) -> anyhow::Result<()>;

/// What so many requests of `load` cost each, between two dumps, the first of which has that number.
fn watched(
    scene: &Scene,
    sidecars: &Sidecars,
    load: Load,
    requests: u32,
    number: u32,
    one_in: Option<u32>,
) -> anyhow::Result<Costs> {
    let begin = |(side, _)| one_in.map(|one_in| tap::begin(scene.namespace(side), one_in));
    let taps: Vec<_> = sidecars
        .sides()
        .into_iter()
        .filter_map(begin)
        .collect::<Result<_, _>>()?;
    dump(scene, sidecars, number)?;
    load(scene, SERVICE, requests)?;
    let [mut client, mut server] = dump(scene, sidecars, number + 1)?.map(|counts| Cost::of(counts, requests));
    for (tap, cost) in taps.iter().zip([&mut client, &mut server]) {
        cost.shown = tap.events() as f64 / EVENTS;
        ensure!(cost.shown > 0.0, "a tap has seen nothing");
    }
    ensure!(
        client.unwatched > 0.0,
        "no instruction is known to be of a file: the binaries have no line tables"
    );
    Ok(Costs { client, server })
}

/// What both sidecars have counted since the last time.
fn dump(scene: &Scene, sidecars: &Sidecars, number: u32) -> anyhow::Result<[Counts; 2]> {
    let mut counts = [Counts::default(), Counts::default()];
    for (side, process) in sidecars.sides() {
        let at = match side {
            Side::Client => 0,
            Side::Server => 1,
        };
        let mut control = scene::as_proxy(scene.namespace(side), "callgrind_control");
        control.env_clear().env("PATH", "/usr/bin:/bin");
        counts[at] = callgrind::dump(control, process.id(), &out(scene, side), number)?;
    }
    Ok(counts)
}

/// Where a sidecar's dumps go.
pub(super) fn out(scene: &Scene, side: Side) -> PathBuf {
    scene.dir.path().join(DIRECTORY).join(side.name())
}

impl Cost {
    fn of(counts: Counts, requests: u32) -> Self {
        let each = |n: u64| n as f64 / f64::from(requests);
        let functions: BTreeMap<String, f64> = counts
            .functions
            .into_iter()
            .filter(|(name, _)| !CHOSEN_BY_PROCESSOR.iter().any(|start| name.starts_with(start)))
            .map(|(name, n)| (name, each(n)))
            .collect();
        let instructions: f64 = functions.values().sum();
        let watching = |(file, _): &(&String, &u64)| WATCHING.iter().any(|of| file.contains(of));
        let unwatched: u64 = counts.files.iter().filter(watching).map(|(_, n)| n).sum();
        let to_hundredths = |n: f64| (n * 100.0).round() / 100.0;
        let allocations: BTreeMap<String, f64> = counts
            .allocations
            .into_iter()
            .map(|(name, n)| (name, to_hundredths(each(n))))
            .collect();
        Self {
            instructions: instructions.round(),
            allocations: to_hundredths(allocations.values().sum()),
            allocating: allocations.into_iter().filter(|(_, n)| *n > RARELY).collect(),
            functions: functions
                .into_iter()
                .filter(|(_, n)| *n > instructions * SHARE)
                .map(|(name, n)| (name, n.round()))
                .collect(),
            unwatched: each(unwatched).round(),
            shown: 0.0,
        }
    }
}

/// Below the directory of the scene; the proxy's user writes there.
pub(super) const DIRECTORY: &str = "callgrind";
const WARM_UP: u32 = 200;
const REQUESTS: u32 = 500;
/// How many requests a tap is shown, about: it is drawn which ones.
const SHOWN: u32 = 40;
/// What is told of a request: its begin, its response, and the end of that.
const EVENTS: f64 = 3.0;
/// How much more a request may cost than before.
const TOLERANCE: f64 = 0.02;
/// Functions with less than this share of the instructions are not noted down.
const SHARE: f64 = 0.001;
/// Functions that ask for memory in no more than this share of the requests are not noted down.
const RARELY: f64 = 0.05;
/// By how much less than this a request may cost more where one of a hundred is tapped.
const TAPPED: f64 = 0.03;
/// What shows requests to somebody.
const WATCHING: [&str; 3] = ["proxy/src/tap/", "proxy/src/trace/", "proxy/src/http/access_log.rs"];
/// How many instructions it takes to see that nobody wants to see a request.
const UNWATCHED: f64 = 20.0;
/// How many functions are named.
const NAMED: usize = 8;
/// Of these the C library and the crypto library have one for each kind of processor.
const CHOSEN_BY_PROCESSOR: [&str; 4] = ["__mem", "__str", "aws_lc_", "__bcmp"];

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(instructions: f64, functions: &[(&str, f64)]) -> Cost {
        let functions = functions.iter().map(|(name, n)| ((*name).to_owned(), *n));
        Cost {
            instructions,
            allocations: 9.0,
            functions: functions.collect(),
            allocating: [("a".to_owned(), 9.0)].into(),
            unwatched: 4.0,
            shown: 0.0,
        }
    }

    #[test]
    fn what_costs_more_is_named() {
        let before = cost(1000.0, &[("a", 600.0), ("b", 300.0)]);
        assert_eq!(compare(&before, &cost(1020.0, &[("a", 620.0)])), None);
        let why = compare(&before, &cost(1030.0, &[("a", 580.0), ("b", 300.0), ("c", 50.0)])).unwrap();
        assert_eq!(
            why,
            "a request costs 1030.0 instructions, before 1000.0\n  c: 50.0 instructions, before 0.0"
        );
        let more = Cost {
            allocations: 9.3,
            allocating: [("a".to_owned(), 8.8), ("b".to_owned(), 0.5)].into(),
            ..cost(1000.0, &[])
        };
        assert_eq!(
            compare(&before, &more).unwrap(),
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
        let cost = Cost::of(counts, REQUESTS);
        assert_eq!((cost.instructions, cost.allocations, cost.unwatched), (10.0, 9.2, 3.0));
        assert_eq!(cost.allocating, [("a".to_owned(), 9.1), ("b".to_owned(), 0.1)].into());
    }
}
