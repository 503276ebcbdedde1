//! Serves one request (I8–I11): restore, authorize, send, observe.

mod authorize;
pub(super) mod context;
mod observe;
mod profile;
mod send;
mod tap;
mod tunnel_request;

use std::sync::Arc;

use http::{Request, Response, Version};
use tokio::time::Instant;
use tulle_core::names::header as names;

use self::{
    context::{HttpConnection, Upstream},
    observe::{RequestMetrics, RouteRequestGuard},
    profile::ProfileNameSource,
    tunnel_request::TunnelRequest,
};
use crate::{
    http::{
        body::Body,
        client::EndpointClient,
        connection_closer::CloseAfterResponse,
        error::Error,
        headers,
        lifecycle::classify,
        upgrade::http1_over_http2::{self, RestoredRequest},
    },
    inbound::profiles::{ProfileEntry, ProfileRoutes},
    policy::matches::RequestAttributes,
    trace,
};

impl HttpConnection {
    pub(super) async fn serve(self: &Arc<Self>, req: &mut Request<Body>) -> Result<Response<Body>, Error> {
        let started_at = Instant::now();
        headers::check_request(req)?;
        let restored = self.restore_http1(req)?; // I8
        let mut rsp = match &self.upstream {
            Upstream::App(app) => self.authorize_and_send_to_app(app, req, started_at).await?,
            Upstream::Gateway(gateway, connection) => {
                headers::strip_underscore_aliases(req.headers_mut());
                Box::pin(self.send_to_gateway(&**gateway, connection, req, started_at)).await?
            }
        };
        if let Some(restored) = &restored {
            http1_over_http2::response_to_http2(&mut rsp, restored)?;
        }
        let is_now_authorized =
            || self.unauthorized_closer.is_some() && self.is_authorized_by(&self.port_policy.current().server_policy);
        if self.certificate.is_closing() || is_now_authorized() {
            rsp.extensions_mut().insert(CloseAfterResponse);
        }
        Ok(rsp)
    }

    /// Authorizes a request, sends it to the application, and records it.
    async fn authorize_and_send_to_app(
        self: &Arc<Self>,
        app: &EndpointClient,
        req: &mut Request<Body>,
        started_at: Instant,
    ) -> Result<Response<Body>, Error> {
        let mut reply_channels = req.body_mut().take_reply_channels();
        self.clean_headers(req, reply_channels.upgrade.is_some());
        let (request_metrics, tunnel_request) = self.authorize_or_tap_denial(req, reply_channels.upgrade.is_some())?; // I9
        let mut route_guard = RouteRequestGuard::begin(request_metrics, req, started_at);
        if let Some((client_tunnel, request)) = reply_channels.upgrade.as_mut().zip(tunnel_request.as_ref()) {
            self.close_tunnel_when_denied(client_tunnel, request);
        }
        let profile = wait_profile(self.find_profile(req)).await;
        let profile_request = profile.map(|profile| {
            let attributes = RequestAttributes::new(req.method(), req.uri(), req.headers());
            Box::new(profile.begin_request(&attributes))
        });
        let tapped = self.start_tap(
            req,
            Some(&route_guard.metrics.route_metrics),
            profile_request.as_deref(),
        );
        let tracer = self.inbound.tracer.as_ref();
        let server_span = trace::start_server_span(tracer, req);
        let client_span = trace::start_client_span(tracer, req);
        // I10
        let result = match &tunnel_request {
            None => self.send_to_app(app, req, reply_channels).await,
            Some(request) => {
                let sending = self.send_to_app(app, req, reply_channels);
                Box::pin(self.send_unless_denied(request, sending)).await
            }
        };
        let result = match (result, tunnel_request) {
            (Ok(rsp), Some(request)) => {
                let metrics = &mut route_guard.metrics.route_metrics;
                self.continue_without_tunnel(request, metrics).map(|()| rsp)
            }
            (result, _) => result,
        };
        trace::finish(client_span, &result);
        trace::finish(server_span, &result);
        match result {
            Ok(rsp) => {
                // I11
                let rsp = match tapped {
                    Some(tapped) => tapped.show_response(rsp),
                    None => rsp,
                };
                let rsp = match profile_request {
                    Some(profile_request) => {
                        route_guard.profile_class = profile_request.classify(rsp.status());
                        profile_request.observe_response(rsp, started_at)
                    }
                    None => rsp,
                };
                Ok(classify::observe(rsp, started_at, route_guard))
            }
            Err(error) => {
                if let Some(mut profile_request) = profile_request {
                    profile_request.record_error(&error);
                }
                if let Some(tapped) = tapped {
                    tapped.show_failure(&error);
                }
                route_guard.record_error(&error);
                Err(error)
            }
        }
    }

    /// Removes hop-by-hop headers and headers that clients must not set, and sets the client's identity.
    fn clean_headers(&self, req: &mut Request<Body>, is_upgrade: bool) {
        let is_http1 = req.version() <= Version::HTTP_11;
        if is_http1 && !is_upgrade {
            headers::strip_from_inbound_request(req.headers_mut());
        } else {
            headers::strip_underscore_aliases(req.headers_mut());
            if is_http1 {
                headers::strip_hop_by_hop_except_upgrade(req.headers_mut());
            }
        }
        match &self.client_id {
            Some(id) => {
                req.headers_mut().insert(names::L5D_CLIENT_ID, id.clone());
            }
            None => {
                req.headers_mut().remove(names::L5D_CLIENT_ID);
            }
        }
    }

    /// Authorizes a request, and shows it to tap observers if it is denied. [`Self::authorize_and_send_to_app`] shows permitted
    /// requests.
    fn authorize_or_tap_denial(
        &self,
        req: &mut Request<Body>,
        asks_for_tunnel: bool,
    ) -> Result<(RequestMetrics, Option<Arc<TunnelRequest>>), Error> {
        self.authorize(req, asks_for_tunnel).inspect_err(|error| {
            if let Some(tapped) = self.start_tap(req, None, None) {
                tapped.show_failure(error);
            }
        })
    }

    /// Restores an HTTP/1 request that the client's proxy converted to HTTP/2. The marker `l5d-orig-proto` is removed from
    /// requests of unmeshed clients.
    fn restore_http1(&self, req: &mut Request<Body>) -> Result<Option<RestoredRequest>, Error> {
        if self.client_id.is_none() {
            if headers::get(req.headers(), &names::L5D_ORIG_PROTO).is_some() {
                req.headers_mut().remove(names::L5D_ORIG_PROTO);
            }
            return Ok(None);
        }
        let restored = http1_over_http2::request_to_http1(req)?;
        if restored.is_some() {
            headers::check_http1_target_and_body(req)?;
        }
        Ok(restored)
    }
}

/// Waits for the routes of a ServiceProfile; `None` if there are none or they do not arrive in time.
async fn wait_profile(found: Option<(Arc<ProfileEntry>, ProfileNameSource)>) -> Option<Arc<ProfileRoutes>> {
    let (entry, source) = found?;
    let routes = entry.routes().await?;
    match source {
        ProfileNameSource::ClientHeader => Some(routes),
        // Most services have no routes. Without routes, the metrics of the profile would not distinguish requests.
        ProfileNameSource::Authority => (!routes.is_empty()).then_some(routes),
    }
}
