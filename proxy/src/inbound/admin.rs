//! Authorizes requests to the admin server by the inbound policy of its port.

use std::sync::Arc;

use http::{Request, request};
use tokio::time::Instant;
use tulle_core::{
    addr::canonical,
    admin::access::{AuthorizeFn, Caller, Tls},
};

use crate::{
    http::{body::Body, error::Error, stack::filters},
    inbound::{context::Inbound, metrics::with_meta},
    policy::{authz, matches::RequestAttributes},
    tls::status::{NoServerTls, ServerTls},
};

/// Returns the authorization function of the admin server.
pub(crate) fn authorize_fn(inbound: &Arc<Inbound>) -> AuthorizeFn {
    let inbound = inbound.clone();
    Arc::new(move |caller, head| {
        let inbound = inbound.clone();
        Box::pin(async move {
            let result = inbound.authorize_admin(&caller, head).await;
            result.map_err(|error| {
                inbound.families.record_admin_denied(error.cause());
                tracing::debug!(client = %caller.client, %error, "request to the admin server refused");
                error.status().status
            })
        })
    })
}

impl Inbound {
    async fn authorize_admin(&self, caller: &Caller, head: request::Parts) -> Result<(), Error> {
        let client = canonical(caller.client).ip();
        // A request from loopback comes from this workload, or from the inbound side of this proxy, which has authorized the client
        // by the same policy. It cannot come from a client of the gateway: a gateway does not forward to its own workload.
        if client.is_loopback() || self.local_ips.contains(&client) {
            return Ok(());
        }
        let port_policy = self.port_policies.wait_for_policy(caller.local, client).await;
        let current = port_policy.current();
        if current.is_unknown {
            let port = caller.local.port();
            self.port_policies.warn_unknown_policy(port, &port_policy, client);
            return Err(port_policy.unknown_policy_error());
        }
        let tls = match &caller.tls {
            Tls::None => ServerTls::Plain(NoServerTls::NoTlsFromRemote),
            Tls::Terminated { client_id } => ServerTls::Terminated {
                client_id: client_id.clone(),
            },
        };
        let policy = &current.server_policy;
        let labels = || self.families.connection_labels(caller.local, &tls, &policy.meta);
        let unauthorized = |why: &'static str| Error::Unauthorized {
            rule: policy.meta.to_string(),
            why,
        };
        let Some(http) = policy.protocol.http() else {
            let permitted = authz::authorize(&policy.authorizations, client, tls.to_connection_tls());
            return permitted.map(drop).map_err(|denied| {
                self.families.record_http_denied(&labels(), denied);
                unauthorized(denied.name())
            });
        };
        let found = current.find_route(http, RequestAttributes::new(&head.method, &head.uri, &head.headers))?;
        let found = found.ok_or_else(|| {
            self.families.record_route_not_found(&labels());
            Error::RouteNotFound
        })?;
        authz::authorize(&found.rule.action, client, tls.to_connection_tls()).map_err(|denied| {
            let labels = with_meta(labels(), "route", &found.route.meta);
            self.families.record_http_denied(&labels, denied);
            unauthorized(denied.name())
        })?;
        filters::apply_request_filters(
            &found.rule.filters,
            &mut Request::from_parts(head, Body::empty()),
            found.matched_prefix_len,
        )?;
        if let (Some(limiter), Some(limit)) = (&current.rate_limiter, &http.rate_limit)
            && let Err(exceeded) = limiter.check(tls.client_id(), Instant::now())
        {
            self.families.record_rate_limited(labels(), &limit.meta, exceeded);
            let limit = limit.meta.to_string();
            return Err(Error::RateLimited { limit });
        }
        Ok(())
    }
}
