//! Timeouts and retries of requests, by the rule of a route or by a ServiceProfile.

use std::{borrow::Cow, collections::VecDeque, ops::RangeInclusive, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderName, Response, StatusCode};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, sleep};
use tulle_core::{
    backoff::{Backoff, BackoffDelays},
    duration,
    names::header as names,
    retry,
};

use crate::{
    http::{
        body::Body,
        error::{Error, Side, TimeoutKind},
        headers,
        lifecycle::classify,
        lifecycle::deadlines::{AttemptDeadlines, RequestTimeouts},
        lifecycle::replay::{self, ReplayableRequest},
    },
    outbound::{
        destination::retry_policy::RetryPolicy,
        metrics::attempts::AttemptMetrics,
        request::{
            attempt::{AttemptParams, AttemptSender},
            connect::TriedEndpoints,
            context::OutgoingRequest,
        },
    },
    policy::{
        client::{RequestOverrides, Retry, RetryAfterBackoff, RetryConditions, Timeouts},
        profile::{Class, ProfileRoute, RetryBudgetState},
    },
};

/// When and how often one request is retried.
pub(super) struct RetryParams<'a> {
    pub(super) retry_on: RetryOn<'a>,
    pub(super) max_retries: u16,
    pub(super) max_body_bytes: usize,
    /// Maximum time from the end of the request to the head of the response, for each attempt except the last one.
    pub(super) attempt_timeout: Option<Duration>,
    pub(super) backoff: Option<RetryAfterBackoff>,
    pub(super) budget: &'a RetryBudgetState,
}

/// Which results are retried.
pub(super) enum RetryOn<'a> {
    /// HTTP and gRPC statuses.
    Statuses(Cow<'a, RetryConditions>),
    /// Failures, as the route of a ServiceProfile classifies them.
    RouteFailures(&'a ProfileRoute),
}

impl RetryPolicy {
    /// Sends a request with the timeouts and retries of the rule, and of its headers if they may override the rule.
    ///
    /// # Errors
    /// The last attempt failed, or a timeout expired.
    pub(super) async fn send(
        &self,
        attempt: &AttemptSender<'_>,
        outgoing: &mut OutgoingRequest<'_>,
        metrics: &impl AttemptMetrics,
    ) -> Result<Response<Body>, Error> {
        let start = Instant::now();
        let (mut timeouts, mut retry) = (self.timeouts, self.retry.as_ref().map(Cow::Borrowed));
        if self.header_overrides == RequestOverrides::Allow {
            timeouts = timeouts_with_overrides(timeouts, outgoing.req.headers_mut());
            retry = retry_with_overrides(retry, outgoing.req.headers_mut());
        }
        let terms = RequestTimeouts {
            deadline: timeouts.request.map(|limit| (start + limit, limit)),
            response_deadline: None,
            response_headers_timeout: None,
            response_timeout: timeouts.response,
            idle_timeout: timeouts.idle,
        };
        if outgoing.upgrade.is_some() {
            return send_upgrade(attempt, start, outgoing, terms, metrics).await;
        }
        let retries = retry.filter(|retry| retry.max_retries > 0).map(|retry| {
            self.budget.deposit(start);
            RetryParams {
                max_retries: retry.max_retries,
                max_body_bytes: retry.max_request_bytes,
                attempt_timeout: retry.timeout,
                backoff: retry.backoff,
                retry_on: RetryOn::Statuses(match retry {
                    Cow::Borrowed(retry) => Cow::Borrowed(&retry.conditions),
                    Cow::Owned(retry) => Cow::Owned(retry.conditions),
                }),
                budget: &self.budget,
            }
        });
        let plan = SendPlan {
            started: start,
            timeouts: terms,
            retries: retries.as_ref(),
        };
        send_with_retries(attempt, outgoing, plan, metrics).await
    }
}

/// Sends an upgrade request once; its timeouts start at `started`. The upgraded stream has no timeout.
///
/// # Errors
/// The attempt failed, or a timeout expired.
pub(super) async fn send_upgrade(
    attempt: &AttemptSender<'_>,
    started: Instant,
    outgoing: &mut OutgoingRequest<'_>,
    terms: RequestTimeouts,
    metrics: &impl AttemptMetrics,
) -> Result<Response<Body>, Error> {
    let mut limits = AttemptDeadlines::start(terms, outgoing.req, started);
    metrics.attempt_started();
    let mut tried = TriedEndpoints::new();
    let params = AttemptParams {
        started,
        limits: Some(&mut limits),
        copy: None,
    };
    let sent = attempt.send(outgoing, &mut tried, params).await;
    metrics.attempt_ended(&sent, grpc_status_in_head(&sent));
    sent
}

/// How a request is sent: start of the first attempt, timeouts, and retries.
pub(super) struct SendPlan<'a> {
    pub(super) started: Instant,
    pub(super) timeouts: RequestTimeouts,
    pub(super) retries: Option<&'a RetryParams<'a>>,
}

/// Sends a request and its retries.
///
/// # Errors
/// The last attempt failed, or a timeout expired.
pub(super) async fn send_with_retries(
    attempt: &AttemptSender<'_>,
    outgoing: &mut OutgoingRequest<'_>,
    plan: SendPlan<'_>,
    metrics: &impl AttemptMetrics,
) -> Result<Response<Body>, Error> {
    let SendPlan {
        mut started,
        timeouts: terms,
        retries,
    } = plan;
    let is_grpc = headers::is_grpc(outgoing.req.version(), outgoing.req.headers());
    let mut tried = TriedEndpoints::new();
    let mut delays = retries.and_then(RetryParams::backoff_delays);
    let mut n_retries = 0;
    loop {
        let retries_left = retries.filter(|retries| n_retries < retries.max_retries);
        let copy = retries_left.map(|retries| ReplayableRequest::of_request(outgoing.req, retries.max_body_bytes));
        let head = retries_left.and_then(|retries| retries.attempt_timeout);
        let terms = RequestTimeouts {
            response_headers_timeout: head,
            ..terms
        };
        let sees_grpc = retries.is_some_and(RetryParams::needs_grpc_status);
        let mut limits = (sees_grpc || terms != RequestTimeouts::default())
            .then(|| AttemptDeadlines::start(terms, outgoing.req, started));
        metrics.attempt_started();
        let params = AttemptParams {
            started,
            limits: limits.as_mut(),
            copy: copy.as_ref(),
        };
        let sent = attempt.send(outgoing, &mut tried, params).await;
        let (result, grpc) = with_grpc_status(sent, limits.as_mut().filter(|_| sees_grpc)).await;
        metrics.attempt_ended(&result, grpc);
        let is_final = !retries.is_some_and(|retries| retries.retry_on.matches(&result, is_grpc, grpc));
        if is_final && n_retries > 0 && result.is_ok() {
            metrics.retry_succeeded();
        }
        if is_final || retries_left.is_none() {
            if !is_final && retries.is_some_and(|retries| n_retries >= retries.max_retries) {
                metrics.retry_limit_exceeded();
            }
            return result.map(|rsp| with_limits(limits, rsp));
        }
        let Some((delay, again)) = retries_left.zip(copy).and_then(|(retries, copy)| {
            let delay = retries.next_delay(delays.as_mut(), &result);
            let in_time = terms.deadline.is_none_or(|(at, _)| Instant::now() + delay < at);
            if !in_time || !copy.can_replay() {
                return None;
            }
            if !attempt.is_available() {
                metrics.endpoints_exhausted(); // the client gets this result instead of an error
                return None;
            }
            if !retries.budget.withdraw(Instant::now()) {
                metrics.budget_exhausted();
                return None;
            }
            Some((delay, copy.to_request()?))
        }) else {
            return result.map(|rsp| with_limits(limits, rsp));
        };
        if let Ok(rsp) = result {
            discard_body(rsp.into_body());
        }
        drop(limits);
        if !delay.is_zero() {
            sleep(delay).await;
        }
        (*outgoing.req, started) = (again, Instant::now());
        n_retries += 1;
        metrics.retry_started();
    }
}

/// Adds the gRPC status of a response. If `limits` are given, awaits trailers that may have it.
async fn with_grpc_status(
    sent: Result<Response<Body>, Error>,
    limits: Option<&mut AttemptDeadlines>,
) -> (Result<Response<Body>, Error>, Option<i32>) {
    match (sent, limits) {
        // Only after the whole request is sent: a client may wait for the response head before it sends more of the body.
        (Ok(mut rsp), Some(limits)) if awaits_grpc_trailers(&rsp) && limits.is_sent() => {
            match limits.with_deadline(peek_grpc_status(&mut rsp)).await {
                Ok(grpc) => (Ok(rsp), grpc),
                Err(error) => {
                    // Reports an expired timeout to the observers of the response.
                    rsp.into_body().finish(Err(&error));
                    (Err(error), None)
                }
            }
        }
        (result, _) => {
            let grpc = grpc_status_in_head(&result);
            (result, grpc)
        }
    }
}

impl RetryParams<'_> {
    /// Whether the decision needs the gRPC status, which may be in trailers.
    fn needs_grpc_status(&self) -> bool {
        match &self.retry_on {
            RetryOn::Statuses(conditions) => !conditions.grpc.is_empty(),
            RetryOn::RouteFailures(_) => true,
        }
    }

    fn backoff_delays(&self) -> Option<BackoffDelays> {
        self.backoff.map(|backoff| backoff.steps.start())
    }

    /// Delay before the next attempt: the backoff, and at least `Retry-After` if the policy honors it. `Retry-After` is limited
    /// to the backoff's maximum.
    fn next_delay(&self, delays: Option<&mut BackoffDelays>, result: &Result<Response<Body>, Error>) -> Duration {
        let delay = delays.map_or(Duration::ZERO, BackoffDelays::next_delay);
        match (result, self.backoff) {
            (Ok(rsp), Some(backoff)) if backoff.honors_retry_after => {
                let requested = headers::retry_after(rsp.headers()).unwrap_or_default();
                requested.min(backoff.steps.max).max(delay)
            }
            _ => delay,
        }
    }
}

impl RetryOn<'_> {
    /// Whether this result is retried. `is_grpc` is about the request; `grpc` is the status of the response, if known.
    fn matches(&self, result: &Result<Response<Body>, Error>, is_grpc: bool, grpc: Option<i32>) -> bool {
        match (self, result) {
            (Self::Statuses(conditions), Ok(rsp)) => {
                contains_status(&conditions.http, rsp.status().as_u16())
                    || grpc.is_some_and(|code| conditions.grpc.contains(&code))
            }
            (Self::Statuses(_), Err(Error::FailFast(..) | Error::Timeout(TimeoutKind::ResponseHeaders(_)))) => true,
            // A retry does not help: no time is left, the endpoint has another identity, or the length of a body is
            // wrong.
            (_, Err(Error::Timeout(_) | Error::IdentityMismatch { .. } | Error::ContentLengthMismatch)) => false,
            (Self::Statuses(conditions), Err(error)) if error.side() == Side::Peer => {
                let answer = error.status();
                contains_status(&conditions.http, answer.status.as_u16())
                    || (is_grpc && conditions.grpc.contains(&answer.grpc_code))
            }
            (Self::RouteFailures(route), Ok(rsp)) => is_route_failure(route, rsp.status(), grpc),
            (Self::RouteFailures(route), Err(error)) if error.side() == Side::Peer => {
                let answer = error.status();
                is_route_failure(route, answer.status, is_grpc.then_some(answer.grpc_code))
            }
            // Errors of the client, the policy or this proxy would repeat.
            (Self::Statuses(_) | Self::RouteFailures(_), Err(_)) => false,
        }
    }
}

/// Whether the profile's route classifies a response as a failure.
fn is_route_failure(route: &ProfileRoute, status: StatusCode, grpc: Option<i32>) -> bool {
    match route.classify(status) {
        Some(class) => class == Class::Failure,
        None => !classify::is_success(status, grpc),
    }
}

/// Applies the limits of an attempt to its response.
fn with_limits(limits: Option<AttemptDeadlines>, rsp: Response<Body>) -> Response<Body> {
    match limits {
        None => rsp,
        Some(limits) => limits.limit_response(rsp),
    }
}

/// Discards the response of a failed attempt. Data that has already arrived is read, so that the connection can be reused.
fn discard_body(mut body: Body) {
    let mut n_bytes = 0;
    while n_bytes < replay::DEFAULT_MAX_REPLAY_BYTES {
        match body.frame().now_or_never() {
            Some(Some(Ok(frame))) => n_bytes += frame.data_ref().map_or(0, Bytes::len),
            Some(None | Some(Err(_))) => return,
            None => break,
        }
    }
    body.finish(Ok(()));
}

fn contains_status(ranges: &[RangeInclusive<u16>], status: u16) -> bool {
    ranges.iter().any(|range| range.contains(&status))
}

fn grpc_status_in_head(result: &Result<Response<Body>, Error>) -> Option<i32> {
    classify::grpc_status(result.as_ref().ok()?.headers())
}

/// Whether this is a gRPC response without a status in its head.
fn awaits_grpc_trailers(rsp: &Response<Body>) -> bool {
    headers::is_grpc(rsp.version(), rsp.headers()) && classify::grpc_status(rsp.headers()).is_none()
}

/// Returns the gRPC status from the trailers if at most one data frame precedes them, otherwise `None`.
///
/// Only the first frame is awaited. Frames that were read are put back in front of the body. The body stays in `rsp` during the
/// wait, so the caller can still use it if this call is cancelled.
async fn peek_grpc_status(rsp: &mut Response<Body>) -> Result<Option<i32>, Error> {
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
    *body = Body::buffered(kept, trailers);
    Ok(grpc)
}

/// The timeouts of a request that may override the rule. The override headers are removed.
fn timeouts_with_overrides(timeouts: Timeouts, headers: &mut HeaderMap) -> Timeouts {
    let mut requested =
        |name| take_parsed(headers, &name, |text| duration::parse(text).ok()).filter(|limit| !limit.is_zero());
    let short = requested(names::L5D_TIMEOUT);
    Timeouts {
        request: requested(names::L5D_REQUEST_TIMEOUT).or(short).or(timeouts.request),
        response: requested(names::L5D_RESPONSE_TIMEOUT).or(timeouts.response),
        idle: timeouts.idle,
    }
}

/// The retries of a request that may override the rule. The override headers are removed.
fn retry_with_overrides<'a>(retry: Option<Cow<'a, Retry>>, headers: &mut HeaderMap) -> Option<Cow<'a, Retry>> {
    let http = take_parsed(headers, &names::L5D_RETRY_HTTP, |text| retry::parse_statuses(text).ok());
    let grpc = take_parsed(headers, &names::L5D_RETRY_GRPC, |text| {
        retry::parse_grpc_codes(text).ok()
    });
    let limit = take_parsed(headers, &names::L5D_RETRY_LIMIT, |text| text.parse().ok());
    let timeout = take_parsed(headers, &names::L5D_RETRY_TIMEOUT, |text| duration::parse(text).ok());
    let timeout = timeout.filter(|limit| !limit.is_zero());
    if http.is_none() && grpc.is_none() && limit.is_none() && timeout.is_none() {
        return retry;
    }
    let mut retry = retry.map_or_else(
        || Retry {
            max_retries: 1,
            max_request_bytes: replay::DEFAULT_MAX_REPLAY_BYTES,
            conditions: RetryConditions::default(),
            timeout: None,
            backoff: Some(OVERRIDE_RETRY_BACKOFF),
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

/// Removes a header and parses it; `None` if it is absent or invalid.
fn take_parsed<T>(headers: &mut HeaderMap, name: &HeaderName, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
    let value = headers.remove(name)?;
    let parsed = value.to_str().ok().and_then(|text| parse(text.trim()));
    if parsed.is_none() {
        tracing::debug!(%name, ?value, "invalid header ignored");
    }
    parsed
}

/// Backoff of retries that a request header enables on a route without retries.
const OVERRIDE_RETRY_BACKOFF: RetryAfterBackoff = RetryAfterBackoff {
    steps: Backoff {
        min: Duration::from_millis(25),
        max: Duration::from_millis(250),
        jitter: 1.0,
    },
    honors_retry_after: false,
};
