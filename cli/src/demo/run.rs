//! Runs the mesh: draws the table each second, injects and repairs faults, stops the processes, and checks the result.

use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::ChildStdout;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tulle_core::metrics::samples::Samples;

use super::active_fault::FaultTarget;
use super::checks;
use super::cleanup::CleanupProcess;
use super::edges::{Client, edges};
use super::faults::{Fault, FaultRequest, FaultResponse, Listener};
use super::load_reports::Reports;
use super::mesh::{self, DemoMesh, MeshOptions, print_progress};
use super::options::{Args, Balancer, Output};
use super::outcome::Outcome;
use super::rows::{self, Row, Scrapes};
use super::rundir::{FailedRunLogs, RunDir};
use super::state::{Demo, format_clock};
use super::table::{self, View};
use super::topology::App;
use crate::screen::Screen;

/// Builds the mesh, runs it until it ends or a signal arrives, and cleans up.
pub(super) async fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new()?;
    mesh::remove_stale(FailedRunLogs::Remove)?;
    let _cleanup = CleanupProcess::spawn()?;
    let dir = Arc::new(RunDir::create()?);
    let options = MeshOptions {
        manifests: args.manifests.as_deref(),
        balancer: args.balancer,
    };
    // Dropping a partly built mesh stops the processes that were started.
    let problems = tokio::select! {
        built = mesh::build(&options, dir.clone()) => run(built, args, &mut signals).await,
        () = signals.next() => {
            print_progress("interrupted before the mesh was ready");
            return Ok(ExitCode::FAILURE);
        }
    };
    let outcome = match problems {
        Ok(problems) if problems.is_empty() => return Ok(ExitCode::SUCCESS),
        Ok(_) => Ok(ExitCode::FAILURE),
        Err(error) => Err(error),
    };
    dir.keep_logs();
    print_progress(&format!("the logs of all processes are in {}", dir.logs().display()));
    outcome
}

/// Runs a mesh that has been built, and returns the problems.
async fn run(built: anyhow::Result<DemoMesh>, args: &Args, signals: &mut Signals) -> anyhow::Result<Vec<String>> {
    let mut demo = Demo::start(built.context("building the mesh")?, args)?;
    demo.run(args, signals).await
}

impl Demo {
    /// Starts the load generators on a mesh that is ready.
    fn start(mesh: DemoMesh, args: &Args) -> anyhow::Result<Self> {
        let edges = edges(&mesh.topology);
        let (sender, lines) = mpsc::channel(REPORT_CHANNEL_CAPACITY);
        let (mut generators, mut readers) = (Vec::new(), JoinSet::new());
        for (edge_index, edge) in edges.iter().enumerate() {
            let host = match edge.client {
                Client::Load => mesh.topology.load_workload().map_or("load", |load| load.name.as_str()),
                Client::Outside => "outside",
            };
            let mut generator = mesh.start_load_generator(host, edge.file_name(), edge.arguments())?;
            if let Some(output) = generator.take_output() {
                readers.spawn(read_lines(edge_index, output, sender.clone()));
            }
            generators.push(generator);
        }
        let listener = Listener::bind(&mesh.dir.socket())?;
        print_progress("the load generators are started");
        Ok(Self {
            reports: vec![Reports::default(); edges.len()],
            edges,
            generators,
            _readers: readers,
            lines,
            scrapes: Scrapes::new(),
            listener,
            started_at: Instant::now(),
            events: Vec::new(),
            active_faults: Vec::new(),
            unexpected_failures: Vec::new(),
            balancer: args.balancer,
            mesh,
        })
    }

    /// Runs until the time of `--once` is over or a signal arrives. Returns the problems.
    async fn run(&mut self, args: &Args, signals: &mut Signals) -> anyhow::Result<Vec<String>> {
        let mut screen = Screen::new();
        let draw = screen.is_terminal() && args.output != Some(Output::Json);
        let end = args.once.map(|seconds| self.started_at + Duration::from_secs(seconds));
        let seconds_with_outage = args.once.filter(|seconds| *seconds >= MIN_RUN_WITH_OUTAGE_SECONDS);
        let mut outage_at = seconds_with_outage.map(|seconds| self.started_at + Duration::from_secs(seconds) / 4);
        let mut ticks = interval(TICK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            // All branches can be dropped while they wait. If a fault request is lost, its client sees the connection close.
            tokio::select! {
                () = signals.next() => break,
                Some((edge_index, line)) = self.lines.recv() => self.record_report_line(edge_index, &line),
                pending = self.listener.next() => {
                    let pending = pending.context("listening for faults")?;
                    let response = self.inject_fault(pending.request).await;
                    pending.respond(response).await;
                }
                _ = ticks.tick() => {
                    let now = Instant::now();
                    if outage_at.take_if(|at| *at <= now).is_some() {
                        let request = FaultRequest { fault: Fault::ControlPlane, seconds: OUTAGE_DURATION.as_secs_f64() };
                        if let FaultResponse::Refused(why) = self.inject_fault(request).await {
                            self.unexpected_failures.push(format!("the planned outage of the control plane did not happen: {why}"));
                        }
                    }
                    self.scrape().await;
                    self.repair().await?;
                    self.detect_unexpected_exits();
                    if draw {
                        screen.draw(&self.live_table(Screen::width()));
                    } else if args.output != Some(Output::Json) {
                        self.print_status_line();
                    }
                    if end.is_some_and(|end| now >= end) {
                        break;
                    }
                }
            }
        }
        let seconds = self.started_at.elapsed().as_secs_f64();
        self.stop_load().await;
        self.scrape().await;
        self.finish(args, seconds)
    }

    /// Prints the result and returns the problems.
    fn finish(&mut self, args: &Args, seconds: f64) -> anyhow::Result<Vec<String>> {
        let rows: Vec<Row> = (self.edges.iter().zip(&self.reports))
            .map(|(edge, reports)| rows::total_row(edge, reports, &self.scrapes))
            .collect();
        let mut problems = Vec::new();
        // A run without `--once` is not checked.
        if args.once.is_some() {
            problems = checks::check(&self.mesh.topology, &self.edges, &rows, self.balancer);
            problems.extend(self.unexpected_failures.iter().cloned());
            let pending = self
                .active_faults
                .iter()
                .map(|fault| format!("no recovery before the end of the run: {}", fault.target.problem()));
            problems.extend(pending);
        }
        let balancer = match self.balancer {
            Balancer::PeakEwma => "peak-ewma",
            Balancer::RoundRobin => "round-robin",
        };
        let json = Outcome::new(seconds, balancer, &rows, &self.events, &problems).to_json();
        if let Some(path) = &args.json {
            fs::write(path, &json).with_context(|| format!("writing {}", path.display()))?;
        }
        if args.output != Some(Output::Json) {
            let title = format!("tulle demo: {seconds:.0} s, {balancer}, whole run");
            println!("\n{}", self.table(title, &rows, Screen::width()));
        }
        if args.output == Some(Output::Json) || (args.once.is_some() && args.output.is_none() && args.json.is_none()) {
            print!("{json}");
        }
        for problem in &problems {
            print_progress(&format!("failed: {problem}"));
        }
        if args.once.is_some() && problems.is_empty() {
            print_progress("all checks passed");
        }
        Ok(problems)
    }

    fn record_report_line(&mut self, edge_index: usize, line: &str) {
        if let Some(reports) = self.reports.get_mut(edge_index) {
            reports.add_line(line);
        }
    }

    /// Scrapes the metrics of each sidecar. The last metrics of a sidecar that does not respond are kept.
    async fn scrape(&mut self) {
        for (name, sidecar) in &mut self.mesh.sidecars {
            for admin in &mut sidecar.admin {
                if let Ok(page) = admin.get("/metrics").await {
                    self.scrapes.insert(name.clone(), Samples::parse(&page));
                }
            }
        }
    }

    /// Finds processes that ended although no fault has stopped them.
    fn detect_unexpected_exits(&mut self) {
        let stopped_processes: Vec<String> = self
            .active_faults
            .iter()
            .filter_map(|fault| fault.target.process_name())
            .collect();
        let mut found = Vec::new();
        let generators = self.generators.iter_mut();
        for process in self
            .mesh
            .processes()
            .map(|restartable| &mut restartable.process)
            .chain(generators)
        {
            if let Some(status) = process
                .exit_status()
                .filter(|_| !stopped_processes.iter().any(|name| name == process.name()))
            {
                found.push(format!(
                    "{} ended unexpectedly with {status}: {}",
                    process.name(),
                    process.log_tail()
                ));
            }
        }
        for failure in found {
            // A process that stays down is found each second, but reported only once.
            if !self.unexpected_failures.contains(&failure) {
                self.record_event(&failure);
                self.unexpected_failures.push(failure);
            }
        }
    }

    /// Stops the load generators, which then report their totals.
    async fn stop_load(&mut self) {
        for generator in &self.generators {
            generator.terminate();
        }
        let all_reported = async {
            while self.reports.iter().any(|reports| reports.total.is_none()) {
                let Some((edge_index, line)) = self.lines.recv().await else {
                    return;
                };
                if let Some(reports) = self.reports.get_mut(edge_index) {
                    reports.add_line(&line);
                }
            }
        };
        // If a generator reports nothing, its row has no requests, which is reported as a problem.
        let _ = timeout(STOP_TIMEOUT, all_reported).await;
        for generator in &mut self.generators {
            generator.wait(STOP_TIMEOUT).await;
        }
    }

    fn live_table(&self, width: usize) -> String {
        let rows = self.live_rows();
        let control = match self
            .active_faults
            .iter()
            .find(|fault| fault.target == FaultTarget::ControlPlane)
        {
            Some(fault) => format!("DOWN for {} s", fault.injected_at.elapsed().as_secs()),
            None => "up".to_owned(),
        };
        let renewals: f64 = self
            .scrapes
            .values()
            .map(|samples| samples.sum(CERT_REFRESHES_METRIC, &[("result", "ok")]))
            .sum();
        let title = format!(
            "tulle demo {}   control plane: {control}   certificates issued: {renewals}   trust domain: {}",
            format_clock(self.started_at.elapsed()),
            self.mesh.topology.trust_domain
        );
        self.table(title, &rows, width)
    }

    fn live_rows(&self) -> Vec<Row> {
        let edges = self.edges.iter().zip(&self.reports);
        edges
            .map(|(edge, reports)| rows::live_row(edge, reports, &self.scrapes))
            .collect()
    }

    fn table(&self, title: String, rows: &[Row], width: usize) -> String {
        let web = self
            .mesh
            .topology
            .workloads
            .iter()
            .filter_map(|workload| match workload.app {
                App::Web(delay) if delay.is_zero() => Some((workload.name.clone(), String::new())),
                App::Web(delay) => Some((workload.name.clone(), format!("responses delayed by {delay:?}"))),
                _ => None,
            });
        let services = [("web", web.collect())];
        let events = &self.events[self.events.len().saturating_sub(MAX_SHOWN_EVENTS)..];
        let view = View {
            title,
            rows,
            services: &services,
            events,
        };
        table::render(&view, width)
    }

    /// Prints the state in one line, for output that is not a terminal.
    fn print_status_line(&self) {
        if !self
            .started_at
            .elapsed()
            .as_secs()
            .is_multiple_of(STATUS_LINE_INTERVAL_SECONDS)
        {
            return;
        }
        let rows = self.live_rows();
        let sum =
            |client, count: fn(&Row) -> u64| -> u64 { rows.iter().filter(|row| row.client == client).map(count).sum() };
        print_progress(&format!(
            "{}  {} requests in the last second, {} failed; {} from outside refused{}",
            format_clock(self.started_at.elapsed()),
            sum(Client::Load, |row| row.requests),
            sum(Client::Load, |row| row.failed),
            sum(Client::Outside, |row| row.failed),
            match self.active_faults.first() {
                Some(fault) => format!("; {}", fault.target.problem()),
                None => String::new(),
            }
        ));
    }
}

/// SIGINT, SIGTERM and SIGHUP.
struct Signals(Signal, Signal, Signal);

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let on = |kind| signal(kind).context("installing signal handlers");
        Ok(Self(
            on(SignalKind::interrupt())?,
            on(SignalKind::terminate())?,
            on(SignalKind::hangup())?,
        ))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
            _ = self.2.recv() => {}
        }
    }
}

async fn read_lines(edge_index: usize, output: ChildStdout, lines: mpsc::Sender<(usize, String)>) {
    let mut reader = BufReader::new(output).lines();
    while let Ok(Some(line)) = reader.next_line().await {
        if lines.send((edge_index, line)).await.is_err() {
            return;
        }
    }
}

const TICK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of reports that wait to be processed.
const REPORT_CHANNEL_CAPACITY: usize = 64;
/// Shorter `--once` runs have no outage of the control plane.
const MIN_RUN_WITH_OUTAGE_SECONDS: u64 = 20;
const OUTAGE_DURATION: Duration = Duration::from_secs(10);
/// Maximum time for the load generators to report and to exit. It is longer than a request can take.
const STOP_TIMEOUT: Duration = Duration::from_secs(8);
/// Number of events that the table shows.
const MAX_SHOWN_EVENTS: usize = 8;
/// Seconds between two status lines if the output is not a terminal.
const STATUS_LINE_INTERVAL_SECONDS: u64 = 5;
const CERT_REFRESHES_METRIC: &str = "control_identity_cert_refreshes_total";
