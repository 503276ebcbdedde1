//! A server stream as a `watch` value. The stream is reopened while there are receivers, and the last value is kept.
//!
//! A *refusal* is the answer of the control plane that it sends no value; a *denial* is a refusal with `PERMISSION_DENIED`, which
//! is about the identity of this proxy and says nothing about the target. Refusals are not final: the control plane may send a
//! value later, so the stream is opened again after a backoff.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::{Code, Response, Status, Streaming};
use tracing::debug;
use tulle_core::backoff::{Backoff, BackoffDelays};
use tulle_core::log_limit::LogLimiter;
use tulle_core::warn_limited;

use crate::api::channel::{Channel, IdentityCheck};
use crate::api::retry_signal::{MIN_RETRY_DELAY, RetrySignal};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WatchState<T> {
    /// No answer yet.
    Pending,
    /// The latest value. It stays known while the control plane is unreachable.
    Known(T),
    /// The control plane has refused the request; the stream is opened again later.
    Refused(Refusal),
}

impl<T> WatchState<T> {
    /// The refusal, if it is a denial. A denial says nothing about the target, so the target must not be treated as unknown or as
    /// one without endpoints.
    pub(crate) fn denial(&self) -> Option<&Refusal> {
        match self {
            Self::Refused(refusal) if refusal.is_denial() => Some(refusal),
            _ => None,
        }
    }
}

/// A refusal instead of a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the control plane refuses the {description} ({code:?}): {message}")]
pub(crate) struct Refusal {
    /// Description of the request, such as `policy of port 80`.
    pub description: String,
    pub code: Code,
    pub message: String,
}

impl Refusal {
    /// Whether the control plane refuses the identity of this proxy, independent of the target or port.
    pub(crate) fn is_denial(&self) -> bool {
        self.code == Code::PermissionDenied
    }

    /// Whether the refusal is about the target, which shows that the control plane permits the identity of this proxy.
    fn shows_identity_is_permitted(&self) -> bool {
        matches!(self.code, Code::NotFound | Code::FailedPrecondition)
    }
}

/// The limits after which a stream is closed and reopened; no limits by default.
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
/// An incremental stream starts over when it is reopened: entries that the first message does not contain are removed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    First,
    Later,
}

pub(crate) struct WatchParams {
    /// The channel of the streams.
    pub channel: Channel,
    /// The watched target, for logs.
    pub description: String,
    pub limits: StreamLimits,
    pub backoff: Backoff,
    /// Shortens the backoff before the next stream.
    pub retry: RetrySignal,
    pub identity_check: IdentityCheck,
    /// Codes that count as answers while no value is known. A value that was received once is kept even if the control plane
    /// refuses it later.
    pub refusal_codes: &'static [Code],
}

/// Watches the stream that `open` opens, on `runtime`, until the last receiver is dropped.
///
/// While the channel has no connection, no stream is opened, so that the backoff does not grow. `decode` gets every message of
/// every stream, in order; its result is published.
pub(crate) fn spawn_watch<M, T, O>(
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
            let mut delays = RetryDelays::new(params.backoff);
            loop {
                params.channel.wait_until_connected().await;
                let mut position = Position::First;
                let permitted = params.channel.permitted(params.identity_check);
                let opening = open();
                let ended = read_stream(&params.limits, opening, |message| {
                    if position == Position::First {
                        params.channel.notify_permitted(params.identity_check);
                    }
                    state_tx.send_replace(WatchState::Known(decode(position, message)));
                    position = Position::Later;
                });
                let ended = ended.await;
                if position == Position::Later {
                    delays.reset();
                }
                let refusal = refusal(&params, &ended);
                let is_denied = refusal.as_ref().is_some_and(Refusal::is_denial);
                if refusal.as_ref().is_some_and(Refusal::shows_identity_is_permitted) {
                    params.channel.notify_permitted(params.identity_check);
                }
                let delay = delays.next_delay(refusal.as_ref());
                if let Some(refusal) = refusal {
                    publish_refusal(&state_tx, refusal);
                }
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

/// The delays before the next stream. How the last stream ended decides which of them applies.
struct RetryDelays {
    after_failure: BackoffDelays,
    after_refusal: BackoffDelays,
    after_denial: BackoffDelays,
}

impl RetryDelays {
    /// `backoff` is the backoff after failures.
    fn new(backoff: Backoff) -> Self {
        Self {
            after_failure: backoff.start(),
            after_refusal: REFUSAL_BACKOFF.start(),
            after_denial: DENIAL_BACKOFF.start(),
        }
    }

    fn reset(&mut self) {
        self.after_failure.reset();
        self.after_refusal.reset();
        self.after_denial.reset();
    }

    /// `refusal` is the refusal of the last stream; `None` if that stream ended in another way.
    fn next_delay(&mut self, refusal: Option<&Refusal>) -> Duration {
        let delays = match refusal.map(|refusal| refusal.code) {
            None | Some(Code::FailedPrecondition) => &mut self.after_failure,
            Some(Code::PermissionDenied) => &mut self.after_denial,
            Some(_) => &mut self.after_refusal,
        };
        delays.next_delay()
    }
}

/// Publishes a refusal if no value is known. A repeated refusal does not notify the receivers. A denial does not replace an answer
/// about the target.
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
    /// A normal end: the server closed the stream, or a limit was reached.
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
            // A warning, because an operator must correct the certificate or the settings of this proxy.
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
/// backoff of other failures.
const REFUSAL_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(500),
    max: Duration::from_secs(30),
    jitter: 0.5,
};

/// Backoff after a denial, at most 9 s with the jitter. A denied stream is also retried when another one of its channel with the
/// same check is permitted, but a proxy may have no other stream.
const DENIAL_BACKOFF: Backoff = Backoff {
    max: Duration::from_secs(6),
    ..REFUSAL_BACKOFF
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denial_is_retried_sooner_than_another_refusal_and_a_value_resets_all_delays() {
        let second = Duration::from_secs(1);
        let mut delays = RetryDelays::new(Backoff {
            min: second,
            max: second,
            jitter: 0.0,
        });
        let refused = |code| Refusal {
            description: "policy of port 80".to_owned(),
            code,
            message: String::new(),
        };
        for (code, expected) in [
            (Code::PermissionDenied, 5..10),
            (Code::NotFound, 30..45),
            (Code::InvalidArgument, 30..45),
            (Code::FailedPrecondition, 1..2),
        ] {
            let refusal = refused(code);
            let longest = (0..20).map(|_| delays.next_delay(Some(&refusal))).last();
            let is_expected = longest.is_some_and(|longest| expected.contains(&longest.as_secs()));
            assert!(is_expected, "{code:?}: {longest:?}");
        }
        assert_eq!(delays.next_delay(None), second);
        delays.reset();
        for code in [Code::PermissionDenied, Code::NotFound] {
            assert!(delays.next_delay(Some(&refused(code))) < second, "{code:?}");
        }
    }
}
