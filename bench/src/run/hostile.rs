//! Clients that mean harm: heads that never end, answers that nobody reads, floods of resets and of header frames, names without
//! end. What counts is what becomes of a client that means well, and of memory.

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

use super::drive::{Metric, Sample};
use super::peer::{Side, Sidecars};
use super::scene::{HTTP_PORT, SERVER, SERVICE, Scene};

/// Measures a client of few requests alone and among the others, of which the client's sidecar has as many as the server's.
pub(super) fn measure(scene: &Scene, sidecars: &Sidecars) -> anyhow::Result<Sample> {
    let alone = polite(&scene.client, CALM)?;
    let harm = Harm::default();
    let (ready, readied) = mpsc::channel();
    let beside = std::thread::scope(|scope| {
        let groups = [(&scene.client, SERVICE), (&scene.control, SERVER)].map(|(namespace, host)| {
            let (harm, ready) = (&harm, ready.clone());
            scope.spawn(move || attack(namespace, host, harm, ready))
        });
        drop(ready);
        let n_ready = readied.iter().take(groups.len()).count();
        let beside = (n_ready == groups.len()).then(|| polite(&scene.client, LOUD));
        harm.is_over.store(true, Ordering::Relaxed);
        for group in groups {
            group
                .join()
                .map_err(|_| anyhow::anyhow!("hostile clients panicked"))??;
        }
        beside.context("hostile clients did not come through")?
    })?;
    let n = |count: &AtomicU64| count.load(Ordering::Relaxed);
    ensure!(
        n(&harm.names) >= NAMES && n(&harm.resets) >= RESETS && n(&harm.ended) >= 2,
        "there was little harm: {harm:?}"
    );
    let p99 = |of: &Polite| of.micros.value_at_quantile(0.99) as f64;
    let mut sample = Sample::from([
        (Metric::P50Us, beside.micros.value_at_quantile(0.5) as f64),
        (Metric::P99Us, p99(&beside)),
        (Metric::P99Times, p99(&beside) / p99(&alone)),
        (Metric::Failed, (alone.n_failed + beside.n_failed) as f64),
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

/// What a client that means well has seen.
struct Polite {
    micros: Histogram<u64>,
    n_failed: u64,
}

/// Asks now and then on one connection, which is opened anew after a failure.
fn polite(namespace: &Namespace, duration: Duration) -> anyhow::Result<Polite> {
    namespace.run(|| {
        let mut seen = Polite {
            micros: Histogram::new(3)?,
            n_failed: 0,
        };
        let (begun, mut connection) = (Instant::now(), None);
        for n in 0_u32.. {
            let due = begun + PACE * n;
            if due.max(Instant::now()) >= begun + duration {
                break;
            }
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            match ask(&mut connection) {
                // A request that had to wait for the one before it has waited.
                Ok(()) => seen.micros.record(micros(due.elapsed()))?,
                Err(_) => {
                    seen.n_failed += 1;
                    connection = None;
                }
            }
        }
        Ok(seen)
    })?
}

fn ask(connection: &mut Option<std::net::TcpStream>) -> anyhow::Result<()> {
    let stream = match connection {
        Some(stream) => stream,
        None => {
            let stream = std::net::TcpStream::connect((SERVICE, HTTP_PORT))?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            connection.insert(stream)
        }
    };
    stream.write_all(b"GET / HTTP/1.1\r\nhost: web.test\r\n\r\n")?;
    let (mut answer, mut n) = ([0; 4096], 0);
    // A head and a line.
    while !answer[..n].ends_with(b"\n") || answer[..n].ends_with(b"\r\n") {
        let more = stream.read(&mut answer[n..])?;
        ensure!(more > 0, "the connection was closed");
        n += more;
    }
    ensure!(answer.starts_with(b"HTTP/1.1 200"), "no good answer");
    Ok(())
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// What has been done, by all.
#[derive(Debug, Default)]
struct Harm {
    /// Streams that were opened and reset.
    resets: AtomicU64,
    /// Connections of floods that a sidecar ended, or read no more of.
    ended: AtomicU64,
    /// Requests to names that nobody has heard of, answered.
    names: AtomicU64,
    is_over: AtomicBool,
}

impl Harm {
    fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    /// Counts a flood that a sidecar ended; one that it no longer listens to is given up.
    async fn flooded(&self, flood: impl Future<Output = anyhow::Result<()>>) {
        let is_ended = !matches!(timeout(ROUND, flood).await, Ok(Ok(())));
        if is_ended && self.goes_on() {
            self.ended.fetch_add(1, Ordering::Relaxed);
        }
        sleep(AGAIN).await;
    }
}

/// Does all of it until it is over; says so once every connection that is to stay is open, and its answer has begun.
fn attack(namespace: &Namespace, host: &str, harm: &Harm, ready: mpsc::Sender<()>) -> anyhow::Result<()> {
    let addr = SocketAddr::new(host.parse().context("the address is a literal")?, HTTP_PORT);
    let attacking = async {
        let mut open = JoinSet::new();
        for n in 0..SLOW + READERS {
            let mut stream = TcpStream::connect(addr).await.context("opening a connection")?;
            let first: &[u8] = if n < SLOW { HEAD } else { LARGE };
            stream.write_all(first).await?;
            if n >= SLOW {
                // Once it begins, the others' have begun: who comes now is not held up by their beginning.
                let _ = stream.read(&mut [0; 64]).await?;
            }
            open.spawn(linger(stream, n < SLOW));
        }
        let _ = ready.send(()); // if nobody listens, it is over
        tokio::join!(resets(addr, harm), headers(addr, harm), names(addr, harm));
        anyhow::Ok(())
    };
    namespace.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("starting a runtime")?.block_on(attacking)
    })?
}

/// Stays: adding to its head, or reading nothing.
async fn linger(mut stream: TcpStream, adds: bool) {
    let mut second = interval(Duration::from_secs(1));
    while adds && stream.write_all(b"a").await.is_ok() {
        second.tick().await;
    }
    std::future::pending().await
}

/// Opens streams and resets them at once.
async fn resets(addr: SocketAddr, harm: &Harm) {
    let mut pace = interval(Duration::from_millis(1));
    while harm.goes_on() {
        let flood = async {
            let (mut sender, connection) = h2::client::handshake(TcpStream::connect(addr).await?).await?;
            tokio::spawn(connection);
            while harm.goes_on() {
                pace.tick().await;
                sender = sender.ready().await?;
                let req = http::Request::get("http://web.test/bytes/1048576").body(())?;
                let (_, mut stream) = sender.send_request(req, true)?;
                stream.send_reset(h2::Reason::CANCEL);
                harm.resets.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(())
        };
        harm.flooded(flood).await;
    }
}

/// Sends one header list that never ends.
async fn headers(addr: SocketAddr, harm: &Harm) {
    let frame = |kind: u8, payload: &[u8]| {
        let mut frame = vec![0, (payload.len() >> 8) as u8, payload.len() as u8, kind, 0, 0, 0, 0, 1];
        frame.extend(payload);
        frame
    };
    // "x-a" and a long value, in no table.
    let line = [&b"\0\x03x-a\x7e"[..], &[b'v'; 126]].concat();
    let (first, more) = (frame(1, &line), frame(9, &line.repeat(120)));
    let mut pace = interval(Duration::from_millis(5));
    while harm.goes_on() {
        let flood = async {
            let mut stream = TcpStream::connect(addr).await?;
            stream
                .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
                .await?;
            stream.write_all(&first).await?;
            while harm.goes_on() {
                pace.tick().await;
                stream.write_all(&more).await?;
            }
            Ok(())
        };
        harm.flooded(flood).await;
    }
}

/// Asks for names without end, one after the other.
async fn names(addr: SocketAddr, harm: &Harm) {
    let mut answer = Vec::new();
    let mut pace = interval(Duration::from_millis(10));
    while harm.goes_on() {
        let asking = async {
            let mut stream = TcpStream::connect(addr).await?;
            stream.set_nodelay(true)?;
            while harm.goes_on() {
                // Many at once: what counts is how many there are.
                let n = fastrand::u64(..);
                let together = (0..TOGETHER).map(|i| format!("GET / HTTP/1.1\r\nhost: h{}.test\r\n\r\n", n ^ i));
                stream
                    .write_all(Bytes::from(together.collect::<String>()).as_ref())
                    .await?;
                answer.clear();
                // Whatever it is: a server's sidecar refuses who has no identity.
                let is_answer = |bytes: &&[u8]| *bytes == b"HTTP/1.1 ";
                while (answer.windows(9).filter(is_answer).count() as u64) < TOGETHER {
                    ensure!(stream.read_buf(&mut answer).await? > 0, "closed");
                }
                harm.names.fetch_add(TOGETHER, Ordering::Relaxed);
                pace.tick().await;
            }
            Ok(())
        };
        let _ = timeout(LOUD, asking).await; // it begins again
    }
}

/// Heads that never end, at each sidecar.
const SLOW: u32 = 1000;
/// Answers that nobody reads, at each sidecar.
const READERS: u32 = 500;
const HEAD: &[u8] = b"GET / HTTP/1.1\r\nhost: web.test\r\nx-slow: ";
const LARGE: &[u8] = b"GET /bytes/1048576 HTTP/1.1\r\nhost: web.test\r\n\r\n";
/// How often the client that means well asks.
const PACE: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(5);
/// How long it is alone, and how long it is not: shorter than heads may take.
const CALM: Duration = Duration::from_secs(5);
const LOUD: Duration = Duration::from_secs(20);
/// What there has to have been of it, at least.
const NAMES: u64 = 100_000;
const RESETS: u64 = 1000;
/// Requests that are sent together.
const TOGETHER: u64 = 64;
/// How long a connection of a flood goes on at most.
const ROUND: Duration = Duration::from_secs(2);
/// Before a flood begins again.
const AGAIN: Duration = Duration::from_millis(20);
