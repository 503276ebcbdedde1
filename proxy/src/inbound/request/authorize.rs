//! Authorizes requests by the policy of their port (I9), and finds requests in progress that a changed policy denies.

use std::sync::Arc;

use http::Request;
use parking_lot::Mutex;
use tokio::time::Instant;
use tulle_core::{info_limited, metrics::Labels};

use crate::{
    http::{body::Body, error::Error, headers, lifecycle::classify, stack::filters},
    inbound::{
        metrics::with_meta,
        policy::ActivePolicy,
        request::{
            context::{HttpConnection, Upstream},
            observe::{AuthorizedRoute, AuthorizedRouteMetrics, RequestMetrics},
        },
    },
    metrics::{hosts::HostSource, http::Series, routes::StatusKind},
    policy::{
        authz::{self, Authorization, Denied},
        matches::RequestAttributes,
        route,
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
        // The application may read the bytes of a tunnel as requests, which no rule would see.
        let is_connect_tunnel = headers::is_connect_tunnel(req);
        let bypasses_rules =
            is_connect_tunnel && http.has_user_defined_rules() && !found.requires_request_method(&attributes);
        let permitted = authz::authorize(
            &found.rule.action,
            self.addrs.client.0.ip(),
            self.tls.to_connection_tls(),
        );
        let permitted = permitted.and_then(|authorization| match bypasses_rules {
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
            if let Some(denied) = self.check_in_progress(&current.server_policy) {
                let families = &self.inbound.families;
                let labels = families.connection_labels(self.addrs.target, &self.tls, &current.server_policy.meta);
                families.record_tcp_terminated(&labels, denied);
                let client = self.addrs.client.0;
                let log = &self.inbound.log_limiter;
                info_limited!(log, client.ip(), "requests ended by a policy change", %client, %denied);
                return;
            }
            self.port_policy.wait_changed(&current).await;
        }
    }

    /// Returns the reason if `policy` denies a request or tunnel in progress. A request is permitted if any rule of the route with
    /// the same name permits it. If the policy has no such route, the authorizations of the server decide. A CONNECT tunnel is also
    /// denied if the rules forbid tunnels.
    fn check_in_progress(&self, policy: &ServerPolicy) -> Option<Denied> {
        let (client, tls) = (self.addrs.client.0.ip(), self.tls.to_connection_tls());
        let permit = |authorizations: &[Authorization]| authz::authorize(authorizations, client, tls).map(drop);
        let routes = || policy.protocol.http().into_iter().flat_map(|http| http.routes.iter());
        let authorized_routes = self.authorized_routes.lock();
        let mut in_progress = authorized_routes.iter().filter(|route| route.is_in_progress());
        let forbids_connect_tunnels = policy.protocol.http().is_some_and(ServerHttp::forbids_connect_tunnels);
        in_progress.find_map(|in_progress| {
            if in_progress.is_connect_tunnel && forbids_connect_tunnels {
                return Some(Denied::ConnectTunnel);
            }
            let same_route = routes().filter(|route| route.meta == in_progress.metrics.route_meta);
            let by_rule = same_route
                .flat_map(|route| &route.rules)
                .map(|rule| permit(&rule.action));
            let by_route = by_rule.reduce(Result::or);
            by_route.unwrap_or_else(|| permit(&policy.authorizations)).err()
        })
    }
}
