//! A server stream as a `watch` value. The stream is reopened while there are receivers, and the last value is kept.
//!
//! A refusal is not final: the control plane may answer later, so the stream is retried with a backoff.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::{Code, Response, Status, Streaming};
use tracing::debug;
use tulle_core::backoff::Backoff;
use tulle_core::log_limit::LogLimiter;
use tulle_core::warn_limited;

use crate::api::channel::Channel;
use crate::api::retry_signal::{MIN_RETRY_DELAY, RetrySignal};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WatchState<T> {
    /// No answer yet.
    Pending,
    /// The latest value; it is kept while the control plane is unreachable.
    Known(T),
    /// The control plane refuses for now; the stream is retried.
    Refused(Refusal),
}

/// A refusal instead of a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the control plane refuses the {description} ({code:?}): {message}")]
pub(crate) struct Refusal {
    /// What was requested, such as `policy of port 80`.
    pub description: String,
    pub code: Code,
    pub message: String,
}

impl Refusal {
    /// Whether the control plane refuses the identity of this proxy, whatever the target.
    pub(crate) fn is_denial(&self) -> bool {
        self.code == Code::PermissionDenied
    }

    /// Whether it is about the target, so that the control plane has permitted the identity of this proxy.
    fn is_of_permitted_client(&self) -> bool {
        matches!(self.code, Code::NotFound | Code::FailedPrecondition)
    }
}

/// When a stream is closed and reopened; no limits by default.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamLimits {
    /// Maximum time to the first message.
    pub initial: Option<Duration>,
    /// Maximum time between messages.
    pub idle: Option<Duration>,
    /// Maximum time to the end.
    pub lifetime: Option<Duration>,
}

/// The position of a message in its stream.
///
/// An incremental stream starts over when it is reopened, so entries that the first message does not have are removed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    First,
    Later,
}

pub(crate) struct WatchParams {
    /// The channel of its streams.
    pub channel: Channel,
    /// The watched target, for logs.
    pub description: String,
    pub limits: StreamLimits,
    pub backoff: Backoff,
    /// Shortens the backoff before the next stream.
    pub retry: RetrySignal,
    /// Codes that count as answers while no value is known. A value that was received once is kept even if the control plane
    /// refuses it later.
    pub refusal_codes: &'static [Code],
}

/// Watches the stream that `open` opens, on `runtime`, until the last receiver is dropped.
///
/// While the channel has no connection, no stream is opened, so that the backoff does not grow. `decode` gets every message of
/// every stream, in order; its result is published.
pub(crate) fn spawn<M, T, O>(
    runtime: &Handle,
    mut params: WatchParams,
    mut open: impl FnMut() -> O + Send + 'static,
    mut decode: impl FnMut(Position, M) -> T + Send + 'static,
) -> watch::Receiver<WatchState<T>>
where
    M: Send + 'static,
    T: Send + Sync + 'static,
    O: Future<Output = Result<Response<Streaming<M>>, Status>> + Send,
{
    let (state_tx, state_rx) = watch::channel(WatchState::Pending);
    runtime.spawn(async move {
        let resuming = async {
            // Whether the service denies these streams by the identity of this proxy, which all streams share.
            let can_be_denied = params.refusal_codes.contains(&Code::PermissionDenied);
            let (mut delays, mut delays_of_refused) = (params.backoff.start(), REFUSAL_BACKOFF.start());
            loop {
                params.channel.wait_until_connected().await;
                let mut position = Position::First;
                let permitted = params.channel.permitted();
                let opening = open();
                let ended = read_stream(&params.limits, opening, |message| {
                    if position == Position::First && can_be_denied {
                        params.channel.notify_denied();
                    }
                    state_tx.send_replace(WatchState::Known(decode(position, message)));
                    position = Position::Later;
                });
                let ended = ended.await;
                if position == Position::Later {
                    delays.reset();
                    delays_of_refused.reset();
                }
                let refusal = refusal(&params, &ended);
                let is_denied = refusal.as_ref().is_some_and(Refusal::is_denial);
                if can_be_denied && refusal.as_ref().is_some_and(Refusal::is_of_permitted_client) {
                    params.channel.notify_denied();
                }
                let delay = match refusal {
                    None => delays.next_delay(),
                    Some(refusal) => {
                        let is_transient = refusal.code == Code::FailedPrecondition;
                        publish_refusal(&state_tx, refusal);
                        match is_transient {
                            true => delays.next_delay(),
                            false => delays_of_refused.next_delay(),
                        }
                    }
                };
                ended.log(&params.description, delay, params.channel.log_limiter());
                tokio::select! {
                    () = params.retry.wait(delay) => {}
                    () = async { sleep(MIN_RETRY_DELAY).await; permitted.await }, if is_denied => {}
                }
            }
        };
        // Dropping `resuming` drops the stream, which cancels it at the server.
        tokio::select! {
            () = state_tx.closed() => {}
            () = resuming => {}
        }
    });
    state_rx
}

/// Publishes a refusal if no value is known; the same refusal again notifies no receiver. A denial does not replace an answer about
/// the target.
fn publish_refusal<T>(state_tx: &watch::Sender<WatchState<T>>, refusal: Refusal) {
    state_tx.send_if_modified(|watched| {
        let is_new = match watched {
            WatchState::Pending => true,
            WatchState::Known(_) => false,
            WatchState::Refused(known) => *known != refusal && (known.is_denial() || !refusal.is_denial()),
        };
        if is_new {
            *watched = WatchState::Refused(refusal);
        }
        is_new
    });
}

enum StreamEnd {
    /// Normally: the server closed it, or a limit was reached.
    Closed(&'static str),
    Failed(Status),
}

/// Reads one stream to its end.
async fn read_stream<M>(
    limits: &StreamLimits,
    opening: impl Future<Output = Result<Response<Streaming<M>>, Status>>,
    mut publish: impl FnMut(M),
) -> StreamEnd {
    let opened_at = Instant::now();
    let end_of_life = limits.lifetime.map(|lifetime| opened_at + lifetime);
    let first_by = limits.initial.map(|initial| opened_at + initial);
    let mut stream = match with_deadline(earliest(first_by, end_of_life), opening).await {
        Some(Ok(rsp)) => rsp.into_inner(),
        Some(Err(status)) => return StreamEnd::Failed(status),
        None => return StreamEnd::Failed(Status::deadline_exceeded("the stream did not open before the timeout")),
    };
    let mut next_by = first_by;
    let mut seen = false;
    loop {
        match with_deadline(earliest(next_by, end_of_life), stream.message()).await {
            Some(Ok(Some(message))) => publish(message),
            Some(Ok(None)) => return StreamEnd::Closed("closed by the server"),
            Some(Err(status)) => return StreamEnd::Failed(status),
            None if !seen => {
                return StreamEnd::Failed(Status::deadline_exceeded(
                    "the first message did not arrive before the timeout",
                ));
            }
            None if end_of_life.is_some_and(|end| end <= Instant::now()) => {
                return StreamEnd::Closed("its maximum lifetime is reached");
            }
            None => return StreamEnd::Closed("no message within the idle limit"),
        }
        seen = true;
        next_by = limits.idle.map(|idle| Instant::now() + idle);
    }
}

async fn with_deadline<T>(deadline: Option<Instant>, future: impl Future<Output = T>) -> Option<T> {
    match deadline {
        Some(deadline) => timeout_at(deadline, future).await.ok(),
        None => Some(future.await),
    }
}

fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}

fn refusal(params: &WatchParams, ended: &StreamEnd) -> Option<Refusal> {
    match ended {
        StreamEnd::Failed(status) if params.refusal_codes.contains(&status.code()) => Some(Refusal {
            description: params.description.clone(),
            code: status.code(),
            message: status.message().to_owned(),
        }),
        _ => None,
    }
}

impl StreamEnd {
    fn log(&self, description: &str, delay: Duration, log: &LogLimiter<Code>) {
        match self {
            Self::Closed(reason) => debug!(description, reason, ?delay, "watch stream closed, reopening it"),
            // The certificate or the settings of this proxy are wrong; waiting does not help.
            Self::Failed(status) if matches!(status.code(), Code::PermissionDenied | Code::Unauthenticated) => {
                let (code, message) = (status.code(), status.message());
                warn_limited!(
                    log,
                    code,
                    "the control plane refuses a watch stream, opening it again",
                    description,
                    ?code,
                    message,
                    ?delay
                );
            }
            Self::Failed(status) => {
                debug!(description, code = ?status.code(), message = status.message(), ?delay, "watch stream failed, reopening it");
            }
        }
    }
}

/// Backoff after a refusal. A target that does not exist may be created at any time. `FAILED_PRECONDITION` is retried with the
/// backoff of other failures. A denied stream is also retried when another one of its channel is permitted.
const REFUSAL_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(500),
    max: Duration::from_secs(30),
    jitter: 0.5,
};
