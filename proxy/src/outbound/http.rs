//! The request path of the outbound side: route, filters, dispatch, response (O5–O12).

use std::sync::Arc;

use http::{Request, Response, Version};
use tulle_core::{drain, names::header as names};

use crate::{
    http::{body::Body, error::Error, filters, headers},
    outbound::{
        Outbound,
        destination::{Destination, HttpPlan, Plan, Router},
        dispatch::Dispatch,
    },
    policy::{
        filter::{self, Filter},
        matches::Head,
        route::{self, Rule},
    },
};

/// One connection that speaks HTTP.
pub(super) struct HttpConnection {
    pub(super) outbound: Arc<Outbound>,
    pub(super) worker: usize,
    pub(super) destination: Arc<Destination>,
    pub(super) drain: drain::Watch,
}

impl HttpConnection {
    /// Carries one request from the application to a backend.
    pub(super) async fn serve(&self, req: &mut Request<Body>) -> Result<Response<Body>, Error> {
        headers::check_request(req)?;
        let upgrade = req.body_mut().take_client();
        if upgrade.is_none() && req.version() <= Version::HTTP_11 {
            headers::strip_hop_by_hop(req.headers_mut());
        }
        let plan = self.destination.plan.load_full(); // one snapshot for the whole request
        let router = router(&plan, req.version())?;
        let found = route::find(&router.routes, &Head::of(req.method(), req.uri(), req.headers()));
        let found = found.ok_or(Error::RouteNotFound)?; // O6
        let split = router.profile.as_ref().and_then(|profile| profile.overrides.as_ref());
        let choice = split.unwrap_or(&found.rule.payload.backends).choose()?;
        for filters in [&found.rule.filters, &choice.filters] {
            filters::apply(filters, req, found.prefix)?;
        }
        let required = self.required_identity(req);
        let dispatch = Dispatch {
            worker: self.worker,
            backend: &choice.backend,
            required: required.as_deref(),
            families: &self.outbound.families,
            drain: &self.drain,
        };
        if let (Some(profile), None) = (&router.profile, &upgrade) {
            return Box::pin(profile.send(&dispatch, req)).await; // a profile has its own timeouts and no filters
        }
        let sent = dispatch.run(req, upgrade); // O7–O11
        let mut rsp = match found.rule.payload.timeout {
            None => sent.await?,
            Some(limit) => within(limit, sent).await?,
        };
        respond(found.rule, &choice.filters, &mut rsp); // O12
        Ok(rsp)
    }

    /// The identity that the application demands, if any.
    fn required_identity(&self, req: &mut Request<Body>) -> Option<String> {
        if !req.headers().contains_key(names::L5D_REQUIRE_ID) {
            return None;
        }
        let required = req.headers_mut().remove(names::L5D_REQUIRE_ID)?;
        Some(String::from_utf8_lossy(required.as_bytes()).into_owned())
    }
}

/// Bounds the time to the response's head; the timer is only there where a policy asks for one.
async fn within(
    limit: std::time::Duration,
    sent: impl Future<Output = Result<Response<Body>, Error>>,
) -> Result<Response<Body>, Error> {
    Box::pin(tokio::time::timeout(limit, sent))
        .await
        .unwrap_or(Err(Error::RequestTimeout(limit)))
}

fn router(plan: &Plan, version: Version) -> Result<&Router, Error> {
    match plan {
        Plan::Detect { http2, .. } if version == Version::HTTP_2 => Ok(http2),
        Plan::Detect { http1, .. } => Ok(http1),
        Plan::Http1(router) | Plan::Http2(router) => Ok(router),
        Plan::Opaque(_) | Plan::Tls(_) => Err(Error::InvalidPolicy(
            "this destination does not speak HTTP any more".into(),
        )),
    }
}

/// Applies response filters, those of the backend first.
fn respond(rule: &Rule<HttpPlan>, backend: &[Filter], rsp: &mut Response<Body>) {
    for filters in [backend, &rule.filters] {
        if !filters.is_empty() {
            filter::apply_response(filters, rsp.headers_mut());
        }
    }
}
