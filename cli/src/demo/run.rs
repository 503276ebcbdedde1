//! Watches the running mesh: draws it each second, breaks and repairs it, ends it, and judges it.

use std::collections::VecDeque;
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

use super::broken::{Broken, Target};
use super::edges::{Client, Edge, edges};
use super::faults::{Answer, Fault, Listener, Request};
use super::janitor::Janitor;
use super::load::Reports;
use super::outcome::Outcome;
use super::process::Process;
use super::rows::{self, Row, Scrapes};
use super::rundir::{Kept, RunDir};
use super::stage::{self, Plan, Stage, say};
use super::table::{self, View};
use super::topology::App;
use super::{Args, Balancer, Output, checks};
use crate::screen::Screen;

/// Builds the mesh, runs it until it is told to end, and cleans up.
pub(super) async fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new()?;
    stage::sweep(Kept::Remove)?;
    let _janitor = Janitor::hire()?;
    let dir = Arc::new(RunDir::create()?);
    let plan = Plan {
        manifests: args.manifests.as_deref(),
        balancer: args.balancer,
    };
    // Dropping a half-built mesh ends what has been started.
    let problems = tokio::select! {
        built = stage::build(&plan, dir.clone()) => run(built, args, &mut signals).await,
        () = signals.next() => {
            say("interrupted before the mesh was ready");
            return Ok(ExitCode::FAILURE);
        }
    };
    match problems {
        Ok(problems) if problems.is_empty() => Ok(ExitCode::SUCCESS),
        failed => {
            dir.keep_logs();
            say(&format!("the logs of all processes are in {}", dir.logs().display()));
            failed.map(|_| ExitCode::FAILURE)
        }
    }
}

/// Runs a mesh that has been built, and returns what is off.
async fn run(built: anyhow::Result<Stage>, args: &Args, signals: &mut Signals) -> anyhow::Result<Vec<String>> {
    let mut demo = Demo::start(built.context("building the mesh")?, args)?;
    demo.run(args, signals).await
}

/// The running mesh and what is known about it.
pub(super) struct Demo {
    pub(super) stage: Stage,
    edges: Vec<Edge>,
    reports: Vec<Reports>,
    generators: Vec<Process>,
    /// Dropping it ends the tasks that read the generators' reports.
    _readers: JoinSet<()>,
    lines: mpsc::Receiver<(usize, String)>,
    pub(super) scrapes: Scrapes,
    listener: Listener,
    started_at: Instant,
    events: Vec<String>,
    /// What is broken now.
    pub(super) broken: Vec<Broken>,
    /// What went wrong without anybody having asked for it.
    accidents: Vec<String>,
    balancer: Balancer,
}

impl Demo {
    /// Starts the load on a mesh that is ready.
    fn start(stage: Stage, args: &Args) -> anyhow::Result<Self> {
        let edges = edges(&stage.topology);
        let (sender, lines) = mpsc::channel(LINES);
        let (mut generators, mut readers) = (Vec::new(), JoinSet::new());
        for (at, edge) in edges.iter().enumerate() {
            let host = match edge.client {
                Client::Load => stage.topology.load().map_or("load", |load| load.name.as_str()),
                Client::Outside => "outside",
            };
            let mut generator = stage.load(host, edge.file_name(), edge.arguments())?;
            if let Some(output) = generator.take_output() {
                readers.spawn(read_lines(at, output, sender.clone()));
            }
            generators.push(generator);
        }
        let listener = Listener::bind(&stage.dir.socket())?;
        say("traffic flows");
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
            broken: Vec::new(),
            accidents: Vec::new(),
            balancer: args.balancer,
            stage,
        })
    }

    /// Runs until the time of `--once` is over or a signal comes; returns what is off.
    async fn run(&mut self, args: &Args, signals: &mut Signals) -> anyhow::Result<Vec<String>> {
        let mut screen = Screen::new();
        let draw = screen.is_terminal() && args.output != Some(Output::Json);
        let end = args.once.map(|seconds| self.started_at + Duration::from_secs(seconds));
        let mut planned = VecDeque::new();
        if let Some(seconds) = args.once.filter(|seconds| *seconds >= OUTAGE_FROM) {
            planned.push_back(self.started_at + Duration::from_secs(seconds) / 4);
        }
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            // All branches can be dropped while they wait; a lost request for a fault is told to who asked.
            tokio::select! {
                () = signals.next() => break,
                Some((edge, line)) = self.lines.recv() => self.take(edge, &line),
                asked = self.listener.next() => {
                    let asked = asked.context("listening for faults")?;
                    let answer = self.break_now(asked.request).await;
                    asked.answer(answer).await;
                }
                _ = ticks.tick() => {
                    let now = Instant::now();
                    if planned.pop_front_if(|at| *at <= now).is_some() {
                        let request = Request { fault: Fault::ControlPlane, seconds: OUTAGE.as_secs_f64() };
                        if let Answer::Refused(why) = self.break_now(request).await {
                            self.accidents.push(format!("the planned outage of the control plane did not happen: {why}"));
                        }
                    }
                    self.scrape().await;
                    self.repair().await?;
                    self.look_for_accidents();
                    if draw {
                        screen.draw(&self.draw(Screen::width()));
                    } else if args.output != Some(Output::Json) {
                        self.say_line();
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

    /// Prints the result and says what is off.
    fn finish(&mut self, args: &Args, seconds: f64) -> anyhow::Result<Vec<String>> {
        let rows: Vec<Row> = (self.edges.iter().zip(&self.reports))
            .map(|(edge, reports)| rows::total(edge, reports, &self.scrapes))
            .collect();
        let mut problems = Vec::new();
        // Interrupted by a person, the run is theirs to judge.
        if args.once.is_some() {
            problems = checks::check(&self.stage.topology, &self.edges, &rows, self.balancer);
            problems.extend(self.accidents.iter().cloned());
            let pending = self
                .broken
                .iter()
                .map(|broken| format!("{} was not back in time", broken.what.name()));
            problems.extend(pending);
        }
        let balancer = match self.balancer {
            Balancer::PeakEwma => "peak-ewma",
            Balancer::RoundRobin => "round-robin",
        };
        let json = Outcome::new(seconds, balancer, &rows, &self.events, &problems).json();
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
            say(&format!("off: {problem}"));
        }
        if args.once.is_some() && problems.is_empty() {
            say("everything is as promised");
        }
        Ok(problems)
    }

    fn take(&mut self, edge: usize, line: &str) {
        if let Some(reports) = self.reports.get_mut(edge) {
            reports.take(line);
        }
    }

    /// Asks each sidecar for its metrics; one that does not answer keeps its last.
    async fn scrape(&mut self) {
        for (name, sidecar) in &mut self.stage.sidecars {
            for admin in &mut sidecar.admin {
                if let Ok(page) = admin.get("/metrics").await {
                    self.scrapes.insert(name.clone(), Samples::parse(&page));
                }
            }
        }
    }

    /// Finds processes that ended though nobody has broken them.
    fn look_for_accidents(&mut self) {
        let down: Vec<String> = self.broken.iter().map(|broken| broken.what.process()).collect();
        let mut found = Vec::new();
        let generators = self.generators.iter_mut();
        for process in self
            .stage
            .services()
            .map(|service| &mut service.process)
            .chain(generators)
        {
            if let Some(status) = process
                .ended()
                .filter(|_| !down.iter().any(|name| name == process.name()))
            {
                found.push(format!(
                    "{} ended by itself with {status}: {}",
                    process.name(),
                    process.last_words()
                ));
            }
        }
        for accident in found {
            // The same process is dead in the next second as well.
            if !self.accidents.contains(&accident) {
                self.event(&accident);
                self.accidents.push(accident);
            }
        }
    }

    /// Ends the generators, which report their totals then.
    async fn stop_load(&mut self) {
        for generator in &self.generators {
            generator.terminate();
        }
        let all_reported = async {
            while self.reports.iter().any(|reports| reports.total.is_none()) {
                let Some((edge, line)) = self.lines.recv().await else {
                    return;
                };
                if let Some(reports) = self.reports.get_mut(edge) {
                    reports.take(&line);
                }
            }
        };
        // A generator that reports nothing has a row without requests, which is a problem with a name.
        let _ = timeout(STOP_LIMIT, all_reported).await;
        for generator in &mut self.generators {
            generator.wait(STOP_LIMIT).await;
        }
    }

    /// Failures on permitted edges so far.
    pub(super) fn failed(&self) -> u64 {
        let permitted = self
            .edges
            .iter()
            .zip(&self.reports)
            .filter(|(edge, _)| edge.client == Client::Load);
        permitted.map(|(_, reports)| reports.failed).sum()
    }

    pub(super) fn event(&mut self, what: &str) {
        self.events
            .push(format!("{}  {what}", clock(self.started_at.elapsed())));
    }

    fn draw(&self, width: usize) -> String {
        let rows = self.live_rows();
        let control = match self.broken.iter().find(|broken| broken.what == Target::ControlPlane) {
            Some(broken) => format!("DOWN for {} s", broken.since.elapsed().as_secs()),
            None => "up".to_owned(),
        };
        let renewals: f64 = self
            .scrapes
            .values()
            .map(|samples| samples.sum(REFRESHES, &[("result", "ok")]))
            .sum();
        let title = format!(
            "tulle demo {}   control plane: {control}   certificates issued: {renewals}   trust domain: {}",
            clock(self.started_at.elapsed()),
            self.stage.topology.trust_domain
        );
        self.table(title, &rows, width)
    }

    fn live_rows(&self) -> Vec<Row> {
        let edges = self.edges.iter().zip(&self.reports);
        edges
            .map(|(edge, reports)| rows::live(edge, reports, &self.scrapes))
            .collect()
    }

    fn table(&self, title: String, rows: &[Row], width: usize) -> String {
        let web = self
            .stage
            .topology
            .workloads
            .iter()
            .filter_map(|workload| match workload.app {
                App::Web(delay) if delay.is_zero() => Some((workload.name.clone(), String::new())),
                App::Web(delay) => Some((workload.name.clone(), format!("each answer {delay:?} late"))),
                _ => None,
            });
        let services = [("web", web.collect())];
        let events = &self.events[self.events.len().saturating_sub(EVENTS)..];
        let view = View {
            title,
            rows,
            services: &services,
            events,
        };
        table::render(&view, width)
    }

    /// The state in a line, where nothing can be drawn over.
    fn say_line(&self) {
        if !self.started_at.elapsed().as_secs().is_multiple_of(LINE_EVERY) {
            return;
        }
        let rows = self.live_rows();
        let sum = |client, of: fn(&Row) -> u64| -> u64 { rows.iter().filter(|row| row.client == client).map(of).sum() };
        say(&format!(
            "{}  {} requests in the last second, {} failed; {} from outside refused{}",
            clock(self.started_at.elapsed()),
            sum(Client::Load, |row| row.requests),
            sum(Client::Load, |row| row.failed),
            sum(Client::Outside, |row| row.failed),
            match self.broken.first() {
                Some(broken) => format!("; {} is broken", broken.what.name()),
                None => String::new(),
            }
        ));
    }
}

/// SIGINT and SIGTERM.
struct Signals(Signal, Signal, Signal);

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let on = |kind| signal(kind).context("watching for signals");
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

async fn read_lines(edge: usize, output: ChildStdout, lines: mpsc::Sender<(usize, String)>) {
    let mut reader = BufReader::new(output).lines();
    while let Ok(Some(line)) = reader.next_line().await {
        if lines.send((edge, line)).await.is_err() {
            return;
        }
    }
}

fn clock(elapsed: Duration) -> String {
    let seconds = elapsed.as_secs();
    format!("{:02}:{:02}", seconds / 60, seconds % 60)
}

const TICK: Duration = Duration::from_secs(1);
/// Reports on their way.
const LINES: usize = 64;
/// Seconds of `--once` from which on the control plane is killed for a while.
const OUTAGE_FROM: u64 = 20;
const OUTAGE: Duration = Duration::from_secs(10);
/// Longer than a request may take.
const STOP_LIMIT: Duration = Duration::from_secs(8);
/// Events that are shown.
const EVENTS: usize = 8;
/// Seconds between lines where there is no terminal.
const LINE_EVERY: u64 = 5;
const REFRESHES: &str = "control_identity_cert_refreshes_total";
