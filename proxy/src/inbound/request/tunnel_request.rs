//! Requests that ask for a tunnel, such as an upgrade to WebSocket. While a tunnel is open, its request is checked again whenever the
//! policy changes.

use std::{future::pending, sync::Arc};

use http::{HeaderMap, HeaderValue, Method, Request};

use crate::{
    http::{body::Body, client::HttpVersion, error::Error, headers, upgrade::tunnel::ClientTunnel},
    inbound::{
        client_certificate,
        policy::ActivePolicy,
        request::{
            context::{HttpConnection, Upstream},
            observe::{self, AuthorizedRouteMetrics},
        },
    },
    policy::{authz::Denied, filter, matches::RequestAttributes, route::RouteMatch, server::ServerHttp},
};

/// A copy of the head of a permitted request that asks for a tunnel, from before the filters. While this copy exists, the tunnel
/// counts as in progress.
///
/// Rules that match any header can be added while the tunnel is open, so all headers are kept. All bytes are copied, because slices
/// would keep the buffer of the connection allocated.
pub(super) struct TunnelRequest {
    method: Method,
    authority: Option<Box<str>>,
    path: Box<str>,
    query: Option<Box<str>>,
    headers: HeaderMap,
    is_connect_tunnel: bool,
    route_metrics: Arc<AuthorizedRouteMetrics>,
}

impl TunnelRequest {
    pub(super) fn new(req: &Request<Body>, route_metrics: Arc<AuthorizedRouteMetrics>) -> Self {
        let RequestAttributes {
            method,
            authority,
            path,
            query,
            headers,
        } = RequestAttributes::new(req.method(), req.uri(), req.headers());
        let copy = |value: &HeaderValue| HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone());
        Self {
            method: method.clone(),
            authority: authority.map(Into::into),
            path: path.into(),
            query: query.map(Into::into),
            headers: headers
                .iter()
                .map(|(name, value)| (name.clone(), copy(value)))
                .collect(),
            is_connect_tunnel: headers::is_connect_tunnel(req),
            route_metrics,
        }
    }

    fn attributes(&self) -> RequestAttributes<'_> {
        RequestAttributes {
            method: &self.method,
            authority: self.authority.as_deref(),
            path: &self.path,
            query: self.query.as_deref(),
            headers: &self.headers,
        }
    }
}

impl HttpConnection {
    /// Sends a request that asks for a tunnel.
    ///
    /// # Errors
    /// The error of `sending`, or a changed policy denies the request before its response.
    pub(super) async fn send_unless_denied<T>(
        &self,
        request: &TunnelRequest,
        sending: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        tokio::select! {
            result = sending => result,
            denied = self.wait_until_tunnel_denied(request) => {
                let policy = &self.port_policy.current().server_policy;
                Err(self.refuse(policy, &request.route_metrics.route_meta, denied))
            }
        }
    }

    /// Treats a request whose response has opened no tunnel as a request without a tunnel: a policy that denies it then closes the
    /// connection. `metrics` are the metrics that the request holds; they are replaced.
    ///
    /// # Errors
    /// The policy has changed in the meantime, and denies the request.
    pub(super) fn continue_without_tunnel(
        &self,
        request: Arc<TunnelRequest>,
        metrics: &mut Arc<AuthorizedRouteMetrics>,
    ) -> Result<(), Error> {
        // An open tunnel holds its request.
        if Arc::strong_count(&request) > 1 {
            return Ok(());
        }
        drop(request);
        *metrics = observe::metrics_without_tunnel(&mut self.authorized_routes.lock(), metrics);
        // Later changes are noticed by `wait_until_denied`.
        let policy = &self.port_policy.current().server_policy;
        let checked = self.check_route(policy, &metrics.route_meta);
        checked.map_err(|denied| self.refuse(policy, &metrics.route_meta, denied))
    }

    /// Closes the tunnel when a changed policy denies its request, or when the service behind the gateway is not exported any more. A
    /// tunnel over HTTP/1, which has taken the client's connection, is also closed when the trust anchors no longer verify the client's
    /// certificate.
    pub(super) fn close_tunnel_when_denied(
        self: &Arc<Self>,
        client_tunnel: &mut ClientTunnel,
        request: &Arc<TunnelRequest>,
    ) {
        let (connection, request) = (self.clone(), request.clone());
        client_tunnel.close_when(async move {
            let untrusted = async {
                match connection.protocol {
                    HttpVersion::Http1 => {
                        client_certificate::wait_untrusted(connection.certificate.chain.as_deref()).await;
                    }
                    HttpVersion::Http2 => pending().await,
                }
            };
            let denied = tokio::select! {
                denied = connection.wait_until_tunnel_denied(&request) => denied,
                () = untrusted => Denied::CertificateUntrusted,
                () = connection.wait_not_exported() => Denied::NotExported,
            };
            connection.record_ended(denied);
        });
    }

    /// Waits until the service behind the gateway is not exported any more. Never returns for connections to the application.
    async fn wait_not_exported(&self) {
        match &self.upstream {
            Upstream::Gateway(gateway, gateway_connection) => {
                gateway.wait_not_exported(&gateway_connection.name).await;
            }
            Upstream::App(_) => pending().await,
        }
    }

    /// Waits until a changed policy denies the request of a tunnel without closing the whole connection.
    async fn wait_until_tunnel_denied(&self, request: &TunnelRequest) -> Denied {
        loop {
            let current = self.port_policy.current();
            if !self.is_closed_with_connection(request, &current)
                && let Err(denied) = self.check_tunnel(request, &current)
            {
                return denied;
            }
            self.port_policy.wait_changed(&current).await;
        }
    }

    /// Whether this policy closes the client's connection, and so the tunnel: see [`Self::wait_until_denied`].
    fn is_closed_with_connection(&self, request: &TunnelRequest, current: &ActivePolicy) -> bool {
        let policy = &current.server_policy;
        self.closes_connection_with_tunnels(policy)
            && self.check_route(policy, &request.route_metrics.route_meta).is_err()
    }

    /// # Errors
    /// No rule matches the request, its rule does not permit the client, or a filter of the rule refuses all requests.
    fn check_tunnel(&self, request: &TunnelRequest, current: &ActivePolicy) -> Result<(), Denied> {
        let policy = &current.server_policy;
        let Some(http) = policy.protocol.http() else {
            return self.check_route(policy, &request.route_metrics.route_meta);
        };
        if request.is_connect_tunnel && http.forbids_connect_tunnels() {
            return Err(Denied::ConnectTunnel);
        }
        let attributes = request.attributes();
        let found = current.find_route(http, attributes).ok().flatten();
        let found = found.ok_or(Denied::TunnelRequest)?;
        self.authorize_by_rule(&found)?;
        if request.is_connect_tunnel && bypasses_rules(http, &found, &attributes) {
            return Err(Denied::ConnectTunnel);
        }
        match filter::refuses_all_requests(&found.rule.filters) {
            true => Err(Denied::TunnelRequest),
            false => Ok(()),
        }
    }
}

/// Whether the bytes of a CONNECT tunnel would bypass user-defined rules: the application may read them as requests, which no rule
/// would see. `found` is the rule for the CONNECT request.
pub(super) fn bypasses_rules<T>(
    http: &ServerHttp,
    found: &RouteMatch<'_, T>,
    attributes: &RequestAttributes<'_>,
) -> bool {
    http.has_user_defined_rules() && !found.requires_request_method(attributes)
}
