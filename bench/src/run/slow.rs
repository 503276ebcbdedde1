//! Slow clients: each sends a request line, and then one byte of its headers per second. The headers never end.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::{self, Instant};
use tulle_core::netns::Namespace;

use super::generators::{LoadResult, WrkLoad, wrk};
use super::memory::ResidentMemory;
use super::metric::{Metric, Sample};
use super::rows::HEAD_TIMEOUT;
use super::sidecars::Sidecars;
use super::testbed::{HTTP_PORT, SERVER_IP, SERVICE_IP, Testbed};

/// Measures the memory of the sidecars per slow client, and at the same time the throughput of normal clients.
///
/// The client's sidecar and the server's sidecar have the same number of slow clients. Those of the server's sidecar have no
/// sidecar themselves. Fails unless each slow client gets a 408 in time.
pub(super) fn measure(testbed: &Testbed, sidecars: &Sidecars, duration: Duration) -> anyhow::Result<Sample> {
    let duration = duration.min(MAX_MEASUREMENT_DURATION);
    let measure_normal_clients = || wrk(testbed, SERVICE_IP, WrkLoad::get_requests(16), duration);
    let alone = measure_normal_clients()?;
    let sides = sidecars.sides();
    let memory = ResidentMemory::read(&sides)?;
    let (open_tx, open_rx) = mpsc::channel();
    let (under_load, memory_growth, results) = std::thread::scope(|scope| {
        let groups = [(&testbed.client, SERVICE_IP), (&testbed.control, SERVER_IP)];
        let groups = groups.map(|(namespace, host)| {
            let open = open_tx.clone();
            scope.spawn(move || run_slow_clients(namespace, host, open))
        });
        drop(open_tx);
        // If the clients fail, the channel closes early, and joining their thread returns the error.
        let n_open = open_rx.iter().take(groups.len()).count();
        let measured = (n_open == groups.len())
            .then(|| {
                anyhow::Ok((
                    memory.growth_per_client(&sides, N_SLOW_CLIENTS)?,
                    measure_normal_clients()?,
                ))
            })
            .transpose();
        let mut results = Vec::new();
        for group in groups {
            results.extend(
                group
                    .join()
                    .map_err(|_| anyhow::anyhow!("the slow clients panicked"))??,
            );
        }
        let (memory_growth, under_load) = measured?.context("the slow clients could not connect")?;
        anyhow::Ok((under_load, memory_growth, results))
    })?;
    let on_time = HEAD_TIMEOUT..HEAD_TIMEOUT + MAX_TIMEOUT_DELAY;
    let n_timed_out = results.iter().filter(|result| result.status == 408).count();
    let n_on_time = results
        .iter()
        .filter(|result| on_time.contains(&result.elapsed))
        .count();
    ensure!(
        (n_timed_out, n_on_time) == (results.len(), results.len()),
        "of {} slow clients, {n_timed_out} got 408 and {n_on_time} got a response in time; one has {:?}",
        results.len(),
        results
            .iter()
            .find(|result| result.status != 408 || !on_time.contains(&result.elapsed))
    );
    let rate = |load: &LoadResult| load.requests as f64 / load.seconds;
    let mut sample = memory_growth;
    sample.extend([
        (Metric::RequestsPerSecond, rate(&under_load)),
        (Metric::SpeedPercent, rate(&under_load) * 100.0 / rate(&alone)),
        (Metric::P50Us, under_load.p50_us),
        (Metric::P99Us, under_load.p99_us),
        (Metric::Failed, under_load.failed as f64),
    ]);
    Ok(sample)
}

/// The response of a slow client.
#[derive(Clone, Copy, Debug)]
struct SlowClientResult {
    /// The status code; 0 without a response.
    status: u16,
    /// Time from the first byte to the response.
    elapsed: Duration,
}

/// Opens all connections, signals `open` once each has sent some bytes, and returns the responses.
fn run_slow_clients(
    namespace: &Namespace,
    host: &str,
    open: mpsc::Sender<()>,
) -> anyhow::Result<Vec<SlowClientResult>> {
    let addr = SocketAddr::new(host.parse().context("the address is a literal")?, HTTP_PORT);
    let running = async move {
        let mut clients = JoinSet::new();
        for n in 0..N_SLOW_CLIENTS {
            let stream = TcpStream::connect(addr).context("opening a slow connection")?;
            stream.set_nonblocking(true)?;
            let stream = tokio::net::TcpStream::from_std(stream)?;
            clients.spawn(send_slowly(stream, BYTE_INTERVAL * n / N_SLOW_CLIENTS));
            // Lets the client send its first bytes. The proxy would treat a silent client as a client of a server-speaks-first
            // protocol.
            tokio::task::yield_now().await;
        }
        time::sleep(BYTE_INTERVAL * 2).await;
        let _ = open.send(());
        anyhow::Ok(clients.join_all().await)
    };
    namespace.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("starting a runtime")?.block_on(running)
    })?
}

/// Sends bytes until a response arrives or the connection ends. `shift` spreads the clients over time.
async fn send_slowly(mut stream: tokio::net::TcpStream, shift: Duration) -> SlowClientResult {
    let started_at = Instant::now();
    let mut answer = Vec::new();
    let (mut read, mut write) = stream.split();
    let reading = async {
        let read_result = read.read_buf(&mut answer).await;
        (read_result, started_at.elapsed())
    };
    let sending = async {
        let (mut bytes, mut next) = (REQUEST_PREFIX, started_at + shift);
        while write.write_all(bytes.as_bytes()).await.is_ok() {
            next += BYTE_INTERVAL;
            time::sleep_until(next).await;
            bytes = "a";
        }
        // The write failed. Wait for the reader, because a response may be buffered.
        std::future::pending::<Infallible>().await
    };
    let (_, after) = tokio::select! {
        result = reading => result,
        never = sending => match never {},
    };
    let status = std::str::from_utf8(&answer)
        .ok()
        .and_then(|text| text.split(' ').nth(1)?.parse().ok());
    SlowClientResult {
        status: status.unwrap_or_default(),
        elapsed: after,
    }
}

/// Number of slow clients of each sidecar.
const N_SLOW_CLIENTS: u32 = 2000;
const REQUEST_PREFIX: &str = "GET / HTTP/1.1\r\nhost: web.test\r\nx-slow: ";
const BYTE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum delay of the timeout on a busy machine.
const MAX_TIMEOUT_DELAY: Duration = Duration::from_secs(5);
/// The measurement must end before the timeout closes the slow connections.
const MAX_MEASUREMENT_DURATION: Duration = Duration::from_secs(5);
