//! A worker: takes a request when it is due, sends it, and counts the outcome.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::args::Protocol;
use super::outcome::{ExchangeResponse, Failure};
use super::schedule::{Schedule, ScheduledRequest, exponential};
use super::stats::IntervalStats;
use super::target::Target;
use super::timer::Timer;
use super::{grpc, http, tcp, ws};

/// The connection of a worker, or its stream of a shared connection. It connects on first use and after a failure.
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

    /// Creates a client for another worker. It shares the connection if the protocol has streams.
    pub(super) fn client_for_next_worker(&self) -> Self {
        match self {
            Self::Http1(client) => Self::Http1(http::Http1::new(client.target().clone())),
            Self::Http2(client) => Self::Http2(client.clone()),
            Self::Grpc(client) => Self::Grpc(client.clone()),
            Self::Tcp(client) => Self::Tcp(tcp::Tcp::new(client.target().clone())),
            Self::Ws(client) => Self::Ws(Box::new(ws::Ws::new(client.target().clone()))),
        }
    }

    /// Sends one request and reads the complete response. Dropping the future closes the connection or the stream.
    async fn exchange(&mut self) -> Result<ExchangeResponse, Failure> {
        match self {
            Self::Http1(client) => client.exchange().await,
            Self::Http2(client) => client.exchange().await,
            Self::Grpc(client) => grpc::exchange(client).await,
            Self::Tcp(client) => client.exchange().await,
            Self::Ws(client) => client.exchange().await,
        }
    }
}

/// State that the workers of one thread share.
#[derive(Clone)]
pub(super) struct ThreadContext {
    pub(super) target: Arc<Target>,
    pub(super) schedule: Arc<Schedule>,
    /// The time at which the run was stopped.
    pub(super) stopped_at: watch::Receiver<Option<Instant>>,
    pub(super) stats: Arc<Mutex<IntervalStats>>,
    pub(super) start: Instant,
    pub(super) timeout: Duration,
    /// Mean pause between a response and the next request.
    pub(super) think_time: Option<Duration>,
}

/// Runs until the schedule or the run ends. Fails only if a timer cannot be created or read.
pub(super) async fn run_worker(mut context: ThreadContext, mut client: Client) -> io::Result<()> {
    let timer = Timer::new()?;
    let mut random = fastrand::Rng::new();
    while let Some(request) = context.schedule.next_request() {
        let due = match request {
            ScheduledRequest::Now if context.stopped_at.borrow().is_some() => return Ok(()),
            ScheduledRequest::Now => Instant::now(),
            ScheduledRequest::At(offset) => context.start + offset,
        };
        if due > Instant::now() {
            if !wait_until_due(&timer, due, &mut context.stopped_at).await? {
                return Ok(());
            }
        } else if context
            .stopped_at
            .borrow()
            .is_some_and(|stopped| stopped + context.timeout < Instant::now())
        {
            // The run was stopped longer than a timeout ago, so the remaining requests count as not sent.
            context.stats.lock().record_unsent(1);
            continue;
        }
        let outcome = match tokio::time::timeout(context.timeout, client.exchange()).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Failure::Timeout),
        };
        context.stats.lock().record(due.elapsed(), &outcome);
        if matches!((&outcome, request), (Err(Failure::Connect(_)), ScheduledRequest::Now)) {
            // Without a pause, a closed loop against a closed port would only measure how fast connections are refused.
            tokio::time::sleep(CONNECT_ERROR_BACKOFF).await;
        }
        if let Some(mean) = context.think_time {
            let pause = mean.mul_f64(exponential(&mut random));
            tokio::select! {
                biased;
                waited = timer.sleep_until(Instant::now() + pause) => waited?,
                _ = context.stopped_at.wait_for(Option::is_some) => {}
            }
        }
    }
    Ok(())
}

/// Waits until `due`. Returns false if the run was stopped before, so that the request is not part of it.
///
/// On a busy machine, the timer may fire after the run was stopped, although the request was due before that.
async fn wait_until_due(
    timer: &Timer,
    due: Instant,
    stopped_at: &mut watch::Receiver<Option<Instant>>,
) -> io::Result<bool> {
    tokio::select! {
        biased;
        waited = timer.sleep_until(due) => waited.map(|()| true),
        // The sender may only be gone after the run.
        stopped = stopped_at.wait_for(Option::is_some) => Ok(stopped.is_ok_and(|at| at.is_some_and(|at| due < at))),
    }
}

const CONNECT_ERROR_BACKOFF: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_that_was_due_before_the_run_stopped_is_sent_although_its_timer_is_late() {
        let timer = Timer::new().unwrap();
        let due = Instant::now() + Duration::from_secs(3600);
        for (stopped_at, expected) in [(due + Duration::from_nanos(1), true), (due, false)] {
            let (_tx, mut stopped_rx) = watch::channel(Some(stopped_at));
            let part_of_run = wait_until_due(&timer, due, &mut stopped_rx).await.unwrap();
            assert_eq!(part_of_run, expected);
        }
    }
}
