//! Authorizes requests by the policy of their port (I9), and finds requests in progress that a changed policy denies.

use std::sync::{Arc, Weak};

use http::Request;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};
use tulle_core::{info_limited, metrics::Labels};

use crate::{
    http::{
        body::Body, client::HttpVersion, connection_closer::ConnectionCloser, error::Error, headers,
        lifecycle::classify, stack::filters, upgrade::tunnel::ClientTunnel,
    },
    inbound::{
        client_certificate::{self, CertificateDeadlines, REFUSED_CLIENT_GRACE, UNTRUSTED_CLOSE_TIME},
        metrics::with_meta,
        policy::ActivePolicy,
        request::{
            context::{HttpConnection, Upstream},
            observe::{AuthorizedRoute, AuthorizedRouteMetrics, RequestMetrics},
            tunnel_request::TunnelRequest,
        },
    },
    metrics::{hosts::HostSource, http::Series, routes::StatusKind},
    policy::{
        authz::{self, Authorization, Denied},
        matches::RequestAttributes,
        route::{self, RouteMatch},
        server::{ServerHttp, ServerPolicy, ServerProtocol},
    },
};

impl HttpConnection {
    /// Finds the route, authorizes the client, and applies the request filters of the route and the rate limit. On a port with
    /// user-defined rules, a CONNECT tunnel needs a rule with this method.
    pub(super) fn authorize(&self, req: &mut Request<Body>) -> Result<RequestMetrics, Error> {
        let current = self.port_policy.current();
        let policy = &current.server_policy;
        let families = &self.inbound.families;
        let labels = || families.connection_labels(self.addrs.target, &self.tls, &policy.meta);
        let Some(http) = policy.protocol.http() else {
            // Either the policy has changed, or the transport header of the client's proxy names HTTP.
            return Err(Error::InvalidPolicy("the policy of this port is not HTTP".into()));
        };
        let attributes = RequestAttributes::new(req.method(), req.uri(), req.headers());
        let found = current.find_route(http, attributes)?.ok_or_else(|| {
            if current.is_unknown {
                return self.port_policy.unknown_policy_error();
            }
            // On a gateway connection, the gateway can return this error too. Therefore it is counted later, when it becomes an
            // error response (`ErrorLabeler`).
            if matches!(self.upstream, Upstream::App(_)) {
                self.inbound.families.record_route_not_found(&labels());
            }
            Error::RouteNotFound
        })?;
        let is_connect_tunnel = headers::is_connect_tunnel(req);
        let bypasses_rules = || is_connect_tunnel && bypasses_rules(http, &found, &attributes);
        let permitted = self.certificate.check().and_then(|()| self.authorize_by_rule(&found));
        let permitted = permitted.and_then(|authorization| match bypasses_rules() {
            true => Err(Denied::ConnectTunnel),
            false => Ok(authorization),
        });
        let authorization = permitted.map_err(|denied| {
            let labels = with_meta(labels(), "route", &found.route.meta);
            self.inbound.families.record_http_denied(&labels, denied);
            let (client, target) = (self.addrs.client.0, self.addrs.target);
            info_limited!(self.inbound.log_limiter, client.ip(), "request refused", %client, %target, %denied);
            Error::Unauthorized {
                rule: policy.meta.to_string(),
                why: denied.name(),
            }
        })?;
        if authorization.meta.is_audit() {
            let (client, target) = (self.addrs.client.0, self.addrs.target);
            let client_and_port = (client.ip(), target.port());
            info_limited!(self.inbound.audit_log_limiter, client_and_port, "request audited", %client, %target);
        }
        let route_metrics = self.route_metrics(&current, found.route, authorization, is_connect_tunnel);
        let authority_series = self.authority_series(&route_metrics, req);
        let request_metrics = RequestMetrics {
            route_metrics,
            authority_series,
        };
        request_metrics.route_metrics.allowed.inc();
        request_metrics.series().record_request();
        let record_refusal = |error: Error| {
            request_metrics
                .series()
                .record_response(classify::failed_outcome(&error));
            error
        };
        if !found.rule.filters.is_empty() {
            filters::apply_request_filters(&found.rule.filters, req, found.matched_prefix_len)
                .map_err(record_refusal)?;
        }
        if let (Some(limiter), Some(limit)) = (&current.rate_limiter, &http.rate_limit)
            && let Err(exceeded) = limiter.check(self.tls.client_id(), Instant::now())
        {
            self.inbound
                .families
                .record_rate_limited(labels(), &limit.meta, exceeded);
            let limit = limit.meta.to_string();
            return Err(record_refusal(Error::RateLimited { limit }));
        }
        Ok(request_metrics)
    }

    /// Authorizes the client by the rule that its request matches.
    fn authorize_by_rule<'a>(&self, found: &RouteMatch<'a, Arc<[Authorization]>>) -> Result<&'a Authorization, Denied> {
        let client = self.addrs.client.0.ip();
        authz::authorize(&found.rule.action, client, self.tls.to_connection_tls())
    }

    /// The metrics of requests that this authorization permits on this route.
    fn route_metrics<T>(
        &self,
        current: &Arc<ActivePolicy>,
        route: &route::Route<T>,
        authorization: &Authorization,
        is_connect_tunnel: bool,
    ) -> Arc<AuthorizedRouteMetrics> {
        let (route_ptr, authorization_ptr) = (
            std::ptr::from_ref(route).addr(),
            std::ptr::from_ref(authorization).addr(),
        );
        let mut authorized_routes = self.authorized_routes.lock();
        let known = authorized_routes.iter().find(|known| {
            Arc::ptr_eq(&known.policy, current)
                && known.route_ptr == route_ptr
                && known.authorization_ptr == authorization_ptr
                && known.is_connect_tunnel == is_connect_tunnel
        });
        if let Some(known) = known {
            return known.metrics.clone();
        }
        authorized_routes.retain(|known| Arc::ptr_eq(&known.policy, current) || known.is_in_progress());
        let families = &self.inbound.families;
        let labels = families.connection_labels(self.addrs.target, &self.tls, &current.server_policy.meta);
        let labels = with_meta(labels, "route", &route.meta);
        let labels: Labels = with_meta(labels, "authz", &authorization.meta);
        let kind = match &current.server_policy.protocol {
            ServerProtocol::Grpc(_) => StatusKind::Grpc,
            _ => StatusKind::Http,
        };
        let route_metrics = Arc::new(AuthorizedRouteMetrics {
            route_meta: route.meta.clone(),
            authorization_meta: authorization.meta.clone(),
            allowed: families.http_allow.get(&labels),
            series: families.http.series(labels),
            route_series: families.route_series(kind, &current.server_policy.meta, self.addrs.target, &route.meta),
            last_authority_series: Mutex::default(),
        });
        authorized_routes.push(AuthorizedRoute {
            policy: current.clone(),
            route_ptr,
            authorization_ptr,
            is_connect_tunnel,
            metrics: route_metrics.clone(),
        });
        route_metrics
    }

    /// The series of a request's authority, if requests are counted by authority.
    fn authority_series(&self, route_metrics: &AuthorizedRouteMetrics, req: &Request<Body>) -> Option<Arc<Series>> {
        let authorities = self.inbound.authority_labels.as_ref()?;
        let source = match self.client_id {
            Some(_) => HostSource::Trusted,
            None => HostSource::Untrusted,
        };
        let authority = authorities.get(&self.authority_label(req)?, source, |name| name.into())?;
        let mut last = route_metrics.last_authority_series.lock();
        if let Some((last_authority, series)) = &*last
            && Arc::ptr_eq(last_authority, &authority)
        {
            return Some(series.clone());
        }
        let series = route_metrics.series.with_label("authority", &authority);
        *last = Some((authority, series.clone()));
        Some(series)
    }

    /// Whether a policy permits the client a request other than those of probes. A client that was not authorized when it connected
    /// has reduced limits until a policy permits it such a request.
    pub(super) fn is_authorized_by(&self, policy: &ServerPolicy) -> bool {
        policy.permits_some_request(self.addrs.client.0.ip(), self.tls.to_connection_tls())
    }

    /// Waits until a changed policy denies a request or tunnel in progress; the caller then closes the connection.
    ///
    /// Until then, closes an HTTP/2 connection of an unauthorized client gracefully as soon as the client is permitted a request.
    /// The client then reconnects, and gets the normal limits.
    pub(in crate::inbound) async fn wait_until_denied(self: Arc<Self>) {
        loop {
            let current = self.port_policy.current();
            if let Some(closer) = &self.unauthorized_closer
                && self.is_authorized_by(&current.server_policy)
            {
                closer.notify_one();
            }
            if let Some(denied) = self.check_in_progress(&current) {
                return self.record_ended(denied);
            }
            self.port_policy.wait_changed(&current).await;
        }
    }

    /// Closes the tunnel that a permitted request asks for when a changed policy denies it, or when the service behind the gateway is
    /// not exported any more. Until the tunnel ends, or its request is not accepted, it counts as in progress.
    pub(super) fn close_tunnel_when_denied(
        self: &Arc<Self>,
        client_tunnel: &mut ClientTunnel,
        request: TunnelRequest,
        route_metrics: &Arc<AuthorizedRouteMetrics>,
    ) {
        let request = Arc::new(request);
        self.register_tunnel(&request);
        let (connection, route_metrics) = (self.clone(), route_metrics.clone());
        client_tunnel.close_when(async move {
            let denied = async {
                match connection.protocol {
                    // The client's connection is now the tunnel, and no other task stops it.
                    HttpVersion::Http1 => connection.clone().wait_until_tunnel_denied().await,
                    // The tunnel is a stream of the client's connection, which is closed when the client is denied.
                    HttpVersion::Http2 => std::future::pending().await,
                }
            };
            tokio::select! {
                () = denied => {}
                () = connection.wait_not_exported() => connection.record_ended(Denied::NotExported),
            }
            drop((route_metrics, request)); // the tunnel counts as in progress until here
        });
    }

    /// Waits until the service behind the gateway is not exported any more. Never returns for connections to the application.
    async fn wait_not_exported(&self) {
        match &self.upstream {
            Upstream::Gateway(gateway, gateway_connection) => {
                gateway.wait_not_exported(&gateway_connection.name).await;
            }
            Upstream::App(_) => std::future::pending().await,
        }
    }

    /// Records a tunnel. It counts as open until `request` is dropped.
    fn register_tunnel(&self, request: &Arc<TunnelRequest>) {
        let mut open_tunnels = self.open_tunnels.lock();
        open_tunnels.retain(|tunnel| tunnel.strong_count() > 0);
        open_tunnels.push(Arc::downgrade(request));
    }

    /// As [`Self::wait_until_denied`], for a tunnel that has taken the connection. It also ends when the trust anchors no longer
    /// verify the client's certificate.
    async fn wait_until_tunnel_denied(self: Arc<Self>) {
        tokio::select! {
            () = self.clone().wait_until_denied() => {}
            () = client_certificate::wait_untrusted(self.certificate.chain.as_deref()) => {
                self.record_ended(Denied::CertificateUntrusted);
            }
        }
    }

    /// Waits until the connection must end because the client's certificate has expired, or the trust anchors no longer verify it;
    /// the caller then closes the connection.
    ///
    /// The connection first starts to close gracefully: HTTP/2 by `closer`, HTTP/1 after its next response. For an expired
    /// certificate, this is some time before the expiry. Then new requests are refused, and requests in progress have
    /// [`REFUSED_CLIENT_GRACE`] to end.
    pub(in crate::inbound) async fn wait_until_certificate_ends(self: Arc<Self>, closer: ConnectionCloser) {
        let Some((chain, deadlines)) = self.certificate.chain.as_deref().zip(self.certificate.deadlines()) else {
            return std::future::pending().await;
        };
        let denied = tokio::select! {
            () = self.end_expired(deadlines, &closer) => Denied::CertificateExpired,
            () = chain.wait_revoked() => {
                self.end_untrusted(&closer).await;
                Denied::CertificateUntrusted
            }
        };
        if self.has_request_in_progress() {
            self.record_ended(denied);
        }
    }

    /// Ends the connection of a client whose certificate expires. Open tunnels, and requests beside them, have no time limit.
    async fn end_expired(&self, deadlines: CertificateDeadlines, closer: &ConnectionCloser) {
        sleep_until(deadlines.close_at).await;
        self.certificate.set_closing();
        closer.notify_one();
        sleep_until(deadlines.expires_at).await;
        self.certificate.set_refused();
        // An HTTP/2 connection ends by itself after its last stream, because the client has got GOAWAY.
        while self.has_request_in_progress() || self.protocol == HttpVersion::Http2 {
            sleep(REFUSED_CLIENT_GRACE).await;
            if self.has_request_in_progress() && !self.has_open_tunnel() {
                return;
            }
        }
    }

    /// Ends the connection of a client whose certificate the trust anchors no longer verify. Requests are not lost if the client
    /// has a new certificate already: the last trust anchor of the former one is removed after all workloads were certified again.
    async fn end_untrusted(&self, closer: &ConnectionCloser) {
        self.certificate.set_closing();
        closer.notify_one();
        sleep(UNTRUSTED_CLOSE_TIME).await;
        self.certificate.set_refused();
        if self.has_request_in_progress() || self.protocol == HttpVersion::Http2 {
            sleep(REFUSED_CLIENT_GRACE).await;
        }
    }

    /// Whether a request or tunnel is in progress.
    pub(in crate::inbound) fn has_request_in_progress(&self) -> bool {
        self.authorized_routes
            .lock()
            .iter()
            .any(AuthorizedRoute::is_in_progress)
    }

    fn has_open_tunnel(&self) -> bool {
        self.open_tunnels.lock().iter().any(|tunnel| tunnel.strong_count() > 0)
    }

    /// Records that the connection ends, with the requests and tunnels in progress.
    fn record_ended(&self, denied: Denied) {
        let (inbound, client) = (&self.inbound, self.addrs.client.0);
        let current = self.port_policy.current();
        let meta = &current.server_policy.meta;
        let labels = inbound.families.connection_labels(self.addrs.target, &self.tls, meta);
        inbound.families.record_tcp_terminated(&labels, denied);
        info_limited!(inbound.log_limiter, client.ip(), "HTTP connection closed", %client, %denied);
    }

    /// Returns the reason if a policy denies a request or tunnel in progress. A request is permitted if any rule of the route with
    /// the same name permits it. If the policy has no such route, the authorizations of the server decide. A CONNECT tunnel is also
    /// denied if the rules forbid tunnels, and each tunnel if its request would now be refused.
    fn check_in_progress(&self, current: &ActivePolicy) -> Option<Denied> {
        let policy = &current.server_policy;
        let (client, tls) = (self.addrs.client.0.ip(), self.tls.to_connection_tls());
        let permit = |authorizations: &[Authorization]| authz::authorize(authorizations, client, tls).map(drop);
        let routes = || policy.protocol.http().into_iter().flat_map(|http| http.routes.iter());
        let authorized_routes = self.authorized_routes.lock();
        let mut in_progress = authorized_routes.iter().filter(|route| route.is_in_progress());
        let forbids_connect_tunnels = policy.protocol.http().is_some_and(ServerHttp::forbids_connect_tunnels);
        let denied = in_progress.find_map(|in_progress| {
            if in_progress.is_connect_tunnel && forbids_connect_tunnels {
                return Some(Denied::ConnectTunnel);
            }
            let same_route = routes().filter(|route| route.meta == in_progress.metrics.route_meta);
            let by_rule = same_route
                .flat_map(|route| &route.rules)
                .map(|rule| permit(&rule.action));
            let by_route = by_rule.reduce(Result::or);
            by_route.unwrap_or_else(|| permit(&policy.authorizations)).err()
        });
        denied.or_else(|| self.check_tunnels(current))
    }

    /// Returns the reason if the request of an open tunnel would now be refused.
    fn check_tunnels(&self, current: &ActivePolicy) -> Option<Denied> {
        let http = current.server_policy.protocol.http()?;
        let open_tunnels = self.open_tunnels.lock();
        let mut requests = open_tunnels.iter().filter_map(Weak::upgrade);
        requests.find_map(|request| self.check_tunnel(&request, current, http).err())
    }

    /// # Errors
    /// No rule matches the request, its rule does not permit the client, or a filter of the rule refuses the request.
    fn check_tunnel(&self, request: &TunnelRequest, current: &ActivePolicy, http: &ServerHttp) -> Result<(), Denied> {
        let attributes = request.attributes();
        let found = current.find_route(http, attributes).ok().flatten();
        let found = found.ok_or(Denied::TunnelRequest)?;
        self.authorize_by_rule(&found)?;
        if request.is_connect_tunnel && bypasses_rules(http, &found, &attributes) {
            return Err(Denied::ConnectTunnel);
        }
        let filtered =
            filters::apply_request_filters(&found.rule.filters, &mut request.to_request(), found.matched_prefix_len);
        filtered.map(drop).map_err(|_| Denied::TunnelRequest)
    }
}

/// Whether the bytes of a CONNECT tunnel would bypass user-defined rules: the application may read them as requests, which no rule
/// would see. `found` is the rule for the CONNECT request.
fn bypasses_rules<T>(http: &ServerHttp, found: &RouteMatch<'_, T>, attributes: &RequestAttributes<'_>) -> bool {
    http.has_user_defined_rules() && !found.requires_request_method(attributes)
}
