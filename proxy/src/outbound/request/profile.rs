//! Sends a request by a ServiceProfile: its routes, their metrics and timeouts, and retries within a budget.

use std::sync::atomic::{AtomicBool, Ordering};

use http::Response;
use tokio::time::Instant;
use tulle_core::names::header as names;

use crate::{
    http::{
        body::Body,
        error::Error,
        lifecycle::classify::{self, ProfileResponseObserver},
        lifecycle::deadlines::RequestTimeouts,
        lifecycle::replay,
    },
    metrics::http::{ResponseEnd, ResponseOutcome},
    outbound::{
        destination::profile::CompiledProfile,
        metrics::{attempts::AttemptMetrics, profiles::ProfileRouteMetrics},
        request::{
            attempt::AttemptSender,
            context::OutgoingRequest,
            retry::{self, RetryOn, RetryParams, SendParams},
        },
    },
    policy::{
        matches::RequestAttributes,
        profile::{self, Class, ProfileRoute},
    },
};

/// Sends a request by its route. Failures are retried if the route is retryable; upgrade requests are sent once.
///
/// # Errors
/// The last attempt failed, or the route's timeout expired.
pub(super) async fn send_by_profile(
    compiled: &CompiledProfile,
    sender: &AttemptSender<'_>,
    outgoing: &mut OutgoingRequest<'_>,
) -> Result<Response<Body>, Error> {
    let started_at = Instant::now();
    let attributes = RequestAttributes::of(outgoing.req.method(), outgoing.req.uri(), outgoing.req.headers());
    let routes = compiled.routes();
    let index = profile::find(routes, &attributes);
    let route = index.and_then(|index| routes.get(index));
    let metrics = &compiled.route_metrics[index.unwrap_or(routes.len())];
    if let Some(canonical) = &compiled.canonical {
        outgoing
            .req
            .headers_mut()
            .insert(names::L5D_DST_CANONICAL, canonical.clone());
    }
    let mut request_metrics = ProfileRequestMetrics::begin(route, metrics);
    if let Some(budget) = &compiled.budget {
        budget.deposit(started_at);
    }
    let retryable = route.filter(|route| route.is_retryable).zip(compiled.budget.as_deref());
    let retry_params = retryable.map(|(route, budget)| RetryParams {
        retry_on: RetryOn::RouteFailures(route),
        max_retries: u16::MAX,
        max_body_bytes: replay::DEFAULT_MAX_REPLAY_BYTES,
        attempt_timeout: None,
        backoff: None,
        budget,
    });
    let timeout = route.and_then(|route| route.timeout);
    let timeouts = RequestTimeouts {
        profile_deadline: timeout.map(|limit| (started_at + limit, limit)),
        ..RequestTimeouts::default()
    };
    let result = if outgoing.upgrade.is_some() {
        retry::send_upgrade(sender, started_at, outgoing, timeouts, &request_metrics).await
    } else {
        let params = SendParams {
            started_at,
            timeouts,
            retry_params: retry_params.as_ref(),
        };
        retry::send_with_retries(sender, outgoing, params, &request_metrics).await
    };
    request_metrics.is_recorded = true;
    match result {
        Ok(rsp) => {
            let class = route.and_then(|route| route.classify(rsp.status()));
            let series = metrics.logical.clone();
            Ok(classify::observe(
                rsp,
                started_at,
                ProfileResponseObserver { series, class },
            ))
        }
        Err(error) => {
            metrics.logical.record_response(classify::failed_outcome(&error));
            Err(error)
        }
    }
}

/// Records one request and its attempts in the metrics of its route.
struct ProfileRequestMetrics<'a> {
    route: Option<&'a ProfileRoute>,
    metrics: &'a ProfileRouteMetrics,
    attempt_in_progress: AtomicBool,
    /// Whether the caller has recorded the result of the request. If this value is dropped before, the request counts as
    /// cancelled by the client.
    is_recorded: bool,
}

impl<'a> ProfileRequestMetrics<'a> {
    fn begin(route: Option<&'a ProfileRoute>, metrics: &'a ProfileRouteMetrics) -> Self {
        metrics.logical.record_request();
        Self {
            route,
            metrics,
            attempt_in_progress: AtomicBool::new(false),
            is_recorded: false,
        }
    }
}

/// Dropped before the end of the request: the client has cancelled it.
impl Drop for ProfileRequestMetrics<'_> {
    fn drop(&mut self) {
        if self.is_recorded {
            return;
        }
        let cancelled = classify::failed_outcome(&Error::ClientClosed);
        if *self.attempt_in_progress.get_mut() {
            self.metrics.attempts.record_response(cancelled);
        }
        self.metrics.logical.record_response(cancelled);
    }
}

impl AttemptMetrics for ProfileRequestMetrics<'_> {
    fn attempt_started(&self) {
        self.attempt_in_progress.store(true, Ordering::Relaxed);
        self.metrics.attempts.record_request();
    }

    fn attempt_ended(&self, result: &Result<Response<Body>, Error>, grpc_status: Option<i32>) {
        self.attempt_in_progress.store(false, Ordering::Relaxed);
        self.metrics.attempts.record_response(match result {
            Ok(rsp) => {
                let class = self.route.and_then(|route| route.classify(rsp.status()));
                ResponseOutcome {
                    status: rsp.status(),
                    grpc: grpc_status,
                    success: class.map_or_else(
                        || classify::is_success(rsp.status(), grpc_status),
                        |class| class == Class::Success,
                    ),
                    end: ResponseEnd::Complete,
                }
            }
            Err(error) => classify::failed_outcome(error),
        });
    }

    fn budget_exhausted(&self) {
        self.metrics.no_budget.inc();
    }
}
