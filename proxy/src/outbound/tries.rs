//! What a rule allows a request beside a backend: time, and further tries after failures.

use std::{borrow::Cow, collections::VecDeque, ops::RangeInclusive, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderName, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep},
};
use tulle_core::{
    backoff::{Backoff, Steps},
    duration,
    names::header as names,
    retry,
};

use crate::{
    http::{
        body::Body,
        classify,
        error::{Error, Late, Side},
        headers,
        limits::{Limits, Terms},
        replay::{self, Copy},
        tunnel::Leg,
    },
    outbound::{http::Attempt, reach::Tried},
    policy::{
        client::{HintedBackoff, HttpTarget, RequestOverrides, Retry, RetryConditions, Timeouts},
        profile::{Budget, Class, ProfileRoute, RetryBudget},
    },
};

/// What a rule allows each of its requests.
pub(crate) struct Allowed {
    timeouts: Timeouts,
    retry: Option<Retry>,
    overrides: RequestOverrides,
    budget: Arc<Budget>,
}

/// When and how often one request is tried again.
pub(super) struct Retries<'a> {
    pub(super) after: After<'a>,
    pub(super) most: u16,
    pub(super) max_body: usize,
    /// To the head of the response, for each try but the last.
    pub(super) timeout: Option<Duration>,
    pub(super) backoff: Option<HintedBackoff>,
    pub(super) budget: &'a Budget,
}

/// What calls for another try.
pub(super) enum After<'a> {
    /// A status, of HTTP or of gRPC.
    Statuses(Cow<'a, RetryConditions>),
    /// What a ServiceProfile's route calls a failure.
    Failures(&'a ProfileRoute),
}

/// Hears of the tries of one request.
pub(super) trait Tally {
    fn begun(&self) {}
    /// What became of a try; `grpc` is the status of a gRPC response as far as it is known.
    fn ended(&self, _result: &Result<Response<Body>, Error>, _grpc: Option<i32>) {}
    /// A further try is made.
    fn retried(&self) {}
    /// A further try brought what was wanted.
    fn recovered(&self) {}
    /// There were as many tries as there may be.
    fn exhausted(&self) {}
    /// The budget is used up.
    fn no_budget(&self) {}
    /// No endpoint could take another try.
    fn no_endpoint(&self) {}
}

impl Allowed {
    /// `None` where requests have no limits and one try. Its budget is the one that there was `before`, if any.
    pub(super) fn of(target: &HttpTarget, before: impl FnOnce() -> Option<Arc<Budget>>) -> Option<Self> {
        let is_plain = target.timeouts == Timeouts::default()
            && target.retry.is_none()
            && target.request_headers == RequestOverrides::Ignore;
        (!is_plain).then(|| Self {
            timeouts: target.timeouts,
            retry: target.retry.clone(),
            overrides: target.request_headers,
            budget: before().unwrap_or_else(|| Arc::new(Budget::new(BUDGET, Instant::now()))),
        })
    }

    /// What its retries are paid from.
    pub(super) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Sends a request within what is allowed to it.
    ///
    /// # Errors
    /// The last try brought no response, or the request's time is over.
    pub(super) async fn send(
        &self,
        attempt: &Attempt<'_>,
        req: &mut Request<Body>,
        upgrade: &mut Option<oneshot::Receiver<Leg>>,
        tally: &impl Tally,
    ) -> Result<Response<Body>, Error> {
        let start = Instant::now();
        let (mut timeouts, mut retry) = (self.timeouts, self.retry.as_ref().map(Cow::Borrowed));
        if self.overrides == RequestOverrides::Allow {
            timeouts = asked_timeouts(timeouts, req.headers_mut());
            retry = asked_retry(retry, req.headers_mut());
        }
        let terms = Terms {
            deadline: timeouts.request.map(|limit| (start + limit, limit)),
            answer: None,
            head: None,
            response: timeouts.response,
            idle: timeouts.idle,
        };
        if upgrade.is_some() {
            return once(attempt, start, req, upgrade, terms, tally).await;
        }
        let retries = retry.filter(|retry| retry.max_retries > 0).map(|retry| {
            self.budget.deposit(start);
            Retries {
                most: retry.max_retries,
                max_body: retry.max_request_bytes,
                timeout: retry.timeout,
                backoff: retry.backoff,
                after: After::Statuses(match retry {
                    Cow::Borrowed(retry) => Cow::Borrowed(&retry.conditions),
                    Cow::Owned(retry) => Cow::Owned(retry.conditions),
                }),
                budget: &self.budget,
            }
        });
        run(attempt, start, req, terms, retries.as_ref(), tally).await
    }
}

/// Sends a request for an upgrade, from `started` on. What follows its answer is not a response, and has all the time it wants.
///
/// # Errors
/// It brought no answer, or not in time.
pub(super) async fn once(
    attempt: &Attempt<'_>,
    started: Instant,
    req: &mut Request<Body>,
    upgrade: &mut Option<oneshot::Receiver<Leg>>,
    terms: Terms,
    tally: &impl Tally,
) -> Result<Response<Body>, Error> {
    let mut limits = Limits::of(terms, req, started);
    tally.begun();
    let mut tried = Tried::new();
    let sent = attempt
        .send(started, req, upgrade, &mut tried, Some(&mut limits), None)
        .await;
    tally.ended(&sent, grpc_in_head(&sent));
    sent
}

/// Sends a request, once or more often, from `started` on.
///
/// # Errors
/// The last try brought no response.
pub(super) async fn run(
    attempt: &Attempt<'_>,
    mut started: Instant,
    req: &mut Request<Body>,
    terms: Terms,
    retries: Option<&Retries<'_>>,
    tally: &impl Tally,
) -> Result<Response<Body>, Error> {
    let is_grpc = headers::is_grpc(req.version(), req.headers());
    let mut tried = Tried::new();
    let mut delays = retries.and_then(Retries::delays);
    let mut n_retries = 0;
    loop {
        let more = retries.filter(|retries| n_retries < retries.most);
        let copy = more.map(|retries| Copy::of(req, retries.max_body));
        let head = more.and_then(|retries| retries.timeout);
        let terms = Terms { head, ..terms };
        let sees_grpc = retries.is_some_and(Retries::sees_grpc);
        let mut limits = (sees_grpc || terms != Terms::default()).then(|| Limits::of(terms, req, started));
        tally.begun();
        let sent = attempt
            .send(started, req, &mut None, &mut tried, limits.as_mut(), copy.as_ref())
            .await;
        let (result, grpc) = match (sent, &mut limits) {
            // A client that has more to say may wait for the head before it does.
            (Ok(mut rsp), Some(limits)) if sees_grpc && is_open(&rsp) && limits.is_sent() => {
                match limits.body(peek(&mut rsp)).await {
                    Ok(grpc) => (Ok(rsp), grpc),
                    Err(error) => {
                        // Who sent it hears of it, where its time was over.
                        rsp.into_body().end_with(Err(&error));
                        (Err(error), None)
                    }
                }
            }
            (result, _) => {
                let grpc = grpc_in_head(&result);
                (result, grpc)
            }
        };
        tally.ended(&result, grpc);
        let is_wanted = !retries.is_some_and(|retries| retries.after.calls(&result, is_grpc, grpc));
        if is_wanted && n_retries > 0 && result.is_ok() {
            tally.recovered();
        }
        if is_wanted || more.is_none() {
            if !is_wanted && retries.is_some_and(|retries| n_retries >= retries.most) {
                tally.exhausted();
            }
            return result.map(|rsp| watched(limits, rsp));
        }
        let Some((delay, again)) = more.zip(copy).and_then(|(retries, copy)| {
            let delay = retries.delay(delays.as_mut(), &result);
            let in_time = terms.deadline.is_none_or(|(at, _)| Instant::now() + delay < at);
            if !in_time || !copy.is_whole() {
                return None;
            }
            if !attempt.is_available() {
                tally.no_endpoint(); // what there is serves the client better than nothing
                return None;
            }
            if !retries.budget.withdraw(Instant::now()) {
                tally.no_budget();
                return None;
            }
            Some((delay, copy.request()?))
        }) else {
            return result.map(|rsp| watched(limits, rsp));
        };
        if let Ok(rsp) = result {
            discard(rsp.into_body());
        }
        drop(limits);
        if !delay.is_zero() {
            sleep(delay).await;
        }
        (*req, started) = (again, Instant::now());
        n_retries += 1;
        tally.retried();
    }
}

impl Retries<'_> {
    /// Whether gRPC statuses count, which may come in trailers.
    fn sees_grpc(&self) -> bool {
        match &self.after {
            After::Statuses(conditions) => !conditions.grpc.is_empty(),
            After::Failures(_) => true,
        }
    }

    fn delays(&self) -> Option<Steps> {
        self.backoff.map(|backoff| backoff.steps.steps())
    }

    /// How long to wait before the next try; at least as long as a server asks for that may ask.
    fn delay(&self, delays: Option<&mut Steps>, result: &Result<Response<Body>, Error>) -> Duration {
        let delay = delays.map_or(Duration::ZERO, Steps::next_delay);
        match (result, self.backoff) {
            (Ok(rsp), Some(backoff)) if backoff.heeds_hints => {
                let asked = headers::retry_after(rsp.headers()).unwrap_or_default();
                asked.min(backoff.steps.max).max(delay)
            }
            _ => delay,
        }
    }
}

impl After<'_> {
    /// Whether this result of a request, of gRPC or not, calls for another try.
    fn calls(&self, result: &Result<Response<Body>, Error>, is_grpc: bool, grpc: Option<i32>) -> bool {
        match (self, result) {
            (Self::Statuses(conditions), Ok(rsp)) => {
                is_in(&conditions.http, rsp.status().as_u16())
                    || grpc.is_some_and(|code| conditions.grpc.contains(&code))
            }
            (Self::Statuses(_), Err(Error::FailFast(..) | Error::Late(Late::Head(_)))) => true,
            // It was sent to whom it was meant for, and has had its time.
            (_, Err(Error::Late(_) | Error::RequireId { .. } | Error::Miscounted)) => false,
            (Self::Statuses(conditions), Err(error)) if error.side() == Side::Peer => {
                let answer = error.answer();
                is_in(&conditions.http, answer.status.as_u16()) || (is_grpc && conditions.grpc.contains(&answer.grpc))
            }
            (Self::Failures(route), Ok(rsp)) => fails(route, rsp.status(), grpc),
            (Self::Failures(route), Err(error)) if error.side() == Side::Peer => {
                let answer = error.answer();
                fails(route, answer.status, is_grpc.then_some(answer.grpc))
            }
            // What is of this side will be the same again.
            (Self::Statuses(_) | Self::Failures(_), Err(_)) => false,
        }
    }
}

/// Whether a response is a failure by a route of a profile.
fn fails(route: &ProfileRoute, status: StatusCode, grpc: Option<i32>) -> bool {
    match route.classify(status) {
        Some(class) => class == Class::Failure,
        None => !classify::is_success(status, grpc),
    }
}

/// A response that has only so much time, if any.
fn watched(limits: Option<Limits>, rsp: Response<Body>) -> Response<Body> {
    match limits {
        None => rsp,
        Some(limits) => limits.response(rsp),
    }
}

/// Lets go of a response that nobody wants. What has come of it is read, so that the connection can be used again.
fn discard(mut body: Body) {
    let mut n_bytes = 0;
    while n_bytes < replay::LIMIT {
        match body.frame().now_or_never() {
            Some(Some(Ok(frame))) => n_bytes += frame.data_ref().map_or(0, Bytes::len),
            Some(None | Some(Err(_))) => return,
            None => break,
        }
    }
    body.end_with(Ok(()));
}

fn is_in(ranges: &[RangeInclusive<u16>], status: u16) -> bool {
    ranges.iter().any(|range| range.contains(&status))
}

fn grpc_in_head(result: &Result<Response<Body>, Error>) -> Option<i32> {
    classify::grpc_status(result.as_ref().ok()?.headers())
}

/// Whether a response is one of gRPC whose status is not in its head.
fn is_open(rsp: &Response<Body>) -> bool {
    headers::is_grpc(rsp.version(), rsp.headers()) && classify::grpc_status(rsp.headers()).is_none()
}

/// The status of a gRPC response, where that is in trailers that follow one piece of data at most. Nobody waits for more than
/// that piece. As long as this waits, the rest of the body stays where it is.
async fn peek(rsp: &mut Response<Body>) -> Result<Option<i32>, Error> {
    let body = rsp.body_mut();
    let (mut kept, mut trailers) = (VecDeque::<Bytes>::new(), None);
    let mut next = body.frame().await.transpose()?;
    if let Some(frame) = next {
        match frame.into_data() {
            Ok(data) => {
                kept.push_back(data);
                next = match body.frame().now_or_never() {
                    Some(frame) => frame.transpose()?,
                    None => {
                        *body = Body::replayed(kept, std::mem::take(body));
                        return Ok(None);
                    }
                };
            }
            Err(frame) => next = Some(frame),
        }
    }
    if let Some(frame) = next {
        match frame.into_data() {
            Ok(data) => {
                kept.push_back(data);
                *body = Body::replayed(kept, std::mem::take(body));
                return Ok(None);
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    let grpc = trailers.as_ref().and_then(classify::grpc_status);
    *body = Body::received(kept, trailers);
    Ok(grpc)
}

/// The timeouts of a request that may bring its own; what it brings is taken out.
fn asked_timeouts(timeouts: Timeouts, headers: &mut HeaderMap) -> Timeouts {
    let mut asked = |name| parsed(headers, &name, |text| duration::parse(text).ok()).filter(|limit| !limit.is_zero());
    let short = asked(names::L5D_TIMEOUT);
    Timeouts {
        request: asked(names::L5D_REQUEST_TIMEOUT).or(short).or(timeouts.request),
        response: asked(names::L5D_RESPONSE_TIMEOUT).or(timeouts.response),
        idle: timeouts.idle,
    }
}

/// The retries of a request that may ask for its own; what it brings is taken out.
fn asked_retry<'a>(retry: Option<Cow<'a, Retry>>, headers: &mut HeaderMap) -> Option<Cow<'a, Retry>> {
    let http = parsed(headers, &names::L5D_RETRY_HTTP, |text| retry::statuses(text).ok());
    let grpc = parsed(headers, &names::L5D_RETRY_GRPC, |text| retry::codes(text).ok());
    let limit = parsed(headers, &names::L5D_RETRY_LIMIT, |text| text.parse().ok());
    let timeout = parsed(headers, &names::L5D_RETRY_TIMEOUT, |text| duration::parse(text).ok());
    let timeout = timeout.filter(|limit| !limit.is_zero());
    if http.is_none() && grpc.is_none() && limit.is_none() && timeout.is_none() {
        return retry;
    }
    let mut retry = retry.map_or_else(
        || Retry {
            max_retries: 1,
            max_request_bytes: replay::LIMIT,
            conditions: RetryConditions::default(),
            timeout: None,
            backoff: Some(ASKED_BACKOFF),
        },
        Cow::into_owned,
    );
    if let Some(http) = http {
        retry.conditions.http = http;
    }
    if let Some(grpc) = grpc {
        retry.conditions.grpc = grpc;
    }
    retry.max_retries = limit.unwrap_or(retry.max_retries);
    retry.timeout = timeout.or(retry.timeout);
    Some(Cow::Owned(retry))
}

/// Takes a header out, whether or not it can be understood.
fn parsed<T>(headers: &mut HeaderMap, name: &HeaderName, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
    let value = headers.remove(name)?;
    let parsed = value.to_str().ok().and_then(|text| parse(text.trim()));
    if parsed.is_none() {
        tracing::debug!(%name, ?value, "header is not understood");
    }
    parsed
}

/// Of requests that ask for retries on a route that has none.
const ASKED_BACKOFF: HintedBackoff = HintedBackoff {
    steps: Backoff {
        min: Duration::from_millis(25),
        max: Duration::from_millis(250),
        jitter: 1.0,
    },
    heeds_hints: false,
};

/// Retries of a rule may double what its servers get, and no more: they are to outlast a failure, and not to make it worse.
const BUDGET: RetryBudget = RetryBudget {
    ratio: 1.0,
    min_per_second: 10,
    ttl: Duration::from_secs(10),
};
