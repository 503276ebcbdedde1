//! Sends a request by a ServiceProfile: its routes, their metrics and timeouts, and retries within a budget.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

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
    metrics::http::Series,
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
        profile::{self, ProfileRoute},
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
    let attributes = RequestAttributes::new(outgoing.req.method(), outgoing.req.uri(), outgoing.req.headers());
    let routes = compiled.routes();
    let index = profile::find_route(routes, &attributes);
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
    let result = if outgoing.reply_channels.upgrade.is_some() {
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
    request_metrics.observe(result, started_at, &metrics.logical)
}

/// Records one request and its attempts in the metrics of its route.
struct ProfileRequestMetrics<'a> {
    route: Option<&'a ProfileRoute>,
    metrics: &'a ProfileRouteMetrics,
    attempt_in_progress: AtomicBool,
    /// Whether the caller has recorded the result of the request. If this value is dropped without a recorded result, the request
    /// counts as cancelled by the client.
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

    /// Counts a failure in `series`, or observes a response until its end and then counts it. Only at its end is it known whether
    /// the response is complete, and which gRPC status it has.
    fn observe(
        &self,
        result: Result<Response<Body>, Error>,
        started_at: Instant,
        series: &Arc<Series>,
    ) -> Result<Response<Body>, Error> {
        match result {
            Ok(rsp) => {
                let observer = ProfileResponseObserver {
                    series: series.clone(),
                    class: self.route.and_then(|route| route.classify(rsp.status())),
                };
                Ok(classify::observe(rsp, started_at, observer))
            }
            Err(error) => {
                series.record_response(classify::failed_outcome(&error));
                Err(error)
            }
        }
    }
}

/// Records that the client cancelled the request, if no result was recorded.
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

    fn observe_attempt(
        &self,
        result: Result<Response<Body>, Error>,
        started_at: Instant,
    ) -> Result<Response<Body>, Error> {
        // From here on, the observer of the response counts a cancelled attempt.
        self.attempt_in_progress.store(false, Ordering::Relaxed);
        self.observe(result, started_at, &self.metrics.attempts)
    }

    fn budget_exhausted(&self) {
        self.metrics.no_budget.inc();
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, time::Duration};

    use bytes::Bytes;
    use http::{HeaderMap, HeaderValue};
    use http_body_util::BodyExt as _;
    use tulle_core::metrics::Registry;

    use super::*;
    use crate::outbound::metrics::profiles::Families;

    /// A gRPC response with data and with this status in its trailers.
    fn grpc_response(code: u16) -> Response<Body> {
        let trailers = HeaderMap::from_iter([(classify::GRPC_STATUS, HeaderValue::from(code))]);
        let data = VecDeque::from([Bytes::from_static(b"data")]);
        Response::new(Body::buffered(data, Some(trailers)))
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_are_counted_at_the_end_of_their_responses() {
        let registry = Registry::new();
        let metrics = Families::new(&registry).route("web:80", None);
        let mut request = ProfileRequestMetrics::begin(None, &metrics);
        let series = |name: &str, labels: &str| {
            let line = format!("{name}{{direction=\"outbound\",dst=\"web:80\",{labels}}} ");
            let page = registry.render();
            let mut values = page.lines().filter_map(|page_line| page_line.strip_prefix(&*line));
            values.next().map(str::to_owned)
        };
        let responses = |labels: &str| series("route_actual_response_total", labels);
        let (ok, failed) = (
            "status_code=\"200\",classification=\"success\"",
            "status_code=\"200\",classification=\"failure\",grpc_status=\"14\"",
        );

        let started_at = Instant::now();
        request.attempt_started();
        let rsp = request.observe_attempt(Ok(grpc_response(14)), started_at).unwrap();
        assert_eq!(
            (responses(ok), responses(failed)),
            (None, None),
            "the status is not known yet"
        );
        tokio::time::advance(Duration::from_millis(7)).await;
        rsp.into_body().collect().await.unwrap();
        assert_eq!((responses(ok), responses(failed).as_deref()), (None, Some("1")));
        let latency = |name: &str| {
            series(
                &format!("route_actual_response_latency_ms_{name}"),
                "status_code=\"200\"",
            )
        };
        assert_eq!(
            (latency("count").as_deref(), latency("sum").as_deref()),
            (Some("1"), Some("7"))
        );

        request.attempt_started();
        let rsp = request.observe_attempt(Ok(grpc_response(14)), Instant::now()).unwrap();
        drop(rsp);
        let cancelled = "status_code=\"200\",classification=\"failure\",error=\"client-left\"";
        assert_eq!((responses(ok), responses(cancelled).as_deref()), (None, Some("1")));

        request.attempt_started();
        let no_response = request.observe_attempt(Err(Error::ClientClosed), Instant::now());
        assert!(no_response.is_err());
        request.is_recorded = true;
        drop(request);
        let counted = registry.render();
        let counted = counted
            .lines()
            .filter(|line| line.starts_with("route_actual_response_total{"));
        assert_eq!(
            counted.count(),
            3,
            "each attempt is counted once: {}",
            registry.render()
        );
    }
}
