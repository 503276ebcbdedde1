//! Timeouts and retries of requests, by the rule of a route or by a ServiceProfile.

use std::{borrow::Cow, collections::VecDeque, ops::RangeInclusive, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderName, Request, Response, StatusCode};
use http_body::Frame;
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
        destination::timeouts_and_retries::TimeoutsAndRetries,
        metrics::attempts::AttemptMetrics,
        request::{
            attempt::{AttemptParams, AttemptSender},
            connect::TriedEndpoints,
            context::OutgoingRequest,
        },
    },
    policy::{
        client::{BackoffPolicy, HeaderOverrides, RetryConditions, RetryPolicy, Timeouts},
        profile::{Class, ProfileRoute, RetryBudgetState},
    },
};

/// When and how often one request is retried, by a route rule or by a ServiceProfile.
pub(super) struct RetryParams<'a> {
    pub(super) retry_on: RetryOn<'a>,
    pub(super) max_retries: u16,
    pub(super) max_body_bytes: usize,
    /// Maximum time from the end of the request to the head of the response, for each attempt except the last one.
    pub(super) attempt_timeout: Option<Duration>,
    pub(super) backoff: Option<BackoffPolicy>,
    pub(super) budget: &'a RetryBudgetState,
}

/// The results that are retried.
pub(super) enum RetryOn<'a> {
    /// HTTP and gRPC statuses.
    Statuses(Cow<'a, RetryConditions>),
    /// Failures, as the route of a ServiceProfile classifies them.
    RouteFailures(&'a ProfileRoute),
}

/// Sends a request with the timeouts and retries of the rule, and of its headers if they may override the rule.
///
/// # Errors
/// The last attempt failed, or a timeout expired.
pub(super) async fn send_by_rule(
    rule: &TimeoutsAndRetries,
    sender: &AttemptSender<'_>,
    outgoing: &mut OutgoingRequest<'_>,
    metrics: &impl AttemptMetrics,
) -> Result<Response<Body>, Error> {
    let started_at = Instant::now();
    let (mut timeouts, mut retry) = (rule.timeouts, rule.retry.as_ref().map(Cow::Borrowed));
    if rule.header_overrides == HeaderOverrides::Allow {
        timeouts = timeouts_with_overrides(timeouts, outgoing.req.headers_mut());
        retry = retry_with_overrides(retry, outgoing.req.headers_mut());
    }
    let timeouts = RequestTimeouts {
        request_deadline: timeouts.request.map(|limit| (started_at + limit, limit)),
        profile_deadline: None,
        response_headers_timeout: None,
        response_timeout: timeouts.response,
        idle_timeout: timeouts.idle,
    };
    if outgoing.reply_channels.upgrade.is_some() {
        return send_upgrade(sender, started_at, outgoing, timeouts, metrics).await;
    }
    let retry_params = retry.filter(|retry| retry.max_retries > 0).map(|retry| {
        rule.budget.deposit(started_at);
        RetryParams {
            max_retries: retry.max_retries,
            max_body_bytes: retry.max_request_bytes,
            attempt_timeout: retry.timeout,
            backoff: retry.backoff,
            retry_on: RetryOn::Statuses(match retry {
                Cow::Borrowed(retry) => Cow::Borrowed(&retry.conditions),
                Cow::Owned(retry) => Cow::Owned(retry.conditions),
            }),
            budget: &rule.budget,
        }
    });
    let params = SendParams {
        started_at,
        timeouts,
        retry_params: retry_params.as_ref(),
    };
    send_with_retries(sender, outgoing, params, metrics).await
}

/// Sends an upgrade request once; its timeouts start at `started_at`. The upgraded stream has no timeout.
///
/// # Errors
/// The attempt failed, or a timeout expired.
pub(super) async fn send_upgrade(
    sender: &AttemptSender<'_>,
    started_at: Instant,
    outgoing: &mut OutgoingRequest<'_>,
    timeouts: RequestTimeouts,
    metrics: &impl AttemptMetrics,
) -> Result<Response<Body>, Error> {
    let mut deadlines = AttemptDeadlines::start(timeouts, outgoing.req, started_at);
    metrics.attempt_started();
    let mut tried = TriedEndpoints::new();
    let attempt_params = AttemptParams {
        started_at,
        deadlines: Some(&mut deadlines),
        kept_for_retry: None,
        may_resend: true,
    };
    let result = sender.send_attempt(outgoing, &mut tried, attempt_params).await;
    metrics.observe_attempt(result, started_at)
}

/// The parameters of sending a request: start of the first attempt, timeouts, and retries.
pub(super) struct SendParams<'a> {
    pub(super) started_at: Instant,
    pub(super) timeouts: RequestTimeouts,
    /// `None` if the request is not retried.
    pub(super) retry_params: Option<&'a RetryParams<'a>>,
}

/// Sends a request and its retries.
///
/// # Errors
/// The last attempt failed, or a timeout expired.
pub(super) async fn send_with_retries(
    sender: &AttemptSender<'_>,
    outgoing: &mut OutgoingRequest<'_>,
    params: SendParams<'_>,
    metrics: &impl AttemptMetrics,
) -> Result<Response<Body>, Error> {
    let SendParams {
        mut started_at,
        timeouts,
        retry_params,
    } = params;
    let is_grpc = headers::is_grpc(outgoing.req.version(), outgoing.req.headers());
    let needs_grpc_status = retry_params.is_some_and(RetryParams::needs_grpc_status);
    let mut tried = TriedEndpoints::new();
    let mut backoff_delays = retry_params.and_then(RetryParams::backoff_delays);
    let mut n_retries = 0;
    loop {
        let params_if_not_last = retry_params.filter(|params| n_retries < params.max_retries);
        let kept_for_retry =
            params_if_not_last.map(|params| ReplayableRequest::of_request(outgoing.req, params.max_body_bytes));
        let attempt_timeouts = RequestTimeouts {
            response_headers_timeout: params_if_not_last.and_then(|params| params.attempt_timeout),
            ..timeouts
        };
        // The gRPC status is read only after the whole request was sent, which only `AttemptDeadlines` detects.
        let mut deadlines = (needs_grpc_status || attempt_timeouts != RequestTimeouts::default())
            .then(|| AttemptDeadlines::start(attempt_timeouts, outgoing.req, started_at));
        metrics.attempt_started();
        let attempt_params = AttemptParams {
            started_at,
            deadlines: deadlines.as_mut(),
            kept_for_retry: kept_for_retry.as_ref(),
            may_resend: true,
        };
        let result = sender.send_attempt(outgoing, &mut tried, attempt_params).await;
        let result = metrics.observe_attempt(result, started_at);
        let (result, grpc_status) = read_grpc_status(result, deadlines.as_mut().filter(|_| needs_grpc_status)).await;
        let is_retryable = retry_params.is_some_and(|params| params.retry_on.matches(&result, is_grpc, grpc_status));
        if !is_retryable {
            if n_retries > 0 && result.is_ok() {
                metrics.retry_succeeded();
            }
            return with_deadlines(result, deadlines);
        }
        let Some((params, kept_for_retry)) = params_if_not_last.zip(kept_for_retry) else {
            metrics.retry_limit_exceeded();
            return with_deadlines(result, deadlines);
        };
        let delay = params.next_delay(backoff_delays.as_mut(), &result);
        let is_in_time = timeouts
            .request_deadline
            .is_none_or(|(at, _)| Instant::now() + delay < at);
        let take_retry = || params.take_retry(kept_for_retry, sender, metrics);
        let Some(next_req) = is_in_time.then(take_retry).flatten() else {
            return with_deadlines(result, deadlines);
        };
        if let Ok(rsp) = result {
            discard_body(rsp.into_body());
        }
        drop(deadlines);
        if !delay.is_zero() {
            sleep(delay).await;
        }
        (*outgoing.req, started_at) = (next_req, Instant::now());
        n_retries += 1;
        metrics.retry_started();
    }
}

/// Returns the result and its gRPC status, if that is known. If the whole request was sent and `wait_deadlines` are given, a
/// status in trailers is awaited until these deadlines.
async fn read_grpc_status(
    result: Result<Response<Body>, Error>,
    wait_deadlines: Option<&mut AttemptDeadlines>,
) -> (Result<Response<Body>, Error>, Option<i32>) {
    match (result, wait_deadlines) {
        // The trailers are awaited only after the whole request was sent: a client may wait for the response head before it sends
        // more of the body.
        (Ok(mut rsp), Some(deadlines)) if awaits_grpc_trailers(&rsp) && deadlines.is_sent() => {
            match deadlines.with_deadline(peek_grpc_status(&mut rsp)).await {
                Ok(grpc_status) => (Ok(rsp), grpc_status),
                Err(error) => {
                    // Reports an expired timeout to the observers of the response.
                    rsp.into_body().discard_with_result(Err(&error));
                    (Err(error), None)
                }
            }
        }
        (result, _) => {
            let grpc_status = grpc_status_in_head(&result);
            (result, grpc_status)
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
        self.backoff.map(|backoff| backoff.delays.start())
    }

    /// Delay before the next attempt: the backoff, and at least `Retry-After` if the policy honors it. `Retry-After` is limited
    /// to the backoff's maximum.
    fn next_delay(&self, delays: Option<&mut BackoffDelays>, result: &Result<Response<Body>, Error>) -> Duration {
        let delay = delays.map_or(Duration::ZERO, BackoffDelays::next_delay);
        match (result, self.backoff) {
            (Ok(rsp), Some(backoff)) if backoff.honors_retry_after => {
                let requested = headers::retry_after(rsp.headers()).unwrap_or_default();
                requested.min(backoff.delays.max).max(delay)
            }
            _ => delay,
        }
    }

    /// Takes a retry from the budget and returns the request to send; `None` if the client gets the result of this attempt.
    ///
    /// The budget is checked last, so that only retries that are sent are taken from it.
    fn take_retry(
        &self,
        kept_for_retry: ReplayableRequest,
        sender: &AttemptSender<'_>,
        metrics: &impl AttemptMetrics,
    ) -> Option<Request<Body>> {
        if !kept_for_retry.can_replay() {
            return None;
        }
        // The client gets the result of this attempt, which says more than an error that no endpoint is available.
        if !sender.is_available() {
            metrics.endpoints_exhausted();
            return None;
        }
        if !self.budget.withdraw(Instant::now()) {
            metrics.budget_exhausted();
            return None;
        }
        kept_for_retry.take_request()
    }
}

impl RetryOn<'_> {
    /// Whether this result is retried. `is_grpc` says whether the request is gRPC. `grpc_status` is the status of the response, if
    /// it is known.
    fn matches(&self, result: &Result<Response<Body>, Error>, is_grpc: bool, grpc_status: Option<i32>) -> bool {
        match (self, result) {
            (Self::Statuses(conditions), Ok(rsp)) => {
                contains_status(&conditions.http, rsp.status().as_u16())
                    || grpc_status.is_some_and(|code| conditions.grpc.contains(&code))
            }
            // Always retried: no endpoint became available, or the timeout of this attempt expired.
            (Self::Statuses(_), Err(Error::QueueTimeout(..) | Error::Timeout(TimeoutKind::ResponseHeaders(_)))) => true,
            // Never retried: another timeout expired, the endpoint has another identity, or the length of a body is wrong.
            (_, Err(Error::Timeout(_) | Error::IdentityMismatch { .. } | Error::ContentLengthMismatch)) => false,
            (Self::Statuses(conditions), Err(error)) if error.side() == Side::Upstream => {
                let status = error.status();
                contains_status(&conditions.http, status.status.as_u16())
                    || (is_grpc && conditions.grpc.contains(&status.grpc_code))
            }
            (Self::RouteFailures(route), Ok(rsp)) => is_route_failure(route, rsp.status(), grpc_status),
            (Self::RouteFailures(route), Err(error)) if error.side() == Side::Upstream => {
                let status = error.status();
                is_route_failure(route, status.status, is_grpc.then_some(status.grpc_code))
            }
            // Errors of the client, the policy or this proxy are not retried, because the retry would fail too.
            (Self::Statuses(_) | Self::RouteFailures(_), Err(_)) => false,
        }
    }
}

/// Whether the profile's route classifies a response as a failure.
fn is_route_failure(route: &ProfileRoute, status: StatusCode, grpc_status: Option<i32>) -> bool {
    match route.classify(status) {
        Some(class) => class == Class::Failure,
        None => !classify::is_success(status, grpc_status),
    }
}

/// Applies the deadlines of an attempt to the body of its response.
fn with_deadlines(
    result: Result<Response<Body>, Error>,
    deadlines: Option<AttemptDeadlines>,
) -> Result<Response<Body>, Error> {
    match deadlines {
        None => result,
        Some(deadlines) => result.map(|rsp| deadlines.limit_response(rsp)),
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
    body.discard_with_result(Ok(()));
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
/// Only the first frame is awaited. Frames that were read are put back at the start of the body. The body stays in `rsp` during the
/// wait, so the caller can still use the body if this call is cancelled.
async fn peek_grpc_status(rsp: &mut Response<Body>) -> Result<Option<i32>, Error> {
    let (body, mut read) = (rsp.body_mut(), VecDeque::<Bytes>::new());
    let after_data = match body.frame().await.transpose()?.map(Frame::into_data) {
        Some(Ok(data)) => {
            read.push_back(data);
            // The second frame is read only if it has already arrived.
            match body.frame().now_or_never() {
                Some(second) => second.transpose()?.map(Frame::into_data),
                None => {
                    *body = Body::replayed(read, std::mem::take(body));
                    return Ok(None);
                }
            }
        }
        trailers_or_end => trailers_or_end,
    };
    let trailers = match after_data {
        Some(Ok(more_data)) => {
            read.push_back(more_data);
            *body = Body::replayed(read, std::mem::take(body));
            return Ok(None);
        }
        Some(Err(frame)) => frame.into_trailers().ok(),
        None => None,
    };
    let grpc_status = trailers.as_ref().and_then(classify::grpc_status);
    *body = Body::buffered(read, trailers);
    Ok(grpc_status)
}

/// The timeouts of a request that may override the rule. The override headers are removed.
fn timeouts_with_overrides(timeouts: Timeouts, headers: &mut HeaderMap) -> Timeouts {
    let mut requested =
        |name| take_parsed(headers, &name, |text| duration::parse(text).ok()).filter(|limit| !limit.is_zero());
    let l5d_timeout = requested(names::L5D_TIMEOUT); // short name of `l5d-request-timeout`
    Timeouts {
        request: requested(names::L5D_REQUEST_TIMEOUT)
            .or(l5d_timeout)
            .or(timeouts.request),
        response: requested(names::L5D_RESPONSE_TIMEOUT).or(timeouts.response),
        idle: timeouts.idle,
    }
}

/// Removes the headers by which a request overrides the timeouts and retries of its rule.
pub(super) fn remove_overrides(headers: &mut HeaderMap) {
    timeouts_with_overrides(Timeouts::default(), headers);
    retry_with_overrides(None, headers);
}

/// The retries of a request that may override the rule. The override headers are removed.
fn retry_with_overrides<'a>(
    retry: Option<Cow<'a, RetryPolicy>>,
    headers: &mut HeaderMap,
) -> Option<Cow<'a, RetryPolicy>> {
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
        || RetryPolicy {
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
const OVERRIDE_RETRY_BACKOFF: BackoffPolicy = BackoffPolicy {
    delays: Backoff {
        min: Duration::from_millis(25),
        max: Duration::from_millis(250),
        jitter: 1.0,
    },
    honors_retry_after: false,
};
