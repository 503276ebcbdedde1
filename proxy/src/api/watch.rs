//! A server stream as a `watch` value: resumed for as long as somebody looks, never losing what was known.
//!
//! A refusal is no end: what the control plane refuses now it may answer later, so it is asked again, with a backoff.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Response, Status, Streaming};
use tracing::debug;
use tulle_core::backoff::Backoff;

use crate::api::channel::Channel;
use crate::api::retry::RetrySignal;

/// What a watch knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Watched<T> {
    /// Nothing yet.
    Pending,
    /// The latest value; it stays when the control plane goes.
    Known(T),
    /// The control plane does not answer this, as of now; it is asked again.
    Refused(Refusal),
}

/// An answer in place of a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("control plane refuses {what} ({code:?}): {message}")]
pub(crate) struct Refusal {
    pub what: String,
    pub code: Code,
    pub message: String,
}

/// When a stream is given up and opened again; no limits by default.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamLimits {
    /// Time to the first message.
    pub initial: Option<Duration>,
    /// Time between messages.
    pub idle: Option<Duration>,
    /// Time to the end.
    pub lifetime: Option<Duration>,
}

/// Where a message stands in its stream.
///
/// Incremental streams start over when they are opened again, so what the first message does not mention is gone.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    First,
    Later,
}

/// How a watch goes on.
pub(crate) struct Terms {
    /// What its streams are opened on.
    pub channel: Channel,
    /// What is watched, for logs.
    pub what: String,
    pub limits: StreamLimits,
    pub backoff: Backoff,
    /// Cuts the pause before the next stream short.
    pub retry: RetrySignal,
    /// Errors that are answers, as long as nothing is known. Later they are errors like any other: what is known is
    /// better than a control plane that has forgotten it.
    pub refusals: &'static [Code],
}

/// Watches the stream that `open` opens, on `runtime`, until the last receiver is dropped.
///
/// While its channel has no connection nothing is tried, so that no backoff grows meanwhile.
/// `decode` sees every message of every stream, in order; what it returns is published.
pub(crate) fn spawn<M, T, O>(
    runtime: &Handle,
    mut terms: Terms,
    mut open: impl FnMut() -> O + Send + 'static,
    mut decode: impl FnMut(Position, M) -> T + Send + 'static,
) -> watch::Receiver<Watched<T>>
where
    M: Send + 'static,
    T: Send + Sync + 'static,
    O: Future<Output = Result<Response<Streaming<M>>, Status>> + Send,
{
    let (sender, receiver) = watch::channel(Watched::Pending);
    runtime.spawn(async move {
        let resuming = async {
            let (mut delays, mut delays_of_refused) = (terms.backoff.steps(), REFUSED_BACKOFF.steps());
            loop {
                terms.channel.connected().await;
                let mut position = Position::First;
                let opening = open();
                let ended = follow(&terms.limits, opening, |message| {
                    sender.send_replace(Watched::Known(decode(position, message)));
                    position = Position::Later;
                });
                let ended = ended.await;
                if position == Position::Later {
                    delays.reset();
                    delays_of_refused.reset();
                }
                let delay = match refusal(&terms, &ended) {
                    None => delays.next_delay(),
                    Some(refusal) => {
                        let is_transient = refusal.code == Code::FailedPrecondition;
                        refuse(&sender, refusal);
                        match is_transient {
                            true => delays.next_delay(),
                            false => delays_of_refused.next_delay(),
                        }
                    }
                };
                ended.log(&terms.what, delay);
                terms.retry.pause(delay).await;
            }
        };
        // Dropping `resuming` drops the stream, which tells the server.
        tokio::select! {
            () = sender.closed() => {}
            () = resuming => {}
        }
    });
    receiver
}

/// Publishes a refusal where nothing is known, and wakes nobody for one that is known already.
fn refuse<T>(sender: &watch::Sender<Watched<T>>, refusal: Refusal) {
    sender.send_if_modified(|watched| {
        let is_new = match watched {
            Watched::Pending => true,
            Watched::Known(_) => false,
            Watched::Refused(known) => *known != refusal,
        };
        if is_new {
            *watched = Watched::Refused(refusal);
        }
        is_new
    });
}

/// How a stream ended.
enum End {
    /// As streams do: the server closed it, or its time was over.
    Planned(&'static str),
    Failed(Status),
}

/// Reads one stream to its end.
async fn follow<M>(
    limits: &StreamLimits,
    opening: impl Future<Output = Result<Response<Streaming<M>>, Status>>,
    mut publish: impl FnMut(M),
) -> End {
    let opened_at = Instant::now();
    let end_of_life = limits.lifetime.map(|lifetime| opened_at + lifetime);
    let first_by = limits.initial.map(|initial| opened_at + initial);
    let mut stream = match within(earliest(first_by, end_of_life), opening).await {
        Some(Ok(rsp)) => rsp.into_inner(),
        Some(Err(status)) => return End::Failed(status),
        None => return End::Failed(Status::deadline_exceeded("the stream did not open in time")),
    };
    let mut next_by = first_by;
    let mut seen = false;
    loop {
        match within(earliest(next_by, end_of_life), stream.message()).await {
            Some(Ok(Some(message))) => publish(message),
            Some(Ok(None)) => return End::Planned("closed by the server"),
            Some(Err(status)) => return End::Failed(status),
            None if !seen => return End::Failed(Status::deadline_exceeded("the first message did not come in time")),
            None if end_of_life.is_some_and(|end| end <= Instant::now()) => return End::Planned("old enough"),
            None => return End::Planned("silent for too long"),
        }
        seen = true;
        next_by = limits.idle.map(|idle| Instant::now() + idle);
    }
}

async fn within<T>(deadline: Option<Instant>, future: impl Future<Output = T>) -> Option<T> {
    match deadline {
        Some(deadline) => timeout_at(deadline, future).await.ok(),
        None => Some(future.await),
    }
}

fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}

fn refusal(terms: &Terms, ended: &End) -> Option<Refusal> {
    match ended {
        End::Failed(status) if terms.refusals.contains(&status.code()) => Some(Refusal {
            what: terms.what.clone(),
            code: status.code(),
            message: status.message().to_owned(),
        }),
        _ => None,
    }
}

impl End {
    fn log(&self, what: &str, delay: Duration) {
        match self {
            Self::Planned(why) => debug!(what, why, ?delay, "watch is resumed"),
            Self::Failed(status) => {
                debug!(what, code = ?status.code(), message = status.message(), ?delay, "watch failed, it is resumed");
            }
        }
    }
}

/// Between requests for what the control plane refuses. What does not exist may be created at any time; what cannot be said as
/// things are (`FAILED_PRECONDITION`) is asked for at the pace of other failures.
const REFUSED_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(500),
    max: Duration::from_secs(30),
    jitter: 0.5,
};
