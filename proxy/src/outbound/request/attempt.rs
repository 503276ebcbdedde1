//! One attempt at a request: selects a backend, applies its filters and sends the request to it (O7).

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
            connect::{RequestConnector, TriedEndpoints},
            context::{OutgoingRequest, RequestContext},
            dispatch::Dispatch,
            observe::{AttemptKind, RouteRequestGuard, RouteSource},
        },
    },
    policy::filter::{self, Filter},
};

/// Sends the attempts of one request. Each attempt selects a backend again.
#[derive(Clone, Copy)]
pub(super) struct AttemptSender<'a> {
    pub(super) context: RequestContext<'a>,
    pub(super) route_source: RouteSource<'a>,
    /// Identity that the endpoint must have, from `l5d-require-id`.
    pub(super) required_identity: Option<&'a str>,
    pub(super) backends: &'a Backends<Filter>,
    /// Length in bytes of the path prefix that the route matched.
    pub(super) matched_prefix_len: Option<usize>,
    /// Set if the attempts are recorded in the series of a route.
    pub(super) route_request: Option<(&'a RouteRequestGuard<'a>, AttemptKind)>,
}

/// Start and limits of one attempt.
pub(super) struct AttemptParams<'a> {
    pub(super) started: Instant,
    pub(super) limits: Option<&'a mut AttemptDeadlines>,
    /// The caller's copy of the request, if it keeps one.
    pub(super) copy: Option<&'a ReplayableRequest>,
}

impl AttemptParams<'_> {
    /// An attempt without limits and without a copy.
    pub(super) fn plain(started: Instant) -> Self {
        Self {
            started,
            limits: None,
            copy: None,
        }
    }
}

impl AttemptSender<'_> {
    /// Selects a backend and sends a request to it, preferably to endpoints that are not in `tried`.
    ///
    /// # Errors
    /// As [`Dispatch::run`], or a filter of the backend answers the request.
    pub(super) async fn send(
        &self,
        outgoing: &mut OutgoingRequest<'_>,
        tried: &mut TriedEndpoints,
        params: AttemptParams<'_>,
    ) -> Result<Response<Body>, Error> {
        let AttemptParams { started, limits, copy } = params;
        let choice = self.backends.choose()?;
        filters::apply_request_filters(&choice.filters, outgoing.req, self.matched_prefix_len)?;
        let route_attempt = self
            .route_request
            .zip(choice.series.as_ref())
            .map(|((request, kind), backend)| request.start_attempt(backend.clone(), kind, started));
        let dispatch = Dispatch {
            context: self.context,
            connector: RequestConnector {
                worker: self.context.worker,
                backend: &choice.backend,
                required_identity: self.required_identity,
                families: self.context.families,
                n_tried_before: tried.len(),
            },
            route_source: self.route_source,
            started_at: started,
            // The caller's copy lacks the changes of the backend's filters, and its body would have no limits. So it is used only
            // if the backend has no filters and the body is empty.
            caller_copy: copy.filter(|copy| choice.filters.is_empty() && copy.has_no_body()),
        };
        let mut rsp = dispatch.run(outgoing, tried, limits, route_attempt).await?;
        filter_response(&choice.filters, &mut rsp);
        Ok(rsp)
    }

    pub(super) fn is_available(&self) -> bool {
        self.backends.is_available(Instant::now())
    }
}

pub(super) fn filter_response(filters: &[Filter], rsp: &mut Response<Body>) {
    if !filters.is_empty() {
        filter::apply_response(filters, rsp.headers_mut());
    }
}
