//! How long a request and its response may take: the whole of it, the response alone, or a silence within.

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

/// When a request is given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestTimeouts {
    /// For the end of the response, whatever is tried until then; and how long that was from the start.
    pub(crate) deadline: Option<(Instant, Duration)>,
    /// For a response to be handed on, whatever is tried until then; and how long that was from the start.
    pub(crate) response_deadline: Option<(Instant, Duration)>,
    /// From the end of the request to the head of the response.
    pub(crate) response_headers_timeout: Option<Duration>,
    /// From the end of the request to the end of the response.
    pub(crate) response_timeout: Option<Duration>,
    /// Without data in either direction, once the response has begun.
    pub(crate) idle_timeout: Option<Duration>,
}

/// Watches over one try of a request.
pub(crate) struct AttemptDeadlines {
    timeouts: RequestTimeouts,
    progress: Arc<Mutex<StreamProgress>>,
    timer: ResettableTimer,
}

/// How the two bodies of a stream move on.
struct StreamProgress {
    /// When the request ended.
    sent_at: Option<Instant>,
    /// When data last passed.
    last_data_at: Instant,
    /// Whether its time is over, so that nobody wants the rest of the request.
    is_cancelled: bool,
    /// Who waits for the request to end.
    response_waker: Option<Waker>,
    /// Who sends the request.
    request_waker: Option<Waker>,
}

/// What of a stream is waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ResponsePhase {
    Head,
    Body,
}

/// A body that is watched over.
pub(crate) struct DeadlineBody(DeadlineBodyState);

enum DeadlineBodyState {
    Request {
        body: Body,
        pace: Arc<Mutex<StreamProgress>>,
    },
    Response {
        body: Body,
        limits: AttemptDeadlines,
        /// Bytes that its receiver could not pass on so far, when it last said so.
        unsent: usize,
    },
    /// A response of which all has come in time.
    Complete(Body),
    /// The end has been told.
    Ended,
}

impl AttemptDeadlines {
    /// Begins to watch over `req`, which is sent `now`.
    pub(crate) fn start(timeouts: RequestTimeouts, req: &mut Request<Body>, now: Instant) -> Self {
        let is_sent = req.body().is_end_stream();
        let progress = Arc::new(Mutex::new(StreamProgress {
            sent_at: is_sent.then_some(now),
            last_data_at: now,
            is_cancelled: false,
            response_waker: None,
            request_waker: None,
        }));
        if !is_sent {
            let body = std::mem::take(req.body_mut());
            let role = DeadlineBodyState::Request {
                body,
                pace: progress.clone(),
            };
            *req.body_mut() = Body::received(Box::new(DeadlineBody(role)));
        }
        Self {
            timeouts,
            progress,
            timer: ResettableTimer::default(),
        }
    }

    /// What became of waiting for the head of a response, which ends when its time is over.
    pub(crate) fn poll_head<T>(
        this: &mut Option<&mut Self>,
        polled: Poll<Result<T, Error>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<T, Error>> {
        Self::poll_within(this, ResponsePhase::Head, polled, cx)
    }

    /// Waits for something of the response's body.
    ///
    /// # Errors
    /// Those of `read`, or it took too long.
    pub(crate) async fn with_deadline<T>(&mut self, read: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        self.progress.lock().last_data_at = Instant::now();
        let (mut read, mut this) = (pin!(read), Some(self));
        poll_fn(|cx| {
            let polled = read.as_mut().poll(cx);
            Self::poll_within(&mut this, ResponsePhase::Body, polled, cx)
        })
        .await
    }

    fn poll_within<T>(
        this: &mut Option<&mut Self>,
        phase: ResponsePhase,
        polled: Poll<Result<T, Error>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<T, Error>> {
        match this {
            Some(this) if polled.is_pending() => this
                .poll_deadline(cx, phase)
                .map(|expired| Err(Error::Timeout(expired))),
            _ => polled,
        }
    }

    /// Whether the request has been sent to its end.
    pub(crate) fn is_sent(&self) -> bool {
        self.progress.lock().sent_at.is_some()
    }

    /// Watches over a response to its end, now that it is handed on.
    pub(crate) fn limit_response(mut self, rsp: Response<Body>) -> Response<Body> {
        let terms = self.timeouts;
        let is_limited = terms.deadline.is_some() || terms.response_timeout.is_some() || terms.idle_timeout.is_some();
        if !is_limited || rsp.body().is_end_stream() {
            return rsp;
        }
        self.progress.lock().last_data_at = Instant::now();
        self.timeouts.response_deadline = None;
        rsp.map(|body| {
            let role = DeadlineBodyState::Response {
                body,
                limits: self,
                unsent: 0,
            };
            Body::received(Box::new(DeadlineBody(role)))
        })
    }

    fn poll_deadline(&mut self, cx: &mut Context<'_>, phase: ResponsePhase) -> Poll<TimeoutKind> {
        loop {
            let Some((at, expired)) = self.next_deadline(cx, phase) else {
                return Poll::Pending;
            };
            self.timer.set(at);
            ready!(self.timer.poll(cx));
            // Data that passed since has put it off.
            if self.next_deadline(cx, phase).is_none_or(|(at, _)| at > Instant::now()) {
                continue;
            }
            self.cancel_request();
            return Poll::Ready(expired);
        }
    }

    /// Lets nobody send the rest of the request.
    fn cancel_request(&self) {
        let mut pace = self.progress.lock();
        pace.is_cancelled = true;
        if let Some(sender) = pace.request_waker.take() {
            sender.wake();
        }
    }

    /// Notes that a piece of the response has passed; it may have come too late.
    fn record_response_data(&self) -> Option<TimeoutKind> {
        let now = Instant::now();
        let mut pace = self.progress.lock();
        pace.last_data_at = now;
        let RequestTimeouts {
            deadline,
            response_timeout: response,
            ..
        } = self.timeouts;
        if let Some((_, limit)) = deadline.filter(|(at, _)| *at <= now) {
            return Some(TimeoutKind::Request(limit));
        }
        let (sent_at, limit) = (pace.sent_at?, response?);
        (sent_at + limit <= now).then_some(TimeoutKind::Response(limit))
    }

    /// What is due first.
    fn next_deadline(&self, cx: &Context<'_>, phase: ResponsePhase) -> Option<(Instant, TimeoutKind)> {
        let mut pace = self.progress.lock();
        if pace.sent_at.is_none() {
            pace.response_waker = Some(cx.waker().clone());
        }
        let RequestTimeouts {
            deadline,
            response_deadline: answer,
            response_headers_timeout: head,
            response_timeout: response,
            idle_timeout: idle,
        } = self.timeouts;
        let since = |at: Option<Instant>, limit: Option<Duration>, expired: fn(Duration) -> TimeoutKind| {
            let (at, limit) = (at?, limit?);
            Some((at + limit, expired(limit)))
        };
        let is = |wanted| phase == wanted;
        [
            deadline.map(|(at, limit)| (at, TimeoutKind::Request(limit))),
            answer.map(|(at, limit)| (at, TimeoutKind::Profile(limit))),
            since(
                pace.sent_at,
                head.filter(|_| is(ResponsePhase::Head)),
                TimeoutKind::ResponseHeaders,
            ),
            since(pace.sent_at, response, TimeoutKind::Response),
            since(
                Some(pace.last_data_at),
                idle.filter(|_| is(ResponsePhase::Body)),
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
            body.finish(Err(&expired));
        }
        expired
    }
}

impl ReceivedBody for DeadlineBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match &mut self.0 {
            DeadlineBodyState::Ended => Poll::Ready(None),
            DeadlineBodyState::Request { body, pace } => {
                if pace.lock().is_cancelled {
                    return Poll::Ready(Some(Err(Error::RequestCancelled)));
                }
                let polled = Pin::new(&mut *body).poll_frame(cx);
                let is_end = match &polled {
                    Poll::Ready(None) => true,
                    Poll::Ready(Some(Ok(_))) => body.is_end_stream(),
                    Poll::Ready(Some(Err(_))) | Poll::Pending => false,
                };
                let mut pace = pace.lock();
                match polled {
                    Poll::Pending => pace.request_waker = Some(cx.waker().clone()),
                    Poll::Ready(_) => pace.record_data(is_end),
                }
                polled
            }
            DeadlineBodyState::Complete(body) => Pin::new(body).poll_frame(cx),
            DeadlineBodyState::Response { body, limits, .. } => {
                let expired = match Pin::new(&mut *body).poll_frame(cx) {
                    // What is never waited for would never be late.
                    Poll::Ready(Some(Ok(frame))) if !body.is_end_stream() => match limits.record_response_data() {
                        None => return Poll::Ready(Some(Ok(frame))),
                        Some(expired) => {
                            limits.cancel_request();
                            if let Some(rest) = take_received(body, Some(frame), cx) {
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

    /// Whether the time of a response is over, while so many bytes of it are still to be passed on, and nobody asks for more.
    fn poll_deadline(&mut self, unsent: usize, cx: &mut Context<'_>) -> Poll<Error> {
        match &mut self.0 {
            // What has come to its end is late no more, however slowly it is taken.
            DeadlineBodyState::Response {
                body,
                limits,
                unsent: before,
            } if !body.is_end_stream() => {
                if std::mem::replace(before, unsent) != unsent {
                    limits.progress.lock().last_data_at = Instant::now(); // some have left
                }
                let expired = ready!(limits.poll_deadline(cx, ResponsePhase::Body));
                if let Some(rest) = take_received(body, None, cx) {
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

    /// The body that is watched over.
    fn into_inner(self: Box<Self>) -> Option<Body> {
        match self.0 {
            DeadlineBodyState::Ended => None,
            DeadlineBodyState::Request { body, .. }
            | DeadlineBodyState::Response { body, .. }
            | DeadlineBodyState::Complete(body) => Some(body),
        }
    }
}

/// `first` and all that follows it in a body, if that has come and only waits for its receiver.
fn take_received(body: &mut Body, first: Option<Frame<Bytes>>, cx: &mut Context<'_>) -> Option<Body> {
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

/// More than what has come of a body and waits: senders wait for room before.
const MAX_BUFFERED_BYTES: usize = 4 << 20;

impl StreamProgress {
    fn record_data(&mut self, is_end: bool) {
        let now = Instant::now();
        self.last_data_at = now;
        if is_end && self.sent_at.is_none() {
            self.sent_at = Some(now);
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

    /// Waits for a head that never comes.
    async fn wait(limits: &mut AttemptDeadlines) -> TimeoutKind {
        let mut limits = Some(limits);
        match poll_fn(|cx| AttemptDeadlines::poll_head(&mut limits, Poll::<Result<(), Error>>::Pending, cx)).await {
            Err(Error::Timeout(expired)) => expired,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_earliest_deadline_expires_first() {
        let start = Instant::now();
        let terms = RequestTimeouts {
            deadline: Some((start + 3 * S, 3 * S)),
            response_deadline: None,
            response_headers_timeout: Some(S),
            response_timeout: Some(2 * S),
            idle_timeout: Some(S / 2),
        };
        let ended = async |terms| {
            let start = Instant::now();
            let expired = wait(&mut AttemptDeadlines::start(
                terms,
                &mut Request::new(Body::empty()),
                Instant::now(),
            ))
            .await;
            (expired, start.elapsed())
        };
        assert_eq!(ended(terms).await, (TimeoutKind::ResponseHeaders(S), S));
        let deadline = Some((Instant::now() + 3 * S, 3 * S));
        let patient = RequestTimeouts {
            response_headers_timeout: None,
            deadline,
            ..terms
        };
        assert_eq!(ended(patient).await, (TimeoutKind::Response(2 * S), 2 * S));
        let deadline = Some((Instant::now() + S, 3 * S));
        let expired = RequestTimeouts { deadline, ..patient };
        assert_eq!(ended(expired).await, (TimeoutKind::Request(3 * S), S));
    }

    #[tokio::test(start_paused = true)]
    async fn the_response_has_its_time_from_the_end_of_the_request() {
        let start = Instant::now();
        let mut req = Request::new(Body::full("hello"));
        let terms = RequestTimeouts {
            response_timeout: Some(2 * S),
            ..RequestTimeouts::default()
        };
        let mut limits = AttemptDeadlines::start(terms, &mut req, Instant::now());
        let (expired, ()) = tokio::join!(wait(&mut limits), async {
            advance(5 * S).await;
            req.into_body().collect().await.unwrap();
        });
        assert_eq!((expired, start.elapsed()), (TimeoutKind::Response(2 * S), 7 * S));
    }

    fn response(terms: RequestTimeouts, body: Body) -> Body {
        let limits = AttemptDeadlines::start(terms, &mut Request::new(Body::empty()), Instant::now());
        limits.limit_response(Response::new(body)).into_body()
    }

    async fn late(body: &mut Body, unsent: usize) -> Option<TimeoutKind> {
        match poll_fn(|cx| Poll::Ready(body.poll_deadline(unsent, cx))).await {
            Poll::Ready(Error::Timeout(late)) => Some(late),
            Poll::Ready(other) => panic!("{other:?}"),
            Poll::Pending => None,
        }
    }

    /// A body whose end has not come.
    fn endless() -> Body {
        let pace = StreamProgress {
            sent_at: None,
            last_data_at: Instant::now(),
            is_cancelled: true, // which it fails by
            response_waker: None,
            request_waker: None,
        };
        Body::received(Box::new(DeadlineBody(DeadlineBodyState::Request {
            body: Body::full("hello"),
            pace: Arc::new(Mutex::new(pace)),
        })))
    }

    #[tokio::test(start_paused = true)]
    async fn sent_bytes_extend_the_idle_timeout() {
        let terms = RequestTimeouts {
            idle_timeout: Some(S),
            ..RequestTimeouts::default()
        };
        let mut body = response(terms, endless());
        for unsent in [3, 2, 1] {
            advance(S * 3 / 4).await;
            assert_eq!(late(&mut body, unsent).await, None);
        }
        advance(S).await;
        assert_eq!(late(&mut body, 1).await, Some(TimeoutKind::Idle(S)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_complete_response_does_not_time_out() {
        let terms = RequestTimeouts {
            response_timeout: Some(S),
            ..RequestTimeouts::default()
        };
        let whole = || Body::buffered(["one", "two"].map(Bytes::from).into(), None);
        let mut asked = response(terms, whole());
        let taken = response(terms, whole());
        advance(2 * S).await;
        assert_eq!(late(&mut asked, 1).await, None);
        for body in [asked, taken] {
            assert_eq!(body.collect().await.unwrap().to_bytes(), "onetwo");
        }
        let mut cut = response(terms, endless());
        advance(2 * S).await;
        assert_eq!(late(&mut cut, 1).await, Some(TimeoutKind::Response(S)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_timed_out_request_is_not_sent_further() {
        let mut req = Request::new(Body::full("hello"));
        let deadline = Some((Instant::now() + S, S));
        let terms = RequestTimeouts {
            deadline,
            ..RequestTimeouts::default()
        };
        assert_eq!(
            wait(&mut AttemptDeadlines::start(terms, &mut req, Instant::now())).await,
            TimeoutKind::Request(S)
        );
        let error = req.into_body().collect().await.unwrap_err();
        assert!(error.is_request_body_error(), "{error}");
    }
}
