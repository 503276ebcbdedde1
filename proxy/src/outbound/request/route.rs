//! The request path of the outbound side: route, filters, attempts, response (O5–O12).

use http::{Request, Response, Version};
use tulle_core::names::header as names;

use crate::{
    http::{body::Body, error::Error, headers, lifecycle::classify, stack::filters},
    outbound::{
        destination::snapshot::{Destination, HttpPlan, Plan, Router},
        metrics::RouteResponseObserver,
        request::{
            attempt::{AttemptParams, AttemptSender, filter_response},
            connect::TriedEndpoints,
            context::{OutgoingRequest, RequestContext},
            observe::{AttemptKind, RouteRequestGuard, RouteSource},
        },
    },
    policy::{matches::RequestAttributes, route},
};

impl RequestContext<'_> {
    /// Sends a request by the routes of its destination.
    pub(in crate::outbound) async fn send(
        self,
        destination: &Destination,
        outgoing: &mut OutgoingRequest<'_>,
    ) -> Result<Response<Body>, Error> {
        let snapshot = destination.snapshot(); // one for the whole request
        let router = select_router(&snapshot.plan, outgoing.req.version())?;
        let required_identity = take_required_identity(outgoing.req);
        let new_sender = |route_source, backends, matched_prefix_len, route_request| AttemptSender {
            context: self,
            route_source,
            required_identity: required_identity.as_deref(),
            backends,
            matched_prefix_len,
            route_request,
        };
        let routes = match router {
            Router::Routes(routes) => routes,
            Router::Profile(profile) => {
                let sender = new_sender(RouteSource::Profile(profile.routes()), &profile.backends, None, None);
                return Box::pin(profile.send(&sender, outgoing)).await;
            }
        };
        let attributes = RequestAttributes::of(outgoing.req.method(), outgoing.req.uri(), outgoing.req.headers());
        let found = route::find(routes, &attributes).ok_or(Error::RouteNotFound)?; // O6
        let HttpPlan {
            backends,
            timeouts_and_retries,
            series,
        } = &found.rule.payload;
        let route_source = RouteSource::Route(&found.route.meta);
        let mut request_guard = RouteRequestGuard::begin(series, outgoing.req);
        let result = match filters::apply_request_filters(&found.rule.filters, outgoing.req, found.prefix) {
            Err(filter_response) => Err(filter_response),
            // O7–O11
            Ok(()) => {
                let route_sender =
                    |kind| new_sender(route_source, backends, found.prefix, Some((&request_guard, kind)));
                match timeouts_and_retries {
                    None => {
                        let sender = route_sender(AttemptKind::Single);
                        let params = AttemptParams::plain(request_guard.timing.started());
                        sender.send(outgoing, &mut TriedEndpoints::new(), params).await
                    }
                    // Boxed because its timers make the future large.
                    Some(timeouts_and_retries) => {
                        let sender = route_sender(AttemptKind::Retryable);
                        let metrics = &**request_guard.series();
                        let result = Box::pin(timeouts_and_retries.send(&sender, outgoing, metrics)).await;
                        result.map(|rsp| {
                            let (route, timing) = (request_guard.series().clone(), request_guard.timing.clone());
                            classify::observe(rsp, timing.started(), RouteResponseObserver { route, timing })
                        })
                    }
                }
            }
        };
        request_guard.record_result(&result);
        let mut rsp = result?;
        filter_response(&found.rule.filters, &mut rsp); // O12
        Ok(rsp)
    }
}

fn select_router(plan: &Plan, version: Version) -> Result<&Router, Error> {
    match plan {
        Plan::Detect { http2, .. } if version == Version::HTTP_2 => Ok(http2),
        Plan::Detect { http1, .. } => Ok(http1),
        Plan::Http1(router) | Plan::Http2(router) => Ok(router),
        Plan::Opaque(_) | Plan::Tls { .. } => Err(Error::InvalidPolicy("this destination does not accept HTTP".into())),
    }
}

/// Removes `l5d-require-id` and returns the identity in it.
fn take_required_identity(req: &mut Request<Body>) -> Option<String> {
    headers::get(req.headers(), &names::L5D_REQUIRE_ID)?;
    let required = req.headers_mut().remove(names::L5D_REQUIRE_ID)?;
    Some(String::from_utf8_lossy(required.as_bytes()).into_owned())
}
