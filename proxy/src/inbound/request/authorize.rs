//! Authorizes requests by the policy of their port (I9), and finds requests in progress that a changed policy denies.

use std::sync::Arc;

use http::Request;
use parking_lot::Mutex;
use tokio::time::Instant;
use tulle_core::{info_limited, metrics::Labels};

use crate::{
    http::{body::Body, error::Error, lifecycle::classify, stack::filters},
    inbound::{
        metrics::{connection_labels, with_meta},
        policy::ActivePolicy,
        request::{
            context::HttpConnection,
            observe::{AuthorizedRouteMetrics, RequestMetrics},
        },
    },
    metrics::{hosts::HostSource, http::Series, routes::StatusKind},
    policy::{
        authz::{self, Authorization, Denied},
        matches::RequestAttributes,
        route,
        server::{ServerPolicy, ServerProtocol},
    },
};

impl HttpConnection {
    /// Finds the route, authorizes the client, and applies the request filters of the route and the rate limit.
    pub(super) fn authorize(&self, req: &mut Request<Body>) -> Result<RequestMetrics, Error> {
        let current = self.port_policy.current();
        let policy = &current.server_policy;
        let labels = || connection_labels(self.addrs.target, &self.tls, &policy.meta);
        let Some(http) = policy.protocol.http() else {
            return Err(Error::InvalidPolicy(
                "the changed policy of this port is not HTTP".into(),
            ));
        };
        let head = RequestAttributes::of(req.method(), req.uri(), req.headers());
        let found = current.find_route(http, head)?.ok_or_else(|| {
            if current.is_placeholder {
                return Error::PolicyUnknown;
            }
            self.inbound.families.record_route_not_found(&labels());
            Error::RouteNotFound
        })?;
        let permitted = authz::authorize(&found.rule.payload, self.addrs.client.0.ip(), self.tls.to_conn_tls());
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
            tracing::info!(client = %self.addrs.client.0, target = %self.addrs.target, "request audited");
        }
        let route_metrics = self.route_metrics(&current, found.route, authorization);
        let host_series = self.host_series(&route_metrics, req);
        let request_metrics = RequestMetrics {
            route_metrics,
            host_series,
        };
        request_metrics.route_metrics.allowed.inc();
        request_metrics.series().request();
        let refused = |error: Error| {
            request_metrics.series().response(classify::failed_outcome(&error));
            error
        };
        if !found.rule.filters.is_empty() {
            let (filters, prefix) = (&found.rule.filters, found.prefix);
            filters::apply_request_filters(filters, req, prefix).map_err(refused)?;
        }
        if let (Some(limiter), Some(limit)) = (&current.rate_limiter, &http.rate_limit)
            && let Err(which) = limiter.check(self.tls.client_id(), Instant::now())
        {
            self.inbound.families.record_rate_limited(labels(), &limit.meta, which);
            let limit = limit.meta.to_string();
            return Err(refused(Error::RateLimited { limit }));
        }
        Ok(request_metrics)
    }

    /// The metrics of requests that this authorization permits on this route.
    fn route_metrics<T>(
        &self,
        current: &Arc<ActivePolicy>,
        route: &route::Route<T>,
        authorization: &Authorization,
    ) -> Arc<AuthorizedRouteMetrics> {
        // `current` owns the route and the authorization, so their addresses identify them while `current` is held.
        let (route_ptr, authorization_ptr) = (
            std::ptr::from_ref(route).addr(),
            std::ptr::from_ref(authorization).addr(),
        );
        let mut cache = self.metrics_cache.lock();
        let cached = cache.iter().find(|(policy, route, authorization, _)| {
            Arc::ptr_eq(policy, current) && *route == route_ptr && *authorization == authorization_ptr
        });
        if let Some((.., route_metrics)) = cached {
            return route_metrics.clone();
        }
        cache
            .retain(|(policy, .., route_metrics)| Arc::ptr_eq(policy, current) || Arc::strong_count(route_metrics) > 1);
        let labels = connection_labels(self.addrs.target, &self.tls, &current.server_policy.meta);
        let labels = with_meta(labels, "route", &route.meta);
        let labels: Labels = with_meta(labels, "authz", &authorization.meta);
        let families = &self.inbound.families;
        let kind = match &current.server_policy.protocol {
            ServerProtocol::Grpc(_) => StatusKind::Grpc,
            _ => StatusKind::Http,
        };
        let route_metrics = Arc::new(AuthorizedRouteMetrics {
            route_meta: route.meta.clone(),
            authorization_meta: authorization.meta.clone(),
            allowed: families.http_allow.get(&labels),
            series: families.http.series(labels),
            route: families.route_series(kind, &current.server_policy.meta, self.addrs.target.port(), &route.meta),
            last_host_series: Mutex::default(),
        });
        cache.push((current.clone(), route_ptr, authorization_ptr, route_metrics.clone()));
        route_metrics
    }

    /// The series of a request's authority, if requests are counted by authority.
    fn host_series(&self, route_metrics: &AuthorizedRouteMetrics, req: &Request<Body>) -> Option<Arc<Series>> {
        let authorities = self.inbound.label_authorities.as_ref()?;
        let source = match self.client_id {
            Some(_) => HostSource::Trusted,
            None => HostSource::Untrusted,
        };
        let authority = authorities.get(&self.authority_label(req)?, source, |name| name.into())?;
        let mut last = route_metrics.last_host_series.lock();
        if let Some((last_authority, series)) = &*last
            && Arc::ptr_eq(last_authority, &authority)
        {
            return Some(series.clone());
        }
        let series = route_metrics.series.with("authority", &authority);
        *last = Some((authority, series.clone()));
        Some(series)
    }

    /// Applies changes of the policy to this connection: closes it gracefully once its unauthorized client is permitted a request,
    /// and returns once a request or tunnel in progress is denied.
    pub(in crate::inbound) async fn apply_policy_changes(self: Arc<Self>) {
        loop {
            let current = self.port_policy.current();
            if let Some(closer) = &self.unauthorized_closer
                && current
                    .server_policy
                    .permits_any_request(self.addrs.client.0.ip(), self.tls.to_conn_tls())
            {
                closer.notify_one();
            }
            if let Some(denied) = self.check_in_progress(&current.server_policy) {
                let labels = connection_labels(self.addrs.target, &self.tls, &current.server_policy.meta);
                self.inbound.families.record_tcp_terminated(&labels, denied);
                return tracing::info!(client = %self.addrs.client.0, %denied, "requests ended by a policy change");
            }
            self.port_policy.wait_changed(&current).await;
        }
    }

    /// Returns the reason if `policy` denies a request or tunnel in progress. The route with the same name decides; if the
    /// policy has no such route, the server's authorizations decide.
    fn check_in_progress(&self, policy: &ServerPolicy) -> Option<Denied> {
        let (client, tls) = (self.addrs.client.0.ip(), self.tls.to_conn_tls());
        let permit = |authorizations: &[Authorization]| authz::authorize(authorizations, client, tls).map(drop);
        let routes = || policy.protocol.http().into_iter().flat_map(|http| http.routes.iter());
        let cache = self.metrics_cache.lock();
        let in_progress = cache.iter().map(|(.., route_metrics)| route_metrics);
        in_progress
            .filter(|route_metrics| Arc::strong_count(route_metrics) > 1)
            .find_map(|route_metrics| {
                let same_route = routes().filter(|route| route.meta == route_metrics.route_meta);
                let rules = same_route
                    .flat_map(|route| &route.rules)
                    .map(|rule| permit(&rule.payload));
                let permitted = rules.reduce(Result::or);
                permitted.unwrap_or_else(|| permit(&policy.authorizations)).err()
            })
    }
}
