//! Authorizes requests by the policy of their port (I9), and finds requests in progress that a changed policy denies.

use std::sync::Arc;

use http::Request;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};
use tulle_core::{info_limited, metrics::Labels};

use crate::{
    http::{
        body::Body, client::HttpVersion, connection_closer::ConnectionCloser, error::Error, headers,
        lifecycle::classify, stack::filters,
    },
    inbound::{
        client_certificate::{CertificateDeadlines, REFUSED_CLIENT_GRACE, UNTRUSTED_CLOSE_TIME},
        metrics::with_meta,
        policy::ActivePolicy,
        request::{
            context::{HttpConnection, Upstream},
            observe::{AuthorizedRoute, AuthorizedRouteMetrics, RequestKind, RequestMetrics},
            tunnel_request::{self, TunnelRequest},
        },
    },
    metrics::{hosts::HostSource, http::Series, routes::StatusKind},
    policy::{
        authz::{self, Authorization, Denied},
        matches::RequestAttributes,
        meta::Meta,
        route::{self, RouteMatch},
        server::{ServerHttp, ServerPolicy, ServerProtocol},
    },
};

impl HttpConnection {
    /// Finds the route, authorizes the client, and applies the request filters of the route and the rate limit. On a port with
    /// user-defined rules, a CONNECT tunnel needs a rule with this method. If the request asks for a tunnel, returns its head too.
    pub(super) fn authorize(
        &self,
        req: &mut Request<Body>,
        asks_for_tunnel: bool,
    ) -> Result<(RequestMetrics, Option<Arc<TunnelRequest>>), Error> {
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
        let bypasses_rules = || is_connect_tunnel && tunnel_request::bypasses_rules(http, &found, &attributes);
        let permitted = self.certificate.check().and_then(|()| self.authorize_by_rule(&found));
        let permitted = permitted.and_then(|authorization| match bypasses_rules() {
            true => Err(Denied::ConnectTunnel),
            false => Ok(authorization),
        });
        let authorization = permitted.map_err(|denied| self.refuse(policy, &found.route.meta, denied))?;
        if authorization.meta.is_audit() {
            let (client, target) = (self.addrs.client.0, self.addrs.target);
            let client_and_port = (client.ip(), target.port());
            info_limited!(self.inbound.audit_log_limiter, client_and_port, "request audited", %client, %target);
        }
        let kind = RequestKind::new(asks_for_tunnel, is_connect_tunnel);
        let route_metrics = self.route_metrics(&current, found.route, authorization, kind);
        // Before the filters, which may change the request.
        let tunnel_request = asks_for_tunnel.then(|| Arc::new(TunnelRequest::new(req, route_metrics.clone())));
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
        Ok((request_metrics, tunnel_request))
    }

    /// Counts and logs the refusal of a request on this route, and returns the error of its response.
    pub(super) fn refuse(&self, policy: &ServerPolicy, route_meta: &Meta, denied: Denied) -> Error {
        let inbound = &self.inbound;
        let (client, target) = (self.addrs.client.0, self.addrs.target);
        let labels = inbound.families.connection_labels(target, &self.tls, &policy.meta);
        inbound
            .families
            .record_http_denied(&with_meta(labels, "route", route_meta), denied);
        info_limited!(inbound.log_limiter, client.ip(), "request refused", %client, %target, %denied);
        Error::Unauthorized {
            rule: policy.meta.to_string(),
            why: denied.name(),
        }
    }

    /// Authorizes the client by the rule that its request matches.
    pub(super) fn authorize_by_rule<'a>(
        &self,
        found: &RouteMatch<'a, Arc<[Authorization]>>,
    ) -> Result<&'a Authorization, Denied> {
        let client = self.addrs.client.0.ip();
        authz::authorize(&found.rule.action, client, self.tls.to_connection_tls())
    }

    /// The metrics of requests that this authorization permits on this route.
    fn route_metrics<T>(
        &self,
        current: &Arc<ActivePolicy>,
        route: &route::Route<T>,
        authorization: &Authorization,
        kind: RequestKind,
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
                && known.kind == kind
        });
        if let Some(known) = known {
            return known.metrics.clone();
        }
        authorized_routes.retain(|known| Arc::ptr_eq(&known.policy, current) || known.is_in_progress());
        let families = &self.inbound.families;
        let labels = families.connection_labels(self.addrs.target, &self.tls, &current.server_policy.meta);
        let labels = with_meta(labels, "route", &route.meta);
        let labels: Labels = with_meta(labels, "authz", &authorization.meta);
        let status_kind = match &current.server_policy.protocol {
            ServerProtocol::Grpc(_) => StatusKind::Grpc,
            _ => StatusKind::Http,
        };
        let route_metrics = Arc::new(AuthorizedRouteMetrics {
            route_meta: route.meta.clone(),
            authorization_meta: authorization.meta.clone(),
            allowed: families.http_allow.get(&labels),
            series: families.http.series(labels),
            route_series: families.route_series(
                status_kind,
                &current.server_policy.meta,
                self.addrs.target,
                &route.meta,
            ),
            last_authority_series: Mutex::default(),
        });
        authorized_routes.push(AuthorizedRoute {
            policy: current.clone(),
            route_ptr,
            authorization_ptr,
            kind,
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

    /// Waits until a changed policy denies a request in progress, or the client of a tunnel over HTTP/2 may send no request any more;
    /// the caller then closes the connection.
    ///
    /// Meanwhile, starts to close the HTTP/2 connection of an unauthorized client gracefully when a policy permits this client a
    /// request. The client then reconnects, and gets the normal limits.
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
            () = chain.wait_untrusted() => {
                self.end_untrusted(&closer).await;
                Denied::CertificateUntrusted
            }
        };
        if self.has_request_in_progress() {
            self.record_ended(denied);
        }
    }

    /// Ends the connection of a client whose certificate expires. While the connection has an open tunnel, neither the tunnel nor
    /// the requests in progress have a time limit.
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

    /// Ends the connection of a client whose certificate the trust anchors no longer verify. No request is lost if the client has a
    /// new certificate already. That is the normal case: a trust anchor is removed only after all workloads have certificates that
    /// do not need it.
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
        self.authorized_routes
            .lock()
            .iter()
            .any(|route| route.kind == RequestKind::Tunnel && route.is_in_progress())
    }

    /// Records that a connection is closed although requests are in progress, or that a tunnel is closed.
    pub(super) fn record_ended(&self, denied: Denied) {
        let (inbound, client) = (&self.inbound, self.addrs.client.0);
        let current = self.port_policy.current();
        let meta = &current.server_policy.meta;
        let labels = inbound.families.connection_labels(self.addrs.target, &self.tls, meta);
        inbound.families.record_tcp_terminated(&labels, denied);
        info_limited!(inbound.log_limiter, client.ip(), "HTTP connection or tunnel closed", %client, %denied);
    }

    /// Returns the reason if the policy denies a request in progress, as [`Self::check_route`] decides. Tunnels count only if
    /// [`Self::closes_connection_with_tunnels`].
    fn check_in_progress(&self, current: &ActivePolicy) -> Option<Denied> {
        let policy = &current.server_policy;
        let includes_tunnels = self.closes_connection_with_tunnels(policy);
        let forbids_connect = policy.protocol.http().is_some_and(ServerHttp::forbids_connect_tunnels);
        let authorized_routes = self.authorized_routes.lock();
        let mut in_progress = authorized_routes.iter().filter(|route| route.is_in_progress());
        in_progress.find_map(|in_progress| match in_progress.kind {
            RequestKind::Tunnel if !includes_tunnels => None,
            RequestKind::Connect if forbids_connect => Some(Denied::ConnectTunnel),
            _ => self.check_route(policy, &in_progress.metrics.route_meta).err(),
        })
    }

    /// Whether the policy ends tunnels by closing the whole connection. That is so for HTTP/2 if the client may send no request any
    /// more. Otherwise only the tunnel is closed. A tunnel over HTTP/1 has taken over the client's connection, and its own task
    /// closes it.
    pub(super) fn closes_connection_with_tunnels(&self, policy: &ServerPolicy) -> bool {
        self.protocol == HttpVersion::Http2 && !self.is_authorized_by(policy)
    }

    /// A request on a route is permitted if any rule of the route with the same name permits it. If the policy has no such route, the
    /// authorizations of the server decide.
    pub(super) fn check_route(&self, policy: &ServerPolicy, route_meta: &Meta) -> Result<(), Denied> {
        let (client, tls) = (self.addrs.client.0.ip(), self.tls.to_connection_tls());
        let permit = |authorizations: &[Authorization]| authz::authorize(authorizations, client, tls).map(drop);
        let routes = policy.protocol.http().into_iter().flat_map(|http| http.routes.iter());
        let by_rule = routes
            .filter(|route| *route.meta == *route_meta)
            .flat_map(|route| &route.rules)
            .map(|rule| permit(&rule.action));
        let by_route = by_rule.reduce(Result::or);
        by_route.unwrap_or_else(|| permit(&policy.authorizations))
    }
}
