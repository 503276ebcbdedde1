//! Sends requests to the application, or through the gateway (I10).

use std::sync::Arc;

use http::{Request, Response, Version};
use tokio::time::Instant;
use tulle_core::names::header as names;

use crate::{
    http::{
        body::Body,
        client::{ConnectionUse, EndpointClient, HttpVersion},
        error::{Error, Resendable},
        headers,
        lifecycle::classify,
        lifecycle::replay::{self, ReplayableRequest},
        upgrade::interim::SharedInterimSink,
        upgrade::reply_channels::ReplyChannels,
        upgrade::tunnel,
    },
    inbound::{
        gateway::{self, Gateway, GatewayConnection},
        request::{context::HttpConnection, observe::RouteRequestGuard},
    },
    trace,
};

impl HttpConnection {
    /// Sends a request through the gateway, if the client is authorized.
    pub(super) async fn send_to_gateway(
        self: &Arc<Self>,
        gateway: &dyn Gateway,
        gateway_connection: &GatewayConnection,
        req: &mut Request<Body>,
        started_at: Instant,
    ) -> Result<Response<Body>, Error> {
        let (own_identity, client) = (
            &*self.inbound.identity_name,
            self.tls.client_id().map_or("", |id| id.as_str()),
        );
        req.headers_mut().remove(names::L5D_CLIENT_ID); // the next proxy sets this header to the identity of this proxy
        let asks_for_tunnel = req.body_mut().client_tunnel_mut().is_some();
        let (request_metrics, tunnel_request) = self.authorize(req, asks_for_tunnel)?;
        let mut route_guard = RouteRequestGuard::begin(request_metrics, req, started_at);
        if let Some((client_tunnel, request)) = req.body_mut().client_tunnel_mut().zip(tunnel_request.as_ref()) {
            self.close_tunnel_when_denied(client_tunnel, request);
        }
        let result = match gateway::check_loop(own_identity, client, Some(req)) {
            Ok(()) => {
                gateway::append_forwarded_header(own_identity, client, req);
                let span = trace::start_server_span(self.inbound.tracer.as_ref(), req);
                let sending = gateway.send(gateway_connection, req);
                let result = match &tunnel_request {
                    None => sending.await,
                    Some(request) => self.send_unless_denied(request, sending).await,
                };
                trace::finish(span, &result);
                result
            }
            Err(error) => Err(error),
        };
        let result = match (result, tunnel_request) {
            (Ok(rsp), Some(request)) => {
                drop(req.body_mut().take_reply_channels()); // an unused channel would hold the tunnel request
                let metrics = &mut route_guard.metrics.route_metrics;
                self.continue_without_tunnel(request, metrics).map(|()| rsp)
            }
            (result, _) => result,
        };
        match result {
            Ok(rsp) => Ok(classify::observe(rsp, started_at, route_guard)),
            Err(error) => {
                route_guard.record_error(&error);
                Err(error)
            }
        }
    }

    /// Sends the request to the application. If the connection is lost before a response, the request is resent where this is
    /// safe.
    pub(super) async fn send_to_app(
        &self,
        app: &EndpointClient,
        req: &mut Request<Body>,
        ReplyChannels { upgrade, interims }: ReplyChannels,
    ) -> Result<Response<Body>, Error> {
        let protocol = if req.version() == Version::HTTP_2 {
            HttpVersion::Http2
        } else {
            HttpVersion::Http1
        };
        let connection_use = match (protocol, &upgrade) {
            (HttpVersion::Http2, Some(_)) => ConnectionUse::ExtendedConnect,
            (HttpVersion::Http1, Some(_)) => ConnectionUse::Unpooled,
            (_, None) if req.version() == Version::HTTP_10 => ConnectionUse::Unpooled,
            (_, None) => ConnectionUse::Pooled,
        };
        // The HTTP/1 client resends requests by itself.
        let kept_request = (protocol == HttpVersion::Http2 && upgrade.is_none())
            .then(|| ReplayableRequest::of_request(req, replay::DEFAULT_MAX_REPLAY_BYTES));
        let outcome = app
            .connection(protocol, connection_use)
            .await
            .map_err(timeout_as_connect_error)?;
        let mut rsp = match app.send(outcome, req, interims.as_ref()).await {
            Err(error) => match kept_request {
                Some(kept_request) => Box::pin(resend(app, kept_request, interims.as_ref(), error)).await?,
                None => return Err(timeout_as_connect_error(error)),
            },
            Ok(rsp) => rsp,
        };
        match (upgrade, rsp.body_mut().take_server_tunnel()) {
            (Some(client_tunnel), Some(app_tunnel)) => {
                tunnel::spawn_tunnel(client_tunnel, app_tunnel, &self.drain);
                headers::strip_hop_by_hop_except_upgrade(rsp.headers_mut());
                headers::strip_proxy_headers(rsp.headers_mut());
            }
            (None, Some(_)) => {
                return Err(Error::InvalidResponse(
                    "the server switched protocols without an upgrade request",
                ));
            }
            (_, None) => headers::strip_from_app_response(rsp.headers_mut()),
        }
        Ok(rsp)
    }
}

/// Resends an HTTP/2 request, possibly on another connection, while its error permits that.
///
/// # Errors
/// The server may have processed the request, its body is too long to be buffered, or every send failed.
async fn resend(
    app: &EndpointClient,
    mut kept_request: ReplayableRequest,
    interims: Option<&SharedInterimSink>,
    mut error: Error,
) -> Result<Response<Body>, Error> {
    for _ in 1..MAX_HTTP2_SENDS {
        let may_send = match error.resendable() {
            Resendable::Always => true,
            Resendable::IfIdempotent => app.resend_policy().allows(kept_request.method()),
            Resendable::Never => false,
        };
        if !may_send {
            break;
        }
        let Some(mut req) = kept_request.take_request() else {
            return Err(Error::TooLargeToResend(Box::new(error)));
        };
        kept_request = ReplayableRequest::of_request(&mut req, replay::DEFAULT_MAX_REPLAY_BYTES);
        let outcome = app.connection(HttpVersion::Http2, ConnectionUse::Pooled).await;
        error = match app
            .send(outcome.map_err(timeout_as_connect_error)?, &mut req, interims)
            .await
        {
            Ok(rsp) => return Ok(rsp),
            Err(error) => error,
        };
    }
    Err(timeout_as_connect_error(error))
}

/// Maximum number of times that an HTTP/2 request is sent to the application.
const MAX_HTTP2_SENDS: usize = 3;

/// Converts a connect timeout to a connect error: every failure to connect to the application becomes 502, so that the client's
/// proxy can try another endpoint.
fn timeout_as_connect_error(error: Error) -> Error {
    match error {
        Error::ConnectTimeout(source) => Error::Connect(source),
        other => other,
    }
}
