//! Hostile clients: requests with unfinished headers, unread responses, floods of RST_STREAM and CONTINUATION frames, and many
//! different host names. Measures the latency of a normal client and the memory of the sidecars.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, timeout};
use tulle_core::netns::Namespace;

use super::metric::{Metric, Sample};
use super::setup::Side;
use super::sidecars::Sidecars;
use super::testbed::{HTTP_PORT, SERVER_IP, SERVICE_IP, Testbed};

/// Measures a client with a low request rate, first alone and then during the attack. Both sidecars are attacked by the same number
/// of clients. The clients that attack the server's sidecar run in the namespace of the control plane, which has no sidecar.
pub(super) fn measure(testbed: &Testbed, sidecars: &Sidecars) -> anyhow::Result<Sample> {
    let alone = run_normal_client(&testbed.client, BASELINE_DURATION)?;
    let counters = AttackCounters::default();
    let (ready_tx, ready_rx) = mpsc::channel();
    let under_attack = std::thread::scope(|scope| {
        let groups = [(&testbed.client, SERVICE_IP), (&testbed.control, SERVER_IP)].map(|(namespace, host)| {
            let (counters, ready) = (&counters, ready_tx.clone());
            scope.spawn(move || run_attacks(namespace, host, counters, ready))
        });
        drop(ready_tx);
        let n_ready = ready_rx.iter().take(groups.len()).count();
        let under_attack = (n_ready == groups.len()).then(|| run_normal_client(&testbed.client, ATTACK_DURATION));
        counters.is_over.store(true, Ordering::Relaxed);
        for group in groups {
            group
                .join()
                .map_err(|_| anyhow::anyhow!("the hostile clients panicked"))??;
        }
        under_attack.context("the hostile clients could not connect")?
    })?;
    let n = |count: &AtomicU64| count.load(Ordering::Relaxed);
    ensure!(
        n(&counters.host_names) >= MIN_HOST_NAMES
            && n(&counters.resets) >= MIN_STREAM_RESETS
            && n(&counters.closed_floods) >= 2,
        "the attack was too weak: {counters:?}"
    );
    let p99 = |stats: &NormalClientStats| stats.micros.value_at_quantile(0.99) as f64;
    let mut sample = Sample::from([
        (Metric::P50Us, under_attack.micros.value_at_quantile(0.5) as f64),
        (Metric::P99Us, p99(&under_attack)),
        (Metric::P99Factor, p99(&under_attack) / p99(&alone)),
        (Metric::Failed, (alone.n_failed + under_attack.n_failed) as f64),
    ]);
    for (side, process) in sidecars.sides() {
        let metric = match side {
            Side::Client => Metric::ClientRssMib,
            Side::Server => Metric::ServerRssMib,
        };
        sample.insert(metric, process.peak_rss_kib()? as f64 / 1024.0);
    }
    Ok(sample)
}

/// The result of the normal client.
struct NormalClientStats {
    micros: Histogram<u64>,
    n_failed: u64,
}

/// Sends requests at a fixed interval on one connection. A failure closes the connection, and the next request opens a new one.
fn run_normal_client(namespace: &Namespace, duration: Duration) -> anyhow::Result<NormalClientStats> {
    namespace.run(|| {
        let mut stats = NormalClientStats {
            micros: Histogram::new(3)?,
            n_failed: 0,
        };
        let (started_at, mut connection) = (Instant::now(), None);
        for n in 0_u32.. {
            let due = started_at + REQUEST_INTERVAL * n;
            if due.max(Instant::now()) >= started_at + duration {
                break;
            }
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            match send_request(&mut connection) {
                // The latency counts from the due time, so it includes the wait for the previous request.
                Ok(()) => stats.micros.record(micros(due.elapsed()))?,
                Err(_) => {
                    stats.n_failed += 1;
                    connection = None;
                }
            }
        }
        Ok(stats)
    })?
}

fn send_request(connection: &mut Option<std::net::TcpStream>) -> anyhow::Result<()> {
    let stream = match connection {
        Some(stream) => stream,
        None => {
            let stream = std::net::TcpStream::connect((SERVICE_IP, HTTP_PORT))?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
            connection.insert(stream)
        }
    };
    stream.write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\n\r\n")?;
    let (mut response, mut n) = ([0; 4096], 0);
    // The response has headers and one line of body.
    while !response[..n].ends_with(b"\n") || response[..n].ends_with(b"\r\n") {
        let more = stream.read(&mut response[n..])?;
        ensure!(more > 0, "the connection was closed");
        n += more;
    }
    ensure!(response.starts_with(b"HTTP/1.1 200"), "the response is not 200");
    Ok(())
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Counters of all attacks.
#[derive(Debug, Default)]
struct AttackCounters {
    /// Streams that were opened and reset.
    resets: AtomicU64,
    /// Flood connections that a sidecar closed.
    closed_floods: AtomicU64,
    /// Responses to requests with unknown host names.
    host_names: AtomicU64,
    is_over: AtomicBool,
}

impl AttackCounters {
    fn is_running(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    /// Runs one flood connection until the sidecar closes it or the timeout ends it. Counts the connections that the sidecar
    /// closes.
    async fn run_flood(&self, flood: impl Future<Output = anyhow::Result<()>>) {
        let is_closed = matches!(timeout(FLOOD_TIMEOUT, flood).await, Ok(Err(_)));
        if is_closed && self.is_running() {
            self.closed_floods.fetch_add(1, Ordering::Relaxed);
        }
        sleep(FLOOD_PAUSE).await;
    }
}

/// Runs all attacks until they are stopped. Signals `ready` when all long-lived connections are open and each unread response has
/// begun.
fn run_attacks(
    namespace: &Namespace,
    host: &str,
    counters: &AttackCounters,
    ready: mpsc::Sender<()>,
) -> anyhow::Result<()> {
    let addr = SocketAddr::new(host.parse().context("the address is a literal")?, HTTP_PORT);
    let attacking = async {
        let mut open = JoinSet::new();
        for n in 0..N_UNFINISHED_HEADS + N_STALLED_READERS {
            let mut stream = TcpStream::connect(addr).await.context("opening a connection")?;
            let first: &[u8] = if n < N_UNFINISHED_HEADS {
                UNFINISHED_HEAD
            } else {
                LARGE_RESPONSE_REQUEST
            };
            stream.write_all(first).await?;
            if n >= N_UNFINISHED_HEADS {
                // Wait for the first bytes, so that the start of the attack does not delay the normal client.
                let _ = stream.read(&mut [0; 64]).await?;
            }
            if n < N_UNFINISHED_HEADS {
                open.spawn(extend_head(stream));
            } else {
                open.spawn(read_nothing(stream));
            }
        }
        let _ = ready.send(());
        tokio::join!(
            reset_streams(addr, counters),
            send_header_flood(addr, counters),
            send_many_host_names(addr, counters)
        );
        anyhow::Ok(())
    };
    namespace.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("starting a runtime")?.block_on(attacking)
    })?
}

/// Adds a byte to the headers of a request each second.
async fn extend_head(mut stream: TcpStream) {
    let mut second = interval(Duration::from_secs(1));
    while stream.write_all(b"a").await.is_ok() {
        second.tick().await;
    }
    std::future::pending().await
}

/// Keeps a connection open and reads nothing.
async fn read_nothing(_stream: TcpStream) {
    std::future::pending().await
}

/// Opens streams and resets them immediately.
async fn reset_streams(addr: SocketAddr, counters: &AttackCounters) {
    let mut pace = interval(Duration::from_millis(1));
    while counters.is_running() {
        let flood = async {
            let (mut sender, connection) = h2::client::handshake(TcpStream::connect(addr).await?).await?;
            tokio::spawn(connection);
            while counters.is_running() {
                pace.tick().await;
                sender = sender.ready().await?;
                let req = http::Request::get("http://web.test/bytes/1048576").body(())?;
                let (_, mut stream) = sender.send_request(req, true)?;
                stream.send_reset(h2::Reason::CANCEL);
                counters.resets.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(())
        };
        counters.run_flood(flood).await;
    }
}

/// Sends a header block that never ends, in CONTINUATION frames.
async fn send_header_flood(addr: SocketAddr, counters: &AttackCounters) {
    let frame = |kind: u8, payload: &[u8]| {
        let mut frame = vec![0, (payload.len() >> 8) as u8, payload.len() as u8, kind, 0, 0, 0, 0, 1];
        frame.extend(payload);
        frame
    };
    // A literal header field without indexing: "x-a" with a long value.
    let line = [&b"\0\x03x-a\x7e"[..], &[b'v'; 126]].concat();
    let (first, more) = (frame(1, &line), frame(9, &line.repeat(120)));
    let mut pace = interval(Duration::from_millis(5));
    while counters.is_running() {
        let flood = async {
            let mut stream = TcpStream::connect(addr).await?;
            stream
                .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
                .await?;
            stream.write_all(&first).await?;
            while counters.is_running() {
                pace.tick().await;
                stream.write_all(&more).await?;
            }
            Ok(())
        };
        counters.run_flood(flood).await;
    }
}

/// Sends requests, each with a new host name.
async fn send_many_host_names(addr: SocketAddr, counters: &AttackCounters) {
    let mut response = Vec::new();
    let mut pace = interval(Duration::from_millis(10));
    while counters.is_running() {
        let attack = async {
            let mut stream = TcpStream::connect(addr).await?;
            stream.set_nodelay(true)?;
            while counters.is_running() {
                // Requests are pipelined, because only the number of names matters.
                let n = fastrand::u64(..);
                let requests =
                    (0..PIPELINED_REQUESTS).map(|i| format!("GET / HTTP/1.1\r\nhost: h{}.test\r\n\r\n", n ^ i));
                stream
                    .write_all(Bytes::from(requests.collect::<String>()).as_ref())
                    .await?;
                response.clear();
                // A response with any status counts, because the server's sidecar refuses clients without an identity.
                let is_status_line = |bytes: &&[u8]| *bytes == b"HTTP/1.1 ";
                while (response.windows(9).filter(is_status_line).count() as u64) < PIPELINED_REQUESTS {
                    ensure!(stream.read_buf(&mut response).await? > 0, "closed");
                }
                counters.host_names.fetch_add(PIPELINED_REQUESTS, Ordering::Relaxed);
                pace.tick().await;
            }
            Ok(())
        };
        let _ = timeout(ATTACK_DURATION, attack).await; // after an error, the loop opens a new connection
    }
}

/// Number of unfinished request heads at each sidecar.
const N_UNFINISHED_HEADS: u32 = 1000;
/// Number of unread responses at each sidecar.
const N_STALLED_READERS: u32 = 500;
const UNFINISHED_HEAD: &[u8] = b"GET / HTTP/1.1\r\nhost: web.test\r\nx-slow: ";
const LARGE_RESPONSE_REQUEST: &[u8] = b"GET /bytes/1048576 HTTP/1.1\r\nhost: web.test\r\n\r\n";
/// Interval between the requests of the normal client.
const REQUEST_INTERVAL: Duration = Duration::from_millis(10);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Duration of the measurement without the attack.
const BASELINE_DURATION: Duration = Duration::from_secs(5);
/// Duration of the measurement with the attack. Shorter than the header timeout, so that unfinished heads stay open.
const ATTACK_DURATION: Duration = Duration::from_secs(20);
/// Minimum number of host names for a valid measurement.
const MIN_HOST_NAMES: u64 = 100_000;
/// Minimum number of stream resets for a valid measurement.
const MIN_STREAM_RESETS: u64 = 1000;
/// Requests in one pipelined write.
const PIPELINED_REQUESTS: u64 = 64;
/// Maximum duration of one flood connection.
const FLOOD_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before the next flood connection.
const FLOOD_PAUSE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_flood_that_the_timeout_ends_is_not_counted_as_closed() {
        let counters = AttackCounters::default();
        let n_closed = || counters.closed_floods.load(Ordering::Relaxed);
        counters.run_flood(std::future::pending()).await;
        assert_eq!(n_closed(), 0);
        counters
            .run_flood(async { anyhow::bail!("closed by the sidecar") })
            .await;
        assert_eq!(n_closed(), 1);
    }
}
