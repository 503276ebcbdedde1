//! `docs/reference/benchmarks.md` and its plots, from the JSON of a run.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use clap::ValueEnum as _;

use super::metric::Metric;
use super::plot::{BarChart, Group};
use super::report::{Report, ResultLine};
use super::rows::Scenario;
use super::setup::Peer;
use super::setup::json_name;

/// Writes `benchmarks.md` to `dir`, and the plots to its subdirectory `benchmarks`.
pub(super) fn write(report: &Report, dir: &Path) -> anyhow::Result<()> {
    let plots = dir.join("benchmarks");
    std::fs::create_dir_all(&plots).with_context(|| format!("making {}", plots.display()))?;
    let write_file =
        |path: &Path, text: String| std::fs::write(path, text).with_context(|| format!("writing {}", path.display()));
    for plot in PLOTS {
        write_file(&plots.join(format!("{}.svg", plot.file)), plot.bars(report).svg())?;
    }
    write_file(&dir.join("benchmarks.md"), markdown(report))
}

/// A plot: the sum of some metrics in some rows, for each peer.
struct Plot {
    file: &'static str,
    title: &'static str,
    unit: &'static str,
    rows: &'static [Scenario],
    /// The metrics that are added up, such as the CPU times of both sidecars.
    metrics: &'static [Metric],
}

impl Plot {
    fn bars(&self, report: &Report) -> BarChart {
        let value = |row, peer| {
            let figures = self.metrics.iter().map(|metric| report.median(row, peer, *metric));
            // A row with one sidecar has one of the metrics, and a row without sidecars has none.
            figures.flatten().reduce(|a, b| a + b)
        };
        let groups = self.rows.iter().map(|row| Group {
            label: row.name(),
            bars: Peer::value_variants()
                .iter()
                .filter_map(|peer| Some((json_name(peer), value(*row, *peer)?)))
                .collect(),
        });
        BarChart {
            title: self.title.to_owned(),
            unit: self.unit.to_owned(),
            groups: groups.filter(|group| !group.bars.is_empty()).collect(),
        }
    }
}

const PLOTS: [Plot; 5] = [
    Plot {
        file: "cpu",
        title: "CPU time of both sidecars per request (less is better)",
        unit: "µs",
        rows: &[
            Scenario::HttpC1,
            Scenario::HttpC16,
            Scenario::HttpC64,
            Scenario::Http2,
            Scenario::Grpc,
            Scenario::GrpcStream,
        ],
        metrics: &[Metric::ClientCpuUs, Metric::ServerCpuUs],
    },
    Plot {
        file: "requests",
        title: "Requests (more is better)",
        unit: "/s",
        rows: &[
            Scenario::HttpC1,
            Scenario::HttpC16,
            Scenario::HttpC64,
            Scenario::Http2,
            Scenario::Grpc,
            Scenario::NewHttp,
        ],
        metrics: &[Metric::RequestsPerSecond],
    },
    Plot {
        file: "latency",
        title: "Median latency (less is better)",
        unit: "µs",
        rows: &[Scenario::HttpC1, Scenario::HttpC16, Scenario::HttpC64, Scenario::Http2],
        metrics: &[Metric::P50Us],
    },
    Plot {
        file: "bytes",
        title: "Payload per direction, with the same load in the other direction (more is better)",
        unit: "MiB/s",
        rows: &[
            Scenario::Post1Kib,
            Scenario::Post32Kib,
            Scenario::Post1Mib,
            Scenario::Bulk,
        ],
        metrics: &[Metric::MibPerSecond],
    },
    Plot {
        file: "idle",
        title: "Memory of both sidecars per idle connection (less is better)",
        unit: "KiB",
        rows: &[Scenario::Idle, Scenario::IdleOpaque],
        metrics: &[Metric::ClientKibPerConnection, Metric::ServerKibPerConnection],
    },
];

fn markdown(report: &Report) -> String {
    let mut out = String::from(INTRODUCTION);
    if report.lines.iter().any(|line| line.peer == Peer::TulleNoProfile) {
        out.push_str("`tulle-no-profile` is built without a profile.\n");
    }
    out.push_str("The other proxies are the builds of Debian and of the Envoy project.\n");
    let machine = &report.machine;
    let _ = write!(
        out,
        "\n## Test environment\n\n{}, {} CPUs, {} MiB of memory, Linux {}, {}. The load average of the minute before the run was {}.\n\n\
         `tulle-bench {}`\n\n",
        machine.processor,
        machine.cpus,
        machine.memory_mib,
        machine.kernel,
        machine.date,
        machine.load,
        machine.command
    );
    let cells = report.lines.iter().flat_map(|line| line.metrics.values());
    let n: BTreeSet<usize> = cells.map(|cell| cell.n).collect();
    let (least, most) = (n.first().unwrap_or(&0), n.last().unwrap_or(&0));
    let n_measurements = if least == most {
        most.to_string()
    } else {
        format!("{least} to {most}")
    };
    let _ = writeln!(out, "Each figure is the median of {n_measurements} measurements.\n");
    for version in &machine.versions {
        let _ = writeln!(out, "- {version}");
    }
    out.push_str("\n## Plots\n\n");
    for plot in PLOTS {
        let _ = writeln!(out, "![{}](benchmarks/{}.svg)\n", plot.title, plot.file);
    }
    out.push_str("## Scenarios\n");
    for row in Scenario::value_variants() {
        let lines: Vec<&ResultLine> = report.lines.iter().filter(|line| line.row == *row).collect();
        if !lines.is_empty() {
            write_table(&mut out, *row, &lines);
        }
    }
    out.push_str(BUDGETS_HEADING);
    for check in &report.budgets {
        let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}"));
        let _ = writeln!(
            out,
            "| {}.{} | {} | {} | {} | {} |",
            check.row.name(),
            json_name(check.metric),
            number(check.value),
            number(check.ratio),
            check.budget,
            json_name(check.result)
        );
    }
    out
}

/// Writes the table of one row, with one line per peer.
fn write_table(out: &mut String, row: Scenario, lines: &[&ResultLine]) {
    let columns: Vec<(Metric, &str, usize)> = COLUMNS
        .into_iter()
        .filter(|(metric, ..)| lines.iter().any(|line| line.metrics.contains_key(metric)))
        .collect();
    let _ = write!(out, "\n### {}\n\n{}.\n\n| |", row.name(), row.description());
    for (_, title, _) in &columns {
        let _ = write!(out, " {title} |");
    }
    out.push_str("\n|---|");
    out.push_str(&"---:|".repeat(columns.len()));
    out.push('\n');
    for line in lines {
        let _ = write!(out, "| {} |", json_name(line.peer));
        for (metric, _, decimals) in &columns {
            match line.metrics.get(metric) {
                Some(cell) => {
                    let _ = write!(out, " {:.*} ±{:.0} % |", decimals, cell.median, cell.spread() / 2.0);
                }
                None => out.push_str(" – |"),
            }
        }
        out.push('\n');
    }
}

/// Metric, column title, number of decimals.
const COLUMNS: [(Metric, &str, usize); 19] = [
    (Metric::RequestsPerSecond, "requests/s", 0),
    (Metric::SpeedPercent, "% of undisturbed", 0),
    (Metric::P50Us, "p50 µs", 0),
    (Metric::P99Us, "p99 µs", 0),
    (Metric::P99Factor, "× undisturbed", 1),
    (Metric::MibPerSecond, "MiB/s", 0),
    (Metric::ClientCpuUs, "client sidecar: CPU µs", 1),
    (Metric::ClientKernelPercent, "of that in the kernel, %", 0),
    (Metric::ServerCpuUs, "server sidecar: CPU µs", 1),
    (Metric::ServerKernelPercent, "of that in the kernel, %", 0),
    (Metric::ClientRssMib, "client sidecar: MiB", 1),
    (Metric::ServerRssMib, "server sidecar: MiB", 1),
    (Metric::ClientKibPerConnection, "client sidecar: KiB each", 1),
    (Metric::ServerKibPerConnection, "server sidecar: KiB each", 1),
    (Metric::ClientAllocations, "client sidecar: allocations", 1),
    (Metric::ServerAllocations, "server sidecar: allocations", 1),
    (Metric::ClientAllocatedBytes, "client sidecar: bytes", 0),
    (Metric::ServerAllocatedBytes, "server sidecar: bytes", 0),
    (Metric::Failed, "failed", 0),
];

const INTRODUCTION: &str = "# Benchmarks

Two sidecars with mutual TLS between a client and a server: tulle, HAProxy, nginx and Envoy in turn, and no proxy at all.
In tulle, all features of a mesh are enabled: certificates of the identity service, a policy that authorizes every request by the identity of its client, discovery, balancing and metrics.
The other proxies have minimal configurations, as their documentation recommends, without logs, statistics and health checks. The configurations are in `bench/peers`, with the reason for each choice.
The scenarios `outbound-only` and `inbound-only` have one sidecar, without TLS.
nginx is not measured in `workers-1` and `workers-2`: each of its workers is a process, and the measurement supports one process.

Client and server each share a network namespace with their sidecar, as in a pod. The namespaces are connected by one bridge.
TCP congestion control is `reno`, or `cubic` if that is the machine's default: algorithms with pacing, such as BBR, would delay bodies.
Ports and connection tracking entries are reused after one second, so that scenarios with new connections do not run out of them.

`tulle-bench document docs/reference/benchmarks.json` makes this file from the JSON of one run. `./run bench --json docs/reference/benchmarks.json` makes that JSON.
For each scenario, all proxies are measured in turn. The tables have medians; the value after ± is half the difference of maximum and minimum.
The client, both sidecars and the application share the machine. Requests/s depend on the cost of all of them, CPU times on the cost of the sidecars only.
`requests/s` counts what the scenario repeats: requests, messages (`grpc-stream`, `bulk`, `small-opaque`), or connections (`new-mtls`).
The latencies and failures of `grpc-stream` are those of whole streams of 100 messages.
On other machines, expect similar ratios, not similar values.

`tulle` is the build of the images (`./run images`): the compiler has optimized it with a profile of most of these scenarios.
";

const BUDGETS_HEADING: &str = "
## Budgets

The budgets are those of `bench/budgets.toml` at the measured commit, which is in the [test environment](#test-environment) after the version of tulle.
Later commits can have other budgets.

| Metric | tulle | Ratio | Budget | Result |
|---|---|---|---|---|
";

#[cfg(test)]
mod tests {
    use super::super::budgets;
    use super::super::metric::Sample;
    use super::super::report::Results;
    use super::*;

    #[test]
    fn the_committed_document_matches_the_committed_json() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference");
        let report = Report::read(&docs.join("benchmarks.json")).unwrap();
        let text = std::fs::read_to_string(docs.join("benchmarks.md")).unwrap();
        assert!(
            text == markdown(&report),
            "\"tulle-bench document docs/reference/benchmarks.json\" makes docs/reference/benchmarks.md"
        );
    }

    #[test]
    fn the_build_without_a_profile_is_described_only_if_it_was_measured() {
        for (peer, is_described) in [(Peer::Tulle, false), (Peer::TulleNoProfile, true)] {
            let mut results = Results::new(Vec::new());
            results.add(Scenario::HttpC64, peer, Sample::from([(Metric::ClientCpuUs, 10.0)]));
            let text = markdown(&results.report(budgets::COMMITTED_BUDGETS).unwrap());
            let described = text.contains("\n`tulle-no-profile` is built without a profile.\nThe other proxies are");
            assert_eq!(described, is_described, "{text}");
        }
    }

    #[test]
    fn the_document_has_the_medians_the_versions_and_the_plots() {
        let mut results = Results::new(vec!["HAProxy version 9".into()]);
        for (peer, cpu) in [(Peer::Tulle, 10.0), (Peer::Haproxy, 9.0)] {
            results.add(Scenario::HttpC64, peer, Sample::from([(Metric::ClientCpuUs, cpu)]));
        }
        let dir = tempfile::tempdir().unwrap();
        let json = dir.path().join("run.json");
        results
            .report(budgets::COMMITTED_BUDGETS)
            .unwrap()
            .write(&json)
            .unwrap();
        write(&Report::read(&json).unwrap(), dir.path()).unwrap();

        let text = std::fs::read_to_string(dir.path().join("benchmarks.md")).unwrap();
        for part in [
            "- HAProxy version 9",
            "### http-c64",
            "| tulle | 10.0 ±0 % |",
            "| http-c64.client_cpu_us | 10.00 | 1.11 | at most 1.15 x haproxy | PASS |",
        ] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
        assert!(!text.contains("### http-c1\n"), "{text}");
        let plot = std::fs::read_to_string(dir.path().join("benchmarks/cpu.svg")).unwrap();
        assert!(plot.contains("http-c64") && plot.contains("haproxy"), "{plot}");
    }
}
