//! Clients that take their time: each sends a request line and then a byte of its head a second, and never ends.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::{self, Instant};
use tulle_core::netns::Namespace;

use super::drive::{Memory, Metric, Sample};
use super::generators::{Driven, Http1, wrk};
use super::peer::Sidecars;
use super::scene::{HTTP_PORT, SERVER, SERVICE, Scene};

/// Measures memory and the requests of others while there are slow clients: of the client's sidecar, and as many of the
/// server's, which come without one. Fails unless each of them is told in time.
pub(super) fn measure(scene: &Scene, sidecars: &Sidecars, duration: Duration) -> anyhow::Result<Sample> {
    let duration = duration.min(LONGEST);
    let others = || wrk(scene, SERVICE, Http1::get(16), duration);
    let alone = others()?;
    let sides = sidecars.sides();
    let memory = Memory::of(&sides)?;
    let (open, opened) = mpsc::channel();
    let (beside, grown, told) = std::thread::scope(|scope| {
        let groups = [(&scene.client, SERVICE), (&scene.control, SERVER)];
        let groups = groups.map(|(namespace, host)| {
            let open = open.clone();
            scope.spawn(move || clients(namespace, host, open))
        });
        drop(open);
        // Nobody says so when clients fail; the reason comes when they are joined.
        let n_open = opened.iter().take(groups.len()).count();
        let measured = (n_open == groups.len())
            .then(|| anyhow::Ok((memory.grown(&sides, CLIENTS)?, others()?)))
            .transpose();
        let mut told = Vec::new();
        for group in groups {
            told.extend(group.join().map_err(|_| anyhow::anyhow!("slow clients panicked"))??);
        }
        let (grown, beside) = measured?.context("slow clients did not open")?;
        anyhow::Ok((beside, grown, told))
    })?;
    let on_time = HEAD_TIMEOUT..HEAD_TIMEOUT + LATEST;
    let n_told = told.iter().filter(|told| told.status == 408).count();
    let n_on_time = told.iter().filter(|told| on_time.contains(&told.after)).count();
    ensure!(
        (n_told, n_on_time) == (told.len(), told.len()),
        "of {} slow clients {n_told} got 408, and {n_on_time} something in time; one {:?}",
        told.len(),
        told.iter()
            .find(|told| told.status != 408 || !on_time.contains(&told.after))
    );
    let rate = |driven: &Driven| driven.requests as f64 / driven.seconds;
    let mut sample = grown;
    sample.extend([
        (Metric::RequestsPerSecond, rate(&beside)),
        (Metric::SpeedPercent, rate(&beside) * 100.0 / rate(&alone)),
        (Metric::P50Us, beside.p50_us),
        (Metric::P99Us, beside.p99_us),
        (Metric::Failed, beside.failed as f64),
    ]);
    Ok(sample)
}

/// What a slow client was told.
#[derive(Clone, Copy, Debug)]
struct Told {
    /// 0 for none.
    status: u16,
    /// How long after its first byte.
    after: Duration,
}

/// Opens all, says so once each has sent some bytes, and returns what they were told.
fn clients(namespace: &Namespace, host: &str, open: mpsc::Sender<()>) -> anyhow::Result<Vec<Told>> {
    let addr = SocketAddr::new(host.parse().context("the address is a literal")?, HTTP_PORT);
    let running = async move {
        let mut clients = JoinSet::new();
        for n in 0..CLIENTS {
            let stream = TcpStream::connect(addr).context("opening a slow connection")?;
            stream.set_nonblocking(true)?;
            let stream = tokio::net::TcpStream::from_std(stream)?;
            clients.spawn(client(stream, EVERY * n / CLIENTS));
            // One that is silent until all are open would be taken for a client of a server that speaks first.
            tokio::task::yield_now().await;
        }
        time::sleep(EVERY * 2).await;
        // Nobody listens only when all is over.
        let _ = open.send(());
        anyhow::Ok(clients.join_all().await)
    };
    namespace.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("starting a runtime")?.block_on(running)
    })?
}

/// Sends until it is told something, or the connection ends. Bytes of different clients are not sent at the same time.
async fn client(mut stream: tokio::net::TcpStream, shift: Duration) -> Told {
    let begun = Instant::now();
    let mut answer = Vec::new();
    let (mut read, mut write) = stream.split();
    let reading = async {
        let told = read.read_buf(&mut answer).await;
        (told, begun.elapsed())
    };
    let sending = async {
        let (mut bytes, mut next) = (BEGINNING, begun + shift);
        while write.write_all(bytes.as_bytes()).await.is_ok() {
            next += EVERY;
            time::sleep_until(next).await;
            bytes = "a";
        }
        // What is not read yet may say why.
        std::future::pending::<Infallible>().await
    };
    let (_, after) = tokio::select! {
        told = reading => told,
        never = sending => match never {},
    };
    let status = std::str::from_utf8(&answer)
        .ok()
        .and_then(|text| text.split(' ').nth(1)?.parse().ok());
    Told {
        status: status.unwrap_or_default(),
        after,
    }
}

/// Of each sidecar.
const CLIENTS: u32 = 2000;
const BEGINNING: &str = "GET / HTTP/1.1\r\nhost: web.test\r\nx-slow: ";
const EVERY: Duration = Duration::from_secs(1);
/// What the sidecars of this row are told; the default is 30 s.
pub(super) const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How much later a busy machine may be.
const LATEST: Duration = Duration::from_secs(5);
/// All of the measurement has to be over before the slow clients are.
const LONGEST: Duration = Duration::from_secs(5);
