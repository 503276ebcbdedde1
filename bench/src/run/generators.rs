//! The load generators and their results. Each is a separate program in the client's namespace.
//!
//! wrk, h2load and ghz run in a closed loop. Their percentiles do not include the delay that requests on a fixed schedule would
//! have.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use tulle_core::duration;

use super::testbed::{HTTP_PORT, TCP_PORT, Testbed};
use crate::load::stats::Report;

/// The result of a load generator.
pub(super) struct LoadResult {
    /// Messages for [`BenchLoad::Streams`], whose latencies and failures are those of whole streams.
    pub(super) requests: u64,
    pub(super) seconds: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) failed: u64,
}

impl LoadResult {
    /// The number of requests that take this time at the same rate.
    pub(super) fn requests_within(&self, duration: Duration) -> u64 {
        (self.requests as f64 / self.seconds * duration.as_secs_f64()).ceil() as u64
    }

    /// The result of requests with these times in microseconds, of which there must be one.
    pub(super) fn from_times(mut times: Vec<u64>, duration: Duration, failed: u64) -> Self {
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100] as f64;
        Self {
            requests: times.len() as u64,
            seconds: duration.as_secs_f64(),
            p50_us: at(50),
            p99_us: at(99),
            failed,
        }
    }
}

/// The HTTP/1 requests that wrk sends.
#[derive(Clone, Copy, Debug)]
pub(super) struct WrkLoad {
    pub(super) connections: u32,
    /// Request body size in bytes, for a POST to the echo path; 0 for a GET.
    pub(super) body: usize,
    /// Whether each request uses a new connection.
    pub(super) reconnect: bool,
}

impl WrkLoad {
    /// GET requests on this number of connections.
    pub(super) fn get_requests(connections: u32) -> Self {
        Self {
            connections,
            body: 0,
            reconnect: false,
        }
    }
}

/// HTTP/1 load with wrk.
pub(super) fn wrk(testbed: &Testbed, host: &str, load: WrkLoad, duration: Duration) -> anyhow::Result<LoadResult> {
    #[derive(Deserialize)]
    struct Summary {
        requests: u64,
        seconds: f64,
        p50_us: f64,
        p99_us: f64,
        failed: u64,
    }
    let path = if load.body > 0 { "/echo" } else { "/" };
    let mut command = testbed.client.command("wrk");
    command
        .args([
            "-t1",
            &format!("-c{}", load.connections),
            &seconds_option("-d", duration),
            "-s",
        ])
        .arg(testbed.file("wrk.lua"))
        .arg(format!("http://{host}:{HTTP_PORT}{path}"))
        .args([
            "--",
            &load.body.to_string(),
            if load.reconnect { "close" } else { "keep-alive" },
        ]);
    let text = run_to_end(command)?;
    let json = text
        .lines()
        .find(|line| line.starts_with('{'))
        .with_context(|| format!("wrk printed {text:?}"))?;
    let s: Summary = serde_json::from_str(json).with_context(|| format!("wrk printed {json:?}"))?;
    Ok(LoadResult {
        requests: s.requests,
        seconds: s.seconds,
        p50_us: s.p50_us,
        p99_us: s.p99_us,
        failed: s.failed,
    })
}

/// HTTP/2 load with h2load, which writes the duration of each request to a file.
pub(super) fn h2load(testbed: &Testbed, host: &str, duration: Duration) -> anyhow::Result<LoadResult> {
    let log = testbed.file("h2load.tsv");
    if log.exists() {
        std::fs::remove_file(&log).context("removing the log of an earlier h2load")?;
    }
    let mut command = testbed.client.command("h2load");
    command
        .args(["-c4", "-m16", &seconds_option("-D", duration), "--log-file"])
        .arg(&log)
        .arg(format!("http://{host}:{HTTP_PORT}/"));
    let text = run_to_end(command)?;
    let log = std::fs::read_to_string(&log).with_context(|| format!("h2load printed {text:?}"))?;
    // Columns: start time, status, duration. Times are in microseconds.
    let mut failed = 0;
    let times: Vec<u64> = log
        .lines()
        .filter_map(|line| {
            let mut fields = line.split('\t').skip(1);
            let (status, time) = (fields.next()?, fields.next()?.parse().ok()?);
            failed += u64::from(status != "200");
            Some(time)
        })
        .collect();
    ensure!(!times.is_empty(), "h2load printed {text:?}");
    Ok(LoadResult::from_times(times, duration, failed))
}

/// gRPC unary calls with ghz.
pub(super) fn ghz(testbed: &Testbed, host: &str, duration: Duration) -> anyhow::Result<LoadResult> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Summary {
        count: u64,
        rps: f64,
        #[serde(default)]
        latency_distribution: Option<Vec<Percentile>>,
        #[serde(default)]
        status_code_distribution: BTreeMap<String, u64>,
    }
    #[derive(Deserialize)]
    struct Percentile {
        percentage: u32,
        /// In nanoseconds.
        latency: f64,
    }
    let mut command = testbed.client.command("ghz");
    command
        .args([
            "--insecure",
            "--call",
            "tulle.bench.Echo/Unary",
            "--data",
            r#"{"payload":"aGVsbG8="}"#,
        ])
        .args([
            "--concurrency",
            "32",
            "--connections",
            "4",
            "--duration-stop",
            "wait",
            "--format",
            "json",
        ])
        .args(["--duration", &format!("{}s", duration.as_secs()), "--proto"])
        .arg(testbed.file("echo.proto"))
        .arg(format!("{host}:{HTTP_PORT}"));
    let text = run_to_end(command)?;
    let s: Summary = serde_json::from_str(&text).context("reading the report of ghz")?;
    let percentiles = s.latency_distribution.unwrap_or_default();
    let at = |wanted| {
        let found = percentiles.iter().find(|p| p.percentage == wanted);
        found
            .map(|p| p.latency / 1e3)
            .with_context(|| format!("ghz reports no percentile {wanted}: {text}"))
    };
    let succeeded = s.status_code_distribution.get("OK").copied().unwrap_or_default();
    Ok(LoadResult {
        requests: s.count,
        seconds: s.count as f64 / s.rps,
        p50_us: at(50)?,
        p99_us: at(99)?,
        failed: s.count.saturating_sub(succeeded),
    })
}

/// Sends this many HTTP/1 requests, one at a time, on one connection.
pub(super) fn send_sequential_requests(testbed: &Testbed, host: &str, requests: u32) -> anyhow::Result<()> {
    let mut command = testbed.client.command("h2load");
    command
        .args(["--h1", "-c1", "-n", &requests.to_string()])
        .arg(format!("http://{host}:{HTTP_PORT}/"));
    let text = run_to_end(command)?;
    ensure!(
        text.contains(&format!(" {requests} succeeded")),
        "h2load printed {text:?}"
    );
    Ok(())
}

/// Sends this many HTTP/1 requests, each on a new connection, with `tulle-bench load`, because h2load cannot do this.
pub(super) fn send_requests_on_new_connections(testbed: &Testbed, host: &str, requests: u32) -> anyhow::Result<()> {
    let mut command = testbed
        .client
        .command(std::env::current_exe().context("finding this program")?);
    command
        .args(["load", "--json", "--reconnect", "--header", "connection: close"])
        .args(["--requests", &requests.to_string()])
        .arg(format!("{host}:{HTTP_PORT}"));
    let report = run_bench_load(command)?;
    ensure!(
        report.requests == u64::from(requests) && report.failed == 0,
        "the load generator reports: {report}"
    );
    Ok(())
}

/// A load of `tulle-bench load`, the load generator of this program.
#[derive(Clone, Copy, Debug)]
pub(super) enum BenchLoad {
    /// Echoed messages of 1 MiB, so that both directions carry load at the same time.
    Bulk,
    /// Echoed messages of 64 bytes.
    Small,
    /// One message per connection.
    Reconnect,
    /// Bidirectional gRPC streams.
    Streams,
}

/// Load with our own generator, `tulle-bench load`.
pub(super) fn bench_load(
    testbed: &Testbed,
    host: &str,
    load: BenchLoad,
    duration: Duration,
) -> anyhow::Result<LoadResult> {
    let mut command = testbed
        .client
        .command(std::env::current_exe().context("finding this program")?);
    command.args(["load", "--json", "--duration", &format!("{}ms", duration.as_millis())]);
    let (args, port, messages) = match load {
        BenchLoad::Bulk => (
            format!("--protocol tcp --connections 4 --body-size {BULK_MESSAGE_BYTES}"),
            TCP_PORT,
            1,
        ),
        BenchLoad::Small => ("--protocol tcp --connections 50 --body-size 64".to_owned(), TCP_PORT, 1),
        BenchLoad::Reconnect => (
            "--protocol tcp --connections 16 --body-size 64 --reconnect".to_owned(),
            TCP_PORT,
            1,
        ),
        BenchLoad::Streams => (
            format!(
                "--protocol grpc --grpc-method bidi --connections 4 --streams 8 --body-size 64 --messages {MESSAGES_PER_STREAM}"
            ),
            HTTP_PORT,
            MESSAGES_PER_STREAM,
        ),
    };
    command.args(args.split(' ')).arg(format!("{host}:{port}"));
    let report = run_bench_load(command)?;
    let latency = report
        .latency_us
        .with_context(|| format!("no message came back: {report}"))?;
    Ok(LoadResult {
        requests: report.requests * messages,
        seconds: report.seconds,
        p50_us: latency.p50,
        p99_us: latency.p99,
        failed: report.failed,
    })
}

/// HTTP/1 load with our own generator, `tulle-bench load`, and these arguments.
pub(super) fn bench_load_http1(
    testbed: &Testbed,
    host: &str,
    arguments: &[String],
    duration: Duration,
) -> anyhow::Result<LoadResult> {
    let mut command = testbed
        .client
        .command(std::env::current_exe().context("finding this program")?);
    command.args(["load", "--json", "--duration", &format!("{}ms", duration.as_millis())]);
    command.args(arguments).arg(format!("{host}:{HTTP_PORT}/"));
    let report = run_bench_load(command)?;
    let latency = report
        .latency_us
        .with_context(|| format!("there was no response: {report}"))?;
    Ok(LoadResult {
        requests: report.requests,
        seconds: report.seconds,
        p50_us: latency.p50,
        p99_us: latency.p99,
        failed: report.failed,
    })
}

fn run_bench_load(command: Command) -> anyhow::Result<Report> {
    let text = run_to_end(command)?;
    serde_json::from_str(&text).with_context(|| format!("the load generator printed {text:?}"))
}

/// Parses the duration of a measurement: whole seconds, because wrk, h2load and ghz would cut other durations.
pub(super) fn parse_whole_seconds(text: &str) -> Result<Duration, String> {
    let duration = duration::parse(text).map_err(|error| error.to_string())?;
    if duration < Duration::from_secs(1) || duration.subsec_nanos() > 0 {
        return Err(format!(
            "{text:?} is not a number of whole seconds; expected at least 1s"
        ));
    }
    Ok(duration)
}

/// A command line option in seconds.
pub(super) fn seconds_option(option: &str, duration: Duration) -> String {
    format!("{option}{}", duration.as_secs())
}

pub(super) fn run_to_end(mut command: Command) -> anyhow::Result<String> {
    let output = command
        .output()
        .with_context(|| format!("starting {:?}", command.get_program()))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{:?} ended with {}: {errors}",
        command.get_program(),
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

pub(super) const BULK_MESSAGE_BYTES: u64 = 1 << 20;
const MESSAGES_PER_STREAM: u64 = 100;
