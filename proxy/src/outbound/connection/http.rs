//! Serves HTTP connections (O4). If each request names its destination, this module resolves it (O2).

use std::{net::SocketAddr, pin::Pin, sync::Arc};

use futures_util::FutureExt as _;
use http::{HeaderValue, Method, Request, Response, Version, header, uri::Scheme};
use tulle_core::{
    addr::{Addr, NameAddr},
    drain,
    names::header as names,
};

use crate::{
    http::{
        body::Body,
        client::HttpVersion,
        connection_closer::{CloseSignals, ConnectionCloser},
        error::Error,
        headers, server,
        stack::error_response::{ConnectionInfo, ErrorDetail},
        upgrade::http1_over_http2,
        upgrade::tunnel::ClientTunnel,
    },
    net::io::Io,
    outbound::{
        connection::context::{AcceptedClient, Outbound},
        destination::{discovery::ResolvedTarget, snapshot::Destination},
        endpoint::LocalEndpoints,
        request::{
            context::{ClientContext, OutgoingRequest},
            route,
        },
    },
    trace,
};

/// An HTTP connection of a client.
pub(super) struct HttpConnection {
    pub(super) outbound: Arc<Outbound>,
    pub(super) client: AcceptedClient,
    pub(super) target_source: TargetSource,
}

/// The source of the destination of a request.
pub(super) enum TargetSource {
    /// All requests of the connection go to this destination.
    Fixed(Arc<Destination>),
    /// The service that a client of this gateway names. Endpoints of the service in this workload are refused.
    GatewayService(Arc<Destination>),
    /// The service in `l5d-dst-override`; without this header, the dialled destination.
    Override(Arc<Destination>),
    /// The request target, as in requests to an explicit proxy; CONNECT requests are served by `on_connect`.
    RequestTarget { on_connect: ConnectHandler },
    /// The dialled address; its discovery failed, so requests are refused.
    DiscoveryFailed(Addr),
}

/// Serves a CONNECT request. The last argument is the client's side of the tunnel.
///
/// The function is always `serve_connect` of `explicit.rs`. This file cannot import `explicit.rs`, because `explicit.rs` imports
/// this file.
type ConnectHandler = for<'a> fn(
    &'a HttpConnection,
    &'a mut Request<Body>,
    Option<ClientTunnel>,
) -> Pin<Box<dyn Future<Output = Result<Response<Body>, Error>> + Send + 'a>>;

impl HttpConnection {
    /// Carries one request from the application to a backend.
    pub(super) async fn serve(&self, req: &mut Request<Body>) -> Result<Response<Body>, Error> {
        headers::check_request(req)?;
        let reply_channels = req.body_mut().take_reply_channels();
        if req.version() <= Version::HTTP_11 {
            match reply_channels.upgrade {
                None => headers::strip_hop_by_hop(req.headers_mut()),
                Some(_) => headers::strip_hop_by_hop_except_upgrade(req.headers_mut()),
            }
        }
        let (destination, fallback_addrs) = match &self.target_source {
            TargetSource::Fixed(destination) | TargetSource::GatewayService(destination) => {
                let mut outgoing = OutgoingRequest {
                    req,
                    reply_channels,
                    mirrors_started: false,
                };
                return route::route_and_send(self.client_context(), destination, &mut outgoing).await;
            }
            TargetSource::Override(dialled) => Box::pin(self.resolve_override(dialled, req)).await?,
            // An extended CONNECT (RFC 8441) has a scheme and a path. It is routed like any other request.
            TargetSource::RequestTarget { on_connect }
                if *req.method() == Method::CONNECT && req.uri().scheme().is_none() =>
            {
                return on_connect(self, req, reply_channels.upgrade).await;
            }
            TargetSource::RequestTarget { .. } => Box::pin(self.resolve_request_target(req)).await?,
            TargetSource::DiscoveryFailed(target) => return Err(Error::DiscoveryTimeout(target.clone())),
        };
        let mut outgoing = OutgoingRequest {
            req,
            reply_channels,
            mirrors_started: false,
        };
        match fallback_addrs.is_empty() {
            true => route::route_and_send(self.client_context(), &destination, &mut outgoing).await,
            // Boxed because it is rare and its future is large.
            false => Box::pin(self.send_with_fallback(destination, fallback_addrs, &mut outgoing)).await,
        }
    }

    /// Sends a request to the first of several destinations that can be reached.
    async fn send_with_fallback(
        &self,
        mut destination: Arc<Destination>,
        fallback_addrs: Vec<SocketAddr>,
        outgoing: &mut OutgoingRequest<'_>,
    ) -> Result<Response<Body>, Error> {
        let mut fallback_addrs = fallback_addrs.into_iter();
        loop {
            let (uri, headers) = (outgoing.req.uri().clone(), outgoing.req.headers().clone());
            let result = route::route_and_send(self.client_context(), &destination, outgoing).await;
            match (result, fallback_addrs.next()) {
                (Err(error), Some(addr)) if error.is_dial_error() => {
                    // Restores the request as it was before the filters changed it.
                    *outgoing.req.uri_mut() = uri;
                    *outgoing.req.headers_mut() = headers;
                    (destination, _) = self.outbound.resolve_target(Addr::Socket(addr)).await?;
                }
                (result, _) => return result,
            }
        }
    }

    fn client_context(&self) -> ClientContext<'_> {
        ClientContext {
            worker: self.client.worker,
            client_addr: self.client.addr.0,
            families: &self.outbound.families,
            drain: &self.client.drain,
            local_endpoints: match self.target_source {
                TargetSource::GatewayService(_) => LocalEndpoints::Refuse,
                _ => LocalEndpoints::Permit,
            },
        }
    }

    /// Resolves the target of a request in absolute form. An HTTP/1 request is rewritten to origin form.
    ///
    /// # Errors
    /// The target has no host or a scheme other than `http`, or it cannot be resolved.
    async fn resolve_request_target(&self, req: &mut Request<Body>) -> Result<ResolvedTarget, Error> {
        let Some(authority) = req.uri().authority() else {
            return Err(Error::InvalidRequest(
                "this port is a proxy; expected a target such as http://web.shop.svc.cluster.local/, or CONNECT",
            ));
        };
        if req.uri().scheme().is_some_and(|scheme| *scheme != Scheme::HTTP) {
            return Err(Error::InvalidRequest(
                "the target has a scheme other than http; use CONNECT for it",
            ));
        }
        let port = authority.port_u16().unwrap_or(80);
        let target = format!("{}:{port}", authority.host()).parse();
        let target: Addr = target.map_err(|_| Error::InvalidRequest("the target is not <host> or <host>:<port>"))?;
        req.headers_mut().remove(header::PROXY_AUTHORIZATION);
        if req.version() < Version::HTTP_2 {
            http1_over_http2::set_origin_form(req);
        }
        self.outbound.resolve_target(target).await
    }

    /// Resolves the service in `l5d-dst-override`; without this header, returns the dialled destination.
    async fn resolve_override(
        &self,
        dialled: &Arc<Destination>,
        req: &mut Request<Body>,
    ) -> Result<ResolvedTarget, Error> {
        let Some(name) = req.headers_mut().remove(names::L5D_DST_OVERRIDE) else {
            return Ok((dialled.clone(), Vec::new()));
        };
        let name = parse_override(&name).ok_or(Error::InvalidRequest(
            "l5d-dst-override is not a DNS name with an optional port, such as web.shop.svc.cluster.local:8080",
        ))?;
        let name = Addr::Name(name);
        // Clients of an ingress are not trusted: the name must have a suffix that is configured for profiles.
        match self.outbound.discovery.destinations.may_have_profile(&name) {
            true => self.outbound.resolve_target(name).await,
            false => Err(Error::TargetForbidden(name)),
        }
    }
}

impl Outbound {
    /// Serves the requests of an HTTP connection. `target` is the destination named in error responses.
    pub(super) fn serve_http<'a>(
        &'a self,
        (io, protocol): (Io, HttpVersion),
        connection: HttpConnection,
        target: &'a Addr,
        drain: &'a drain::Watch,
    ) -> impl Future<Output = ()> {
        let closer = ConnectionCloser::default();
        let info = ConnectionInfo {
            direction: "outbound",
            proxy_identity: self.identity_name.clone(),
            target: target.clone(),
            client_addr: connection.client.addr.0,
            client_id: None,
            error_labeler: None,
        };
        let connection = Arc::new(connection);
        let serve = move |mut req| {
            let connection = connection.clone();
            async move {
                let span = trace::start_server_span(connection.outbound.tracer.as_ref(), &mut req);
                let mut result = connection.serve(&mut req).await;
                trace::finish(span, &result);
                if let (Ok(rsp), ErrorDetail::Omit) = (&mut result, connection.outbound.error_detail) {
                    // Error details are hidden from the application, including those from the peer's proxy.
                    headers::strip_proxy_headers(rsp.headers_mut());
                }
                result
            }
        };
        let service = self.service_stack.build(serve, self.error_detail, info, closer.clone());
        let signals = CloseSignals { closer, drain };
        server::serve(io, protocol, service, &self.server, signals).map(move |served| {
            if let Err(error) = served {
                tracing::debug!(dst = %target, %error, "HTTP connection ended");
            }
        })
    }
}

/// Parses the value of `l5d-dst-override`; the default port is 80.
fn parse_override(value: &HeaderValue) -> Option<NameAddr> {
    let text = value.to_str().ok()?;
    match text.contains(':') {
        true => text.parse().ok(),
        false => format!("{text}:80").parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_without_a_port_names_a_target_at_port_80() {
        let target = |value: &'static str| {
            let target = parse_override(&HeaderValue::from_static(value));
            target.map(|target| target.to_string())
        };
        assert_eq!(
            target("Web.shop.svc.cluster.local").as_deref(),
            Some("web.shop.svc.cluster.local:80")
        );
        assert_eq!(target("web.shop:8080").as_deref(), Some("web.shop:8080"));
        for bad in [
            "",
            "web:",
            "web:0",
            "10.0.0.1",
            "10.0.0.1:80",
            "[::1]:80",
            "we b",
            "a,b",
        ] {
            assert_eq!(target(bad), None, "{bad:?}");
        }
    }
}
