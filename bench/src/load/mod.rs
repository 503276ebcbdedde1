//! The load generator: open or closed loop, own connections, no retries, every outcome counted.
//!
//! A run has workers; each owns a connection (HTTP/1, TCP, WebSocket) or a stream slot of one (HTTP/2, gRPC) and takes
//! requests from one schedule.
//! A broken connection fails the request that used it and is replaced by the next one.
//! Tallies are taken from the threads at each report and added up.

mod grpc;
mod http;
mod outcome;
mod schedule;
pub mod tally;
mod target;
mod tcp;
mod timer;
mod worker;
mod ws;

use std::io::Write as _;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use parking_lot::Mutex;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use self::schedule::Schedule;
use self::tally::{Kind, Report, Tally};
use self::target::{Header, Target};
use self::worker::Client;

/// What to send, where, and how fast.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// HOST:PORT, with a path for HTTP and WebSocket: "10.0.0.5:8080/echo". A scheme in front is ignored.
    pub target: String,
    #[arg(long, value_enum, default_value_t = Protocol::Http1)]
    pub protocol: Protocol,
    /// Open loop: this many requests a second on a fixed schedule. Without it each connection sends as soon as it is free.
    #[arg(long, value_parser = rate)]
    pub rate: Option<f64>,
    /// Connections; by default 1, or 64 in an open loop of a protocol without streams.
    #[arg(long)]
    pub connections: Option<NonZeroUsize>,
    /// Concurrent streams of each HTTP/2 connection; by default 1, or 64 in an open loop.
    #[arg(long)]
    pub streams: Option<NonZeroUsize>,
    /// How long to run; "10s" when neither this nor --requests is given.
    #[arg(long, value_parser = tulle_core::duration::parse)]
    pub duration: Option<Duration>,
    /// Stop after this many requests.
    #[arg(long)]
    pub requests: Option<u64>,
    /// Give a request up after this time, and count it as a timeout.
    #[arg(long, default_value = "10s", value_parser = tulle_core::duration::parse)]
    pub timeout: Duration,
    /// A request header "name: value" (repeatable; not for TCP).
    #[arg(long = "header", value_name = "NAME: VALUE")]
    pub headers: Vec<Header>,
    /// The Host or :authority of requests; by default the target's host and port.
    #[arg(long)]
    pub authority: Option<String>,
    /// Payload bytes of each request or message.
    #[arg(long, default_value_t = 0)]
    pub body_size: usize,
    #[arg(long, value_enum, default_value_t = Method::Unary)]
    pub grpc_method: Method,
    /// Messages of each gRPC stream.
    #[arg(long, default_value_t = 1)]
    pub messages: u32,
    /// TCP: the server speaks first, with a line that starts like this; a last word is taken for its name.
    #[arg(long, value_name = "TEXT")]
    pub expect_greeting: Option<String>,
    /// Use a new connection for every request.
    #[arg(long)]
    pub reconnect: bool,
    /// Threads, each with a runtime of its own and its share of the connections.
    #[arg(long, default_value = "1")]
    pub threads: NonZeroUsize,
    /// Print a JSON line about each such interval ("1s").
    #[arg(long, value_parser = tulle_core::duration::parse)]
    pub report_every: Option<Duration>,
    /// Print the final report as one line of JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub enum Protocol {
    Http1,
    Http2,
    Grpc,
    Tcp,
    Ws,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub enum Method {
    Unary,
    ServerStream,
    ClientStream,
    Bidi,
}

/// Runs until the end, SIGTERM or SIGINT, and prints the reports.
pub fn main(args: &Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("building the runtime")?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("watching for signals")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("watching for signals")?;
        let stop = async move {
            tokio::select! {
                _ = terminate.recv() => (),
                _ = interrupt.recv() => (),
            }
        };
        let report = run(args, stop, |interval| print(&json(interval))).await?;
        print(&if args.json { json(&report) } else { report.to_string() })
    })
}

fn json(report: &Report) -> String {
    let mut line = serde_json::to_string(report).expect("a report has string keys and finite numbers");
    line.push('\n');
    line
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("writing to standard output")
}

/// Runs until the end or until `stop`, hands interval reports on, and returns the report of the whole run.
pub async fn run(
    args: &Args,
    stop: impl Future<Output = ()>,
    mut on_interval: impl FnMut(&Report) -> anyhow::Result<()>,
) -> anyhow::Result<Report> {
    let target = Arc::new(Target::resolve(args).await?);
    let duration = args
        .duration
        .or_else(|| args.requests.is_none().then_some(DEFAULT_DURATION));
    let schedule = Arc::new(Schedule::new(args.rate, args.requests, duration));
    let (stopped, stopping) = watch::channel(None);
    let start = Instant::now();
    let mut tallies = Vec::new();
    let mut threads = Vec::new();
    for connections in shares(args.connections(), args.threads.get()) {
        let run = Run {
            target: target.clone(),
            schedule: schedule.clone(),
            stopping: stopping.clone(),
            tally: Arc::new(Mutex::new(Tally::new())),
            start,
            timeout: args.timeout,
        };
        tallies.push(run.tally.clone());
        let (done, ended) = oneshot::channel();
        let streams = args.streams();
        std::thread::Builder::new()
            .name("load".into())
            // Nobody waits any more when the run has failed elsewhere.
            .spawn(move || drop(done.send(work(&run, connections, streams))))
            .context("starting a thread")?;
        threads.push(async move { ended.await.context("a thread of the load generator panicked")? });
    }
    let mut threads = std::pin::pin!(futures_util::future::try_join_all(threads));
    let mut end = std::pin::pin!(async {
        match duration {
            Some(duration) => drop(tokio::time::timeout_at(start + duration, stop).await),
            None => stop.await,
        }
    });

    let mut total = Tally::new();
    let mut reported_at = start;
    let mut collect = |now: Instant| {
        let mut interval = Tally::new();
        for tally in &tallies {
            interval.merge(&std::mem::replace(&mut *tally.lock(), Tally::new()));
        }
        total.merge(&interval);
        let length = now - std::mem::replace(&mut reported_at, now);
        interval.report(Kind::Interval, now - start, length)
    };
    let mut ticks = tokio::time::interval(args.report_every.unwrap_or(DEFAULT_DURATION));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks.tick().await;
    let mut stopped_at = None;
    loop {
        tokio::select! {
            ended = &mut threads => {
                ended?;
                break;
            }
            () = &mut end, if stopped_at.is_none() => {
                stopped_at = Some(Instant::now());
                stopped.send_replace(stopped_at);
            }
            _ = ticks.tick(), if args.report_every.is_some() => on_interval(&collect(Instant::now()))?,
        }
    }
    let elapsed = stopped_at.unwrap_or_else(Instant::now) - start;
    if let Some(tally) = tallies.first() {
        tally.lock().record_unsent(schedule.unclaimed(elapsed));
    }
    let rest = collect(Instant::now());
    if args.report_every.is_some() && rest.requests > 0 {
        on_interval(&rest)?;
    }
    Ok(total.report(Kind::Total, elapsed, elapsed))
}

/// One thread: its connections on a runtime of its own.
fn work(run: &Run, connections: usize, streams: usize) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("building the runtime")?;
    runtime.block_on(async {
        let mut workers = JoinSet::new();
        for _ in 0..connections {
            let client = Client::new(&run.target);
            for _ in 0..streams {
                workers.spawn(worker::work(run.clone(), client.another_stream()));
            }
        }
        while let Some(ended) = workers.join_next().await {
            ended
                .context("a worker panicked")?
                .context("waiting for the time a request is due")?;
        }
        Ok(())
    })
}

/// What the workers of one thread share.
#[derive(Clone)]
struct Run {
    target: Arc<Target>,
    schedule: Arc<Schedule>,
    /// When the run was stopped.
    stopping: watch::Receiver<Option<Instant>>,
    tally: Arc<Mutex<Tally>>,
    start: Instant,
    timeout: Duration,
}

impl Args {
    fn connections(&self) -> usize {
        let default = if self.rate.is_some() && !self.protocol.has_streams() {
            OPEN_LOOP_WIDTH
        } else {
            1
        };
        self.connections.map_or(default, NonZeroUsize::get)
    }

    fn streams(&self) -> usize {
        if !self.protocol.has_streams() {
            return 1;
        }
        let default = if self.rate.is_some() { OPEN_LOOP_WIDTH } else { 1 };
        self.streams.map_or(default, NonZeroUsize::get)
    }
}

impl Protocol {
    fn has_streams(self) -> bool {
        matches!(self, Self::Http2 | Self::Grpc)
    }
}

/// Splits `connections` over at most `threads` threads; none is idle.
fn shares(connections: usize, threads: usize) -> impl Iterator<Item = usize> {
    let threads = threads.min(connections);
    (0..threads).map(move |i| connections / threads + usize::from(i < connections % threads))
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (0.001..=1e7).contains(&rate) => Ok(rate),
        _ => Err(format!(
            "{text:?} is not a rate: give requests a second from 0.001 to 10000000"
        )),
    }
}

const DEFAULT_DURATION: Duration = Duration::from_secs(10);
/// Requests that an open loop can have in flight unless told otherwise.
const OPEN_LOOP_WIDTH: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_spread_over_threads_without_idle_ones() {
        let check = |connections, threads, expected: &[usize]| {
            assert_eq!(shares(connections, threads).collect::<Vec<_>>(), expected);
        };
        check(7, 3, &[3, 2, 2]);
        check(2, 8, &[1, 1]);
        check(64, 1, &[64]);
    }

    #[test]
    fn rates_that_make_no_sense_are_refused() {
        assert_eq!(rate("250.5"), Ok(250.5));
        for text in ["0", "-1", "nan", "inf", "1e9", "fast"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }
}
