//! Requests to the admin server, judged by the policy of its port as those to the application are by theirs.

use std::sync::Arc;

use http::{Request, request};
use tokio::time::Instant;
use tulle_core::{
    addr::canonical,
    admin::access::{Caller, Guard, Tls},
};

use crate::{
    http::{body::Body, error::Error, filters},
    inbound::{
        Inbound,
        metrics::{connection_labels, with_meta},
    },
    policy::{authz, matches::Head},
    tls::status::{ServerTls, WhyServerPlain},
};

/// Judges requests to the admin server.
pub(crate) fn guard(inbound: &Arc<Inbound>) -> Guard {
    let inbound = inbound.clone();
    Arc::new(move |caller, head| {
        let inbound = inbound.clone();
        Box::pin(async move {
            let judged = inbound.judge(&caller, head).await;
            judged.map_err(|error| {
                inbound.families.admin_refused(error.cause());
                tracing::debug!(client = %caller.client, %error, "request to the admin server refused");
                error.answer().status
            })
        })
    })
}

impl Inbound {
    /// Whether a client may have what the admin server shows.
    async fn judge(&self, caller: &Caller, head: request::Parts) -> Result<(), Error> {
        let client = canonical(caller.client).ip();
        // This workload itself; or a client that has come through this proxy, which has asked the same policy.
        if client.is_loopback() || self.ips.contains(&client) {
            return Ok(());
        }
        let port = self.ports.get(caller.local.port());
        self.ports.wait_until_known(&port).await;
        let current = port.current();
        if current.is_unknown {
            self.ports.log_unknown(caller.local.port());
            return Err(Error::PolicyUnknown);
        }
        let tls = match &caller.tls {
            Tls::None => ServerTls::Plain(WhyServerPlain::NoTlsFromRemote),
            Tls::Terminated { client_id } => ServerTls::Terminated {
                client_id: client_id.clone(),
            },
        };
        let policy = &current.policy;
        let labels = || connection_labels(caller.local, &tls, &policy.meta);
        let unauthorized = |why: &'static str| Error::Unauthorized {
            rule: policy.meta.to_string(),
            why,
        };
        let Some(http) = policy.protocol.http() else {
            let permitted = authz::authorize(&policy.authorizations, client, tls.proven());
            return permitted.map(drop).map_err(|denied| {
                self.families.http_denied(&labels(), denied);
                unauthorized(denied.name())
            });
        };
        let found = current.find(http, Head::of(&head.method, &head.uri, &head.headers))?;
        let found = found.ok_or_else(|| {
            self.families.no_route(&labels());
            Error::RouteNotFound
        })?;
        authz::authorize(&found.rule.payload, client, tls.proven()).map_err(|denied| {
            let labels = with_meta(labels(), "route", &found.route.meta);
            self.families.http_denied(&labels, denied);
            unauthorized(denied.name())
        })?;
        filters::apply(
            &found.rule.filters,
            &mut Request::from_parts(head, Body::empty()),
            found.prefix,
        )?;
        if let (Some(limiter), Some(limit)) = (&current.limiter, &http.rate_limit)
            && let Err(which) = limiter.check(tls.client_id(), Instant::now())
        {
            self.families.over_limit(labels(), &limit.meta, which);
            let limit = limit.meta.to_string();
            return Err(Error::RateLimited { limit });
        }
        Ok(())
    }
}
