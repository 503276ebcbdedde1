//! Selects the backend of an attempt, and applies its filters (O7). `backend_attempt.rs` then sends the attempt to endpoints of
//! this backend.

use http::Response;
use tokio::time::Instant;

use crate::{
    http::{
        body::Body, error::Error, lifecycle::deadlines::AttemptDeadlines, lifecycle::replay::ReplayableRequest,
        stack::filters,
    },
    outbound::{
        backend::Backends,
        request::{
            backend_attempt::BackendAttempt,
            connect::{RequestConnector, TriedEndpoints},
            context::{ClientContext, OutgoingRequest},
            observe::{ResponseRecorder, RouteRequestGuard, RouteSource},
        },
    },
    policy::filter::{self, Filter},
};

/// Sends the attempts of one request. Each attempt selects a backend again.
#[derive(Clone, Copy)]
pub(super) struct AttemptSender<'a> {
    pub(super) client: ClientContext<'a>,
    pub(super) route_source: RouteSource<'a>,
    /// Identity that the endpoint must have, from `l5d-require-id`.
    pub(super) required_identity: Option<&'a str>,
    pub(super) backends: &'a Backends<Filter>,
    /// Length in bytes of the path prefix that the route matched. If a filter of the route replaced the prefix: the length of the
    /// replacement.
    pub(super) matched_prefix_len: Option<usize>,
    /// `None` if the attempts are not recorded in the series of a route.
    pub(super) route_request: Option<(&'a RouteRequestGuard<'a>, ResponseRecorder)>,
}

/// Start and deadlines of one attempt.
pub(super) struct AttemptParams<'a> {
    pub(super) started_at: Instant,
    pub(super) deadlines: Option<&'a mut AttemptDeadlines>,
    /// The request that the caller keeps for retries, if it keeps one.
    pub(super) kept_for_retry: Option<&'a ReplayableRequest>,
    /// Whether the attempt may resend the request.
    pub(super) may_resend: bool,
}

impl AttemptParams<'_> {
    /// An attempt without deadlines and retries.
    pub(super) fn plain(started_at: Instant) -> Self {
        Self {
            started_at,
            deadlines: None,
            kept_for_retry: None,
            may_resend: true,
        }
    }
}

impl AttemptSender<'_> {
    /// Selects a backend and sends a request to it, preferably to endpoints that are not in `tried`.
    ///
    /// # Errors
    /// The errors of [`BackendAttempt::run`], or a filter of the backend responds to the request.
    pub(super) async fn send_attempt(
        &self,
        outgoing: &mut OutgoingRequest<'_>,
        tried: &mut TriedEndpoints,
        params: AttemptParams<'_>,
    ) -> Result<Response<Body>, Error> {
        let AttemptParams {
            started_at,
            deadlines,
            kept_for_retry,
            may_resend,
        } = params;
        let choice = self.backends.choose()?;
        filters::apply_request_filters(&choice.filters, outgoing.req, self.matched_prefix_len)?;
        let route_attempt = self
            .route_request
            .zip(choice.series.as_ref())
            .map(|((request, recorder), backend)| request.start_attempt(backend.clone(), recorder, started_at));
        let attempt = BackendAttempt {
            client: self.client,
            connector: RequestConnector {
                worker: self.client.worker,
                backend: &choice.backend,
                required_identity: self.required_identity,
                local_endpoints: self.client.local_endpoints,
                families: self.client.families,
                n_tried_by_earlier_attempts: tried.len(),
            },
            route_source: self.route_source,
            started_at,
            // The caller kept the request before the backend's filters changed it and before the deadlines wrapped its body. So the
            // kept request equals the sent one only if the backend has no filters and the body is empty.
            kept_for_retry: kept_for_retry.filter(|kept| choice.filters.is_empty() && kept.has_no_body()),
            may_resend,
        };
        let mut rsp = attempt.run(outgoing, tried, deadlines, route_attempt).await?;
        apply_response_filters(&choice.filters, &mut rsp);
        Ok(rsp)
    }

    /// Whether one of the backends is available now, as in [`Backends::is_available`].
    pub(super) fn is_available(&self) -> bool {
        self.backends.is_available(Instant::now())
    }
}

pub(super) fn apply_response_filters(filters: &[Filter], rsp: &mut Response<Body>) {
    if !filters.is_empty() {
        filter::apply_response(filters, rsp.headers_mut());
    }
}
