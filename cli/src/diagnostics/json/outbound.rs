//! JSON of a client policy: how traffic to one destination is routed.

use serde_json::{Value, json};
use tulle_proto::outbound::{
    Backend, FailureAccrual, FilterExtension, GrpcRoute, HttpRoute, OpaqueRoute, OutboundPolicy, ProxyProtocol,
    TlsRoute, backend, failure_accrual, filter_extension, grpc_route, http_route, opaque_route, proxy_protocol,
    tls_route,
};
use tulle_proto::{http_route as http_route_types, tls_route as sni};

use super::parts::{
    address, backoff, duration, grpc_failure, grpc_match, host, http_failure, http_match, list, metadata, object,
    optional, path_modifier, ratio, redirect, request_headers, response_headers,
};

pub(in super::super) fn policy(policy: &OutboundPolicy) -> Value {
    object([
        ("metadata", metadata(policy.metadata.as_ref())),
        ("protocol", optional(policy.protocol.as_ref(), protocol)),
    ])
}

fn protocol(protocol: &ProxyProtocol) -> Value {
    use proxy_protocol::Kind;
    let Some(kind) = &protocol.kind else { return Value::Null };
    let (name, fields) = match kind {
        Kind::Detect(detect) => (
            "detect",
            object([
                ("timeout", duration(detect.timeout.as_ref())),
                (
                    "opaque",
                    optional(detect.opaque.as_ref(), |opaque| list(&opaque.routes, opaque_route)),
                ),
                (
                    "http1",
                    optional(detect.http1.as_ref(), |http| {
                        http_fields(&http.routes, http.failure_accrual.as_ref())
                    }),
                ),
                (
                    "http2",
                    optional(detect.http2.as_ref(), |http| {
                        http_fields(&http.routes, http.failure_accrual.as_ref())
                    }),
                ),
            ]),
        ),
        Kind::Opaque(opaque) => ("opaque", object([("routes", list(&opaque.routes, opaque_route))])),
        Kind::Tls(tls) => ("tls", object([("routes", list(&tls.routes, tls_route))])),
        Kind::Http1(http) => ("http1", http_fields(&http.routes, http.failure_accrual.as_ref())),
        Kind::Http2(http) => ("http2", http_fields(&http.routes, http.failure_accrual.as_ref())),
        Kind::Grpc(grpc) => (
            "grpc",
            object([
                ("routes", list(&grpc.routes, grpc_route)),
                ("failureAccrual", optional(grpc.failure_accrual.as_ref(), accrual)),
            ]),
        ),
    };
    json!({ name: fields })
}

fn http_fields(routes: &[HttpRoute], failures: Option<&FailureAccrual>) -> Value {
    object([
        ("routes", list(routes, http_route)),
        ("failureAccrual", optional(failures, accrual)),
    ])
}

fn http_route(route: &HttpRoute) -> Value {
    use http_route::distribution::Kind;
    let backends = |backends: &http_route::Distribution| {
        let backend_json = |route_backend: &http_route::RouteBackend| {
            object([
                ("backend", optional(route_backend.backend.as_ref(), backend)),
                ("filters", list(&route_backend.filters, http_filter)),
                ("filterExtensions", list(&route_backend.filter_extensions, extension)),
            ])
        };
        match &backends.kind {
            None | Some(Kind::Empty(_)) => json!("empty"),
            Some(Kind::FirstAvailable(first)) => json!({ "firstAvailable": list(&first.backends, backend_json) }),
            Some(Kind::RandomAvailable(random)) => json!({ "randomAvailable": list(&random.backends, |weighted| {
                object([("weight", json!(weighted.weight)), ("route", optional(weighted.backend.as_ref(), backend_json))])
            }) }),
        }
    };
    let retry = |retry: &http_route::Retry| {
        let statuses = retry
            .conditions
            .as_ref()
            .map_or(&[][..], |conditions| &conditions.status_ranges);
        object([
            ("maxRetries", json!(retry.max_retries)),
            ("maxRequestBytes", json!(retry.max_request_bytes)),
            (
                "statuses",
                list(statuses, |range| json!(format!("{}-{}", range.start, range.end))),
            ),
            ("timeout", duration(retry.timeout.as_ref())),
            ("backoff", optional(retry.backoff.as_ref(), backoff)),
        ])
    };
    let rule = |rule: &http_route::Rule| {
        object([
            ("matches", list(&rule.matches, http_match)),
            ("filters", list(&rule.filters, http_filter)),
            ("filterExtensions", list(&rule.filter_extensions, extension)),
            ("backends", optional(rule.backends.as_ref(), backends)),
            ("timeouts", optional(rule.timeouts.as_ref(), timeouts)),
            ("retry", optional(rule.retry.as_ref(), retry)),
        ])
    };
    object([
        ("metadata", metadata(route.metadata.as_ref())),
        ("hosts", list(&route.hosts, host)),
        ("rules", list(&route.rules, rule)),
    ])
}

fn http_filter(filter: &http_route::Filter) -> Value {
    use http_route::filter::Kind;
    match &filter.kind {
        None => Value::Null,
        Some(Kind::FailureInjector(failure)) => json!({ "failureInjector": http_failure(failure) }),
        Some(Kind::RequestHeaderModifier(modifier)) => json!({ "requestHeaderModifier": request_headers(modifier) }),
        Some(Kind::Redirect(to)) => json!({ "redirect": redirect(to) }),
        Some(Kind::ResponseHeaderModifier(modifier)) => json!({ "responseHeaderModifier": response_headers(modifier) }),
    }
}

fn extension(extension: &FilterExtension) -> Value {
    use filter_extension::Kind;
    match &extension.kind {
        None => Value::Null,
        Some(Kind::UrlRewrite(to)) => json!({ "urlRewrite": object([
            ("host", json!(to.host)),
            ("path", optional(to.path.as_ref(), path_modifier)),
        ]) }),
        Some(Kind::Cors(cors)) => json!({ "cors": object([
            ("allowOrigins", json!(cors.allow_origins)),
            ("allowCredentials", json!(cors.allow_credentials)),
            ("allowMethods", json!(cors.allow_methods)),
            ("allowHeaders", json!(cors.allow_headers)),
            ("exposeHeaders", json!(cors.expose_headers)),
            ("maxAgeSeconds", json!(cors.max_age_seconds)),
        ]) }),
        Some(Kind::RequestMirror(mirror)) => json!({ "requestMirror": object([
            ("backend", optional(mirror.backend.as_ref(), backend)),
            ("ratio", optional(mirror.ratio.as_ref(), ratio)),
        ]) }),
    }
}

fn grpc_route(route: &GrpcRoute) -> Value {
    use grpc_route::distribution::Kind;
    let backends = |backends: &grpc_route::Distribution| {
        let backend_json = |route_backend: &grpc_route::RouteBackend| {
            object([
                ("backend", optional(route_backend.backend.as_ref(), backend)),
                ("filters", list(&route_backend.filters, grpc_filter)),
                ("filterExtensions", list(&route_backend.filter_extensions, extension)),
            ])
        };
        match &backends.kind {
            None | Some(Kind::Empty(_)) => json!("empty"),
            Some(Kind::FirstAvailable(first)) => json!({ "firstAvailable": list(&first.backends, backend_json) }),
            Some(Kind::RandomAvailable(random)) => json!({ "randomAvailable": list(&random.backends, |weighted| {
                object([("weight", json!(weighted.weight)), ("route", optional(weighted.backend.as_ref(), backend_json))])
            }) }),
        }
    };
    let retry = |retry: &grpc_route::Retry| {
        let conditions = retry.conditions.unwrap_or_default();
        let codes = [
            ("cancelled", conditions.cancelled),
            ("deadline-exceeded", conditions.deadine_exceeded),
            ("resource-exhausted", conditions.resource_exhausted),
            ("internal", conditions.internal),
            ("unavailable", conditions.unavailable),
        ];
        let on: Vec<_> = codes.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
        object([
            ("maxRetries", json!(retry.max_retries)),
            ("maxRequestBytes", json!(retry.max_request_bytes)),
            ("statuses", json!(on)),
            ("timeout", duration(retry.timeout.as_ref())),
            ("backoff", optional(retry.backoff.as_ref(), backoff)),
        ])
    };
    let rule = |rule: &grpc_route::Rule| {
        object([
            ("matches", list(&rule.matches, grpc_match)),
            ("filters", list(&rule.filters, grpc_filter)),
            ("filterExtensions", list(&rule.filter_extensions, extension)),
            ("backends", optional(rule.backends.as_ref(), backends)),
            ("timeouts", optional(rule.timeouts.as_ref(), timeouts)),
            ("retry", optional(rule.retry.as_ref(), retry)),
        ])
    };
    object([
        ("metadata", metadata(route.metadata.as_ref())),
        ("hosts", list(&route.hosts, host)),
        ("rules", list(&route.rules, rule)),
    ])
}

fn grpc_filter(filter: &grpc_route::Filter) -> Value {
    use grpc_route::filter::Kind;
    match &filter.kind {
        None => Value::Null,
        Some(Kind::FailureInjector(failure)) => json!({ "failureInjector": grpc_failure(failure) }),
        Some(Kind::RequestHeaderModifier(modifier)) => json!({ "requestHeaderModifier": request_headers(modifier) }),
    }
}

fn opaque_route(route: &OpaqueRoute) -> Value {
    use opaque_route::distribution::Kind;
    let backends = |backends: &opaque_route::Distribution| {
        let backend_json =
            |route_backend: &opaque_route::RouteBackend| optional(route_backend.backend.as_ref(), backend);
        match &backends.kind {
            None | Some(Kind::Empty(_)) => json!("empty"),
            Some(Kind::FirstAvailable(first)) => json!({ "firstAvailable": list(&first.backends, backend_json) }),
            Some(Kind::RandomAvailable(random)) => json!({ "randomAvailable": list(&random.backends, |weighted| {
                object([("weight", json!(weighted.weight)), ("backend", optional(weighted.backend.as_ref(), backend_json))])
            }) }),
        }
    };
    let filter = |filter: &opaque_route::Filter| match &filter.kind {
        None => Value::Null,
        Some(opaque_route::filter::Kind::Invalid(invalid)) => json!({ "invalid": invalid.message }),
        Some(opaque_route::filter::Kind::Forbidden(_)) => json!("forbidden"),
    };
    let rule = |rule: &opaque_route::Rule| {
        object([
            ("filters", list(&rule.filters, filter)),
            ("backends", optional(rule.backends.as_ref(), backends)),
        ])
    };
    object([
        ("metadata", metadata(route.metadata.as_ref())),
        ("rules", list(&route.rules, rule)),
    ])
}

fn tls_route(route: &TlsRoute) -> Value {
    use tls_route::distribution::Kind;
    let backends = |backends: &tls_route::Distribution| {
        let backend_json = |route_backend: &tls_route::RouteBackend| optional(route_backend.backend.as_ref(), backend);
        match &backends.kind {
            None | Some(Kind::Empty(_)) => json!("empty"),
            Some(Kind::FirstAvailable(first)) => json!({ "firstAvailable": list(&first.backends, backend_json) }),
            Some(Kind::RandomAvailable(random)) => json!({ "randomAvailable": list(&random.backends, |weighted| {
                object([("weight", json!(weighted.weight)), ("backend", optional(weighted.backend.as_ref(), backend_json))])
            }) }),
        }
    };
    let filter = |filter: &tls_route::Filter| match &filter.kind {
        None => Value::Null,
        Some(tls_route::filter::Kind::Invalid(invalid)) => json!({ "invalid": invalid.message }),
        Some(tls_route::filter::Kind::Forbidden(_)) => json!("forbidden"),
    };
    let rule = |rule: &tls_route::Rule| {
        object([
            ("filters", list(&rule.filters, filter)),
            ("backends", optional(rule.backends.as_ref(), backends)),
        ])
    };
    let name = |name: &sni::SniMatch| match &name.r#match {
        None => Value::Null,
        Some(sni::sni_match::Match::Exact(name)) => json!(name),
        Some(sni::sni_match::Match::Suffix(suffix)) => {
            let labels: Vec<_> = suffix.reverse_labels.iter().rev().map(String::as_str).collect();
            json!(format!("*.{}", labels.join(".")))
        }
    };
    object([
        ("metadata", metadata(route.metadata.as_ref())),
        ("snis", list(&route.snis, name)),
        ("rules", list(&route.rules, rule)),
    ])
}

fn backend(backend: &Backend) -> Value {
    use backend::{Kind, balance_p2c::Load, endpoint_discovery};
    let balancer = |balancer: &backend::BalanceP2c| {
        let discovery = balancer
            .discovery
            .as_ref()
            .and_then(|discovery| discovery.kind.as_ref());
        let load = optional(balancer.load.as_ref(), |load| match load {
            Load::PeakEwma(ewma) => json!({ "peakEwma": object([
                ("defaultRtt", duration(ewma.default_rtt.as_ref())),
                ("decay", duration(ewma.decay.as_ref())),
            ]) }),
            Load::PenaltyPeakEwma(ewma) => json!({ "penaltyPeakEwma": object([
                ("defaultRtt", duration(ewma.default_rtt.as_ref())),
                ("decay", duration(ewma.decay.as_ref())),
                ("penalty", duration(ewma.penalty.as_ref())),
                ("maxRetryAfter", duration(ewma.max_retry_after.as_ref())),
                ("penaltyDecay", duration(ewma.penalty_decay.as_ref())),
            ]) }),
        });
        object([
            (
                "destination",
                optional(discovery, |endpoint_discovery::Kind::Dst(dst)| json!(dst.path)),
            ),
            ("load", load),
        ])
    };
    let kind = optional(backend.kind.as_ref(), |kind| match kind {
        Kind::Forward(forward) => json!({ "forward": optional(forward.addr.as_ref(), address) }),
        Kind::Balancer(p2c) => json!({ "balancer": balancer(p2c) }),
    });
    let queue = optional(backend.queue.as_ref(), |queue| {
        object([
            ("capacity", json!(queue.capacity)),
            ("failfastTimeout", duration(queue.failfast_timeout.as_ref())),
        ])
    });
    object([
        ("metadata", metadata(backend.metadata.as_ref())),
        ("kind", kind),
        ("queue", queue),
    ])
}

fn accrual(accrual: &FailureAccrual) -> Value {
    use failure_accrual::Kind;
    optional(accrual.kind.as_ref(), |kind| match kind {
        Kind::ConsecutiveFailures(failures) => json!({ "consecutiveFailures": object([
            ("maxFailures", json!(failures.max_failures)),
            ("backoff", optional(failures.backoff.as_ref(), backoff)),
        ]) }),
        Kind::Unified(unified) => json!({ "unified": object([
            ("successRateThreshold", json!(unified.success_rate_threshold)),
            ("decay", duration(unified.decay.as_ref())),
            ("minRequests", json!(unified.min_requests)),
            ("maxConsecutiveFailures", json!(unified.max_consecutive_failures)),
            ("backoff", optional(unified.backoff.as_ref(), backoff)),
        ]) }),
    })
}

fn timeouts(timeouts: &http_route_types::Timeouts) -> Value {
    object([
        ("request", duration(timeouts.request.as_ref())),
        ("response", duration(timeouts.response.as_ref())),
        ("idle", duration(timeouts.idle.as_ref())),
    ])
}
