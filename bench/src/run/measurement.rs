//! One measurement: generates traffic and reads the resources that it uses in the sidecars.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::generators::{BULK_SIZE, BenchLoad, LoadResult, WrkLoad, bench_load, ghz, h2load, wrk};
use super::memory::Memory;
use super::metric::{Metric, Sample};
use super::process::Process;
use super::rows::Scenario;
use super::setup::Side;
use super::setup::{Setup, Traffic};
use super::sidecars::Sidecars;
use super::testbed::{HTTP_PORT, SERVER, SERVICE, TCP_PORT, Testbed};
use super::{hostile, slow, tulle};

/// Opens connections between the sidecars, so that no measurement contains their first handshake.
pub(super) fn warm_up(testbed: &Testbed, sidecars: Option<&Sidecars>, setup: &Setup) -> anyhow::Result<()> {
    let host = host(sidecars);
    let load_result = match setup.traffic {
        Traffic::Http1 => wrk(
            testbed,
            host,
            WrkLoad::get(if setup.workers > 1 { 64 } else { 1 }),
            WARM_UP,
        )?,
        Traffic::Http2 => ghz(testbed, host, WARM_UP)?,
        Traffic::Opaque => {
            // The first connections wait for the policy of their port, so the result of the first run does not count.
            bench_load(testbed, host, BenchLoad::Bulk, WARM_UP)?;
            bench_load(testbed, host, BenchLoad::Bulk, WARM_UP)?
        }
    };
    ensure!(
        load_result.requests > load_result.failed,
        "no request of {} succeeded",
        load_result.requests
    );
    Ok(())
}

/// Measures one row.
pub(super) fn measure(
    row: Scenario,
    testbed: &Testbed,
    sidecars: Option<&Sidecars>,
    duration: Duration,
) -> anyhow::Result<Sample> {
    let host = host(sidecars);
    let http1 = |load| measure_load(sidecars, || wrk(testbed, host, load, duration));
    let post = |connections, body| {
        let load = WrkLoad {
            body,
            ..WrkLoad::get(connections)
        };
        http1(load).map(|sample| with_bytes(sample, body as u64))
    };
    let own_generator = |load| measure_load(sidecars, || bench_load(testbed, host, load, duration));
    match row {
        Scenario::HttpC1 => http1(WrkLoad::get(1)),
        Scenario::HttpC16 => http1(WrkLoad::get(16)),
        Scenario::HttpC64
        | Scenario::OutboundOnly
        | Scenario::InboundOnly
        | Scenario::HttpC64Baseline
        | Scenario::Routed
        | Scenario::Rewritten
        | Scenario::Profiled
        | Scenario::OneWorker
        | Scenario::TwoWorkers => http1(WrkLoad::get(64)),
        Scenario::Post1Kib => post(16, 1 << 10),
        Scenario::Post32Kib => post(16, 32 << 10),
        Scenario::Post1Mib => post(4, 1 << 20),
        Scenario::NewHttp => http1(WrkLoad {
            close: true,
            ..WrkLoad::get(16)
        }),
        Scenario::Http2 => measure_load(sidecars, || h2load(testbed, host, duration)),
        Scenario::Grpc => measure_load(sidecars, || ghz(testbed, host, duration)),
        Scenario::GrpcStream => own_generator(BenchLoad::Streams),
        Scenario::Bulk => own_generator(BenchLoad::Bulk).map(|sample| with_bytes(sample, BULK_SIZE)),
        Scenario::NewMtls => own_generator(BenchLoad::Reconnect),
        Scenario::Idle => idle(testbed, sidecars, idle_http),
        Scenario::IdleOpaque => idle(testbed, sidecars, idle_opaque),
        Scenario::SlowHeads => slow::measure(testbed, sidecars.context("there is no sidecar")?, duration),
        Scenario::Hostile => hostile::measure(testbed, sidecars.context("there is no sidecar")?),
        Scenario::Allocations => allocations(testbed, duration),
    }
}

/// Adds the throughput; each request carries `bytes` in each direction.
fn with_bytes(mut sample: Sample, bytes: u64) -> Sample {
    let requests = sample.get(&Metric::RequestsPerSecond).copied().unwrap_or_default();
    sample.insert(Metric::MibPerSecond, requests * bytes as f64 / f64::from(1 << 20));
    sample
}

/// Generates load and measures the resources that it uses in the sidecars.
pub(super) fn measure_load(
    sidecars: Option<&Sidecars>,
    generate: impl FnOnce() -> anyhow::Result<LoadResult>,
) -> anyhow::Result<Sample> {
    let sides = sidecars.map_or(Vec::new(), Sidecars::sides);
    let usage = || {
        sides
            .iter()
            .map(|(_, process)| ResourceUsage::of(process))
            .collect::<anyhow::Result<Vec<_>>>()
    };
    let before = usage()?;
    let load_result = generate()?;
    let after = usage()?;
    let requests = load_result.requests as f64;
    ensure!(load_result.requests > 0, "no request completed");

    let mut sample = Sample::from([
        (Metric::RequestsPerSecond, requests / load_result.seconds),
        (Metric::P50Us, load_result.p50_us),
        (Metric::P99Us, load_result.p99_us),
        (Metric::Failed, load_result.failed as f64),
    ]);
    for ((side, process), (before, after)) in sides.iter().zip(before.iter().zip(&after)) {
        let [cpu, kernel, rss] = match side {
            Side::Client => [Metric::ClientCpuUs, Metric::ClientKernelPercent, Metric::ClientRssMib],
            Side::Server => [Metric::ServerCpuUs, Metric::ServerKernelPercent, Metric::ServerRssMib],
        };
        sample.insert(cpu, (after.cpu - before.cpu).as_secs_f64() * 1e6 / requests);
        let (user_ticks, kernel_ticks) = (after.ticks.0 - before.ticks.0, after.ticks.1 - before.ticks.1);
        let ticks = user_ticks + kernel_ticks;
        if ticks > 0 {
            sample.insert(kernel, kernel_ticks as f64 * 100.0 / ticks as f64);
        }
        sample.insert(rss, process.rss_kib()? as f64 / 1024.0);
    }
    Ok(sample)
}

/// Resources that a process has used so far.
struct ResourceUsage {
    cpu: Duration,
    /// Clock ticks in user mode and in the kernel.
    ticks: (u64, u64),
}

impl ResourceUsage {
    fn of(process: &Process) -> anyhow::Result<Self> {
        Ok(Self {
            cpu: process.cpu()?,
            ticks: process.ticks()?,
        })
    }
}

/// The address that clients dial: the service if the client has a sidecar, which discovers the endpoint, otherwise the server.
fn host(sidecars: Option<&Sidecars>) -> &'static str {
    if sidecars.is_some_and(|sidecars| sidecars.client.is_some()) {
        SERVICE
    } else {
        SERVER
    }
}

/// Memory per idle client. Each client has received one response and keeps its connection open.
fn idle(
    testbed: &Testbed,
    sidecars: Option<&Sidecars>,
    client: impl Fn() -> anyhow::Result<TcpStream> + Send + Sync,
) -> anyhow::Result<Sample> {
    let sides = sidecars.map_or(Vec::new(), Sidecars::sides);
    let memory = Memory::of(&sides)?;
    let clients = testbed
        .client
        .run(|| (0..IDLE_CLIENTS).map(|_| client()).collect::<anyhow::Result<Vec<_>>>())??;
    let grown = memory.grown(&sides, IDLE_CLIENTS)?;
    drop(clients);
    Ok(grown)
}

/// Allocations per request at 64 connections: the difference of two readings of the counting build.
fn allocations(testbed: &Testbed, duration: Duration) -> anyhow::Result<Sample> {
    let count = || {
        anyhow::Ok((
            tulle::read_allocations(&testbed.client)?,
            tulle::read_allocations(&testbed.server)?,
        ))
    };
    let before = count()?;
    let load_result = wrk(testbed, SERVICE, WrkLoad::get(64), duration)?;
    let after = count()?;
    let each = |before, after| (after - before) as f64 / load_result.requests as f64;
    Ok(Sample::from([
        (Metric::ClientAllocations, each(before.0.calls, after.0.calls)),
        (Metric::ServerAllocations, each(before.1.calls, after.1.calls)),
        (Metric::ClientAllocatedBytes, each(before.0.bytes, after.0.bytes)),
        (Metric::ServerAllocatedBytes, each(before.1.bytes, after.1.bytes)),
        (Metric::Failed, load_result.failed as f64),
    ]))
}

fn idle_http() -> anyhow::Result<TcpStream> {
    let request = format!("GET / HTTP/1.1\r\nhost: {SERVICE}:{HTTP_PORT}\r\n\r\n");
    idle_client(HTTP_PORT, request.as_bytes(), b"HTTP/1.1 200")
}

fn idle_opaque() -> anyhow::Result<TcpStream> {
    idle_client(TCP_PORT, b"hello", b"hello")
}

/// Opens a connection and waits for one response.
fn idle_client(port: u16, request: &[u8], expected: &[u8]) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect((SERVICE, port)).context("opening an idle connection")?;
    stream
        .set_read_timeout(Some(IDLE_TIMEOUT))
        .context("setting a timeout")?;
    stream.write_all(request).context("sending on an idle connection")?;
    let mut answer = [0; 4096];
    let n = stream.read(&mut answer).context("reading on an idle connection")?;
    ensure!(
        answer[..n].starts_with(expected),
        "an idle connection got {:?}",
        String::from_utf8_lossy(&answer[..n])
    );
    Ok(stream)
}

const WARM_UP: Duration = Duration::from_secs(1);
const IDLE_CLIENTS: u32 = 800;
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
