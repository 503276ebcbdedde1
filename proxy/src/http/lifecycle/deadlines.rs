//! Timeouts of a request: for the whole request, for the response, and for idle streams.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as _, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::http::{
    body::{Body, ReceivedBody},
    error::{Error, TimeoutKind},
    timer::ResettableTimer,
};

/// The timeouts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestTimeouts {
    /// Deadline for the end of the response, over all attempts, and the timeout from which it was computed.
    pub(crate) request_deadline: Option<(Instant, Duration)>,
    /// Deadline of a ServiceProfile for the response head, over all attempts, and the timeout from which it was computed.
    pub(crate) profile_deadline: Option<(Instant, Duration)>,
    /// From the end of the request to the head of the response.
    pub(crate) response_headers_timeout: Option<Duration>,
    /// From the end of the request to the end of the response.
    pub(crate) response_timeout: Option<Duration>,
    /// Maximum time without data in either direction, from the head of the response on.
    pub(crate) idle_timeout: Option<Duration>,
}

/// Enforces the timeouts of one attempt of a request.
pub(crate) struct AttemptDeadlines {
    timeouts: RequestTimeouts,
    progress: Arc<Mutex<StreamProgress>>,
    timer: ResettableTimer,
}

/// The progress of the request body and the response body.
struct StreamProgress {
    /// When the request ended.
    request_ended_at: Option<Instant>,
    /// When data was last forwarded in either direction.
    last_data_at: Instant,
    /// A deadline has expired; the rest of the request is not sent.
    is_cancelled: bool,
    /// The task that waits for the response. Woken when the request has been sent.
    response_waker: Option<Waker>,
    /// The task that sends the request. Woken when it is cancelled.
    request_waker: Option<Waker>,
}

/// The part of the response for which a request waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ResponsePhase {
    Head,
    Body,
}

/// A body whose progress is recorded. A response body is also subject to the deadlines.
pub(crate) struct DeadlineBody(DeadlineBodyState);

enum DeadlineBodyState {
    Request {
        body: Body,
        progress: Arc<Mutex<StreamProgress>>,
    },
    Response {
        body: Body,
        limits: AttemptDeadlines,
        /// Number of bytes of the body that were not yet sent to the client at the last call of `poll_deadline`.
        unsent: usize,
    },
    /// A deadline has expired, but the complete response had already been received.
    Complete(Body),
    /// A timeout was reported.
    Ended,
}

impl AttemptDeadlines {
    /// Wraps the body of `req`, which is sent at `now`.
    pub(crate) fn start(timeouts: RequestTimeouts, req: &mut Request<Body>, now: Instant) -> Self {
        let is_sent = req.body().is_end_stream();
        let progress = Arc::new(Mutex::new(StreamProgress {
            request_ended_at: is_sent.then_some(now),
            last_data_at: now,
            is_cancelled: false,
            response_waker: None,
            request_waker: None,
        }));
        if !is_sent {
            let body = std::mem::take(req.body_mut());
            let state = DeadlineBodyState::Request {
                body,
                progress: progress.clone(),
            };
            *req.body_mut() = Body::received(Box::new(DeadlineBody(state)));
        }
        Self {
            timeouts,
            progress,
            timer: ResettableTimer::default(),
        }
    }

    /// Returns `polled`, or a timeout error if it is pending and a deadline for the response head has expired. Without
    /// `deadlines` there is no timeout.
    pub(crate) fn check_head_deadline<T>(
        deadlines: Option<&mut Self>,
        polled: Poll<Result<T, Error>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<T, Error>> {
        Self::poll_within(deadlines, ResponsePhase::Head, polled, cx)
    }

    /// Awaits `read`, which reads from the response body.
    ///
    /// # Errors
    /// `read` fails, or a deadline expires.
    pub(crate) async fn with_deadline<T>(&mut self, read: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        self.progress.lock().last_data_at = Instant::now();
        let mut read = pin!(read);
        poll_fn(|cx| {
            let polled = read.as_mut().poll(cx);
            Self::poll_within(Some(&mut *self), ResponsePhase::Body, polled, cx)
        })
        .await
    }

    fn poll_within<T>(
        deadlines: Option<&mut Self>,
        phase: ResponsePhase,
        polled: Poll<Result<T, Error>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<T, Error>> {
        match deadlines {
            Some(deadlines) if polled.is_pending() => deadlines
                .poll_deadline(cx, phase)
                .map(|expired| Err(Error::Timeout(expired))),
            _ => polled,
        }
    }

    /// Whether the request has been sent to its end.
    pub(crate) fn is_sent(&self) -> bool {
        self.progress.lock().request_ended_at.is_some()
    }

    /// Wraps the body of a response that is returned to the client. The timeouts then apply until its end.
    pub(crate) fn limit_response(mut self, rsp: Response<Body>) -> Response<Body> {
        let timeouts = self.timeouts;
        let is_limited = timeouts.request_deadline.is_some()
            || timeouts.response_timeout.is_some()
            || timeouts.idle_timeout.is_some();
        if !is_limited || rsp.body().is_end_stream() {
            return rsp;
        }
        self.progress.lock().last_data_at = Instant::now();
        self.timeouts.profile_deadline = None;
        rsp.map(|body| {
            let state = DeadlineBodyState::Response {
                body,
                limits: self,
                unsent: 0,
            };
            Body::received(Box::new(DeadlineBody(state)))
        })
    }

    fn poll_deadline(&mut self, cx: &mut Context<'_>, phase: ResponsePhase) -> Poll<TimeoutKind> {
        loop {
            let Some((at, expired)) = self.next_deadline(cx, phase) else {
                return Poll::Pending;
            };
            self.timer.set(at);
            ready!(self.timer.poll(cx));
            // Data that was forwarded since then extends the deadline.
            if self.next_deadline(cx, phase).is_none_or(|(at, _)| at > Instant::now()) {
                continue;
            }
            self.cancel_request();
            return Poll::Ready(expired);
        }
    }

    /// Stops sending the request.
    fn cancel_request(&self) {
        let mut progress = self.progress.lock();
        progress.is_cancelled = true;
        if let Some(sender) = progress.request_waker.take() {
            sender.wake();
        }
    }

    /// Records that response data was forwarded. Returns the timeout that has expired, if there is one.
    fn record_and_check(&self) -> Option<TimeoutKind> {
        let now = Instant::now();
        let mut progress = self.progress.lock();
        progress.last_data_at = now;
        let RequestTimeouts {
            request_deadline,
            response_timeout: response,
            ..
        } = self.timeouts;
        if let Some((_, limit)) = request_deadline.filter(|(at, _)| *at <= now) {
            return Some(TimeoutKind::Request(limit));
        }
        let (request_ended_at, limit) = (progress.request_ended_at?, response?);
        (request_ended_at + limit <= now).then_some(TimeoutKind::Response(limit))
    }

    /// The earliest deadline.
    fn next_deadline(&self, cx: &Context<'_>, phase: ResponsePhase) -> Option<(Instant, TimeoutKind)> {
        let mut progress = self.progress.lock();
        if progress.request_ended_at.is_none() {
            progress.response_waker = Some(cx.waker().clone());
        }
        let RequestTimeouts {
            request_deadline,
            profile_deadline,
            response_headers_timeout: head,
            response_timeout: response,
            idle_timeout: idle,
        } = self.timeouts;
        let deadline_after = |at: Option<Instant>, limit: Option<Duration>, expired: fn(Duration) -> TimeoutKind| {
            let (at, limit) = (at?, limit?);
            Some((at + limit, expired(limit)))
        };
        [
            request_deadline.map(|(at, limit)| (at, TimeoutKind::Request(limit))),
            profile_deadline.map(|(at, limit)| (at, TimeoutKind::Profile(limit))),
            deadline_after(
                progress.request_ended_at,
                head.filter(|_| phase == ResponsePhase::Head),
                TimeoutKind::ResponseHeaders,
            ),
            deadline_after(progress.request_ended_at, response, TimeoutKind::Response),
            deadline_after(
                Some(progress.last_data_at),
                idle.filter(|_| phase == ResponsePhase::Body),
                TimeoutKind::Idle,
            ),
        ]
        .into_iter()
        .flatten()
        .min_by_key(|(at, _)| *at)
    }
}

impl DeadlineBody {
    fn end(&mut self, expired: TimeoutKind) -> Error {
        let expired = Error::Timeout(expired);
        if let DeadlineBodyState::Response { body, .. } = std::mem::replace(&mut self.0, DeadlineBodyState::Ended) {
            body.discard_with_result(Err(&expired));
        }
        expired
    }
}

impl ReceivedBody for DeadlineBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match &mut self.0 {
            DeadlineBodyState::Ended => Poll::Ready(None),
            DeadlineBodyState::Request { body, progress } => {
                if progress.lock().is_cancelled {
                    return Poll::Ready(Some(Err(Error::AttemptCancelled)));
                }
                let polled = Pin::new(&mut *body).poll_frame(cx);
                let is_end = match &polled {
                    Poll::Ready(None) => true,
                    Poll::Ready(Some(Ok(_))) => body.is_end_stream(),
                    Poll::Ready(Some(Err(_))) | Poll::Pending => false,
                };
                let mut progress = progress.lock();
                match polled {
                    Poll::Pending => progress.request_waker = Some(cx.waker().clone()),
                    Poll::Ready(_) => progress.record_data(is_end),
                }
                polled
            }
            DeadlineBodyState::Complete(body) => Pin::new(body).poll_frame(cx),
            DeadlineBodyState::Response { body, limits, .. } => {
                let expired = match Pin::new(&mut *body).poll_frame(cx) {
                    // A body that is always ready never polls the timer, so each frame checks the deadlines. If a deadline has
                    // expired, the response times out, except if it has already been received completely.
                    Poll::Ready(Some(Ok(frame))) if !body.is_end_stream() => match limits.record_and_check() {
                        None => return Poll::Ready(Some(Ok(frame))),
                        Some(expired) => {
                            limits.cancel_request();
                            if let Some(rest) = take_rest_if_received(body, Some(frame), cx) {
                                self.0 = DeadlineBodyState::Complete(rest);
                                return self.poll_frame(cx);
                            }
                            expired
                        }
                    },
                    Poll::Ready(frame) => return Poll::Ready(frame),
                    Poll::Pending => ready!(limits.poll_deadline(cx, ResponsePhase::Body)),
                };
                Poll::Ready(Some(Err(self.end(expired))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            DeadlineBodyState::Ended => true,
            DeadlineBodyState::Request { body, .. }
            | DeadlineBodyState::Response { body, .. }
            | DeadlineBodyState::Complete(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            DeadlineBodyState::Ended => SizeHint::with_exact(0),
            DeadlineBodyState::Request { body, .. }
            | DeadlineBodyState::Response { body, .. }
            | DeadlineBodyState::Complete(body) => body.size_hint(),
        }
    }

    /// Ready with the timeout error when a deadline has expired. Called while `unsent` bytes of the body are being sent and no
    /// frame is polled.
    fn poll_deadline(&mut self, unsent: usize, cx: &mut Context<'_>) -> Poll<Error> {
        match &mut self.0 {
            // A complete response does not time out, however slowly the client reads it.
            DeadlineBodyState::Response {
                body,
                limits,
                unsent: before,
            } if !body.is_end_stream() => {
                if std::mem::replace(before, unsent) != unsent {
                    limits.progress.lock().last_data_at = Instant::now(); // some bytes were sent
                }
                let expired = ready!(limits.poll_deadline(cx, ResponsePhase::Body));
                if let Some(rest) = take_rest_if_received(body, None, cx) {
                    self.0 = DeadlineBodyState::Complete(rest);
                    return Poll::Pending;
                }
                Poll::Ready(self.end(expired))
            }
            DeadlineBodyState::Response { .. }
            | DeadlineBodyState::Complete(_)
            | DeadlineBodyState::Request { .. }
            | DeadlineBodyState::Ended => Poll::Pending,
        }
    }

    fn into_inner(self: Box<Self>) -> Option<Body> {
        match self.0 {
            DeadlineBodyState::Ended => None,
            DeadlineBodyState::Request { body, .. }
            | DeadlineBodyState::Response { body, .. }
            | DeadlineBodyState::Complete(body) => Some(body),
        }
    }
}

/// Returns `first` and the rest of the body as one body, if the rest has already been received. Otherwise returns `None`, and the
/// frames read until then are lost.
fn take_rest_if_received(body: &mut Body, first: Option<Frame<Bytes>>, cx: &mut Context<'_>) -> Option<Body> {
    let (mut kept, mut n_bytes, mut trailers) = (VecDeque::new(), 0, None);
    let mut next = first;
    loop {
        match next.map(Frame::into_data) {
            Some(Ok(data)) => {
                n_bytes += data.len();
                kept.push_back(data);
            }
            Some(Err(frame)) => trailers = frame.into_trailers().ok(),
            None => {}
        }
        next = match Pin::new(&mut *body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) if n_bytes < MAX_BUFFERED_BYTES => Some(frame),
            Poll::Ready(None) => return Some(Body::buffered(kept, trailers)),
            Poll::Ready(Some(_)) | Poll::Pending => return None,
        };
    }
}

/// Maximum size of a body that [`take_rest_if_received`] returns. Flow control stops senders before this size is reached.
const MAX_BUFFERED_BYTES: usize = 4 << 20;

impl StreamProgress {
    fn record_data(&mut self, is_end: bool) {
        let now = Instant::now();
        self.last_data_at = now;
        if is_end && self.request_ended_at.is_none() {
            self.request_ended_at = Some(now);
            if let Some(waiter) = self.response_waker.take() {
                waiter.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use tokio::time::advance;

    use super::*;

    const S: Duration = Duration::from_secs(1);

    /// Waits for a response head that does not arrive.
    async fn wait(limits: &mut AttemptDeadlines) -> TimeoutKind {
        let pending = || Poll::<Result<(), Error>>::Pending;
        match poll_fn(|cx| AttemptDeadlines::check_head_deadline(Some(&mut *limits), pending(), cx)).await {
            Err(Error::Timeout(expired)) => expired,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_earliest_deadline_expires_first() {
        let start = Instant::now();
        let timeouts = RequestTimeouts {
            request_deadline: Some((start + 3 * S, 3 * S)),
            profile_deadline: None,
            response_headers_timeout: Some(S),
            response_timeout: Some(2 * S),
            idle_timeout: Some(S / 2),
        };
        let ended = async |timeouts| {
            let start = Instant::now();
            let expired = wait(&mut AttemptDeadlines::start(
                timeouts,
                &mut Request::new(Body::empty()),
                Instant::now(),
            ))
            .await;
            (expired, start.elapsed())
        };
        assert_eq!(ended(timeouts).await, (TimeoutKind::ResponseHeaders(S), S));
        let request_deadline = Some((Instant::now() + 3 * S, 3 * S));
        let without_head_timeout = RequestTimeouts {
            response_headers_timeout: None,
            request_deadline,
            ..timeouts
        };
        assert_eq!(ended(without_head_timeout).await, (TimeoutKind::Response(2 * S), 2 * S));
        let request_deadline = Some((Instant::now() + S, 3 * S));
        let expired = RequestTimeouts {
            request_deadline,
            ..without_head_timeout
        };
        assert_eq!(ended(expired).await, (TimeoutKind::Request(3 * S), S));
    }

    #[tokio::test(start_paused = true)]
    async fn the_response_timeout_starts_at_the_end_of_the_request() {
        let start = Instant::now();
        let mut req = Request::new(Body::full("hello"));
        let timeouts = RequestTimeouts {
            response_timeout: Some(2 * S),
            ..RequestTimeouts::default()
        };
        let mut limits = AttemptDeadlines::start(timeouts, &mut req, Instant::now());
        let (expired, ()) = tokio::join!(wait(&mut limits), async {
            advance(5 * S).await;
            req.into_body().collect().await.unwrap();
        });
        assert_eq!((expired, start.elapsed()), (TimeoutKind::Response(2 * S), 7 * S));
    }

    fn response(timeouts: RequestTimeouts, body: Body) -> Body {
        let limits = AttemptDeadlines::start(timeouts, &mut Request::new(Body::empty()), Instant::now());
        limits.limit_response(Response::new(body)).into_body()
    }

    async fn expired(body: &mut Body, unsent: usize) -> Option<TimeoutKind> {
        match poll_fn(|cx| Poll::Ready(body.poll_deadline(unsent, cx))).await {
            Poll::Ready(Error::Timeout(kind)) => Some(kind),
            Poll::Ready(other) => panic!("{other:?}"),
            Poll::Pending => None,
        }
    }

    /// A body whose end has not been received.
    fn unfinished() -> Body {
        let progress = StreamProgress {
            request_ended_at: None,
            last_data_at: Instant::now(),
            is_cancelled: true, // so that `poll_frame` fails before the end
            response_waker: None,
            request_waker: None,
        };
        Body::received(Box::new(DeadlineBody(DeadlineBodyState::Request {
            body: Body::full("hello"),
            progress: Arc::new(Mutex::new(progress)),
        })))
    }

    #[tokio::test(start_paused = true)]
    async fn sent_bytes_extend_the_idle_timeout() {
        let timeouts = RequestTimeouts {
            idle_timeout: Some(S),
            ..RequestTimeouts::default()
        };
        let mut body = response(timeouts, unfinished());
        for unsent in [3, 2, 1] {
            advance(S * 3 / 4).await;
            assert_eq!(expired(&mut body, unsent).await, None);
        }
        advance(S).await;
        assert_eq!(expired(&mut body, 1).await, Some(TimeoutKind::Idle(S)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_complete_response_does_not_time_out() {
        let timeouts = RequestTimeouts {
            response_timeout: Some(S),
            ..RequestTimeouts::default()
        };
        let whole = || Body::buffered(["one", "two"].map(Bytes::from).into(), None);
        let mut polled_late = response(timeouts, whole());
        let read_late = response(timeouts, whole());
        advance(2 * S).await;
        assert_eq!(expired(&mut polled_late, 1).await, None);
        for body in [polled_late, read_late] {
            assert_eq!(body.collect().await.unwrap().to_bytes(), "onetwo");
        }
        let mut incomplete = response(timeouts, unfinished());
        advance(2 * S).await;
        assert_eq!(expired(&mut incomplete, 1).await, Some(TimeoutKind::Response(S)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_timed_out_request_is_not_sent_further() {
        let mut req = Request::new(Body::full("hello"));
        let request_deadline = Some((Instant::now() + S, S));
        let timeouts = RequestTimeouts {
            request_deadline,
            ..RequestTimeouts::default()
        };
        assert_eq!(
            wait(&mut AttemptDeadlines::start(timeouts, &mut req, Instant::now())).await,
            TimeoutKind::Request(S)
        );
        let error = req.into_body().collect().await.unwrap_err();
        assert!(error.is_request_body_error(), "{error}");
    }
}
