//! One measurement: drive the traffic, and read what it cost the sidecars.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use super::peer::Sidecars;
use super::scene::{HTTP_PORT, SERVER, SERVICE, Scene, TCP_PORT};
use super::{Row, Traffic, tulle};
use crate::load::tally::Report;

/// What one measurement found.
pub(super) type Sample = BTreeMap<Metric, f64>;

/// What is measured; the names stand in the JSON and in `budgets.toml`.
#[derive(serde::Serialize, serde::Deserialize, Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[serde(rename_all = "snake_case")]
pub(super) enum Metric {
    RequestsPerSecond,
    P50Us,
    P99Us,
    /// Payload of one direction.
    MibPerSecond,
    /// CPU time of the client's sidecar per request, in microseconds; of a bulk row per message of 1 MiB, both ways.
    ClientCpuUs,
    ServerCpuUs,
    ClientRssMib,
    ServerRssMib,
    ClientIdleKib,
    ServerIdleKib,
    /// Allocations per request.
    ClientAllocations,
    ServerAllocations,
    /// Requests without a good answer.
    Failed,
}

/// What a load generator says.
struct Driven {
    requests: u64,
    seconds: f64,
    p50_us: f64,
    p99_us: f64,
    failed: u64,
}

/// Dials what there is to dial, so that no measurement contains the first handshake.
pub(super) fn warm_up(scene: &Scene, sidecars: Option<&Sidecars>, traffic: Traffic) -> anyhow::Result<()> {
    let host = host(sidecars);
    let driven = match traffic {
        Traffic::Http1 => wrk(scene, host, 1, WARM_UP)?,
        Traffic::Grpc => ghz(scene, host, WARM_UP)?,
        Traffic::Opaque => {
            // Connections are authorized when they open, the very first ones before the policy of their port is known.
            bulk(scene, host, WARM_UP)?;
            bulk(scene, host, WARM_UP)?
        }
    };
    ensure!(
        driven.requests > driven.failed,
        "no request of {} succeeded",
        driven.requests
    );
    Ok(())
}

/// Measures one row.
pub(super) fn measure(
    row: Row,
    scene: &Scene,
    sidecars: Option<&Sidecars>,
    duration: Duration,
) -> anyhow::Result<Sample> {
    let host = host(sidecars);
    match row {
        Row::Http1 => loaded(sidecars, || wrk(scene, host, 1, duration)),
        Row::Http16 => loaded(sidecars, || wrk(scene, host, 16, duration)),
        Row::Http64 => loaded(sidecars, || wrk(scene, host, 64, duration)),
        Row::Grpc => loaded(sidecars, || ghz(scene, host, duration)),
        Row::Bulk => {
            let mut sample = loaded(sidecars, || bulk(scene, host, duration))?;
            let messages = sample.get(&Metric::RequestsPerSecond).copied().unwrap_or_default();
            sample.insert(Metric::MibPerSecond, messages * BULK_SIZE as f64 / f64::from(1 << 20));
            Ok(sample)
        }
        Row::Idle => idle(scene, sidecars),
        Row::Allocations => allocations(scene, duration),
    }
}

/// Drives traffic, and reads what it cost the sidecars.
fn loaded(sidecars: Option<&Sidecars>, drive: impl FnOnce() -> anyhow::Result<Driven>) -> anyhow::Result<Sample> {
    let before = sidecars.map(cpu).transpose()?;
    let driven = drive()?;
    let after = sidecars.map(cpu).transpose()?;
    let requests = driven.requests as f64;
    ensure!(driven.requests > 0, "not one request ended");

    let mut sample = Sample::from([
        (Metric::RequestsPerSecond, requests / driven.seconds),
        (Metric::P50Us, driven.p50_us),
        (Metric::P99Us, driven.p99_us),
        (Metric::Failed, driven.failed as f64),
    ]);
    if let (Some(before), Some(after), Some(sidecars)) = (before, after, sidecars) {
        let per_request = |before: Duration, after: Duration| (after - before).as_secs_f64() * 1e6 / requests;
        sample.insert(Metric::ClientCpuUs, per_request(before.0, after.0));
        sample.insert(Metric::ServerCpuUs, per_request(before.1, after.1));
        sample.insert(Metric::ClientRssMib, sidecars.client.rss_kib()? as f64 / 1024.0);
        sample.insert(Metric::ServerRssMib, sidecars.server.rss_kib()? as f64 / 1024.0);
    }
    Ok(sample)
}

/// What clients dial: the service, which only sidecars know the endpoint of, or the server itself.
fn host(sidecars: Option<&Sidecars>) -> &'static str {
    if sidecars.is_some() { SERVICE } else { SERVER }
}

fn cpu(sidecars: &Sidecars) -> anyhow::Result<(Duration, Duration)> {
    Ok((sidecars.client.cpu()?, sidecars.server.cpu()?))
}

/// HTTP/1, a closed loop: its percentiles are those of a client that waits, not of one on a schedule.
fn wrk(scene: &Scene, host: &str, connections: u32, duration: Duration) -> anyhow::Result<Driven> {
    #[derive(Deserialize)]
    struct Summary {
        requests: u64,
        seconds: f64,
        p50_us: f64,
        p99_us: f64,
        failed: u64,
    }
    let mut command = scene.client.command("wrk");
    command
        .args([
            "-t1",
            &format!("-c{connections}"),
            &format!("-d{}s", duration.as_secs().max(1)),
            "-s",
        ])
        .arg(scene.file("wrk.lua"))
        .arg(format!("http://{host}:{HTTP_PORT}/"));
    let text = output(command)?;
    let json = text
        .lines()
        .find(|line| line.starts_with('{'))
        .with_context(|| format!("wrk printed {text:?}"))?;
    let s: Summary = serde_json::from_str(json).with_context(|| format!("wrk printed {json:?}"))?;
    Ok(Driven {
        requests: s.requests,
        seconds: s.seconds,
        p50_us: s.p50_us,
        p99_us: s.p99_us,
        failed: s.failed,
    })
}

/// gRPC unary calls, a closed loop.
fn ghz(scene: &Scene, host: &str, duration: Duration) -> anyhow::Result<Driven> {
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
        /// Nanoseconds.
        latency: f64,
    }
    let mut command = scene.client.command("ghz");
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
        .args(["--duration", &format!("{}s", duration.as_secs().max(1)), "--proto"])
        .arg(scene.file("echo.proto"))
        .arg(format!("{host}:{HTTP_PORT}"));
    let text = output(command)?;
    let s: Summary = serde_json::from_str(&text).context("reading the report of ghz")?;
    let percentiles = s.latency_distribution.unwrap_or_default();
    let at = |wanted| {
        let found = percentiles.iter().find(|p| p.percentage == wanted);
        found
            .map(|p| p.latency / 1e3)
            .with_context(|| format!("ghz reports no percentile {wanted}: {text}"))
    };
    let succeeded = s.status_code_distribution.get("OK").copied().unwrap_or_default();
    Ok(Driven {
        requests: s.count,
        seconds: s.count as f64 / s.rps,
        p50_us: at(50)?,
        p99_us: at(99)?,
        failed: s.count.saturating_sub(succeeded),
    })
}

/// Opaque bytes, echoed: both directions are loaded at the same time.
fn bulk(scene: &Scene, host: &str, duration: Duration) -> anyhow::Result<Driven> {
    let mut command = scene
        .client
        .command(std::env::current_exe().context("finding this program")?);
    command
        .args(["load", "--protocol", "tcp", "--connections", "4", "--json"])
        .args([
            "--body-size",
            &BULK_SIZE.to_string(),
            "--duration",
            &format!("{}ms", duration.as_millis()),
        ])
        .arg(format!("{host}:{TCP_PORT}"));
    let text = output(command)?;
    let report: Report = serde_json::from_str(&text).with_context(|| format!("the load generator printed {text:?}"))?;
    let latency = report
        .latency_us
        .with_context(|| format!("no message came back: {report}"))?;
    Ok(Driven {
        requests: report.requests,
        seconds: report.seconds,
        p50_us: latency.p50,
        p99_us: latency.p99,
        failed: report.failed,
    })
}

/// Memory that idle clients cost: each has had one answer and keeps its connection.
fn idle(scene: &Scene, sidecars: Option<&Sidecars>) -> anyhow::Result<Sample> {
    let Some(sidecars) = sidecars else {
        return Ok(Sample::new());
    };
    let rss = || anyhow::Ok((sidecars.client.rss_kib()? as f64, sidecars.server.rss_kib()? as f64));
    let before = rss()?;
    let clients = scene.client.run(|| {
        (0..IDLE_CLIENTS)
            .map(|_| idle_client())
            .collect::<anyhow::Result<Vec<_>>>()
    })??;
    let after = rss()?;
    drop(clients);
    let each = |before, after| (after - before) / f64::from(IDLE_CLIENTS);
    Ok(Sample::from([
        (Metric::ClientIdleKib, each(before.0, after.0)),
        (Metric::ServerIdleKib, each(before.1, after.1)),
    ]))
}

/// Allocations per request at 64 connections, by the difference of two counts of the counting build.
fn allocations(scene: &Scene, duration: Duration) -> anyhow::Result<Sample> {
    let count = || anyhow::Ok((tulle::allocations(&scene.client)?, tulle::allocations(&scene.server)?));
    let before = count()?;
    let driven = wrk(scene, SERVICE, 64, duration)?;
    let after = count()?;
    let each = |before, after| (after - before) as f64 / driven.requests as f64;
    Ok(Sample::from([
        (Metric::ClientAllocations, each(before.0, after.0)),
        (Metric::ServerAllocations, each(before.1, after.1)),
    ]))
}

fn idle_client() -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect((SERVICE, HTTP_PORT)).context("opening an idle connection")?;
    stream
        .set_read_timeout(Some(IDLE_TIMEOUT))
        .context("setting a timeout")?;
    let request = format!("GET / HTTP/1.1\r\nhost: {SERVICE}:{HTTP_PORT}\r\n\r\n");
    stream
        .write_all(request.as_bytes())
        .context("sending on an idle connection")?;
    let mut answer = [0; 4096];
    let n = stream.read(&mut answer).context("reading on an idle connection")?;
    let answer = &answer[..n];
    ensure!(
        answer.starts_with(b"HTTP/1.1 200"),
        "an idle connection got {:?}",
        String::from_utf8_lossy(answer)
    );
    Ok(stream)
}

fn output(mut command: Command) -> anyhow::Result<String> {
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

const WARM_UP: Duration = Duration::from_secs(1);
const BULK_SIZE: u64 = 1 << 20;
const IDLE_CLIENTS: u32 = 800;
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
