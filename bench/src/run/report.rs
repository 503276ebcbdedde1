//! The report of a run: medians over the repeats, ratios, and the result of each budget.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::budgets::{self, Budget, Reference};
use super::metric::{Metric, Sample};
use super::rows::Scenario;
use super::setup::{Peer, json_name};

/// The samples of a run.
pub(super) struct Results {
    machine: Machine,
    samples: BTreeMap<(Scenario, Peer), Vec<Sample>>,
}

/// The report, as printed and written to JSON.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) lines: Vec<ResultLine>,
    pub(super) budgets: Vec<BudgetCheck>,
}

/// The machine and the programs of a run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Machine {
    /// Date as "2026-11-22".
    pub(super) date: String,
    pub(super) processor: String,
    pub(super) cpus: usize,
    pub(super) memory_mib: u64,
    pub(super) kernel: String,
    /// Load average of the minute before the run.
    pub(super) load: f64,
    /// Names and versions of the peers and of the load generators, as the programs report them. tulle has the version of this
    /// program and the commit of the current directory.
    pub(super) versions: Vec<String>,
    /// Command line arguments of the run.
    pub(super) command: String,
}

/// A line of the tables: the metrics of one scenario and one peer.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct ResultLine {
    pub(super) row: Scenario,
    pub(super) peer: Peer,
    pub(super) metrics: BTreeMap<Metric, MetricSummary>,
}

/// One metric over the repeats.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct MetricSummary {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
    pub(super) n: usize,
}

/// A budget and the measured value.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct BudgetCheck {
    pub(super) row: Scenario,
    pub(super) metric: Metric,
    pub(super) budget: String,
    pub(super) value: Option<f64>,
    /// The value divided by the value of the peer or row to which the budget refers.
    pub(super) ratio: Option<f64>,
    pub(super) result: BudgetResult,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum BudgetResult {
    Pass,
    Fail,
    /// The run did not measure a value that the budget needs.
    Skipped,
}

impl Results {
    /// Must be called before the measurements, because the report contains the load average before the run.
    pub(super) fn new(versions: Vec<String>) -> Self {
        Self {
            machine: Machine::detect(versions),
            samples: BTreeMap::new(),
        }
    }

    pub(super) fn add(&mut self, row: Scenario, peer: Peer, sample: Sample) {
        self.samples.entry((row, peer)).or_default().push(sample);
    }

    /// Reduces the samples to medians and checks them against `budgets`.
    pub(super) fn report(&self, budgets: &str) -> anyhow::Result<Report> {
        let lines: Vec<ResultLine> = self
            .samples
            .iter()
            .map(|((row, peer), samples)| ResultLine {
                row: *row,
                peer: *peer,
                metrics: summarize(samples),
            })
            .collect();
        let budgets = budgets::parse(budgets)?
            .iter()
            .map(|budget| check_budget(&lines, budget))
            .collect();
        Ok(Report {
            machine: self.machine.clone(),
            lines,
            budgets,
        })
    }
}

impl Machine {
    fn detect(versions: Vec<String>) -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned()))
                .unwrap_or_default()
        };
        let first = |text: &str| text.split_whitespace().next().unwrap_or_default().to_owned();
        let memory_kib = first(&field(&read("/proc/meminfo"), "MemTotal"));
        Self {
            date: time::OffsetDateTime::now_utc().date().to_string(),
            processor: field(&read("/proc/cpuinfo"), "model name"),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            memory_mib: memory_kib.parse().unwrap_or(0_u64) / 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load: first(&read("/proc/loadavg")).parse().unwrap_or_default(),
            versions,
            command: std::env::args().skip(1).collect::<Vec<_>>().join(" "),
        }
    }
}

impl Report {
    pub(super) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let json = serde_json::to_vec_pretty(self).context("encoding the report")?;
        std::fs::write(path, json).with_context(|| format!("writing {}", path.display()))
    }

    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let json = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        serde_json::from_slice(&json)
            .with_context(|| format!("{} is not a report of \"tulle-bench run --json\"", path.display()))
    }

    /// The median of a metric.
    pub(super) fn median(&self, row: Scenario, peer: Peer, metric: Metric) -> Option<f64> {
        median(&self.lines, row, peer, metric)
    }

    /// Whether no result exceeds its budget. Skipped budgets count as passed.
    pub(super) fn passed(&self) -> bool {
        self.budgets.iter().all(|check| check.result != BudgetResult::Fail)
    }
}

fn summarize(samples: &[Sample]) -> BTreeMap<Metric, MetricSummary> {
    let mut values: BTreeMap<Metric, Vec<f64>> = BTreeMap::new();
    for (metric, value) in samples.iter().flatten() {
        values.entry(*metric).or_default().push(*value);
    }
    values
        .into_iter()
        .filter_map(|(metric, values)| Some((metric, MetricSummary::from_values(values)?)))
        .collect()
}

impl ResultLine {
    /// Whether the line is in the table of [`COLUMNS`]. The metrics of the other lines are listed below it.
    fn is_in_main_table(&self) -> bool {
        self.metrics.contains_key(&Metric::RequestsPerSecond) && !self.metrics.contains_key(&Metric::SpeedPercent)
    }

    fn format_metric(&self, metric: Metric, decimals: usize) -> String {
        match self.metrics.get(&metric) {
            Some(summary) => format!("{:.decimals$} ({:.0}%)", summary.median, summary.spread()),
            None => "-".to_owned(),
        }
    }
}

impl MetricSummary {
    fn from_values(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (min, max, n) = (*values.first()?, *values.last()?, values.len());
        let median = (values[(n - 1) / 2] + values[n / 2]) / 2.0;
        Some(Self { median, min, max, n })
    }

    /// Difference between maximum and minimum, in percent of the median.
    pub(super) fn spread(&self) -> f64 {
        if self.median == 0.0 {
            0.0
        } else {
            (self.max - self.min) * 100.0 / self.median
        }
    }
}

fn check_budget(lines: &[ResultLine], budget: &Budget) -> BudgetCheck {
    let value = median(lines, budget.row, Peer::Tulle, budget.metric);
    let reference = budget.reference.map(|reference| match reference {
        Reference::Peer(peer) => median(lines, budget.row, peer, budget.metric),
        Reference::Scenario(row) => median(lines, row, Peer::Tulle, budget.metric),
    });
    let (ratio, result) = match (value, reference) {
        (Some(value), None) => (None, BudgetResult::pass_or_fail(budget.holds(value, None))),
        (Some(value), Some(Some(reference))) => (
            Some(value / reference),
            BudgetResult::pass_or_fail(budget.holds(value, Some(reference))),
        ),
        (None, _) | (_, Some(None)) => (None, BudgetResult::Skipped),
    };
    BudgetCheck {
        row: budget.row,
        metric: budget.metric,
        budget: budget.text.clone(),
        value,
        ratio,
        result,
    }
}

impl BudgetResult {
    fn pass_or_fail(holds: bool) -> Self {
        if holds { Self::Pass } else { Self::Fail }
    }
}

fn median(lines: &[ResultLine], row: Scenario, peer: Peer, metric: Metric) -> Option<f64> {
    let line = lines.iter().find(|line| line.row == row && line.peer == peer)?;
    line.metrics.get(&metric).map(|summary| summary.median)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "medians, and in brackets the difference between maximum and minimum; {} CPUs, Linux {}, load {} before the run",
            self.machine.cpus, self.machine.kernel, self.machine.load
        )?;
        if self.machine.load > MAX_IDLE_LOAD {
            writeln!(
                f,
                "the machine was busy in the minute before the run: CPU times are more reliable than requests/s and latencies"
            )?;
        }
        writeln!(f)?;
        write!(f, "{:<14}{:<18}", "row", "peer")?;
        for (_, title, _) in COLUMNS {
            write!(f, "{title:>16}")?;
        }
        writeln!(f)?;
        let (in_main_table, others): (Vec<&ResultLine>, Vec<&ResultLine>) =
            self.lines.iter().partition(|line| line.is_in_main_table());
        for line in in_main_table {
            write!(f, "{:<14}{:<18}", json_name(line.row), json_name(line.peer))?;
            for (metric, _, decimals) in COLUMNS {
                write!(f, "{:>16}", line.format_metric(metric, decimals))?;
            }
            writeln!(f)?;
        }
        writeln!(f)?;
        for line in others {
            for metric in line.metrics.keys() {
                let row = format!("{}.{}", json_name(line.row), json_name(*metric));
                writeln!(
                    f,
                    "{row:<36}{:<18}{:>16}",
                    json_name(line.peer),
                    line.format_metric(*metric, 1)
                )?;
            }
        }
        writeln!(f, "\n{:<34}{:>12}{:>9}  {:<26}", "budget", "tulle", "ratio", "limit")?;
        for check in &self.budgets {
            let name = format!("{}.{}", json_name(check.row), json_name(check.metric));
            let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
            let (value, ratio) = (number(check.value), number(check.ratio));
            writeln!(
                f,
                "{name:<34}{value:>12}{ratio:>9}  {:<26}{}",
                check.budget,
                json_name(check.result)
            )?;
        }
        Ok(())
    }
}

/// With a higher load average, other processes may have influenced the measurement.
const MAX_IDLE_LOAD: f64 = 0.5;
/// Metric, column title, number of decimals.
const COLUMNS: [(Metric, &str, usize); 9] = [
    (Metric::RequestsPerSecond, "requests/s", 0),
    (Metric::P50Us, "p50 µs", 0),
    (Metric::P99Us, "p99 µs", 0),
    (Metric::MibPerSecond, "MiB/s", 0),
    (Metric::ClientCpuUs, "client CPU µs", 2),
    (Metric::ServerCpuUs, "server CPU µs", 2),
    (Metric::ClientRssMib, "client RSS MiB", 1),
    (Metric::ServerRssMib, "server RSS MiB", 1),
    (Metric::Failed, "failed", 0),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn results(tulle: &[f64], haproxy: &[f64]) -> Results {
        let mut results = Results::new(Vec::new());
        for (peer, values) in [(Peer::Tulle, tulle), (Peer::Haproxy, haproxy)] {
            for value in values {
                results.add(Scenario::HttpC64, peer, Sample::from([(Metric::ClientCpuUs, *value)]));
            }
        }
        results
    }

    const BUDGET: &str = "http-c64.client_cpu_us = \"at most 1.3 x haproxy\"";

    #[test]
    fn the_median_of_an_even_number_of_values_is_the_mean_of_the_middle_two() {
        let summary = MetricSummary::from_values(vec![9.0, 1.0, 2.0]).unwrap();
        assert_eq!(
            summary,
            MetricSummary {
                median: 2.0,
                min: 1.0,
                max: 9.0,
                n: 3
            }
        );
        assert_eq!(summary.spread(), 400.0);
        assert_eq!(
            MetricSummary::from_values(vec![4.0, 1.0, 2.0, 3.0]).unwrap().median,
            2.5
        );
        assert_eq!(MetricSummary::from_values(vec![]), None);
    }

    #[test]
    fn budgets_compare_medians_of_the_same_run() {
        let passed = results(&[11.0, 12.0, 99.0], &[10.0, 10.0, 1.0]).report(BUDGET).unwrap();
        assert_eq!(
            (passed.budgets[0].ratio, passed.budgets[0].result),
            (Some(1.2), BudgetResult::Pass)
        );
        let failed = results(&[14.0], &[10.0]).report(BUDGET).unwrap();
        assert!(!failed.passed() && failed.to_string().contains("FAIL"), "{failed}");
    }

    #[test]
    fn budgets_without_a_measurement_are_skipped() {
        let report = results(&[11.0], &[]).report(BUDGET).unwrap();
        assert_eq!(report.budgets[0].result, BudgetResult::Skipped);
        assert!(report.passed());
    }

    #[test]
    fn the_table_and_the_json_have_the_same_names_of_rows_peers_and_metrics() {
        let report = results(&[11.0], &[10.0]).report(BUDGET).unwrap();
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["lines"][0]["row"], "http-c64");
        assert_eq!(json["lines"][0]["metrics"]["client_cpu_us"]["median"], 11.0);
        assert_eq!(json["budgets"][0]["result"], "PASS");
        assert!(report.to_string().contains("http-c64.client_cpu_us"), "{report}");
    }
}
