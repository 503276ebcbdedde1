//! Converts a client policy to protobuf.

use std::time::Duration;

use tulle_proto::convert::wire_duration;
use tulle_proto::http_route::{Ratio, Timeouts};
use tulle_proto::outbound::failure_accrual::{ConsecutiveFailures, Unified};
use tulle_proto::outbound::filter_extension::{Cors, Kind, RequestMirror, UrlRewrite};
use tulle_proto::outbound::{
    ExponentialBackoff, FailureAccrual, FilterExtension, GrpcRoute, HttpRoute, OutboundPolicy, ProxyProtocol,
    failure_accrual, grpc_route, http_route, proxy_protocol,
};

use crate::model::outbound as model;
use crate::model::outbound::{Distribution, Policy, Protocol, RetryConditions};
use crate::model::route::{Filter, GrpcMatch, HttpMatch};
use crate::policy::config::{Config, L5dHeaders};
use crate::policy::translate::{
    backend, grpc_failure, grpc_match, host, http_failure, http_match, metadata, path_modifier, redirect,
    request_headers, response_headers, stream,
};

pub(in crate::policy) fn policy(policy: &Policy, config: Config) -> OutboundPolicy {
    let accrual = || policy.accrual.as_ref().map(failure_accrual);
    let http = |routes: &[model::Route<HttpMatch>]| -> Vec<_> {
        routes.iter().map(|route| http_route(route, config)).collect()
    };
    let kind = match &policy.protocol {
        Protocol::Detect {
            timeout,
            http: routes,
            opaque,
        } => {
            let routes = http(routes);
            proxy_protocol::Kind::Detect(proxy_protocol::Detect {
                timeout: Some(wire_duration(*timeout)),
                opaque: Some(proxy_protocol::Opaque {
                    routes: vec![stream::opaque_route(opaque)],
                }),
                http1: Some(proxy_protocol::Http1 {
                    routes: routes.clone(),
                    failure_accrual: accrual(),
                }),
                http2: Some(proxy_protocol::Http2 {
                    routes,
                    failure_accrual: accrual(),
                }),
            })
        }
        Protocol::Http1(routes) => proxy_protocol::Kind::Http1(proxy_protocol::Http1 {
            routes: http(routes),
            failure_accrual: accrual(),
        }),
        Protocol::Http2(routes) => proxy_protocol::Kind::Http2(proxy_protocol::Http2 {
            routes: http(routes),
            failure_accrual: accrual(),
        }),
        Protocol::Grpc(routes) => proxy_protocol::Kind::Grpc(proxy_protocol::Grpc {
            routes: routes.iter().map(|route| grpc_route(route, config)).collect(),
            failure_accrual: accrual(),
        }),
        Protocol::Tls(routes) => proxy_protocol::Kind::Tls(proxy_protocol::Tls {
            routes: routes.iter().map(stream::tls_route).collect(),
        }),
        Protocol::Opaque(routes) => proxy_protocol::Kind::Opaque(proxy_protocol::Opaque {
            routes: routes.iter().map(stream::opaque_route).collect(),
        }),
    };
    OutboundPolicy {
        protocol: Some(ProxyProtocol { kind: Some(kind) }),
        metadata: Some(metadata(&policy.reference)),
    }
}

fn http_route(route: &model::Route<HttpMatch>, config: Config) -> HttpRoute {
    let rule = |rule: &model::Rule<HttpMatch>| http_route::Rule {
        matches: rule.matches.iter().map(http_match).collect(),
        filters: rule.filters.iter().filter_map(http_filter).collect(),
        backends: Some(http_distribution(&rule.backends)),
        request_timeout: request_timeout(rule.timeouts),
        timeouts: timeouts(rule.timeouts),
        retry: rule.retry.as_ref().and_then(http_retry),
        filter_extensions: rule_extensions(rule),
        allow_l5d_request_headers: config.l5d_headers == L5dHeaders::Honor,
    };
    HttpRoute {
        metadata: Some(metadata(&route.reference)),
        hosts: route.hosts.iter().map(host).collect(),
        rules: route.rules.iter().map(rule).collect(),
    }
}

fn http_filter(filter: &Filter) -> Option<http_route::Filter> {
    use http_route::filter::Kind;
    let kind = match filter {
        Filter::RequestHeaders(modifier) => Kind::RequestHeaderModifier(request_headers(modifier)),
        Filter::ResponseHeaders(modifier) => Kind::ResponseHeaderModifier(response_headers(modifier)),
        Filter::Redirect(to) => Kind::Redirect(redirect(to)),
        Filter::FailHttp { status, message } => Kind::FailureInjector(http_failure(*status, message)),
        Filter::UrlRewrite(_) | Filter::Cors(_) | Filter::FailGrpc { .. } | Filter::FailStream { .. } => return None,
    };
    Some(http_route::Filter { kind: Some(kind) })
}

/// Returns the mirrors of a rule, and those of its filters that Linkerd's API does not have.
fn rule_extensions<M>(rule: &model::Rule<M>) -> Vec<FilterExtension> {
    let mirror = |mirror: &model::Mirror| FilterExtension {
        kind: Some(Kind::RequestMirror(RequestMirror {
            backend: Some(backend::backend(&mirror.backend)),
            ratio: Some(Ratio {
                numerator: mirror.numerator,
                denominator: mirror.denominator,
            }),
        })),
    };
    let filters = rule.filters.iter().filter_map(filter_extension);
    filters.chain(rule.mirrors.iter().map(mirror)).collect()
}

/// Returns `None` for a filter that Linkerd's API has.
fn filter_extension(filter: &Filter) -> Option<FilterExtension> {
    let kind = match filter {
        Filter::UrlRewrite(rewrite) => Kind::UrlRewrite(UrlRewrite {
            host: rewrite.host.clone().unwrap_or_default(),
            path: rewrite.path.as_ref().map(path_modifier),
        }),
        Filter::Cors(cors) => Kind::Cors(Cors {
            allow_origins: cors.allow_origins.clone(),
            allow_credentials: cors.allow_credentials,
            allow_methods: cors.allow_methods.clone(),
            allow_headers: cors.allow_headers.clone(),
            expose_headers: cors.expose_headers.clone(),
            max_age_seconds: cors.max_age_seconds,
        }),
        _ => return None,
    };
    Some(FilterExtension { kind: Some(kind) })
}

fn http_distribution(backends: &Distribution) -> http_route::Distribution {
    use http_route::distribution::{FirstAvailable, Kind, RandomAvailable};
    let route_backend = |backend: &model::Backend| http_route::RouteBackend {
        backend: Some(backend::backend(backend)),
        filters: backend.filters.iter().filter_map(http_filter).collect(),
        request_timeout: None,
        filter_extensions: backend.filters.iter().filter_map(filter_extension).collect(),
    };
    let kind = match backends {
        Distribution::Single(backend) => Kind::FirstAvailable(FirstAvailable {
            backends: vec![route_backend(backend)],
        }),
        Distribution::Weighted(backends) => {
            let weighted = |(backend, weight): &(model::Backend, u32)| http_route::WeightedRouteBackend {
                backend: Some(route_backend(backend)),
                weight: *weight,
            };
            Kind::RandomAvailable(RandomAvailable {
                backends: backends.iter().map(weighted).collect(),
            })
        }
    };
    http_route::Distribution { kind: Some(kind) }
}

fn http_retry(retry: &model::Retry) -> Option<http_route::Retry> {
    let RetryConditions::Http(ranges) = &retry.conditions else {
        return None;
    };
    let status_ranges = ranges.iter().map(|range| http_route::retry::conditions::StatusRange {
        start: (*range.start()).into(),
        end: (*range.end()).into(),
    });
    Some(http_route::Retry {
        max_retries: retry.limit.into(),
        max_request_bytes: MAX_RETRY_REQUEST_BYTES,
        conditions: Some(http_route::retry::Conditions {
            status_ranges: status_ranges.collect(),
        }),
        timeout: retry.timeout.map(wire_duration),
        backoff: Some(retry_backoff(retry)),
    })
}

fn grpc_route(route: &model::Route<GrpcMatch>, config: Config) -> GrpcRoute {
    let rule = |rule: &model::Rule<GrpcMatch>| grpc_route::Rule {
        matches: rule.matches.iter().map(grpc_match).collect(),
        filters: rule.filters.iter().filter_map(grpc_filter).collect(),
        backends: Some(grpc_distribution(&rule.backends)),
        request_timeout: request_timeout(rule.timeouts),
        timeouts: timeouts(rule.timeouts),
        retry: rule.retry.as_ref().and_then(grpc_retry),
        filter_extensions: rule_extensions(rule),
        allow_l5d_request_headers: config.l5d_headers == L5dHeaders::Honor,
    };
    GrpcRoute {
        metadata: Some(metadata(&route.reference)),
        hosts: route.hosts.iter().map(host).collect(),
        rules: route.rules.iter().map(rule).collect(),
    }
}

/// Returns `None` for filters that messages of gRPC routes cannot express.
fn grpc_filter(filter: &Filter) -> Option<grpc_route::Filter> {
    use grpc_route::filter::Kind;
    let kind = match filter {
        Filter::RequestHeaders(modifier) => Kind::RequestHeaderModifier(request_headers(modifier)),
        Filter::FailGrpc { code, message } => Kind::FailureInjector(grpc_failure(*code, message)),
        Filter::ResponseHeaders(_)
        | Filter::Redirect(_)
        | Filter::UrlRewrite(_)
        | Filter::Cors(_)
        | Filter::FailHttp { .. }
        | Filter::FailStream { .. } => return None,
    };
    Some(grpc_route::Filter { kind: Some(kind) })
}

fn grpc_distribution(backends: &Distribution) -> grpc_route::Distribution {
    use grpc_route::distribution::{FirstAvailable, Kind, RandomAvailable};
    let route_backend = |backend: &model::Backend| grpc_route::RouteBackend {
        backend: Some(backend::backend(backend)),
        filters: backend.filters.iter().filter_map(grpc_filter).collect(),
        request_timeout: None,
        filter_extensions: backend.filters.iter().filter_map(filter_extension).collect(),
    };
    let kind = match backends {
        Distribution::Single(backend) => Kind::FirstAvailable(FirstAvailable {
            backends: vec![route_backend(backend)],
        }),
        Distribution::Weighted(backends) => {
            let weighted = |(backend, weight): &(model::Backend, u32)| grpc_route::WeightedRouteBackend {
                backend: Some(route_backend(backend)),
                weight: *weight,
            };
            Kind::RandomAvailable(RandomAvailable {
                backends: backends.iter().map(weighted).collect(),
            })
        }
    };
    grpc_route::Distribution { kind: Some(kind) }
}

fn grpc_retry(retry: &model::Retry) -> Option<grpc_route::Retry> {
    let RetryConditions::Grpc {
        cancelled,
        deadline_exceeded,
        internal,
        resource_exhausted,
        unavailable,
    } = retry.conditions
    else {
        return None;
    };
    Some(grpc_route::Retry {
        max_retries: retry.limit.into(),
        max_request_bytes: MAX_RETRY_REQUEST_BYTES,
        conditions: Some(grpc_route::retry::Conditions {
            cancelled,
            deadine_exceeded: deadline_exceeded, // (sic) the name in Linkerd's proto
            resource_exhausted,
            internal,
            unavailable,
        }),
        timeout: retry.timeout.map(wire_duration),
        backoff: Some(retry_backoff(retry)),
    })
}

/// Returns the value of the older timeout field, for proxies that do not support `Timeouts`.
fn request_timeout(timeouts: model::Timeouts) -> Option<prost_types::Duration> {
    timeouts.request.map(wire_duration)
}

fn timeouts(timeouts: model::Timeouts) -> Option<Timeouts> {
    let model::Timeouts {
        request,
        response,
        idle,
    } = timeouts;
    if request.is_none() && response.is_none() && idle.is_none() {
        return None;
    }
    Some(Timeouts {
        request: request.map(wire_duration),
        response: response.map(wire_duration),
        idle: idle.map(wire_duration),
    })
}

fn failure_accrual(accrual: &model::FailureAccrual) -> FailureAccrual {
    let kind = match *accrual {
        model::FailureAccrual::Consecutive { max_failures, backoff } => {
            failure_accrual::Kind::ConsecutiveFailures(ConsecutiveFailures {
                max_failures,
                backoff: Some(exponential_backoff(backoff)),
            })
        }
        model::FailureAccrual::Unified {
            threshold,
            window,
            min_requests,
            max_failures,
            backoff,
        } => failure_accrual::Kind::Unified(Unified {
            success_rate_threshold: threshold,
            decay: Some(wire_duration(window)),
            min_requests,
            max_consecutive_failures: max_failures,
            backoff: Some(exponential_backoff(backoff)),
        }),
    };
    FailureAccrual {
        kind: Some(kind),
        ejection: None,
    }
}

fn exponential_backoff(backoff: model::Backoff) -> ExponentialBackoff {
    ExponentialBackoff {
        min_backoff: Some(wire_duration(backoff.min)),
        max_backoff: Some(wire_duration(backoff.max)),
        jitter_ratio: backoff.jitter,
        respect_retry_after_hint: backoff.honor_retry_after,
    }
}

fn retry_backoff(retry: &model::Retry) -> ExponentialBackoff {
    let min = retry.backoff.unwrap_or(DEFAULT_RETRY_BACKOFF);
    exponential_backoff(model::Backoff {
        min,
        // Proxies reject a maximum of 0.
        max: min.max(DEFAULT_RETRY_BACKOFF).saturating_mul(10),
        jitter: 1.0,
        honor_retry_after: false,
    })
}

/// Minimum delay before a retry, if the route specifies none.
const DEFAULT_RETRY_BACKOFF: Duration = Duration::from_millis(25);

/// Maximum size of a request body that is buffered for retries, in bytes.
const MAX_RETRY_REQUEST_BYTES: u32 = 65_536;
