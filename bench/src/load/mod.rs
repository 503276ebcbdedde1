//! Load generator with an open or a closed loop. It uses its own connections, sends no retries, and counts every outcome.
//!
//! A run has workers. Each worker owns a connection (HTTP/1, TCP, WebSocket) or one stream of a connection (HTTP/2, gRPC), and
//! takes requests from a shared schedule. A broken connection fails the request that used it; the next request opens a new one.
//! Each report merges the counts of all threads.

mod args;
mod connect;
mod grpc;
mod http;
mod outcome;
mod schedule;
pub mod stats;
mod target;
mod tcp;
mod timer;
mod worker;
mod ws;

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use parking_lot::Mutex;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

pub use self::args::{Args, Arrivals, Method, Protocol};
use self::schedule::Schedule;
use self::stats::{IntervalStats, Report, ReportKind};
use self::target::Target;
use self::worker::{Client, ThreadContext};

/// Runs until the load ends or SIGTERM or SIGINT arrives, and prints the reports.
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

/// Runs until the load ends or `stop` completes. Passes interval reports to the callback and returns the report of the whole run.
pub async fn run(
    args: &Args,
    stop: impl Future<Output = ()>,
    mut on_interval: impl FnMut(&Report) -> anyhow::Result<()>,
) -> anyhow::Result<Report> {
    args.check()?;
    let duration = args
        .duration
        .or_else(|| args.requests.is_none().then_some(DEFAULT_DURATION));
    let schedule = Arc::new(Schedule::new(
        args.rate.map(|rate| (rate, args.arrivals)),
        args.requests,
        duration,
    )?);
    let target = Arc::new(Target::resolve(args).await?);
    let (stop_tx, stop_rx) = watch::channel(None);
    let start = Instant::now();
    let mut thread_stats = Vec::new();
    let mut threads = Vec::new();
    for connections in connections_per_thread(args.connections(), args.threads.get()) {
        let context = ThreadContext {
            target: target.clone(),
            schedule: schedule.clone(),
            stopped_at: stop_rx.clone(),
            stats: Arc::new(Mutex::new(IntervalStats::new())),
            start,
            timeout: args.timeout,
            think_time: args.think_time,
        };
        thread_stats.push(context.stats.clone());
        let (result_tx, result_rx) = oneshot::channel();
        let streams = args.streams();
        std::thread::Builder::new()
            .name("load".into())
            // The receiver is gone if another thread has failed.
            .spawn(move || drop(result_tx.send(run_thread(&context, connections, streams))))
            .context("starting a thread")?;
        threads.push(async move { result_rx.await.context("a thread of the load generator panicked")? });
    }
    let mut threads = std::pin::pin!(futures_util::future::try_join_all(threads));
    let mut end = std::pin::pin!(async {
        match duration {
            Some(duration) => drop(tokio::time::timeout_at(start + duration, stop).await),
            None => stop.await,
        }
    });

    let mut total = IntervalStats::new();
    let mut reported_at = start;
    let mut collect = |now: Instant| {
        let mut interval = IntervalStats::new();
        for stats in &thread_stats {
            interval.merge(&std::mem::replace(&mut *stats.lock(), IntervalStats::new()));
        }
        total.merge(&interval);
        let length = now - std::mem::replace(&mut reported_at, now);
        interval.report(ReportKind::Interval, now - start, length)
    };
    // Without `--report-every`, the ticks are not used.
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
                stop_tx.send_replace(stopped_at);
            }
            _ = ticks.tick(), if args.report_every.is_some() => on_interval(&collect(Instant::now()))?,
        }
    }
    let elapsed = stopped_at.unwrap_or_else(Instant::now) - start;
    if let Some(stats) = thread_stats.first() {
        stats.lock().record_unsent(schedule.n_unsent(elapsed));
    }
    let rest = collect(Instant::now());
    if args.report_every.is_some() && rest.requests > 0 {
        on_interval(&rest)?;
    }
    Ok(total.report(ReportKind::Total, elapsed, elapsed))
}

/// Runs one thread with its connections on its own runtime.
fn run_thread(context: &ThreadContext, connections: usize, streams: usize) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("building the runtime")?;
    runtime.block_on(async {
        let mut workers = JoinSet::new();
        for _ in 0..connections {
            let client = Client::new(&context.target);
            for _ in 0..streams {
                workers.spawn(worker::run_worker(context.clone(), client.client_for_next_worker()));
            }
        }
        while let Some(ended) = workers.join_next().await {
            ended
                .context("a worker panicked")?
                .context("waiting until a request is due")?;
        }
        Ok(())
    })
}

/// Splits `connections` over at most `threads` threads. Each thread gets at least one connection.
fn connections_per_thread(connections: usize, threads: usize) -> impl Iterator<Item = usize> {
    let threads = threads.min(connections);
    (0..threads).map(move |i| connections / threads + usize::from(i < connections % threads))
}

const DEFAULT_DURATION: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_gets_a_connection_and_connections_are_spread_evenly() {
        let check = |connections, threads, expected: &[usize]| {
            assert_eq!(
                connections_per_thread(connections, threads).collect::<Vec<_>>(),
                expected
            );
        };
        check(7, 3, &[3, 2, 2]);
        check(2, 8, &[1, 1]);
        check(64, 1, &[64]);
    }
}
