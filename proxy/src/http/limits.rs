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
    body::Body,
    error::{Error, Late},
    timer::Timer,
};

/// When a request is given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Terms {
    /// For the end of the response, whatever is tried until then; and how long that was from the start.
    pub(crate) deadline: Option<(Instant, Duration)>,
    /// For a response to be handed on, whatever is tried until then; and how long that was from the start.
    pub(crate) answer: Option<(Instant, Duration)>,
    /// From the end of the request to the head of the response.
    pub(crate) head: Option<Duration>,
    /// From the end of the request to the end of the response.
    pub(crate) response: Option<Duration>,
    /// Without data in either direction, once the response has begun.
    pub(crate) idle: Option<Duration>,
}

/// Watches over one try of a request.
pub(crate) struct Limits {
    terms: Terms,
    pace: Arc<Mutex<Pace>>,
    timer: Timer,
}

/// How the two bodies of a stream move on.
struct Pace {
    /// When the request ended.
    sent_at: Option<Instant>,
    /// When data last passed.
    moved_at: Instant,
    /// Whether its time is over, so that nobody wants the rest of the request.
    is_over: bool,
    /// Who waits for the request to end.
    waiter: Option<Waker>,
    /// Who sends the request.
    sender: Option<Waker>,
}

/// What of a stream is waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Head,
    Body,
}

/// A body that is watched over.
pub(crate) struct Limited(Role);

enum Role {
    Request {
        body: Body,
        pace: Arc<Mutex<Pace>>,
    },
    Response {
        body: Body,
        limits: Limits,
        /// Bytes that its receiver could not pass on so far, when it last said so.
        unsent: usize,
    },
    /// A response of which all has come in time.
    Complete(Body),
    /// The end has been told.
    Over,
}

impl Limits {
    /// Begins to watch over `req`, which is sent `now`.
    pub(crate) fn of(terms: Terms, req: &mut Request<Body>, now: Instant) -> Self {
        let is_sent = req.body().is_end_stream();
        let pace = Arc::new(Mutex::new(Pace {
            sent_at: is_sent.then_some(now),
            moved_at: now,
            is_over: false,
            waiter: None,
            sender: None,
        }));
        if !is_sent {
            let body = std::mem::take(req.body_mut());
            let role = Role::Request {
                body,
                pace: pace.clone(),
            };
            *req.body_mut() = Body::limited(Box::new(Limited(role)));
        }
        Self {
            terms,
            pace,
            timer: Timer::default(),
        }
    }

    /// What became of waiting for the head of a response, which ends when its time is over.
    pub(crate) fn poll_head<T>(
        this: &mut Option<&mut Self>,
        polled: Poll<Result<T, Error>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<T, Error>> {
        Self::in_time(this, Phase::Head, polled, cx)
    }

    /// Waits for something of the response's body.
    ///
    /// # Errors
    /// Those of `read`, or it took too long.
    pub(crate) async fn body<T>(&mut self, read: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        self.pace.lock().moved_at = Instant::now();
        let (mut read, mut this) = (pin!(read), Some(self));
        poll_fn(|cx| {
            let polled = read.as_mut().poll(cx);
            Self::in_time(&mut this, Phase::Body, polled, cx)
        })
        .await
    }

    fn in_time<T>(
        this: &mut Option<&mut Self>,
        phase: Phase,
        polled: Poll<Result<T, Error>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<T, Error>> {
        match this {
            Some(this) if polled.is_pending() => this.poll_over(cx, phase).map(|late| Err(Error::Late(late))),
            _ => polled,
        }
    }

    /// Whether the request has been sent to its end.
    pub(crate) fn is_sent(&self) -> bool {
        self.pace.lock().sent_at.is_some()
    }

    /// Watches over a response to its end, now that it is handed on.
    pub(crate) fn response(mut self, rsp: Response<Body>) -> Response<Body> {
        let terms = self.terms;
        let is_limited = terms.deadline.is_some() || terms.response.is_some() || terms.idle.is_some();
        if !is_limited || rsp.body().is_end_stream() {
            return rsp;
        }
        self.pace.lock().moved_at = Instant::now();
        self.terms.answer = None;
        rsp.map(|body| {
            let role = Role::Response {
                body,
                limits: self,
                unsent: 0,
            };
            Body::limited(Box::new(Limited(role)))
        })
    }

    fn poll_over(&mut self, cx: &mut Context<'_>, phase: Phase) -> Poll<Late> {
        loop {
            let Some((at, late)) = self.next(cx, phase) else {
                return Poll::Pending;
            };
            self.timer.set(at);
            ready!(self.timer.poll(cx));
            // Data that passed since has put it off.
            if self.next(cx, phase).is_none_or(|(at, _)| at > Instant::now()) {
                continue;
            }
            self.give_up();
            return Poll::Ready(late);
        }
    }

    /// Lets nobody send the rest of the request.
    fn give_up(&self) {
        let mut pace = self.pace.lock();
        pace.is_over = true;
        if let Some(sender) = pace.sender.take() {
            sender.wake();
        }
    }

    /// Notes that a piece of the response has passed; it may have come too late.
    fn moved(&self) -> Option<Late> {
        let now = Instant::now();
        let mut pace = self.pace.lock();
        pace.moved_at = now;
        let Terms { deadline, response, .. } = self.terms;
        if let Some((_, limit)) = deadline.filter(|(at, _)| *at <= now) {
            return Some(Late::Request(limit));
        }
        let (sent_at, limit) = (pace.sent_at?, response?);
        (sent_at + limit <= now).then_some(Late::Response(limit))
    }

    /// What is due first.
    fn next(&self, cx: &Context<'_>, phase: Phase) -> Option<(Instant, Late)> {
        let mut pace = self.pace.lock();
        if pace.sent_at.is_none() {
            pace.waiter = Some(cx.waker().clone());
        }
        let Terms {
            deadline,
            answer,
            head,
            response,
            idle,
        } = self.terms;
        let since = |at: Option<Instant>, limit: Option<Duration>, late: fn(Duration) -> Late| {
            let (at, limit) = (at?, limit?);
            Some((at + limit, late(limit)))
        };
        let is = |wanted| phase == wanted;
        [
            deadline.map(|(at, limit)| (at, Late::Request(limit))),
            answer.map(|(at, limit)| (at, Late::Profile(limit))),
            since(pace.sent_at, head.filter(|_| is(Phase::Head)), Late::Head),
            since(pace.sent_at, response, Late::Response),
            since(Some(pace.moved_at), idle.filter(|_| is(Phase::Body)), Late::Idle),
        ]
        .into_iter()
        .flatten()
        .min_by_key(|(at, _)| *at)
    }
}

impl Limited {
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match &mut self.0 {
            Role::Over => Poll::Ready(None),
            Role::Request { body, pace } => {
                if pace.lock().is_over {
                    return Poll::Ready(Some(Err(Error::TakenBack)));
                }
                let polled = Pin::new(&mut *body).poll_frame(cx);
                let is_end = match &polled {
                    Poll::Ready(None) => true,
                    Poll::Ready(Some(Ok(_))) => body.is_end_stream(),
                    Poll::Ready(Some(Err(_))) | Poll::Pending => false,
                };
                let mut pace = pace.lock();
                match polled {
                    Poll::Pending => pace.sender = Some(cx.waker().clone()),
                    Poll::Ready(_) => pace.moved(is_end),
                }
                polled
            }
            Role::Complete(body) => Pin::new(body).poll_frame(cx),
            Role::Response { body, limits, .. } => {
                let late = match Pin::new(&mut *body).poll_frame(cx) {
                    // What is never waited for would never be late.
                    Poll::Ready(Some(Ok(frame))) if !body.is_end_stream() => match limits.moved() {
                        None => return Poll::Ready(Some(Ok(frame))),
                        Some(late) => {
                            limits.give_up();
                            if let Some(rest) = rest(body, Some(frame), cx) {
                                self.0 = Role::Complete(rest);
                                return self.poll_frame(cx);
                            }
                            late
                        }
                    },
                    Poll::Ready(frame) => return Poll::Ready(frame),
                    Poll::Pending => ready!(limits.poll_over(cx, Phase::Body)),
                };
                Poll::Ready(Some(Err(self.end(late))))
            }
        }
    }

    /// Whether the time of a response is over, while so many bytes of it are still to be passed on, and nobody asks for more.
    pub(crate) fn poll_late(&mut self, unsent: usize, cx: &mut Context<'_>) -> Poll<Error> {
        match &mut self.0 {
            // What has come to its end is late no more, however slowly it is taken.
            Role::Response {
                body,
                limits,
                unsent: before,
            } if !body.is_end_stream() => {
                if std::mem::replace(before, unsent) != unsent {
                    limits.pace.lock().moved_at = Instant::now(); // some have left
                }
                let late = ready!(limits.poll_over(cx, Phase::Body));
                if let Some(rest) = rest(body, None, cx) {
                    self.0 = Role::Complete(rest);
                    return Poll::Pending;
                }
                Poll::Ready(self.end(late))
            }
            Role::Response { .. } | Role::Complete(_) | Role::Request { .. } | Role::Over => Poll::Pending,
        }
    }

    fn end(&mut self, late: Late) -> Error {
        let late = Error::Late(late);
        if let Role::Response { body, .. } = std::mem::replace(&mut self.0, Role::Over) {
            body.end_with(Err(&late));
        }
        late
    }

    /// The body that is watched over.
    pub(crate) fn into_inner(self) -> Option<Body> {
        match self.0 {
            Role::Over => None,
            Role::Request { body, .. } | Role::Response { body, .. } | Role::Complete(body) => Some(body),
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        match &self.0 {
            Role::Over => true,
            Role::Request { body, .. } | Role::Response { body, .. } | Role::Complete(body) => body.is_end_stream(),
        }
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Role::Over => SizeHint::with_exact(0),
            Role::Request { body, .. } | Role::Response { body, .. } | Role::Complete(body) => body.size_hint(),
        }
    }
}

/// `first` and all that follows it in a body, if that has come and only waits for its receiver.
fn rest(body: &mut Body, first: Option<Frame<Bytes>>, cx: &mut Context<'_>) -> Option<Body> {
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
            Poll::Ready(Some(Ok(frame))) if n_bytes < MOST_WAITING => Some(frame),
            Poll::Ready(None) => return Some(Body::received(kept, trailers)),
            Poll::Ready(Some(_)) | Poll::Pending => return None,
        };
    }
}

/// More than what has come of a body and waits: senders wait for room before.
const MOST_WAITING: usize = 4 << 20;

impl Pace {
    fn moved(&mut self, is_end: bool) {
        let now = Instant::now();
        self.moved_at = now;
        if is_end && self.sent_at.is_none() {
            self.sent_at = Some(now);
            if let Some(waiter) = self.waiter.take() {
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
    async fn wait(limits: &mut Limits) -> Late {
        let mut limits = Some(limits);
        match poll_fn(|cx| Limits::poll_head(&mut limits, Poll::<Result<(), Error>>::Pending, cx)).await {
            Err(Error::Late(late)) => late,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_due_first_ends_the_wait() {
        let start = Instant::now();
        let terms = Terms {
            deadline: Some((start + 3 * S, 3 * S)),
            answer: None,
            head: Some(S),
            response: Some(2 * S),
            idle: Some(S / 2),
        };
        let ended = async |terms| {
            let start = Instant::now();
            let late = wait(&mut Limits::of(terms, &mut Request::new(Body::empty()), Instant::now())).await;
            (late, start.elapsed())
        };
        assert_eq!(ended(terms).await, (Late::Head(S), S));
        let deadline = Some((Instant::now() + 3 * S, 3 * S));
        let patient = Terms {
            head: None,
            deadline,
            ..terms
        };
        assert_eq!(ended(patient).await, (Late::Response(2 * S), 2 * S));
        let deadline = Some((Instant::now() + S, 3 * S));
        let late = Terms { deadline, ..patient };
        assert_eq!(ended(late).await, (Late::Request(3 * S), S));
    }

    #[tokio::test(start_paused = true)]
    async fn the_response_has_its_time_from_the_end_of_the_request() {
        let start = Instant::now();
        let mut req = Request::new(Body::full("hello"));
        let terms = Terms {
            response: Some(2 * S),
            ..Terms::default()
        };
        let mut limits = Limits::of(terms, &mut req, Instant::now());
        let (late, ()) = tokio::join!(wait(&mut limits), async {
            advance(5 * S).await;
            req.into_body().collect().await.unwrap();
        });
        assert_eq!((late, start.elapsed()), (Late::Response(2 * S), 7 * S));
    }

    fn response(terms: Terms, body: Body) -> Body {
        let limits = Limits::of(terms, &mut Request::new(Body::empty()), Instant::now());
        limits.response(Response::new(body)).into_body()
    }

    async fn late(body: &mut Body, unsent: usize) -> Option<Late> {
        match poll_fn(|cx| Poll::Ready(body.poll_late(unsent, cx))).await {
            Poll::Ready(Error::Late(late)) => Some(late),
            Poll::Ready(other) => panic!("{other:?}"),
            Poll::Pending => None,
        }
    }

    /// A body whose end has not come.
    fn endless() -> Body {
        let pace = Pace {
            sent_at: None,
            moved_at: Instant::now(),
            is_over: true, // which it fails by
            waiter: None,
            sender: None,
        };
        Body::limited(Box::new(Limited(Role::Request {
            body: Body::full("hello"),
            pace: Arc::new(Mutex::new(pace)),
        })))
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_that_leave_put_off_the_idle_timeout() {
        let terms = Terms {
            idle: Some(S),
            ..Terms::default()
        };
        let mut body = response(terms, endless());
        for unsent in [3, 2, 1] {
            advance(S * 3 / 4).await;
            assert_eq!(late(&mut body, unsent).await, None);
        }
        advance(S).await;
        assert_eq!(late(&mut body, 1).await, Some(Late::Idle(S)));
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_come_to_its_end_is_late_no_more() {
        let terms = Terms {
            response: Some(S),
            ..Terms::default()
        };
        let whole = || Body::received(["one", "two"].map(Bytes::from).into(), None);
        let mut asked = response(terms, whole());
        let taken = response(terms, whole());
        advance(2 * S).await;
        assert_eq!(late(&mut asked, 1).await, None);
        for body in [asked, taken] {
            assert_eq!(body.collect().await.unwrap().to_bytes(), "onetwo");
        }
        let mut cut = response(terms, endless());
        advance(2 * S).await;
        assert_eq!(late(&mut cut, 1).await, Some(Late::Response(S)));
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_gets_the_rest_of_a_request_whose_time_is_over() {
        let mut req = Request::new(Body::full("hello"));
        let deadline = Some((Instant::now() + S, S));
        let terms = Terms {
            deadline,
            ..Terms::default()
        };
        assert_eq!(
            wait(&mut Limits::of(terms, &mut req, Instant::now())).await,
            Late::Request(S)
        );
        let error = req.into_body().collect().await.unwrap_err();
        assert!(error.is_of_request_body(), "{error}");
    }
}
