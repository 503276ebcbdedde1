//! One worker: takes a request when it is due, sends it, counts what became of it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::Instant;

use super::outcome::{Answer, Failure};
use super::schedule::Ticket;
use super::target::Target;
use super::timer::Timer;
use super::{Protocol, Run, grpc, http, tcp, ws};

/// The connection of a worker, or its part of one. Connects when used, and again after a failure.
pub(super) enum Client {
    Http1(http::Http1),
    Http2(http::Http2),
    Grpc(http::Http2),
    Tcp(tcp::Tcp),
    Ws(Box<ws::Ws>),
}

impl Client {
    pub(super) fn new(target: &Arc<Target>) -> Self {
        let target = target.clone();
        match target.protocol {
            Protocol::Http1 => Self::Http1(http::Http1::new(target)),
            Protocol::Http2 => Self::Http2(http::Http2::new(target)),
            Protocol::Grpc => Self::Grpc(http::Http2::new(target)),
            Protocol::Tcp => Self::Tcp(tcp::Tcp::new(target)),
            Protocol::Ws => Self::Ws(Box::new(ws::Ws::new(target))),
        }
    }

    /// A client for another worker: on the same connection where the protocol has streams.
    pub(super) fn another_stream(&self) -> Self {
        match self {
            Self::Http1(client) => Self::Http1(http::Http1::new(client.target().clone())),
            Self::Http2(client) => Self::Http2(client.clone()),
            Self::Grpc(client) => Self::Grpc(client.clone()),
            Self::Tcp(client) => Self::Tcp(tcp::Tcp::new(client.target().clone())),
            Self::Ws(client) => Self::Ws(Box::new(ws::Ws::new(client.target().clone()))),
        }
    }

    /// One request and its whole answer. Dropped halfway, it takes the connection or the stream with it.
    async fn exchange(&mut self) -> Result<Answer, Failure> {
        match self {
            Self::Http1(client) => client.exchange().await,
            Self::Http2(client) => client.exchange().await,
            Self::Grpc(client) => grpc::exchange(client).await,
            Self::Tcp(client) => client.exchange().await,
            Self::Ws(client) => client.exchange().await,
        }
    }
}

/// Works until the schedule or the run ends. Fails only when the kernel gives no timer.
pub(super) async fn work(mut run: Run, mut client: Client) -> io::Result<()> {
    let timer = Timer::new()?;
    while let Some(ticket) = run.schedule.claim() {
        let due = match ticket {
            Ticket::Now if run.stopping.borrow().is_some() => return Ok(()),
            Ticket::Now => Instant::now(),
            Ticket::At(offset) => run.start + offset,
        };
        if due > Instant::now() {
            tokio::select! {
                biased;
                waited = timer.until(due) => waited?,
                // Not due before the end, so not part of the run.
                _ = run.stopping.wait_for(Option::is_some) => return Ok(()),
            }
        } else if run
            .stopping
            .borrow()
            .is_some_and(|stopped| stopped + run.timeout < Instant::now())
        {
            // Nobody waits longer than the timeout for requests that nobody took in time.
            run.tally.lock().record_unsent(1);
            continue;
        }
        let outcome = match tokio::time::timeout(run.timeout, client.exchange()).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Failure::Timeout),
        };
        run.tally.lock().record(due.elapsed(), &outcome);
        if matches!((&outcome, ticket), (Err(Failure::Connect(_)), Ticket::Now)) {
            // A closed loop against nobody would otherwise only measure how fast connections are refused.
            tokio::time::sleep(REFUSED_PAUSE).await;
        }
    }
    Ok(())
}

/// Connects without Nagle's delay.
pub(super) async fn connect(target: &Target) -> Result<TcpStream, Failure> {
    let stream = TcpStream::connect(target.addr)
        .await
        .map_err(|error| Failure::connecting(&error))?;
    stream.set_nodelay(true).map_err(|error| Failure::connecting(&error))?;
    Ok(stream)
}

const REFUSED_PAUSE: Duration = Duration::from_millis(10);
