//! One measurement: generates traffic and reads the resources that it uses in the sidecars.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::brokers;
use super::databases::{self, PgbenchLoad, RedisLoad};
use super::generators::{BULK_MESSAGE_BYTES, BenchLoad, LoadResult, WrkLoad, bench_load, ghz, h2load, wrk};
use super::memory::ResidentMemory;
use super::metric::{Metric, Sample};
use super::process::Process;
use super::rows::Scenario;
use super::setup::Side;
use super::setup::{Setup, TcpApp, Traffic};
use super::sidecars::Sidecars;
use super::testbed::{HTTP_PORT, SERVER_IP, SERVICE_IP, TCP_PORT, Testbed};
use super::{hostile, slow, tcp_apps, tulle};

/// Opens connections between the sidecars, so that no measurement contains their first handshake.
pub(super) fn warm_up(testbed: &Testbed, sidecars: Option<&Sidecars>, setup: &Setup) -> anyhow::Result<()> {
    let host = dialled_ip(sidecars);
    let load_result = match setup.traffic {
        Traffic::Http1 => wrk(
            testbed,
            host,
            WrkLoad::get_requests(if setup.workers > 1 { 64 } else { 1 }),
            WARM_UP_DURATION,
        )?,
        Traffic::Http2 => ghz(testbed, host, WARM_UP_DURATION)?,
        Traffic::Opaque if setup.tcp_app != TcpApp::Echo => tcp_apps::send_some_requests(setup.tcp_app, testbed, host)?,
        Traffic::Opaque => {
            // The first connections wait for the policy of their port, so the result of the first run does not count.
            bench_load(testbed, host, BenchLoad::Bulk, WARM_UP_DURATION)?;
            bench_load(testbed, host, BenchLoad::Bulk, WARM_UP_DURATION)?
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
    let host = dialled_ip(sidecars);
    let http1 = |load| measure_load(sidecars, || wrk(testbed, host, load, duration));
    let post = |connections, body| {
        let load = WrkLoad {
            body,
            ..WrkLoad::get_requests(connections)
        };
        http1(load).map(|sample| add_throughput(sample, body as u64))
    };
    let bench_load_sample = |load| measure_load(sidecars, || bench_load(testbed, host, load, duration));
    let pgbench_sample = |load| measure_load(sidecars, || databases::pgbench(testbed, host, load, duration));
    // These programs have no option for a duration: a trial shows how many requests take about this time.
    let counted = |trial: u64, load: &dyn Fn(u64) -> anyhow::Result<LoadResult>| {
        let requests = load(trial)?.requests_within(duration);
        measure_load(sidecars, || load(requests))
    };
    let redis_sample = |connections, pipelined| {
        let load = RedisLoad { connections, pipelined };
        counted(TRIAL_REDIS_REQUESTS, &|requests| {
            databases::redis_benchmark(testbed, host, load, requests)
        })
    };
    match row {
        Scenario::HttpC1 => http1(WrkLoad::get_requests(1)),
        Scenario::HttpC16 => http1(WrkLoad::get_requests(16)),
        Scenario::HttpC64
        | Scenario::OutboundOnly
        | Scenario::InboundOnly
        | Scenario::HttpC64Baseline
        | Scenario::Routed
        | Scenario::Rewritten
        | Scenario::Profiled
        | Scenario::Tproxy
        | Scenario::OneWorker
        | Scenario::TwoWorkers => http1(WrkLoad::get_requests(64)),
        Scenario::Post1Kib => post(16, 1 << 10),
        Scenario::Post32Kib => post(16, 32 << 10),
        Scenario::Post1Mib => post(4, 1 << 20),
        Scenario::NewHttp => http1(WrkLoad {
            reconnect: true,
            ..WrkLoad::get_requests(16)
        }),
        Scenario::Http2 => measure_load(sidecars, || h2load(testbed, host, duration)),
        Scenario::Grpc => measure_load(sidecars, || ghz(testbed, host, duration)),
        Scenario::GrpcStream => bench_load_sample(BenchLoad::Streams),
        Scenario::Bulk => bench_load_sample(BenchLoad::Bulk).map(|sample| add_throughput(sample, BULK_MESSAGE_BYTES)),
        Scenario::SmallOpaque => bench_load_sample(BenchLoad::Small),
        Scenario::NewMtls | Scenario::TproxyNewMtls => bench_load_sample(BenchLoad::Reconnect),
        Scenario::Pgbench => pgbench_sample(PgbenchLoad { reconnect: false }),
        Scenario::PgbenchConnect => pgbench_sample(PgbenchLoad { reconnect: true }),
        Scenario::RedisC1 => redis_sample(1, 1),
        Scenario::RedisC50 => redis_sample(50, 1),
        Scenario::RedisPipelined => redis_sample(50, 16),
        Scenario::Kafka => counted(TRIAL_KAFKA_MESSAGES, &|messages| {
            brokers::produce_to_kafka(testbed, host, messages)
        }),
        Scenario::Nats => counted(TRIAL_NATS_MESSAGES, &|messages| {
            brokers::publish_to_nats(testbed, host, messages)
        }),
        Scenario::Idle => measure_idle_memory(testbed, sidecars, open_idle_http_client),
        Scenario::IdleOpaque => measure_idle_memory(testbed, sidecars, open_idle_opaque_client),
        Scenario::SlowHeads => slow::measure(testbed, sidecars.context("there is no sidecar")?, duration),
        Scenario::Hostile => hostile::measure(testbed, sidecars.context("there is no sidecar")?),
        Scenario::Allocations => measure_allocations(testbed, duration),
    }
}

/// Adds the throughput to a sample. Each request carries `bytes` in each direction.
fn add_throughput(mut sample: Sample, bytes: u64) -> Sample {
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
            .map(|(_, process)| ResourceUsage::read(process))
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
    fn read(process: &Process) -> anyhow::Result<Self> {
        Ok(Self {
            cpu: process.cpu_time()?,
            ticks: process.cpu_ticks()?,
        })
    }
}

/// The IP address that clients dial. With a client sidecar, it is the address of the service, whose endpoint the sidecar discovers;
/// otherwise it is the address of the server.
fn dialled_ip(sidecars: Option<&Sidecars>) -> &'static str {
    if sidecars.is_some_and(|sidecars| sidecars.client.is_some()) {
        SERVICE_IP
    } else {
        SERVER_IP
    }
}

/// Measures the memory per idle client. Each client has received one response and keeps its connection open.
fn measure_idle_memory(
    testbed: &Testbed,
    sidecars: Option<&Sidecars>,
    client: impl Fn() -> anyhow::Result<TcpStream> + Send + Sync,
) -> anyhow::Result<Sample> {
    let sides = sidecars.map_or(Vec::new(), Sidecars::sides);
    let memory = ResidentMemory::read(&sides)?;
    let clients = testbed.client.run(|| {
        (0..N_IDLE_CLIENTS)
            .map(|_| client())
            .collect::<anyhow::Result<Vec<_>>>()
    })??;
    let grown = memory.growth_per_client(&sides, N_IDLE_CLIENTS)?;
    drop(clients);
    Ok(grown)
}

/// Measures the allocations per request at 64 connections: the difference between two readings of the counting proxy.
fn measure_allocations(testbed: &Testbed, duration: Duration) -> anyhow::Result<Sample> {
    let count = || {
        anyhow::Ok((
            tulle::read_allocations(&testbed.client)?,
            tulle::read_allocations(&testbed.server)?,
        ))
    };
    let before = count()?;
    let load_result = wrk(testbed, SERVICE_IP, WrkLoad::get_requests(64), duration)?;
    let after = count()?;
    let per_request = |before, after| (after - before) as f64 / load_result.requests as f64;
    Ok(Sample::from([
        (Metric::ClientAllocations, per_request(before.0.calls, after.0.calls)),
        (Metric::ServerAllocations, per_request(before.1.calls, after.1.calls)),
        (Metric::ClientAllocatedBytes, per_request(before.0.bytes, after.0.bytes)),
        (Metric::ServerAllocatedBytes, per_request(before.1.bytes, after.1.bytes)),
        (Metric::Failed, load_result.failed as f64),
    ]))
}

fn open_idle_http_client() -> anyhow::Result<TcpStream> {
    let request = format!("GET / HTTP/1.1\r\nhost: {SERVICE_IP}:{HTTP_PORT}\r\n\r\n");
    open_idle_client(HTTP_PORT, request.as_bytes(), b"HTTP/1.1 200")
}

fn open_idle_opaque_client() -> anyhow::Result<TcpStream> {
    open_idle_client(TCP_PORT, b"hello", b"hello")
}

/// Opens a connection and waits for one response.
fn open_idle_client(port: u16, request: &[u8], expected: &[u8]) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect((SERVICE_IP, port)).context("opening an idle connection")?;
    stream
        .set_read_timeout(Some(IDLE_RESPONSE_TIMEOUT))
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

const WARM_UP_DURATION: Duration = Duration::from_secs(1);
const TRIAL_REDIS_REQUESTS: u64 = 10_000;
const TRIAL_KAFKA_MESSAGES: u64 = 100_000;
const TRIAL_NATS_MESSAGES: u64 = 10_000;
const N_IDLE_CLIENTS: u32 = 800;
const IDLE_RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
